"""Upsampling of maps from patches to the pixels of the image, by the inverse of the preprocessing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError, check_known
from vitflow.images import INTERPOLATIONS, Interpolation
from vitflow.images.geometry import Placement, strips

_Array = NDArray[np.float32]

#: Variance of the guide (brightness from 0 to 1) above which edges are kept; epsilon of He et al.
EDGE = 1e-3
# Corrections of the filter's input, and of its result, towards the means of the patches.
_BEFORE, _AFTER = 3, 3

_OPENCV_FLAGS = {"linear": cv2.INTER_LINEAR, "cubic": cv2.INTER_CUBIC}


def upsample(
    grid: NDArray[np.floating[Any]],
    placement: Placement,
    *,
    interpolation: Interpolation = "linear",
    image: NDArray[np.uint8] | None = None,
) -> NDArray[np.float32]:
    """Upsample a map from patches to the pixels of the original image that the model saw.

    The grid is resized to the model input, which is mapped back by the inverse of the resize and crop of the
    preprocessing. Pixel centres are aligned; beyond the outermost patch centres the values are constant.

    Args:
        grid: one value per patch, [rows, cols].
        placement: position of the model input on the image.
        interpolation: "linear" stays within the values of the grid; so does "smooth", a quadratic B-spline with lower
            peaks; "cubic" is smooth and may overshoot; "nearest" gives each pixel the value of the patch that contains
            its centre; "guided" aligns edges with those of the image, and keeps the mean of each patch.
        image: the image, uint8 RGB [height, width, 3], for "guided".

    Returns:
        float32 [height, width] of the original image, NaN where the model saw nothing.

    Raises:
        OptionError: the interpolation is unknown, or "guided" without an image.
        ShapeError: the grid is not two-dimensional, is empty, or contains NaN or infinite values.

    >>> upsample(np.array([[0.0, 1.0]]), Placement((1, 8), (1, 8), (0, 1), (1, 6)), interpolation="nearest")
    array([[nan,  0.,  0.,  0.,  1.,  1.,  1., nan]], dtype=float32)
    """
    check_known("interpolation", interpolation, INTERPOLATIONS)
    grid = np.ascontiguousarray(grid, dtype=np.float32)
    if grid.ndim != 2 or grid.size == 0 or not np.isfinite(grid).all():
        raise ShapeError(
            f"Expected a grid [rows, cols] of finite values, got shape {grid.shape}"
            + (" with NaN or infinite values." if grid.ndim == 2 and grid.size else ".")
        )
    heatmap = np.full(placement.image_size, np.nan, dtype=np.float32)
    left, top, right, bottom = placement.seen_box
    if left == right or top == bottom:
        return heatmap
    if interpolation in ("nearest", "guided"):
        rows, cols = (
            _patch_of_pixels(axis, first, last, count, placement)
            for axis, first, last, count in ((0, top, bottom, grid.shape[0]), (1, left, right, grid.shape[1]))
        )
        if interpolation == "nearest":
            heatmap[top:bottom, left:right] = grid[np.ix_(rows, cols)]
            return heatmap
        if image is None or image.shape[:2] != placement.image_size:
            raise OptionError("interpolation='guided' requires the image, in the size of the placement.")
        smooth = partial(upsample, placement=placement, interpolation="smooth")
        heatmap[top:bottom, left:right] = _guided(
            grid, lambda one: smooth(one)[top:bottom, left:right], image[top:bottom, left:right], rows, cols
        )
        return heatmap
    if interpolation == "smooth":
        centres = np.arange(top, bottom, dtype=np.float64) + 0.5, np.arange(left, right, dtype=np.float64) + 0.5
        y, x = placement.to_input(centres[0], centres[1])
        wide = np.ascontiguousarray(_splined(grid.T, x / placement.input_size[1]).T)
        seen = heatmap[top:bottom, left:right]
        low, high = grid.min(), grid.max()  # rounding would leave some values beyond them
        for strip in strips(*seen.shape):
            np.clip(_splined(wide, y[strip] / placement.input_size[0]), low, high, out=seen[strip])
        return heatmap
    flags = _OPENCV_FLAGS[interpolation]
    on_input = cv2.resize(grid, placement.input_size[::-1], interpolation=flags)
    heatmap[top:bottom, left:right] = cv2.warpAffine(
        on_input,
        _pixel_to_input(placement, left, top),
        (right - left, bottom - top),
        flags=flags | cv2.WARP_INVERSE_MAP,
        borderMode=cv2.BORDER_REPLICATE,
    )
    return heatmap


def merge_maps(
    grids: Sequence[NDArray[np.floating[Any]]], placements: Sequence[Placement]
) -> tuple[NDArray[np.float32], Placement]:
    """Combine maps of parts of an image, which may overlap, into one map of the whole image.

    The weight of each patch is distributed evenly over its area; cells of the new map are about as large as the
    smallest patch. The sum is preserved, except for what is outside the image.

    Args:
        grids: maps [rows, cols].
        placements: their placements on the same image.

    >>> left, right = (Placement((2, 4), (2, 4), (0, x), (2, 2)) for x in (0, 2))
    >>> merge_maps([np.array([[1.0]]), np.array([[2.0]])], [left, right])[0]
    array([[1., 2.]], dtype=float32)
    """
    size = placements[0].image_size
    edges = [
        [_edges(placement, axis, grid.shape[axis]) for placement, grid in zip(placements, grids, strict=True)]
        for axis in (0, 1)
    ]
    counts = [
        max(1, min(round(side / min(float(pair[1] - pair[0]) for pair in of_axis)), side))
        for side, of_axis in zip(size, edges, strict=True)
    ]
    painted = np.zeros(counts)
    for grid, *pair in zip(grids, *edges, strict=True):
        rows, cols = (_shares(of_axis, side, count) for of_axis, side, count in zip(pair, size, counts, strict=True))
        painted += rows @ grid @ cols.T
    return painted.astype(np.float32), Placement(size, size, (0, 0), size)


def _edges(placement: Placement, axis: int, count: int) -> NDArray[np.float64]:
    """Return the boundaries of a grid's patches along an axis of the image, [count + 1]."""
    along = np.arange(count + 1, dtype=np.float64) * (placement.input_size[axis] / count)
    return placement.to_image(along, along)[axis]


def _shares(edges: NDArray[np.float64], side: int, count: int) -> NDArray[np.float64]:
    """Return the share of each patch along an axis in each of `count` cells of the image, [cells, patches]."""
    cells = np.arange(count + 1) * (side / count)
    begin, end = np.maximum.outer(cells[:-1], edges[:-1]), np.minimum.outer(cells[1:], edges[1:])
    shares: NDArray[np.float64] = np.clip(end - begin, 0.0, None) / np.diff(edges)
    return shares


def _splined(lines: NDArray[np.float32], places: NDArray[np.float64]) -> NDArray[np.float32]:
    """Interpolate [patches, …] at positions from 0 to 1 along the first axis by a quadratic B-spline: [positions, …].

    Each value is a weighted mean of the three nearest patches; the outermost values continue outwards. No product of
    matrices: the threads of BLAS would spin afterwards.
    """
    at = places * len(lines) - 0.5
    nearest = np.rint(at).astype(np.int64)
    distance = at - nearest
    weights = np.stack([(0.5 - distance) ** 2 / 2, 0.75 - distance**2, (0.5 + distance) ** 2 / 2]).astype(np.float32)
    next_to = lines[np.clip(nearest + np.array([[-1], [0], [1]]), 0, len(lines) - 1)]
    blended: NDArray[np.float32] = np.einsum("kp,kp...->p...", weights, next_to)
    return blended


def _pixel_to_input(placement: Placement, left: int, top: int) -> NDArray[np.float64]:
    """Return the 2 × 3 matrix from pixel indices, counted from (left, top) in the image, to those of the input."""
    # OpenCV counts from pixel centres: index k stands for the coordinate k + 1/2.
    y0, x0 = placement.to_input(top + 0.5, left + 0.5)
    y1, x1 = placement.to_input(top + 1.5, left + 1.5)
    return np.array([[x1 - x0, 0.0, x0 - 0.5], [0.0, y1 - y0, y0 - 0.5]])


def _patch_of_pixels(axis: int, first: int, last: int, count: int, placement: Placement) -> NDArray[np.int64]:
    """Return the row (axis 0) or column (axis 1) of the patch that contains the centre of each pixel."""
    size, resized = placement.image_size[axis], placement.resized_size[axis]
    # In whole numbers, as Placement.seen_box does: (k + 1/2) · resized / size − offset, in units of patches.
    centres = (2 * np.arange(first, last, dtype=np.int64) + 1) * resized - 2 * size * placement.offset[axis]
    return centres * count // (2 * size * placement.input_size[axis])


def _guided(
    grid: NDArray[np.floating[Any]],
    smooth: Callable[[NDArray[np.floating[Any]]], _Array],
    image: NDArray[np.uint8],
    rows: NDArray[np.int64],
    cols: NDArray[np.int64],
) -> _Array:
    """Upsample a map so that its edges follow the image, and each patch keeps its mean.

    The guided filter of He, Sun & Tang (TPAMI 2013) with the image's brightness as guide, box filters that reach half a
    patch to each side, and the smooth upsampling as input. The mean of each patch is restored: first by smooth
    corrections of the filter's input, then of its result, and the rest by a constant for each patch. The map itself has
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
