"""Drawing of maps at a given size, with limits, boxes and colour bars."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.images import DPI, Interpolation, overlay
from vitflow.images.geometry import Placement
from vitflow.images.upsampling import upsample

#: Left, top, right and bottom, in pixels of an image.
Box = tuple[float, float, float, float]
#: The values of the first and the last colour.
Limits = tuple[float, float]

#: Colour bars with a soft limit extend to this multiple of the limit.
REACH = 1.5
# Height and width of a colour bar in inches, and the grey under its colours.
_BAR, _MID_GREY = (0.07, 1.1), 128


@dataclass(frozen=True, slots=True)
class Bar:
    """A colour bar: uint8 RGB [height, width, 3], the labels of its ends, and whether 0 is in its middle."""

    image: NDArray[np.uint8]
    labels: tuple[str, str] = ("low", "high")
    two_sides: bool = False


@dataclass(frozen=True)
class Pen:
    """Drawing settings of maps.

    Attributes:
        width: width of an image, in inches.
        dpi: pixels per inch.
        vmin, vmax, robust: limits of the colours, as in `overlay.scale_range`.
        interpolation: upsampling of patches: "smooth", "linear", or "nearest" to see the patches.
        blending: other options of `overlay.blend`: cmap, alpha, fade, background, contours and mark_unseen.
    """

    width: float
    dpi: int = DPI
    vmin: float | None = None
    vmax: float | None = None
    robust: bool = True
    interpolation: Interpolation = "smooth"
    blending: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, width: float, drawing: Mapping[str, Any]) -> "Pen":
        """Split a user's drawing options into those of the pen and those of blending."""
        names = {one.name for one in fields(cls)} - {"blending"}
        given = {"width": width} | {name: value for name, value in drawing.items() if name in names}
        return cls(**given, blending={name: value for name, value in drawing.items() if name not in names})

    @property
    def soft(self) -> bool:
        """True if colours continue beyond the limits."""
        return overlay.is_soft(self.vmin, self.vmax, self.robust)

    @property
    def note(self) -> str:
        """The sentence that explains contours; empty if none are drawn."""
        drawn = self.blending.get("contours", False)
        percents = [f"{100 * share:g}" for share in (overlay.CONTOURS if drawn is True else drawn or ())]
        if not percents:
            return ""
        listed = " and ".join(filter(None, (", ".join(percents[:-1]), percents[-1])))
        return f"Lines: around the highest values that make up {listed} % of the map's sum."

    def limits(self, values: NDArray[np.floating[Any]]) -> Limits:
        """Return the values of the first and the last colour, for one map or for several with a common scale."""
        return overlay.scale_range(values, vmin=self.vmin, vmax=self.vmax, robust=self.robust)

    def photograph(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Resize the image to its size in the figure."""
        height, width = panel_size((image.shape[0], image.shape[1]), width=self.width, dpi=self.dpi)
        smaller = height <= image.shape[0]
        resized = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_CUBIC)
        return np.asarray(resized, dtype=np.uint8)

    def overlay(
        self,
        grid: NDArray[np.float32],
        placement: Placement,
        image: NDArray[np.uint8],
        limits: Limits,
        box: Box | NDArray[np.bool_] | None = None,
    ) -> NDArray[np.uint8]:
        """Draw a map over its image at the size in the figure, with an optional box or region."""
        photograph = self.photograph(image)
        # The placement's coordinates are continuous, so that it fits the image in any size.
        placement = replace(placement, image_size=photograph.shape[:2])
        heatmap = upsample(grid, placement, interpolation=self.interpolation)
        drawn = overlay.blend(photograph, heatmap, vmin=limits[0], vmax=limits[1], soft=self.soft, **self.blending)
        _mark_scaled(drawn, image, box)
        return drawn

    def marked_photograph(self, image: NDArray[np.uint8], box: Box | NDArray[np.bool_] | None) -> NDArray[np.uint8]:
        """Draw an image at the size in the figure, with a box or region."""
        drawn = self.photograph(image)
        _mark_scaled(drawn, image, box)
        return drawn

    def colours(
        self, colours: NDArray[np.float32], shown: NDArray[np.bool_], placement: Placement, image: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Draw colours of patches over their image; other patches show the background.

        Args:
            colours: red, green and blue from 0 to 1, [rows, cols, 3]; NaN at rows and columns outside the image.
            shown: mask of the patches that are drawn, [rows, cols].
            placement, image: placement of the patches, and the image, uint8 RGB [height, width, 3].
        """
        photograph = self.photograph(image)
        placement = replace(placement, image_size=photograph.shape[:2])
        known = ~np.isnan(colours[..., 0])
        rows, cols = (np.flatnonzero(known.any(axis=axis)) for axis in (1, 0))
        # Outside the image the colours of its edge are repeated, so that interpolation does not mix in others.
        nearest = np.ix_(
            *(
                np.arange(len(mask)).clip(self_known[0], self_known[-1])
                for mask, self_known in ((known, rows), (known[0], cols))
            )
        )
        spread = partial(upsample, placement=placement, interpolation=self.interpolation)
        layers = [spread(colours[..., c][nearest]) for c in range(3)]
        covered = spread(shown[nearest].astype(np.float32))
        plain = np.where(np.isnan(covered), covered, 0)
        drawn = overlay.blend(photograph, plain, **self.blending, mark_unseen=False)
        alpha = self.blending.get("alpha", 1.0)
        mixed = alpha * 255 * np.stack(layers, axis=-1) + (1 - alpha) * photograph
        coloured = covered > 0.5
        drawn[coloured] = np.rint(mixed[coloured]).clip(0, 255)
        return overlay.blend(drawn, plain, alpha=0)

    def ramp(self, low: float, high: float, limits: Limits) -> NDArray[np.uint8]:
        """Return the colours from low to high over mid-grey, [height, width, 3]."""
        height, width = (round(side * self.dpi) for side in _BAR)
        values = np.tile(np.linspace(low, high, width), (height, 1))
        grey = np.full((height, width, 3), _MID_GREY, np.uint8)
        blending = {**self.blending, "contours": False}
        return overlay.blend(grey, values, vmin=limits[0], vmax=limits[1], soft=self.soft, **blending)

    def bar(self, ends: tuple[str, str] | None = None) -> Bar:
        """Return the colour bar: sequential, or diverging with labels for its ends."""
        reach, low = REACH if self.soft else 1.0, -1 if ends else 0
        return Bar(self.ramp(low * reach, reach, (low, 1)), ends or ("low", "high"), bool(ends))


def panel_size(image_size: tuple[int, int], *, width: float = 1.5, dpi: int = DPI) -> tuple[int, int]:
    """Return the size (height, width) in pixels of an image in a figure; the aspect ratio is kept.

    An image up to 1.2 times as high as wide fills the column; higher ones are narrower.

    >>> panel_size((480, 640)), panel_size((640, 480)), panel_size((800, 400))
    ((225, 300), (360, 270), (360, 180))
    """
    high, wide = image_size
    scale = min(width * dpi / wide, 1.2 * width * dpi / high)
    return max(round(high * scale), 1), max(round(wide * scale), 1)


def _mark_scaled(drawn: NDArray[np.uint8], image: NDArray[np.uint8], box: Box | NDArray[np.bool_] | None) -> None:
    """Mark a box or region of an image, if any, in a drawing of another size."""
    if box is not None:
        down, across = drawn.shape[0] / image.shape[0], drawn.shape[1] / image.shape[1]
        if not isinstance(box, np.ndarray):
            box = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        mark(drawn, box)


def mark(image: NDArray[np.uint8], box: Box | NDArray[np.bool_] | None) -> None:
    """Draw a white line with a black one around it, in place, around a box (left, top, right, bottom) or a region.

    A region is resized to the image.
    """
    inside: NDArray[Any] = np.zeros(image.shape[:2], dtype=np.uint8)
    if isinstance(box, np.ndarray):
        inside = cv2.resize(box.astype(np.uint8), inside.shape[::-1], interpolation=cv2.INTER_NEAREST)
    elif box is not None:
        left, top, right, bottom = (round(edge) for edge in box)
        inside[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = 1
    overlay.outline(image, inside.astype(np.bool_), max(1, round(min(inside.shape) / 200)))


_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes_drawing_options(function: _Function) -> _Function:
    """Add the drawing options of `**drawing` to the signature of a function."""
    signature = inspect.signature(function)
    *named, _ = signature.parameters.values()
    parameters = [*inspect.signature(Pen).parameters.values(), *inspect.signature(overlay.blend).parameters.values()]
    left_out = {*signature.parameters, "blending", "image", "heatmap", "soft"}
    more = {one.name: one.replace(kind=one.KEYWORD_ONLY) for one in parameters if one.name not in left_out}
    function.__signature__ = signature.replace(parameters=[*named, *more.values()])  # type: ignore[attr-defined]
    return function
