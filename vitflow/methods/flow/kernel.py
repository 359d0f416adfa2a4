"""The compiled search behind `max_flow`: blocking flows along shortest paths (Dinic), from a source to one sink.

Flow goes down, from supply to demand; the search goes up, from demand to supply, because the minimum cut is usually
near the sink.

The first phase follows the layers straight up, which usually gives nearly the maximum. In the later phases `_label`
gives each node its distance to an unmet demand in the residual graph, and `_block` blocks all shortest paths. When no
supply can be labelled any more, the labelled nodes are the sink's side of a minimum cut.

It also terminates in floating point: each step sets at least one residual, supply or demand to exactly 0 (x − x) or
closes a node, and creates residuals only against the direction of its path, so the distance from demand to supply
strictly increases in each phase, up to the number of nodes.

All compiled functions that call each other stay in this one file: numba's cache on disk notices a change in the file of
a function, but not in another file that it calls.

Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


def compiled(function: Function) -> Function:
    """Compile on the first call, without the GIL, and cache the machine code on disk if possible."""
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no writable cache folder
        return cast(Function, njit(nogil=True)(function))


class Graph(NamedTuple):
    """The layers shared by all sinks: m edge layers between m + 1 node layers, numbered from the lowest."""

    layer: Ints  # [nodes]: the layer of each node, from 0
    row: Ints  # [nodes + 1]: index of the first edge above each node
    above: Ints  # [edges]: the upper node
    capacity: Floats  # [edges]
    supply: Floats  # [top nodes]


class Workspace(NamedTuple):
    """Buffers of one thread for solving consecutive sinks; between sinks the residuals equal the capacities."""

    residual: Floats  # [edges]
    slot: Ints  # [edges]: 1 + position in the log for an edge that has been used, otherwise 0
    log: Ints  # ids of the used edges; the next three fields are per entry
    carried: Floats  # flow on the edge; capacity − residual would lose small amounts on large edges
    below: Ints  # its lower node
    following: Ints  # the position of the next used edge below the same upper node, -1 for none
    first: Ints  # [nodes]: the position of the first used edge below each node, -1 for none
    used: Ints  # [1]: length of the log
    supply: Floats  # [top nodes]: what each may still take in
    demand: Floats  # [bottom nodes]: what each may still pass on
    arc: Ints  # [nodes]: the next edge above each node to try
    back: Ints  # [nodes]: the position of the next used edge below it to try
    level: Ints  # [nodes]: distance to an unmet demand, -1 without a label, -2 without a path to a supply
    queue: Ints  # [nodes]: the labelled nodes, by level
    path: Ints  # the nodes of a path, from the sink upwards
    steps: Ints  # its edges, −1 − position in the log for used edges that it goes back on
    room: Floats  # remaining demand of each node on the path
    sent: Floats  # flow already sent by it


def workspace(graph: Graph) -> Workspace:
    """Allocate the buffers of one thread; the OS commits only pages that are written."""
    nodes, edges = len(graph.layer), len(graph.capacity)

    def ints(size: int) -> Ints:
        return np.empty(size, np.int32)

    return Workspace(
        residual=graph.capacity.copy(),
        slot=np.zeros(edges, np.int32),
        log=ints(edges),
        carried=np.empty(edges),
        below=ints(edges),
        following=ints(edges),
        first=ints(nodes),
        used=np.zeros(1, np.int32),
        supply=np.empty(len(graph.supply)),
        demand=np.empty(int((graph.layer == 0).sum())),
        arc=ints(nodes),
        back=ints(nodes),
        level=ints(nodes),
        queue=ints(nodes),
        path=ints(nodes + 1),
        steps=ints(nodes + 1),
        room=np.empty(nodes + 1),
        sent=np.empty(nodes + 1),
    )


@compiled
def _block(graph: Graph, flow: float, enough: float, work: Workspace) -> float:
    """Block all paths from unmet demands to supplies along growing levels, until the flow is `enough`; return the flow.

    A depth-first search: a node passes on, edge by edge, as much as was requested, and an edge is written once for the
    sum of all paths through it. A node that cannot pass on all is skipped from then on.
    """
    row, above, capacity, level = graph.row, graph.above, graph.capacity, work.level
    residual, slot, log, carried = work.residual, work.slot, work.log, work.carried
    below, following, first = work.below, work.following, work.first
    supply, demand, arc, back = work.supply, work.demand, work.arc, work.back
    path, steps, room, sent = work.path, work.steps, work.room, work.sent
    top, used = len(graph.layer) - len(supply), work.used[0]
    for sink in range(len(demand)):
        if flow >= enough:
            break
        if not demand[sink] > 0.0:
            continue
        depth = 0
        path[0], room[0], sent[0] = sink, demand[sink], 0.0
        while True:
            v = path[depth]
            if v >= top:
                amount = min(room[depth], supply[v - top])
                supply[v - top] -= amount
                room[depth] -= amount
                sent[depth] += amount
            if room[depth] > 0.0:
                e, end, after = arc[v], row[v + 1], level[v] + 1
                while e < end and not (level[above[e]] == after and residual[e] > 0.0):
                    e += 1
                arc[v] = e
                if e < end:
                    steps[depth] = e
                    depth += 1
                    path[depth], room[depth], sent[depth] = above[e], min(room[depth - 1], residual[e]), 0.0
                    continue
                position = back[v]
                while position >= 0 and not (level[below[position]] == after and carried[position] > 0.0):
                    position = following[position]
                back[v] = position
                if position >= 0:
                    steps[depth] = -1 - position
                    depth += 1
                    path[depth], room[depth], sent[depth] = (
                        below[position],
                        min(room[depth - 1], carried[position]),
                        0.0,
                    )
                    continue
                level[v] = -2
            if depth == 0:
                break
            depth -= 1
            e = steps[depth]
            amount = min(room[depth], residual[e] if e >= 0 else carried[-1 - e])
            if room[depth + 1] > 0.0:  # otherwise all that was requested, which differs from its sum in the last bit
                amount = min(amount, sent[depth + 1])
            if amount > 0.0:
                if e < 0:  # an edge in the log returns some of what it carries
                    carried[-1 - e] -= amount
                    edge = log[-1 - e]
                    residual[edge] = capacity[edge] if carried[-1 - e] == 0.0 else residual[edge] + amount
                elif slot[e] > 0:
                    residual[e] -= amount
                    carried[slot[e] - 1] += amount
                else:
                    residual[e] -= amount
                    log[used], carried[used], below[used] = e, amount, path[depth]
                    following[used], first[v] = first[v], used
                    used += 1
                    slot[e] = used
                room[depth] -= amount
                sent[depth] += amount
        demand[sink] = room[0]
        flow += sent[0]
    work.used[0] = used
    return flow


@compiled
def _label(graph: Graph, work: Workspace) -> bool:
    """Label nodes with their distance to an unmet demand until a supply is labelled; False if none can be."""
    row, above, level, queue, residual = graph.row, graph.above, work.level, work.queue, work.residual
    carried, below, following, first = work.carried, work.below, work.following, work.first
    supply, demand = work.supply, work.demand
    top = len(graph.layer) - len(supply)
    level[:] = -1
    size = 0
    for k in range(len(demand)):
        if demand[k] > 0.0:
            level[k] = 0
            queue[size] = k
            size += 1
    x = 0
    while x < size:
        v = queue[x]
        x += 1
        if v >= top and supply[v - top] > 0.0:
            return True
        for e in range(row[v], row[v + 1]):  # forward residual edges
            i = above[e]
            if level[i] < 0 and residual[e] > 0.0:
                level[i] = level[v] + 1
                queue[size] = i
                size += 1
        position = first[v]
        while position >= 0:  # backward residual edges
            k = below[position]
            if level[k] < 0 and carried[position] > 0.0:
                level[k] = level[v] + 1
                queue[size] = k
                size += 1
            position = following[position]
    return False


@compiled
def solve(graph: Graph, demands: Any, bounds: Any, search: bool, work: Workspace, values: Any) -> None:
    """Write the maximum flow of each sink to `values` [sinks]; demands are [sinks, bottom nodes], bounds [sinks].

    Without `search` only straight paths are filled, and the value may be too small. The workspace still holds the last
    sink's log, and after a search that stayed below the bound its labels, which prove that there is no larger flow.
    """
    for j in range(len(demands)):
        enough = bounds[j] * (1.0 - 1e-12)
        work.supply[:] = graph.supply
        work.demand[:] = demands[j]
        work.used[0] = 0
        work.first[:] = -1
        work.level[:] = graph.layer  # the first phase: straight up, no used edge to go back on
        work.back[:] = -1
        work.arc[:] = graph.row[:-1]
        flow = _block(graph, 0.0, enough, work)
        while search and flow < enough and _label(graph, work):
            work.back[:] = work.first
            work.arc[:] = graph.row[:-1]
            flow = _block(graph, flow, enough, work)
        values[j] = flow
        for x in range(work.used[0]):
            e = work.log[x]
            work.residual[e] = graph.capacity[e]
            work.slot[e] = 0
