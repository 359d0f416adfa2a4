"""Charts of an evaluation, and its self-contained HTML page."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitflow.errors import printable
from vitflow.evaluation.metrics import GROUPS, Metric, is_blurred
from vitflow.evaluation.statistics import CONFIDENCE
from vitflow.evaluation.tables import TableRow, Tables
from vitflow.evaluation.verdict import verdict
from vitflow.images.figures import figure_bytes
from vitflow.images.typesetting import (
    AXIS,
    BAR,
    BASELINE,
    BODY,
    GREY,
    INK,
    MOST_WIDTH,
    Series,
    draw_lines,
    label_width,
    new_chart,
    settled,
    style_axes,
    wrap,
)
from vitflow.viewer.pages import Page, make_html

# Lengths in inches; browsers may draw labels a little wider than matplotlib, so they need the padding.
_ROW, _PANEL, _AROUND, _PAD = 0.19, 1.45, 0.55, 0.08
# CSS pixels per inch of every figure, so that their text has the same size.
_PIXELS = 108


def draw_bars(evaluation: Tables, names: Sequence[str]) -> Figure:
    """Draw a panel for each of these metrics or groups: the mean of each measured method with its interval.

    Baselines are grey. A thin line marks the random map's mean in every panel.
    """
    metrics = [metric for metric in evaluation.metrics if metric.name in names or metric.group in names]
    methods = [
        name for name in evaluation.shown_methods if any(evaluation.is_measured(name, metric) for metric in metrics)
    ]
    labels = [printable(name) for name in methods]
    size = (label_width(labels) + _PANEL * len(metrics), _AROUND + _ROW * len(labels))
    figure = new_chart(size)
    if (layout := figure.get_layout_engine()) is not None:
        layout.set(w_pad=_PAD)  # type: ignore[call-arg]
    plots: Any = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(plots, metrics, strict=True):
        _draw_panel(axes, metric, [row for row in evaluation.table(metric.name) if row.method in methods])
    first: Axes = plots[0]
    first.set_yticks(range(len(labels)), ["".join(wrap(name, MOST_WIDTH, BODY, lines=1)) for name in labels])
    for text in first.get_yticklabels():
        text.set_parse_math(False)
    first.set_ylim(len(labels) - 0.4, -0.6)
    return settled(figure)


def _draw_panel(axes: Axes, metric: Metric, rows: Sequence[TableRow]) -> None:
    means, lows, highs = (  # None becomes NaN
        np.array([getattr(row.estimate, name) for row in rows], dtype=np.float64) for name in ("mean", "low", "high")
    )
    colors = [BASELINE if row.baseline else BAR for row in rows]
    positions = np.arange(len(rows))
    axes.barh(positions, np.nan_to_num(means), height=0.68, color=colors, zorder=2)
    axes.hlines(positions, lows, highs, color=INK, linewidth=0.9, zorder=3)
    chance = next((row.estimate.mean for row in rows if row.method == "random"), None)
    if chance is not None:
        axes.axvline(chance, color=GREY, linewidth=0.7, linestyle=(0, (3, 2)), zorder=4)
    axes.axvline(0, color=AXIS, linewidth=0.6, zorder=1)
    style_axes(axes, f"{metric.title} {metric.arrow}")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def draw_curves(evaluation: Tables) -> Figure:
    """Draw mean deletion and insertion curves, a line per method; baselines are grey."""
    assert evaluation.fractions is not None
    charts = {
        "deletion: highest patches removed first ↓": evaluation.mean_lines("deletion"),
        "insertion: highest patches inserted first ↑": evaluation.mean_lines("insertion"),
    }
    fractions = evaluation.fractions.tolist()
    return draw_lines(
        {title: _lines(evaluation, fractions, lines) for title, lines in charts.items()},
        x_label=["share of patches removed", "share of patches inserted"],
        y_label="probability of the class",
        bottom=0.0,
    )


def _lines(evaluation: Tables, x: Sequence[float], lines: Mapping[str, Sequence[float | None]]) -> list[Series]:
    """Return a line per method with values, without the controls, which would cover the methods."""
    return [
        Series(method, x, line, baseline=evaluation.is_baseline(method))
        for method, line in lines.items()
        if not (is_blurred(method) or all(value is None for value in line))
    ]


def draw_charts(evaluation: Tables) -> dict[str, Figure]:
    """Draw the bars of each group, and the curves of faithfulness; return the figures by name."""
    figures = {name: draw_bars(evaluation, [name]) for name in evaluation.groups if name != "correlation"}
    return figures if evaluation.fractions is None else figures | {"curves": draw_curves(evaluation)}


# --- Page ------------------------------------------------------------------------------------------------------------


def write_page(evaluation: Tables, path: Path, charts: Mapping[str, Figure], notes: Sequence[str]) -> Path:
    """Write the page, with charts from `draw_charts` and sentences above the tables."""
    page = make_html(
        "evaluation",
        evaluation=evaluation,
        verdict=verdict(evaluation),
        notes=notes,
        groups={name: group for name, group in GROUPS.items() if name in evaluation.groups},
        charts={name: _image(figure, "svg") for name, figure in charts.items()},
        grids=[_image(grid, "png") for grid in evaluation.grids],
        confidence=round(100 * CONFIDENCE),
        baselines=sum(map(evaluation.is_baseline, evaluation.methods)),
    )
    return Page(page).save(path)


def _image(figure: Figure, suffix: str) -> dict[str, Any]:
    """Return a figure as a data URI, and its width on the page."""
    content = base64.b64encode(figure_bytes(figure, f".{suffix}")).decode()
    kind = {"svg": "svg+xml", "png": "png"}[suffix]
    return {"data": f"data:image/{kind};base64,{content}", "width": round(_PIXELS * figure.get_figwidth())}
