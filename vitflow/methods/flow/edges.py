"""The graph that all sinks of attention flow share: which edges there are, and how they are stored for the search.

Layers q = 0 … m of nodes; an edge leads from a node of layer q + 1 down to a node of layer q; node i of the top may
take in `supply[i]`, node k of the bottom may pass on a demand of its own. Nodes are numbered through all layers, lowest
first, and so are the edges above them: `row[v]` … `row[v + 1]` are those of node v. A layer's edges are stored without
gaps where they are few (what `discard_ratio` leaves), and with all pairs of nodes where most of them are there anyway:
then the edges to nodes that are still of use are found without looking at the others. The last number of each layer is
no node, it ends the search among them.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitflow.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Graph(NamedTuple):
    """The layers that all sinks share, m of edges between m + 1 of nodes."""

    base: Ints  # [m + 2]: where each layer's nodes begin; its last number is no node
    row: Ints  # [nodes + 1]: where the edges above each node begin
    above: Ints  # [edges]: the upper node
    capacity: Floats  # [edges]
    full: NDArray[np.bool_]  # [m]: whether the layer's edges are all pairs of nodes, some of capacity 0
    supply: Floats  # [top nodes]


@compiled
def count_edges(matrix: Any, lower: Any, upper: Any, least: float) -> int:
    """How many edges [keys, queries] between these nodes have a capacity of more than `least`."""
    count = 0
    for k in lower:
        for i in upper:
            count += matrix[k, i] > least
    return count


@compiled
def fill_edges(
    matrix: Any,
    lower: Any,
    upper: Any,
    least: float,
    full: bool,
    base: int,
    first: int,
    row: Any,
    above: Any,
    capacity: Any,
) -> None:
    """Write the edges between these nodes.

    Args:
        matrix: capacities [keys, queries].
        lower: the tokens of the nodes below, in their order.
        upper: the tokens of the nodes above.
        least: leave out edges of at most this capacity.
        full: write all pairs instead.
        base: the number of the first node above.
        first: the number of the first edge.
        row: [lower nodes + 1], filled: where the edges above each lower node begin, and where the last ones end.
        above: filled from `first` on.
        capacity: likewise.
    """
    e = first
    for x in range(len(lower)):
        row[x] = e
        for y in range(len(upper)):
            value = matrix[lower[x], upper[y]]
            if full or value > least:
                above[e] = base + y
                capacity[e] = value
                e += 1
    row[len(lower)] = e
