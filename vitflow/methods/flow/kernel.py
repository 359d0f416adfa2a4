"""The compiled search behind `max_flow`: straight paths, then shortest augmenting paths, from a source to one sink.

The graph is that of `edges`. Flow goes down, from supply to demand; the search goes up, from demand to supply, because
the minimum cut mostly lies near the sink.

`_push_straight` blocks all paths that go straight up, which mostly gives nearly the maximum. Then come Dinic's phases:
`_label` gives each node its distance to an unmet demand in the residual graph, `_augment` blocks all shortest paths.
When no supply can be labelled any more, the labelled nodes are the sink's side of a minimum cut.

It ends in floating point too. Each augmentation sets at least one residual, supply or demand to exactly 0 (x − x),
changes no residual off its path, and creates residuals only against the direction of its path. So a phase has at most
as many augmentations as there are edges, and the distance from demand to supply grows strictly from phase to phase, up
to the number of nodes. Residuals of at most `dust` count as 0: the cut is then at most `dust` per edge larger than the
flow; where that shows, the search goes on with `dust` = 0.

All compiled functions that call each other stay in this one file: numba's cache on disk notices a change in the file of
a function, but not in another file that it calls.

Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from typing import Any, NamedTuple

import numpy as np

from vitflow.compiled import compiled, compiled_within
from vitflow.methods.flow.layers import Floats, Graph, Ints


class Workspace(NamedTuple):
    """Buffers of one thread for solving consecutive sinks; between sinks the residuals equal the capacities."""

    residual: Floats  # [edges]
    slot: Ints  # [edges]: 1 + position in the log for an edge that has been used, otherwise 0
    log: Ints  # the edges that have been used, and for each:
    carried: Floats  # what it carries; capacity − residual would lose small amounts on large edges
    below: Ints  # its lower node
    following: Ints  # the position of the next used edge below the same upper node, -1 for none
    first: Ints  # [nodes]: the position of the first used edge below each node, -1 for none
    used: Ints  # [1]: length of the log
    flow: Floats  # [1]: what has been pushed so far
    supply: Floats  # [top nodes]: what each may still take in
    demand: Floats  # [bottom nodes]: what each may still pass on
    arc: Ints  # [nodes]: how far the edges above each node have been tried
    back: Ints  # [nodes]: how far the used edges below it have
    live: Ints  # [nodes]: union-find: the first node of the layer from here on that is still of use
    level: Ints  # [nodes]: distance to an unmet demand, -1 unlabelled
    queue: Ints  # [nodes]: the labelled nodes, by level
    path: Ints  # the nodes of a path, from the sink upwards
    steps: Ints  # its edges, −1 − e for those that it goes back on
    room: Floats  # [layers of edges]: what each node of a straight path is still asked for
    sent: Floats  # [layers of edges]: what it has passed on


def workspace(graph: Graph) -> Workspace:
    """Allocate for one thread; memory that is never written to is never committed."""
    nodes, edges = len(graph.row) - 1, len(graph.capacity)
    return Workspace(
        residual=graph.capacity.copy(),
        slot=np.zeros(edges, np.int32),
        log=np.empty(edges, np.int32),
        carried=np.empty(edges),
        below=np.empty(edges, np.int32),
        following=np.empty(edges, np.int32),
        first=np.empty(nodes, np.int32),
        used=np.zeros(1, np.int32),
        flow=np.zeros(1),
        supply=np.empty(len(graph.supply)),
        demand=np.empty(int(graph.base[1]) - 1),
        arc=np.empty(nodes, np.int32),
        back=np.empty(nodes, np.int32),
        live=np.empty(nodes, np.int32),
        level=np.empty(nodes, np.int32),
        queue=np.empty(nodes, np.int32),
        path=np.empty(nodes + 1, np.int32),
        steps=np.empty(nodes + 1, np.int32),
        room=np.empty(len(graph.full)),
        sent=np.empty(len(graph.full)),
    )


@compiled_within
def _find(live: Any, x: int) -> int:
    """Return the first useful node from x on, or the number that ends its layer."""
    root = x
    while live[root] != root:
        root = live[root]
    while live[x] != root:
        after = live[x]
        live[x] = root
        x = after
    return root


@compiled_within
def _live_edge(e: int, end: int, full: bool, shift: int, above: Any, live: Any) -> int:
    """Return the first edge from e on with a useful upper node, or the end of the edges above the node.

    Args:
        e: an edge above the node, or the end.
        end: where the edges above the node end.
        full: whether they lead to all nodes of the layer above, in their order;
        shift: then edge e leads to node e + shift.
        above: as in `Graph`.
        live: as in `Workspace`.
    """
    if full:
        return _find(live, e + shift) - shift if e < end else end
    while e < end and live[above[e]] != above[e]:
        e += 1
    return e


@compiled_within
def _open_edge(e: int, end: int, full: bool, shift: int, above: Any, live: Any, residual: Any, least: float) -> int:
    """Return the first such edge with more than `least` left."""
    e = _live_edge(e, end, full, shift, above, live)
    while e < end and not residual[e] > least:
        e = _live_edge(e + 1, end, full, shift, above, live)
    return e


@compiled_within
def _push(
    residual: Any,
    slot: Any,
    log: Any,
    carried: Any,
    below: Any,
    following: Any,
    first: Any,
    used: int,
    v: int,
    e: int,
    upper: int,
    amount: float,
) -> int:
    """Send an amount down the edge e from a node to the node v below it; returns the new length of the log."""
    residual[e] -= amount
    if slot[e] > 0:
        carried[slot[e] - 1] += amount
        return used
    log[used] = e
    carried[used] = amount
    below[used] = v
    following[used] = first[upper]
    first[upper] = used
    slot[e] = used + 1
    return used + 1


@compiled
def _push_straight(graph: Graph, dust: float, enough: float, work: Workspace) -> None:
    """Block every path that goes straight up and whose supply, demand and edges all exceed the dust.

    A depth-first search upwards from each demand: a node passes on, edge by edge, as much as it was asked for, and an
    edge is written once for all that comes down through its upper node. A node that cannot pass on all has no supply
    left above it, and is of no use from then on. It stops early when the flow is `enough`.
    """
    base, row, above, full = graph.base, graph.row, graph.above, graph.full
    residual, slot, log, carried, below = work.residual, work.slot, work.log, work.carried, work.below
    following, first, supply, demand = work.following, work.first, work.supply, work.demand
    arc, live, path, steps, room, sent = work.arc, work.live, work.path, work.steps, work.room, work.sent
    layers = len(base) - 2
    top = base[layers]
    used, flow = work.used[0], work.flow[0]
    for v in range(len(live)):
        live[v] = v
        arc[v] = row[v]
    for i in range(len(supply)):
        if not supply[i] > dust:
            live[top + i] = top + i + 1
    for sink in range(len(demand)):
        if flow >= enough:
            break
        if not demand[sink] > dust:
            continue
        q = 0
        path[0], room[0], sent[0] = sink, demand[sink], 0.0
        while True:
            v = path[q]
            e = end = row[v + 1]
            if room[q] > 0.0:
                shift = base[q + 1] - row[v]
                e = _open_edge(arc[v], end, full[q], shift, above, live, residual, dust)
                arc[v] = e
                if e == end:
                    live[v] = v + 1
            if e < end:
                upper = e + shift if full[q] else above[e]
                amount = min(room[q], residual[e])
                steps[q] = e
                if q + 1 < layers:
                    q += 1
                    path[q], room[q], sent[q] = upper, amount, 0.0
                    continue
                amount = min(amount, supply[upper - top])
                supply[upper - top] -= amount
                if not supply[upper - top] > dust:
                    live[upper] = upper + 1
            elif q > 0:
                upper = v
                q -= 1
                amount = min(room[q], residual[steps[q]])
                if room[q + 1] > 0.0:  # all that was asked for is not its sum, to the last bit
                    amount = min(amount, sent[q + 1])
            else:
                break
            if amount > 0.0:
                v, e = path[q], steps[q]
                used = _push(residual, slot, log, carried, below, following, first, used, v, e, upper, amount)
                room[q] -= amount
                sent[q] += amount
        demand[sink] = room[0]
        flow += sent[0]
    work.used[0], work.flow[0] = used, flow


@compiled
def _label(graph: Graph, dust: float, work: Workspace) -> int:
    """Label nodes with their distance to an unmet demand; returns the nearest supply's distance, or -1 for none.

    In the end the nodes without a label are those that are live.
    """
    base, row, above, full = graph.base, graph.row, graph.above, graph.full
    residual, carried, below, following, first = work.residual, work.carried, work.below, work.following, work.first
    supply, demand, live, level, queue = work.supply, work.demand, work.live, work.level, work.queue
    layers = len(base) - 2
    top = base[layers]
    for v in range(len(live)):
        live[v] = v
        level[v] = -1
    size = 0
    for k in range(len(demand)):
        if demand[k] > dust:
            level[k] = 0
            live[k] = k + 1
            queue[size] = k
            size += 1
    x = 0
    while x < size:
        v = queue[x]
        x += 1
        distance = level[v]
        q = 0
        while v >= base[q + 1]:
            q += 1
        if q < layers:  # what may still come down to this node
            end, shift = row[v + 1], base[q + 1] - row[v]
            e = _open_edge(row[v], end, full[q], shift, above, live, residual, dust)
            while e < end:
                i = e + shift if full[q] else above[e]
                level[i] = distance + 1
                live[i] = i + 1
                queue[size] = i
                size += 1
                e = _open_edge(e + 1, end, full[q], shift, above, live, residual, dust)
        elif supply[v - top] > dust:
            return int(distance)
        if q > 0:  # what has come down from this node may go back
            used = first[v]
            while used >= 0:
                k = below[used]
                if level[k] < 0 and carried[used] > dust:
                    level[k] = distance + 1
                    live[k] = k + 1
                    queue[size] = k
                    size += 1
                used = following[used]
    return -1


@compiled
def _climb(graph: Graph, dust: float, sink: int, distance: int, work: Workspace) -> bool:
    """Find a path from this demand to a supply at this distance, along growing levels; it is left in the workspace."""
    base, row, above, full = graph.base, graph.row, graph.above, graph.full
    residual, carried, below, following = work.residual, work.carried, work.below, work.following
    arc, back, live, level, path, steps = work.arc, work.back, work.live, work.level, work.path, work.steps
    layers = len(base) - 2
    path[0] = sink
    depth = q = 0
    while depth >= 0:
        v = path[depth]
        if depth == distance:
            if q == layers and work.supply[v - base[layers]] > dust:
                return True
        else:
            if q < layers:
                end, shift = row[v + 1], base[q + 1] - row[v]
                e = _open_edge(arc[v], end, full[q], shift, above, live, residual, dust)
                while e < end and level[e + shift if full[q] else above[e]] != depth + 1:
                    e = _open_edge(e + 1, end, full[q], shift, above, live, residual, dust)
                arc[v] = e
                if e < end:
                    steps[depth] = e
                    depth += 1
                    path[depth] = e + shift if full[q] else above[e]
                    q += 1
                    continue
            if q > 0:
                used = back[v]
                while used >= 0 and not (level[below[used]] == depth + 1 and carried[used] > dust):
                    used = following[used]
                back[v] = used
                if used >= 0:
                    steps[depth] = -1 - used
                    depth += 1
                    q -= 1
                    path[depth] = below[used]
                    continue
        level[v] = -2
        live[v] = v + 1
        depth -= 1
        if depth >= 0:
            q += -1 if steps[depth] >= 0 else 1
    return False


@compiled
def _augment(graph: Graph, dust: float, distance: int, work: Workspace) -> None:
    """Block all paths of this length from demand to supply."""
    base, capacity = graph.base, graph.capacity
    residual, slot, log, carried, below = work.residual, work.slot, work.log, work.carried, work.below
    following, first, supply, demand = work.following, work.first, work.supply, work.demand
    path, steps, live, level = work.path, work.steps, work.live, work.level
    top = base[len(base) - 2]
    used, flow = work.used[0], work.flow[0]
    work.arc[:] = graph.row[:-1]
    work.back[:] = first
    for q in range(len(base) - 1):  # now those with a label are of use
        for v in range(base[q], base[q + 1] - 1):
            live[v] = v if level[v] >= 0 else v + 1
        live[base[q + 1] - 1] = base[q + 1] - 1
    for x in range(len(live)):
        sink = work.queue[x]
        if level[sink] != 0:
            break
        while demand[sink] > dust and _climb(graph, dust, sink, distance, work):
            source = path[distance]
            amount = min(demand[sink], supply[source - top])
            for step in range(distance):
                e = steps[step]
                amount = min(amount, residual[e] if e >= 0 else carried[-1 - e])
            for step in range(distance):
                e = steps[step]
                if e >= 0:
                    v, upper = path[step], path[step + 1]
                    used = _push(residual, slot, log, carried, below, following, first, used, v, e, upper, amount)
                else:
                    position = -1 - e
                    e = log[position]
                    carried[position] -= amount
                    residual[e] = capacity[e] if carried[position] == 0.0 else residual[e] + amount
            flow += amount
            demand[sink] -= amount
            supply[source - top] -= amount
    work.used[0], work.flow[0] = used, flow


@compiled
def _crossing(graph: Graph, demand: Any, work: Workspace, out: Any) -> float:
    """Capacity of the cut between nodes with and without a label: by the layer that it crosses, and in all."""
    base, row, above, full, capacity = graph.base, graph.row, graph.above, graph.full, graph.capacity
    live, level = work.live, work.level
    layers = len(base) - 2
    out[:] = 0.0
    for k in range(len(demand)):
        if level[k] < 0:
            out[0] += demand[k]
    for q in range(layers):
        for v in range(base[q], base[q + 1] - 1):
            if level[v] >= 0:
                end, shift = row[v + 1], base[q + 1] - row[v]
                e = _live_edge(row[v], end, full[q], shift, above, live)
                while e < end:
                    out[q + 1] += capacity[e]
                    e = _live_edge(e + 1, end, full[q], shift, above, live)
    for i in range(len(graph.supply)):
        if level[base[layers] + i] >= 0:
            out[layers + 1] += graph.supply[i]
    return float(out.sum())


@compiled
def _search(graph: Graph, demand: Any, dust: float, out: Any, work: Workspace) -> None:
    """Augment until the labelled nodes make a cut of the same capacity as the flow."""
    while True:
        distance = _label(graph, dust, work)
        if distance >= 0:
            _augment(graph, dust, distance, work)
            continue
        cut = _crossing(graph, demand, work, out)
        if dust == 0.0 or cut <= work.flow[0] * (1.0 + 1e-11):
            return
        dust = 0.0  # the flow is tiny beside its bound: every residual matters


@compiled
def solve(
    graph: Graph,
    demands: Any,
    bounds: Any,
    dust: float,
    search: bool,
    work: Workspace,
    values: Any,
    crossing: Any,
) -> None:
    """Find the maximum flow of each sink, and the minimum cut of each whose flow stays below its bound.

    Without `search` only straight paths are filled: the value may be too small, and no cut is written.

    Args:
        graph: the layers that the sinks share.
        demands: [sinks, bottom nodes].
        bounds: [sinks]: no flow can be larger.
        dust: residuals up to this share of the bound count as 0.
        search: go on in the residual graph where straight paths do not reach the bound.
        work: this thread's workspace.
        values: [sinks], filled.
        crossing: [sinks, m + 2], filled: the cut's capacity among demands, in each layer, lowest first, among supplies.

    The workspace still holds the last sink's log, and its levels where there was a search.
    """
    for j in range(len(demands)):
        enough, least = bounds[j] * (1.0 - 1e-12), bounds[j] * dust
        work.supply[:] = graph.supply
        work.demand[:] = demands[j]
        work.flow[0] = 0.0
        work.used[0] = 0
        work.first[:] = -1
        _push_straight(graph, least, enough, work)
        if search and work.flow[0] < enough:
            _search(graph, demands[j], least, crossing[j], work)
        values[j] = work.flow[0]
        for x in range(work.used[0]):
            e = work.log[x]
            work.residual[e] = graph.capacity[e]
            work.slot[e] = 0
