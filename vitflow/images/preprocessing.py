"""Preprocessing: the model input of an image, and its inverse: maps upsampled to the pixels of the image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import OptionError, ShapeError, check_known
from vitflow.images import INTERPOLATIONS, Fit, Interpolation, geometry
from vitflow.images.geometry import FILTERS, CropMode, Placement, Size, overlaps, strips

# The most pixels of a resized image: a 1 × 10,000 image whose short side is resized to 256 would be 2,560,000 long.
_MAX_RESIZED_PIXELS = 2**26


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Input size, normalisation and cropping of a model.

    Attributes:
        size: (height, width) of the input in pixels.
        channels: 3, 1 for grey; with another number, only normalised tensors are inputs.
        mean, std: per channel, for values in [0, 1]; 0 and 1 if there are neither 1 nor 3 channels.
        interpolation: name of the resize filter.
        crop_pct: share of the resized image that the crop keeps.
        crop_mode: as for `geometry.place`.
        patch_size: (height, width) of a patch in pixels, if the model has one.
        dynamic: whether the model accepts other input sizes.
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: CropMode = "center"
    patch_size: tuple[int, int] | None = None
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Preprocessing of images for a model: placement, cropping and normalisation.

    Attributes:
        spec: input of the model.
        fit: "crop", "squash", "pad" or "native", as for `geometry.place`.

    >>> half = Preprocessing(InputSpec((224, 224), 3, (0.5,) * 3, (0.5,) * 3))
    >>> half.prepare(np.zeros((480, 640, 3), np.uint8), half.place((480, 640))).shape
    (3, 224, 224)
    """

    spec: InputSpec
    fit: Fit = "crop"

    def place(self, image_size: Size) -> Placement:
        """Return the placement of an image of this (height, width)."""
        spec = self.spec
        return geometry.place(
            image_size,
            spec.size,
            fit=self.fit,
            crop_pct=spec.crop_pct,
            crop_mode=spec.crop_mode,
            patch_size=spec.patch_size,
        )

    def cut(self, image: NDArray[np.uint8], placement: Placement) -> NDArray[np.uint8]:
        """Cut the region that the model sees, unnormalised: uint8 RGB [height, width, 3].

        >>> seen = Preprocessing(InputSpec((2, 2), 3, (0.5,) * 3, (0.5,) * 3))
        >>> seen.cut(np.zeros((2, 6, 3), np.uint8), seen.place((2, 6))).shape
        (2, 2, 3)
        """
        filter_name = self.spec.interpolation
        check_known("interpolation", filter_name, FILTERS)
        (height, width), (top, left), (rows, cols) = placement.resized_size, placement.offset, placement.input_size
        if height * width > _MAX_RESIZED_PIXELS:
            raise ShapeError(
                f"Expected an image that is less long and narrow, got {image.shape[1]} × {image.shape[0]} pixels, "
                f"which would be resized to {width} × {height}: crop it, or use fit='squash' or fit='pad'."
            )
        first_row, last_row = max(top, 0), min(top + rows, height)
        first_col, last_col = max(left, 0), min(left + cols, width)
        # As Pillow does, columns first: rows are then resized in the columns that the model sees only.
        resample, whole = Image.Resampling[filter_name.upper()], Image.fromarray(image)
        wide = whole.resize((width, whole.height), resample).crop((first_col, 0, last_col, whole.height))
        inside = np.asarray(wide.resize((wide.width, height), resample))[first_row:last_row]
        padding = [round(255 * value) for value in self.spec.mean] if placement.padding == "mean" else [0] * 3
        seen = np.empty((*placement.input_size, 3), dtype=np.uint8)
        seen[:] = np.asarray(padding, np.uint8)
        seen[first_row - top : last_row - top, first_col - left : last_col - left] = inside
        return seen

    def prepare(self, image: NDArray[np.uint8], placement: Placement) -> NDArray[np.float32]:
        """Compute the normalised model input of an RGB image placed by `place`: float32 [channels, height, width].

        For fit="crop" it equals what timm's evaluation transform gives. Padding has the colour of the mean in 8 bits.
        """
        spec = self.spec
        if len(spec.mean) != 3 or len(spec.std) != 3 or min(spec.std) <= 0:
            raise OptionError(
                f"Expected three values each for mean and std, every std above 0, got {spec.mean} and {spec.std}."
            )
        if spec.channels == 1:  # luminance by ITU-R 601-2, as PIL's convert("L")
            grey = np.round(image @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
            image = np.repeat(grey[..., None], 3, axis=2)
        scaled = np.ascontiguousarray(self.cut(image, placement).transpose(2, 0, 1), dtype=np.float32)
        scaled /= np.float32(255)
        scaled -= np.asarray(spec.mean, dtype=np.float32)[:, None, None]
        scaled /= np.asarray(spec.std, dtype=np.float32)[:, None, None]
        return scaled[: spec.channels]


def upsample(
    grid: NDArray[np.floating[Any]], placement: Placement, *, interpolation: Interpolation = "linear"
) -> NDArray[np.float32]:
    """Upsample a map from patches to the pixels of the original image that the model saw.

    Pixel centres are aligned; beyond the outermost patch centres the values are constant.

    Args:
        grid: one value per patch, [rows, cols].
        placement: position of the model input on the image.
        interpolation: "linear"; "smooth", a quadratic B-spline with lower peaks; or "nearest", which gives each pixel
            the value of the patch that contains its centre. All stay within the values of the grid.

    Returns:
        float32 [height, width] of the original image, NaN where the model saw nothing.

    >>> upsample(np.array([[0.0, 1.0]]), Placement((1, 8), (1, 8), (0, 1), (1, 6)), interpolation="nearest")
    array([[nan,  0.,  0.,  0.,  1.,  1.,  1., nan]], dtype=float32)
    """
    check_known("interpolation", interpolation, INTERPOLATIONS)
    grid = np.ascontiguousarray(grid, dtype=np.float32)
    heatmap = np.full(placement.image_size, np.nan, dtype=np.float32)
    left, top, right, bottom = placement.seen_box
    if left == right or top == bottom:
        return heatmap
    centres = np.arange(top, bottom, dtype=np.float64) + 0.5, np.arange(left, right, dtype=np.float64) + 0.5
    shares = [
        (at - start) / length
        for at, (start, length) in zip(placement.to_input(*centres), placement.cells(grid.shape), strict=True)
    ]
    low, high = grid.min(), grid.max()  # rounding would leave some values beyond them
    if interpolation == "linear":  # by way of the pixels of the model input
        sides = [max(1, round(length)) for _, length in placement.cells(grid.shape)]
        rows, cols = (
            _neighbours((np.arange(side) + 0.5) / side, count, "linear")
            for side, count in zip(sides, grid.shape, strict=True)
        )
        grid = _blended(_blended(grid.T, *cols).T, *rows)
    (indices, weights), cols = (
        _neighbours(at, count, interpolation) for at, count in zip(shares, grid.shape, strict=True)
    )
    wide, seen = np.ascontiguousarray(_blended(grid.T, *cols).T), heatmap[top:bottom, left:right]
    for strip in strips(*seen.shape):
        np.clip(_blended(wide, indices[:, strip], weights[:, strip]), low, high, out=seen[strip])
    return heatmap


def merge_maps(
    grids: Sequence[NDArray[np.floating[Any]]], placements: Sequence[Placement]
) -> tuple[NDArray[np.float32], Placement]:
    """Combine maps of parts of an image, which may overlap, into one map of the whole image.

    The weight of each patch is distributed evenly over its area; cells of the new map are about as large as the
    smallest patch. The sum is preserved, except for what is outside the image.

    >>> left, right = (Placement((2, 4), (2, 4), (0, x), (2, 2)) for x in (0, 2))
    >>> merge_maps([np.array([[1.0]]), np.array([[2.0]])], [left, right])[0]
    array([[1., 2.]], dtype=float32)
    """
    size = placements[0].image_size
    edges = []
    for grid, placement in zip(grids, placements, strict=True):
        left, top, right, bottom = placement.area((grid.shape[0], grid.shape[1]))
        edges.append((np.linspace(top, bottom, grid.shape[0] + 1), np.linspace(left, right, grid.shape[1] + 1)))
    counts = [
        max(1, min(round(side / min(float(each[axis][1] - each[axis][0]) for each in edges)), side))
        for axis, side in enumerate(size)
    ]
    painted = np.zeros(counts)
    for grid, of_grid in zip(grids, edges, strict=True):
        rows, cols = (
            overlaps(along, np.arange(count + 1) * (side / count)) / np.diff(along)  # the share of each patch in a cell
            for along, side, count in zip(of_grid, size, counts, strict=True)
        )
        painted += rows @ grid @ cols.T
    return painted.astype(np.float32), Placement(size, size, (0, 0), size)


def _neighbours(
    places: NDArray[np.float64], count: int, interpolation: Interpolation
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the cells along an axis that are read at positions from 0 to 1, and their weights, [cells, positions]."""
    at = places * count - 0.5
    if interpolation == "linear":
        first = np.floor(at)
        weights = np.stack([1 - (at - first), at - first])
    else:
        first, weights = np.floor(at + 0.5), np.ones((1, len(at)))
    if interpolation == "smooth":
        distance = at - first
        weights = np.stack([(0.5 - distance) ** 2 / 2, 0.75 - distance**2, (0.5 + distance) ** 2 / 2])
        first = first - 1
    indices = first.astype(np.int64) + np.arange(len(weights))[:, None]
    return np.clip(indices, 0, count - 1), weights.astype(np.float32)


def _blended(
    lines: NDArray[np.float32], indices: NDArray[np.int64], weights: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return weighted sums of lines, [positions, …]."""
    # No product of matrices: the threads of BLAS would spin afterwards.
    blended: NDArray[np.float32] = np.einsum("kp,kp...->p...", weights, lines[indices])
    return blended
