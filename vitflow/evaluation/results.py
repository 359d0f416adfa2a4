"""`Evaluation`: the result of `evaluate`, with export to Markdown, JSON, CSV, charts and an HTML page."""

import csv
import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitflow.errors import printable
from vitflow.evaluation.metrics import GROUPS, METRICS, Metric
from vitflow.evaluation.statistics import CONFIDENCE
from vitflow.evaluation.tables import TableRow, Tables
from vitflow.evaluation.verdict import counted, notes_on, verdict
from vitflow.files import write_atomically
from vitflow.folder.columns import escape_formula
from vitflow.images.figures import bundle, figure_bytes, html_table, save_figure
from vitflow.images.typesetting import (
    AXIS,
    BAR,
    BASELINE,
    BODY,
    GREY,
    INK,
    LINES,
    MOST_WIDTH,
    TITLE,
    label_width,
    measure,
    new_chart,
    settled,
    style_axes,
    wrap,
)
from vitflow.viewer.pages import Page, data_uri, make_html, thumbnail

# Lengths in inches; browsers may draw labels a little wider than matplotlib, so they need the padding.
_ROW, _PANEL, _AROUND, _PAD, _TITLE_PAD = 0.19, 1.45, 0.55, 0.08, 0.3
# Maps of each photograph on the page, and the longer side of an image, in pixels.
_MAPS_SHOWN, _SIDE = 4, 420
# Lines and markers of methods, by turns.
_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
# CSS pixels per inch of every figure, so that their text has the same size.
_PIXELS = 108


class Evaluation(Tables):
    """Results of `evaluate`; see `Tables` for its attributes.

    `rows` is the tidy table, a row per image, method and metric; `table` and `differences` have the estimates of a
    metric.
    """

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences to show with the tables."""
        return (*notes_on(self), *self.skipped)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        measured = f"{counted(len(self.main_methods), 'method')}, {counted(len(self.metrics), 'metric')}"
        return f"Evaluation({self.model} on {self.data}: {measured}{failed})"

    def __str__(self) -> str:
        """Format for the terminal: the verdict, and the main numbers of each method."""
        sentences = "\n".join(answer.sentence for answer in verdict(self))
        return "\n\n".join(filter(None, [sentences, str(self.overview())]))

    def _repr_mimebundle_(self, **_: Any) -> Any:
        """Return the notebook display: a table per group of metrics, and a bar chart of the first group."""
        tables = map(self.overview, self.groups)
        bars = draw_bars(self, [self.metrics[0].group]) if self.metrics else None
        return bundle(repr(self), bars, [html_table(table.rows, table.columns) for table in tables])

    def to_csv(self) -> str:
        """Return `rows` as CSV; undefined values are empty, and cells that look like formulas are escaped."""
        text, rows = io.StringIO(newline=""), self.rows
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows(map(escape_formula, row) for row in [rows[0] if rows else [], *(row.values() for row in rows)])
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """Return all estimates, differences and mean curves as JSON data, without the values of each image."""
        record: dict[str, Any] = {
            "data": self.data,
            "model": self.model,
            "images": len(self.images),
            "failed": len(self.failures),
            "methods": list(self.methods),
            "baselines": [method for method in self.methods if self.is_baseline(method)],
            "departures_from_paper": self.departures,
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "verdict": [answer.sentence for answer in verdict(self)],
            "metrics": {metric.name: asdict(metric) for metric in self.metrics},
            "summary": [
                {"metric": metric.name, "method": row.method, "baseline": row.baseline, **asdict(row.estimate)}
                for metric in self.metrics
                for row in self.table(metric.name)
            ],
            "differences": [
                {"metric": metric.name, "first": pair.first, "second": pair.second, **asdict(pair.estimate)}
                | {"clear": pair.is_clear}
                for metric in self.metrics
                for pair in self.differences(metric.name)
            ],
        }
        if self.fractions:
            record["curves"] = {"fractions": self.fractions}
            record["curves"] |= {name: self.mean_lines(name) for name in ("deletion", "insertion")}
        return record

    def to_markdown(self) -> str:
        """Return the verdict, and tables of means ± standard errors for each group, baselines last, with the notes."""
        sentences = " ".join(answer.sentence for answer in verdict(self))
        blocks = [*filter(None, [sentences]), *(self.overview(name).to_markdown() for name in self.groups)]
        departures = "; ".join(f"{label}: {text}" for label, text in self.departures.items() if text)
        blocks += [f"Differences from publications: {departures}."] if departures else []
        return "\n\n".join([*blocks, f"{self.data}; {self.model}.", *self.notes]) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write everything to a folder.

        The folder contains `results.csv` (the tidy table), `summary.json`, the figures as PNG and SVG, and
        `report.html`, which shows everything on one page.

        Returns:
            Path of the HTML report.
        """
        folder = Path(folder)
        _write(folder / "results.csv", self.to_csv())
        _write(folder / "summary.json", json.dumps(self.to_dict(), indent=1) + "\n")
        charts = draw_charts(self)
        figures = {f"{name}.{suffix}": chart for name, chart in charts.items() for suffix in ("png", "svg")}
        figures |= {} if self.examples is None else {"examples.png": self.examples.figure()}
        for name, figure in figures.items():
            save_figure(figure, folder / "figures" / name)
        page = make_html(
            "evaluation",
            evaluation=self,
            verdict=verdict(self),
            notes=self.notes,
            groups={name: group for name, group in GROUPS.items() if name in self.groups},
            maps_shown=_MAPS_SHOWN,
            examples=self._shown_examples(),
            charts={name: _chart(figure) for name, figure in charts.items()},
            confidence=round(100 * CONFIDENCE),
            baselines=sum(map(self.is_baseline, self.methods)),
        )
        return Page(page).save(folder / "report.html")

    def _shown_examples(self) -> list[dict[str, Any]]:
        """Return the photographs of the page, each with the maps of the best methods."""
        examples = []
        best = [method for method, _ in self.ranking(self.lead.name)[:_MAPS_SHOWN]] if self.lead else []
        chosen = [self.methods.index(method) for method in self.methods if method in best]
        for maps in self.examples.images if self.examples else ():
            images = {"photograph": maps[0].image} | {self.methods[index]: maps[index].overlay() for index in chosen}
            shown = [{"title": title, "data": data_uri(thumbnail(image, _SIDE))} for title, image in images.items()]
            name, value = maps[0].source, self.extremes[maps[0].source]
            examples.append({"name": name, "value": value, "label": maps[0].label, "images": shown})
        return examples


def _write(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        # Names that are not valid UTF-8 are escaped in JSON and CSV.
        file.write(text.encode("utf-8", "backslashreplace"))


def _chart(figure: Figure) -> dict[str, Any]:
    """Return a figure as a data URI, and its width on the page."""
    return {"data": data_uri(figure_bytes(figure, ".svg"), "svg+xml"), "width": round(_PIXELS * figure.get_figwidth())}


# --- Charts ----------------------------------------------------------------------------------------------------------


def draw_charts(tables: Tables) -> dict[str, Figure]:
    """Return the bars of each group, and the curves of faithfulness, by name."""
    figures = {name: draw_bars(tables, [name]) for name in tables.groups}
    return figures | ({"curves": _draw_curves(tables)} if tables.fractions else {})


def draw_bars(tables: Tables, names: Sequence[str]) -> Figure:
    """Draw a panel for each of these metrics or groups: the mean of each measured method with its interval.

    Baselines are grey. A thin line marks the random map's mean in every panel.
    """
    metrics = [metric for metric in tables.metrics if metric.name in names or metric.group in names]
    methods = [name for name in tables.methods if any(tables.is_measured(name, metric) for metric in metrics)]
    labels = [printable(name) for name in methods]
    # A panel is as wide as the longest title, which the layout does not consider.
    panel = max(_PANEL, *(_TITLE_PAD + measure(_titled(metric), TITLE) for metric in metrics))
    figure = new_chart((label_width(labels) + panel * len(metrics), _AROUND + _ROW * len(labels)))
    figure.set_layout_engine("constrained", w_pad=_PAD)
    plots: Any = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(plots, metrics, strict=True):
        draw_panel(axes, metric, [row for row in tables.table(metric.name) if row.method in methods])
    first: Axes = plots[0]
    first.set_yticks(range(len(labels)), ["".join(wrap(name, MOST_WIDTH, BODY, lines=1)) for name in labels])
    for text in first.get_yticklabels():
        text.set_parse_math(False)
    first.set_ylim(len(labels) - 0.4, -0.6)
    return settled(figure)


def _titled(metric: Metric) -> str:
    return f"{metric.title} {metric.arrow}"


def draw_panel(axes: Axes, metric: Metric, rows: Sequence[TableRow]) -> None:
    """Draw the mean of each method with its interval; a thin line marks that of the random map."""
    means, lows, highs = (  # None becomes NaN
        np.array([getattr(row.estimate, name) for row in rows], dtype=np.float64) for name in ("mean", "low", "high")
    )
    positions = np.arange(len(rows))
    colors = [BASELINE if row.baseline else BAR for row in rows]
    axes.barh(positions, np.nan_to_num(means), height=0.68, color=colors, zorder=2)
    axes.hlines(positions, lows, highs, color=INK, linewidth=0.9, zorder=3)
    chance = next((row.estimate.mean for row in rows if row.method == "random"), None)
    if chance is not None:
        axes.axvline(chance, color=GREY, linewidth=0.7, linestyle=(0, (3, 2)), zorder=4)
    axes.axvline(0, color=AXIS, linewidth=0.6, zorder=1)
    style_axes(axes, _titled(metric))
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _draw_curves(tables: Tables) -> Figure:
    """Draw the mean deletion and insertion curves with a common legend, a line per method; baselines are grey."""
    methods = [name for name, line in tables.mean_lines("deletion").items() if any(value is not None for value in line)]
    methods.sort(key=tables.is_baseline)
    width = 7.0 + label_width([printable(method) for method in methods])
    figure = new_chart((width, max(2.8, 0.145 * len(methods) + 0.9)))
    plots: Any = figure.subplots(1, 2, sharey=True)
    for axes, name, verb in zip(plots, ("deletion", "insertion"), ("removed", "inserted"), strict=True):
        lines = tables.mean_lines(name)
        for number, method in enumerate(methods):
            turn, place = divmod(number, len(LINES))
            look: dict[str, Any] = {"color": LINES[place], "marker": _MARKERS[place], "linestyle": _STYLES[turn % 4]}
            if tables.is_baseline(method):
                look = {"color": GREY, "linestyle": _STYLES[1 + number % 3]}
            values = np.array(lines[method], dtype=np.float64)  # None becomes NaN
            axes.plot(tables.fractions, values, label=printable(method), linewidth=1.2, markersize=3.0, **look)
        style_axes(axes, f"{name}: highest patches {verb} first {METRICS[f'{name}_auc'].arrow}")
        axes.set_xlabel(f"share of patches {verb}", fontsize=TITLE, color=GREY)
        axes.margins(x=0.02)
    plots[0].set_ylabel("probability of the class", fontsize=TITLE, color=GREY)
    plots[0].set_ylim(bottom=0.0)
    handles, labels = plots[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=BODY, labelcolor=INK)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return settled(figure)
