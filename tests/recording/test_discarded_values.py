"""Layers whose smallest values are discarded while the model runs: rollout as before, in less memory."""

import numpy as np
import pytest
import timm
import torch
from torch.profiler import ProfilerActivity, profile

from tests import references
from tests.methods.test_gradients import with_targets
from vitflow import Explainer
from vitflow.errors import OptionError
from vitflow.explaining.applying import recording_options
from vitflow.explaining.maps import rollout
from vitflow.methods.tokens import TokenLayout
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
@pytest.mark.parametrize(("residual", "ratio"), [(0.05, 0.9), (0.5, 0.5)])
def test_largest_values_give_the_map_of_all_values(fusion, weighting, residual, ratio):
    model, pixels = tiny(3), torch.randn(3, 3, 64, 64)
    options = changed_options(residual, ratio) | {"head_fusion": fusion, "value_weighted": weighting}
    with torch.no_grad():
        with record_attention(model, fusions=[(fusion, weighting)]) as whole:
            logits = model(pixels)
        with record_attention(model, fusions=[(fusion, weighting)], discard_ratio=ratio) as less:
            assert torch.equal(model(pixels), logits)
        actual, expected = (rollout(with_targets(one), **options).grids for one in (less, whole))
    [stored] = {len(layer.fused[fusion, weighting].index[0]) for layer in less.layers}
    assert stored == 17 * 16 - int(ratio * 17 * 16) and len(less.layers) == 3
    torch.testing.assert_close(actual, expected, rtol=2e-6, atol=1e-8)
    for image in range(3):  # literally, in float64
        row = whole.readout[image].double().numpy()
        for layer in reversed(whole.fused(fusion, value_weighted=weighting)):
            kept = references.discard(layer[image].double().numpy(), ratio, 1)
            row = row @ references.residual(kept, residual)
        np.testing.assert_allclose(actual[image].flatten(), row[1:], rtol=1e-5)


def test_values_are_discarded_if_all_methods_use_one_rollout():
    def ratio(*chosen):
        return recording_options(choose_methods(chosen, {}), torch.nn.Identity())["discard_ratio"]

    paper = ("rollout", {"preset": "paper", "residual": 0.25})
    discarded = (paper[0], paper[1] | {"discard_ratio": 0.1, "refine": 1, "start_layer": 2})
    assert ratio(discarded) == ratio(discarded, ("occlusion", {"refine": 0})) == 0.1
    for name, entry in (
        paper,
        ("attention", {"preset": "paper"}),
        ("gae", {"refine": 0}),
        ("occlusion", {"refine": 1, "affinity": "keys"}),
    ):
        assert ratio(discarded, (name, entry)) == 0


def test_what_cannot_be_discarded_is_refused():
    for wrong in ({}, {"head_fusion": "mean", "gradients": True}, {"head_fusion": "mean", "keys": True}):
        with pytest.raises(OptionError, match="one fusion"):
            record_attention(tiny(1), discard_ratio=0.5, **wrong)


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
def test_a_forward_pass_with_rollout_keeps_a_matrix_a_layer_and_no_tokens():
    model, pixels = tiny(8, 128), torch.randn(4, 3, 128, 128)
    explainer, options = Explainer(model), recording_options(choose_methods(["rollout"], {"preset": "paper"}), model)

    def record():
        return explainer._run_recorded(pixels, explainer.outputs, reads=True, **options)

    with torch.no_grad():
        record()  # the model is observed once
        plain, paper = peak(lambda: model(pixels)), peak(record)
    matrix = 4 * 65 * 65 * 4
    assert paper < plain + 9.5 * matrix  # no copy of the input


def test_default_rollout_is_that_of_all_layers_in_float64():
    """Discarded, and refined by means in half precision."""
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


def test_values_kept_with_other_columns_than_prefix_tokens_are_not_used(monkeypatch):
    explainer = Explainer(tiny(5), data_config={"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3})
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    expected = explainer.explain(image, method="rollout").grid
    monkeypatch.setattr("vitflow.recording.listening.declared_layout", lambda *_: TokenLayout(0, 1, 17))
    np.testing.assert_allclose(explainer.explain(image, method="rollout").grid, expected, rtol=1e-5)
