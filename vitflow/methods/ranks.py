"""How alike two maps rank patches: rank correlation and overlap of their highest patches, ties counted fairly."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from vitflow.errors import OptionError, ShapeError

Values = NDArray[np.floating[Any]]


def spearman(first: Values, second: Values) -> float | None:
    """Spearman's rank correlation of two maps of one shape, with average ranks for ties.

    Returns:
        ρ from −1 to 1; None where a map is constant up to the rounding of float32, for then it ranks nothing.

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
    a, b = (rankdata(values.ravel()) - (values.size + 1) / 2 for values in (first, second))
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))


def top_overlap(first: Values, second: Values, top: float = 0.1) -> float:
    """Share of the k highest patches that two maps of one shape have in common, k = top · n, at least 1.

    Where patches tie for the last places, each belongs to the highest to an equal part. So the overlap is what
    breaking ties at random gives on average, and a constant map has that of chance, k / n, with every map.

    Args:
        first, second: maps of n patches.
        top: share of the patches that counts as highest, 0 < top < 1.

    Returns:
        From 0 to 1.

    Raises:
        OptionError: top lies outside its range.
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
    """To what part each value belongs to the `count` highest; the parts sum to `count`."""
    flat = values.ravel()
    threshold = flat.min() if is_constant(flat) else np.partition(flat, flat.size - count)[flat.size - count]
    tied = np.ones(flat.size, dtype=bool) if is_constant(flat) else flat == threshold
    above = ~tied & (flat > threshold)
    part: NDArray[np.float64] = above + tied * ((count - above.sum()) / tied.sum())
    return part


def is_constant(values: Values) -> bool:
    """Whether all values are equal up to the rounding of float32: such a map ranks nothing."""
    low, high = float(values.min()), float(values.max())
    return high - low <= 1e-6 * max(abs(low), abs(high))


def _check(first: Values, second: Values) -> None:
    if first.shape != second.shape or first.size < 2:
        raise ShapeError(f"Expected two maps of one shape with at least 2 values, got {first.shape}, {second.shape}.")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ShapeError("Expected finite values, got NaN or infinite ones.")
