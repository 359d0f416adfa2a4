"""Layers of a flow, their capacities, and the graph that all sinks share."""

from collections.abc import Sequence
from operator import index
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError
from vitflow.methods.fusion import (
    HeadFusion,
    add_residual,
    check_attentions,
    check_prefix,
    discard_low,
    fuse_heads,
    layers_of,
)

# "all", the last N layers, (first, last), or what the command line writes: "4", "9:12", "9:".
LayerRange = str | int | Sequence[int]

# Default number of layers of a flow, as in the table of methods.
DEFAULT_LAYERS = 4
# Maximum number of entries of layers that are processed together.
TOGETHER = 2**20


def parse_window(layers: LayerRange, count: int) -> tuple[int, int]:
    """Parse a range of layers into the first and the last layer, counted from 1, both included.

    Args:
        layers: "all"; N for the last N layers; (first, last), where -1 is the last layer of the model; or the same in
            words, "4", "9:12", "9:" or ":4".
        count: layers of the model.

    Raises:
        OptionError: there are no such layers.

    >>> parse_window(2, 12), parse_window((1, -2), 12), parse_window("9:", 12), parse_window("all", 12)
    ((11, 12), (1, 11), (9, 12), (1, 12))
    """
    expected = f'Expected layers="all", a number from 1 to {count}, or (first, last) from 1 to {count}, got {layers!r}.'
    if isinstance(layers, str):  # as the command line gives it
        expected = (
            f"Expected layers as all, a number from 1 to {count} (the last ones), or FIRST:LAST from 1 to {count}, "
            f"such as {max(count - 3, 1)}:{count}, got {layers}."
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
    """Return the checked layers of the window, and the 1-based index of the first layer.

    Raises:
        OptionError: there are no such layers.
        ShapeError: wrong shapes, or values that are not finite or negative, in a layer of the window.
    """
    everything = layers_of(attentions)
    first, last = parse_window(layers, len(everything))
    return check_attentions(everything[first - 1 : last], first), first


def layer_capacities(
    layers: Sequence[Tensor],
    batch_index: int,
    *,
    head_fusion: HeadFusion,
    discard_ratio: float,
    residual: float,
    num_prefix_tokens: int,
    visible: Sequence[Tensor] | None = None,
) -> NDArray[np.float64]:
    """Compute the matrices Â of one image of the batch, in float64: [layers, queries, keys], stored by columns.

    Heads are fused on their device in their dtype; the rest runs on the CPU. With a visibility mask, values are
    discarded per row, among the visible keys.
    """
    tokens = layers[0].shape[-1]
    check_prefix(num_prefix_tokens, tokens)
    by_column = torch.empty(len(layers), tokens, tokens, dtype=torch.float64)
    together = max(1, TOGETHER // tokens**2)
    for start in range(0, len(layers), together):
        fused = []
        for layer in layers[start : start + together]:
            image = layer[batch_index].detach()
            fused.append(fuse_heads(image, head_fusion) if image.ndim == 3 else image)
        stacked = torch.stack(fused).to("cpu", torch.float64)
        masks = (
            None
            if visible is None
            else torch.stack([mask[batch_index] for mask in visible[start : start + together]]).cpu()
        )
        kept = discard_low(stacked, discard_ratio, num_prefix_tokens, masks)
        by_column[start : start + together] = add_residual(kept, residual).mT
    return by_column.numpy().transpose(0, 2, 1)


Floats = NDArray[np.float64]
Ints = NDArray[np.int32]


class Graph(NamedTuple):
    """The layers shared by all sinks: m edge layers between m + 1 node layers, numbered from the lowest."""

    layer: Ints  # [nodes]: the layer of each node, from 0
    row: Ints  # [nodes + 1]: index of the first edge above each node
    above: Ints  # [edges]: the upper node
    capacity: Floats  # [edges]
    supply: Floats  # [top nodes]
