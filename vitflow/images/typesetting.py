"""Boxes of text, laid out by matplotlib; text is never parsed as a formula."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.offsetbox import AnchoredOffsetbox, TextArea, VPacker

from vitflow.errors import printable

# Sizes of type in points.
TITLE, BODY, SMALL = 8.0, 6.6, 6.0
LEADING = 1.32 / 72  # from one baseline to the next, per point of type
INK, GREY, RULE = "#1a1a1a", "#666666", "#9a9a9a"
#: Inches around a figure.
MARGIN = 0.12
_GAP = 4.0  # points between the boxes of a page

# Fonts with scripts that matplotlib's own font lacks.
_WIDE_FONTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Zen Hei", "IPAexGothic"),
    *("PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Arial Unicode MS"),
    *("Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Noto Sans Arabic", "Noto Sans Devanagari", "Noto Sans Thai"),
)
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class QuietFigure(Figure):
    """A figure that draws characters which no font has as boxes, without a warning, and that Jupyter displays."""

    def draw(self, renderer: Any) -> None:
        """Draw it, as matplotlib does for a screen or a file."""
        with without_glyph_warnings():
            super().draw(renderer)

    def _repr_png_(self) -> bytes:
        """Return the figure for notebooks that have not loaded matplotlib's own display."""
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=self.dpi)
        return file.getvalue()


@contextmanager
def without_glyph_warnings() -> Iterator[None]:
    """Suppress matplotlib's warnings about characters that no font has; they are drawn as boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*[Gg]lyph.*", category=UserWarning)
        warnings.filterwarnings("ignore", message=r".*does not support.*natively", category=UserWarning)
        yield


def words(
    *paragraphs: str,
    size: float,
    width: float,
    lines: int = 2,
    align: str = "left",
    weight: str = "normal",
    **style: Any,
) -> list[Artist]:
    """Return the box of paragraphs, each wrapped to at most `lines` lines of a width in inches; none for no text."""
    broken = [line for text in paragraphs for line in wrap(text, width, size, lines, weight)]
    textprops = {**plain(size), "weight": weight, "multialignment": align, "linespacing": 1.1, **style}
    return [TextArea("\n".join(broken), textprops=textprops, multilinebaseline=True)] if broken else []


def page(boxes: Sequence[Artist], dpi: int, margin: float = MARGIN) -> Figure:
    """Return a figure of boxes below each other, as large as they need and a margin in inches."""
    figure = QuietFigure(dpi=dpi, facecolor="white")
    box = VPacker(children=[*boxes], pad=72 * margin, sep=_GAP, align="left")
    place: dict[str, Any] = {"pad": 0, "borderpad": 0, "frameon": False, "bbox_to_anchor": figure.bbox}
    axes = figure.add_axes((0, 0, 1, 1))  # without axes, Jupyter would not display the figure
    axes.set_axis_off()
    figure.add_artist(AnchoredOffsetbox("upper left", child=box, **place))
    with without_glyph_warnings():
        size = box.get_bbox(RendererAgg(1, 1, dpi))  # type: ignore[no-untyped-call]
    figure.set_size_inches(math.ceil(size.width) / dpi, math.ceil(size.height) / dpi)
    return figure


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
    """Return the renderer for measuring text, at ten times the size to avoid rounding."""
    return RendererAgg(1, 1, 720)  # type: ignore[no-untyped-call]


def wrap(text: str, width: float, size: float, lines: int = 2, weight: str = "normal") -> list[str]:
    """Break a text into at most this many lines of a width in inches; an ellipsis ends a text that does not fit.

    Widths are measured: lines of equally many characters would leave their column for one class name of ImageNet in
    forty.
    """
    text = printable(text, lines=True)
    for characters in range(min(len(text), round(300 * width / size)), 0, -1):
        broken = textwrap.wrap(text, characters, break_on_hyphens=False)
        if len(broken) > lines:
            broken = [*broken[: lines - 1], f"{broken[lines - 1][: characters - 1].rstrip()}…"]
        if all(measure(line, size, weight) <= width for line in broken):
            return broken
    return []


@cache
def font_families() -> list[str]:
    """Return the bundled font of matplotlib, then installed fonts with further scripts."""
    installed = {font.name for font in fontManager.ttflist}
    return ["DejaVu Sans", *(name for name in _WIDE_FONTS if name in installed)]


def decimal(value: float | None, digits: int = 3, *, signed: bool = False) -> str:
    """Format a number for tables: a true minus sign, no −0, and a dash for None.

    >>> decimal(-0.0004), decimal(-0.25, 2), decimal(0.5, 1, signed=True), decimal(None)
    ('0.000', '−0.25', '+0.5', '–')
    """
    if value is None:
        return "–"
    return f"{round(value, digits) + 0.0:{'+' if signed else ''}.{digits}f}".replace("-", "−")


def readable(*values: float, largest: float | None = None) -> tuple[tuple[str, ...], str]:
    """Format numbers with as many decimals as give the largest two digits, and a common power of 10.

    The power is empty unless the numbers are very small or large. `largest` replaces the largest of them.

    >>> readable(0.00021, 0.0134), readable(-0.5, 0.0, 2.0), readable(1.2e-6, 3.4e-5)
    ((('0', '0.013'), ''), (('−0.5', '0', '2'), ''), (('1', '34'), '× 10⁻⁶'))
    """
    largest = max(map(abs, values)) if largest is None else largest
    magnitude = math.floor(math.log10(largest)) if 0 < largest < math.inf else 0
    power = 0 if -3 <= magnitude < 5 else 3 * (magnitude // 3)
    decimals = max(1 - magnitude + power, 0)
    texts = tuple(f"{value / 10.0**power:.{decimals}f}" for value in values)
    if decimals:
        texts = tuple(text.rstrip("0").rstrip(".") for text in texts)
    texts = tuple("0" if text == "-0" else text.replace("-", "−") for text in texts)
    return texts, f"× 10{str(power).translate(_SUPERSCRIPTS)}" if power else ""
