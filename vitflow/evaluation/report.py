"""Report of an evaluation: charts, the verdict, and a self-contained HTML page with tables and differences."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitflow.errors import printable
from vitflow.evaluation.measures.references import LAYER_METHODS, REFERENCES
from vitflow.evaluation.metrics import GROUPS, Metric, is_blurred
from vitflow.evaluation.statistics import CONFIDENCE, MIN_CLEAR
from vitflow.evaluation.tables import LAYER_TITLES, TableRow, Tables
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
from vitflow.images.figures import figure_bytes
from vitflow.images.typesetting import BODY, GREY, INK, wrap
from vitflow.registry.method_table import get_method, is_slow, split_label
from vitflow.viewer.pages import write_html

# Lengths in inches; browsers may draw labels a little wider than matplotlib, so they need the padding.
_ROW, _PANEL, _AROUND, _PAD = 0.19, 1.45, 0.55, 0.08
# CSS pixels per inch of every figure, so that their text has the same size.
_PIXELS = 108

# Questions of the verdict, and the metrics that answer them; the first measured metric counts.
_QUESTIONS = {
    "where the object is": ("roc_auc", "mean_iou", "average_precision", "energy", "pointing_game"),
    "what the prediction depends on": ("gap", "deletion_auc", "insertion_auc"),
    "one class against another": ("grid_auc", "separation", "grid_energy", "class_sensitivity"),
}


def draw_bars(evaluation: Tables, names: Sequence[str]) -> Figure:
    """Draw a panel per metric: the mean of each measured method with its interval.

    Baselines and controls are grey. A thin line marks the random map's mean in every panel.

    Args:
        evaluation: the results to draw.
        names: measured metrics or their groups.
    """
    metrics = [metric for metric in evaluation.metrics if metric.name in names or metric.group in names]
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
    colors = [BASELINE if row.baseline or is_blurred(row.method) else BAR for row in rows]
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


def draw_stages(evaluation: Tables) -> Figure:
    """Draw the similarity to the original maps under cascading randomisation, a line per method."""
    lines = {
        method: [1.0, *line] for method, line in evaluation.mean_lines("cascade").items() if line != [None] * len(line)
    }
    return draw_lines(
        {
            "cascading randomisation: closer to 0 is better": _lines(
                evaluation, range(len(evaluation.stages) + 1), lines
            )
        },
        x_label="weights randomised from the top down to …",
        y_label="Spearman with the trained model's map",
        ticks=["trained", *evaluation.stages],
    )


def _lines(evaluation: Tables, x: Sequence[float], lines: Mapping[str, Sequence[float | None]]) -> list[Series]:
    """Return a line per method with values, without the controls, which would cover the methods."""
    return [
        Series(method, x, line, baseline=evaluation.is_baseline(method))
        for method, line in lines.items()
        if not (is_blurred(method) or all(value is None for value in line))
    ]


def draw_correlation(evaluation: Tables) -> Figure:
    """Draw a chart per reference: a line per method over the layers, with a band of ± one standard deviation."""
    charts = {}
    for reference, means, spreads in zip(REFERENCES, *evaluation.correlation_means, strict=True):
        layers = list(range(1, means.shape[1] + 1))
        lines = zip(LAYER_METHODS, means.tolist(), spreads.tolist(), strict=True)
        charts[f"with {LAYER_TITLES[reference]}"] = [
            Series(LAYER_TITLES[method], layers, mean, spread) for method, mean, spread in lines
        ]
    return draw_lines(charts, x_label="layer", y_label="Spearman's rank correlation")


def draw_charts(evaluation: Tables) -> dict[str, Figure]:
    """Draw every chart; return them by name."""
    figures = {name: draw_bars(evaluation, [name]) for name in evaluation.groups if name != "correlation"}
    if evaluation.fractions is not None:
        figures["curves"] = draw_curves(evaluation)
    if "cascade" in evaluation.series:
        figures["randomisation"] = draw_stages(evaluation)
    if evaluation.correlation is not None:
        figures["correlation"] = draw_correlation(evaluation)
    return figures


# --- Verdict ---------------------------------------------------------------------------------------------------------


def verdict(evaluation: Tables) -> str:
    """Return a sentence with the best method for each question, the best fast method, and ties.

    Only measured metrics count; the sentence is empty if none of them answers a question. On fewer than ten images no
    method is called better than another.

    >>> from vitflow.evaluation import evaluate
    >>> verdict(evaluate("demo:12", model="demo", methods=["gae", "attention"], metrics=["roc_auc"]))
    'On your 12 images: GAE for where the object is.'
    """
    measured = {
        question: [name for name in names if name in evaluation.values] for question, names in _QUESTIONS.items()
    }
    questions = {question: names[0] for question, names in measured.items() if names}
    winners: dict[str, list[str]] = {}
    unclear: list[str] = []
    best_of_few: dict[str, list[str]] = {}
    clear: list[str] = []
    for question, metric in questions.items():
        if not (ranking := evaluation.ranking(metric)):
            continue
        best = ranking[0][0]
        if evaluation.count(metric) < MIN_CLEAR:
            best_of_few.setdefault(best, []).append(question)
            continue
        clear.append(metric)
        if evaluation.state(metric, best, "random") not in ("better", "worse"):
            unclear.append(question)
        else:
            winners.setdefault(best, []).append(question)
    parts = [f"{_title(method)} for {_listed(names)}" for method, names in winners.items()]
    named = list(winners)
    if named and not unclear and any(_is_slow(name) for name in named):
        ranking = evaluation.ranking(clear[0])
        fast = next((name for name, _ in ranking if not _is_slow(name)), None)
        if fast is not None and fast not in named:
            parts.append(f"{_title(fast)} if speed matters")
            named.append(fast)
    if unclear:
        parts.append(f"no map is clearly better than a random one for {_listed(unclear)}")
    sentences = [", ".join(parts)] if parts else []
    for index, method in enumerate(named):
        ties = [
            _title(other)
            for other in evaluation.main_methods
            if other not in named[: index + 1]
            and not {"better", "worse"} & {evaluation.state(metric, method, other) for metric in clear}
        ]
        if ties:
            sentences.append(f"no clear difference between {_title(method)} and {_listed(ties)}")
    if best_of_few:
        best_means = (f"{_title(method)} for {_listed(names)}" for method, names in best_of_few.items())
        sentences.append(
            f"fewer than {MIN_CLEAR} images show no clear difference, and the best means are those of "
            f"{', '.join(best_means)}"
        )
    if not sentences:
        return ""
    count = len(evaluation.images)
    return f"On your {count} image{'' if count == 1 else 's'}: {'; '.join(sentences)}."


def _is_slow(label: str) -> bool:
    return is_slow(split_label(label)[0])


def _title(label: str) -> str:
    name, options = split_label(label)
    return f"{get_method(name).title} ({options})" if options else get_method(name).title


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# --- Page ------------------------------------------------------------------------------------------------------------


def write_page(evaluation: Tables, path: Path, charts: Mapping[str, Figure]) -> Path:
    """Write the page.

    Args:
        evaluation: the results to show.
        path: the HTML file.
        charts: charts by name, from `draw_charts`.
    """
    return write_html(
        path,
        "evaluation",
        evaluation=evaluation,
        verdict=verdict(evaluation),
        groups={name: group for name, group in GROUPS.items() if name in evaluation.groups},
        charts={name: _image(figure, "svg") for name, figure in charts.items()},
        grids=[_image(grid, "png") for grid in evaluation.grids],
        confidence=round(100 * CONFIDENCE),
        baselines=sum(map(evaluation.is_baseline, evaluation.methods)),
    )


def _image(figure: Figure, suffix: str) -> dict[str, Any]:
    """Return a figure as a data URI, and its width on the page."""
    content = base64.b64encode(figure_bytes(figure, f".{suffix}")).decode()
    kind = {"svg": "svg+xml", "png": "png"}[suffix]
    return {"data": f"data:image/{kind};base64,{content}", "width": round(_PIXELS * figure.get_figwidth())}
