"""How far maps agree: rank correlation and overlap of their highest patches, ties counted fairly."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from vitflow.errors import OptionError, ShapeError
from vitflow.pictures.typesetting import decimal

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


def mean_of_defined(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are not None; None if there are none."""
    defined = [value for value in values if value is not None]
    return float(np.mean(defined)) if defined else None


Matrix = tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far several methods agree about the same pictures, two by two.

    Attributes:
        labels: the methods.
        spearman: rank correlation of the patches, [methods][methods], the mean over maps; None where a map is constant
            or the patch grids of the two differ.
        overlap: share of the highest patches in common, likewise; what chance gives is `top`.
        top: share of the patches that count as highest.
        maps: how many maps of each method were compared: pictures times classes.
        between_classes: for each class-specific method the rank correlation between its maps for two classes of one
            picture, the mean over pairs and pictures; 1 means that it does not tell the classes apart.
    """

    labels: tuple[str, ...]
    spearman: Matrix
    overlap: Matrix
    top: float
    maps: int
    between_classes: Mapping[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        """A table for the terminal, with a title and one sentence that says what it shows."""
        width = max(len(label) for label in self.labels)
        numbers = [str(number) for number in range(1, len(self.labels) + 1)]
        lines = [f"How far the methods agree about which patches matter ({_of(self.maps)})"]
        if told := self._in_words():
            lines.append(told)
        lines += [" " * (width + 4) + "".join(f"{number:>7}" for number in numbers)]
        for row, label in enumerate(self.labels):
            cells = "".join(f"{self._cell(row, col):>7}" for col in range(len(self.labels)))
            lines.append(f"{numbers[row]:>2}  {label:{width}}{cells}")
        lines.append("below the diagonal: Spearman's rank correlation of the patches; 1 is the same order, 0 is none")
        lines.append(f"above: share of the highest {self.top:.0%} of patches in common; {self.top:.2f} is chance")
        if self.between_classes:
            found = ", ".join(f"{label} {decimal(value, 2)}" for label, value in self.between_classes.items())
            lines.append(f"between the classes of a picture, Spearman: {found}")
        return "\n".join(lines)

    def _in_words(self) -> str:
        """The pairs that are the most and the least alike; empty where there are not two pairs to tell apart."""
        pairs = [
            (rho, f"{first} and {second} ({decimal(rho, 2)})")
            for i, first in enumerate(self.labels)
            for j, second in enumerate(self.labels)
            if i < j and (rho := self.spearman[i][j]) is not None
        ]
        if len(pairs) < 2:
            return ""
        return f"Most alike are {max(pairs)[1]}, least alike {min(pairs)[1]}."

    def _cell(self, row: int, col: int) -> str:
        if row == col:
            return "·"
        return decimal((self.spearman if row > col else self.overlap)[row][col], 2)

    def to_dict(self) -> dict[str, Any]:
        """The pairs as numbers, ready for JSON."""
        pairs = [
            {"methods": [first, second], "spearman": self.spearman[i][j], "overlap": self.overlap[i][j]}
            for i, first in enumerate(self.labels)
            for j, second in enumerate(self.labels)
            if i < j
        ]
        return {"top": self.top, "maps": self.maps, "pairs": pairs, "between_classes": dict(self.between_classes)}


def _of(maps: int) -> str:
    return "one map each" if maps == 1 else f"the mean over {maps} maps each"


def measure_agreement(
    labels: Sequence[str],
    maps: Sequence[Sequence[Values]],
    *,
    top: float = 0.1,
    between_classes: Mapping[str, float | None] | None = None,
) -> Agreement:
    """Compare each method's maps with each other method's, picture by picture.

    Args:
        labels: the methods.
        maps: for each picture and class the grid of each method.
        top: share of the patches that count as highest, 0 < top < 1.
        between_classes: is kept with the result.

    Raises:
        OptionError: top lies outside its range.

    >>> a, b = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[4.0, 3.0], [2.0, 1.0]])
    >>> measure_agreement(["a", "b"], [[a, b]], top=0.25).spearman
    ((1.0, -1.0), (-1.0, 1.0))
    """
    count = len(labels)
    rho: list[list[float | None]] = [[1.0] * count for _ in labels]
    share: list[list[float | None]] = [[1.0] * count for _ in labels]
    for i in range(count):
        for j in range(i):
            pairs = [(row[i], row[j]) for row in maps if row[i].shape == row[j].shape]
            rho[i][j] = rho[j][i] = mean_of_defined(spearman(a, b) for a, b in pairs)
            share[i][j] = share[j][i] = mean_of_defined(top_overlap(a, b, top) for a, b in pairs)
    if not 0.0 < top < 1.0:
        raise OptionError(f"Expected 0 < top < 1, got {top}.")
    return Agreement(
        tuple(labels), tuple(map(tuple, rho)), tuple(map(tuple, share)), top, len(maps), dict(between_classes or {})
    )
