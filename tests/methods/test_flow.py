"""Attention flow: its definition, its options, what it says about saturation, and the graph."""

from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests import references
from vitflow.demo import load_demo_model, sample_images
from vitflow.errors import OptionError, ShapeError
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.flow.layers import attention_graph, layer_capacities, parse_window
from vitflow.methods.tokens import TokenLayout

Array = NDArray[np.float64]


def random_attention(layers: int, batch: int, heads: int, tokens: int, sharpness: float = 2.0) -> list[Tensor]:
    logits = sharpness * torch.randn(layers, batch, heads, tokens, tokens, dtype=torch.float64)
    return list(logits.softmax(dim=-1))


def reference_matrices(layers: Sequence[Tensor], index: int = 0, **options: Any) -> list[Array]:
    """Â of each layer, first layer first, from the literal definitions."""
    how, ratio = options.get("head_fusion", "mean"), options.get("discard_ratio", 0.0)
    alpha, prefix = options.get("residual", 0.5), options.get("num_prefix_tokens", 1)
    return [
        references.residual(references.discard(references.fuse(layer[index].numpy(), how), ratio, prefix), alpha)
        for layer in layers
    ]


def reference_flow(matrices: Sequence[Array], source: Array, sink: int) -> float:
    """The definition, with networkx as it comes: nodes (layer, token), a super-source, one maximum flow."""
    graph = nx.DiGraph()
    for number, matrix in enumerate(matrices, start=1):
        for i in range(len(matrix)):
            for j in range(len(matrix)):
                if matrix[i, j] > 0:
                    graph.add_edge((number, i), (number - 1, j), capacity=matrix[i, j])
    for token, capacity in enumerate(source):
        graph.add_edge("source", (len(matrices), token), capacity=capacity)
    if (0, sink) not in graph:
        return 0.0
    solver = nx.algorithms.flow.shortest_augmenting_path
    return float(nx.maximum_flow_value(graph, "source", (0, sink), flow_func=solver))


def one_hot(token: int, tokens: int) -> Array:
    return np.where(np.arange(tokens) == token, 1.0, 0.0)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"head_fusion": "max", "discard_ratio": 0.9},
        {"head_fusion": "min", "residual": 0.2},
        {"discard_ratio": 0.5, "num_prefix_tokens": 3, "residual": 0.0},
    ],
    ids=str,
)
def test_flow_follows_the_definition(count: int, options: dict[str, Any]) -> None:
    layers = random_attention(count, 2, 3, 8)
    result = attention_flow(layers, source=1, **options)
    assert result.values.shape == (2, 8) and result.values.dtype == torch.float64
    for index in range(2):
        matrices = reference_matrices(layers, index, **options)
        expected = [reference_flow(matrices, one_hot(1, 8), sink) for sink in range(8)]
        np.testing.assert_allclose(result.values[index], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_readout_is_a_super_source(count: int) -> None:
    layers = random_attention(count, 2, 2, 7)
    readout = torch.rand(2, 7, dtype=torch.float64)
    readout /= readout.sum(dim=1, keepdim=True)
    result = attention_flow(layers, source=readout)
    for index in range(2):
        matrices = reference_matrices(layers, index)
        expected = [reference_flow(matrices, readout[index].numpy(), sink) for sink in range(7)]
        np.testing.assert_allclose(result.values[index], expected, rtol=1e-9)
    shared = attention_flow(layers, source=readout[0])
    torch.testing.assert_close(shared.values[0], result.values[0])


def test_the_source_may_be_in_any_layer() -> None:
    layers = random_attention(5, 1, 2, 7)
    matrices = reference_matrices(layers)
    result = attention_flow(layers, source=4, layers=(2, 3))
    assert result.layers == (2, 3)
    expected = [reference_flow(matrices[1:3], one_hot(4, 7), sink) for sink in range(7)]
    np.testing.assert_allclose(result.values[0], expected, rtol=1e-9)
    inside = attention_flow(layers, source=4, layers=(1, 3))
    np.testing.assert_allclose(inside.values, attention_flow(layers[:3], source=4).values, rtol=1e-12)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_lower_precision_is_taken_as_it_is(kind: torch.dtype) -> None:
    layers = [layer.to(kind) for layer in random_attention(3, 1, 2, 9)]
    result = attention_flow(layers)
    assert result.values.dtype == torch.float64
    exact = attention_flow([layer.double() for layer in layers])
    torch.testing.assert_close(result.values, exact.values, rtol=1e-6, atol=1e-7)


def test_deep_flat_attention_is_saturated_and_shallow_is_not() -> None:
    layers = random_attention(12, 1, 4, 30, sharpness=1.0)
    deep, shallow = attention_flow(layers), attention_flow(layers, layers=2)
    assert deep.saturated_share.tolist() == [1.0] and shallow.saturated_share.item() < 0.2
    column_sums = reference_matrices(layers)[0].sum(axis=0)
    np.testing.assert_allclose(deep.values[0], np.minimum(column_sums, 1.0), rtol=1e-12)


def test_a_token_that_nothing_attends_to_gets_nothing() -> None:
    layers = random_attention(4, 1, 1, 6)
    layers[0][..., 3] = 0.0
    result = attention_flow(layers, residual=0.0)
    assert result.values[0, 3] == 0.0 and result.normalized[0, 3] == 0.0
    assert result.saturated[0, 3]


def test_normalized_values_sum_to_one() -> None:
    layers = random_attention(3, 2, 2, 8)
    result = attention_flow(layers)
    torch.testing.assert_close(result.normalized.sum(dim=1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(result.normalized * result.values.sum(dim=1, keepdim=True), result.values)
    nothing = attention_flow(layers, source=torch.zeros(8))
    assert not nothing.normalized.any() and torch.isfinite(nothing.normalized).all()


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", (1, 12)),
        (1, (12, 12)),
        (np.int64(3), (10, 12)),
        ("4", (9, 12)),
        (":4", (1, 4)),
        ("-3:-2", (10, 11)),
        ([2, -1], (2, 12)),
    ],
)
def test_windows(layers: Any, expected: tuple[int, int]) -> None:
    assert parse_window(layers, 12) == expected


@pytest.mark.parametrize("layers", [0, 13, (5, 4), (1, 2, 3), "a", "x:3", None, 2.5, (-13, 3)])
def test_windows_that_do_not_exist(layers: Any) -> None:
    with pytest.raises(OptionError, match="from 1 to 12"):
        parse_window(layers, 12)


def test_the_graph_holds_the_matrices() -> None:
    layers = random_attention(3, 2, 2, 7)
    layout = TokenLayout(1, 2, 3)
    graph = attention_graph([layer[1:] for layer in layers], layers=(2, 3), discard_ratio=0.5, layout=layout)
    matrices = reference_matrices(layers, 1, discard_ratio=0.5)
    assert set(graph.nodes) == {(layer, token) for layer in (1, 2, 3) for token in range(7)}
    for layer in (2, 3):
        for i in range(7):
            for j in range(7):
                edge = graph.get_edge_data((layer, i), (layer - 1, j))
                if matrices[layer - 1][i, j] == 0:
                    assert edge is None
                else:
                    assert edge["capacity"] == edge["weight"] == pytest.approx(matrices[layer - 1][i, j])
    assert graph.number_of_edges() == sum(np.count_nonzero(matrices[layer - 1]) for layer in (2, 3))
    assert graph.nodes[3, 5] == {"layer": 3, "token": 5, "label": "patch (1, 1)"}
    flow = nx.maximum_flow_value(graph, (3, 0), (1, 4))
    expected = attention_flow(layers, layers=(2, 3), discard_ratio=0.5).values[1, 4]
    assert flow == pytest.approx(expected.item())


@pytest.fixture(scope="module")
def demo_attention() -> list[Tensor]:
    """Attention of the bundled model in a sample image, layers of [1, heads, tokens, tokens]."""
    from PIL import Image
    from timm.data import create_transform, resolve_model_data_config

    model = load_demo_model()
    seen: list[Tensor] = []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    with Image.open(sample_images()[0]) as image, torch.no_grad():
        model(transform(image.convert("RGB"))[None])
    return seen


OPTIONS: dict[str, Any] = {"discard_ratio": 0.0, "residual": 0.5, "num_prefix_tokens": 1}


@pytest.mark.slow
def test_the_demo_model_agrees_with_networkx_at_full_depth(demo_attention: list[Tensor]) -> None:
    sinks = [5, 70]
    ours = attention_flow(demo_attention).values[0, sinks]
    capacities = layer_capacities([layer[0].mean(dim=0) for layer in demo_attention], **OPTIONS)
    theirs = [reference_flow(capacities, one_hot(0, capacities.shape[1]), sink) for sink in sinks]
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)


def test_options_that_make_no_sense() -> None:
    layers = random_attention(2, 1, 1, 5)
    for wrong, message in [
        ({"residual": -0.1}, "residual < 1, got -0.1"),
        ({"source": 5}, "source token from 0 to 4, got 5"),
        ({"layers": 3}, "a number from 1 to 2"),
    ]:
        with pytest.raises(OptionError, match=message):
            attention_flow(layers, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="source capacities of at least 0"):
        attention_flow(layers, source=torch.tensor([-1.0, 0, 0, 0, 0]))
    with pytest.raises(ShapeError, match="one image, got 2"):
        attention_graph(random_attention(2, 2, 1, 5))
    with pytest.raises(ShapeError, match="Expected 5 tokens as in the layout"):
        attention_graph(random_attention(2, 1, 1, 7), layout=TokenLayout(1, 2, 2))


@pytest.mark.parametrize(("value", "tokens"), [(float("nan"), 5), (float("inf"), 40), (-0.1, 40)])
def test_values_that_are_not_attention(value: float, tokens: int) -> None:
    layers = random_attention(4, 1, 2, tokens)
    layers[2][0, 1, 3, 2] = value
    with pytest.raises(ShapeError, match="in layer 3"):
        attention_flow(layers)
    with pytest.raises(ShapeError, match="in layer 3"):
        attention_flow(layers, layers=2)
    with pytest.raises(ShapeError, match="in layer 3"):
        attention_graph(layers, layers=2)
