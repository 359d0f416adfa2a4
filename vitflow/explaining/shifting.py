"""Shifts: the mean map over crops of the picture that are moved by half a patch, so that no patch border decides."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from vitflow.errors import UnsupportedModelError
from vitflow.explaining.asked import PlacedPicture
from vitflow.explaining.choices import Chosen
from vitflow.explaining.saliency import Saliency
from vitflow.pictures.geometry import Placement
from vitflow.pictures.preprocessing import InputSpec


def explain_shifted(
    explain: Callable[[Sequence[PlacedPicture], Chosen, Any], list[list[Saliency]]],
    chosen: Chosen,
    picture: PlacedPicture,
    maps: Sequence[Saliency],
    spec: InputSpec,
) -> list[Saliency]:
    """One picture's maps, for those methods that ask for shifts their means over the moved crops, as one batch.

    Args:
        explain: gives the maps of some pictures, by method and target: [pictures][methods and targets].
        chosen: the methods.
        picture: the picture, placed without a shift.
        maps: its maps without a shift.
        spec: the input of the model.

    Raises:
        UnsupportedModelError: as for `moves`.
    """
    pixels = moves(spec)
    crops = [replace(picture, placement=moved(picture.placement, move)) for move in pixels]
    found = []
    for one in maps:
        if one.options.get("shifts"):
            targets = None if one.target is None else np.full(len(crops), one.target)
            method = next(own for own in chosen if own.name == one.method).but(**{**one.options, "shifts": 0})
            shifted = [of_crop[0] for of_crop in explain(crops, [method], targets)]
            patch = np.divide(picture.placement.input_size, one.grid.shape)  # height and width
            aligned = [realigned(each.grid, move / patch) for each, move in zip(shifted, pixels, strict=True)]
            grid = np.mean(aligned, axis=0).astype(np.float32)
            one = replace(one, grid=grid, seconds=one.seconds + sum(each.seconds for each in shifted))
        found.append(one)
    return found


def moves(spec: InputSpec) -> list[tuple[int, int]]:
    """The moves down and right, in pixels of the model input: half a patch each way, in all four combinations.

    Raises:
        UnsupportedModelError: the model does not tell its patch size, or has patches of one pixel.
    """
    size: Any = spec.patch_size
    height, width = (size, size) if isinstance(size, int) else size or (0, 0)
    if min(height, width) < 2:
        raise UnsupportedModelError(
            f"Shifts move the crop by half a patch, and this model tells no patch size (got {size}): use shifts=0."
        )
    return [(down * (height // 2), right * (width // 2)) for down in (-1, 1) for right in (-1, 1)]


def moved(placement: Placement, move: tuple[int, int]) -> Placement:
    """The same crop moved by (down, right) pixels of the model input; what leaves the picture is padded.

    >>> moved(Placement((100, 100), (64, 64), (8, 8), (48, 48)), (4, -4)).offset
    (12, 4)
    """
    return replace(placement, offset=(placement.offset[0] + move[0], placement.offset[1] + move[1]))


def realigned(
    grid: NDArray[np.floating[Any]], move: Sequence[float] | NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """A moved crop's map on the patches of the crop that was not moved, by the area that they have in common.

    Args:
        grid: the map of the moved crop, [rows, cols].
        move: how far it was moved down and right, in patches, less than 1 each.

    Returns:
        [rows, cols]: each patch is the mean of what covers it, as far as it is covered.

    >>> realigned(np.array([[1.0, 3.0]]), (0.0, 0.5))
    array([[1., 2.]])
    """
    # The area in common grows with what a line between two patches does; at the border one patch covers all there is.
    return np.asarray(ndimage.shift(grid.astype(np.float64), move, order=1, mode="nearest"))
