"""Similarity of rankings: Spearman correlation and overlap of the highest patches, with ties."""

import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError, ShapeError

Values = NDArray[np.floating[Any]]


def spearman(first: Values, second: Values) -> float | None:
    """Spearman's rank correlation of two maps of one shape, with average ranks for ties.

    Returns:
        ρ from −1 to 1; None if a map is constant up to the rounding of float32.

    Raises:
        ShapeError: the shapes differ, there are fewer than two values, or some are NaN or infinite.

    Source: Spearman, "The Proof and Measurement of Association between Two Things", 1904.

    >>> spearman(np.array([0.1, 0.2, 0.4]), np.array([1.0, 2.0, 3.0]))
    1.0
    >>> spearman(np.array([0.1, 0.2]), np.array([5.0, 5.0])) is None
    True
    """
    _check(first, second)
    if is_constant(first) or is_constant(second):
        return None
    from scipy.stats import rankdata  # slow to import: the first map does not need it

    a, b = (rankdata(values.ravel()) - (values.size + 1) / 2 for values in (first, second))
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))


def top_overlap(first: Values, second: Values, top: float = 0.1) -> float:
    """Share of the k highest patches that two maps of one shape have in common, k = top · n, at least 1.

    Patches that tie for the last ranks are included with equal fractions. The overlap is thus the expected value of
    breaking ties at random, and that of a constant map with any map is that of chance, k / n.

    Args:
        first, second: maps of n patches.
        top: share of the patches that counts as highest, 0 < top < 1.

    Returns:
        From 0 to 1.

    Raises:
        OptionError: top is out of range.
        ShapeError: as for `spearman`.

    >>> top_overlap(np.array([4.0, 3.0, 2.0, 1.0]), np.array([4.0, 1.0, 1.0, 3.0]), top=0.5)
    0.5
    """
    _check(first, second)
    if not 0.0 < top < 1.0:
        raise OptionError(f"Expected 0 < top < 1, got {top}.")
    count = max(round(top * first.size), 1)
    return float(_membership(first, count) @ _membership(second, count)) / count


def _membership(values: Values, count: int) -> NDArray[np.float64]:
    """Return the membership of each value in the `count` highest, 0 to 1; ties share it, and the sum is `count`."""
    flat = values.ravel()
    threshold = flat.min() if is_constant(flat) else np.partition(flat, flat.size - count)[flat.size - count]
    tied = np.ones(flat.size, dtype=bool) if is_constant(flat) else flat == threshold
    above = ~tied & (flat > threshold)
    part: NDArray[np.float64] = above + tied * ((count - above.sum()) / tied.sum())
    return part


def is_constant(values: Values) -> bool:
    """Return True if all values are equal up to the rounding of float32."""
    low, high = float(values.min()), float(values.max())
    return high - low <= 1e-6 * max(abs(low), abs(high))


def _check(first: Values, second: Values) -> None:
    if first.shape != second.shape or first.size < 2:
        raise ShapeError(
            f"Expected two maps of one shape with at least 2 values, got {first.shape} and {second.shape}: resample "
            "one to the grid of the other."
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ShapeError("Expected finite values, got NaN or infinite ones: leave out these patches in both maps.")


def random_map(pixels: Tensor, *, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Random map: a uniform number from [0, 1) for each patch, different for each image.

    The numbers depend only on the content of the image and the seed: an image has the same map in every run, alone
    or in a batch, and different images have independent maps.

    Args:
        pixels: model inputs, [batch, channels, height, width].
        rows: patches from top to bottom.
        cols: patches from left to right.
        seed: seed of the random numbers.

    Returns:
        [batch, rows, cols], float32.

    Raises:
        OptionError: the seed is negative.

    >>> images = torch.arange(24.0).reshape(2, 3, 2, 2)
    >>> bool((random_map(images, rows=2, cols=3)[1] == random_map(images[1:], rows=2, cols=3)[0]).all())
    True
    """
    if seed < 0:
        raise OptionError(f"Expected a seed of at least 0, got {seed}.")
    maps = []
    for image in pixels.detach().float().cpu():
        generator = np.random.default_rng((seed, zlib.crc32(image.numpy().tobytes())))
        maps.append(torch.from_numpy(generator.random((rows, cols), dtype=np.float32)))
    return torch.stack(maps)


def centre_prior(rows: int, cols: int, *, sigma: float = 0.25) -> Tensor:
    """Centre prior: exp(−(x² + y²) / 2σ²), with x and y from the centre of the model input in shares of its sides.

    Subjects of photographs tend to be in the centre, so this baseline scores well on many benchmarks.

    Args:
        rows: patches from top to bottom.
        cols: patches from left to right.
        sigma: σ, as a share of the side.

    Returns:
        [rows, cols], float32.

    Raises:
        OptionError: sigma is not positive.
        ShapeError: there is not at least one row and column.

    >>> centre_prior(1, 3, sigma=0.5)
    tensor([[0.8007, 1.0000, 0.8007]])
    """
    if not sigma > 0:
        raise OptionError(f"Expected sigma > 0, got {sigma}.")
    if rows < 1 or cols < 1:
        raise ShapeError(f"Expected at least 1 × 1 patches, got {rows} × {cols}.")
    # In units of σ, as σ² may overflow or underflow.
    y, x = (((torch.arange(count, dtype=torch.float64) + 0.5) / count - 0.5) / sigma for count in (rows, cols))
    return torch.exp(-(y[:, None] ** 2 + x[None, :] ** 2) / 2.0).float()
