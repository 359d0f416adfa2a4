"""Strategy around the compiled search: the part of the graph and the thread for each sink.

What makes all sinks together cheap:

- Sinks share the layers between. What the source cannot reach is left out of them once, and of the others only edges
  with a capacity are looked at: after `discard_ratio`, a few in a hundred.
- No flow exceeds the source's capacity or the sink's incoming capacity. A flow that reaches either is a maximum: no
  search for a cut is needed.
- Passing the source's capacity down in proportion to the edges (attention rollout, where rows sum to 1) is a feasible
  flow; what it delivers to a layer may be taken as the supply of the layers below. A sink that reaches its bound there
  does so in the whole graph. In deep graphs three or four layers mostly suffice.
- Only sinks that fall short are solved in the whole graph, down to a minimum cut.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.errors import ShapeError
from vitflow.methods.flow.kernel import Workspace, solve, workspace
from vitflow.methods.flow.layers import Floats, Graph, count_edges, fill_edges

Progress = Callable[[int], object]
Indices = NDArray[np.intp]

# Relative distance to its bound below which a flow has reached it: the accuracy of float64 sums of thousands of edges.
EXACT = 1e-12
# Maximum sum of the residuals that are treated as 0, as a share of the bound.
DUST = 1e-11
# Windows of so many lowest layers are tried before the whole graph, each on a sample of the sinks first, and on the
# others if it serves more than this share of the sample.
WINDOWS = (3, 4, 6)
SAMPLE = 8
ENOUGH = 0.7
# Windows leave out edges below this share of their layer's mean: most edges, and little of the capacity.
SMALL = 0.2
# Layers with at least this share of all pairs of nodes as edges are stored densely.
FULL = 0.5
# Each thread copies the capacities; fewer threads are used where the copies would exceed this.
WORKSPACE_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class _Sinks:
    """The sinks to solve, and what is found for each.

    Attributes:
        demands: [sinks, tokens], capacity from each node of the lowest layer to each sink.
        bounds: [sinks], the smaller trivial cut.
        values: [sinks], filled.
        crossing: [sinks, layers + 2], filled for flows below their bound.
    """

    demands: Floats
    bounds: Floats
    values: Floats
    crossing: Floats

    def reached(self, which: Indices) -> NDArray[np.bool_]:
        """Return a mask of the sinks whose flow reaches its bound."""
        done: NDArray[np.bool_] = self.values[which] >= self.bounds[which] * (1 - EXACT)
        return done


class InnerGraph:
    """The layers between the edges of the source and those of the sinks, which all sinks share.

    Args:
        upward: capacities [layers, keys, queries], lowest layer first, C-contiguous.
        supply: the capacities [tokens] with which the source feeds the top.
        workers: threads to use at most.
    """

    def __init__(self, upward: Floats, supply: Floats, workers: int) -> None:
        self.layers, self.tokens = len(upward), len(supply)
        if upward.size >= 2**31:
            raise ShapeError(f"Expected less than 2^31 edges, got {self.layers} inner layers of {self.tokens} tokens.")
        self.workers = workers
        self.upward = upward
        self.supplies, self.nodes = _shared_out(upward, supply)

    def solve(self, demands: Floats, bounds: Floats, *, progress: Progress | None = None) -> tuple[Floats, Floats]:
        """Find the maximum flow for each sink, and the minimum cut of each whose flow stays below its bound.

        Args:
            demands: [sinks, tokens], capacity from each node of the lowest layer to each sink.
            bounds: [sinks], the smaller trivial cut.
            progress: called with the number of further sinks solved.

        Returns:
            values: [sinks]; a flow that reaches its bound gets the bound itself.
            crossing: [sinks, layers + 2], the cut's capacity among demands, in each layer from the lowest, among
                supplies.
        """
        report = progress or (lambda count: None)
        count = len(bounds)
        sinks = _Sinks(demands, bounds, bounds.copy(), np.zeros((count, self.layers + 2)))
        still = np.flatnonzero(bounds > 0)
        report(count - len(still))
        with ThreadPoolExecutor(self.workers) as pool:
            for layers in WINDOWS:
                if layers < self.layers and len(still):
                    still = self._straight(pool, layers, still, sinks, report)
            if len(still):
                self.window(self.layers).run(pool, still, sinks, search=True, report=report)
        np.copyto(sinks.values, bounds, where=sinks.reached(np.arange(count)))
        return sinks.values, sinks.crossing

    def _straight(
        self, pool: ThreadPoolExecutor, layers: int, which: Indices, sinks: _Sinks, report: Progress
    ) -> Indices:
        """Try straight paths through the lowest layers; returns the sinks that fall short."""
        window = self.window(layers, SMALL)
        for part in _sample_first(which):
            window.run(pool, part, sinks, search=False)
            reached = sinks.reached(part)
            report(int(reached.sum()))
            which = np.setdiff1d(which, part[reached], assume_unique=True)
            if reached.mean() <= ENOUGH:
                break
        return which

    def window(self, layers: int, small: float = 0.0) -> "_Window":
        """Return the lowest layers, without edges of at most this share of their layer's mean."""
        nodes = self.nodes[: layers + 1]
        return _Window(_arranged(self.upward[:layers], nodes, self.supplies[layers], small), nodes, self.workers)


class _Window:
    """The lowest layers, with what reaches them as their supply, and the threads' workspaces.

    Args:
        graph: the layers.
        nodes: the tokens that its nodes stand for, by layer.
        workers: threads to use at most.
    """

    def __init__(self, graph: Graph, nodes: list[Indices], workers: int) -> None:
        self.graph, self.nodes = graph, nodes
        self.workers = max(1, min(workers, WORKSPACE_BYTES // (8 * len(graph.capacity) + 1)))
        self.idle: SimpleQueue[Workspace] = SimpleQueue()
        for _ in range(self.workers):
            self.idle.put(workspace(graph))

    def run(
        self,
        pool: ThreadPoolExecutor,
        which: Indices,
        sinks: _Sinks,
        *,
        search: bool,
        report: Progress | None = None,
    ) -> None:
        """Solve some sinks."""

        def some(part: Indices) -> None:
            work = self.idle.get()
            try:
                self._solve(work, part, sinks, search=search)
            finally:
                self.idle.put(work)

        # Neighbouring sinks take similar time, so parts are interleaved.
        parts = max(self.workers, min(len(which) // SAMPLE, 8 * self.workers))
        for part in _share_out(pool, self.workers, some, [which[start::parts] for start in range(parts)]):
            if report:
                report(len(part))

    def _solve(self, work: Workspace, which: Indices, sinks: _Sinks, *, search: bool) -> None:
        graph, layers = self.graph, len(self.nodes) - 1
        values, crossing = np.zeros(len(which)), np.zeros((len(which), layers + 2))
        demands = sinks.demands[np.ix_(which, self.nodes[0])]
        dust = DUST / max(1, len(graph.capacity))
        solve(graph, demands, sinks.bounds[which], dust, search, work, values, crossing)
        sinks.values[which] = values
        if search:
            sinks.crossing[which] = crossing


def _shared_out(upward: Floats, supply: Floats) -> tuple[list[Floats], list[Indices]]:
    """Propagate the supply to each layer of nodes, lowest first, in proportion to the capacities.

    Returns:
        The supplies [tokens], and the tokens that the source reaches, by what reaches them, most first. Paths that draw
        on plentiful nodes first leave the scarce ones to those who need them: it makes straight paths nearly optimal,
        and the residual search short.
    """
    supplies, reached = [supply], [supply > 0]  # shares may be too small for a number
    for matrix in upward[::-1]:  # [keys, queries]
        taken = matrix.sum(axis=0)
        share = np.minimum(np.divide(supplies[0], taken, out=np.zeros_like(taken), where=taken > 0), 1.0)
        supplies.insert(0, np.einsum("ki,i->k", matrix, share))
        reached.insert(0, ((matrix > 0) & reached[0]).any(axis=1))
    orders = [np.argsort(-amounts, kind="stable") for amounts in supplies]
    return supplies, [order[which[order]] for order, which in zip(orders, reached, strict=True)]


def _arranged(upward: Floats, nodes: list[Indices], supply: Floats, small: float) -> Graph:
    """Convert the layers between these nodes for the compiled search, without edges below a share of the mean."""
    sizes = np.array([len(tokens) for tokens in nodes])
    base = np.concatenate([[0], np.cumsum(sizes + 1)]).astype(np.int32)
    least = [small * float(matrix.mean()) if small else 0.0 for matrix in upward]
    counts = np.array([count_edges(matrix, nodes[q], nodes[q + 1], least[q]) for q, matrix in enumerate(upward)])
    pairs = sizes[:-1] * sizes[1:]
    full = counts >= FULL * pairs
    first = np.concatenate([[0], np.cumsum(np.where(full, pairs, counts))])
    row = np.full(base[-1] + 1, first[-1], np.int32)
    above, capacity = np.empty(first[-1], np.int32), np.empty(first[-1])
    for q, matrix in enumerate(upward):
        rows = row[base[q] : base[q + 1]]
        fill_edges(matrix, nodes[q], nodes[q + 1], least[q], full[q], base[q + 1], first[q], rows, above, capacity)
    return Graph(base, row, above, capacity, full, supply[nodes[-1]])


def _sample_first(which: Indices) -> Iterator[Indices]:
    """Yield a few of the sinks first, then the others; all at once if there are few."""
    if len(which) <= 2 * SAMPLE:
        yield which
        return
    sample = np.linspace(0, len(which) - 1, SAMPLE, dtype=np.intp)
    yield which[sample]
    yield np.delete(which, sample)


def _share_out(
    pool: ThreadPoolExecutor, workers: int, task: Callable[[Indices], None], parts: list[Indices]
) -> Iterator[Indices]:
    """Run the task on each part that is not empty, yielding parts as they are done."""
    parts = [part for part in parts if len(part)]
    if workers == 1 or len(parts) == 1:
        for part in parts:
            task(part)
            yield part
        return
    futures = {pool.submit(task, part): part for part in parts}
    try:
        for future in as_completed(futures):
            future.result()
            yield futures[future]
    finally:
        for future in futures:
            future.cancel()


if TYPE_CHECKING:
    from vitflow.methods.flow.solver import Progress


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
    """Maximum flow from one source to each sink of a dense layered graph, exact to rounding in float64.

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
    """Return the flow through edge-disjoint paths, Σ_k min(supply_k, demand_k): values, and cuts by boundary."""
    scarce = demands > supply  # [sinks, tokens]
    passed = np.minimum(demands, supply)
    at_source = np.where(scarce, passed, 0.0).sum(axis=1)
    at_sink = np.where(scarce, 0.0, passed).sum(axis=1)
    return passed.sum(axis=1), np.stack([at_sink, at_source], axis=1)
