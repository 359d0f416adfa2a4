"""How maps are drawn on a page: in any size, with the patch that was asked about, and as a figure that stands alone."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import cv2
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.pictures import figures, overlay
from vitflow.pictures.figures import Bar
from vitflow.pictures.geometry import Placement
from vitflow.pictures.options import Interpolation
from vitflow.pictures.typesetting import BODY, GREY, LEADING, SMALL, TITLE, Page, readable
from vitflow.pictures.upsampling import upsample

#: Left, top, right and bottom, in pixels of a picture.
Box = tuple[float, float, float, float]
#: The values of the first and the last colour.
Limits = tuple[float, float]

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
        vmin, vmax, robust: limits of the colours, as in `overlay.scale_range`.
        interpolation: how patches become pixels: "smooth", "linear", "cubic", or "nearest" to see the patches.
        blending: other options of `overlay.blend`: cmap, alpha, fade, background, contours and mark_unseen.
    """

    width: float
    dpi: int = figures.DPI
    vmin: float | None = None
    vmax: float | None = None
    robust: bool = True
    interpolation: Interpolation = "smooth"
    blending: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, width: float, drawing: Mapping[str, Any]) -> "Pen":
        """The pen for the drawing options that a user gave, those of a pen and those of blending."""
        own = {one.name for one in fields(cls)} - {"blending"}
        given = {"width": width} | {name: value for name, value in drawing.items() if name in own}
        return cls(**given, blending={name: value for name, value in drawing.items() if name not in own})

    @property
    def soft(self) -> bool:
        """Whether colours go on beyond the limits."""
        return overlay.is_soft(self.vmin, self.vmax, self.robust)

    def limits(self, values: NDArray[np.floating[Any]]) -> Limits:
        """The values of the first and the last colour, for a map or for several that have them in common."""
        return overlay.scale_range(values, vmin=self.vmin, vmax=self.vmax, robust=self.robust)

    def photograph(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The picture in the size that it has on the page."""
        height, width = figures.panel_size((image.shape[0], image.shape[1]), width=self.width, dpi=self.dpi)
        smaller = height <= image.shape[0]
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC)
        return np.asarray(resized, dtype=np.uint8)

    def overlay(
        self,
        grid: NDArray[np.float32],
        placement: Placement,
        image: NDArray[np.uint8],
        limits: Limits,
        box: Box | None = None,
    ) -> NDArray[np.uint8]:
        """A map over its picture, both in the size that they have on the page, a box of the picture marked."""
        picture = self.photograph(image)
        # The placement's coordinates are continuous, so that it fits the picture in any size.
        placement = replace(placement, image_size=picture.shape[:2])
        heatmap = upsample(grid, placement, interpolation=self.interpolation)
        drawn = overlay.blend(picture, heatmap, vmin=limits[0], vmax=limits[1], soft=self.soft, **self.blending)
        if box is not None:
            down, across = picture.shape[0] / image.shape[0], picture.shape[1] / image.shape[1]
            _mark(drawn, (box[0] * across, box[1] * down, box[2] * across, box[3] * down))
        return drawn

    def colours(
        self, colours: NDArray[np.float32], shown: NDArray[np.bool_], placement: Placement, image: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Colours of patches over their picture; what is not shown is the picture as its background has it.

        Args:
            colours: red, green and blue from 0 to 1, [rows, cols, 3]; NaN at rows and columns beside the picture.
            shown: which patches have a colour, [rows, cols].
            placement, image: where the patches lie, and the picture, uint8 RGB [height, width, 3].
        """
        picture = self.photograph(image)
        placement = replace(placement, image_size=picture.shape[:2])
        known = ~np.isnan(colours[..., 0])
        rows, cols = (np.flatnonzero(known.any(axis=axis)) for axis in (1, 0))
        # Beside the picture the colours of its edge go on, so that nothing else is mixed into them.
        nearest = np.ix_(
            *(
                np.arange(len(own)).clip(own_known[0], own_known[-1])
                for own, own_known in ((known, rows), (known[0], cols))
            )
        )
        layers = [upsample(colours[..., c][nearest], placement, interpolation=self.interpolation) for c in range(3)]
        covered = upsample(shown[nearest].astype(np.float32), placement, interpolation=self.interpolation)
        plain = np.where(np.isnan(covered), covered, 0)
        drawn = overlay.blend(picture, plain, **self.blending, mark_unseen=False)
        alpha = self.blending.get("alpha", 1.0)
        mixed = alpha * 255 * np.stack(layers, axis=-1) + (1 - alpha) * picture
        coloured = covered > 0.5
        drawn[coloured] = np.rint(mixed[coloured]).clip(0, 255)
        return overlay.blend(drawn, plain, alpha=0)

    def ramp(self, low: float, high: float, limits: Limits, size: tuple[int, int]) -> NDArray[np.uint8]:
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


def _mark(picture: NDArray[np.uint8], box: Box) -> None:
    """Draw a white frame with a black one around it, in place, around a box (left, top, right, bottom)."""
    left, top, right, bottom = (round(edge) for edge in box)
    inside = np.zeros(picture.shape[:2], dtype=np.uint8)
    inside[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = 1
    thickness = max(1, round(min(inside.shape) / 200))
    kernel = np.ones((2 * thickness + 1, 2 * thickness + 1), dtype=np.uint8)
    white = cv2.dilate(inside, kernel)
    picture[cv2.dilate(white, kernel) > white] = 0
    picture[white > inside] = 255


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_drawing_options(function: _Function) -> _Function:
    """Let the signature of a function name the options that its `**drawing` may hold."""
    signature = inspect.signature(function)
    *named, _ = signature.parameters.values()
    own = [*inspect.signature(Pen).parameters.values(), *inspect.signature(overlay.blend).parameters.values()]
    left_out = {*signature.parameters, "blending", "image", "heatmap", "soft"}
    more = {one.name: one.replace(kind=one.KEYWORD_ONLY) for one in own if one.name not in left_out}
    function.__signature__ = signature.replace(parameters=[*named, *more.values()])  # type: ignore[attr-defined]
    return function


def file_too(path: str | os.PathLike[str] | None, draw: Callable[[], Figure]) -> Figure:
    """Draw a figure and, where a path is given, write it there, too; its suffix is checked before."""
    if path is not None:
        figures.check_format(path)
    figure = draw()
    if path is not None:
        figures.save_figure(figure, path)
    return figure


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
    box: Box | None = None,
) -> Figure:
    """Draw a map as a figure that stands alone: what it is, itself over its picture, a bar of its colours with values.

    Args:
        pen: how to draw.
        grid, placement, image: the map [rows, cols], where it lies, and the picture, uint8 RGB [height, width, 3].
        title: what the map is.
        lines: what was asked.
        details: smaller, below these.
        notes: what else a reader must know, below the bar.
        box: of the picture, to be marked.
    """
    limits = pen.limits(grid)
    picture = pen.overlay(grid, placement, image, limits, box)
    margin = 0.12
    across = max(picture.shape[1] / pen.dpi, 2.4)
    page = Page(pen.dpi, across + 2 * margin)
    heads = [(title, TITLE * 1.2, "bold"), *((text, TITLE, "normal") for text in lines), (details, BODY, "normal")]
    y = 0.1
    for text, size, weight in heads:
        for line in page.wrap(text, across, size, lines=3, weight=weight):
            y += size * LEADING
            page.line(line, margin, y - 0.03, size, ha="left", weight=weight)
    y += 0.05
    page.picture(picture, margin + (across - picture.shape[1] / pen.dpi) / 2, y)
    y = _draw_bar(page, grid, pen, limits, margin, across, y + picture.shape[0] / pen.dpi + 0.1)
    for text in [*_marks(pen, limits), *notes]:
        for line in page.wrap(text, across, SMALL, lines=3):
            y += SMALL * LEADING
            page.line(line, margin, y, SMALL, ha="left", color=GREY)
    return page.finish(y + margin)


def _marks(pen: Pen, limits: Limits) -> Iterable[str]:
    """What stands at the marks of the bar, where they are no plain limits."""
    if pen.soft:
        low, high = overlay.ROBUST_PERCENTILES
        yield (
            f"Marked: the {high:g}th percentile of the patches' absolute values on both sides of 0, which is clear."
            if overlay.has_two_sides(*limits)
            else f"Marked: the {low:g}nd and the {high:g}th percentile of the patches."
        )


def _draw_bar(
    page: Page, grid: NDArray[np.float32], pen: Pen, limits: Limits, left: float, width: float, y: float
) -> float:
    """The colours of the map's values from the lowest to the highest drawn, marked at the limits; where it ends."""
    low, high = limits
    two_sides = overlay.has_two_sides(low, high)
    most = float(np.abs(grid).max() if two_sides else grid.max())
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
