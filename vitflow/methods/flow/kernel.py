"""The compiled search behind `max_flow`: straight paths, then shortest augmenting paths, from a source to one sink.

The graph as the kernel sees it: node layers q = 0 … m of N nodes; the edge from (q + 1, i) down to (q, k) has the
capacity `capacity[q, k, i]`; node (m, i) may take in `supply[i]`, node (0, k) may pass on `demand[k]`. Flow goes down,
from supply to demand; the search goes up, from demand to supply, because the minimum cut mostly lies near the sink.
Arrays are flat: node (q, k) has the index q · N + k, the edge from (q + 1, i) to (q, k) the index (q · N + k) · N + i.

`_push_straight` blocks all paths that go straight up, which mostly gives the maximum. Then come Dinic's phases:
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
from numpy.typing import NDArray

from vitflow.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Workspace(NamedTuple):
    """What one thread needs to solve one sink after the other; between sinks the residuals equal the capacities."""

    residual: Floats  # [m · N · N]
    slot: Ints  # [m · N · N]: 1 + position in the log for an edge that has been used, otherwise 0
    log: Ints  # the edges that have been used, and for each:
    carried: Floats  # what it carries; capacity − residual would lose small amounts on large edges
    below: Ints  # its lower node k
    following: Ints  # the position of the next used edge below the same upper node, -1 for none
    first: Ints  # [(m + 1) · N]: the position of the first used edge below each node, -1 for none
    used: Ints  # [1]: length of the log
    flow: Floats  # [1]: what has been pushed so far
    supply: Floats  # [N]: what each top node may still take in
    demand: Floats  # [N]: what each bottom node may still pass on
    arc: Ints  # [(m + 1) · N]: how far each node's candidates have been tried
    live: Ints  # [(m + 1) · (N + 1)]: union-find in each layer: the first node from here on that is still of use
    alive: Ints  # [m + 1]: how many nodes of each layer are still of use
    path: Ints  # the nodes k of a path, from the sink upwards
    path_layer: Ints  # and their layers q
    level: Ints  # [(m + 1) · N]: distance to an unmet demand, -1 unlabelled, -2 exhausted
    member: Ints  # [(m + 1) · N]: the labelled nodes of each layer, by level
    start: Ints  # [levels · (m + 1)]: where each level begins among a layer's members


def workspace(layers: int, tokens: int) -> Workspace:
    """Allocate for m = layers of N = tokens; memory that is never written to is never committed."""
    nodes, edges = (layers + 1) * tokens, layers * tokens * tokens
    return Workspace(
        residual=np.empty(edges),
        slot=np.zeros(edges, np.int32),
        log=np.empty(edges, np.int32),
        carried=np.empty(edges),
        below=np.empty(edges, np.int32),
        following=np.empty(edges, np.int32),
        first=np.empty(nodes, np.int32),
        used=np.zeros(1, np.int32),
        flow=np.zeros(1),
        supply=np.empty(tokens),
        demand=np.empty(tokens),
        arc=np.empty(nodes, np.int32),
        live=np.empty(nodes + layers + 1, np.int32),
        alive=np.empty(layers + 1, np.int32),
        path=np.empty(nodes + 1, np.int32),
        path_layer=np.empty(nodes + 1, np.int32),
        level=np.empty(nodes, np.int32),
        member=np.empty(nodes, np.int32),
        start=np.empty((nodes + 3) * (layers + 1), np.int32),
    )


@compiled
def _find(live: Any, base: int, x: int) -> int:
    """The first node from x on that is still of use, or N."""
    root = x
    while live[base + root] != root:
        root = live[base + root]
    while live[base + x] != root:
        after = live[base + x]
        live[base + x] = root
        x = after
    return root


@compiled
def _revive(live: Any, alive: Any, layers: int, tokens: int) -> None:
    """Take all nodes as of use again."""
    for q in range(layers + 1):
        base = q * (tokens + 1)
        for k in range(tokens + 1):
            live[base + k] = k
        alive[q] = tokens


@compiled
def _push(tokens: int, q: int, k: int, i: int, amount: float, work: Workspace) -> None:
    """Send an amount from (q + 1, i) down to (q, k)."""
    edge = (q * tokens + k) * tokens + i
    work.residual[edge] -= amount
    slot = work.slot[edge]
    if slot == 0:
        used = work.used[0]
        upper = (q + 1) * tokens + i
        work.log[used] = edge
        work.carried[used] = amount
        work.below[used] = k
        work.following[used] = work.first[upper]
        work.first[upper] = used
        work.used[0] = used + 1
        work.slot[edge] = used + 1
    else:
        work.carried[slot - 1] += amount


@compiled
def _push_straight(
    layers: int,
    tokens: int,
    threshold: float,
    demand_order: Any,
    ordered: bool,
    order: Any,
    prefix: Any,
    work: Workspace,
) -> None:
    """Block every straight path whose supply, demand and edges all exceed the threshold.

    A depth-first search upwards from each demand. A node from which no supply can be reached dies and is
    skipped from then on. If `ordered`, a node tries its edges in the order of their capacity, or walks over the living
    nodes above where those are fewer; otherwise it always walks, in the order of the tokens.
    """
    residual = work.residual
    supply, demand, arc, live, alive, path = work.supply, work.demand, work.arc, work.live, work.alive, work.path
    _revive(live, alive, layers, tokens)
    top = layers * (tokens + 1)
    for i in range(tokens):
        if not supply[i] > threshold:
            live[top + i] = i + 1
            alive[layers] -= 1
    for node in range(layers * tokens):
        arc[node] = 0 if ordered else -1  # from 0: position in the order; below 0: −1 − the next node to try
    for n in range(tokens):
        sink = demand_order[n]
        while demand[sink] > threshold:
            path[0] = sink
            q = 0
            while 0 <= q < layers:
                node = q * tokens + path[q]
                base = (q + 1) * (tokens + 1)
                x = arc[node]
                found = -1
                while 0 <= x < prefix[node]:
                    if prefix[node] - x > alive[q + 1]:
                        x = -1
                        break
                    i = order[node * tokens + x]
                    if live[base + i] == i and residual[node * tokens + i] > threshold:
                        found = i
                        break
                    x += 1
                if x < 0:
                    i = _find(live, base, -x - 1)
                    while i < tokens and not residual[node * tokens + i] > threshold:
                        i = _find(live, base, i + 1)
                    if i < tokens:
                        found = i
                    x = -i - 1
                arc[node] = x
                if found >= 0:
                    q += 1
                    path[q] = found
                else:
                    live[node + q] = path[q] + 1  # q · (N + 1) + k
                    alive[q] -= 1
                    q -= 1
            if q < 0:
                break
            source = path[layers]
            amount = min(demand[sink], supply[source])
            for q in range(layers):
                amount = min(amount, residual[(q * tokens + path[q]) * tokens + path[q + 1]])
            for q in range(layers):
                _push(tokens, q, path[q], path[q + 1], amount, work)
            work.flow[0] += amount
            demand[sink] -= amount
            supply[source] -= amount
            if not supply[source] > threshold:
                live[top + source] = source + 1
                alive[layers] -= 1


@compiled
def _label(layers: int, tokens: int, dust: float, work: Workspace) -> int:
    """Label nodes with their distance to an unmet demand; returns the nearest supply's distance, or -1 for none."""
    residual, carried, below, following, first = work.residual, work.carried, work.below, work.following, work.first
    live, level, member, start = work.live, work.level, work.member, work.start
    _revive(live, work.alive, layers, tokens)
    width = layers + 1
    size = np.zeros(width, np.int64)  # labelled nodes of each layer
    level[:] = -1
    start[:width] = 0
    for k in range(tokens):
        if work.demand[k] > dust:
            level[k] = 0
            member[size[0]] = k
            size[0] += 1
            live[k] = k + 1
    distance = 0
    grew = True
    while grew:
        now, after = distance * width, (distance + 1) * width
        start[after : after + width] = size
        for x in range(start[now + layers], size[layers]):
            if work.supply[member[layers * tokens + x]] > dust:
                return distance
        grew = False
        distance += 1
        for q in range(width):
            for x in range(start[now + q], start[after + q]):
                node = q * tokens + member[q * tokens + x]
                if q < layers:  # what may still come down to this node
                    base = (q + 1) * (tokens + 1)
                    i = _find(live, base, 0)
                    while i < tokens:
                        if residual[node * tokens + i] > dust:
                            level[(q + 1) * tokens + i] = distance
                            member[(q + 1) * tokens + size[q + 1]] = i
                            size[q + 1] += 1
                            live[base + i] = i + 1
                            grew = True
                        i = _find(live, base, i + 1)
                if q > 0:  # what has come down from this node may go back
                    base = (q - 1) * tokens
                    edge = first[node]
                    while edge >= 0:
                        k = below[edge]
                        if level[base + k] < 0 and carried[edge] > dust:
                            level[base + k] = distance
                            member[base + size[q - 1]] = k
                            size[q - 1] += 1
                            live[base + q - 1 + k] = k + 1
                            grew = True
                        edge = following[edge]
    return -1


@compiled
def _climb(layers: int, tokens: int, dust: float, sink: int, distance: int, work: Workspace) -> bool:
    """Find a path from this demand to a supply at this distance, along growing levels; it is left in `work.path`."""
    arc, level, member, start = work.arc, work.level, work.member, work.start
    path, path_layer = work.path, work.path_layer
    width = layers + 1
    path[0], path_layer[0] = sink, 0
    depth = 0
    while depth >= 0:
        q, k = path_layer[depth], path[depth]
        node = q * tokens + k
        if depth == distance:
            if q == layers and work.supply[k] > dust:
                return True
        else:
            # The next level's nodes of the layer above, then those of the layer below.
            now, after = (depth + 1) * width, (depth + 2) * width
            above = start[after + q + 1] - start[now + q + 1] if q < layers else 0
            beneath = start[after + q - 1] - start[now + q - 1] if q > 0 else 0
            x = arc[node]
            other, room = 0, 0.0
            while x < above + beneath:
                if x < above:
                    side = q + 1
                    other = member[side * tokens + start[now + side] + x]
                    room = work.residual[node * tokens + other]
                else:
                    side = q - 1
                    other = member[side * tokens + start[now + side] + x - above]
                    slot = work.slot[(side * tokens + other) * tokens + k]
                    room = work.carried[slot - 1] if slot > 0 else 0.0
                if room > dust and level[side * tokens + other] == depth + 1:
                    break
                x += 1
            arc[node] = x
            if x < above + beneath:
                depth += 1
                path[depth] = other
                path_layer[depth] = q + 1 if x < above else q - 1
                continue
        level[node] = -2
        depth -= 1
    return False


@compiled
def _augment(layers: int, tokens: int, capacity: Any, dust: float, distance: int, work: Workspace) -> None:
    """Block all paths of this length from demand to supply."""
    path, path_layer = work.path, work.path_layer
    work.arc[:] = 0
    for x in range(work.start[layers + 1]):
        sink = work.member[x]
        while work.demand[sink] > dust and _climb(layers, tokens, dust, sink, distance, work):
            source = path[distance]
            amount = min(work.demand[sink], work.supply[source])
            for step in range(distance):
                q, k, other = path_layer[step], path[step], path[step + 1]
                if path_layer[step + 1] > q:
                    amount = min(amount, work.residual[(q * tokens + k) * tokens + other])
                else:
                    amount = min(amount, work.carried[work.slot[((q - 1) * tokens + other) * tokens + k] - 1])
            for step in range(distance):
                q, k, other = path_layer[step], path[step], path[step + 1]
                if path_layer[step + 1] > q:
                    _push(tokens, q, k, other, amount, work)
                else:
                    edge = ((q - 1) * tokens + other) * tokens + k
                    slot = work.slot[edge] - 1
                    work.carried[slot] -= amount
                    work.residual[edge] = capacity[edge] if work.carried[slot] == 0.0 else work.residual[edge] + amount
            work.flow[0] += amount
            work.demand[sink] -= amount
            work.supply[source] -= amount


@compiled
def _crossing(layers: int, tokens: int, capacity: Any, supply: Any, demand: Any, level: Any, out: Any) -> float:
    """Capacity of the cut between labelled and other nodes: by the boundary that it crosses, and in all."""
    out[:] = 0.0
    for k in range(tokens):
        if level[k] < 0:
            out[0] += demand[k]
        if level[layers * tokens + k] >= 0:
            out[layers + 1] += supply[k]
    outside = np.empty(tokens, np.int64)
    for q in range(layers):
        size = 0
        for i in range(tokens):
            if level[(q + 1) * tokens + i] < 0:
                outside[size] = i
                size += 1
        for k in range(tokens):
            if level[q * tokens + k] >= 0:
                row = (q * tokens + k) * tokens
                for x in range(size):
                    out[q + 1] += capacity[row + outside[x]]
    return float(out.sum())


@compiled
def _search(
    layers: int, tokens: int, capacity: Any, supply: Any, demand: Any, dust: float, out: Any, work: Any
) -> None:
    """Augment until the labelled nodes make a cut of the same capacity as the flow."""
    while True:
        distance = _label(layers, tokens, dust, work)
        if distance >= 0:
            _augment(layers, tokens, capacity, dust, distance, work)
            continue
        cut = _crossing(layers, tokens, capacity, supply, demand, work.level, out)
        if dust == 0.0 or cut <= work.flow[0] * (1.0 + 1e-11):
            return
        dust = 0.0  # the flow is tiny beside its bound: every residual matters


@compiled
def solve(
    layers: int,
    tokens: int,
    capacity: Any,
    ordered: bool,
    order: Any,
    prefix: Any,
    thresholds: Any,
    supply: Any,
    demands: Any,
    demand_order: Any,
    bounds: Any,
    dust: float,
    search: bool,
    work: Workspace,
    values: Any,
    crossing: Any,
    labels: Any,
    undo: bool,
) -> None:
    """Find the maximum flow of each sink, and the minimum cut of each whose flow stays below its bound.

    Without `search` only straight paths are filled: the value may be too small, and no cut is written.

    Args:
        layers: m.
        tokens: N.
        capacity: [m · N · N].
        ordered: let straight paths take edges in the order of their capacity.
        order: as `arrange_edges` fills it.
        prefix: the same, a row per pass.
        thresholds: of each pass over straight paths, descending to 0.
        supply: [N].
        demands: [sinks, N].
        demand_order: [sinks, N]: the bottom nodes in the order in which to serve them.
        bounds: [sinks]: no flow can be larger.
        dust: residuals up to this share of the bound count as 0.
        search: go on in the residual graph where straight paths do not reach the bound.
        work: this thread's workspace.
        values: [sinks], filled.
        crossing: [sinks, m + 2], filled: the cut's capacity among demands, in each layer, lowest first, among supplies.
        labels: bool [sinks, (m + 1) · N] or [0, 0], filled: which nodes lie on the sink's side of the cut.
        undo: make the workspace ready for the next sink; otherwise it keeps the flow.
    """
    for j in range(len(demands)):
        enough, least = bounds[j] * (1.0 - 1e-12), bounds[j] * dust
        for k in range(tokens):
            work.supply[k], work.demand[k] = supply[k], demands[j, k]
        work.flow[0] = 0.0
        work.used[0] = 0
        work.first[:] = -1
        for t in range(len(thresholds)):
            threshold = max(thresholds[t], least)
            _push_straight(layers, tokens, threshold, demand_order[j], ordered, order, prefix[t], work)
            if work.flow[0] >= enough:
                break
        if search and work.flow[0] < enough:
            _search(layers, tokens, capacity, supply, demands[j], least, crossing[j], work)
            if len(labels) > 0:
                labels[j] = work.level[: (layers + 1) * tokens] >= 0
        values[j] = work.flow[0]
        if not undo:
            return
        for x in range(work.used[0]):
            edge = work.log[x]
            work.residual[edge] = capacity[edge]
            work.slot[edge] = 0
