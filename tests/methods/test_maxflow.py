"""Maximum flow: against networkx, certificates added up from the raw capacities, and graphs made to be hard."""

from collections.abc import Callable, Iterator
from typing import Any

import networkx as nx
import numpy as np
import pytest

from tests.methods.certificates import Array, Prover, Source
from vitflow.methods.flow.solver import max_flow


def networkx_value(capacities: Array, source: Source, sink: int) -> float:
    layers, tokens = capacities.shape[:2]
    graph = nx.DiGraph()
    graph.add_node((0, sink))
    for layer in range(layers):
        for i in range(tokens):
            for j in range(tokens):
                if capacities[layer, i, j] > 0:
                    graph.add_edge((layer + 1, i), (layer, j), capacity=capacities[layer, i, j])
    start: Any = (layers, source) if isinstance(source, int) else "source"
    graph.add_node(start)
    if not isinstance(source, int):
        for token in range(tokens):
            graph.add_edge("source", (layers, token), capacity=source[token])
    # preflow_push, networkx's default, cannot take capacities of 1e-300 beside 1.
    solver = nx.algorithms.flow.shortest_augmenting_path
    return float(nx.maximum_flow_value(graph, start, (0, sink), flow_func=solver))


def softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def attention(rng: np.random.Generator, layers: int, tokens: int, sharpness: float, residual: float = 0.5) -> Array:
    rows = softmax(sharpness * rng.normal(size=(layers, tokens, tokens)))
    return (1 - residual) * rows + residual * np.eye(tokens)


def discarded(rng: np.random.Generator, layers: int, tokens: int) -> Array:
    rows = attention(rng, layers, tokens, 2.0, residual=0.0)
    rows[rng.random(rows.shape) < 0.7] = 0.0
    mixed = rows + 0.5 * np.eye(tokens)
    return mixed / mixed.sum(axis=-1, keepdims=True)


KINDS: dict[str, Callable[[np.random.Generator, int, int], Array]] = {
    "flat attention": lambda rng, layers, tokens: attention(rng, layers, tokens, 0.3),
    "sharp attention": lambda rng, layers, tokens: attention(rng, layers, tokens, 5.0),
    "almost one-hot": lambda rng, layers, tokens: attention(rng, layers, tokens, 25.0, residual=0.0),
    "discarded": discarded,
    "holes": lambda rng, layers, tokens: (
        rng.random((layers, tokens, tokens)) * (rng.random((layers, tokens, tokens)) < 0.5)
    ),
    "small integers": lambda rng, layers, tokens: rng.integers(0, 4, (layers, tokens, tokens)).astype(float),
    "300 orders of magnitude": lambda rng, layers, tokens: 10.0 ** rng.uniform(-300, 0, (layers, tokens, tokens)),
}


def graphs(kind: str, count: int) -> Iterator[tuple[Array, Source]]:
    rng = np.random.default_rng(sum(map(ord, kind)))
    for number in range(count):
        layers, tokens = 1 + number % 8, int(rng.integers(2, 16))
        capacities = KINDS[kind](rng, layers, tokens)
        if number % 2:
            yield capacities, int(rng.integers(tokens))
        else:
            source = rng.random(tokens) * (rng.random(tokens) < 0.6)
            yield capacities, source / max(source.sum(), 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_random_graphs_agree_with_networkx_and_prove_themselves(kind: str) -> None:
    below_bound = 0
    for capacities, source in graphs(kind, 10):
        actual, prover = max_flow(capacities, source), Prover(capacities, source)
        bounds = np.minimum(capacities[0].sum(axis=0), prover.given.sum())
        below_bound += int((actual.values < bounds * (1 - 1e-9)).sum())
        for sink, value in enumerate(actual.values.tolist()):
            assert value == pytest.approx(networkx_value(capacities, source, sink), rel=1e-9, abs=1e-9)
            prover.prove(actual, sink)
    assert below_bound > 7  # the interesting cuts, away from source and sink, are among them


@pytest.mark.parametrize(("layers", "sharpness"), [(3, 0.5), (4, 2.0), (12, 5.0)])
def test_certificates_hold_at_the_size_of_vit_base(layers: int, sharpness: float) -> None:
    capacities = attention(np.random.default_rng(3), layers, 197, sharpness)
    actual = max_flow(capacities, 0)
    prover = Prover(capacities, 0)
    for sink in range(0, 197, 3):
        prover.prove(actual, sink)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "discard"), [(4, 0.9), (12, 0.0)])
def test_certificates_hold_at_the_size_of_dinov2(layers: int, discard: float) -> None:
    capacities = float32_attention(layers, 1370, discard)
    actual, prover = max_flow(capacities, 0), Prover(capacities, 0)
    for sink in range(3, 1370, 97):
        prover.prove(actual, sink)


def float32_attention(layers: int, tokens: int, discard: float) -> Array:
    """Sharp random attention, drawn fast, without its smallest values, half of it residual."""
    rng = np.random.default_rng(14)
    capacities = np.empty((layers, tokens, tokens))
    for layer in capacities:
        rows = np.exp(rng.standard_normal((tokens, tokens), dtype=np.float32) * np.float32(2.5))
        if discard:
            rows[rows < np.quantile(rows[::10], discard)] = 0.0
        layer[:] = rows / rows.sum(axis=1, keepdims=True) / 2
        layer[np.diag_indices(tokens)] += 0.5
    return capacities


def test_a_share_too_small_for_a_number_is_a_flow_all_the_same() -> None:
    # The source's capacity shared out in proportion would be 1e-200 · 1e-200.
    capacities = np.zeros((6, 2, 2))
    capacities[:, :, 1], capacities[:, :, 0] = 1.0, 1e-200
    capacities[5, 0] = [1e-200, 0.0]
    assert max_flow(capacities, 0).values[0] == pytest.approx(1e-200, rel=1e-12)


def test_threads_change_no_value_and_progress_counts_every_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities = attention(np.random.default_rng(6), 7, 90, 6.0)
    counted: list[int] = []
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    alone = max_flow(capacities, 3)
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    together = max_flow(capacities, 3, progress=counted.append)
    np.testing.assert_array_equal(together.values, alone.values)  # to the last bit
    assert sum(counted) == 90


@pytest.mark.parametrize("seed", range(3))
def test_matchings_on_sparse_graphs_need_long_detours(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = 80
    capacities = np.zeros((5, tokens, tokens), np.int64)
    capacities[0, :, 0] = 1
    capacities[4, 0] = 1
    for layer in (1, 2, 3):
        capacities[layer] = rng.random((tokens, tokens)) < 1.6 / tokens
    actual = max_flow(capacities, 0)
    assert actual.values[0] == networkx_value(capacities, 0, 0)
    Prover(capacities, 0).prove(actual, 0)


def test_the_input_is_left_as_it_was() -> None:
    capacities = attention(np.random.default_rng(12), 4, 20, 4.0)
    before = capacities.copy()
    max_flow(capacities, 0)
    max_flow(np.asfortranarray(capacities), 0)
    np.testing.assert_array_equal(capacities, before)


def test_an_error_in_a_thread_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(count: int) -> None:
        raise RuntimeError("the bar broke")

    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    with pytest.raises(RuntimeError, match="the bar broke"):
        max_flow(attention(np.random.default_rng(0), 6, 40, 1.0), 0, progress=broken)
