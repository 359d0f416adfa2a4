"""The compiled search behind `max_flow`, part 1: the workspace, and straight paths from a source to one sink.

The graph as the kernel sees it: node layers q = 0 … m of N nodes; the edge from (q + 1, i) down to (q, k) has the
capacity `capacity[q, k, i]`; node (m, i) may take in `supply[i]`, node (0, k) may pass on `demand[k]`. Flow goes down,
from supply to demand; the search goes up, from demand to supply, because the minimum cut mostly lies near the sink.
Arrays are flat: node (q, k) has the index q · N + k, the edge from (q + 1, i) to (q, k) the index (q · N + k) · N + i.

It ends in floating point too: each augmentation sets the residual of at least one edge, supply or demand to exactly 0
(x − x), and changes no residual off its path. Straight paths create none, so there are at most as many augmentations as
edges; part 2 says why the residual search ends.
"""

from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

Function = TypeVar("Function")
Floats = NDArray[np.float64]
Ints = NDArray[np.int32]

BUCKETS = 48  # capacities are told apart by their binary exponent, down to 2^-46 of the supply


def compiled(function: Function) -> Function:
    """Compile with numba, keep the machine code on disk, and let other threads run meanwhile."""
    return cast(Function, njit(cache=True, nogil=True)(function))


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
def bucket_order(bits: Any, begin: int, size: int, scale: int, bucket: Any, place: Any, order: Any) -> None:
    """Order numbers of at least 0 by their binary exponent, largest first: order[begin : begin + size], indices from 0.

    Args:
        bits: their bit patterns as int64; a larger exponent is a larger number.
        begin: where the numbers begin in `bits`.
        size: how many there are.
        scale: the (biased) exponent of numbers that go first, together with all larger ones.
        bucket: scratch, int64 [size].
        place: int64 [BUCKETS + 2], filled: afterwards place[b] is how many lie in buckets 0 … b; zeros lie in the last.
        order: filled.
    """
    place[:] = 0
    for i in range(size):
        pattern = bits[begin + i]
        b = BUCKETS if pattern == 0 else min(max(scale - (pattern >> 52), 0), BUCKETS - 1)
        bucket[i] = b
        place[b + 1] += 1
    for b in range(BUCKETS + 1):
        place[b + 1] += place[b]
    for i in range(size):
        order[begin + place[bucket[i]]] = i
        place[bucket[i]] += 1


@compiled
def arrange_edges(
    tokens: int,
    upward: Any,
    rank: Any,
    capacity: Any,
    bits: Any,
    ordered: bool,
    scale: int,
    steps: Any,
    order: Any,
    prefix: Any,
    begin: int,
    end: int,
) -> None:
    """Copy the capacities above the nodes begin … end with the tokens renumbered, and order each node's edges.

    Args:
        tokens: N.
        upward: the capacities as given, [m · N · N].
        rank: [m + 1, N]: the old numbers of each layer's tokens in their new order.
        capacity: [m · N · N], filled.
        bits: the same array seen as int64.
        ordered: whether to order the edges too.
        scale: as for `bucket_order`.
        steps: numbers s: a threshold is 2^(scale − s).
        order: int16 [m · N · N], filled if ordered: the upper nodes i.
        prefix: int32 [len(steps), m · N], filled if ordered: how many edges reach each threshold, or are not 0.
        begin: the first node to fill.
        end: the node to stop before.
    """
    bucket = np.empty(tokens, np.int64)
    place = np.empty(BUCKETS + 2, np.int64)
    for node in range(begin, end):
        q, k = node // tokens, node % tokens
        row, old = node * tokens, (q * tokens + rank[q, k]) * tokens
        for i in range(tokens):
            capacity[row + i] = upward[old + rank[q + 1, i]]
        if ordered:
            bucket_order(bits, row, tokens, scale, bucket, place, order)
            for s in range(len(steps)):
                prefix[s, node] = place[min(steps[s], BUCKETS - 1)]


@compiled
def find(live: Any, base: int, x: int) -> int:
    """The first node from x on that is still of use, or N."""
    root = x
    while live[base + root] != root:
        root = live[base + root]
    while live[base + x] != root:
        x, live[base + x] = live[base + x], root
    return root


@compiled
def revive(live: Any, alive: Any, layers: int, tokens: int) -> None:
    """Take all nodes as of use again."""
    for q in range(layers + 1):
        base = q * (tokens + 1)
        for k in range(tokens + 1):
            live[base + k] = k
        alive[q] = tokens


@compiled
def push(tokens: int, q: int, k: int, i: int, amount: float, work: Workspace) -> None:
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
def push_straight(
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

    A depth-first search upwards from each demand, largest first. A node from which no supply can be reached dies and is
    skipped from then on. If `ordered`, a node tries its edges in the order of their capacity, or walks over the living
    nodes above where those are fewer; otherwise it always walks, in the order of the tokens.
    """
    residual = work.residual
    supply, demand, arc, live, alive, path = work.supply, work.demand, work.arc, work.live, work.alive, work.path
    revive(live, alive, layers, tokens)
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
                    i = find(live, base, -x - 1)
                    while i < tokens and not residual[node * tokens + i] > threshold:
                        i = find(live, base, i + 1)
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
                push(tokens, q, path[q], path[q + 1], amount, work)
            work.flow[0] += amount
            demand[sink] -= amount
            supply[source] -= amount
            if not supply[source] > threshold:
                live[top + source] = source + 1
                alive[layers] -= 1
