"""Removed patches: the logits of an image of which only some patches are kept."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import ModelError, ShapeError, UnsupportedModelError
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import PlacedImage
from vitflow.explaining.token_dropping import droppable_tokens, run_on_patches
from vitflow.images.geometry import Extent
from vitflow.methods.cells import cell_owners, mean_colour
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.isolation import evaluating

REPLACEMENTS = ("drop", "blank")

Indices = NDArray[np.intp]


class Kept(NamedTuple):
    """Indices of the kept patches, [kept], on a grid of (rows, cols) that covers these pixels of the model input."""

    patches: Indices
    grid: tuple[int, int]
    extent: Extent | None


def logits_without(
    explainer: Explainer,
    placed: PlacedImage,
    choices: Sequence[Kept],
    replace: str,
    batch_size: int = 32,
) -> Tensor:
    """Return the logits [choices, classes] of an image that keeps only these patches, on the CPU.

    Args:
        explainer: explainer of the model.
        placed: the image.
        choices: the kept patches of each result.
        replace: replacement of the others as for `vitflow.evaluation.faithfulness_curves`: "drop" or "blank".
        batch_size: images or shortened sequences per forward pass; affects speed only.

    Raises:
        ModelError: the model returns NaN or infinite logits.
        ShapeError: the grid does not match the tokens to drop.
        UnsupportedModelError: the model cannot drop tokens.
    """
    pixels = explainer.pixels(placed)
    with torch.no_grad(), evaluating(explainer.model):
        if replace == "drop":
            logits = _with_dropped_tokens(explainer, pixels, choices, batch_size)
        else:
            logits = _with_blank_patches(explainer, pixels, choices, batch_size)
    if not torch.isfinite(logits).all():
        raise ModelError(f"{explainer.model_id} returned NaN or infinite logits for an image with removed patches.")
    return logits


def removed_counts(patches: int, points: int) -> list[int]:
    """Return the number of removed patches at each point, from none to all; the second half mirrors the first.

    >>> removed_counts(196, 11)
    [0, 20, 39, 59, 78, 98, 118, 137, 157, 176, 196]
    """
    counts = [round(Fraction(point * patches, points - 1)) for point in range((points + 1) // 2)]
    return counts + [patches - count for count in reversed(counts[: points // 2])]


def patch_order(grid: NDArray[np.floating[Any]]) -> Indices:
    """Return the indices of a map's patches, highest first, ties in raster order; ShapeError for values not finite.

    >>> patch_order(np.array([[0.1, 0.5], [0.5, 0.9]])).tolist()
    [3, 1, 2, 0]
    """
    if not np.isfinite(grid).all():
        raise ShapeError("Expected a map of finite values, got NaN or infinite ones.")
    return np.argsort(-grid.ravel().astype(np.float64), kind="stable")


def can_drop_tokens(explainer: Explainer) -> bool:
    """Return True if the explainer's model can run on a subset of patches, tried once on noise.

    >>> can_drop_tokens(Explainer("demo"))
    True
    """
    try:
        check_can_drop(explainer, explainer.spec.size)
    except UnsupportedModelError:
        return False
    return True


def check_can_drop(explainer: Explainer, input_size: tuple[int, int]) -> TokenLayout:
    """Return the layout of the droppable tokens for a model input of (height, width) pixels, or raise the reason."""
    parameter = next(explainer.model.parameters(), torch.zeros(()))
    pixels = torch.empty(1, explainer.spec.channels, *input_size, dtype=parameter.dtype, device=explainer.device)
    try:
        return droppable_tokens(explainer.model, pixels, explainer.model_info.layout, explainer.outputs.read)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f'{explainer.model_id} cannot drop patches from its sequence. {error} Use replace="blank" instead.'
        ) from error


def _with_blank_patches(explainer: Explainer, pixels: Tensor, choices: Sequence[Kept], batch_size: int) -> Tensor:
    """Return the logits [choices, classes] for an image whose other patches have its mean colour, on the CPU."""
    (height, width), filler = pixels.shape[-2:], mean_colour(pixels)
    grids = {(choice.grid, choice.extent) for choice in choices}
    owners = {(grid, extent): cell_owners(height, width, *grid, extent) for grid, extent in grids}
    logits = []
    for start in range(0, len(choices), batch_size):
        visible = []
        for choice in choices[start : start + batch_size]:
            keeps = torch.zeros(choice.grid[0] * choice.grid[1], dtype=torch.bool)
            keeps[torch.from_numpy(choice.patches)] = True
            visible.append(keeps[owners[choice.grid, choice.extent]][None])
        images = torch.where(torch.stack(visible).to(pixels.device), pixels, filler)
        logits.append(explainer.logits(images).cpu())
    return torch.cat(logits)


def _with_dropped_tokens(explainer: Explainer, pixels: Tensor, choices: Sequence[Kept], batch_size: int) -> Tensor:
    """Return the logits [choices, classes] without the tokens of the other patches, on the CPU.

    If the output has no value without any patch, as their average, the image is replaced by its mean colour.
    """
    layout = check_can_drop(explainer, (pixels.shape[-2], pixels.shape[-1]))
    by_length: dict[int, list[int]] = {}
    for index, choice in enumerate(choices):
        if choice.grid != (layout.rows, layout.cols):
            raise ShapeError(
                f"Dropping tokens requires a map of the model's {layout.rows} × {layout.cols} patches, got "
                f'{" × ".join(map(str, choice.grid))}. Use replace="blank", which supports any grid.'
            )
        by_length.setdefault(len(choice.patches), []).append(index)
    order, logits = list[int](), list[Tensor]()
    for length, indices in by_length.items():
        for start in range(0, len(indices), batch_size):
            chunk = indices[start : start + batch_size]
            result = torch.full((1, 1), torch.nan)  # without any token
            if length == layout.num_patches:
                result = explainer.logits(pixels)
            elif length or layout.num_tokens > layout.num_patches:
                kept = torch.from_numpy(np.stack([choices[index].patches for index in chunk]))
                result = run_on_patches(explainer.model, pixels, kept, layout=layout, outputs=explainer.outputs.read)
            if length == 0 and not torch.isfinite(result).all():
                result = explainer.logits(mean_colour(pixels))
            logits.append(result.cpu().expand(len(chunk), -1))
            order += chunk
    return torch.cat(logits)[np.argsort(order)]
