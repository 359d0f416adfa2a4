"""Certificates of a maximum flow: the flow, edge by edge, and the sink's side of a minimum cut.

Both are read from the workspace that the compiled search leaves behind.
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vitflow.methods.flow import solver
from vitflow.methods.flow.kernel import solve, workspace
from vitflow.methods.flow.solver import MaxFlow

Array = NDArray[np.float64]
Source = int | Array


class Prover:
    """Proves the flows of one graph, sink by sink."""

    def __init__(self, capacities: Any, source: Source) -> None:
        self.capacities, self.source = np.asarray(capacities, np.float64), source
        self.layers, self.tokens = self.capacities.shape[:2]
        # What the source may send through each token of the top layer.
        one = isinstance(source, int)
        edges = self.capacities[-1, source].sum() if one else 0.0
        self.given = np.where(np.arange(self.tokens) == source, edges, 0.0) if one else np.asarray(source, float)
        upward = np.ascontiguousarray(self.capacities.transpose(0, 2, 1))
        self.inner = None
        if self.layers > 1:
            supplies, nodes = solver.shared_out(upward[1:], self.given)
            self.inner = solver.lowest_layers(upward[1:], nodes, supplies), nodes

    def prove(self, actual: MaxFlow, sink: int) -> None:
        """No flow exceeds a cut, and this one reaches it: its edges are added up one by one, and the flow fits them."""
        flows, side = self.flow_and_cut(sink)
        value, capacities = actual.values[sink], self.capacities
        boundaries = [layer[~side[n + 1]][:, side[n]].sum() for n, layer in enumerate(capacities)]
        boundaries.append(self.given[side[-1]].sum())
        assert sum(boundaries) == pytest.approx(value, rel=1e-10, abs=1e-290)
        rounding = 1e-14 * capacities.max() * self.tokens
        assert (flows >= 0).all() and (flows <= capacities).all()
        np.testing.assert_allclose(flows[1:].sum(axis=1), flows[:-1].sum(axis=2), rtol=0, atol=rounding)
        assert (flows[-1].sum(axis=1) <= self.given + rounding).all()
        assert not np.delete(flows[0], sink, axis=1).any()
        assert flows[0].sum() == pytest.approx(value, rel=1e-11, abs=rounding)

    def flow_and_cut(self, sink: int) -> tuple[Array, NDArray[np.bool_]]:
        """A maximum flow [layers, tokens, tokens], and the sink's side [layers + 1, tokens] of a minimum cut."""
        demand, total = self.capacities[0, :, sink].copy(), float(self.given.sum())
        bound = min(total, float(demand.sum()))
        flows = np.zeros_like(self.capacities)
        side = np.zeros((self.layers + 1, self.tokens), np.bool_)
        if self.inner is None:
            passed = np.minimum(self.given, demand)
            value = float(passed.sum())
            side[1] = demand > self.given
        else:
            value, passed = self._search(demand, bound, flows, side)
        side[0, sink] = True
        flows[0, :, sink] = passed
        if value >= bound * (1 - solver.EXACT):  # a trivial cut: the sink's edges, or the source's capacity
            side[1:] = demand.sum() > total
        if isinstance(self.source, int):  # the other tokens of the top layer get nothing: no matter where they are
            side[-1, np.arange(self.tokens) != self.source] = True
        return flows, side

    def _search(self, demand: Array, bound: float, flows: Array, side: NDArray[np.bool_]) -> tuple[float, Array]:
        """Fill flow and side between; the value, and what each lowest node passes on."""
        assert self.inner is not None
        graph, nodes = self.inner
        work = workspace(graph)
        work.level[:] = -1
        values = np.zeros(1)
        solve(graph, demand[None, nodes[0]], np.array([bound]), True, work, values)
        token = np.concatenate(nodes)
        # Nodes that the source does not reach may lie on the sink's side: nothing leads there from the other.
        side[1 : len(nodes) + 1] = True
        for layer, tokens in enumerate(nodes):
            side[layer + 1, tokens] = work.level[graph.layer == layer] >= 0
        used = slice(int(work.used[0]))
        edges, below = work.log[used], work.below[used]
        flows[graph.layer[below] + 1, token[graph.above[edges]], token[below]] = np.minimum(
            work.carried[used], graph.capacity[edges]
        )
        passed = np.zeros(self.tokens)
        passed[nodes[0]] = demand[nodes[0]] - work.demand
        return float(values[0]), passed
