"""Charts of lines with bands, and figures of clips, made with matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from numpy.typing import NDArray

from vitflow.errors import printable
from vitflow.images import DPI
from vitflow.images.typesetting import BODY, GREY, INK, LEADING, MARGIN, SMALL, TITLE, QuietFigure, measure, plain, wrap

# Colours of the axes, of the bars of methods and of baselines, and of lines: Okabe & Ito's, safe for the colour-blind.
AXIS, BAR, BASELINE = "#c9c9c9", "#3d78b8", "#b4b4b4"
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")

_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

#: The width of a label in inches at most.
MOST_WIDTH = 2.7
_MOST_TICKS = 16
# Sides of a clip's frame and height of its curve, in inches.
_FRAME, _CURVE = 1.25, 1.1


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: y(x), with a band of ± spread; both may be None at undefined points.

    Attributes:
        label: its name.
        x, y, spread: its points; without a spread, no band is drawn.
        baseline: whether it is drawn in grey, behind the others.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float | None]
    spread: Sequence[float | None] = ()
    baseline: bool = False


def draw_lines(
    charts: Mapping[str, Sequence[Series]],
    *,
    x_label: str | Sequence[str],
    y_label: str,
    ticks: Sequence[str] = (),
    bottom: float | None = None,
) -> Figure:
    """Draw charts side by side, of lines with bands; one legend for all, by the names of the series.

    Args:
        charts: title → series.
        x_label: what x is, for all charts or for each; whole numbers are marked one by one.
        y_label: what y is, for all charts.
        ticks: words that stand for the values of x.
        bottom: lower limit of y; by default that of the lines.

    >>> series = Series("rollout", [1, 2], [0.1, 0.4], [0.1, None])
    >>> [axes.get_title(loc="left") for axes in draw_lines({"occlusion": [series]}, x_label="layer", y_label="ρ").axes]
    ['occlusion']
    """
    labels = list(dict.fromkeys(one.label for series in charts.values() for one in series))
    panel = 4.2 if len(charts) == 1 else 3.0
    width = 0.6 + panel * len(charts) + label_width(labels) + 0.4
    figure = new_chart((width, max(2.8, 0.145 * len(labels) + 0.9)))
    plots: Any = figure.subplots(1, len(charts), sharey=True, squeeze=False)[0]
    x_labels = [x_label] * len(charts) if isinstance(x_label, str) else x_label
    handles: dict[str, Any] = {}
    for axes, (title, series), below in zip(plots, charts.items(), x_labels, strict=True):
        for one in series:
            number = [other.label for other in series if other.baseline == one.baseline].index(one.label)
            handles.setdefault(one.label, _draw_series(axes, one, number))
        style_axes(axes, title)
        axes.set_xlabel(below, fontsize=TITLE, color=GREY, parse_math=False)
        axes.margins(x=0.02)
        axes.axhline(0, color=AXIS, linewidth=0.6, zorder=0)
        _mark(axes, sorted({x for one in series for x in one.x}), ticks)
    plots[0].set_ylabel(y_label, fontsize=TITLE, color=GREY, parse_math=False)
    plots[0].set_ylim(bottom=bottom)
    legend = figure.legend(
        handles.values(),
        map(printable, handles),
        loc="outside right center",
        frameon=False,
        fontsize=BODY,
        labelcolor=INK,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return settled(figure)


def _draw_series(axes: Axes, series: Series, number: int) -> Any:
    """Draw a line with the style of its index among its kind."""
    x, y = (np.array(values, dtype=float) for values in (series.x, series.y))  # None becomes NaN
    if series.baseline:
        look: dict[str, Any] = {"color": GREY, "linestyle": _STYLES[1:][number % 3], "zorder": 1.9}
    else:
        turn, place = divmod(number, len(LINES))
        look = {"color": LINES[place], "linestyle": _STYLES[turn % len(_STYLES)]}
        look |= {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 3.0}
    if len(series.spread):
        spread = np.nan_to_num(np.array(series.spread, dtype=float))
        axes.fill_between(x, y - spread, y + spread, color=look["color"], alpha=0.15, linewidth=0)
    [line] = axes.plot(x, y, linewidth=1.2, **look)
    return line


def _mark(axes: Axes, values: Sequence[float], words: Sequence[str]) -> None:
    """Ticks at whole numbers, or the words that stand for them."""
    if words:
        axes.set_xticks(values, [printable(word) for word in words], parse_math=False)
    elif all(value == round(value) for value in values):
        axes.set_xticks(values if len(values) <= _MOST_TICKS else values[:: len(values) // 12])


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
    if (layout := figure.get_layout_engine()) is not None:
        layout.set(w_pad=MARGIN / 2, h_pad=MARGIN / 2, wspace=0, hspace=0)  # type: ignore[call-arg]
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
    """Draw key frames above a curve of the shares of all frames.

    Args:
        images: overlays by the index of their frame, uint8 RGB [height, width, 3].
        shares: share of each frame, [frames].
        title: title of the figure.
        notes: lines below it.
        span: number of frames that each map and each share covers.
    """
    height, width = next(iter(images.values())).shape[:2]
    frame = _FRAME * height / width
    size = (max(len(images), 3) * _FRAME + 0.4, frame + _CURVE + 0.3)
    figure = new_chart(size)
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
    places = np.arange(len(shares)) * span + 1
    curve.plot(places, 100 * shares, color=BAR, marker="o", markersize=2.5, linewidth=1.2)
    marked = [index * span + 1 for index in images]
    curve.plot(marked, 100 * shares[list(images)], "o", color=LINES[1], markersize=4, clip_on=False)
    curve.axhline(100 / len(shares), color=AXIS, linewidth=0.6, zorder=0)
    curve.set_ylim(0, 112 * max(shares.max(), 1 / len(shares)))
    curve.set_xticks(marked)
    curve.set_xlabel("frame", fontsize=TITLE, color=GREY)
    curve.set_ylabel("share, %", fontsize=TITLE, color=GREY)
    return framed(figure, title, notes)
