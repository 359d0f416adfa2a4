"""The figure of one map: title, overlay, colour bar with values, and notes."""

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.offsetbox import DrawingArea, HPacker, OffsetImage, VPacker
from matplotlib.text import Text
from numpy.typing import NDArray

from vitflow.images import overlay
from vitflow.images.geometry import Placement
from vitflow.images.pen import REACH, Box, Limits, Pen
from vitflow.images.typesetting import (
    BODY,
    GREY,
    INK,
    SMALL,
    TITLE,
    image_box,
    measure,
    page,
    plain,
    readable,
    space,
    words,
    wrap,
)

_GAP = 0.06  # inches between two images


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
    box: Box | NDArray[np.bool_] | None = None,
    alongside: NDArray[np.uint8] | None = None,
) -> Figure:
    """Draw one map over its image, with its title and a bar of its colours with values.

    Args:
        pen: how to draw.
        grid, placement, image: the map [rows, cols], its placement, and the image, uint8 RGB [height, width, 3].
        title: the name of the map.
        lines: target and score.
        details: smaller text below these lines.
        notes: lines below the bar.
        ends: labels of the two ends of a bar with both sides of 0.
        box: a box or region of the image to mark.
        alongside: the reference image, shown on the left.
    """
    limits = pen.limits(grid)
    drawn = pen.overlay(grid, placement, image, limits, box)
    shown = [drawn] if alongside is None else [pen.photograph(alongside), drawn]
    panels = HPacker(children=[image_box(image, pen.dpi) for image in shown], align="top", sep=72 * _GAP)
    width = max(sum(image.shape[1] for image in shown) / pen.dpi + _GAP * (len(shown) - 1), 2.4)
    middle = VPacker(children=[space(width), panels], align="center")
    heads = [(title, TITLE * 1.2, "bold"), *((line, TITLE, "normal") for line in lines), (details, BODY, "normal")]
    head = [words(text, size=size, width=width, lines=3, weight=weight) for text, size, weight in heads]
    foot = words(*_marks(pen, limits), *notes, size=SMALL, width=width, lines=3, color=GREY)
    bar = _bar(grid, pen, limits, ends, width)
    return page([VPacker(children=[*chain(*head)], sep=1), middle, bar, *foot], pen.dpi)


def _marks(pen: Pen, limits: Limits) -> Iterator[str]:
    """Return labels of the colour bar's marks, and notes on contours and limits."""
    if pen.soft:
        low, high = overlay.ROBUST_PERCENTILES
        yield (
            f"Marked: the {high:g}th percentile of the patches' absolute values on both sides of 0, which is "
            "transparent."
            if overlay.has_two_sides(*limits)
            else f"Marked: the {low:g}nd and the {high:g}th percentile of the patches."
        )
    if pen.note:
        yield pen.note


def _bar(grid: NDArray[np.float32], pen: Pen, limits: Limits, ends: tuple[str, str], width: float) -> VPacker:
    """Return the colour bar with values at its marks.

    Ticks: the limits, 0 if the bar diverges, and the last value, with "≥" if the map has larger values.
    """
    low, high = limits
    two_sides = overlay.has_two_sides(low, high)
    most = float(np.abs(grid).max() if two_sides else grid.max())
    end = max(high, min(most, low + REACH * (high - low) if not two_sides else REACH * high)) if pen.soft else high
    start = -end if two_sides else low
    strip = pen.ramp(start, end, limits, (round(0.1 * pen.dpi), round(width * pen.dpi)))
    marked = sorted({start, low, 0.0, high, end} if two_sides else {low, high, end})
    labels, unit = readable(*marked, largest=max(abs(low), abs(high)))
    texts = list(labels)
    if high > low and most > end * (1 + 1e-6):  # beyond the last colours the map goes on
        texts[-1] = f"≥ {texts[-1]}"
        texts[0] = f"≤ {texts[0]}" if two_sides else texts[0]
    texts[-1] += f" {unit}" if unit else ""
    places = [width * ((value - start) / (end - start) if end > start else 0.0) for value in marked]
    below = 1.3 * BODY if two_sides else 0  # the labels of the sides
    scale = DrawingArea(72 * width, 1.3 * BODY + 2 + below)
    for x in places:
        scale.add_artist(Line2D([72 * x] * 2, [scale.height - 2, scale.height], color=INK, linewidth=0.6))
    for x, text in _apart(texts, places, 0, width):
        scale.add_artist(Text(72 * x, 2 + below, text, **plain(BODY)))
    if two_sides:
        low_end, high_end = (wrap(end, width / 2 - 0.05, BODY, lines=1)[0] for end in ends)
        scale.add_artist(Text(0, 2, low_end, **plain(BODY)))
        scale.add_artist(Text(72 * width, 2, high_end, horizontalalignment="right", **plain(BODY)))
    return VPacker(children=[image_box(strip, pen.dpi), scale])


def _apart(texts: Sequence[str], places: Sequence[float], left: float, right: float) -> Iterator[tuple[float, str]]:
    """Return the start of each label below the bar: centred, without overlap; inner labels may be dropped.

    Labels at the ends and at 0 are kept; others are left out if they overlap.
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


def image_bounds(figure: Figure) -> Box:
    """Return (left, top, right, bottom) of the first image of a figure, in pixels of the figure."""
    figure.draw_without_rendering()
    box, height = figure.findobj(OffsetImage)[0].get_window_extent(), figure.bbox.height
    return box.x0, height - box.y1, box.x1, height - box.y0
