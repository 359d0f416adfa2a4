"""Layers multiplied four by four or discarded from while the model runs: rollout as before, in less memory."""

import numpy as np
import pytest
import timm
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tests import references
from tests.small import Custom
from vitflow import Explainer
from vitflow.errors import OptionError, ShapeError
from vitflow.explaining.applying import recording_options
from vitflow.explaining.maps import rollout
from vitflow.methods.staged_rollout import LayerTokens, staged_rollout
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.layers import AttentionLayer, RecordedLayers
from vitflow.recording.recorder import record_attention
from vitflow.registry.choices import choose_methods
from vitflow.registry.method_table import get_method

PAPER = get_method("rollout").complete({"preset": "paper"})


def tiny(depth=5, img_size=64):
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=img_size, depth=depth).eval()


def changed_options(residual, discard_ratio=0.0):
    return {name: PAPER[name] for name in ("start_layer", "patch")} | {
        "residual": residual,
        "discard_ratio": discard_ratio,
    }


@pytest.mark.parametrize("fusion", ["mean", "max"])
@pytest.mark.parametrize("weighting", [False, "output"])
@pytest.mark.parametrize(
    ("depth", "residual", "ratio"), [(10, 0.5, 0.0), (8, 0.05, 0.0), (5, 0.05, 0.9), (3, 0.5, 0.5)]
)
def test_products_of_four_and_largest_values_give_the_map_of_all_layers(fusion, weighting, depth, residual, ratio):
    model, pixels = tiny(depth), torch.randn(3, 3, 64, 64)
    options = changed_options(residual, ratio) | {"head_fusion": fusion, "value_weighted": weighting}
    with torch.no_grad():
        with record_attention(model, fusions=[(fusion, weighting)]) as whole:
            logits = model(pixels)
        steps = {"discard_ratio": ratio} if ratio else {"residual": residual}
        with record_attention(model, fusions=[(fusion, weighting)], **steps) as less:
            assert torch.equal(model(pixels), logits)
        actual, expected = rollout(less, **options).grids, rollout(whole, **options).grids
    if ratio:
        [stored] = {len(layer.fused[fusion, weighting].index[0]) for layer in less.layers}
        assert stored == 17 * 16 - int(ratio * 17 * 16) and len(less.layers) == depth
    else:
        assert [layer.multiplied for layer in less.layers] == [4] * (depth // 4) + [depth % 4] * (depth % 4 > 0)
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-8)
    for image in range(3):  # literally, in float64
        row = whole.readout[image].double().numpy()
        for layer in reversed(whole.fused(fusion, value_weighted=weighting)):
            kept = references.discard(layer[image].double().numpy(), ratio, 1)
            row = row @ references.residual(kept, residual)
        np.testing.assert_allclose(actual[image].flatten(), row[1:], rtol=1e-5)


def test_stages_and_windows_keep_their_layers():
    torch.manual_seed(0)
    for name, options in (
        ("swin_tiny_patch4_window7_224", {"img_size": 112, "depths": (1, 1, 3, 2)}),
        ("cait_xxs24_224", {"img_size": 64, "depth": 3}),
    ):
        model = timm.create_model(name, **options).eval()
        pixels = torch.randn(2, 3, options["img_size"], options["img_size"])
        with torch.no_grad():
            with record_attention(model, head_fusion="mean") as whole:
                model(pixels)
            with record_attention(model, head_fusion="mean", residual=0.5) as multiplied:
                model(pixels)
        given = changed_options(0.5) | {"head_fusion": "mean", "value_weighted": False}
        assert {layer.multiplied for layer in multiplied.layers} >= {0, 3}
        torch.testing.assert_close(rollout(multiplied, **given).grids, rollout(whole, **given).grids, rtol=1e-5, atol=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("channels", "multiplied"), [(24, [0, 0, 0]), (27, [3])])
def test_sequences_longer_than_their_channels_are_not_multiplied(channels, multiplied, fused):
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(48, 8, embed_dim=channels, depth=3, num_heads=3).eval()  # 37 tokens
    for block in model.blocks:
        block.attn.fused_attn = fused
    with torch.no_grad():
        with record_attention(model) as heads:
            model(pixels := torch.randn(2, 3, 48, 48))
        with record_attention(model, head_fusion="mean", residual=0.5) as trace:
            model(pixels)
        actual = rollout(trace, **changed_options(0.5) | {"head_fusion": "mean", "value_weighted": False}).grids
    assert [layer.multiplied for layer in trace.layers] == multiplied
    for image in range(2):  # literally, in float64
        row = np.eye(37)[0]
        for layer in reversed(heads.attentions):
            row = row @ references.residual(layer[image].double().mean(dim=0).numpy(), 0.5)
        np.testing.assert_allclose(actual[image].flatten(), row[1:], rtol=1e-5)


def test_a_query_that_sees_no_key_keeps_itself():
    def masked(self, tokens):  # the first query sees no key, and the second one alone
        heads = self.proj(tokens).unflatten(-1, (3, 2)).transpose(1, 2)
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool)
        seen[0], seen[1] = False, torch.arange(len(seen)) == 2
        attended = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=seen)
        return tokens + self.proj(attended.transpose(1, 2).flatten(2))

    layers = (Custom(masked, proj=torch.nn.Linear(6, 6)) for _ in range(5))
    model, pixels = torch.nn.Sequential(torch.nn.Flatten(2), *layers), torch.randn(2, 6, 2, 3)
    with torch.no_grad():
        with record_attention(model) as whole:
            expected = model(pixels)
        with record_attention(model, head_fusion="mean", residual=0.25) as multiplied:
            torch.testing.assert_close(model(pixels), expected)
    for actual, layers in zip(multiplied.attentions, (whole.attentions[:4], whole.attentions[4:]), strict=True):
        product = np.stack([np.eye(6)] * 2)
        for layer in layers:
            fused = layer.double().mean(dim=1).numpy()
            product = np.stack([references.residual(*pair) for pair in zip(fused, (0.25, 0.25), strict=True)]) @ product
        np.testing.assert_allclose(actual.numpy(), product, rtol=1e-5, atol=1e-8)
        np.testing.assert_array_equal(actual[:, 0].numpy(), np.eye(6)[[0, 0]])


def test_only_one_rollout_alone_is_multiplied():
    whole = get_method("rollout")

    def options(*chosen):
        return recording_options(choose_methods(chosen, {}), torch.nn.Identity())

    def residual(*chosen):
        return options(*chosen).get("residual", 0)

    paper = ("rollout", {"preset": "paper", "residual": 0.25})
    assert residual(paper) == residual(paper, ("occlusion", {"refine": 0}), paper) == 0.25
    assert residual(("rollout", {"refine": 0, "discard_ratio": 0, "value_weighted": True})) == 0.5
    for name, entry in (
        ("rollout", {"preset": "paper"}),  # with another residual
        ("attention", {"preset": "paper"}),
        ("gae", {"refine": 0}),
        ("occlusion", {"refine": 1, "affinity": "keys"}),
    ):
        assert residual(paper, (name, entry)) == 0
    discarded = (whole.name, paper[1] | {"discard_ratio": 0.1, "refine": 1, "start_layer": 2})
    assert options(discarded)["discard_ratio"] == 0.1 and residual(discarded) == 0
    assert "discard_ratio" not in options(discarded, paper)
    for entry in ({"start_layer": 2}, {"refine": 1, "affinity": "keys"}, {"residual": 0.0}):
        assert residual((whole.name, paper[1] | entry)) == 0


def test_what_cannot_be_multiplied_is_refused():
    model = tiny(1)
    with pytest.raises(OptionError, match="0 <= residual < 1"):
        record_attention(model, head_fusion="mean", residual=1.0)
    for wrong in ({}, {"head_fusion": "mean", "gradients": True}, {"head_fusion": "mean", "keys": True}):
        with pytest.raises(OptionError, match="require one fusion, and neither gradients, keys"):
            record_attention(model, residual=0.5, **wrong)
    with pytest.raises(OptionError, match="either multiplied or discarded"):
        record_attention(model, head_fusion="mean", residual=0.5, discard_ratio=0.9)
    with pytest.raises(ShapeError, match="residuals"):
        staged_rollout([torch.ones(1, 1, 1, 1)], [None], readout=torch.ones(1, 1), residual=[0.1, 0.2])


def test_half_precision_and_autocast_multiply_in_full_precision():
    pixels = torch.randn(2, 3, 64, 64)
    given = changed_options(0.5) | {"head_fusion": "mean", "value_weighted": False}
    for model, dtype, enabled in ((tiny(4), torch.float32, True), (tiny(4).bfloat16(), torch.bfloat16, False)):
        grids = []
        for share in (0.0, 0.5):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                with record_attention(model, head_fusion="mean", residual=share) as trace:
                    model(pixels.to(dtype))
            assert {matrix.dtype for matrix in trace.attentions} == {torch.float32}
            grids.append(rollout(trace, **given).grids)
        torch.testing.assert_close(grids[1], grids[0], rtol=2e-6, atol=1e-8)


def peak(work):
    """The most bytes of tensors that are alive at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    changes = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive, most = 0, 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        most = max(most, alive)
    return most


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch 2.10 warns of every profile
def test_a_forward_pass_with_rollout_keeps_a_third_of_a_matrix_a_layer_and_no_tokens():
    model, pixels = tiny(8, 128), torch.randn(4, 3, 128, 128)
    explainer, options = Explainer(model), recording_options(choose_methods(["rollout"], {"preset": "paper"}), model)

    def record():
        return explainer._run_recorded(pixels, explainer.outputs, reads=True, **options)

    with torch.no_grad():
        record()  # the model is observed once
        plain, paper = peak(lambda: model(pixels)), peak(record)
    matrix = 4 * 65 * 65 * 4
    assert paper < plain + 4.5 * matrix  # no copy of the input; 8 matrices without products


def test_default_rollout_is_that_of_all_layers_in_float64():
    """Discarded, multiplied four by four, and refined by means in half precision."""
    explainer = Explainer(tiny(6), data_config={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    for block in explainer.model.blocks:  # sharp attention, with probabilities far below the smallest of float16
        block.attn.qkv.weight.data[:384] *= 12
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    actual = explainer.explain(image, method="rollout", refine=1)
    trace = explainer.record(image, fusions=[("max", "output"), ("mean", False)])
    assert float(min(layer.min() for layer in trace.fused("mean"))) < 1e-9
    row, means = trace.readout[0].double().numpy(), [each[0].double().numpy() for each in trace.fused("mean")]
    for layer in reversed(trace.fused("max", value_weighted="output")):
        row = row @ references.residual(references.discard(layer[0].double().numpy(), 0.9, 1), 0.5)
    expected = references.co_attention([mean[1:, 1:] for mean in means]) @ row[1:]
    np.testing.assert_allclose(actual.grid.flatten(), expected, rtol=1e-3)


@pytest.mark.parametrize(
    ("prefix", "index", "expected"),
    [(1, None, False), (None, [0, 2, 1, -1], False), (0, None, True), (1, [0, 2, 1, -1], True)],
)
def test_values_are_discarded_among_the_located_tokens(prefix, index, expected):
    layout, index = TokenLayout(1, 1, 2), None if index is None else torch.tensor([index])
    layer = AttentionLayer("attn", located=LayerTokens(layout, layout, index, index), prefix=prefix)
    assert RecordedLayers([layer]).discards_other_values() is expected


def test_values_kept_with_other_columns_than_prefix_tokens_are_not_used(monkeypatch):
    explainer = Explainer(tiny(5), data_config={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    expected = explainer.explain(image, method="rollout").grid
    monkeypatch.setattr("vitflow.recording.listening.declared_layout", lambda *_: TokenLayout(0, 1, 17))
    np.testing.assert_allclose(explainer.explain(image, method="rollout").grid, expected, rtol=1e-5)
