"""From the picture's tokens down to the patches of the vision tower that they were made of."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.rollout import attention_rollout
from vitflow.recording.recorder import record_attention
from vitflow.text.picture_tokens import PictureTokens

_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder")


def tower_rows(
    model: nn.Module, inputs: Mapping[str, Any], parts: Sequence[PictureTokens], *, residual: float = 0.5
) -> tuple[NDArray[np.float32], ...]:
    """What the tokens of each part hold of the tower's own patches, by rollout through its layers.

    A token that was merged of several patches speaks with all of them alike.

    Args:
        model: sees and writes.
        inputs: a prompt with its pictures.
        parts: where their patches stand.
        residual: the share of the residual connection.

    Returns:
        For each part, rows of the rollout [patches, patches of the tower], both row by row from the top left; what lies
        on the tower's class token is missing in their sums.

    Raises:
        UnsupportedModelError: the tower attends within windows, or its inputs are no parts of their own.
    """
    path = next((path for path, _ in model.named_modules() if path.split(".")[-1] in _TOWERS), None)
    sees: Any = getattr(getattr(model, "config", None), "vision_config", None)
    if path is None or getattr(sees, "fullatt_block_indexes", None) is not None:
        raise _refusal(model, "attends within windows" if path else "is not where others have it")
    with record_attention(model, fusions=[("mean", False)], within=path) as trace, torch.no_grad():
        model(**inputs)
    matrices = trace.fused()[: _feature_layer(model, len(trace.layers))]
    packed = inputs["pixel_values"].ndim == 2
    sizes = {tuple(one.shape) for one in matrices}
    if len(sizes) != 1 or len(matrices[0]) != len(parts):
        raise _refusal(model, f"runs on {len(matrices[0])} inputs for {len(parts)} grids of tokens")
    rolled = attention_rollout([one.cpu().double() for one in matrices], residual=residual, num_prefix_tokens=0)
    return tuple(_rows(one, part, packed) for one, part in zip(rolled, parts, strict=True))


def _refusal(model: nn.Module, words: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The vision tower of {type(model).__name__} {words}: what a word rests on is told on the picture's tokens "
        "alone. Leave out through_tower."
    )


def _feature_layer(model: nn.Module, layers: int) -> int:
    """After how many layers the tower's patches are handed on."""
    named = getattr(getattr(model, "config", None), "vision_feature_layer", -1)
    chosen = max(
        one if one >= 0 else layers + 1 + one for one in (named if isinstance(named, list | tuple) else [named])
    )
    return chosen or layers


def _rows(rolled: Tensor, part: PictureTokens, packed: bool) -> NDArray[np.float32]:
    """Rows of tokens over patches, of a product [tokens of the tower, tokens of the tower]."""
    side = math.isqrt(len(rolled) // (part.rows * part.cols))
    count = side * side * part.rows * part.cols
    order = torch.arange(len(rolled) - count, len(rolled), device=rolled.device)  # behind class and register tokens
    if packed:  # the patches of each token one after the other
        blocks = order.view(part.rows, part.cols, side, side)
        raster = blocks.transpose(1, 2)
    else:
        raster = order.view(part.rows, side, part.cols, side)
        blocks = raster.transpose(1, 2)
    rows = rolled[blocks.flatten(2).flatten(0, 1)].mean(dim=1)
    found: NDArray[np.float32] = rows[:, raster.flatten()].float().cpu().numpy()
    return found
