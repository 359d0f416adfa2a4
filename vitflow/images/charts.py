"""Charts of lines with bands, in colours for light and for dark paper, made with matplotlib."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitflow.errors import printable
from vitflow.images import DPI
from vitflow.images.typesetting import BODY, GREY, LEADING, MARGIN, SMALL, TITLE, QuietFigure, plain, wrap


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a chart.

    Attributes:
        paper, ink, soft, rule: background, text, secondary text, lines.
        bar, baseline: of methods and of baselines.
        lines: colours of the methods, in order.
    """

    paper: str
    ink: str
    soft: str
    rule: str
    bar: str
    baseline: str
    lines: tuple[str, ...]


# Okabe & Ito's colours, safe for colour-blind readers; white replaces black in the dark theme.
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LIGHT = Theme("#ffffff", "#1a1a1a", "#666666", "#c9c9c9", "#3d78b8", "#b4b4b4", (*_OKABE_ITO, "#000000"))
DARK = Theme("#1b1d21", "#e8e7e3", "#9a9ba3", "#45484f", "#6ea6e6", "#6b6d75", ("#3ba0e0", *_OKABE_ITO[1:], "#ffffff"))

_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

#: Approximate width of a character of a label in inches, and the maximum number of characters.
PER_CHARACTER, MOST_CHARACTERS = 0.062, 44
_MOST_TICKS = 16


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
        axes.set_xlabel(below, fontsize=TITLE, color=LIGHT.soft, parse_math=False)
        axes.margins(x=0.02)
        axes.axhline(0, color=LIGHT.rule, linewidth=0.6, zorder=0)
        _mark(axes, sorted({x for one in series for x in one.x}), ticks)
    plots[0].set_ylabel(y_label, fontsize=TITLE, color=LIGHT.soft, parse_math=False)
    plots[0].set_ylim(bottom=bottom)
    legend = figure.legend(
        handles.values(),
        map(printable, handles),
        loc="outside right center",
        frameon=False,
        fontsize=BODY,
        labelcolor=LIGHT.ink,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    return settled(figure)


def _draw_series(axes: Axes, series: Series, number: int) -> Any:
    """Draw a line with the style of its index among its kind."""
    x, y = (np.array(values, dtype=float) for values in (series.x, series.y))  # None becomes NaN
    if series.baseline:
        look: dict[str, Any] = {"color": LIGHT.soft, "linestyle": _STYLES[1:][number % 3], "zorder": 1.9}
    else:
        turn, place = divmod(number, len(LIGHT.lines))
        look = {"color": LIGHT.lines[place], "linestyle": _STYLES[turn % len(_STYLES)]}
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
    """Return the approximate width of the longest label, in inches."""
    return min(max(map(len, labels)), MOST_CHARACTERS) * PER_CHARACTER


def new_chart(size: tuple[float, float]) -> QuietFigure:
    """Return an empty figure of (width, height) in inches with automatic layout."""
    return QuietFigure(figsize=size, dpi=DPI, layout="constrained", facecolor=LIGHT.paper)


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
    axes.set_facecolor(LIGHT.paper)
    axes.set_title(printable(title, lines=True), fontsize=TITLE, loc="left", color=LIGHT.ink, parse_math=False)
    axes.tick_params(labelsize=BODY, length=2.5, width=0.6, colors=LIGHT.soft, labelcolor=LIGHT.ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set(linewidth=0.6, color=LIGHT.rule)


def darkened(svg: bytes) -> bytes:
    """Convert a chart from the light to the dark theme."""
    pairs = {
        light.lower().encode(): dark.lower().encode() for light, dark in zip(_colors(LIGHT), _colors(DARK), strict=True)
    }
    return re.sub(b"#[0-9a-f]{6}", lambda match: pairs.get(match[0], match[0]), svg)


def _colors(theme: Theme) -> list[str]:
    return [theme.paper, theme.ink, theme.soft, theme.rule, theme.bar, theme.baseline, *theme.lines]
