"""The strategy around the compiled search: which part of the graph to solve each sink in, and on which thread.

How all sinks of a deep graph are solved in less time than a forward pass takes:

- No flow exceeds the source's capacity or the sink's incoming capacity. A flow that reaches either is a maximum: no
  search for a cut is needed.
- Sinks share the upper layers. Passing the source's capacity down in proportion to the edges (attention rollout, where
  rows sum to 1) is a feasible flow; what it delivers to a layer may be taken as the supply of the layers below. A sink
  that reaches its bound there does so in the whole graph. Three or four layers mostly suffice.
- Only sinks that fall short are solved in the whole graph, down to a minimum cut.
"""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError
from vitflow.methods.flow.edge_order import BUCKETS, arrange_edges
from vitflow.methods.flow.kernel import Floats, solve, workspace

Progress = Callable[[int], object]
Indices = NDArray[np.intp]

# A flow this close to its bound, relatively, has reached it: a float64 sum of some thousand edges is no better.
EXACT = 1e-12
# All residuals that count as 0 add up to at most this share of the bound.
DUST = 1e-11
# Windows of so many lowest layers are tried before the whole graph, each on a sample of the sinks first, and on the
# others if it serves more than this share of the sample.
WINDOWS = (2, 3, 4, 6, 9)
SAMPLE = 8
ENOUGH = 0.7
# Edges of at least 2^-(s + log2 N) of the supply are tried before smaller ones, for each s.
STEPS = (2, 5, 9)
# Each thread copies the capacities; fewer threads are used where the copies would exceed this.
WORKSPACE_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class _Sinks:
    """The sinks to solve, and what is found for each.

    Attributes:
        demands: [sinks, tokens], what each sink takes from each node of the lowest layer, renumbered.
        bounds: [sinks], the smaller trivial cut.
        values: [sinks], filled.
        crossing: [sinks, layers + 2], filled for flows below their bound.
        labels: bool [sinks, layers + 1, tokens] or [0, 0, 0], the same.
    """

    demands: Floats
    bounds: Floats
    values: Floats
    crossing: Floats
    labels: NDArray[np.bool_]

    def reached(self, which: Indices) -> NDArray[np.bool_]:
        """Which of these sinks have a flow that reaches its bound."""
        done: NDArray[np.bool_] = self.values[which] >= self.bounds[which] * (1 - EXACT)
        return done


class InnerGraph:
    """The layers between the edges of the source and those of the sinks, which all sinks share.

    The tokens of each layer are renumbered by what reaches them when every node above shares out in proportion to its
    edges, most first: paths that draw on plentiful nodes first leave the scarce ones to those who need them. It makes
    straight paths nearly optimal, and the residual search short.

    Args:
        upward: capacities [layers, keys, queries], lowest layer first, C-contiguous.
        supply: the capacities [tokens] with which the source feeds the top.
        workers: threads to use at most.
    """

    def __init__(self, upward: Floats, supply: Floats, workers: int) -> None:
        self.layers, self.tokens = len(upward), len(supply)
        if upward.size >= 2**31:
            raise ShapeError(f"Expected less than 2^31 edges, got {self.layers} inner layers of {self.tokens} tokens.")
        self.workers = max(1, min(workers, WORKSPACE_BYTES // (8 * upward.size + 1)))
        supplies = _shared_out(upward, supply)
        self.rank = np.stack([np.argsort(-share, kind="stable") for share in supplies])  # lowest nodes first
        self.supplies = np.take_along_axis(np.stack(supplies), self.rank, axis=1)
        self._upward = upward.reshape(-1)
        self.capacity = np.empty(upward.size)  # renumbered, as far up as it is used
        self._arranged = 0
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(self.workers):
            self._idle.put(_Worker(self))
        exponent = math.frexp(float(supply.sum()))[1] - 1
        steps = [math.ceil(math.log2(self.tokens)) + step for step in STEPS]
        self._scale, self._steps = exponent + 1023, np.array([*steps, BUCKETS])
        self.thresholds = np.array([*(math.ldexp(1.0, exponent - step) for step in steps), 0.0])
        self.order = np.empty(upward.size, np.int16 if self.tokens < 2**15 else np.int32)
        self.prefix = np.zeros((len(self._steps), self.layers * self.tokens), np.int32)

    def solve(
        self, demands: Floats, bounds: Floats, *, labels: bool = False, progress: Progress | None = None
    ) -> tuple[Floats, Floats, NDArray[np.bool_]]:
        """Find the maximum flow for each sink, and the minimum cut of each whose flow stays below its bound.

        Args:
            demands: [sinks, tokens], what each sink takes from each node of the lowest layer.
            bounds: [sinks], the smaller trivial cut.
            labels: whether to give the nodes of the cuts.
            progress: called with the number of further sinks solved.

        Returns:
            values: [sinks]; a flow that reaches its bound gets the bound itself.
            crossing: [sinks, layers + 2], the cut's capacity among demands, in each layer from the lowest, among
                supplies.
            labels: bool [sinks, layers + 1, tokens] or [0, 0, 0], the nodes on the sink's side of the cut.
        """
        report = progress or (lambda count: None)
        count = len(bounds)
        sinks = _Sinks(
            demands[:, self.rank[0]],
            bounds,
            bounds.copy(),
            np.zeros((count, self.layers + 2)),
            np.zeros((count, self.layers + 1, self.tokens) if labels else (0, 0, 0), np.bool_),
        )
        still = np.flatnonzero(bounds > 0)
        report(count - len(still))
        with ThreadPoolExecutor(self.workers) as pool:
            for layers in [size for size in WINDOWS if size < self.layers]:
                for part in _sample_first(still):  # nothing where no sink is left
                    self._run(pool, layers, part, sinks, search=False)
                    reached = sinks.reached(part)
                    report(int(reached.sum()))
                    still = np.setdiff1d(still, part[reached], assume_unique=True)
                    if reached.mean() <= ENOUGH:
                        break
            self._run(pool, self.layers, still, sinks, search=True, report=report)
        np.copyto(sinks.values, bounds, where=sinks.reached(np.arange(count)))
        if labels:  # back to the old numbers
            renumbered = sinks.labels.copy()
            np.put_along_axis(sinks.labels, np.broadcast_to(self.rank, renumbered.shape), renumbered, axis=2)
        return sinks.values, sinks.crossing, sinks.labels

    def flow(self, demand: Floats, bound: float) -> tuple[Floats, Floats, Floats]:
        """One sink's flow: what each lowest node passes on, what each edge carries, what each top node takes in."""
        sinks = _Sinks(
            demand[None, self.rank[0]],
            np.array([bound]),
            np.zeros(1),
            np.zeros((1, self.layers + 2)),
            np.zeros((0, 0, 0), np.bool_),
        )
        with ThreadPoolExecutor(1) as pool:
            self._arrange(pool, self.layers, ordered=False)
        worker = self._idle.get()
        worker.run(self.layers, np.zeros(1, np.intp), sinks, search=True, undo=False)
        work, used = worker.work, worker.work.slot > 0
        renumbered = np.zeros(self.capacity.size)
        renumbered[used] = np.minimum(work.carried[work.slot[used] - 1], self.capacity[used])
        shape = (self.layers, self.tokens, self.tokens)
        carried = np.empty(shape)
        for layer, matrix in enumerate(renumbered.reshape(shape)):
            carried[layer][np.ix_(self.rank[layer], self.rank[layer + 1])] = matrix
        passed, taken = np.empty(self.tokens), np.empty(self.tokens)
        passed[self.rank[0]] = demand[self.rank[0]] - work.demand
        taken[self.rank[-1]] = self.supplies[-1] - work.supply
        return passed, carried, taken

    def _arrange(self, pool: ThreadPoolExecutor, layers: int, *, ordered: bool) -> None:
        """Renumber the tokens of the lowest layers and order their edges, as far as that is not done yet."""
        rows = np.arange(self._arranged * self.tokens, layers * self.tokens)

        def some(part: Indices) -> None:
            arrange_edges(
                self.tokens,
                self._upward,
                self.rank,
                self.capacity,
                self.capacity.view(np.int64),
                ordered,
                self._scale,
                self._steps,
                self.order,
                self.prefix,
                int(part[0]),
                int(part[-1]) + 1,
            )

        for _ in _share_out(pool, self.workers, some, np.array_split(rows, self.workers)):
            pass
        self._arranged = max(self._arranged, layers)

    def _run(
        self,
        pool: ThreadPoolExecutor,
        layers: int,
        which: Indices,
        sinks: _Sinks,
        *,
        search: bool,
        report: Progress | None = None,
    ) -> None:
        """Solve some sinks in the window of the lowest layers."""
        if not len(which):
            return
        self._arrange(pool, layers, ordered=not search)

        def some(part: Indices) -> None:
            worker = self._idle.get()
            try:
                worker.run(layers, part, sinks, search=search)
            finally:
                self._idle.put(worker)

        # Neighbouring sinks are alike: interleaved parts take equally long.
        parts = max(self.workers, min(len(which) // SAMPLE, 8 * self.workers))
        for part in _share_out(pool, self.workers, some, [which[start::parts] for start in range(parts)]):
            if report:
                report(len(part))


class _Worker:
    """One thread's workspace; capacities are copied into it only as far up as they are used."""

    def __init__(self, graph: InnerGraph) -> None:
        self.graph = graph
        self.work = workspace(graph.layers, graph.tokens)
        self.filled = 0

    def run(self, layers: int, which: Indices, sinks: _Sinks, *, search: bool, undo: bool = True) -> None:
        graph = self.graph
        part = slice(self.filled * graph.tokens**2, layers * graph.tokens**2)
        self.work.residual[part] = graph.capacity[part]
        self.filled = max(self.filled, layers)
        # Passes over large edges first pay in deep windows; in shallow ones small edges must be filled anyway.
        passes = slice(-1 if search and layers < 3 else 0, None)
        values, crossing = np.zeros(len(which)), np.zeros((len(which), layers + 2))
        demands = sinks.demands[which]
        wanted = len(which) if search and len(sinks.labels) else 0
        labels = np.zeros((wanted, (layers + 1) * graph.tokens), np.bool_)
        solve(
            layers,
            graph.tokens,
            graph.capacity,
            not search,
            graph.order,
            graph.prefix[passes],
            graph.thresholds[passes],
            graph.supplies[layers],
            demands,
            _largest_first(demands),
            sinks.bounds[which],
            DUST / (layers * graph.tokens**2),
            search,
            self.work,
            values,
            crossing,
            labels,
            undo,
        )
        sinks.values[which] = values
        if search:
            sinks.crossing[which] = crossing
        if wanted:
            sinks.labels[which] = labels.reshape(wanted, layers + 1, graph.tokens)


def _shared_out(upward: Floats, supply: Floats) -> list[Floats]:
    """What the supply delivers to each layer of nodes, lowest first, when each node shares out in proportion."""
    supplies = [supply]
    for matrix in upward[::-1]:  # [keys, queries]
        capacity = matrix.sum(axis=0)
        with np.errstate(over="ignore"):
            share = np.divide(supplies[0], capacity, out=np.zeros_like(capacity), where=capacity > 0)
        supplies.insert(0, matrix @ np.minimum(share, 1.0))
    return supplies


def _largest_first(numbers: Floats) -> NDArray[np.intp]:
    """Indices that sort each row by binary exponent, largest first: exact enough, and quick."""
    exponents = np.frexp(numbers)[1].astype(np.int16)
    return np.argsort(-exponents, axis=-1, kind="stable")


def _sample_first(which: Indices) -> Iterator[Indices]:
    """A few of the sinks, then the others; all at once where there are few."""
    if len(which) <= 2 * SAMPLE:
        if len(which):
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
