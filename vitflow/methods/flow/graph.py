"""The layered attention graph as a networkx graph."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import ShapeError, whole_number
from vitflow.methods.flow.layers import LayerRange, check_window, layer_capacities
from vitflow.methods.fusion import HeadFusion
from vitflow.methods.tokens import TokenLayout, check_layout

if TYPE_CHECKING:
    from networkx import DiGraph

Floats = NDArray[np.float64]


def attention_graph(
    attentions: Sequence[Tensor] | Tensor,
    *,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    layers: LayerRange = "all",
    num_prefix_tokens: int = 1,
    batch_index: int = 0,
    layout: TokenLayout | None = None,
) -> "DiGraph":
    """Build the graph of attention flow: node (l, i) is token i after layer l, layer 0 the input.

    The edge from (l, i) to (l − 1, j) carries Â_l[i, j] as `capacity` and as `weight`; edges of capacity 0 are left
    out. Each node has its `layer`, its `token` and a readable `label` such as "cls" or "patch (3, 4)".

    Args:
        attentions: layers of [batch, heads, tokens, tokens] or fused [batch, tokens, tokens], first layer first.
        head_fusion: "mean" (the paper), "max" or "min" over heads; fused attention is used unchanged.
        discard_ratio: share of the smallest values per layer to set to 0, 0 <= ratio < 1.
        residual: α, the share of the residual connection; the paper uses 0.5.
        layers: the layers whose edges to show, as for `attention_flow`.
        num_prefix_tokens: tokens before the patches.
        batch_index: index of the image in the batch.
        layout: names patches by row and column; its prefix tokens replace `num_prefix_tokens`.

    Raises:
        OptionError: an option is out of range, or there is no such image.
        ShapeError: wrong shapes, or values that are not finite or negative.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §3.2.

    >>> import torch
    >>> layer = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> graph = attention_graph([layer, layer], layers=1)
    >>> sorted(graph.edges(data="capacity"))
    [((2, 0), (1, 0), 0.75), ((2, 0), (1, 1), 0.25), ((2, 1), (1, 1), 1.0)]
    >>> graph.nodes[2, 0]["label"], graph.nodes[1, 1]["label"]
    ('cls', 'patch 0')
    """
    check_layout(layout)
    prefix = num_prefix_tokens if layout is None else layout.num_prefix_tokens
    chosen, first = check_window(attentions, layers)
    batch_index = whole_number("batch_index", batch_index, 0, len(chosen[0]) - 1)
    tokens = chosen[0].shape[-1]
    if layout is not None and layout.num_tokens != tokens:
        raise ShapeError(f"Expected {layout.num_tokens} tokens as in the layout, got attention between {tokens}.")
    capacities = layer_capacities(
        chosen,
        batch_index,
        head_fusion=head_fusion,
        discard_ratio=discard_ratio,
        residual=residual,
        num_prefix_tokens=prefix,
    )
    names = [token_label(token, prefix, layout) for token in range(tokens)]
    return graph_of(capacities, first, names)


def token_label(token: int, num_prefix_tokens: int, layout: TokenLayout | None = None) -> str:
    """Name a token: "cls" for the first prefix token, "reg 1" … for the others, and patches by row and column.

    >>> token_label(6, 1, TokenLayout(1, 2, 3)), token_label(2, 3)
    ('patch (1, 2)', 'reg 2')
    """
    if token < num_prefix_tokens:
        return f"reg {token}" if token else "cls"
    patch = token - num_prefix_tokens
    if layout is not None and patch >= layout.num_patches:
        return f"suffix {patch - layout.num_patches}"
    return f"patch {patch}" if layout is None else f"patch {divmod(patch, layout.cols)}"


def graph_of(capacities: Floats, first: int, names: Sequence[str]) -> "DiGraph":
    """Capacities [layers, queries, keys] as a graph, the first of them the edges of layer `first`."""
    import networkx as nx

    graph = nx.DiGraph()
    for layer in range(first - 1, first + len(capacities)):
        graph.add_nodes_from(
            ((layer, token), {"layer": layer, "token": token, "label": name}) for token, name in enumerate(names)
        )
    for layer, matrix in enumerate(capacities, start=first):
        for query, key in np.argwhere(matrix > 0).tolist():
            value = float(matrix[query, key])
            graph.add_edge((layer, query), (layer - 1, key), capacity=value, weight=value)
    return graph
