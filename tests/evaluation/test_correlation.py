"""Rank correlation per layer: against literal products, networkx flows and scipy's Spearman, in float64."""

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from tests import references
from tests.recording.test_recorder import generators, state_of
from tests.small import DATA, custom_model
from vitflow import Explainer, record_attention
from vitflow.evaluation import Evaluation, rank_correlation


def literal_map(method: str, heads: list[np.ndarray], readout: np.ndarray, prefix: int) -> np.ndarray:
    """The map over patches of the last of these layers, [heads, N, N] each."""
    if method == "attention":
        row = readout @ references.fuse(heads[-1], "mean")
    elif method == "rollout":
        row = readout @ references.rollout(heads, how="mean", ratio=0.0, start=1, prefix=prefix)
    else:
        graph = nx.DiGraph()
        size = heads[0].shape[-1]
        for depth, layer in enumerate(heads, start=1):
            matrix = references.residual(references.fuse(layer, "mean"), 0.5)
            for i in range(size):
                for j in range(size):
                    graph.add_edge((depth, i), (depth - 1, j), capacity=matrix[i, j])
        for i in range(size):
            graph.add_edge("source", (len(heads), i), capacity=readout[i])
        row = np.array([nx.maximum_flow_value(graph, "source", (0, j)) for j in range(size)])
    return np.round(row[prefix:] / row[prefix:].max(), 6)


@pytest.mark.parametrize(
    ("model", "target"), [({}, None), ({"class_token": False, "global_pool": "avg"}, 3), ({"reg_tokens": 2}, 3)]
)
def test_each_value_is_spearman_of_literal_maps(model, target):
    explainer = Explainer(custom_model(**model), data_config=DATA)
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    actual = rank_correlation(explainer, image, target=target)
    assert actual.shape == (2, 3, 3)
    with record_attention(explainer.model) as trace, torch.no_grad():
        explainer.model(explainer.pixels(image))
    heads = [layer[0].double().numpy() for layer in trace.attentions]
    readout, prefix = trace.readout[0].double().numpy(), trace.layout.num_prefix_tokens
    for r, name in enumerate(["occlusion", "input_gradient"]):
        reference = explainer.explain(image, method=name, target=target).grid.ravel()
        for m, method in enumerate(["attention", "rollout", "flow"]):
            for layer in range(1, 4):
                # float32 maps may swap the ranks of two patches that are equal to rounding.
                rho = spearmanr(literal_map(method, heads[:layer], readout, prefix), reference).statistic
                assert actual[r, m, layer - 1] == pytest.approx(rho, abs=0.02), (name, method, layer)


NAN = float("nan")


def result() -> Evaluation:
    """Three images, of which one or all have no value at some layers; both references have the same values."""
    attention, flow = [[0.1, -0.2], [0.3, NAN], [0.8, 0.0]], [[NAN, NAN], [NAN, 0.5], [NAN, NAN]]
    known = {"status": "measured", "groups": ["correlation"], "target_source": "label", "values": {}}
    rows = [known | {"correlation": [[a, a, f]] * 2} for a, f in zip(attention, flow, strict=True)]
    settings = {"groups": ["correlation"], "blurred_control": False}
    return Evaluation("data", "a model", (), (), tuple(rows), settings=settings)


def test_mean_and_standard_deviation_leave_undefined_images_out():
    rows = {tuple(row.values())[:3]: tuple(row.values())[3:] for row in result().correlations()}
    assert rows["occlusion", "attention", 1] == pytest.approx((0.4, np.std([0.1, 0.3, 0.8], ddof=1)))
    assert rows["occlusion", "attention", 2][0] == pytest.approx(-0.1)
    assert rows["occlusion", "flow", 1] == (None, None)
    assert rows["input_gradient", "flow", 2] == (0.5, None)


def test_the_table_is_that_of_the_paper():
    lines = result().to_markdown().splitlines()
    assert lines[0] == "| Spearman with occlusion | L1 | L2 |"
    assert lines[2] == "| raw attention | 0.40 ± 0.36 | −0.10 ± 0.14 |" and lines[4] == "| attention flow | – | 0.50 |"


def test_a_model_in_training_mode_is_requested_in_eval_mode_and_left_as_it_was():
    model = custom_model(proj_drop_rate=0.5).train()
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    before = state_of(model), generators()
    actual = [
        rank_correlation(Explainer(model.train(training), data_config=DATA), image) for training in (True, True, False)
    ]
    assert np.array_equal(actual[0], actual[1])
    assert np.array_equal(actual[0], actual[2])
    assert (state_of(model.train()), generators()) == before
