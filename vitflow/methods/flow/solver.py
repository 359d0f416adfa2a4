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
from queue import SimpleQueue
from typing import NamedTuple

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
) -> Floats:
    """Find the maximum flow for each sink, [sinks].

    The inner layers `upward` are [layers, keys, queries], lowest first, C-contiguous; `demands` [sinks, tokens] are the
    capacities from the lowest nodes to each sink.
    """
    if upward.size >= 2**31:
        raise ShapeError(f"Expected less than 2^31 edges, got {len(upward)} inner layers of {len(supply)} tokens.")
    report = progress or (lambda count: None)
    values = bounds.copy()
    supplies, nodes = shared_out(upward, supply)
    remaining = np.flatnonzero(bounds > 0)
    report(len(bounds) - len(remaining))
    for layers in (*(count for count in WINDOWS if count < len(upward)), len(upward)):
        if not len(remaining):
            break
        whole = layers == len(upward)
        graph = lowest_layers(upward[:layers], nodes, supplies, 0.0 if whole else SMALL)
        short = []
        for part, flows in _solved(graph, demands[:, nodes[0]], bounds, remaining, whole):
            below = flows < bounds[part] * (1 - EXACT)
            if whole:
                values[part] = np.where(below, flows, bounds[part])
                report(len(part))
            else:
                short.append(part[below])
                report(int((~below).sum()))
        remaining = np.concatenate(short) if short else remaining[:0]
    return values


def _solved(
    graph: Graph, demands: Floats, bounds: Floats, which: Indices, search: bool
) -> Iterator[tuple[Indices, Floats]]:
    """Yield some sinks and their values, part by part, from several threads."""
    workers = max(1, min(torch.get_num_threads(), WORKSPACE_BYTES // (8 * len(graph.capacity) + 1)))
    idle: SimpleQueue[Workspace] = SimpleQueue()
    for _ in range(workers):
        idle.put(workspace(graph))

    def some(part: Indices) -> tuple[Indices, Floats]:
        work, values = idle.get(), np.zeros(len(part))
        solve(graph, demands[part], bounds[part], search, work, values)
        idle.put(work)
        return part, values

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


class MaxFlow(NamedTuple):
    """Maximum flows [sinks], and the smaller of both trivial cuts: the source's capacity and the sink's edges."""

    values: Floats
    bounds: Floats


def max_flow(capacities: Floats, source: int | Floats, *, progress: Progress | None = None) -> MaxFlow:
    """Maximum flow from one source to each sink of a dense layered graph, exact to rounding in float64.

    The graph has node layers 0 … L of N tokens; the edge from (l + 1, i) to (l, j) has the capacity `capacities[l, i,
    j]`, [layers, tokens, tokens]. The source is a token of layer L, or capacities [tokens] of a super-source; sinks are
    the tokens of layer 0. A value is within a relative 1e-11 of its minimum cut.

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
    demands = upward[0]  # [sinks, tokens]
    bounds = np.minimum(total, demands.sum(axis=1))
    if len(upward) > 1:
        return MaxFlow(inner_flows(upward[1:], supply, demands, bounds, progress=progress), bounds)
    if progress:
        progress(len(demands))
    return MaxFlow(np.minimum(demands, supply).sum(axis=1), bounds)
