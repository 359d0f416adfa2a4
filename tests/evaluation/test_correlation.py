"""Rank correlation per layer: against literal products, networkx flows and scipy's Spearman, in float64."""

import json

import networkx as nx
import numpy as np
import pytest
import timm
import torch
from scipy.stats import spearmanr
from torch import nn

from tests import references
from tests.recording.test_recorder import generators, state_of
from vitflow import Explainer, record_attention
from vitflow.errors import OptionError
from vitflow.evaluation import RankCorrelation, rank_correlation
from vitflow.images import FIGURE_FORMATS
from vitflow.images.reading import write_image

CUSTOM = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 5}
DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 0.9}


def custom_model(**options) -> nn.Module:
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(**{**CUSTOM, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(custom_model(), data_config=DATA)


IMAGES = [np.random.default_rng(seed).integers(0, 256, (40, 50, 3), dtype=np.uint8) for seed in range(3)]


def literal_map(
    method: str, heads: list[np.ndarray], readout: np.ndarray, prefix: int, how: str, ratio: float, start: int
) -> np.ndarray:
    """The map over patches of the last of these layers, [heads, N, N] each."""
    if method == "attention":
        row = readout @ references.discard(references.fuse(heads[-1], how), ratio, prefix)
    elif method == "rollout":
        row = readout @ references.rollout(heads, how=how, ratio=ratio, start=start, prefix=prefix)
    else:
        graph = nx.DiGraph()
        size = heads[0].shape[-1]
        for depth in range(start, len(heads) + 1):
            fused = references.fuse(heads[depth - 1], how)
            matrix = references.residual(references.discard(fused, ratio, prefix), 0.5)
            for i in range(size):
                for j in range(size):
                    graph.add_edge((depth, i), (depth - 1, j), capacity=matrix[i, j])
        for i in range(size):
            graph.add_edge("source", (len(heads), i), capacity=readout[i])
        row = np.array([nx.maximum_flow_value(graph, "source", (start - 1, j)) for j in range(size)])
    return np.round(row[prefix:] / row[prefix:].max(), 6)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ({}, {}),
        ({}, {"head_fusion": "max", "discard_ratio": 0.6, "start_layer": 2}),
        ({"class_token": False, "global_pool": "avg"}, {}),
        ({"reg_tokens": 2}, {"discard_ratio": 0.3}),
    ],
)
def test_each_value_is_spearman_of_literal_maps(model, options):
    explaining = Explainer(custom_model(**model), data_config=DATA)
    held = ["input_gradient", "occlusion"]
    actual = rank_correlation(IMAGES[:2], model=explaining, references=held, **options)
    how, ratio, start = (
        options.get(k, d) for k, d in [("head_fusion", "mean"), ("discard_ratio", 0.0), ("start_layer", 1)]
    )
    assert actual.layers == tuple(range(start, 4))
    assert actual.values.shape == (2, len(actual.methods), 4 - start, 2)
    for number, image in enumerate(IMAGES[:2]):
        with record_attention(explaining.model) as trace, torch.no_grad():
            explaining.model(explaining.pixels(image))
        heads = [layer[0].double().numpy() for layer in trace.attentions]
        readout, prefix = trace.readout[0].double().numpy(), trace.layout.num_prefix_tokens
        for r, name in enumerate(held):
            reference = explaining.explain(image, method=name).grid.ravel()
            for m, method in enumerate(actual.methods):
                for n, layer in enumerate(actual.layers):
                    expected = literal_map(method, heads[:layer], readout, prefix, how, ratio, start)
                    # float32 maps may swap the ranks of two patches that are equal to rounding.
                    rho = spearmanr(expected, reference).statistic
                    assert actual.values[r, m, n, number] == pytest.approx(rho, abs=0.02), (name, method, layer)


def test_layers_and_methods_can_be_chosen_and_progress_is_reported(explainer):
    reported = []
    everything = rank_correlation(IMAGES, model=explainer, references=["input_gradient"], target=2)
    some = rank_correlation(
        IMAGES,
        model=explainer,
        layers=[3, 1, -2],
        methods=["rollout"],
        references=[("input_gradient", {})],
        target=2,
        progress=lambda done, total: reported.append((done, total)),
    )
    assert some.layers == (3, 1, 2) and some.methods == ("rollout",)
    np.testing.assert_array_equal(some.values[0, 0], everything.values[0, 1][[2, 0, 1]])
    assert reported == [(1, 3), (2, 3), (3, 3)]


def test_the_class_of_the_references_can_be_chosen(explainer):
    by_class = [
        rank_correlation(IMAGES[0], model=explainer, methods=["rollout"], references=["input_gradient"], target=target)
        for target in (0, 1, 2, 3, 4)
    ]
    assert len({float(actual.values[0, 0, -1, 0]) for actual in by_class}) > 1


def test_a_folder_is_taken_whole(explainer, tmp_path):
    for number, image in enumerate(IMAGES):
        write_image(tmp_path / f"{number}.png", image)
    options = {"model": explainer, "methods": ["attention"], "references": ["input_gradient"]}
    np.testing.assert_array_equal(
        rank_correlation(tmp_path, **options).values, rank_correlation(IMAGES, **options).values
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(OptionError, match="at least one image"):
        rank_correlation(tmp_path / "empty", **options)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("Unknown method by layer 'gae'", {"methods": ["gae"]}),
        ("at least one method", {"methods": []}),
        ("at least one method and one reference", {"references": []}),
        ("Unknown method 'blank'", {"references": ["blank"]}),
        ("Expected layers from 1 to 3", {"layers": [4]}),
        (r"Expected layers from 2 \(start_layer\) to 3", {"layers": [1], "start_layer": 2}),
        ("start_layer from 1 to 3", {"start_layer": 4}),
        ("at least one image", {"images": []}),
    ],
)
def test_faults_are_named(explainer, message, arguments):
    with pytest.raises(OptionError, match=message):
        rank_correlation(**{"images": IMAGES[:1], "model": explainer, "references": ["input_gradient"], **arguments})


# --- The result ------------------------------------------------------------------------------------------------------

NAN = float("nan")


def result() -> RankCorrelation:
    values = np.array([[[[0.1, 0.3, 0.8], [-0.2, NAN, 0.0]], [[NAN, NAN, NAN], [NAN, 0.5, NAN]]]])
    return RankCorrelation("a model", ("attention", "flow"), ("occlusion",), (1, 2), values)


def test_mean_and_standard_deviation_leave_undefined_images_out():
    actual = result()
    assert actual.images == 3
    assert actual.mean("occlusion", "attention", 1) == pytest.approx(0.4)
    assert actual.spread("occlusion", "attention", 1) == pytest.approx(np.std([0.1, 0.3, 0.8], ddof=1))
    assert actual.mean("occlusion", "attention", 2) == pytest.approx(-0.1)
    assert actual.mean("occlusion", "flow", 1) is None and actual.spread("occlusion", "flow", 1) is None
    assert actual.mean("occlusion", "flow", 2) == 0.5 and actual.spread("occlusion", "flow", 2) is None


def test_the_table_is_that_of_the_paper():
    assert result().to_markdown() == (
        "| Spearman with occlusion | L1 | L2 |\n"
        "| --- | ---: | ---: |\n"
        "| raw attention | 0.40 ± 0.36 | −0.10 ± 0.14 |\n"
        "| attention flow | – | 0.50 |\n"
        "\n"
        "Mean ± standard deviation over 3 images, a model.\n"
    )


def test_it_is_saved_as_chart_table_and_numbers(tmp_path):
    actual = result()
    for suffix in FIGURE_FORMATS:
        assert actual.save(tmp_path / f"chart{suffix}").stat().st_size > 1000
    assert actual.save(tmp_path / "table.md").read_text(encoding="utf-8") == actual.to_markdown()
    text = actual.save(tmp_path / "values.json").read_text(encoding="utf-8")
    read = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert read["spearman"][0]["values"] == [0.1, 0.3, 0.8]
    assert read["spearman"][1]["values"] == [-0.2, None, 0.0]
    assert read["spearman"][2]["mean"] is None
    with pytest.raises(OptionError, match="Unknown file type"):
        actual.save(tmp_path / "values.txt")


def test_the_chart_has_a_line_per_method_and_a_panel_per_reference(explainer):
    actual = rank_correlation(
        IMAGES, model=explainer, methods=["attention", "rollout"], references=["input_gradient", "occlusion"]
    )
    figure = actual.figure()
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["with input gradient", "with occlusion"]
    for axes, reference in zip(figure.axes, actual.references, strict=True):
        lines = [line for line in axes.get_lines() if line.get_marker() != "None"]
        for line, method in zip(lines, actual.methods, strict=True):
            np.testing.assert_allclose(
                line.get_ydata(), [actual.mean(reference, method, layer) for layer in actual.layers]
            )


def test_a_model_in_training_mode_is_requested_in_eval_mode_and_left_as_it_was():
    model = custom_model(proj_drop_rate=0.5).train()
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    before = state_of(model), generators()
    actual = [
        rank_correlation([image], model=Explainer(model.train(training), data_config=DATA)).values
        for training in (True, True, False)
    ]
    assert np.array_equal(actual[0], actual[1])
    assert np.array_equal(actual[0], actual[2])
    assert (state_of(model.train()), generators()) == before
