"""Text, numbers and charts in figures, laid out by matplotlib; text is never parsed as a formula."""

import io
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, fontManager
from matplotlib.gridspec import GridSpec
from matplotlib.offsetbox import AnchoredOffsetbox, TextArea, VPacker
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.images import DPI

# Sizes of type in points.
TITLE, BODY, SMALL = 8.0, 6.6, 6.0
LEADING = 1.32 / 72  # from one baseline to the next, per point of type
INK, GREY, RULE = "#1a1a1a", "#666666", "#9a9a9a"
#: Inches around a figure.
MARGIN = 0.12
_GAP = 4.0  # points between the boxes of a page

# Colours of the axes, of the bars of methods and of baselines, and of lines: Okabe & Ito's, safe for the colour-blind.
AXIS, BAR, BASELINE = "#c9c9c9", "#3d78b8", "#b4b4b4"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: The width of a label in inches at most.
MOST_WIDTH = 2.7
_MOST_TICKS = 16
# Sides of a clip's frame and height of its curve, in inches.
_FRAME, _CURVE = 1.25, 1.1

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
    """Return the box of paragraphs, each wrapped as by `wrap`; none for no text."""
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
    """Break a text into at most this many lines of a width in inches; an ellipsis ends a text that does not fit."""
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


def decimal(value: float | None, digits: int = 3) -> str:
    """Format a number for tables: a true minus sign, no −0, and a dash for None.

    >>> decimal(-0.0004), decimal(-0.25, 2), decimal(None)
    ('0.000', '−0.25', '–')
    """
    if value is None:
        return "–"
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")


def readable(*values: float) -> tuple[tuple[str, ...], str]:
    """Format numbers with as many decimals as give the largest two digits, and a common power of 10.

    The power is empty unless the numbers are very small or large.

    >>> readable(0.00021, 0.0134), readable(-0.5, 0.0, 2.0), readable(1.2e-6, 3.4e-5)
    ((('0', '0.013'), ''), (('−0.5', '0', '2'), ''), (('1', '34'), '× 10⁻⁶'))
    """
    largest = max(map(abs, values))
    magnitude = math.floor(math.log10(largest)) if 0 < largest < math.inf else 0
    power = 0 if -3 <= magnitude < 5 else 3 * (magnitude // 3)
    decimals = max(1 - magnitude + power, 0)
    texts = tuple(f"{value / 10.0**power:.{decimals}f}" for value in values)
    if decimals:
        texts = tuple(text.rstrip("0").rstrip(".") for text in texts)
    texts = tuple("0" if text == "-0" else text.replace("-", "−") for text in texts)
    return texts, f"× 10{str(power).translate(_SUPERSCRIPTS)}" if power else ""


def label_width(labels: Sequence[str]) -> float:
    """Return the width of the longest label, in inches."""
    return min(max(measure(label, BODY) for label in labels), MOST_WIDTH)


def new_chart(size: tuple[float, float]) -> QuietFigure:
    """Return an empty figure of (width, height) in inches with automatic layout."""
    return QuietFigure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")


def settled(figure: Figure) -> Figure:
    """Fix the layout of a figure, so that all its files are identical."""
    figure.draw_without_rendering()
    with matplotlib.rc_context({"figure.autolayout": False, "figure.constrained_layout.use": False}):
        figure.set_layout_engine(None)  # "none" would draw it twice for each file
    return figure


def framed(figure: Figure, title: str, paragraphs: Iterable[str]) -> Figure:
    """Add a title above a figure and small grey lines below it, increase its height accordingly, and fix its layout."""
    width, height = figure.get_size_inches()
    room, left = width - 2 * MARGIN, MARGIN / width
    head = wrap(title, room, TITLE, lines=3, weight="bold")
    foot = [line for paragraph in paragraphs for line in wrap(paragraph, room, SMALL, lines=4)]
    if head:
        figure.suptitle("\n".join(head), x=left, ha="left", **plain(TITLE), weight="bold")
    if foot:
        figure.supxlabel("\n".join(foot), x=left, ha="left", **plain(SMALL) | {"color": GREY})
    more = (len(head) * TITLE + len(foot) * SMALL) * LEADING + MARGIN * (bool(head) + bool(foot))
    figure.set_size_inches(width, height + more)
    figure.set_layout_engine("constrained", w_pad=MARGIN / 2, h_pad=MARGIN / 2, wspace=0, hspace=0)
    return settled(figure)


def style_axes(axes: Axes, title: str) -> None:
    """Set the title and the style of a panel."""
    axes.set_facecolor("white")
    axes.set_title(printable(title, lines=True), fontsize=TITLE, loc="left", color=INK, parse_math=False)
    axes.tick_params(labelsize=BODY, length=2.5, width=0.6, colors=GREY, labelcolor=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.6, color=AXIS)


def draw_clip(
    images: Mapping[int, NDArray[np.uint8]],
    shares: NDArray[np.float64],
    *,
    title: str,
    notes: Sequence[str],
    span: int = 1,
) -> Figure:
    """Draw key frames, by their index, above a curve of the shares of all frames; each covers `span` frames."""
    height, width = next(iter(images.values())).shape[:2]
    frame = _FRAME * height / width
    figure = new_chart((max(len(images), 3) * _FRAME + 0.4, frame + _CURVE + 0.3))
    grid = GridSpec(2, len(images), figure=figure, height_ratios=[frame, _CURVE])
    for column, (index, image) in enumerate(images.items()):
        axes: Any = figure.add_subplot(grid[0, column])
        axes.imshow(image, interpolation="nearest")
        axes.set_axis_off()
        start = index * span + 1
        label = f"frame {start}" if span == 1 else f"frames {start}–{start + span - 1}"
        axes.set_title(label, fontsize=BODY, color=GREY)
    curve = figure.add_subplot(grid[1, :])
    style_axes(curve, "")
    places = [index * span + 1 for index in range(len(shares))]
    curve.plot(places, 100 * shares, color=BAR, marker="o", markersize=2.5, linewidth=1.2)
    marked = [places[index] for index in images]
    curve.plot(marked, 100 * shares[list(images)], "o", color=LINES[1], markersize=4, clip_on=False)
    curve.axhline(100 / len(shares), color=AXIS, linewidth=0.6, zorder=0)
    curve.set_ylim(0, 112 * max(shares.max(), 1 / len(shares)))
    curve.set_xticks(places if len(places) <= _MOST_TICKS else places[:: len(places) // 12])
    curve.set_xlabel("frame", fontsize=TITLE, color=GREY)
    curve.set_ylabel("share, %", fontsize=TITLE, color=GREY)
    return framed(figure, title, notes)
