"""Exact maximum flow through dense layered graphs: one source, any number of sinks, each a maximum flow of its own.

`solver` holds the strategy, `kernel` the compiled search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from vitflow.errors import OptionError, ShapeError

if TYPE_CHECKING:
    from vitflow.methods.flow.solver import Progress

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class MaxFlow:
    """Maximum flows, and for each the minimum cut that proves that there is no larger one.

    Attributes:
        values: [sinks], the maximum flow into each sink.
        crossing: [sinks, layers + 1], the capacity of the minimum cut's edges in each layer, first layer first, and
            last the source's own capacity in the cut. The sum over the last axis equals the value: it is added up from
            the capacities, independently of the flow. A sink that reaches a trivial cut has all of it in column 0 (the
            sink's incoming edges) or in the last column (the source's capacity).
    """

    values: Floats
    crossing: Floats


def max_flow(
    capacities: ArrayLike,
    source: int | ArrayLike,
    sinks: Sequence[int] | None = None,
    *,
    workers: int | None = None,
    progress: "Progress | None" = None,
) -> MaxFlow:
    """The maximum flow from one source to each sink of a dense layered graph, exact to rounding in float64.

    The graph has node layers 0 … L of N tokens; the edge from (l + 1, i) to (l, j) has the capacity
    `capacities[l, i, j]`. Sinks are tokens of layer 0. A value is within a relative 1e-11 of its minimum cut.

    Args:
        capacities: [layers, tokens, tokens], finite and not negative, first layer first. The transpose of a
            C-contiguous [layers, keys, queries] array is used without a copy.
        source: a token of layer L, which gives as much as its edges take; or capacities [tokens] of a super-source.
        sinks: tokens of layer 0; all by default.
        workers: threads; torch's number of threads by default.
        progress: called with the number of further sinks solved, such as the `update` of a progress bar.

    Raises:
        ShapeError: capacities or source of a wrong shape, negative, NaN or infinite.
        OptionError: there is no such source or sink.

    Source: shortest augmenting paths in blocking flows after Dinic 1970.

    >>> capacities = [[[0.5, 0.5], [0.1, 0.9]], [[0.7, 0.3], [0.0, 1.0]]]
    >>> max_flow(capacities, 0).values  # one path through each token between: min(0.7, 0.5) + min(0.3, 0.1), …
    array([0.6, 0.8])
    """
    graph = _checked(capacities, source)
    chosen = _checked_sinks(sinks, graph.tokens)
    demands = graph.upward[0] if sinks is None else graph.upward[0][chosen]  # [sinks, tokens]
    arrived, total = demands.sum(axis=1), graph.total
    bounds = np.minimum(total, arrived)
    if not len(graph.inner):
        values, crossing = _without_layers(graph.supply, demands)
        if progress:
            progress(len(chosen))
    else:
        from vitflow.methods.flow.solver import InnerGraph

        inner = InnerGraph(graph.inner, graph.supply, workers or torch.get_num_threads())
        values, crossing = inner.solve(demands, bounds, progress=progress)
    reached = values >= bounds
    at_sink, at_source = reached & (arrived <= total), reached & (arrived > total)
    # All boundaries: the inner graph of a source token lacks the last one, the source's own capacity.
    crossing = np.pad(crossing, ((0, 0), (0, graph.layers + 1 - crossing.shape[1])))
    crossing[reached] = 0.0
    crossing[at_sink, 0] = arrived[at_sink]
    crossing[at_source, -1] = total
    return MaxFlow(values, crossing)


@dataclass(frozen=True, slots=True)
class _Graph:
    """A checked problem.

    Attributes:
        upward: the capacities as [layers, keys, queries], C-contiguous.
        total: the source's capacity.
        inner: the layers between the edges of the sinks and those of the source.
        supply: what the source can send to each node on top of them, [tokens].
    """

    upward: Floats
    total: float
    inner: Floats
    supply: Floats

    @property
    def layers(self) -> int:
        return len(self.upward)

    @property
    def tokens(self) -> int:
        return len(self.supply)


def _checked(capacities: ArrayLike, source: int | ArrayLike) -> _Graph:
    array = np.asarray(capacities, dtype=np.float64)
    if array.ndim != 3 or array.shape[1] != array.shape[2] or 0 in array.shape:
        raise ShapeError(f"Expected capacities of shape [layers, tokens, tokens], got {array.shape}.")
    _check_values("capacities", array)
    upward = np.ascontiguousarray(array.transpose(0, 2, 1))
    tokens = array.shape[1]
    if not isinstance(source, int | np.integer):
        supply = np.asarray(source, dtype=np.float64)
        if supply.shape != (tokens,):
            raise ShapeError(f"Expected source capacities of shape [{tokens}], got {supply.shape}.")
        _check_values("source capacities", supply)
        return _Graph(upward, float(supply.sum()), upward[1:], supply)
    if not 0 <= source < tokens:
        raise OptionError(f"Expected a source token from 0 to {tokens - 1}, got {source}.")
    supply = upward[-1, :, source].copy()
    total = float(supply.sum())
    if len(upward) == 1:  # the sinks' edges are the source's
        supply = np.where(np.arange(tokens) == source, total, 0.0)
    return _Graph(upward, total, upward[1:-1], supply)


def _check_values(what: str, array: Floats) -> None:
    low, high = float(array.min()), float(array.max())
    if not (low >= 0.0 and high * array.shape[-1] < math.inf):  # also false for NaN
        raise ShapeError(f"Expected {what} of at least 0 with a finite sum, got values from {low:g} to {high:g}.")


def _checked_sinks(sinks: Sequence[int] | None, tokens: int) -> NDArray[np.intp]:
    chosen = np.arange(tokens) if sinks is None else np.asarray(sinks, dtype=np.intp).reshape(-1)
    if len(chosen) and not (chosen.min() >= 0 and chosen.max() < tokens):
        raise OptionError(f"Expected sinks from 0 to {tokens - 1}, got {chosen.min()} to {chosen.max()}.")
    return chosen


def _without_layers(supply: Floats, demands: Floats) -> tuple[Floats, Floats]:
    """Where paths share no edge the flow is Σ_k min(supply_k, demand_k): values, and cuts by boundary."""
    scarce = demands > supply  # [sinks, tokens]
    passed = np.minimum(demands, supply)
    at_source = np.where(scarce, passed, 0.0).sum(axis=1)
    at_sink = np.where(scarce, 0.0, passed).sum(axis=1)
    return passed.sum(axis=1), np.stack([at_sink, at_source], axis=1)
