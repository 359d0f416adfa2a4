"""How far maps agree: rank correlation and overlap of their highest patches, ties counted fairly."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from vitflow.errors import OptionError
from vitflow.methods.ranks import Values, spearman, top_overlap
from vitflow.pictures.typesetting import decimal


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
        maps = "one map each" if self.maps == 1 else f"the mean over {self.maps} maps each"
        lines = [f"How far the methods agree about which patches matter ({maps})"]
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
            (rho, f"{self.labels[i]} and {self.labels[j]} ({decimal(rho, 2)})")
            for i, j in combinations(range(len(self.labels)), 2)
            if (rho := self.spearman[i][j]) is not None
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
            {
                "methods": [self.labels[i], self.labels[j]],
                "spearman": self.spearman[i][j],
                "overlap": self.overlap[i][j],
            }
            for i, j in combinations(range(len(self.labels)), 2)
        ]
        return {"top": self.top, "maps": self.maps, "pairs": pairs, "between_classes": dict(self.between_classes)}


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
    for i, j in combinations(range(count), 2):
        pairs = [(row[i], row[j]) for row in maps if row[i].shape == row[j].shape]
        rho[i][j] = rho[j][i] = mean_of_defined(spearman(a, b) for a, b in pairs)
        share[i][j] = share[j][i] = mean_of_defined(top_overlap(a, b, top) for a, b in pairs)
    if not 0.0 < top < 1.0:
        raise OptionError(f"Expected 0 < top < 1, got {top}.")
    return Agreement(
        tuple(labels), tuple(map(tuple, rho)), tuple(map(tuple, share)), top, len(maps), dict(between_classes or {})
    )
