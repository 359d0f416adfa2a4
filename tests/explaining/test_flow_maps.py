"""Attention flow on images: its window, what carries it on, and how saturation is told."""

import json

import numpy as np
import pytest
import torch

import vitflow
from tests.small import DATA, custom_model, photo
from vitflow.errors import OptionError, VitflowWarning
from vitflow.progress import shown_by


@pytest.fixture(scope="module")
def explainer():
    return vitflow.Explainer("demo", device="cpu")


@pytest.fixture(scope="module")
def image():
    from vitflow.demo import sample_images

    return sample_images()[0]


def recorded(explainer, image, **options):
    with torch.no_grad(), vitflow.record_attention(explainer.model, **options) as trace:
        explainer.model(explainer.pixels(image))
    return trace


def test_the_default_runs_through_the_upper_layers_and_is_carried_on_by_rollout(explainer, image):
    options = {"layers": 3, "head_fusion": "max", "discard_ratio": 0.5, "value_weighted": False, "refine": 0}
    actual = explainer.explain(image, method="flow", **options)
    fused = [layer[0].double() for layer in recorded(explainer, image, head_fusion="max").attentions]
    flow = vitflow.attention_flow([layer[None] for layer in fused], layers=3, discard_ratio=0.5).values
    expected = (flow / flow.sum()) @ vitflow.attention_rollout([f[None] for f in fused[:3]], discard_ratio=0.5)[0]
    np.testing.assert_allclose(actual.grid.ravel(), expected[0, 1:].numpy(), rtol=1e-4, atol=1e-7)
    assert actual.facts["flow_layers"] == [4, 6]


def test_nothing_below_gives_the_flow_itself(explainer, image):
    actual = explainer.explain(
        image, method="flow", layers="5:6", below="none", discard_ratio=0.0, value_weighted=False, refine=0
    )
    trace = recorded(explainer, image)
    expected = vitflow.attention_flow(trace.attentions, layers=2).values[0, 1:]
    np.testing.assert_allclose(actual.grid.ravel(), expected.numpy(), rtol=1e-5)
    assert actual.facts["saturated"] == pytest.approx(
        float(vitflow.attention_flow(trace.attentions, layers=2).saturated_share[0])
    )


def test_all_layers_are_the_papers_definition_and_their_saturation_is_reported(explainer, image, tmp_path):
    with pytest.warns(VitflowWarning, match=r"\d+% of the flows through layers 1 to 6 are saturated"):
        actual = explainer.explain(image, method="flow", layers="all")
    assert actual.options["discard_ratio"] == 0.0
    assert actual.options["value_weighted"] is False
    attentions = recorded(explainer, image).attentions
    expected = vitflow.attention_flow(attentions)
    np.testing.assert_allclose(actual.grid.ravel(), expected.values[0, 1:].numpy(), rtol=1e-5)
    columns = vitflow.methods.fusion.add_residual(attentions[0].mean(1))[0].sum(0)
    trivial = columns[1:].clamp(max=1.0).numpy()  # no more than the class token has
    same = np.isclose(expected.values[0, 1:].numpy(), trivial, rtol=1e-6)
    assert same.mean() == pytest.approx(actual.facts["saturated"])  # this is what saturation means
    with np.load(actual.save(tmp_path / "map.npz")) as saved:
        assert json.loads(str(saved["metadata"]))["facts"]["saturated"] > 0.9


@pytest.mark.parametrize("layers", [7, "nine"])
def test_wrong_windows_are_named(explainer, image, layers):
    with pytest.raises(OptionError, match="layers"):
        explainer.explain(image, method="flow", layers=layers)


def test_progress_is_reported_flow_by_flow(explainer, image):
    import contextlib

    seen: list[int] = []

    @contextlib.contextmanager
    def display(label, total):
        assert (label, total) == ("attention flow", 145)
        yield seen.append

    with shown_by(display):
        explainer.explain(image, method="flow")
    assert sum(seen) == 145


def test_a_model_of_fewer_layers_than_the_default_window_flows_through_all_of_them():
    actual = vitflow.Explainer(custom_model(depth=2), data_config=DATA).explain(photo(32, 32), method="flow")
    assert actual.facts["flow_layers"] == [1, 2]
