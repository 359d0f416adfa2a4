"""Drawing of maps at a given size, with limits, boxes and colour bars."""

import inspect
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, check_known
from vitflow.images import BACKGROUNDS, DPI, UNSEEN, Interpolation, Unseen, overlay
from vitflow.images.geometry import Placement
from vitflow.images.preprocessing import upsample

#: A box (left, top, right, bottom) in pixels of an image, a mask of a region, bool [height, width], or several of both.
Mark = tuple[float, float, float, float] | NDArray[np.bool_] | list["Mark"]
#: The values of the first and the last colour.
Limits = tuple[float, float]

# Height and width of a colour bar in inches, and the grey under its colours.
_BAR, _MID_GREY = (0.07, 1.1), 128


@dataclass(frozen=True, slots=True)
class Bar:
    """A colour bar: uint8 RGB [height, width, 3], and the labels of its ends."""

    image: NDArray[np.uint8]
    labels: tuple[str, str] = ("low", "high")


class Pen:
    """Drawing settings of maps.

    Args:
        width: width of an image, in inches; None for its own pixels.
        dpi: pixels per inch.
        vmin, vmax, robust: limits of the colours, as in `overlay.scale_range`.
        interpolation: upsampling of patches: "smooth", "linear", or "nearest" to see the patches.
        unseen: "line" along the border of the part that the model saw, or "off"; by default off on grey.
        crop_to_seen: draw only that part.
        blending: other options of `overlay.blend`: cmap, alpha, fade and background, which may also be
            "none": transparent, which gives RGBA.
    """

    def __init__(
        self,
        width: float | None,
        *,
        dpi: int = DPI,
        vmin: float | None = None,
        vmax: float | None = None,
        robust: bool = True,
        interpolation: Interpolation = "smooth",
        unseen: Unseen | None = None,
        crop_to_seen: bool = False,
        **blending: Any,
    ) -> None:
        if width is None and dpi != DPI:
            raise OptionError("dpi cannot be used for an overlay, which has the pixels of its image: draw a figure.")
        for name in blending:
            check_known("drawing option", name, _options())
        background = blending.get("background", "grey")
        check_known("background", background, BACKGROUNDS)
        unseen = unseen or ("off" if background == "grey" else "line")
        check_known("unseen", unseen, UNSEEN)
        self.width, self.dpi, self.interpolation = width, dpi, interpolation
        self.vmin, self.vmax, self.robust = vmin, vmax, robust
        self.crop_to_seen, self.transparent = crop_to_seen, background == "none"
        self.marks_unseen = unseen == "line" and not (crop_to_seen or self.transparent)
        ground = "photo" if self.transparent else background
        self.blending = {**blending, "background": ground, "mark_unseen": self.marks_unseen}

    @property
    def soft(self) -> bool:
        """True if colours continue beyond the limits."""
        return overlay.is_soft(self.vmin, self.vmax, self.robust)

    def limits(self, values: NDArray[np.floating[Any]], *, signed: bool = True) -> Limits:
        """Return the values of the first and the last colour, for one map or for several with a common scale."""
        return overlay.scale_range(values, vmin=self.vmin, vmax=self.vmax, robust=self.robust, signed=signed)

    def photograph(
        self, image: NDArray[np.uint8], placement: Placement | None = None, marked: Mark | None = None
    ) -> NDArray[np.uint8]:
        """Resize an image to its size in the figure, mark a box or region, and crop it to what the model saw."""
        drawn = self._resized(image, placement).copy()
        _mark(drawn, image, marked)
        return self._cropped(drawn, placement)

    def overlay(
        self,
        grid: NDArray[np.float32],
        placement: Placement,
        image: NDArray[np.uint8],
        limits: Limits,
        marked: Mark | None = None,
    ) -> NDArray[np.uint8]:
        """Draw a map over its image at the size in the figure: uint8 RGB, or RGBA without a background."""
        photograph = self._resized(image, placement)
        # The placement's coordinates are continuous, so that it fits the image in any size.
        resized = replace(placement, image_size=photograph.shape[:2])
        heatmap = upsample(grid, resized, interpolation=self.interpolation)

        def drawn_over(ground: NDArray[np.uint8]) -> NDArray[np.uint8]:
            drawn = overlay.blend(ground, heatmap, vmin=limits[0], vmax=limits[1], soft=self.soft, **self.blending)
            _mark(drawn, image, marked)
            return self._cropped(drawn, placement)

        if not self.transparent:
            return drawn_over(photograph)
        # A colour c of opacity a is a·c over black, and a·c + 255 (1 − a) over white.
        black, white = (drawn_over(np.full_like(photograph, level)).astype(np.float32) for level in (0, 255))
        opacity = 255 - (white - black).max(axis=2, keepdims=True)
        colours = np.rint(255 * black / np.maximum(opacity, 1)).clip(0, 255)
        return np.concatenate([colours, opacity], axis=2).astype(np.uint8)

    def _resized(self, image: NDArray[np.uint8], placement: Placement | None) -> NDArray[np.uint8]:
        """Return an image such that it, or its part to show, has the width of the figure; itself without a width."""
        if self.width is None:
            return image
        high, wide = image.shape[:2]
        left, top, right, bottom = self.shown(placement, (high, wide))
        height, width = panel_size((bottom - top, right - left), width=self.width, dpi=self.dpi)
        size = (max(round(width * wide / (right - left)), 1), max(round(height * high / (bottom - top)), 1))
        interpolation = cv2.INTER_AREA if size[1] <= high else cv2.INTER_CUBIC
        return np.asarray(cv2.resize(image, size, interpolation=interpolation), dtype=np.uint8)

    def shown(self, placement: Placement | None, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Return (left, top, right, bottom) to show of an image of a size: what the model saw, if it saw a pixel."""
        if self.crop_to_seen and placement is not None:
            left, top, right, bottom = replace(placement, image_size=size).seen_box
            if right > left and bottom > top:
                return left, top, right, bottom
        return 0, 0, size[1], size[0]

    def _cropped(self, drawn: NDArray[np.uint8], placement: Placement | None) -> NDArray[np.uint8]:
        left, top, right, bottom = self.shown(placement, (drawn.shape[0], drawn.shape[1]))
        return np.ascontiguousarray(drawn[top:bottom, left:right])

    def ramp(self, limits: Limits) -> NDArray[np.uint8]:
        """Return the colours between the limits over mid-grey, and at the ends those beyond, [height, width, 3]."""
        height, width = (round(side * self.dpi) for side in _BAR)
        values = np.linspace(*limits, width)
        if self.soft:
            end, beyond = width // 16, (limits[1] - limits[0]) / 2
            marks = [0, end, width - 1 - end, width - 1]
            values = np.interp(np.arange(width), marks, [limits[0] - beyond, *limits, limits[1] + beyond])
        values = np.tile(values, (height, 1))
        grey = np.full((height, width, 3), _MID_GREY, np.uint8)
        return overlay.blend(grey, values, vmin=limits[0], vmax=limits[1], soft=self.soft, **self.blending)

    def bar(self, ends: tuple[str, str] | None = None) -> Bar:
        """Return the colour bar: sequential, or diverging with labels for its ends."""
        return Bar(self.ramp((-1 if ends else 0, 1)), ends or ("low", "high"))


def panel_size(image_size: tuple[int, int], *, width: float = 1.5, dpi: int = DPI) -> tuple[int, int]:
    """Return the size (height, width) in pixels of an image in a column, at most 1.2 times as high as wide.

    >>> panel_size((480, 640)), panel_size((640, 480)), panel_size((800, 400))
    ((225, 300), (360, 270), (360, 180))
    """
    high, wide = image_size
    scale = min(width * dpi / wide, 1.2 * width * dpi / high)
    return max(round(high * scale), 1), max(round(wide * scale), 1)


def check_marks(image: NDArray[np.uint8], boxes: Any, mask: Any) -> list[Mark]:
    """Return one or several boxes and a mask of an image as marks; OptionError if they are none."""
    edges = np.asarray(boxes, dtype=float)
    if edges.size % 4 or (edges.size and edges.shape[-1] != 4):
        raise OptionError(f"Expected boxes as [(left, top, right, bottom), …], got {boxes!r}.")
    if mask is not None and np.shape(mask) != image.shape[:2]:
        raise OptionError(f"Expected a mask {list(image.shape[:2])} as the image, got {list(np.shape(mask))}.")
    marks: list[Mark] = [(left, top, right, bottom) for left, top, right, bottom in edges.reshape(-1, 4).tolist()]
    return marks if mask is None else [*marks, np.asarray(mask) != 0]


def _mark(drawn: NDArray[np.uint8], image: NDArray[np.uint8], marked: Mark | None) -> None:
    """Draw a white line with a black one around it, in place, around a box or region of an image, if there is one."""
    height, width = drawn.shape[:2]
    if marked is None or isinstance(marked, list):
        for each in marked or ():
            _mark(drawn, image, each)
        return
    if isinstance(marked, np.ndarray):
        inside = cv2.resize(marked.astype(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
    else:
        inside = np.zeros((height, width), dtype=np.uint8)
        scales = (width / image.shape[1], height / image.shape[0]) * 2
        left, top, right, bottom = (max(round(edge * by), 0) for edge, by in zip(marked, scales, strict=True))
        inside[top:bottom, left:right] = 1
    overlay.outline(drawn, inside.astype(np.bool_), max(1, round(min(height, width) / 200)))


@cache
def _options() -> set[str]:
    """Return the names of the drawing options: of `Pen`, and of `overlay.blend` that it passes on."""
    names = {name for of in (overlay.blend, Pen) for name in inspect.signature(of).parameters}
    return names - {"width", "blending", "image", "heatmap", "soft", "mark_unseen"}
