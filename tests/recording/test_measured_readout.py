"""The readout is that of the image itself: heads that branch, other weights, precisions, passes without gradients."""

import pickle

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

from tests.recording.test_readout import CONFIG, SIZE, Around, photo, pixels, region, timm_vit
from tests.small import Custom, jitter
from vitflow import Explainer, explain_folder, record_attention
from vitflow.errors import NoGradientError, UnsupportedModelError

PATCHES, CLASS = np.r_[0.0, np.full(16, 1 / 16)], np.eye(17)[0]


def of_tokens(build, **options) -> nn.Module:
    """A model whose logits are computed from tokens by a function of the tokens and of the module."""

    class Custom(Around):
        def __init__(self) -> None:
            super().__init__(lambda tokens: build(tokens, self), **options)
            self.gate = nn.Parameter(torch.zeros(1))

    return Custom()


def readout_in(explainer: Explainer, image, **options) -> Tensor:
    return explainer.record(image, **options).readout[0].double()


def literal(model: nn.Module, image: Tensor, path: str = "backbone.norm") -> np.ndarray:
    """‖∂f/∂y_i‖ of the most probable class in float64, rows summing to 1."""
    model, kept = model.double(), []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: kept.append(output))
    logits = model(image.double())
    handle.remove()
    [gradient] = torch.autograd.grad(logits[0, logits[0].argmax()], kept)
    model.float()
    norms = gradient[0].norm(dim=-1)
    return (norms / norms.sum()).numpy()


def gated(tokens: Tensor, model: nn.Module) -> Tensor:
    return tokens[:, 0] + model.gate * tokens[:, 1:].mean(dim=1)


def load(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict() | {"gate": torch.ones(1)})


@pytest.mark.parametrize("change", [load, lambda model: model.gate.data.add_(1)], ids=["load_state_dict", ".data"])
@pytest.mark.parametrize("new", [False, True], ids=["same explainer", "new explainer"])
def test_new_weights_give_a_new_readout(change, new):
    model = of_tokens(gated)
    explainer = Explainer(model, data_config=CONFIG)
    assert explainer.explain(photo(), method="rollout").facts["readout"] == "class token"
    change(model)
    explainer = Explainer(model, data_config=CONFIG) if new else explainer
    expected = literal(model, explainer.pixels(photo()))
    for options in ({"head_fusion": "mean"}, {"gradients": True}):
        np.testing.assert_allclose(readout_in(explainer, photo(), **options).detach(), expected, atol=1e-5)
    assert "17" not in explainer.explain(photo(), method="gae").facts["readout"]


def test_a_head_that_branches_on_its_input_has_the_readout_of_the_branch_for_each_image_of_a_batch():
    class Branching(Around):
        def forward(self, images: Tensor) -> Tensor:
            tokens = self.backbone.forward_features(images)
            bright = (images.mean(dim=(1, 2, 3)) > 0)[:, None]
            return self.probe(torch.where(bright, tokens[:, 1:].mean(dim=1), tokens[:, 0]))

    explainer = Explainer(Branching(None), data_config=CONFIG)
    brightness = torch.tensor([0.3, -0.3, 0.3, -0.3])[:, None, None, None]
    images = (torch.rand(4, 3, SIZE, SIZE) * 2 - 1 + brightness).clamp(-1, 1)
    words = [each.facts["readout"] for each in explainer.explain_batch(images, methods=["rollout"])]
    assert words == ["average over patches", "class token"] * 2
    alone = [explainer.explain(image, method="gae") for image in images]
    for together, single in zip(explainer.explain_batch(images, methods=["gae"]), alone, strict=True):
        np.testing.assert_allclose(together.grid, single.grid, rtol=1e-4, atol=1e-6 * single.grid.max())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("pool", "expected", "words"),
    [
        (lambda tokens: tokens[:, 0], np.eye(197)[0], "class token"),
        (lambda tokens: tokens[:, 1:].mean(dim=1), np.r_[0.0, np.full(196, 1 / 196)], "average over patches"),
        (lambda tokens: tokens.mean(dim=1), np.full(197, 1 / 197), "average over all tokens"),
        (lambda tokens: tokens[:, 1:101].mean(dim=1), np.r_[0.0, np.full(100, 1 / 100), np.zeros(96)], "100 patches"),
    ],
)
def test_the_readout_equals_the_closed_form_in_every_precision(dtype, pool, expected, words):
    model = Around(pool, img_size=224)
    explainer = Explainer(model, data_config=CONFIG | {"input_size": (3, 224, 224)}, dtype=dtype)
    trace = explainer.record(photo())
    rounding = 1e-6 if dtype == "float32" else 1e-3
    assert float(np.abs(trace.readout[0].detach().double().numpy() - expected).sum()) < 197 * rounding / 10
    assert trace.readout_words(None)[0].startswith(words)


@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_a_norm_that_runs_twice_has_the_map_of_one_that_runs_once(method):
    def several(model: nn.Module, images: Tensor) -> Tensor:
        return model.vit.forward_head(model.vit.forward_intermediates(images, indices=[0, 1, 2], norm=True)[0])

    models = Custom(several, vit=timm_vit()), timm_vit()
    twice, once = (Explainer(each, data_config=CONFIG).explain(photo(), method=method) for each in models)
    assert twice.facts["readout"] == "class token"
    np.testing.assert_allclose(twice.grid, once.grid, rtol=1e-5)


def int8(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def with_zero_head(model: nn.Module) -> nn.Module:
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "cause"), [(int8, "integer weights"), (with_zero_head, "still all zeros")])
def test_without_a_gradient_the_declared_pooling_is_used_and_named_so(change, cause):
    model = change(timm_vit())
    actual = Explainer(model, data_config=CONFIG).explain(photo(), method="rollout")
    assert actual.facts["readout"] == "class token, declared, not verified"
    assert any("not verified" in note for note in actual._notes())
    with record_attention(model) as trace, torch.no_grad():
        model(pixels())
    torch.testing.assert_close(trace.readout, torch.tensor(np.eye(17)[[0, 0]]).float())
    undeclared = Custom(lambda self, images: self.inner(images), inner=model)
    with pytest.raises(UnsupportedModelError, match=rf"{cause}.*readout="):
        Explainer(undeclared, data_config=CONFIG).explain(photo(), method="rollout")


def test_inference_mode_inside_a_model_is_named_where_nothing_is_declared():
    inferring = Custom(lambda self, images: torch.inference_mode()(self.inner)(images), inner=timm_vit())
    explainer = Explainer(inferring, data_config=CONFIG)
    with pytest.raises(UnsupportedModelError, match=r"without gradients.*readout="):
        explainer.explain(photo(), method="rollout")
    assert explainer.explain(photo(), method="rollout", readout=np.ones((4, 4))).grid.max() > 0


def test_one_saturated_image_of_a_batch_has_the_declared_pooling_and_its_neighbours_are_measured():
    images = torch.randn(6, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(2)).clamp(-1, 1)
    model = timm_vit()
    with torch.no_grad():
        scores = model(images)[:, 0]
    limit = float(scores.median()) + 1e-3
    explainer = Explainer(model, data_config=CONFIG, outputs=lambda output: (output[:, :1] - limit).relu())
    words = [each.facts["readout"] for each in explainer.explain_batch(images, methods=["rollout"])]
    off = (scores < limit).tolist()
    assert len(set(off)) == 2 and words == [
        "class token, declared, not verified" if each else "class token" for each in off
    ]


@pytest.mark.parametrize("method", ["rollout", "gae", "gradcam", "input_gradient"])
def test_a_saturated_image_without_a_declared_pooling_is_named_and_the_others_have_their_maps(method, tmp_path):
    model, images = Around(region), [photo(seed) // 8 + np.uint8(light) for seed, light in enumerate((200, 9, 160, 90))]
    bright = Custom(lambda self, pixels: self.inner(pixels) * (pixels.mean((1, 2, 3)) > 0)[:, None], inner=model)
    explainer, names = Explainer(bright, data_config=CONFIG), ["a.jpg", "b.jpg", "c.jpg", "d.jpg"]
    with pytest.raises(NoGradientError, match=r"2 of 4 images \(b\.jpg, d\.jpg\): .* without") as caught:
        explainer.explain_batch(images, method=method, names=names, target=1)
    assert caught.value.images == [1, 3] and pickle.loads(pickle.dumps(caught.value)).images == [1, 3]
    others = explainer.explain_batch(images[::2], method=method, target=1)
    for image, name in zip(images, names, strict=True):
        Image.fromarray(image).save(tmp_path / f"{name[0]}.png")
    rows = explain_folder(tmp_path, tmp_path / "out", model=explainer, methods=[method], target=1, batch_size=4)
    assert [row["status"] for row in rows] == ["explained", "failed", "explained", "failed"]
    for image, map_of in zip(images[::2], others, strict=True):
        expected = Explainer(model, data_config=CONFIG).explain(image, method=method, target=1)
        np.testing.assert_allclose(map_of.grid, expected.grid, rtol=1e-4, atol=1e-6 * expected.grid.max())


def test_features_without_classes_are_read_by_the_gradient_of_their_square():
    model = Around(lambda tokens: tokens[:, 0] + 0.5 * tokens[:, 3])
    model.probe, model.num_classes = nn.Identity(), 0
    image = pixels()[:1]
    with torch.no_grad(), record_attention(model) as trace:
        model(image)
    expected = torch.zeros(17)
    expected[0], expected[3] = 2 / 3, 1 / 3
    torch.testing.assert_close(trace.readout[0], expected)


def test_blocks_that_add_in_place_and_weights_made_in_inference_mode_have_their_readout():
    def in_place(module: nn.Module, tokens: Tensor, **options) -> Tensor:
        tokens += 0.1
        tokens[:, 0] = 2 * tokens[:, 0]
        return module.inner(tokens)

    model = Around(region)
    for number, block in enumerate(model.backbone.blocks):
        model.backbone.blocks[number] = Custom(in_place, inner=block)
    model.backbone.norm = Custom(in_place, inner=model.backbone.norm)
    with torch.inference_mode():
        made = timm_vit()
    expected = np.zeros(17)
    expected[[1, 2, 5, 6]] = 0.25
    np.testing.assert_allclose(readout_in(Explainer(model, data_config=CONFIG), photo()).detach(), expected, atol=1e-6)
    assert Explainer(made, data_config=CONFIG).explain(photo(), method="rollout").facts["readout"] == "class token"


def test_a_guess_of_the_blocks_that_is_wrong_is_corrected():
    def attend(module: nn.Module, tokens: Tensor, **options) -> Tensor:
        queries, keys, values = module.inner.qkv(tokens).unflatten(2, (3, 3, 16)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values)
        return module.inner.proj(mixed.transpose(1, 2).flatten(2))

    # Attention by another name, beside a module that is called attention and is none.
    gate = type("ChannelAttentionGate", (Custom,), {})
    model = Around(region)
    for block in model.backbone.blocks:
        inner, block.attn = block.attn, None
        inner.__class__ = type("Weights", (nn.Module,), {})
        block.attn = Custom(attend, inner=inner)
    model.backbone.norm_pre = gate(lambda self, tokens: tokens * self.scale, scale=nn.Parameter(torch.ones(1)))
    explainer, passes = Explainer(model, data_config=CONFIG), []
    model.register_forward_hook(lambda *_: passes.append(1))
    for image in (photo(), photo(1)):  # the first pass shows the blocks
        passes.clear()
        actual = explainer.explain(image, method="rollout", value_weighted=False, refine=0)
        assert actual.facts["readout"].startswith("4 patches")
    assert len(passes) == 1


def test_reentrant_checkpointing_of_the_head_is_named_as_the_cause():
    def compute(self: nn.Module, images: Tensor) -> Tensor:
        head = lambda each: self.inner.probe(region(each))  # noqa: E731
        tokens = self.inner.backbone.forward_features(images)
        return torch.utils.checkpoint.checkpoint(head, tokens, use_reentrant=True)

    with pytest.raises(UnsupportedModelError, match=r"use_reentrant.*readout="):
        Explainer(Custom(compute, inner=Around(region)), data_config=CONFIG).explain(photo(), method="rollout")


def test_rollout_is_one_map_for_targets_of_one_known_pooling_only():
    model = jitter(timm.create_model("vit_tiny_patch16_224", img_size=SIZE, depth=2, num_classes=5))
    [only] = Explainer(model, data_config=CONFIG).explain_batch([photo()], methods=["rollout"], targets=[0, 1, 2])
    assert not only.class_specific
    outputs = lambda output: torch.stack([output[:, 0, 0], output[:, 1:, 0].mean(dim=1)], dim=1)  # noqa: E731
    explainer = Explainer(Around(lambda tokens: tokens), data_config=CONFIG, outputs=outputs)
    first, second = explainer.explain_batch([photo()], methods=["rollout"], targets=[0, 1])
    assert (first.facts["readout"], second.facts["readout"]) == ("class token", "average over patches")
    assert first.class_specific and second.class_specific
