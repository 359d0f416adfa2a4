"""Charts of an evaluation: bars with intervals for each group of metrics, curves, stages of randomisation."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import OptionError, unknown_name
from vitflow.evaluation.metrics import Metric
from vitflow.evaluation.statistics import defined_means
from vitflow.evaluation.tables import Tables
from vitflow.pictures.figures import DPI, save_figure
from vitflow.pictures.files import write_atomically
from vitflow.pictures.typesetting import BODY, TITLE, QuietFigure, drawable


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a chart.

    Attributes:
        paper, ink, soft, rule: background, words, lesser words, lines.
        bar, baseline: of methods and of baselines.
        lines: of the methods in turn.
    """

    paper: str
    ink: str
    soft: str
    rule: str
    bar: str
    baseline: str
    lines: tuple[str, ...]


# Okabe & Ito's colours, which people who see fewer colours can also tell apart; on dark, black gives way to white.
_OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LIGHT = Theme("#ffffff", "#1a1a1a", "#666666", "#c9c9c9", "#3d78b8", "#b4b4b4", (*_OKABE_ITO, "#000000"))
DARK = Theme("#1b1d21", "#e8e7e3", "#9a9ba3", "#45484f", "#6ea6e6", "#6b6d75", ("#3ba0e0", *_OKABE_ITO[1:], "#ffffff"))

_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

# Lengths in inches.
_ROW, _PANEL, _PER_CHARACTER, _CURVE = 0.19, 1.65, 0.062, 3.0
_HEAD, _FOOT, _MARGIN = 0.26, 0.26, 0.22


def draw_bars(evaluation: Tables, names: Sequence[str], *, theme: Theme = LIGHT) -> Figure:
    """A panel per metric: each method's mean with its bootstrap interval; baselines are grey.

    A thin line marks the random map's mean in every panel.

    Args:
        evaluation: what to draw.
        names: metrics that were measured, or groups of them.
        theme: colours.

    Raises:
        OptionError: none of these was measured.
    """
    metrics = [metric for metric in evaluation.metrics if metric.name in names or metric.group in names]
    if not metrics:
        known = [name for metric in evaluation.metrics for name in (metric.group, metric.name)]
        raise OptionError(unknown_name("metric of this evaluation", ", ".join(names), set(known)))
    labels = [drawable(name) for name in evaluation.methods]
    words = min(max(map(len, labels)), 44) * _PER_CHARACTER + 0.2
    size = (words + _PANEL * len(metrics), _HEAD + _FOOT + _ROW * len(labels))
    figure = QuietFigure(figsize=size, dpi=DPI, facecolor=theme.paper)
    plots: Any = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    _place(figure, left=words, right=_MARGIN, bottom=_FOOT, gap=_MARGIN, panels=len(metrics))
    for axes, metric in zip(plots, metrics, strict=True):
        _draw_panel(axes, evaluation, metric, theme)
    first: Axes = plots[0]
    first.set_yticks(range(len(labels)), [name if len(name) <= 44 else f"{name[:43]}…" for name in labels])
    for text in first.get_yticklabels():
        text.set_parse_math(False)
    first.set_ylim(len(labels) - 0.4, -0.6)
    return figure


def _draw_panel(axes: Axes, evaluation: Tables, metric: Metric, theme: Theme) -> None:
    rows = evaluation.table(metric.name)
    means = np.array([np.nan if row.estimate.mean is None else row.estimate.mean for row in rows])
    colors = [theme.baseline if row.baseline else theme.bar for row in rows]
    places = np.arange(len(rows))
    axes.barh(places, np.nan_to_num(means), height=0.68, color=colors, zorder=2)
    for place, row in zip(places, rows, strict=True):
        if row.estimate.low is not None and row.estimate.high is not None:
            axes.plot([row.estimate.low, row.estimate.high], [place, place], color=theme.ink, linewidth=0.9, zorder=3)
    chance = next((row.estimate.mean for row in rows if row.method == "random"), None)
    if chance is not None:
        axes.axvline(chance, color=theme.soft, linewidth=0.7, linestyle=(0, (3, 2)), zorder=4)
    axes.axvline(0, color=theme.rule, linewidth=0.6, zorder=1)
    _style(axes, f"{metric.title} {metric.arrow}", theme)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def draw_curves(evaluation: Tables, *, theme: Theme = LIGHT) -> Figure:
    """Mean deletion and insertion curves, a line per method; baselines are grey."""
    assert evaluation.fractions is not None
    charts = {
        "deletion: highest patches removed first ↓": evaluation.curves["deletion"],
        "insertion: highest patches put back first ↑": evaluation.curves["insertion"],
    }
    figure, plots = _side_by_side(charts, evaluation, theme)
    for axes, values in zip(plots, charts.values(), strict=True):
        _draw_lines(axes, evaluation, evaluation.fractions, defined_means(values), theme)
        axes.set_xlim(0, 1)
    plots[0].set_ylim(0, 1.05 * max(float(np.nanmax(defined_means(values))) for values in charts.values()))
    plots[0].set_xlabel("share of patches removed", fontsize=TITLE, color=theme.soft)
    plots[1].set_xlabel("share of patches put back", fontsize=TITLE, color=theme.soft)
    plots[0].set_ylabel("probability of the class", fontsize=TITLE, color=theme.soft)
    return figure


def draw_stages(evaluation: Tables, *, theme: Theme = LIGHT) -> Figure:
    """How alike the maps stay while the weights are made random from the top down, a line per method."""
    assert evaluation.randomisation is not None
    charts = {"cascading randomisation: nearer to 0 is better": evaluation.randomisation}
    figure, [axes] = _side_by_side(charts, evaluation, theme)
    places = np.arange(1, len(evaluation.stages) + 1)
    values = defined_means(evaluation.randomisation.transpose(0, 2, 1))  # [methods, stages]
    trained = np.ones((len(values), 1))
    _draw_lines(axes, evaluation, np.append(0, places), np.concatenate([trained, values], axis=1), theme)
    axes.axhline(0, color=theme.rule, linewidth=0.6, zorder=1)
    axes.set_xticks([0, *places], ["trained", *map(drawable, evaluation.stages)])
    axes.set_xlabel("weights made random from the top down to …", fontsize=TITLE, color=theme.soft)
    axes.set_ylabel("Spearman with the trained model's map", fontsize=TITLE, color=theme.soft)
    return figure


def charts_of(evaluation: Tables) -> dict[str, Callable[[], Figure]]:
    """The charts that this evaluation has, by name."""
    found: dict[str, Callable[[], Figure]] = {}
    for group in evaluation.groups:
        found[group] = partial(draw_bars, evaluation, [group])
        if group == "faithfulness" and evaluation.fractions is not None:
            found["curves"] = partial(draw_curves, evaluation)
        if group == "sanity" and evaluation.randomisation is not None:
            found["randomisation"] = partial(draw_stages, evaluation)
    if evaluation.correlation is not None:
        found["correlation"] = evaluation.correlation.figure
    return found


def save_charts(evaluation: Tables, folder: Path) -> dict[str, bytes]:
    """Write every chart as PNG and SVG; the SVG of each by its name."""
    drawn = {}
    for name, draw in charts_of(evaluation).items():
        figure = draw()
        save_figure(figure, folder / f"{name}.png")
        drawn[name] = svg_of(figure)
        with write_atomically(folder / f"{name}.svg") as file:
            file.write(drawn[name])
    return drawn


def svg_of(figure: Figure) -> bytes:
    """The figure as SVG; the same figure gives the same bytes."""
    settings: Any = {"savefig.bbox": None, "svg.fonttype": "none", "svg.hashsalt": "vitflow"}
    file = io.BytesIO()
    with matplotlib.rc_context(settings):
        figure.savefig(file, format="svg", metadata={"Date": None}, facecolor=figure.get_facecolor())
    return file.getvalue()


def darkened(svg: bytes) -> bytes:
    """A chart that was drawn in the light theme, in the dark one."""
    pairs = {
        light.lower().encode(): dark.lower().encode() for light, dark in zip(_colors(LIGHT), _colors(DARK), strict=True)
    }
    return re.sub(b"#[0-9a-f]{6}", lambda match: pairs.get(match[0], match[0]), svg)


def _colors(theme: Theme) -> list[str]:
    return [theme.paper, theme.ink, theme.soft, theme.rule, theme.bar, theme.baseline, *theme.lines]


def _side_by_side(charts: Mapping[str, Any], evaluation: Tables, theme: Theme) -> tuple[Figure, Sequence[Axes]]:
    """Empty panels with their titles."""
    height = max(2.8, 0.145 * len(evaluation.methods) + 0.9)
    legend = min(max(map(len, evaluation.methods)), 44) * _PER_CHARACTER + 0.6
    panel = _CURVE if len(charts) > 1 else 1.4 * _CURVE
    figure = QuietFigure(figsize=(0.6 + panel * len(charts) + legend, height), dpi=DPI, facecolor=theme.paper)
    plots: Any = figure.subplots(1, len(charts), sharey=True, squeeze=False)[0]
    _place(figure, left=0.6, right=legend, bottom=0.45, gap=0.3, panels=len(charts))
    for axes, title in zip(plots, charts, strict=True):
        _style(axes, title, theme)
    return figure, plots


def _draw_lines(axes: Axes, evaluation: Tables, x: NDArray[Any], lines: NDArray[np.float64], theme: Theme) -> None:
    """A line per method, and the legend to the right of the last panel."""
    number = 0
    for method, values in zip(evaluation.methods, lines, strict=True):
        if evaluation.is_baseline(method):
            look: dict[str, Any] = {"color": theme.soft, "linestyle": "--" if method == "random" else ":"}
        else:
            count = len(theme.lines)
            look = {"color": theme.lines[number % count], "linestyle": _STYLES[number // count % len(_STYLES)]}
            look |= {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 2.6}
            number += 1
        if np.isnan(values[1:]).all():  # such as a method that was left out of the sanity checks
            continue
        axes.plot(x, values, linewidth=1.1, label=drawable(method), **look)
    if axes.get_subplotspec() is not None and axes.get_subplotspec().is_last_col():  # type: ignore[union-attr]
        legend = axes.legend(
            loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=BODY, labelcolor=theme.ink
        )
        for text in legend.get_texts():
            text.set_parse_math(False)


def _place(figure: Figure, *, left: float, right: float, bottom: float, gap: float, panels: int) -> None:
    """Margins and gaps between panels in inches: quicker than a layout that measures words, and always the same."""
    width, height = figure.get_size_inches()
    panel = (width - left - right - gap * (panels - 1)) / panels
    figure.subplots_adjust(
        left=left / width,
        right=1 - right / width,
        bottom=bottom / height,
        top=1 - _HEAD / height,
        wspace=gap / panel,
    )


def _style(axes: Axes, title: str, theme: Theme) -> None:
    axes.set_facecolor(theme.paper)
    axes.set_title(drawable(title), fontsize=TITLE, loc="left", color=theme.ink, parse_math=False)
    axes.tick_params(labelsize=BODY, length=2.5, width=0.6, colors=theme.soft, labelcolor=theme.ink)
    axes.spines[["top", "right"]].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_linewidth(0.6)
        axes.spines[side].set_color(theme.rule)
