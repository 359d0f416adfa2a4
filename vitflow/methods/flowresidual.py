"""The compiled search behind `max_flow`, part 2: the residual graph, minimum cuts, and the loop over sinks.

Dinic's phases: `_label` gives each node its distance to an unmet demand in the residual graph, `_augment` blocks all
shortest paths. When no supply can be labelled any more, the labelled nodes are the sink's side of a minimum cut.

They end in floating point too. An augmentation sets at least one residual of its path to exactly 0, changes none off
its path, and creates residuals only against its direction. So a phase has at most as many augmentations as there are
edges, and the distance from demand to supply grows strictly from phase to phase, up to the number of nodes. Residuals
of at most `dust` count as 0: the cut is then at most `dust` per edge larger than the flow; where that shows, the search
goes on with `dust` = 0.

Source: E. A. Dinic, "Algorithm for solution of a problem of maximum flow in networks with power estimation", 1970.
"""

from typing import Any

import numpy as np

from vitflow.methods.flowkernel import BUCKETS, Workspace, bucket_order, compiled, find, push, push_straight, revive


@compiled
def _label(layers: int, tokens: int, dust: float, work: Workspace) -> int:
    """Label nodes with their distance to an unmet demand; returns the nearest supply's distance, or -1 for none."""
    residual, carried, below, following, first = work.residual, work.carried, work.below, work.following, work.first
    live, level, member, start = work.live, work.level, work.member, work.start
    revive(live, work.alive, layers, tokens)
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
                    i = find(live, base, 0)
                    while i < tokens:
                        if residual[node * tokens + i] > dust:
                            level[(q + 1) * tokens + i] = distance
                            member[(q + 1) * tokens + size[q + 1]] = i
                            size[q + 1] += 1
                            live[base + i] = i + 1
                            grew = True
                        i = find(live, base, i + 1)
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
                    push(tokens, q, k, other, amount, work)
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
        order: as `order_edges` fills it.
        prefix: the same, a row per pass.
        thresholds: of each pass over straight paths, descending to 0.
        supply: [N].
        demands: [sinks, N].
        bounds: [sinks]: no flow can be larger.
        dust: residuals up to this share of the bound count as 0.
        search: go on in the residual graph where straight paths do not reach the bound.
        work: this thread's workspace.
        values: [sinks], filled.
        crossing: [sinks, m + 2], filled: the cut's capacity among demands, in each layer, lowest first, among supplies.
        labels: bool [sinks, (m + 1) · N] or [0, 0], filled: which nodes lie on the sink's side of the cut.
        undo: make the workspace ready for the next sink; otherwise it keeps the flow.
    """
    bits = demands.view(np.int64)
    demand_order = np.empty(tokens, np.int32)
    bucket, place = np.empty(tokens, np.int64), np.empty(BUCKETS + 2, np.int64)
    for j in range(len(demands)):
        enough, least = bounds[j] * (1.0 - 1e-12), bounds[j] * dust
        largest = 0
        for k in range(tokens):
            work.supply[k], work.demand[k] = supply[k], demands[j, k]
            largest = max(largest, bits[j, k])
        bucket_order(bits[j], 0, tokens, largest >> 52, bucket, place, demand_order)
        work.flow[0] = 0.0
        work.used[0] = 0
        work.first[:] = -1
        for t in range(len(thresholds)):
            threshold = max(thresholds[t], least)
            push_straight(layers, tokens, threshold, demand_order, ordered, order, prefix[t], work)
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
