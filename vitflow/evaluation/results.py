"""`Evaluation`: the rows of a run as tables, differences between methods, files and an HTML report."""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, unknown_name
from vitflow.evaluation.datasets import Dataset
from vitflow.evaluation.measuring import Protocol
from vitflow.evaluation.metrics import GROUPS, METRICS, Metric
from vitflow.evaluation.report import draw_bars, draw_charts, verdict, write_page
from vitflow.evaluation.statistics import defined_means, optional
from vitflow.evaluation.tables import Tables
from vitflow.files import write_atomically
from vitflow.images.figures import bundle, html_table, save_figure
from vitflow.runs.columns import kinds_in

_TWIN_NOTE = (
    "Each method is followed by its blurred twin, the same map after a Gaussian blur of one patch. Blur improves "
    "localisation, because objects are larger than a patch, and worsens deletion. A method that improves both does "
    "more than blur."
)
_REPLACED = {
    "drop": "Tokens of removed patches are dropped from the sequence.",
    "blank": "Removed patches are filled with the image's mean colour.",
    "blur": "Removed patches are blurred.",
}


class Evaluation(Tables):
    """Results of `evaluate`, with export to Markdown, JSON, CSV, figures and HTML; see `Tables` for its attributes."""

    @classmethod
    def of_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        *,
        dataset: Dataset,
        model: str,
        protocol: Protocol,
        metrics: Sequence[Metric],
        settings: Mapping[str, Any],
        notes: Sequence[str] = (),
    ) -> Self:
        """Collect the rows of all images.

        Args:
            rows: rows in the order of the data.
            dataset: the measured data.
            model: the model's id.
            protocol: the measured methods and groups.
            metrics: the metrics to show.
            settings: stored with the result.
            notes: additional notes.
        """
        rows = list(rows)
        measured = [row for row in rows if row["status"] == "measured"]
        known = ("input", *kinds_in("measured"), "seconds", "grid")
        shown = tuple(metric for metric in metrics if any(metric.group in row["groups"] for row in measured))
        stored = {name for row in measured for entry in row["values"].values() for name in entry}
        series = sorted(stored - set(METRICS))
        correlation = [row["correlation"] for row in measured if "correlation" in row]
        tables = cls(
            data=dataset.name,
            model=model,
            methods=tuple(protocol.labels),
            metrics=shown,
            images=tuple({name: row.get(name) for name in known} for row in measured),
            failures=tuple(row for row in rows if row["status"] != "measured"),
            values={metric.name: _stacked(measured, protocol.labels, metric.name) for metric in shown},
            series={name: _stacked(measured, protocol.labels, name) for name in series},
            stages=tuple(next((row["stages"] for row in measured if "stages" in row), ())),
            correlation=np.array(correlation, dtype=np.float64) if correlation else None,
            settings=dict(settings),
            unchecked=protocol.unchecked,
        )
        return replace(tables, notes=(*_notes(tables, dataset, protocol), *_undefined(tables), *notes))

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        counts = ", ".join(
            f"{len(items)} {word}{'' if len(items) == 1 else 's'}"
            for items, word in ((self.main_methods, "method"), (self.metrics, "metric"))
        )
        return f"Evaluation({self.model} on {self.data}: {counts}{failed})"

    def __str__(self) -> str:
        return self.to_markdown()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return the notebook display: a table per group of metrics, and a bar chart of the first group."""
        tables = [html_table(table.rows, table.columns) for table in map(self.overview, self.groups)]
        bars = draw_bars(self, [self.groups[0]]) if self.groups else None
        return bundle(repr(self), bars, tables)

    def to_dict(self) -> dict[str, Any]:
        """Return all tables, pairs and mean curves as JSON data, without the values of each image."""
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
            "verdict": verdict(self),
            "metrics": {metric.name: asdict(metric) for metric in self.metrics},
            "summary": self.summary().to_dicts(),
            "differences": self.pairs().to_dicts(),
        }
        lines = {name: self._mean_lines(name) for name in self.series}
        if "overlap" in lines:
            record["accumulated_mean_iou"] = self.accumulated_mean_iou()
        if self.fractions is not None:
            record["curves"] = {"fractions": self.fractions.tolist()}
            record["curves"] |= {name: lines[name] for name in ("deletion", "insertion")}
        if "cascade" in lines:
            record["randomisation"] = {"stages": list(self.stages)} | lines["cascade"]
        if self.correlation is not None:
            record["correlation"] = {"images": len(self.correlation), "spearman": self.correlations().to_dicts()}
        return record

    def _mean_lines(self, name: str) -> dict[str, list[float | None]]:
        """Return the mean over images of a series for each method, without NaN; None if no value is left."""
        means = defined_means(self.series[name]).tolist()
        return {method: list(map(optional, line)) for method, line in zip(self.methods, means, strict=True)}

    def to_markdown(self, group: str | None = None) -> str:
        """Return tables of means ± standard errors, one per group of metrics, baselines last.

        Args:
            group: return only this group, without notes.
        """
        blocks = [self.overview(name).to_markdown() for name in self.groups if group in (None, name)]
        if group is None and self.correlation is not None:
            blocks += [table.to_markdown() for table in self.correlation_tables()]
            images = f"{len(self.correlation)} image{'s' * (len(self.correlation) > 1)}"
            blocks.append(f"Mean ± standard deviation over {images}, {self.model}.")
        if group is None:
            departures = "; ".join(f"{label}: {text}" for label, text in self.departures.items() if text)
            blocks += [f"Differences from publications: {departures}."] if departures else []
            blocks += [f"{self.data}; {self.model}.", *self.notes]
        return "\n\n".join(blocks) + "\n"

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything to a folder, or only the tables to a file (.json, .md or .csv).

        The folder contains `results.csv` (a row per image, method and metric), `summary.csv`, `differences.csv`,
        `summary.json`, the figures as PNG and SVG, and `report.html`, which shows everything on one page.

        Returns:
            Path of the HTML report or of the file.

        Raises:
            OptionError: the file type is not supported.
        """
        path = Path(path)
        suffix = path.suffix.lower()
        texts: dict[str, Callable[[], str]] = {
            ".json": lambda: json.dumps(self.to_dict(), indent=1) + "\n",
            ".md": self.to_markdown,
            ".csv": lambda: self.summary().to_csv(),
        }
        if suffix in texts:
            return _write(path, texts[suffix]())
        if suffix and not path.is_dir() and suffix in (".html", ".txt", ".png", ".pdf", ".svg", ".jsonl", ".parquet"):
            raise OptionError(unknown_name("file type", suffix, texts) + " A name without a suffix is a folder.")
        for name, table in {"results": self.results(), "summary": self.summary(), "differences": self.pairs()}.items():
            _write(path / f"{name}.csv", table.to_csv())
        _write(path / "summary.json", texts[".json"]())
        for index, figure in enumerate(self.grids, start=1):
            save_figure(figure, path / "figures" / f"grid-{index}.png")
        charts = draw_charts(self)
        for name, figure in charts.items():
            for suffix in ("png", "svg"):
                save_figure(figure, path / "figures" / f"{name}.{suffix}")
        return write_page(self, path / "report.html", charts)


def _stacked(rows: Sequence[Mapping[str, Any]], labels: Sequence[str], name: str) -> NDArray[np.float64]:
    """Return a value of all rows and methods, [images, methods, …]; NaN if it is undefined or was not measured."""
    entries = [[row["values"].get(label, {}).get(name) for label in labels] for row in rows]
    shape = next((np.shape(value) for entry in entries for value in entry if value is not None), ())
    empty = np.full(shape, np.nan)
    return np.array([[empty if value is None else value for value in entry] for entry in entries], dtype=np.float64)


def _notes(tables: Tables, dataset: Dataset, protocol: Protocol) -> list[str]:
    """Return notes on data, targets, replacement, controls, grids and sanity checks."""
    images = tables.images
    count, failed = len(images), len(tables.failures)
    measured = f"{count} measured, {failed} failed" if failed else "all measured"
    labelled = sum(image["target_source"] == "label" for image in images)
    target = "the labelled class" if labelled else "the predicted class"
    if 0 < labelled < count:
        target += (
            f" on {_count(labelled, 'image')}, and the predicted class on the other {count - labelled}, whose labels "
            "are not classes of the model"
        )
    notes = [
        f"{dataset.kind}, {measured}. Tables show means over images ± standard error.",
        f"Class-specific methods explain {target}.",
    ]
    if "faithfulness" in protocol.groups:
        notes.append(f"{_REPLACED[protocol.replace]} Curves have {protocol.points} points.")
    if protocol.blurred_twin:
        notes.append(_TWIN_NOTE)
    if "grid" in protocol.groups:
        grids = [tuple(image["grid"]) for image in images if image["grid"]]
        made = f"{_count(len(grids), 'target')} in {_count(len(set(grids)), 'grid')}" if grids else "no grid"
        notes.append(
            f"The grid pointing game has {made} of four images of different classes, drawn with the seed among images "
            "whose labelled class is predicted with a probability above 0.5."
        )
    checked = sum("sanity" in image["groups"] for image in images)
    if checked:
        notes.append(f"The sanity checks used {_count(checked, 'image')}.")
        if protocol.unchecked:
            notes[-1] += (
                f" Methods without sanity checks, because they run the model many times: "
                f"{', '.join(protocol.unchecked)}; select a method with --method to check it."
            )
    return notes


def _undefined(tables: Tables) -> list[str]:
    """Return notes on undefined values, which the means exclude."""
    notes = []
    for name, group in GROUPS.items():
        counts: dict[str, int] = {}
        for metric in (metric for metric in tables.metrics if metric.group == name and group.undefined):
            missing = np.isnan(tables.measured_values(metric)).sum(axis=0).tolist()
            for label, count in zip(tables.methods, missing, strict=True):
                if tables.is_measured(label, metric):
                    counts[label] = max(counts.get(label, 0), count)
        listed = [f"{label} on {_count(count, 'image')}" for label, count in counts.items() if count]
        if listed:
            everywhere = len(listed) == len(tables.methods) and len(set(counts.values())) == 1
            where = f"all methods on {_count(max(counts.values()), 'image')}" if everywhere else ", ".join(listed)
            notes.append(f"Undefined values in {name}, because {group.undefined}: {where}.")
    return notes


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}".replace(",", " ")


def _write(path: Path, text: str) -> Path:
    with write_atomically(path) as file:
        # Names that are not valid UTF-8 are escaped in JSON and CSV.
        file.write(text.encode("utf-8", "backslashreplace"))
    return path
