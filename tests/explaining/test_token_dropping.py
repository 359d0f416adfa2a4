"""Dropping tokens against the model run by hand on the kept ones, and against masks; what cannot drop is refused."""

import functools
from unittest.mock import Mock

import pytest
import timm
import torch
from timm.models.eva import Eva
from torch import Tensor, nn

from tests import literal_vit
from tests.small import Custom, jitter, since
from vitflow import Explainer
from vitflow.analysis.removal import can_drop_tokens, check_can_drop
from vitflow.errors import UnsupportedModelError
from vitflow.explaining.token_dropping import droppable_tokens, run_on_patches
from vitflow.methods.tokens import TokenLayout

DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
disturb = functools.partial(jitter, scale=0.05, by_width=False)
KEPT = torch.tensor([[3, 0, 7, 15, 9], [1, 2, 4, 8, 14]])


def rotating(rope_type: str) -> nn.Module:
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 2, "num_classes": 5}
    if rope_type == "mixed":
        options["attn_type"] = "rope"
    return disturb(Eva(**options, use_rot_pos_emb=True, rope_type=rope_type, global_pool="token")).double()


def by_hand(model: nn.Module, pixels: Tensor, kept: list[int], prefix: int) -> Tensor:
    """One choice of patches through timm's own modules, one after the other."""
    x = model._pos_embed(model.patch_embed(pixels))
    x = torch.cat([x[:, :prefix], *(x[:, prefix + patch : prefix + patch + 1] for patch in kept)], dim=1)
    x = model.norm_pre(x)
    for block in model.blocks:
        x = block(x)
    x = model.norm(x)
    if hasattr(model, "head_dist"):
        return (model.head(x[:, 0]) + model.head_dist(x[:, 1])) / 2
    return model.forward_head(x)


@pytest.mark.parametrize("readout", literal_vit.READOUTS)
def test_every_readout_equals_the_model_run_by_hand_on_the_kept_tokens(readout):
    model, prefix = literal_vit.timm_model(readout), literal_vit.READOUTS[readout][1]
    pixels = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    assert droppable_tokens(model, pixels).num_prefix_tokens == prefix
    with torch.no_grad():
        actual = run_on_patches(model, pixels, KEPT)
        for row, kept in zip(actual, KEPT.tolist(), strict=True):
            torch.testing.assert_close(row, by_hand(model, pixels, kept, prefix)[0], rtol=0, atol=1e-12)
        assert (actual[0] - actual[1]).abs().max() > 1e-3
        everything = run_on_patches(model, pixels, torch.arange(16)[None])
        torch.testing.assert_close(everything, model(pixels), rtol=0, atol=1e-12)


@since("timm", "1.0.31")  # whose Eva takes masks, and frequencies of float64
@pytest.mark.parametrize("rope_type", ["cat", "mixed", "dinov3"])
def test_rotated_tokens_keep_their_positions(rope_type):
    """A class token sees no difference between a token that is gone and one that no query may look at."""
    model = rotating(rope_type)
    pixels = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        actual = run_on_patches(model, pixels, KEPT)
        for row, kept in zip(actual, KEPT.tolist(), strict=True):
            visible = torch.zeros(17, 17, dtype=torch.bool)
            visible[:, [0, *(1 + patch for patch in kept)]] = True
            torch.testing.assert_close(row, model(pixels, attn_mask=visible)[0], rtol=0, atol=1e-10)
    assert can_drop_tokens(Explainer(model, data_config=DATA))


def test_a_class_token_that_joins_late_sees_the_kept_patches():
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 5}
    model = disturb(timm.models.cait.Cait(**options, init_values=0.5)).double()
    assert check_can_drop(Explainer(model, data_config=DATA), (32, 32)) == TokenLayout(0, 4, 4)
    pixels = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        actual = run_on_patches(model, pixels, KEPT)
        for row, kept in zip(actual, KEPT.tolist(), strict=True):
            x = (model.patch_embed(pixels) + model.pos_embed)[:, kept]
            for block in model.blocks:
                x = block(x)
            token = model.cls_token
            for block in model.blocks_token_only:
                token = block(x, token)
            expected = model.head(model.norm(torch.cat([token, x], dim=1))[:, 0])
            torch.testing.assert_close(row, expected[0], rtol=0, atol=1e-12)


def test_a_model_of_transformers_equals_itself_run_by_hand_on_the_kept_tokens():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=5)
    model = disturb(transformers.ViTForImageClassification(config)).double()
    assert check_can_drop(Explainer(model, data_config=DATA), (32, 32)) == TokenLayout(1, 4, 4)
    pixels = torch.randn(1, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        actual = run_on_patches(model, pixels, KEPT)
        tokens = model.vit.embeddings(pixels)
        layers = [module for module in model.modules() if type(module).__name__ == "ViTLayer"]
        assert len(layers) == 3
        for row, kept in zip(actual, KEPT.tolist(), strict=True):
            x = tokens[:, [0, *(1 + patch for patch in kept)]]
            for layer in layers:
                x = layer(x)
                x = x[0] if isinstance(x, tuple) else x
            expected = model.classifier(model.vit.layernorm(x)[:, 0])
            torch.testing.assert_close(row, expected[0], rtol=0, atol=1e-12)


def test_the_image_is_embedded_once_and_blocks_see_the_kept_tokens_alone():
    model, shapes = literal_vit.timm_model("class token and registers"), []
    model.patch_embed.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    for block in model.blocks:
        block.norm1.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    run_on_patches(model, torch.randn(1, 3, 32, 32, dtype=torch.float64), KEPT)
    assert shapes == [(1, 3, 32, 32), *[(2, 4 + 5, 24)] * 3]


def state(model: nn.Module) -> list[object]:
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    return [hooks, [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]]


def test_the_model_is_left_as_it_was_also_if_it_fails_half_way():
    model, pixels = literal_vit.timm_model().train(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    model.blocks[1].eval()
    before, weights = state(model), {k: v.clone() for k, v in model.state_dict().items()}
    run_on_patches(model, pixels, KEPT)
    assert can_drop_tokens(Explainer(model, data_config=DATA))
    assert state(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    model.blocks[2].mlp = Custom(Mock(side_effect=RuntimeError("half way")))
    before = state(model)
    with pytest.raises(RuntimeError, match="half way"):
        run_on_patches(model, pixels, KEPT)
    with pytest.raises(UnsupportedModelError, match=r"fails on 30% of its patches \(half way\)"):
        check_can_drop(Explainer(model, data_config=DATA), (32, 32))
    assert state(model) == before


def test_a_model_is_tried_once():
    model, passes = literal_vit.timm_model(), []
    model.register_forward_pre_hook(lambda module, args: passes.append(1))
    explainer = Explainer(model, data_config=DATA)
    assert can_drop_tokens(explainer)
    count = len(passes)
    assert can_drop_tokens(explainer) and can_drop_tokens(Explainer(model, data_config=DATA))
    assert len(passes) == count == 4


def refused(model: nn.Module, size: int) -> str:
    explainer = Explainer(model, data_config={**DATA, "input_size": (3, size, size)})
    assert not can_drop_tokens(explainer)
    with pytest.raises(UnsupportedModelError, match='replace="blank"') as caught:
        check_can_drop(explainer, explainer.spec.size)
    return str(caught.value)


def test_what_depends_on_the_order_or_answers_otherwise_is_refused():
    ordered, changing, undefined, calls = *(literal_vit.timm_model() for _ in range(3)), []
    ordered.blocks[1] = Custom(lambda self, x: x + x.roll(1, dims=1))  # every token with its neighbour in the sequence
    changing.norm.register_forward_hook(lambda module, args, output: calls.append(1) or output * len(calls))
    undefined.head.weight.data[0, 0] = float("nan")
    assert "depends on the order" in refused(ordered, 32)
    for model in (changing, undefined):
        assert "differs from its normal output" in refused(model, 32)


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("vit_relpos_small_patch16_224", 224, "fails on 30% of its patches"),
        ("test_convnext", 64, "has no sequence of blocks"),
        ("convit_tiny", 224, "fails on 30% of its patches"),
        ("swin_tiny_patch4_window7_224", 224, "has no sequence of blocks"),
    ],
)
def test_windows_and_relative_biases_are_refused(name, size, reason):
    model = timm.create_model(name, **({"depths": (1, 1, 1, 1)} if name.startswith("swin") else {}))
    assert reason in refused(disturb(model), size)


def test_a_given_layout_is_taken():
    model = literal_vit.timm_model()
    explainer = Explainer(model, data_config=DATA, layout=TokenLayout(1, 2, 8))
    with pytest.raises(UnsupportedModelError, match="computes the token of the patch"):
        check_can_drop(explainer, (32, 32))
    explainer = Explainer(model, data_config=DATA, layout=TokenLayout(2, 4, 4))
    with pytest.raises(UnsupportedModelError, match="Expected 18 tokens"):
        check_can_drop(explainer, (32, 32))
