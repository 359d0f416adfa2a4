"""Charts of an evaluation: bars with intervals for each group of metrics, curves, stages of randomisation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import OptionError, printable, unknown_name
from vitflow.evaluation.choices import is_twin
from vitflow.evaluation.metrics import Metric
from vitflow.evaluation.statistics import defined_means
from vitflow.evaluation.tables import TableRow, Tables
from vitflow.files import write_atomically
from vitflow.images.charts import (
    AXIS,
    BAR,
    BASELINE,
    MOST_WIDTH,
    Series,
    draw_lines,
    label_width,
    new_chart,
    settled,
    style_axes,
)
from vitflow.images.figures import figure_bytes, save_figure
from vitflow.images.typesetting import BODY, GREY, INK, wrap

# Lengths in inches; browsers may draw labels a little wider than matplotlib, so they need the padding.
_ROW, _PANEL, _AROUND, _PAD = 0.19, 1.45, 0.55, 0.08


def draw_bars(evaluation: Tables, names: Sequence[str]) -> Figure:
    """Draw a panel per metric: the mean of each measured method with its bootstrap interval.

    Baselines and controls are grey. A thin line marks the random map's mean in every panel.

    Args:
        evaluation: the results to draw.
        names: measured metrics or their groups.

    Raises:
        OptionError: none of these metrics was measured.
    """
    metrics = [metric for metric in evaluation.metrics if metric.name in names or metric.group in names]
    if not metrics:
        known = [name for metric in evaluation.metrics for name in (metric.group, metric.name)]
        raise OptionError(unknown_name("metric of this evaluation", ", ".join(names), set(known)))
    methods = [name for name in evaluation.methods if any(evaluation.is_measured(name, metric) for metric in metrics)]
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
    colors = [BASELINE if row.baseline or is_twin(row.method) else BAR for row in rows]
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
        "deletion: highest patches removed first ↓": evaluation.curves["deletion"],
        "insertion: highest patches inserted first ↑": evaluation.curves["insertion"],
    }
    return draw_lines(
        {title: _series(evaluation, evaluation.fractions, defined_means(of)) for title, of in charts.items()},
        x_label=["share of patches removed", "share of patches inserted"],
        y_label="probability of the class",
        bottom=0.0,
    )


def draw_stages(evaluation: Tables) -> Figure:
    """Draw the similarity to the original maps under cascading randomisation, a line per method."""
    assert evaluation.randomisation is not None
    values = defined_means(evaluation.randomisation).T  # [methods, stages]
    trained = np.where(np.isnan(values).all(axis=1, keepdims=True), np.nan, 1.0)
    lines = np.concatenate([trained, values], axis=1)
    return draw_lines(
        {"cascading randomisation: closer to 0 is better": _series(evaluation, np.arange(lines.shape[1]), lines)},
        x_label="weights randomised from the top down to …",
        y_label="Spearman with the trained model's map",
        ticks=["trained", *evaluation.stages],
    )


def _series(evaluation: Tables, x: NDArray[Any], lines: NDArray[np.float64]) -> list[Series]:
    """Return a line per method with values, without the controls, which would cover the methods."""
    return [
        Series(method, x.tolist(), values.tolist(), baseline=evaluation.is_baseline(method))
        for method, values in zip(evaluation.methods, lines, strict=True)
        if not (np.isnan(values).all() or is_twin(method))
    ]


def save_charts(evaluation: Tables, folder: Path) -> dict[str, bytes]:
    """Write every chart as PNG and SVG; return the SVG data by name."""
    figures = {group: draw_bars(evaluation, [group]) for group in evaluation.groups}
    if evaluation.fractions is not None:
        figures["curves"] = draw_curves(evaluation)
    if evaluation.randomisation is not None:
        figures["randomisation"] = draw_stages(evaluation)
    if evaluation.correlation is not None:
        figures["correlation"] = evaluation.correlation.figure()
    charts = {name: figure_bytes(figure, ".svg") for name, figure in figures.items()}
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.png")
        with write_atomically(folder / f"{name}.svg") as file:
            file.write(charts[name])
    return charts
