"""One map drawn for a page: in any size, with the patch that was asked about, and as a figure that stands alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.demo import limits_of
from vitflow.explaining.captions import class_lines, method_title, own_options, readable
from vitflow.pictures import figures, overlay
from vitflow.pictures.figures import Bar
from vitflow.pictures.images import image_name
from vitflow.pictures.options import Interpolation
from vitflow.pictures.typesetting import BODY, GREY, LEADING, SMALL, TITLE, Page

if TYPE_CHECKING:
    from vitflow.explaining.saliency import Saliency

#: Beyond a soft limit colours go on; bars show them up to so many times the limit.
_REACH = 1.5
#: The photograph's grey that the colours of a bar lie on.
_MID_GREY = 128


@dataclass(frozen=True)
class Pen:
    """How maps are drawn.

    Attributes:
        width: of a picture, in inches.
        dpi: pixels per inch.
        interpolation: how patches become pixels.
        soft: whether the limits are soft, as for `overlay.blend`.
        blending: the other options of `overlay.blend`.
    """

    width: float
    dpi: int
    interpolation: Interpolation
    soft: bool
    blending: Mapping[str, Any]

    def photograph(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The picture in the size that it has on the page."""
        height, width = figures.panel_size((image.shape[0], image.shape[1]), width=self.width, dpi=self.dpi)
        smaller = height <= image.shape[0]
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC)
        return np.asarray(resized, dtype=np.uint8)

    def overlay(self, saliency: "Saliency", limits: tuple[float, float]) -> NDArray[np.uint8]:
        """The map over the picture, both in the size that they have on the page, the patch it reads marked."""
        picture = self.photograph(saliency.image)
        # The placement's coordinates are continuous, so that it fits the picture in any size.
        placement = replace(saliency.placement, image_size=picture.shape[:2])
        heatmap = overlay.upsample(saliency.grid, placement, interpolation=self.interpolation)
        drawn = overlay.blend(picture, heatmap, vmin=limits[0], vmax=limits[1], soft=self.soft, **self.blending)
        if (box := saliency.patch_box) is not None:
            down, across = picture.shape[0] / saliency.image.shape[0], picture.shape[1] / saliency.image.shape[1]
            _mark(drawn, (box[0] * across, box[1] * down, box[2] * across, box[3] * down))
        return drawn

    def ramp(self, low: float, high: float, limits: tuple[float, float], size: tuple[int, int]) -> NDArray[np.uint8]:
        """The colours of the values from low to high, as they look over a photograph's mid-grey: [height, width, 3]."""
        values = np.tile(np.linspace(low, high, size[1]), (size[0], 1))
        grey = np.full((*size, 3), _MID_GREY, np.uint8)
        blending = {**self.blending, "contours": False}
        return overlay.blend(grey, values, vmin=limits[0], vmax=limits[1], soft=self.soft, **blending)

    def bar(self, two_sides: bool) -> Bar:
        """The colours from low to high, or from below 0 to above it."""
        reach = _REACH if self.soft else 1.0
        low, labels = (-1, ("below 0", "above 0")) if two_sides else (0, ("low", "high"))
        size = round(0.07 * self.dpi), round(1.1 * self.dpi)
        return Bar(self.ramp(low * reach, reach, (low, 1), size), labels)


def _mark(picture: NDArray[np.uint8], box: tuple[float, float, float, float]) -> None:
    """Draw a white frame with a black one around it, in place, around a box (left, top, right, bottom)."""
    left, top, right, bottom = (round(edge) for edge in box)
    inside = np.zeros(picture.shape[:2], dtype=np.uint8)
    inside[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = 1
    thickness = max(1, round(min(inside.shape) / 200))
    kernel = np.ones((2 * thickness + 1, 2 * thickness + 1), dtype=np.uint8)
    white = cv2.dilate(inside, kernel)
    picture[cv2.dilate(white, kernel) > white] = 0
    picture[white > inside] = 255


def draw_figure(saliency: "Saliency", pen: Pen, *, vmin: float | None, vmax: float | None, robust: bool) -> Figure:
    """Draw a map with its method, what was asked, a colour bar with its values, and the model: `Saliency.figure`."""
    limits = overlay.scale_range(saliency.grid, vmin=vmin, vmax=vmax, robust=robust)
    picture = pen.overlay(saliency, limits)
    margin = 0.12
    across = max(picture.shape[1] / pen.dpi, 2.4)
    page = Page(pen.dpi, across + 2 * margin)
    y = _draw_head(page, saliency, margin, across)
    page.picture(picture, margin + (across - picture.shape[1] / pen.dpi) / 2, y)
    y = _draw_bar(page, saliency, pen, limits, margin, across, y + picture.shape[0] / pen.dpi + 0.1)
    for text in _note(saliency, robust and vmin is None and vmax is None):
        for line in page.wrap(text, across, SMALL, lines=3):
            y += SMALL * LEADING
            page.line(line, margin, y, SMALL, ha="left", color=GREY)
    return page.finish(y + margin)


def _draw_head(page: Page, saliency: "Saliency", left: float, width: float) -> float:
    """Method, its own options, what was asked and its number; where the picture begins."""
    y = 0.1
    lines = [(method_title(saliency.method), TITLE * 1.2, "bold")]
    lines += [(text, TITLE, "normal") for text in class_lines(saliency)]
    lines += [(own_options(saliency), BODY, "normal")]
    for text, size, weight in lines:
        for line in page.wrap(text, width, size, weight=weight):
            y += size * LEADING
            page.line(line, left, y - 0.03, size, ha="left", weight=weight)
    return y + 0.05


def _draw_bar(
    page: Page, saliency: "Saliency", pen: Pen, limits: tuple[float, float], left: float, width: float, y: float
) -> float:
    """The colours of the map's values from the lowest to the highest drawn, marked at the limits; where it ends."""
    low, high = limits
    two_sides = overlay.has_two_sides(low, high)
    most = float(np.abs(saliency.grid).max() if two_sides else saliency.grid.max())
    end = max(high, min(most, low + _REACH * (high - low) if not two_sides else _REACH * high)) if pen.soft else high
    start = -end if two_sides else low
    strip = pen.ramp(start, end, limits, (round(0.1 * pen.dpi), round(width * pen.dpi)))
    page.picture(strip, left, y)
    y += strip.shape[0] / pen.dpi
    marked = [low, 0.0, high] if two_sides else [low, high]
    told, unit = readable(*marked)
    for value, text in zip(marked, told, strict=True):
        x = left + width * ((value - start) / (end - start) if end > start else 0.0)
        page.tick(x, y, 0.03)
        edge = "left" if x < left + 0.02 else "right" if x > left + width - 0.02 else "center"
        unit_here = f" {unit}" if unit and value == marked[-1] else ""
        page.line(text + unit_here, x, y + 0.03 + BODY * LEADING, BODY, ha=edge)
        if high <= low:
            break  # a constant map has one value
    return y + 0.03 + BODY * LEADING + 0.04


def _note(saliency: "Saliency", percentiles: bool) -> list[str]:
    """What else a reader must know, line by line."""
    note = []
    if percentiles:
        low, high = overlay.ROBUST_PERCENTILES
        note.append(
            f"Marked: the {high:g}th percentile of the patches' absolute values on both sides of 0, which is clear."
            if overlay.has_two_sides(*overlay.scale_range(saliency.grid))
            else f"Marked: the {low:g}nd and the {high:g}th percentile of the patches."
        )
    if saliency.target is not None and not saliency.class_specific:
        note.append("The map is the same for every class.")
    if saliency.patch_box is not None:
        note.append("The frame is the patch whose attention is shown.")
    if not saliency.placement.sees_everything:
        note.append("The line bounds what the model saw.")
    known = f", which {told}" if (told := limits_of(saliency.model)) else ""
    note.append(f"{image_name(saliency.source)} · {saliency.model}{known}")
    return note
