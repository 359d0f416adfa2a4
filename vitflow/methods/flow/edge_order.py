"""Compiled preparation of a layered graph: tokens renumbered, edges in the order of their capacity."""

from typing import Any

import numpy as np

from vitflow.compiled import compiled

BUCKETS = 48  # capacities are told apart by their binary exponent, down to 2^-46 of the supply


@compiled
def _bucket_order(bits: Any, begin: int, size: int, scale: int, bucket: Any, place: Any, order: Any) -> None:
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
        scale: as for `_bucket_order`.
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
            _bucket_order(bits, row, tokens, scale, bucket, place, order)
            for s in range(len(steps)):
                prefix[s, node] = place[min(steps[s], BUCKETS - 1)]
