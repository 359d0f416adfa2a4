"""Guided upsampling: a map whose edges follow those of its image."""

from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

#: Variance of the guide (brightness from 0 to 1) above which edges are kept; epsilon of He et al.
EDGE = 1e-3
# Corrections of the filter's input, and of its result, towards the means of the patches.
_BEFORE, _AFTER = 3, 3

_Array = NDArray[np.float32]


def guided(
    grid: NDArray[np.floating[Any]],
    smooth: Callable[[NDArray[np.floating[Any]]], _Array],
    image: NDArray[np.uint8],
    rows: NDArray[np.int64],
    cols: NDArray[np.int64],
) -> _Array:
    """Upsample a map so that its edges follow the image, and each patch keeps its mean.

    The guided filter of He, Sun & Tang (TPAMI 2013) with the image's brightness as guide, box filters that reach half a
    patch to each side, and the smooth upsampling as input. What the filter moves out of a patch is brought back: by
    smooth corrections of its input, then of its result, and the rest by a constant for each patch. The map itself has
    no such detail.

    Args:
        grid: the map, [rows, cols].
        smooth: upsamples such a grid to float32 [height, width].
        image: the part of the image that the model saw, uint8 RGB [height, width, 3].
        rows, cols: the patch row of each pixel row, [height], and the patch column of each pixel column, [width].

    Returns:
        float32 [height, width].
    """
    guide = np.asarray(cv2.cvtColor(np.ascontiguousarray(image), cv2.COLOR_RGB2GRAY) / 255, dtype=np.float32)
    radius = (_radius(rows), _radius(cols))
    follow, sharpen = _filter(guide, radius), _sharpening(grid.shape)
    given = smooth(sharpen(grid))
    result = follow(given)
    for _ in range(_BEFORE):
        given = given + smooth(sharpen(grid - _means(result, rows, cols, grid)))
        result = follow(given)
    for _ in range(_AFTER):
        result = result + smooth(sharpen(grid - _means(result, rows, cols, grid)))
    rest = grid - _means(result, rows, cols, grid)
    return np.asarray(result + rest[np.ix_(rows, cols)], dtype=np.float32)


def _radius(patches: NDArray[np.int64]) -> int:
    """Return half the side of a patch in pixels, at least 1."""
    return max(1, round(len(patches) / len(np.unique(patches)) / 2))


def _sharpening(shape: tuple[int, ...]) -> Callable[[NDArray[np.floating[Any]]], NDArray[np.floating[Any]]]:
    """Return a function of a grid whose smooth upsampling has the means of the grid, for patches of equal size.

    The mean of the quadratic B-spline over a patch is 2/3 of its value and 1/6 of the values on both sides.
    """
    means = []
    for count in shape:
        matrix = (np.eye(count, k=-1) + 4 * np.eye(count) + np.eye(count, k=1)) / 6
        matrix[0, 0] += 1 / 6  # the outermost values continue outwards
        matrix[-1, -1] += 1 / 6
        means.append(matrix)
    return lambda grid: np.linalg.solve(means[0], np.linalg.solve(means[1], grid.T).T).astype(np.float32)


def _filter(guide: _Array, radius: tuple[int, int]) -> Callable[[_Array], _Array]:
    """Return the guided filter of a guide: input → mean(a) · guide + mean(b), with a and b fitted in each box."""
    size = 2 * radius[1] + 1, 2 * radius[0] + 1

    def summed(values: _Array) -> _Array:
        return np.asarray(cv2.boxFilter(values, -1, size, normalize=False, borderType=cv2.BORDER_CONSTANT))

    count = summed(np.ones_like(guide))
    average = summed(guide) / count
    variance = summed(guide * guide) / count - average * average

    def follow(values: _Array) -> _Array:
        level = summed(values) / count
        slope = (summed(guide * values) / count - average * level) / (variance + np.float32(EDGE))
        offset = level - slope * average
        return np.asarray((summed(slope) * guide + summed(offset)) / count, dtype=np.float32)

    return follow


def _means(
    values: _Array, rows: NDArray[np.int64], cols: NDArray[np.int64], grid: NDArray[np.floating[Any]]
) -> NDArray[np.floating[Any]]:
    """Return the mean of the pixels of each patch, [rows, cols]; for a patch without pixels its value in the grid."""
    down, across = (np.arange(count)[:, None] == of for count, of in zip(grid.shape, (rows, cols), strict=True))
    pixels = np.outer(down.sum(axis=1), across.sum(axis=1))
    sums = down.astype(np.float64) @ values @ across.T.astype(np.float64)
    return np.where(pixels > 0, sums / np.maximum(pixels, 1), grid).astype(np.float32)
