"""Layers of a flow, their capacities, and the layered attention graph as a networkx graph."""

from collections.abc import Sequence
from operator import index
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, whole_number
from vitflow.methods.fusion import (
    HeadFusion,
    add_residual,
    check_attentions,
    discard_low,
    fuse_heads,
    layers_of,
)
from vitflow.methods.tokens import TokenLayout, check_layout

if TYPE_CHECKING:
    from networkx import DiGraph

Floats = NDArray[np.float64]

# "all", the last N layers, (first, last), or what the command line writes: "4", "9:12", "9:".
LayerRange = str | int | Sequence[int]

# Default number of layers of a flow, as in the table of methods.
DEFAULT_LAYERS = 4


def parse_window(layers: LayerRange, count: int) -> tuple[int, int]:
    """Parse a range of layers into the first and the last layer, counted from 1, both included.

    >>> parse_window(2, 12), parse_window((1, -2), 12), parse_window("9:", 12), parse_window("all", 12)
    ((11, 12), (1, 11), (9, 12), (1, 12))
    """
    expected = (
        f"Expected layers as all, a number from 1 to {count} (the last ones), or FIRST:LAST from 1 to {count}, such as "
        f"{max(count - 3, 1)}:{count} (in Python also a pair), got {layers!r}."
    )
    try:
        if layers == "all":
            return 1, count
        if isinstance(layers, str) and ":" not in layers:
            layers = int(layers)
        if isinstance(layers, str):
            first, last = (int(end) if end.strip() else None for end in layers.split(":"))
        elif isinstance(layers, int | np.integer):
            if not 1 <= layers <= count:
                raise OptionError(expected)
            return count - int(layers) + 1, count
        else:
            first, last = (index(end) for end in layers)
    except (TypeError, ValueError) as error:
        raise OptionError(expected) from error
    numbers = [1 if first is None else first, count if last is None else last]
    begin, end = (number + count + 1 if number < 0 else number for number in numbers)
    if not 1 <= begin <= end <= count:
        raise OptionError(expected)
    return begin, end


def default_window(layers: LayerRange, count: int) -> LayerRange:
    """Parse a range of layers whose default of the last four is limited by the depth of the model.

    >>> default_window(4, 12), default_window(4, 2), default_window(3, 2)
    (4, 2, 3)
    """
    return min(DEFAULT_LAYERS, count) if layers == DEFAULT_LAYERS else layers


def check_window(attentions: Sequence[Tensor] | Tensor, layers: LayerRange) -> tuple[list[Tensor], int]:
    """Return the checked layers of the window, and the number of its first layer, counted from 1."""
    everything = layers_of(attentions)
    first, last = parse_window(layers, len(everything))
    return check_attentions(everything[first - 1 : last], first), first


def layer_capacities(
    fused: Sequence[Tensor],
    *,
    discard_ratio: float,
    residual: float,
    num_prefix_tokens: int,
    visible: Sequence[Tensor] | None = None,
) -> Floats:
    """Compute the matrices Â of the fused attention of one image in each layer, in float64: [layers, queries, keys].

    With a visibility mask, values are discarded per row, among the visible keys.
    """
    tokens = fused[0].shape[-1]
    whole_number("num_prefix_tokens", num_prefix_tokens, 0, tokens)
    capacities = np.empty((len(fused), tokens, tokens))
    masks = [None] * len(fused) if visible is None else visible
    for matrix, layer, mask in zip(capacities, fused, masks, strict=True):
        kept = discard_low(layer.detach().to("cpu", torch.float64), discard_ratio, num_prefix_tokens, mask)
        matrix[:] = add_residual(kept, residual)
    return capacities


def attention_graph(
    attentions: Sequence[Tensor] | Tensor,
    *,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    layers: LayerRange = "all",
    num_prefix_tokens: int = 1,
    layout: TokenLayout | None = None,
) -> "DiGraph":
    """Build the graph of attention flow: node (l, i) is token i after layer l, layer 0 the input.

    The edge from (l, i) to (l − 1, j) carries Â_l[i, j] as `capacity` and as `weight`; edges of capacity 0 are left
    out. Each node has its `layer`, its `token` and a readable `label` such as "cls" or "patch (3, 4)".

    Args:
        attentions: layers of [1, heads, tokens, tokens] or fused [1, tokens, tokens], first layer first.
        head_fusion: "mean" (the paper), "max" or "min" over heads; fused attention is used unchanged.
        discard_ratio: share of the smallest values per layer to set to 0, 0 <= ratio < 1.
        residual: α, the share of the residual connection; the paper uses 0.5.
        layers: the layers whose edges to show, as for `attention_flow`.
        num_prefix_tokens: tokens before the patches.
        layout: names patches by row and column; its prefix tokens replace `num_prefix_tokens`.

    Raises:
        OptionError: an option is out of range.
        ShapeError: wrong shapes, several images, or values that are not finite or negative.

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
    images, tokens = len(chosen[0]), chosen[0].shape[-1]
    if images != 1:
        raise ShapeError(f"Expected attention of one image, got {images}: [layer[:1] for layer in attentions].")
    if layout is not None and layout.num_tokens != tokens:
        raise ShapeError(f"Expected {layout.num_tokens} tokens as in the layout, got attention between {tokens}.")
    fused = [(fuse_heads(layer, head_fusion) if layer.ndim == 4 else layer)[0] for layer in chosen]
    capacities = layer_capacities(fused, discard_ratio=discard_ratio, residual=residual, num_prefix_tokens=prefix)
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
