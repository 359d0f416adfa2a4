"""Strategy around the compiled search: the part of the graph and the thread for each sink.

Optimizations for solving all sinks:

- All sinks share the inner layers. Nodes that the source cannot reach and edges without capacity are left out once;
  after `discard_ratio`, a few percent of the edges remain.
- No flow exceeds the source's capacity or the sink's incoming capacity. A flow that reaches either is a maximum: no
  search for a cut is needed.
- Propagating the source's capacity down in proportion to the edges (attention rollout, if rows sum to 1) is a feasible
  flow; the flow that arrives at a layer is a valid supply for the layers below. A sink that reaches its bound with this
  supply does so in the whole graph. In deep graphs three or four layers are usually enough.
- Only sinks that fall short are solved in the whole graph, down to a minimum cut.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.errors import ShapeError
from vitflow.methods.flow.kernel import Floats, Graph, Workspace, solve, workspace

Progress = Callable[[int], object]
Indices = NDArray[np.intp]

# Relative distance to its bound below which a flow has reached it: the accuracy of float64 sums of thousands of edges.
EXACT = 1e-12
# Numbers of lowest layers to try before the whole graph.
WINDOWS = (3, 6)
# Windows leave out edges below this share of their layer's mean: most edges, and little of the capacity.
SMALL = 0.2
# Sinks that a thread solves before it reports.
PART = 8
# Each thread copies the capacities; fewer threads are used if the copies would exceed this.
WORKSPACE_BYTES = 2**29


def inner_flows(
    upward: Floats, supply: Floats, demands: Floats, bounds: Floats, *, progress: Progress | None = None
) -> tuple[Floats, Floats]:
    """Find the maximum flow for each sink, and the minimum cut of each whose flow stays below its bound.

    The inner layers `upward` are [layers, keys, queries], lowest first, C-contiguous; `demands` [sinks, tokens] are the
    capacities from the lowest nodes to each sink. Returned are the values [sinks], and the cut's capacity among
    demands, in each layer from the lowest, and among supplies, [sinks, layers + 2].
    """
    if upward.size >= 2**31:
        raise ShapeError(f"Expected less than 2^31 edges, got {len(upward)} inner layers of {len(supply)} tokens.")
    report = progress or (lambda count: None)
    values, crossing = bounds.copy(), np.zeros((len(bounds), len(upward) + 2))
    supplies, nodes = shared_out(upward, supply)
    remaining = np.flatnonzero(bounds > 0)
    report(len(bounds) - len(remaining))
    for layers in (*(count for count in WINDOWS if count < len(upward)), len(upward)):
        if not len(remaining):
            break
        whole = layers == len(upward)
        graph = lowest_layers(upward[:layers], nodes, supplies, 0.0 if whole else SMALL)
        short = []
        for part, flows, cuts in _solved(graph, layers, demands[:, nodes[0]], bounds, remaining, whole):
            below = flows < bounds[part] * (1 - EXACT)
            if whole:
                values[part], crossing[part] = np.where(below, flows, bounds[part]), cuts
                report(len(part))
            else:
                short.append(part[below])
                report(int((~below).sum()))
        remaining = np.concatenate(short) if short else remaining[:0]
    return values, crossing


def _solved(
    graph: Graph, layers: int, demands: Floats, bounds: Floats, which: Indices, search: bool
) -> Iterator[tuple[Indices, Floats, Floats]]:
    """Yield some sinks, their values and their crossings [sinks, layers + 2], part by part, from several threads."""
    workers = max(1, min(torch.get_num_threads(), WORKSPACE_BYTES // (8 * len(graph.capacity) + 1)))
    idle: SimpleQueue[Workspace] = SimpleQueue()
    for _ in range(workers):
        idle.put(workspace(graph))

    def some(part: Indices) -> tuple[Indices, Floats, Floats]:
        work = idle.get()
        values, crossing = np.zeros(len(part)), np.zeros((len(part), layers + 2))
        solve(graph, demands[part], bounds[part], search, work, values, crossing)
        idle.put(work)
        return part, values, crossing

    # Neighbouring sinks take similar time, so parts are interleaved.
    count = max(min(workers, len(which)), len(which) // PART)
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(some, (which[start::count] for start in range(count)))


def shared_out(upward: Floats, supply: Floats) -> tuple[list[Floats], list[Indices]]:
    """Propagate the supply to each layer of nodes, lowest first, in proportion to the capacities.

    Also return the reachable tokens, by supply in descending order: augmenting through nodes with large supply first
    makes straight paths nearly optimal and shortens the residual search.
    """
    supplies, reached = [supply], [supply > 0]  # shares may underflow
    for matrix in upward[::-1]:  # [keys, queries]
        taken = matrix.sum(axis=0)
        share = np.minimum(np.divide(supplies[0], taken, out=np.zeros_like(taken), where=taken > 0), 1.0)
        supplies.insert(0, np.einsum("ki,i->k", matrix, share))
        reached.insert(0, ((matrix > 0) & reached[0]).any(axis=1))
    orders = [np.argsort(-amounts, kind="stable") for amounts in supplies]
    return supplies, [order[which[order]] for order, which in zip(orders, reached, strict=True)]


def lowest_layers(upward: Floats, nodes: Sequence[Indices], supplies: Sequence[Floats], small: float = 0.0) -> Graph:
    """Return the lowest layers for the compiled search, supplied with the flow that `shared_out` propagates to them.

    Edges of at most the share `small` of their layer's mean are left out.
    """
    nodes = nodes[: len(upward) + 1]
    sizes = [len(tokens) for tokens in nodes]
    counts, above, capacity = [], [], []
    for q, matrix in enumerate(upward):
        between = matrix[np.ix_(nodes[q], nodes[q + 1])]
        edges = between > (small * matrix.mean() if small else 0.0)
        counts.append(edges.sum(axis=1))
        above.append(np.nonzero(edges)[1] + sum(sizes[: q + 1]))
        capacity.append(between[edges])
    row = np.cumsum(np.concatenate([[0], *counts, np.zeros(sizes[-1], np.intp)]))
    return Graph(
        np.repeat(np.arange(len(nodes)), sizes).astype(np.int32),
        row.astype(np.int32),
        np.concatenate(above).astype(np.int32),
        np.concatenate(capacity),
        supplies[len(upward)][nodes[-1]],
    )


@dataclass(frozen=True, slots=True, eq=False)
class MaxFlow:
    """Maximum flows, and for each the minimum cut that proves that there is no larger one.

    Attributes:
        values: [sinks], the maximum flow into each sink.
        bounds: [sinks], the smaller of the two trivial cuts, the source's capacity and the sink's incoming edges.
        crossing: [sinks, layers + 1], the capacity of the minimum cut's edges in each layer, first layer first, and
            last the source's own capacity in the cut. The sum over the last axis equals the value: it is added up from
            the capacities, independently of the flow. A sink that reaches a trivial cut has all of it in column 0 (the
            sink's incoming edges) or in the last column (the source's capacity).
    """

    values: Floats
    bounds: Floats
    crossing: Floats


def max_flow(
    capacities: Floats, source: int | Floats, sinks: Sequence[int] | None = None, *, progress: Progress | None = None
) -> MaxFlow:
    """Maximum flow from one source to each sink of a dense layered graph, exact to rounding in float64.

    The graph has node layers 0 … L of N tokens; the edge from (l + 1, i) to (l, j) has the capacity `capacities[l, i,
    j]`, [layers, tokens, tokens]. The source is a token of layer L, or capacities [tokens] of a super-source; sinks are
    tokens of layer 0, all by default. A value is within a relative 1e-11 of its minimum cut.

    Source: shortest augmenting paths in blocking flows after Dinic 1970.

    >>> capacities = np.array([[[0.5, 0.5], [0.1, 0.9]], [[0.7, 0.3], [0.0, 1.0]]])
    >>> max_flow(capacities, 0).values  # one path through each token between: min(0.7, 0.5) + min(0.3, 0.1), …
    array([0.6, 0.8])
    """
    upward = np.ascontiguousarray(capacities.transpose(0, 2, 1), dtype=np.float64)  # [layers, keys, queries]
    supply = source
    if isinstance(supply, int):
        supply = np.where(np.arange(upward.shape[1]) == source, upward[-1, :, source].sum(), 0.0)
    total = float(supply.sum())
    demands = upward[0] if sinks is None else upward[0][list(sinks)]  # [sinks, tokens]
    arrived = demands.sum(axis=1)
    bounds = np.minimum(total, arrived)
    closed = _closed_form(upward, supply, demands)
    if closed is None:
        values, crossing = inner_flows(upward[1:], supply, demands, bounds, progress=progress)
    else:
        values, crossing = closed
        if progress:
            progress(len(demands))
    reached = values >= bounds
    at_sink, at_source = reached & (arrived <= total), reached & (arrived > total)
    crossing[reached] = 0.0
    crossing[at_sink, 0] = arrived[at_sink]
    crossing[at_source, -1] = total
    return MaxFlow(values, bounds, crossing)


def _closed_form(upward: Floats, supply: Floats, demands: Floats) -> tuple[Floats, Floats] | None:
    """Return the flow through edge-disjoint paths, Σ_k min(supply_k, demand_k): values, and cuts by boundary.

    It requires one layer, or two from a single token with the capacity of its edges; otherwise None is returned.
    """
    edges = upward[-1][:, supply > 0]
    if len(upward) == 2 and edges.shape[1] == 1 and supply.sum() >= edges.sum() * (1 - EXACT):
        supply = edges[:, 0]
    elif len(upward) > 1:
        return None
    scarce = demands > supply  # [sinks, tokens]
    passed = np.minimum(demands, supply)
    crossing = np.zeros((len(demands), len(upward) + 1))
    crossing[:, 0] = np.where(scarce, 0.0, passed).sum(axis=1)
    crossing[:, 1] = np.where(scarce, passed, 0.0).sum(axis=1)
    return passed.sum(axis=1), crossing
