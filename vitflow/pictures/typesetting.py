"""Setting type and pictures on a page: fonts, line breaks, and places in inches, drawn by matplotlib."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from numpy.typing import NDArray

from vitflow.errors import printable

# Sizes of type in points.
TITLE, BODY, SMALL = 8.0, 6.6, 6.0
LEADING = 1.32 / 72  # from one baseline to the next, per point of type
INK, GREY, RULE = "#1a1a1a", "#666666", "#9a9a9a"

# Fonts with scripts that matplotlib's own font lacks.
_WIDE_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "IPAexGothic"),
    *("PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Arial Unicode MS"),
    *("Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Thai"),
)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class QuietFigure(Figure):
    """A figure that draws characters which no font has as boxes, without a warning for each."""

    def draw(self, renderer: Any) -> None:
        """Draw it, as matplotlib does for a screen or a file."""
        with without_glyph_warnings():
            super().draw(renderer)


@contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """Keep matplotlib from warning of characters that no font has: a box says as much."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Gg]lyph.*", category=UserWarning)
        warnings.filterwarnings("ignore", message=r".*does not support.*natively", category=UserWarning)
        yield


class Page:
    """A sheet on which pictures, lines of type and rules are placed, in inches from the top left."""

    def __init__(self, dpi: int, width: float) -> None:
        self.dpi, self.width = dpi, width
        self.figure = QuietFigure(dpi=dpi, facecolor="white")
        self.figure.suppressComposite = True  # each picture stays one in PDF and SVG
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set_axis_off()

    def snap(self, length: float) -> float:
        """The nearest whole number of pixels, in inches: a picture then keeps its own pixels."""
        return round(length * self.dpi) / self.dpi

    def picture(self, image: NDArray[np.uint8], left: float, top: float) -> None:
        """Place a picture, uint8 RGB [height, width, 3], by its upper left corner."""
        left, top = self.snap(left), self.snap(top)
        right, bottom = left + image.shape[1] / self.dpi, top + image.shape[0] / self.dpi
        extent = (left, right, bottom, top)
        # Its pixels are those of the page; "auto" smooths some pictures in older releases of matplotlib.
        self.axes.imshow(image, extent=extent, aspect="auto", origin="upper", interpolation="nearest", zorder=1)

    def line(self, text: str, x: float, baseline: float, size: float, **style: Any) -> None:
        """Set a line of type, by default centred on x; style as for matplotlib's text."""
        self.axes.text(x, baseline, text, va="baseline", **{"ha": "center", **plain(size), **style})

    def rule(self, left: float, right: float, y: float) -> None:
        """Draw a thin line across."""
        self.axes.plot([left, right], [y, y], color=RULE, linewidth=0.5, solid_capstyle="butt")

    def tick(self, x: float, top: float, length: float) -> None:
        """Draw a short thin line down."""
        self.axes.plot([x, x], [top, top + length], color=INK, linewidth=0.6, solid_capstyle="butt")

    def finish(self, height: float) -> Figure:
        """The figure, cut to this height."""
        width, height = self.snap(self.width), self.snap(height)
        self.figure.set_size_inches(width, height)
        self.axes.set_xlim(0, width)
        self.axes.set_ylim(height, 0)
        return self.figure


def plain(size: float) -> dict[str, Any]:
    """Style of a text that is data: without formulas, and whatever the settings of the caller are."""
    family = {"parse_math": False, "usetex": False, "family": font_families(), "style": "normal"}
    return {"fontsize": size, "color": INK, **family}


@lru_cache(maxsize=4096)
def measure(text: str, size: float, weight: str = "normal") -> float:
    """Return the width of a line of text in inches."""
    font = FontProperties(family=font_families(), style="normal", size=size, weight=weight)
    with without_glyph_warnings():
        return float(_ruler().get_text_width_height_descent(text, font, False)[0]) / 720


@cache
def _ruler() -> Any:
    """What measures text: at ten times the size the rounding to pixels does not matter."""
    return RendererAgg(1, 1, 720)  # type: ignore[no-untyped-call]


def wrap(text: str, width: float, size: float, lines: int = 2, weight: str = "normal") -> list[str]:
    """Break a text into at most this many lines of a width in inches; an ellipsis ends what does not fit.

    Widths are measured: lines of equally many characters, as textwrap makes them, would leave their column for one
    class name of ImageNet in forty.
    """
    words = printable(text, lines=True).split()
    broken: list[str] = []
    while words and len(broken) < lines:
        count = next((n for n in range(len(words), 0, -1) if measure(" ".join(words[:n]), size, weight) <= width), 0)
        if count == len(words) or (count and len(broken) < lines - 1):
            broken.append(" ".join(words[:count]))
            words = words[count:]
        else:
            broken.append(_cut(" ".join(words), width, size, weight))
            words = []
    return broken


def _cut(text: str, width: float, size: float, weight: str) -> str:
    if measure(text, size, weight) <= width:
        return text
    kept = text
    while kept and measure(f"{kept}…", size, weight) > width:
        kept = kept[:-1].rstrip()
    return f"{kept}…"


@cache
def font_families() -> list[str]:
    """The font that matplotlib brings, then those of this machine that have the scripts which it lacks."""
    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _WIDE_FONTS if name in installed)]


def decimal(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """A number as it stands in tables: a true minus sign, no −0, and a dash where there is none.

    >>> decimal(-0.0004), decimal(-0.25, 2), decimal(0.5, 1, signed=True), decimal(None)
    ('0.000', '−0.25', '+0.5', '–')
    """
    if value is None:
        return "–"
    return f"{round(value, digits) + 0.0:{'+' if signed else ''}.{digits}f}".replace("-", "−")


def readable(*values: float, largest: float | None = None, power: int | None = None) -> tuple[tuple[str, ...], str]:
    """Numbers in as many decimals as give the largest two digits, and the power of 10 that they are to be taken by.

    The power is empty unless the numbers are too small or too large to be written out, or the caller gives it; he may
    also name the number that gets two digits.

    >>> readable(0.00021, 0.0134), readable(-0.5, 0.0, 2.0), readable(1.2e-6, 3.4e-5)
    ((('0', '0.013'), ''), (('−0.5', '0', '2'), ''), (('1', '34'), '× 10⁻⁶'))
    >>> readable(0.0012, 0.0048, power=-3)
    (('1.2', '4.8'), '× 10⁻³')
    """
    largest = max(map(abs, values)) if largest is None else largest
    magnitude = math.floor(math.log10(largest)) if 0 < largest < math.inf else 0
    if power is None:
        power = 0 if -3 <= magnitude < 5 else 3 * (magnitude // 3)
    decimals = max(1 - magnitude + power, 0)
    told = tuple(f"{value / 10.0**power:.{decimals}f}" for value in values)
    if decimals:
        told = tuple(text.rstrip("0").rstrip(".") for text in told)
    told = tuple("0" if text == "-0" else text.replace("-", "−") for text in told)
    return told, f"× 10{str(power).translate(_SUPERSCRIPTS)}" if power else ""
