"""The figure of one map that stands alone: what it is, itself over its picture, a bar of its colours with values."""

from collections.abc import Iterator, Sequence

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.pictures import overlay
from vitflow.pictures.geometry import Placement
from vitflow.pictures.pen import REACH, Box, Limits, Pen
from vitflow.pictures.typesetting import BODY, GREY, LEADING, SMALL, TITLE, Page, measure, readable, wrap


def side_by_side(first: NDArray[np.uint8], second: NDArray[np.uint8], gap: int = 12) -> NDArray[np.uint8]:
    """Two pictures [height, width, 3] beside each other on white.

    >>> side_by_side(np.zeros((2, 3, 3), np.uint8), np.zeros((4, 5, 3), np.uint8)).shape
    (4, 20, 3)
    """
    height, left = max(len(first), len(second)), first.shape[1] + gap
    page = np.full((height, left + second.shape[1], 3), 255, np.uint8)
    page[: len(first), : first.shape[1]], page[: len(second), left:] = first, second
    return page


def draw_map(
    pen: Pen,
    grid: NDArray[np.float32],
    placement: Placement,
    image: NDArray[np.uint8],
    *,
    title: str,
    lines: Sequence[str],
    details: str,
    notes: Sequence[str],
    ends: tuple[str, str],
    box: Box | None = None,
    beside: NDArray[np.uint8] | None = None,
) -> Figure:
    """Draw a map as a figure that stands alone: what it is, itself over its picture, a bar of its colours with values.

    Args:
        pen: how to draw.
        grid, placement, image: the map [rows, cols], where it lies, and the picture, uint8 RGB [height, width, 3].
        title: what the map is.
        lines: what was asked.
        details: smaller, below these.
        notes: what else a reader must know, below the bar.
        ends: what values below and above 0 stand for, told at the ends of a bar that has both.
        box: of the picture, to be marked.
        beside: a picture to show on the left, which this one was compared with.
    """
    limits = pen.limits(grid)
    picture = pen.overlay(grid, placement, image, limits, box)
    if beside is not None:
        picture = side_by_side(pen.photograph(beside), picture)
    margin = 0.12
    across = max(picture.shape[1] / pen.dpi, 2.4)
    page = Page(pen.dpi, across + 2 * margin)
    heads = [(title, TITLE * 1.2, "bold"), *((text, TITLE, "normal") for text in lines), (details, BODY, "normal")]
    y = 0.1
    for text, size, weight in heads:
        for line in wrap(text, across, size, lines=3, weight=weight):
            y += size * LEADING
            page.line(line, margin, y - 0.03, size, ha="left", weight=weight)
    y += 0.05
    page.picture(picture, margin + (across - picture.shape[1] / pen.dpi) / 2, y)
    y = _draw_bar(page, grid, pen, limits, ends, margin, across, y + picture.shape[0] / pen.dpi + 0.1)
    for text in [*_marks(pen, limits), *notes]:
        for line in wrap(text, across, SMALL, lines=3):
            y += SMALL * LEADING
            page.line(line, margin, y, SMALL, ha="left", color=GREY)
    return page.finish(y + margin)


def _marks(pen: Pen, limits: Limits) -> Iterator[str]:
    """What stands at the marks of the bar, where they are no plain limits, and what the lines are."""
    if pen.soft:
        low, high = overlay.ROBUST_PERCENTILES
        yield (
            f"Marked: the {high:g}th percentile of the patches' absolute values on both sides of 0, which is clear."
            if overlay.has_two_sides(*limits)
            else f"Marked: the {low:g}nd and the {high:g}th percentile of the patches."
        )
    if pen.contours:
        yield pen.contours


def _draw_bar(
    page: Page,
    grid: NDArray[np.float32],
    pen: Pen,
    limits: Limits,
    ends: tuple[str, str],
    left: float,
    width: float,
    y: float,
) -> float:
    """The colours of the map's values from the lowest to the highest drawn, with values at its marks; where it ends.

    Marked are the limits, 0 between two sides, and the last value: with "≥" where the map goes on beyond it.
    """
    low, high = limits
    two_sides = overlay.has_two_sides(low, high)
    most = float(np.abs(grid).max() if two_sides else grid.max())
    end = max(high, min(most, low + REACH * (high - low) if not two_sides else REACH * high)) if pen.soft else high
    start = -end if two_sides else low
    strip = pen.ramp(start, end, limits, (round(0.1 * pen.dpi), round(width * pen.dpi)))
    page.picture(strip, left, y)
    y += strip.shape[0] / pen.dpi
    marked = sorted({start, low, 0.0, high, end} if two_sides else {low, high, end})
    told, unit = readable(*marked, largest=max(abs(low), abs(high)))
    texts = list(told)
    if high > low and most > end * (1 + 1e-6):  # beyond the last colours the map goes on
        texts[-1] = f"≥ {texts[-1]}"
        texts[0] = f"≤ {texts[0]}" if two_sides else texts[0]
    texts[-1] += f" {unit}" if unit else ""
    places = [left + width * ((value - start) / (end - start) if end > start else 0.0) for value in marked]
    for x in places:
        page.tick(x, y, 0.03)
    y += 0.03 + BODY * LEADING
    for x, text in _apart(texts, places, left, left + width):
        page.line(text, x, y, BODY, ha="left")
    if two_sides:
        y += BODY * LEADING
        half = width / 2 - 0.05
        for side, x, ha in ((0, left, "left"), (1, left + width, "right")):
            page.line(wrap(ends[side], half, BODY, lines=1)[0], x, y, BODY, ha=ha)
    return y + 0.04


def _apart(texts: Sequence[str], places: Sequence[float], left: float, right: float) -> Iterator[tuple[float, str]]:
    """Where each text begins that stands below a mark: centred, within the bar; inner ones give way or are left out.

    The texts at the ends and at 0 stay; what has no room beside them is left out.
    """
    count, gap = len(texts), 0.05
    widths = [measure(text, BODY) for text in texts]
    starts = [min(max(place - width / 2, left), right - width) for place, width in zip(places, widths, strict=True)]
    fixed = {0, count - 1, count // 2} if count == 5 else {0, count - 1}
    for index, text in enumerate(texts):
        if index not in fixed:
            least = max(starts[k] + widths[k] for k in fixed if k < index) + gap
            most = min(starts[k] for k in fixed if k > index) - gap - widths[index]
            if most < least:
                continue
            starts[index] = min(max(starts[index], least), most)
        yield starts[index], text
