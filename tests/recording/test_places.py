"""Places of tokens: extents of grids that do not tile the input, stages of odd sizes, tokens that are not in order."""

import dataclasses

import numpy as np
import pytest
import timm
import torch
from torch import nn

from tests.small import Custom, jitter, since
from vitflow import Explainer, record_attention
from vitflow.images.geometry import Span
from vitflow.methods import TokenLayout
from vitflow.methods.staged_rollout import carry

CONFIG = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0, "crop_mode": "squash"}
TINY = {"depth": 2, "embed_dim": 48, "num_heads": 3, "num_classes": 4}


def vit(**options) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **{**TINY, **options}).eval()


def siglip(side: int, patch: int, library: str = "Siglip", **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    tower = "" if library == "Dinov2" else "Vision"
    config = getattr(transformers, f"{library}{tower}Config")(image_size=side, patch_size=patch, **small | options)
    return getattr(transformers, f"{library}{tower}Model")(config).eval()


def changed(model: nn.Module, images=lambda images: images, tokens=lambda tokens: tokens) -> nn.Module:
    """A model that changes its input, or the tokens of its patches, first."""
    model.norm_pre = Custom(lambda _, given: tokens(given))
    return Custom(lambda self, given: self.vit(images(given)), vit=model)


# Model, size of its input, and first pixel and pixels per cell of its rows and columns.
EXTENTS = {
    "SigLIP, 27 × 14 of 384": (lambda: siglip(384, 14), (384, 384), (0, 14), (0, 14)),
    "DINOv2, 7 × 14 of 100": (lambda: siglip(100, 14, "Dinov2", mlp_ratio=1), (100, 100), (0, 14), (0, 14)),
    "padded at the end": (lambda: vit(dynamic_img_size=True, dynamic_img_pad=True), (70, 101), (0, 16), (0, 16)),
    "cropped inside": (lambda: changed(vit(img_size=64), lambda x: x[..., 5:69, 7:71]), (74, 72), (5, 16), (7, 16)),
    "padded inside": (
        lambda: changed(vit(img_size=80), lambda x: nn.functional.pad(x, (9, 7, 6, 10))),
        (64, 64),
        (-6, 16),
        (-9, 16),
    ),
    "halved inside": (
        lambda: changed(vit(img_size=64), lambda x: nn.functional.avg_pool2d(x, 2)),
        (128, 128),
        (0, 32),
        (0, 32),
    ),
}


@pytest.mark.parametrize(("build", "size", "rows", "cols"), EXTENTS.values(), ids=EXTENTS)
def test_a_patch_is_drawn_clicked_and_occluded_at_its_pixels(build, size, rows, cols):
    explainer = Explainer(build(), data_config={**CONFIG, "input_size": (3, *size)})
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    saliency = explainer.explain(image, method="rollout")
    grid = saliency.grid.shape
    for place in ((0, 0), (grid[0] - 1, grid[1] - 1), (grid[0] // 2, 1)):
        one = np.zeros_like(saliency.grid)
        one[place] = 1
        heat = dataclasses.replace(saliency, grid=one).heatmap
        box = dataclasses.replace(saliency, grid=one, options={"patch": place}).patch_box
        for axis, (start, step) in enumerate((rows, cols)):
            begin, end = start + step * place[axis], start + step * (place[axis] + 1)
            inside = max(begin, 0), min(end, size[axis])
            assert (box[1 - axis], box[3 - axis]) == inside
            if 0 < place[axis] < grid[axis] - 1:  # at the edges the value is constant outwards
                line = np.nansum(heat, axis=1 - axis)
                assert abs((line * (np.arange(size[axis]) + 0.5)).sum() / line.sum() - (begin + end) / 2) < 0.5
        left, top, right, bottom = box
        assert saliency.placement.patch_at((top + bottom) / 2, (left + right) / 2, grid) == place
    reach = [
        min(start + step * count, side) for (start, step), count, side in zip((rows, cols), grid, size, strict=True)
    ]
    seen = np.zeros(size, bool)
    seen[max(rows[0], 0) : int(reach[0]), max(cols[0], 0) : int(reach[1])] = True
    assert (np.isfinite(saliency.heatmap) == seen).all()
    # The gradient of the pixels is summed over the pixels of each token.
    if explainer.num_classes:
        sums = explainer.explain(image, method="input_gradient")
        pixels = explainer.pixels(image).requires_grad_()
        explainer.model(pixels)[0, sums.target].backward()
        row, col = grid[0] // 2, 1
        cells = [slice(start + step * n, start + step * (n + 1)) for (start, step), n in ((rows, row), (cols, col))]
        expected = pixels.grad[0].abs().sum(dim=0)[tuple(cells)].sum()
        assert float(sums.grid[row, col]) == pytest.approx(float(expected), rel=1e-4)


def alone(model: nn.Module) -> nn.Module:
    return Custom(lambda self, images: self.model(images), model=model)


SMALL = {"depth": 2, "embed_dim": 96, "num_heads": 4, "num_classes": 5}
# Models of other libraries' structure, also inside another module, and the size of their input.
UNDECLARED = {
    "NaFlex": (lambda: timm.create_model("naflexvit_base_patch16_gap", **SMALL), (64, 96)),
    "NaFlex inside": (lambda: alone(timm.create_model("naflexvit_base_patch16_gap", **SMALL)), (64, 96)),
    "Gemma 4": (lambda: timm.create_model("gemma4_vit_167m", **SMALL), (96, 144)),
    "a user's": (
        lambda: Custom(
            lambda self, x: self.blocks(self.stem(x).flatten(2).mT).mean(1),
            stem=nn.Conv2d(3, 12, 16, 16),
            blocks=nn.Sequential(*(nn.TransformerEncoderLayer(12, 3, 12, batch_first=True) for _ in range(2))),
        ),
        (64, 96),
    ),
}


@pytest.mark.parametrize(
    ("build", "size"),
    [
        pytest.param(*given, marks=since("timm", "1.0.27") if name == "Gemma 4" else (), id=name)
        for name, given in UNDECLARED.items()
    ],
)
def test_methods_without_attention_use_the_patches_of_models_that_declare_no_grid(build, size):
    torch.manual_seed(0)
    explainer = Explainer(jitter(build(), 0.05), data_config={**CONFIG, "input_size": (3, *size)})
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    pixels = explainer.pixels(image).requires_grad_()
    explainer.model(pixels)[0, 1].backward()
    expected = pixels.grad[0].abs().sum(0).unflatten(0, (-1, 16)).unflatten(2, (-1, 16)).sum((1, 3))
    actual = explainer.explain(image, method="input_gradient", target=1).grid
    np.testing.assert_allclose(actual, expected, rtol=1e-3)
    assert explainer.explain(image, method="occlusion", target=1).grid.shape == expected.shape
    assert explainer.explain(image, method="rollout").grid.shape == expected.shape


ORDER = torch.randperm(49, generator=torch.Generator().manual_seed(1))
# Models that are refused, and a word of the reason.
REFUSED = {
    "flipped": (
        lambda: changed(vit(img_size=112), lambda x: x.flip(3)),
        112,
        "around column 6.5 of the grid: tokens are in another order",
    ),
    "rolled by half a patch": (lambda: changed(vit(img_size=112), lambda x: x.roll(8, 3)), 112, "other"),
    "in another order": (
        lambda: changed(vit(img_size=112), tokens=lambda x: torch.cat([x[:, :1], x[:, 1:][:, ORDER]], 1)),
        112,
        "another order",
    ),
    "two swapped": (
        lambda: changed(vit(img_size=112), tokens=lambda x: x[:, [*range(17), 18, 17, *range(19, 50)]]),
        112,
        "another order",
    ),
    "one dropped": (
        lambda: changed(vit(img_size=112), tokens=lambda x: x * (torch.arange(50) != 7)[:, None]),
        112,
        "dropped",
    ),
    "four in a row": (
        lambda: changed(
            vit(img_size=224), tokens=lambda x: torch.cat([x[:, :1], x[:, 1:].unflatten(1, (-1, 4)).mean(2)], 1)
        ),
        224,
        "another order",
    ),
}


@pytest.mark.parametrize(("build", "side", "reason"), REFUSED.values(), ids=REFUSED)
def test_tokens_that_are_not_in_order_are_refused_by_the_measured_reason(build, side, reason):
    with record_attention(build()) as trace, torch.no_grad():
        trace.model(torch.randn(1, 3, side, side))
    assert "misplaced" in trace.refusal and reason in trace.refusal and "crop" not in trace.refusal


STAGES = [((116, 204), 4), ((240, 240), 4), ((60, 300), 4)]


@pytest.mark.parametrize(("size", "patch"), STAGES)
def test_stages_cover_the_cells_that_they_were_merged_from(size, patch):
    torch.manual_seed(0)
    options = {"img_size": size, "depths": (1, 1, 1, 1), "embed_dim": 16, "num_heads": (1, 2, 2, 4), "num_classes": 3}
    model = timm.create_model("swin_tiny_patch4_window7_224", **options).eval()
    explainer = Explainer(model, data_config={**CONFIG, "input_size": (3, *size)})
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    trace = explainer.record(image)
    for stage, layer in enumerate(trace.layers):
        step = patch * 2**stage
        layout = layer.tokens.queries
        assert (layout.rows, layout.cols) == tuple(-(-side // step) for side in size)
        assert layout.extent == tuple(Span(0, step, 0, side) for side in size)
    # Grad-CAM of the last stage is drawn on cells of its stride.
    saliency = explainer.explain(image, method="gradcam")
    assert saliency.placement.area(saliency.grid.shape)[2:] == tuple(32 * count for count in saliency.grid.shape[::-1])
    # A coarse token's weight goes to the fine tokens that it was merged from, in equal parts.
    top, fine = trace.layers[-1].tokens.queries, trace.layers[0].tokens.queries
    weights = torch.rand(1, top.num_tokens)
    literal = torch.zeros(fine.rows, fine.cols)
    for row, col in np.ndindex(top.rows, top.cols):
        block = literal[row * 8 : row * 8 + 8, col * 8 : col * 8 + 8]
        block += weights[0, row * top.cols + col] / block.numel()
    assert (carry(weights, top, fine) - literal.flatten()).abs().max() < 1e-6


def test_attention_that_blocks_return_is_not_a_grid():
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 64, "patch_size": 4, "window_size": 4, "embed_dim": 24, "depths": [1, 1, 1]}
    config = transformers.SwinConfig(**sizes, num_heads=[2, 2, 4])
    config._attn_implementation = "eager"  # the last stage returns [1, heads, 16, 16]
    model = transformers.SwinForImageClassification(config).eval()
    with torch.no_grad(), record_attention(model) as trace:
        model(torch.randn(1, 3, 64, 64))
    assert trace.refusal is None


def test_a_feature_map_whose_channels_fit_as_a_side_has_the_grid_of_its_tokens():
    """The first stage is [batch, 16, 16, 12 channels], which could be 16 × 12 patches of 16 channels."""
    torch.manual_seed(0)
    options = {"img_size": 64, "window_size": 4, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}
    model, kept = timm.models.SwinTransformer(**options, num_classes=3).eval(), []
    explainer = Explainer(model, data_config={**CONFIG, "input_size": (3, 64, 64)})
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    actual = explainer.explain(image, method="gradcam", layer=1, target=2)
    model.layers[0].register_forward_hook(lambda module, args, output: kept.append(output))
    [gradient] = torch.autograd.grad(model(explainer.pixels(image))[0, 2], kept)
    expected = (kept[0] * gradient.mean(dim=(1, 2), keepdim=True)).sum(dim=-1).relu()[0].detach()
    torch.testing.assert_close(torch.from_numpy(actual.grid), expected, rtol=1e-4, atol=1e-6)


def test_feature_maps_that_drop_the_last_pixels_have_the_cells_of_their_stride():
    """ConvNeXt drops 6 of 230 rows and 26 of 250 columns: its 7 × 7 cells have 32 pixels, not 32.9 × 35.7."""
    torch.manual_seed(0)
    model = jitter(timm.create_model("convnext_atto", num_classes=3), 0.02, by_width=False)
    explainer = Explainer(model, data_config={**CONFIG, "input_size": (3, 230, 250)})
    actual = explainer.explain(np.zeros((230, 250, 3), np.uint8), method="gradcam", target=0)
    assert [span[:2] for span in actual.placement.extent] == [(0, 32), (0, 32)]


def test_the_fine_cell_at_the_padded_edge_is_its_coarse_cell():
    fine = TokenLayout(0, 1, 3, extent=(Span(0, 4, 0, 4), Span(0, 4, 0, 12)))
    coarse = TokenLayout(0, 1, 2, extent=(Span(0, 4, 0, 4), Span(0, 8, 0, 12)))
    assert carry(torch.tensor([[4.0, 8.0]]), coarse, fine).tolist() == [[2, 2, 8]]
    assert carry(torch.tensor([[1.0, 2.0, 3.0]]), fine, coarse).tolist() == [[3, 3]]


@pytest.mark.parametrize("kernel", [3, 5])  # receptive fields of 7 pixels, and of 11, which overlap
def test_tokens_of_convolutional_stems_are_drawn_around_their_centres(kernel):
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GELU(), nn.Conv2d(8, 48, kernel, 4, kernel // 2))
    model = vit(img_size=64, patch_size=8)
    model.patch_embed.proj = stem
    with record_attention(model) as trace, torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
    assert [span[:2] for span in trace.layout.extent] == [(-3.5, 8)] * 2  # pixel 8 i is in the middle of token i


@pytest.mark.parametrize(
    ("name", "options"), [("pvt_v2_b0", {"depths": (1, 1, 1, 1)}), ("tiny_vit_5m_224", {"depths": (1, 1, 1, 1)})]
)
def test_uniform_attention_is_a_uniform_map_through_padded_strided_convolutions(name, options):
    """Their receptive fields contain the cells of an even grid: no corner counts more than the others."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, **options).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("attn.q.weight", "attn.q.bias", "attention_biases")):
                parameter.zero_()
            elif path.endswith(("attn.qkv.weight", "attn.qkv.bias")):  # queries of each head, then keys and values
                module = model.get_submodule(path.rpartition(".qkv")[0])
                parameter.unflatten(0, (module.num_heads, -1))[:, : module.key_dim] = 0
    image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
    explainer = Explainer(model, data_config={**CONFIG, "input_size": (3, 224, 224)})
    actual = explainer.explain(image, method="rollout", preset="paper")
    assert actual.placement.extent is None
    np.testing.assert_allclose(actual.grid, actual.grid.mean(), rtol=1e-4)
