"""Extents: the pixels of the model input that the cells of a grid cover. Without torch, as images are drawn by them."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


class Span(NamedTuple):
    """Extent of a grid along one axis of the model input, in pixels; cells may exceed the input, where it is padded.

    Attributes:
        start: the first pixel of the first cell.
        step: pixels per cell.
        first, last: tokens are computed from the pixels first ≤ k < last; others are unseen.
    """

    start: float
    step: float
    first: int
    last: int

    def edges(self, count: int) -> NDArray[np.float64]:
        """Return the boundaries of `count` cells, [count + 1].

        >>> Span(0, 14, 0, 378).edges(2).tolist()
        [0.0, 14.0, 28.0]
        """
        return self.start + self.step * np.arange(count + 1, dtype=np.float64)

    def is_even(self, count: int, length: int) -> bool:
        """Return True if `count` cells divide a side of `length` pixels evenly.

        >>> Span(0, 14, 0, 378).is_even(27, 378), Span(0, 14, 0, 378).is_even(27, 384)
        (True, False)
        """
        whole = math.isclose(self.step * count, length) and abs(self.start) <= 1e-9 * length
        return whole and (self.first, self.last) == (0, length)


#: The spans of the rows and of the columns.
Extent = tuple[Span, Span]


def even_extent(grid: tuple[int, int], size: tuple[int, int]) -> Extent:
    """Return the extent of a grid of (rows, columns) that divides an input of (height, width) evenly.

    >>> even_extent((14, 7), (224, 224))
    (Span(start=0.0, step=16.0, first=0, last=224), Span(start=0.0, step=32.0, first=0, last=224))
    """
    rows, cols = (Span(0.0, length / count, 0, length) for count, length in zip(grid, size, strict=True))
    return rows, cols


def overlaps(source: ArrayLike, target: ArrayLike) -> NDArray[np.float64]:
    """Return the common length of cell i of `target` and cell j of `source`, given their edges, [target, source].

    >>> overlaps([0, 2, 4], [0, 1, 4]).tolist()
    [[1.0, 0.0], [1.0, 2.0]]
    """
    low = np.maximum.outer(np.asarray(target)[:-1], np.asarray(source)[:-1])
    high = np.minimum.outer(np.asarray(target)[1:], np.asarray(source)[1:])
    shared: NDArray[np.float64] = np.clip(high - low, 0.0, None).astype(np.float64)
    return shared
