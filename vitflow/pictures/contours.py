"""Contours of a map: lines around its highest values, by the share of the map's mass that they make up."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError

#: Shares of the mass that lines are drawn around where the caller names none.
CONTOURS = (0.1, 0.25, 0.5)

#: A range up to this share of the largest value is rounding: a constant map has no highest values.
_ROUNDING = 1e-6


def mass_level(values: NDArray[np.floating[Any]], share: float) -> float | None:
    """The value from which on the highest values make up a share of a map's mass, the sum of its values above 0.

    Args:
        values: the map, of any shape; NaN is left out, and what lies below 0 has no mass.
        share: of the mass, 0 < share < 1.

    Returns:
        The level; None where the map is constant or nowhere above 0.

    Raises:
        OptionError: the share lies outside its range.

    >>> mass_level(np.array([1.0, 4.0, 2.0, 3.0]), 0.5), mass_level(np.ones(4), 0.5)
    (3.0, None)
    """
    if not 0.0 < share < 1.0:
        raise OptionError(f"Expected contours of shares between 0 and 1, got {share}.")
    finite = values[np.isfinite(values)].astype(np.float64)
    highest = finite.max(initial=0.0)
    if highest <= 0 or highest - finite.min() <= _ROUNDING * highest:
        return None
    falling = np.sort(finite[finite > 0])[::-1]
    mass = np.cumsum(falling)
    return float(falling[np.searchsorted(mass, share * mass[-1])])


def explained(contours: bool | Sequence[float]) -> str:
    """What the lines are drawn around, in a sentence for readers; empty where there are none.

    >>> explained((0.25, 0.5)), explained(False)
    ("Lines: around the highest values that make up 25 and 50 % of the map's sum.", '')
    """
    shares = CONTOURS if contours is True else contours or ()
    told = [f"{100 * share:g}" for share in shares]
    if not told:
        return ""
    listed = " and ".join([", ".join(told[:-1]), told[-1]] if len(told) > 1 else told)
    return f"Lines: around the highest values that make up {listed} % of the map's sum."


def draw_contours(picture: NDArray[np.uint8], values: NDArray[np.floating[Any]], shares: Sequence[float]) -> None:
    """Draw a white line with a dark edge where the map crosses the level of each share, in place.

    Args:
        picture: uint8 RGB [height, width, 3].
        values: the map over it, [height, width]; NaN where the model saw nothing, and no line is drawn there.
        shares: of the map's mass, as for `mass_level`.
    """
    thickness = max(1.0, min(values.shape) / 250)
    padded = np.pad(values, 1, mode="edge")
    slope = np.hypot(padded[2:, 1:-1] - padded[:-2, 1:-1], padded[1:-1, 2:] - padded[1:-1, :-2]) / 2
    for level in dict.fromkeys(mass_level(values, share) for share in shares):
        if level is None:
            continue
        # Pixels to the line: to first order the difference in value over the slope; none where the map is flat.
        away = np.full(values.shape, np.inf)
        np.divide(np.abs(values - level), slope, out=away, where=slope > 0)
        for width, color, strength in ((thickness + 2, 0.0, 0.5), (thickness, 255.0, 1.0)):
            cover = strength * np.clip(width / 2 + 0.5 - away, 0, 1)
            drawn = cover > 0  # never at NaN
            share = cover[drawn][:, None]
            picture[drawn] = np.rint(picture[drawn] * (1 - share) + color * share).astype(np.uint8)
