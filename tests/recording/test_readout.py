"""The readout follows from the output that is explained: each against a separate autograd computation."""

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests.small import Custom, jitter
from vitflow import Explainer, record_attention
from vitflow.errors import OptionError, ShapeError, UnsupportedModelError
from vitflow.methods import TokenLayout
from vitflow.models.calls import logits_of

SIZE = 64
CONFIG = {
    "input_size": (3, SIZE, SIZE),
    "mean": (0.5,) * 3,
    "std": (0.5,) * 3,
    "crop_pct": 1.0,
    "interpolation": "bilinear",
}
QUICK = ["rollout", "attention", "flow", "gradient_rollout", "gae", "legrad"]


def timm_vit(**options) -> nn.Module:
    torch.manual_seed(0)
    chosen = {"num_classes": 5, "img_size": SIZE, "depth": 3, "embed_dim": 48, "num_heads": 3} | options
    return jitter(timm.create_model("vit_tiny_patch16_224", **chosen))


class Around(nn.Module):
    """A user's module around a backbone of timm, which pools as a function says."""

    def __init__(self, pool, **options) -> None:
        super().__init__()
        self.backbone, self.pool = timm_vit(**options), pool
        self.probe = jitter(nn.Linear(48, 5))

    def forward(self, pixels: Tensor) -> Tensor:
        return self.probe(self.pool(self.backbone.forward_features(pixels)))


def region(tokens: Tensor) -> Tensor:
    """The mean over the patches of the upper left quarter, of 4 × 4."""
    return tokens[:, 1:].unflatten(1, (4, 4))[:, :2, :2].flatten(1, 2).mean(dim=1)


def transformers_model(name: str, **options) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = getattr(transformers, f"{name}Config")(
        **small | {"image_size": SIZE, "patch_size": 16, "num_labels": 5} | options
    )
    torch.manual_seed(0)
    kind = "ForObjectDetection" if name == "Yolos" else "ForImageClassification"
    return jitter(getattr(transformers, f"{name}{kind}")(config))


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    torch.manual_seed(0)
    return jitter(VisionTransformer(SIZE, 16, 3, 4, 32, 64, num_classes=5))


# A model, the module whose output its head reads, and how the readout is described.
MODELS = {
    "timm class token": (timm_vit, "norm", "class token"),
    "timm average": (lambda: timm_vit(global_pool="avg"), "blocks.2", "average over patches"),
    "timm average over all tokens": (
        lambda: timm_vit(global_pool="avg", pool_include_prefix=True),
        "blocks.2",
        "average over all tokens",
    ),
    "timm registers": (lambda: timm_vit(reg_tokens=4), "norm", "class token"),
    "timm maximum": (lambda: timm_vit(global_pool="max"), "blocks.2", "gradient of the output"),
    "transformers ViT": (lambda: transformers_model("ViT"), "vit.layernorm", "class token"),
    "transformers DINOv2": (lambda: transformers_model("Dinov2"), "dinov2.layernorm", "gradient of the output"),
    "torchvision": (torchvision_vit, "encoder.ln", "class token"),
    "own mean": (lambda: Around(lambda tokens: tokens[:, 1:].mean(dim=1)), "backbone.norm", "average over patches"),
    "own class token and mean": (
        lambda: Around(lambda tokens: tokens[:, 0] + tokens[:, 1:].mean(dim=1)),
        "backbone.norm",
        "gradient of the output",
    ),
    "own region": (lambda: Around(region), "backbone.norm", "gradient of the output"),
    "own, before the norm as well": (
        lambda: Around(lambda tokens: tokens[:, 3], norm_layer=nn.Identity),
        "backbone.blocks.2",
        "gradient of the output",
    ),
}


def literal_readout(model: nn.Module, path: str, pixels: Tensor, targets: list[int]) -> np.ndarray:
    """‖∂f/∂y_i‖ of each image by itself, rows summing to 1, in float64 with loops."""
    rows = []
    for image, target in zip(pixels, targets, strict=True):
        kept: list[Tensor] = []
        handle = model.get_submodule(path).register_forward_hook(
            lambda module, args, output, kept=kept: kept.append(output)
        )
        logits = logits_of(model(image[None]))
        handle.remove()
        assert logits is not None
        [gradient] = torch.autograd.grad(logits[0, target], kept)
        lengths = [float(np.sqrt(sum(float(entry) ** 2 for entry in token))) for token in gradient[0]]
        rows.append([one / sum(lengths) for one in lengths])
    return np.array(rows)


def pixels() -> Tensor:
    return torch.randn(2, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


def photo(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (SIZE, SIZE, 3)).astype(np.uint8)


@pytest.mark.parametrize(("build", "path", "words"), MODELS.values(), ids=MODELS.keys())
def test_the_readout_equals_a_separate_autograd_computation(build, path, words):
    model = build()
    with record_attention(model, gradients=True) as trace:
        model(pixels())
    assert trace.pooling == words
    for targets in ([0, 3], [4, 4]):
        wanted = literal_readout(model, path, pixels(), targets)
        np.testing.assert_allclose(trace.readout_of(torch.tensor(targets)).detach(), wanted, atol=1e-5)
    explainer = Explainer(model, data_config=CONFIG)  # which runs the head alone with gradients
    recorded = explainer.record(photo(), head_fusion="mean")
    inputs = explainer.pixels(photo())
    wanted = literal_readout(model, path, inputs, [int(logits_of(model(inputs)).argmax())])
    np.testing.assert_allclose(recorded.readout.detach(), wanted, atol=1e-5)


def test_a_pooling_head_that_the_output_does_not_use_is_no_readout():
    def region_of(model: nn.Module, images: Tensor) -> Tensor:
        tokens = model.tower.forward_features(images)
        model.tower.forward_head(tokens)
        return tokens[:, 5, :7]

    model = Custom(region_of, tower=timm_vit(class_token=False, global_pool="map"))
    with record_attention(model, gradients=True) as trace:
        model(pixels())
    assert trace.pooling == "gradient of the output"
    np.testing.assert_allclose(trace.readout.detach(), np.eye(16)[[5, 5]], atol=1e-6)


def pooled_by_attention(count: int, start: int, unread: bool = False):
    """A head of torch's attention: learned queries, or with none the class token and its residual."""

    def pool(model: nn.Module, tokens: Tensor) -> Tensor:
        query = model.queries.expand(len(tokens), -1, -1) if count else tokens[:, :1]
        pooled = model.attention(query, tokens[:, start:], tokens[:, start:], need_weights=unread)[0]
        return model.probe((pooled if count else pooled + query).mean(dim=1))

    attention, vit = nn.MultiheadAttention(48, 3, batch_first=True), timm_vit()
    queries, probe = nn.Parameter(torch.randn(1, max(count, 1), 48)), jitter(nn.Linear(48, 5))
    parts = {"vit": vit, "queries": queries, "attention": jitter(attention, 1.0), "probe": probe}
    return Custom(lambda self, images: pool(self, self.vit.forward_features(images)), **parts).eval()


@pytest.mark.parametrize(("count", "start", "unread"), [(1, 0, False), (1, 1, True), (4, 0, True), (0, 0, False)])
def test_attention_of_a_users_head_is_no_layer_whatever_grid_its_queries_fit(count, start, unread):
    model = pooled_by_attention(count, start, unread)
    with record_attention(model, gradients=True) as trace:
        model(pixels())
    expected = literal_readout(model, "vit.norm", pixels(), [1, 4])
    np.testing.assert_allclose(trace.readout_of(torch.tensor([1, 4])).detach(), expected, atol=1e-5)
    assert [layer.name for layer in trace.layers] == [f"vit.blocks.{n}.attn" for n in range(len(model.vit.blocks))]


@pytest.mark.parametrize("width", [16, 24, 48])
def test_channels_of_a_grid_are_not_taken_for_its_rows(width):
    """Widths that are multiples of the number of rows."""

    def attend(self: nn.Module, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x.flatten(2).mT)).chunk(3, dim=-1)
        return x + self.proj((q @ k.mT / width**0.5).softmax(-1) @ v).mT.unflatten(2, x.shape[2:])

    def compute(self: nn.Module, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(images))[:, :, 1, 2])

    torch.manual_seed(0)
    parts = {"norm": nn.LayerNorm, "qkv": lambda n: nn.Linear(n, 3 * n), "proj": lambda n: nn.Linear(n, n)}
    blocks = (Custom(attend, **{name: build(width) for name, build in parts.items()}) for _ in range(2))
    model = Custom(
        compute, embed=nn.Conv2d(3, width, 8, 8), blocks=nn.Sequential(*blocks), head=nn.Linear(width, 5)
    ).eval()
    with record_attention(model, gradients=True) as trace:
        model(pixels())
    np.testing.assert_allclose(trace.readout.detach(), np.eye(64)[[10, 10]], atol=1e-6)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (lambda x: x.roll(-1, 1), -1),
        (lambda x: x.flip(1), -1),
        (lambda x: torch.cat([x[:, :1] + x[:, 1:].mean(1, keepdim=True), x[:, 1:]], 1), 0),
    ],
    ids=["class token last", "reversed", "mean added"],
)
def test_what_moves_or_mixes_tokens_between_the_last_block_and_the_norm_is_noticed(change, read):
    def compute(self: nn.Module, images: Tensor) -> Tensor:
        vit = self.vit
        tokens = vit.blocks(vit._pos_embed(vit.patch_embed(images)))
        return vit.head(vit.norm(change(tokens))[:, read])

    model = Custom(compute, vit=timm_vit()).eval()
    with record_attention(model, gradients=True) as trace:
        model(pixels())
    expected = literal_readout(model, "vit.blocks.2", pixels(), [1, 4])
    np.testing.assert_allclose(trace.readout_of(torch.tensor([1, 4])).detach(), expected, atol=1e-5)


def test_class_attention_above_the_patches_is_no_layer():
    """A class token attends twice to itself and the patches, as in CaiT."""

    def head(model: nn.Module, images: Tensor) -> Tensor:
        patches = model.vit.forward_features(images)
        token = model.token.expand(len(patches), -1, -1)
        for attention in model.attentions:
            keys = torch.cat([token, patches], dim=1)
            token = token + attention(token, keys, keys)[0]
        return model.probe(token[:, 0])

    attentions = nn.ModuleList(jitter(nn.MultiheadAttention(48, 3, batch_first=True), 1.0) for _ in range(2))
    parts = {"vit": timm_vit(class_token=False, global_pool="avg"), "attentions": attentions}
    token = nn.Parameter(torch.randn(1, 1, 48))
    model = Custom(head, token=token, probe=jitter(nn.Linear(48, 5)), **parts).eval()
    with record_attention(model, gradients=True) as trace:
        model(pixels())
    assert [layer.name for layer in trace.layers] == [f"vit.blocks.{n}.attn" for n in range(len(model.vit.blocks))]
    expected = literal_readout(model, "vit.norm", pixels(), [1, 4])
    np.testing.assert_allclose(trace.readout_of(torch.tensor([1, 4])).detach(), expected, atol=1e-5)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_attention_over_the_class_tokens_of_several_layers_is_no_layer_whatever_grid_they_fit(count):
    def head(model: nn.Module, images: Tensor) -> Tensor:
        taken = model.vit.forward_intermediates(
            images, indices=count, return_prefix_tokens=True, intermediates_only=True, output_fmt="NLC", norm=False
        )
        tokens = torch.stack([prefix[:, 0] for _, prefix in taken], dim=1)
        return model.probe(model.attention(tokens, tokens, tokens)[0].mean(dim=1))

    attention = jitter(nn.MultiheadAttention(48, 3, batch_first=True), 1.0)
    model = Custom(head, vit=timm_vit(depth=4), attention=attention, probe=jitter(nn.Linear(48, 5))).eval()
    with record_attention(model, gradients=True) as trace:
        model(pixels())
    assert [layer.name for layer in trace.layers] == [f"vit.blocks.{n}.attn" for n in range(4)]
    blocks = trace.readouts_of(torch.tensor([1, 4])).blocks
    assert [block.layers for block in blocks] == list(range(5 - count, 5))
    for block in blocks:
        np.testing.assert_allclose(block.readout.detach(), np.eye(17)[[0, 0]], atol=1e-6)


def test_maps_of_two_regions_start_at_their_patches():
    model = Around(lambda tokens: tokens[:, 1:])
    outputs = lambda output: torch.stack([output[:, :4, 1].mean(dim=1), output[:, 12:, 1].mean(dim=1)], dim=1)  # noqa: E731
    explainer = Explainer(model, data_config=CONFIG, outputs=outputs, class_names=["top", "bottom"])
    for method in QUICK:
        top, bottom = explainer.explain_batch([photo()], methods=[method], targets=["top", "bottom"], refine=0)
        assert top.facts["readout"] == "4 patches, from the gradient of the output"
        assert top.class_specific and bottom.class_name == "bottom"
        assert np.abs(top.grid - bottom.grid).max() > 0.01 * np.abs(top.grid).max()
    trace = explainer.record(photo())
    wanted = np.zeros((2, 17))
    wanted[0, 1:5] = wanted[1, 13:] = 0.25
    for target in (0, 1):
        np.testing.assert_allclose(trace.readout_of(torch.tensor([target])).detach()[0], wanted[target], atol=1e-6)
    top = explainer.explain(photo(), method="rollout", target="top")
    assert "Readout: 4 patches, from the gradient of the output." in [*top._notes()]


@pytest.mark.parametrize(
    ("build", "below", "words"),
    [(timm_vit, "", "class token"), (lambda: Around(region), "backbone.", "4 patches, from")],
)
def test_a_readout_costs_one_pass_with_gradients_in_the_head_alone(build, below, words):
    model = build()
    explainer = Explainer(model, data_config=CONFIG)
    seen, paths = [], (f"{below}blocks.2.mlp", f"{below}norm", "")
    for path in paths:
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: seen.append((path, output.requires_grad))
        )
    explainer.explain(photo(), method="rollout")  # which tests the model on noise, once
    seen.clear()
    assert explainer.explain(photo(1), method="rollout").facts["readout"].startswith(words)
    assert seen == list(zip(paths, (False, True, True), strict=True))
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_a_pass_without_gradients_is_repeated_for_its_readout_in_the_same_precision(precision):
    model = Around(region)
    with torch.no_grad(), record_attention(model) as trace, torch.autocast("cpu", enabled=precision != torch.float32):
        model(pixels())
    expected = torch.zeros(17)
    expected[[1, 2, 5, 6]] = 0.25
    torch.testing.assert_close(trace.readout, expected.expand(2, -1), rtol=1e-2, atol=1e-6)
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_a_random_pass_has_a_readout_if_its_graph_is_cut_after_the_blocks():
    model = Around(lambda tokens: nn.functional.dropout(tokens, 0.1)[:, 0])
    with record_attention(model) as trace:
        model(pixels())
    with pytest.raises(UnsupportedModelError, match="another output if it runs again"):
        _ = trace.readout
    assert Explainer(model, data_config=CONFIG).record(photo()).pooling == "class token"


def test_a_recording_in_inference_mode_has_the_readout_of_one_without():
    rows = []
    for mode in (torch.no_grad, torch.inference_mode):
        model = timm_vit()
        with mode(), record_attention(model) as trace:
            model(pixels())
            rows.append(trace.readout)  # before inference mode ends
    assert torch.equal(*rows)


class Several(nn.Module):
    """A head on the mean of the patches after each block, weighted; `also` adds something else to the output."""

    def __init__(self, weights: list[float], also=None, **options) -> None:
        super().__init__()
        self.backbone, self.weights, self.also = timm_vit(depth=len(weights), **options), weights, also
        self.probe = jitter(nn.Linear(48, 5))

    def forward(self, images: Tensor) -> Tensor:
        blocks = self.backbone.forward_intermediates(images, output_fmt="NLC", intermediates_only=True)
        pooled = [weight * tokens.mean(dim=1) for weight, tokens in zip(self.weights, blocks, strict=True)]
        outputs = self.probe(torch.stack(pooled).sum(dim=0))
        return outputs if self.also is None else outputs + self.also(images)


WEIGHTS = [0.6, 0.0, 2.4, 1.0]


def test_maps_of_several_blocks_are_means_over_literal_maps_from_each():
    model = Several(WEIGHTS).double()
    explainer = Explainer(model, data_config=CONFIG)
    image = torch.rand(1, 3, SIZE, SIZE, dtype=torch.float64) * 2 - 1
    with record_attention(model, gradients=True) as trace:
        model(image)
    gradients = trace.backward(torch.tensor([2])).attentions
    literal = {"rollout": np.zeros(16), "gae": np.zeros(16)}
    for weight, count in zip(WEIGHTS, range(1, 5), strict=True):
        rows = {name: np.full(17, 1 / 16) for name in literal}
        for row in rows.values():
            row[0] = 0.0
        rolled, explained = np.eye(17), np.eye(17)
        for layer in range(count):
            heads, slopes = (each[layer][0].detach().numpy() for each in (trace.attentions, gradients))
            mean = heads.mean(axis=0)
            rolled = (0.5 * np.eye(17) + 0.5 * mean) @ rolled
            explained = explained + np.maximum(heads * slopes, 0).mean(axis=0) @ explained
        share = weight / sum(WEIGHTS)
        literal["rollout"] += share * (rows["rollout"] @ rolled)[1:]
        literal["gae"] += share * (rows["gae"] @ explained)[1:]
    plain = {"head_fusion": "mean", "value_weighted": False, "refine": 0}
    for name, options in {"rollout": {"residual": 0.5, "discard_ratio": 0.0}, "gae": {}}.items():
        actual = explainer.explain(image, method=name, target=2, **plain, **options)
        np.testing.assert_allclose(actual.grid.ravel(), literal[name], rtol=1e-4, atol=1e-7)
        assert actual.facts["readout"] == (
            "16 patches, from the gradient of the output, after layers 1 (15%), 3 (60%), 4 (25%)"
        )
    for method in ("flow", "attention", "legrad"):
        with pytest.raises(UnsupportedModelError, match="last layer"):
            explainer.explain(image, method=method, target=2)
    given = explainer.explain(image, method="rollout", readout=np.eye(4)[0] * np.ones((4, 4)))
    assert given.facts["readout"] == "4 patches, given as argument"


def test_a_last_block_that_the_head_does_not_read_is_left_out():
    model = Several([0.0, 1.0, 0.0])
    explainer = Explainer(model, data_config=CONFIG)
    short = Explainer(Several([0.0, 1.0]), data_config=CONFIG)
    short.model.load_state_dict(model.state_dict(), strict=False)
    for method in ("rollout", "gae"):
        actual = explainer.explain(photo(), method=method, target=1, refine=0)
        assert actual.facts["readout"].endswith("after layers 2 (100%)")
        expected = short.explain(photo(), method=method, target=1, refine=0)
        np.testing.assert_allclose(actual.grid, expected.grid, rtol=1e-4, atol=1e-7)


def test_a_head_that_reads_the_image_or_passes_around_blocks_is_refused():
    shortcut = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 5))
    with pytest.raises(UnsupportedModelError, match=r"directly from the image.*readout="):
        Explainer(Several(WEIGHTS, also=shortcut), data_config=CONFIG).explain(photo(), method="rollout")

    def long_skip(model: nn.Module, images: Tensor) -> Tensor:
        tokens, kept = model.vit._pos_embed(model.vit.patch_embed(images)), []
        for index, block in enumerate(model.vit.blocks):
            tokens = block(tokens if index < 2 else tokens + kept[0])
            kept.append(tokens)
        return model.vit.head(sum(tokens.mean(dim=1) for tokens in kept))

    explainer = Explainer(Custom(long_skip, vit=timm_vit()), data_config=CONFIG)
    with pytest.raises(UnsupportedModelError, match=r"skip connections around.*readout="):
        explainer.explain(photo(), method="gae")
    assert np.isfinite(explainer.explain(photo(), method="gradcam").grid).all()


@pytest.mark.parametrize("function", ["detached", "behind a ReLU"])
def test_without_a_gradient_rollout_starts_at_the_declared_pooling_and_says_so(function):
    def outputs(output: Tensor) -> Tensor:
        second = output[:, 1].detach() if function == "detached" else (output[:, 1] - 1e4).relu()
        return torch.stack([output[:, 0], second], dim=1)

    explainer = Explainer(timm_vit(), data_config=CONFIG, outputs=outputs)
    first, second = explainer.explain_batch([photo()], methods=["rollout"], targets=[0, 1], refine=0)[:1] * 2
    assert explainer.explain(photo(), method="gae", target=0).grid.max() > 0
    second = explainer.explain(photo(), method="rollout", target=1, refine=0)
    assert (first.facts["readout"], second.facts["readout"]) == ("class token", "class token, declared, not verified")
    np.testing.assert_allclose(first.grid, second.grid, rtol=1e-6)
    for method in ("gae", "gradient_rollout", "input_gradient"):
        with pytest.raises(UnsupportedModelError, match=r"gradient of the output .*zero"):
            explainer.explain(photo(), method=method, target=1)
    custom = Explainer(Around(region), data_config=CONFIG, outputs=outputs)
    with pytest.raises(UnsupportedModelError, match=r"zero.*Pass readout="):
        custom.explain(photo(), method="rollout", target=1)


def test_a_readout_given_by_hand_is_the_one_that_is_used():
    model = timm_vit()
    explainer = Explainer(model, data_config=CONFIG)
    grid = np.zeros((4, 4))
    grid[1, 2] = 3.0
    by_patch = explainer.explain(photo(), method="rollout", patch=(1, 2), refine=0)
    given = explainer.explain(photo(), method="rollout", readout=grid, refine=0)
    np.testing.assert_array_equal(by_patch.grid, given.grid)
    tokens = torch.zeros(17)
    tokens[7] = 1.0
    with record_attention(model, readout=tokens) as trace, torch.no_grad():
        model(pixels())
    assert torch.equal(trace.readout, tokens.expand(2, -1)) and trace.pooling == "given as argument"
    for wrong, error in ((torch.ones(5), ShapeError), (-tokens, OptionError), (torch.zeros(17), OptionError)):
        with pytest.raises(error, match="readout"):
            explainer.explain(photo(), method="rollout", readout=wrong)
    with pytest.raises(OptionError, match="readout"):
        explainer.explain(photo(), method="occlusion", readout=grid)


def test_a_frozen_backbone_under_no_grad_and_a_checkpointed_one_have_rollouts():
    frozen, checkpointed = Around(region), Around(region)
    frozen.backbone.forward_features = torch.no_grad()(frozen.backbone.forward_features)
    checkpointed.backbone.set_grad_checkpointing(True)
    for model in (frozen, checkpointed):
        actual = Explainer(model, data_config=CONFIG).explain(photo(), method="rollout")
        assert actual.facts["readout"].startswith("4 patches")


def test_trailing_tokens_are_no_patches_and_may_be_what_is_read():
    model = transformers_model("Yolos", num_detection_tokens=5, image_size=[SIZE, SIZE])
    outputs = lambda output: output.logits[:, 2, :5]  # noqa: E731
    explainer = Explainer(model, data_config=CONFIG, outputs=outputs)
    trace = explainer.record(photo())
    assert trace.layout == TokenLayout(1, 4, 4, num_suffix_tokens=5)
    np.testing.assert_allclose(trace.readout.detach()[0], np.eye(22)[1 + 16 + 2], atol=1e-6)
    attention = [one[0].double().mean(dim=0) for one in trace.attentions]
    row = torch.eye(22, dtype=torch.float64)[19]
    for matrix in reversed(attention):  # discard_ratio 0.5 of the entries whose key is a patch
        entries = matrix[:, 1:17].flatten()
        smallest = entries.argsort(stable=True)[: entries.numel() // 2]
        entries[smallest] = 0.0
        kept = matrix.clone()
        kept[:, 1:17] = entries.view(22, 16)
        step = 0.5 * torch.eye(22, dtype=torch.float64) + 0.5 * kept
        row = row @ (step / step.sum(dim=1, keepdim=True))
    options = {"discard_ratio": 0.5, "head_fusion": "mean", "value_weighted": False, "refine": 0, "start_layer": 1}
    actual = explainer.explain(photo(), method="rollout", target=0, **options)
    np.testing.assert_allclose(actual.grid, row[1:17].view(4, 4), rtol=1e-4)
    for method in ["flow", "gae", "gradcam", "similarity", "legrad"]:
        assert np.isfinite(explainer.explain(photo(), method=method, target=0).grid).all()


def changed(*changes, size: int = SIZE) -> nn.Module:
    """A user's module that changes its input before the model, and combines the outputs of several runs."""
    runs = lambda model, images: torch.stack([model.model(change(images)) for change in changes])  # noqa: E731
    return Custom(lambda model, images: runs(model, images).mean(dim=0), model=timm_vit(img_size=size))


@pytest.mark.parametrize("layout", [TokenLayout(0, 4, 4, 1), TokenLayout(1, 2, 8), TokenLayout(5, 3, 4)], ids=str)
def test_a_layout_of_other_tokens_than_the_patches_has_no_map(layout):
    explainer = Explainer(timm_vit(), data_config=CONFIG, layout=layout)
    for method in QUICK:
        with pytest.raises(UnsupportedModelError, match=r"computes the token.*misplaced.*occlusion"):
            explainer.explain(photo(), method=method)


def pruned(kept: int | None) -> nn.Module:
    """A model that keeps some patches after its first block, as EViT does, or merges them in a coarser grid."""

    def compute(self: nn.Module, images: Tensor) -> Tensor:
        model, first = self.model, self.model.num_prefix_tokens
        tokens = model.blocks[0](model.norm_pre(model._pos_embed(model.patch_embed(images))))
        prefix, patches = tokens[:, :first], tokens[:, first:]
        if kept is None:
            patches = nn.functional.avg_pool2d(patches.mT.unflatten(2, (4, 4)), 2).flatten(2).mT
        else:
            chosen = patches.norm(dim=-1).topk(kept, dim=1).indices.sort(dim=1).values
            patches = patches.gather(1, chosen.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
        return model.head(model.norm(model.blocks[1:](torch.cat([prefix, patches], dim=1)))[:, 0])

    return Custom(compute, model=timm_vit())


@pytest.mark.parametrize("kept", [4, 12])
def test_a_number_of_kept_tokens_that_fits_a_grid_is_no_grid(kept):
    explainer = Explainer(pruned(kept), data_config=CONFIG)
    for method in ("rollout", "gae"):
        with pytest.raises(UnsupportedModelError, match="topk.*clause 1"):
            explainer.explain(photo(), method=method)
    for method in ("gradcam", "similarity"):
        with pytest.raises(UnsupportedModelError, match="clause 1"):
            explainer.explain(photo(), method=method)


def test_merged_tokens_are_a_coarser_grid():
    explainer = Explainer(pruned(None), data_config=CONFIG)
    assert explainer.explain(photo(), method="rollout").grid.shape == (4, 4)
    assert explainer.explain(photo(), method="gradcam").grid.shape == (2, 2)


def test_a_model_that_changes_its_input_in_place_has_the_maps_of_one_that_does_not():
    inputs = pixels().clamp(-1, 1)
    first = Explainer(changed(lambda images: images.sub_(0.25).div_(0.5)), data_config=CONFIG)
    second = Explainer(changed(lambda images: (images - 0.25) / 0.5), data_config=CONFIG)
    for method in [*QUICK, "gradcam", "input_gradient", "occlusion", "sampling"]:
        options = {"masks": 16} if method == "sampling" else {}
        for one, other in zip(
            first.explain_batch(inputs, methods=[method], **options),
            second.explain_batch(inputs, methods=[method], **options),
            strict=True,
        ):
            np.testing.assert_allclose(one.grid, other.grid, rtol=1e-4, atol=1e-4 * np.abs(other.grid).max())


def test_a_readout_is_observed_again_after_a_setting_has_changed():
    def selected(model: nn.Module, images: Tensor) -> Tensor:
        return model.model.head(model.model.forward_features(images)[:, model.token])

    token = 0
    by_setting = Custom(selected, model=timm_vit(), token=0)
    by_variable = Around(lambda tokens: tokens)
    first = Explainer(by_setting, data_config=CONFIG)
    second = Explainer(by_variable, data_config=CONFIG, outputs=lambda output: output[:, token])
    for explainer in (first, second):
        assert explainer.explain(photo(), method="rollout").facts["readout"] == "class token"
    by_setting.token = token = 6
    for explainer in (first, second):
        for method in ("rollout", "gae"):
            facts = explainer.explain(photo(), method=method).facts
            assert facts["readout"] == "1 patch, from the gradient of the output"


def test_a_stack_of_blocks_that_runs_again_on_its_output_is_one_model():
    def recurrent(self: nn.Module, images: Tensor) -> Tensor:
        model = self.model
        tokens = model.norm_pre(model._pos_embed(model.patch_embed(images)))
        return model.head(model.norm(model.blocks(model.blocks(tokens)))[:, 0])

    trace = Explainer(Custom(recurrent, model=timm_vit()), data_config=CONFIG).record(photo())
    assert len(trace.attentions) == 6 and trace.pooling == "class token"
