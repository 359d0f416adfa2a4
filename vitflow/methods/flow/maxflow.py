"""Exact maximum flow through dense layered graphs: one source, any number of sinks, each a maximum flow of its own.

`solver` holds the strategy, `kernel` the compiled search.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

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
    capacities: Floats, source: int | Floats, sinks: Sequence[int] | None = None, *, progress: "Progress | None" = None
) -> MaxFlow:
    """The maximum flow from one source to each sink of a dense layered graph, exact to rounding in float64.

    The graph has node layers 0 … L of N tokens; the edge from (l + 1, i) to (l, j) has the capacity
    `capacities[l, i, j]`. Sinks are tokens of layer 0. A value is within a relative 1e-11 of its minimum cut.
    `attention_flow` makes all this of attention, and checks it.

    Args:
        capacities: [layers, tokens, tokens], finite and not negative, first layer first. The transpose of a
            C-contiguous [layers, keys, queries] array is used without a copy.
        source: a token of layer L, which gives as much as its edges take; or capacities [tokens] of a super-source.
        sinks: tokens of layer 0; all by default.
        progress: called with the number of further sinks solved, such as the `update` of a progress bar.

    Source: shortest augmenting paths in blocking flows after Dinic 1970.

    >>> capacities = np.array([[[0.5, 0.5], [0.1, 0.9]], [[0.7, 0.3], [0.0, 1.0]]])
    >>> max_flow(capacities, 0).values  # one path through each token between: min(0.7, 0.5) + min(0.3, 0.1), …
    array([0.6, 0.8])
    """
    upward = np.ascontiguousarray(capacities.transpose(0, 2, 1), dtype=np.float64)  # [layers, keys, queries]
    layers, tokens = upward.shape[:2]
    # What the source can send to each node on top of the layers between its own edges and those of the sinks.
    inner, supply = (upward[1:-1], upward[-1, :, source].copy()) if isinstance(source, int) else (upward[1:], source)
    total = float(supply.sum())
    if isinstance(source, int) and layers == 1:  # the sinks' edges are the source's
        supply = np.where(np.arange(tokens) == source, total, 0.0)
    demands = upward[0] if sinks is None else upward[0][list(sinks)]  # [sinks, tokens]
    arrived = demands.sum(axis=1)
    bounds = np.minimum(total, arrived)
    if not len(inner):
        values, crossing = _without_layers(supply, demands)
        if progress:
            progress(len(demands))
    else:
        from vitflow.methods.flow.solver import InnerGraph

        values, crossing = InnerGraph(inner, supply, torch.get_num_threads()).solve(demands, bounds, progress=progress)
    reached = values >= bounds
    at_sink, at_source = reached & (arrived <= total), reached & (arrived > total)
    # All boundaries: the inner graph of a source token lacks the last one, the source's own capacity.
    crossing = np.pad(crossing, ((0, 0), (0, layers + 1 - crossing.shape[1])))
    crossing[reached] = 0.0
    crossing[at_sink, 0] = arrived[at_sink]
    crossing[at_source, -1] = total
    return MaxFlow(values, crossing)


def _without_layers(supply: Floats, demands: Floats) -> tuple[Floats, Floats]:
    """Where paths share no edge the flow is Σ_k min(supply_k, demand_k): values, and cuts by boundary."""
    scarce = demands > supply  # [sinks, tokens]
    passed = np.minimum(demands, supply)
    at_source = np.where(scarce, passed, 0.0).sum(axis=1)
    at_sink = np.where(scarce, 0.0, passed).sum(axis=1)
    return passed.sum(axis=1), np.stack([at_sink, at_source], axis=1)
