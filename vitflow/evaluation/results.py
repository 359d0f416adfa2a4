"""`Evaluation`: the rows of a run as tables, differences between methods, files and an HTML report."""

import json
import os
from dataclasses import asdict, astuple, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitflow.evaluation.metrics import GROUPS
from vitflow.evaluation.report import draw_bars, draw_charts, verdict, write_page
from vitflow.evaluation.statistics import Estimate
from vitflow.evaluation.tables import Table, Tables
from vitflow.files import write_atomically
from vitflow.folder.columns import kinds_in
from vitflow.images.figures import bundle, html_table, save_figure

# Table columns of an image and of an estimate.
_IMAGE = tuple(kinds_in("results"))
_ESTIMATE = tuple(field.name for field in fields(Estimate))

_BLUR_NOTE = (
    "Each method is followed by its blurred control, the same map after a Gaussian blur of one patch. Blur improves "
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

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences to show with the tables."""
        return (*_notes(self), *_undefined(self), *self.skipped)

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
        bars = draw_bars(self, [self.metrics[0].group]) if self.metrics else None
        return bundle(repr(self), bars, [html_table(table.rows, table.columns) for table in self._shown()])

    def _shown(self) -> list[Table]:
        """Return the tables to display: one for each group, and those of rank correlation."""
        overviews = [self.overview(name) for name in self.groups if name != "correlation"]
        return overviews if self.correlation is None else [*overviews, *self.correlation_tables()]

    def results(self) -> Table:
        """Return a row per image, method and metric."""
        rows = [
            (*map(image.get, _IMAGE), method, metric.name, image["values"].get(method, {}).get(metric.name))
            for image in self.images
            for method in self.methods
            for metric in self.metrics
            if metric.group in image["groups"]
        ]
        return Table((*_IMAGE, "method", "metric", "value"), rows)

    def summary(self) -> Table:
        """Return a row per metric and method: mean, standard error, interval, and the number of images with a value."""
        rows = [
            (metric.name, metric.better, row.method, row.baseline, *astuple(row.estimate))
            for metric in self.metrics
            for row in self.table(metric.name)
        ]
        return Table(("metric", "better", "method", "baseline", *_ESTIMATE), rows)

    def pairs(self) -> Table:
        """Return a row per metric and pair of methods: first − second on the same images."""
        rows = [
            (metric.name, pair.first, pair.second, *astuple(pair.estimate), pair.above, pair.is_clear)
            for metric in self.metrics
            for pair in self.differences(metric.name)
        ]
        return Table(("metric", "first", "second", *_ESTIMATE, "above", "clear"), rows)

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
        lines = {name: self.mean_lines(name) for name in self.series}
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

    def to_markdown(self) -> str:
        """Return tables of means ± standard errors, one per group of metrics, baselines last, and the notes."""
        blocks = [table.to_markdown() for table in self._shown()]
        if self.correlation is not None:
            images = f"{len(self.correlation)} image{'s' * (len(self.correlation) > 1)}"
            blocks.append(f"Mean ± standard deviation over {images}, {self.model}.")
        departures = "; ".join(f"{label}: {text}" for label, text in self.departures.items() if text)
        blocks += [f"Differences from publications: {departures}."] if departures else []
        return "\n\n".join([*blocks, f"{self.data}; {self.model}.", *self.notes]) + "\n"

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write everything to a folder.

        The folder contains `results.csv` (a row per image, method and metric), `summary.csv`, `differences.csv`,
        `summary.json`, the figures as PNG and SVG, and `report.html`, which shows everything on one page.

        Returns:
            Path of the HTML report.
        """
        folder = Path(folder)
        for name, table in {"results": self.results(), "summary": self.summary(), "differences": self.pairs()}.items():
            _write(folder / f"{name}.csv", table.to_csv())
        _write(folder / "summary.json", json.dumps(self.to_dict(), indent=1) + "\n")
        for index, figure in enumerate(self.grids, start=1):
            save_figure(figure, folder / "figures" / f"grid-{index}.png")
        charts = draw_charts(self)
        for name, figure in charts.items():
            for suffix in ("png", "svg"):
                save_figure(figure, folder / "figures" / f"{name}.{suffix}")
        return write_page(self, folder / "report.html", charts)


def _notes(tables: Tables) -> list[str]:
    """Return notes on data, targets, replacement, controls, grids and sanity checks."""
    images, settings = tables.images, tables.settings
    count, failed = len(images), len(tables.failures)
    measured = f"{count} measured, {failed} failed" if failed else "all measured"
    labelled = sum(image["target_source"] == "label" for image in images)
    target = "the labelled class" if labelled else "the predicted class"
    if 0 < labelled < count:
        target += (
            f" on {_count(labelled, 'image')}, and the predicted class on the other {count - labelled}, whose labels "
            "are not classes of the model"
        )
    elif not labelled and "class" in tables.kind:
        target += ", because no label is a class of the model: pass its class names"
    notes = [
        f"{len(tables.rows)} {tables.kind}, {measured}. Tables show means over images ± standard error.",
        f"Class-specific methods explain {target}.",
    ]
    if turned := sum(image.get("turned", False) for image in images):
        notes.append(f"{_count(turned, 'image')} turned by EXIF: annotations are read in the frame that is displayed.")
    if "replace_by" in settings:
        notes.append(f"{_REPLACED[settings['replace_by']]} Curves have {settings['points']} points.")
    if settings["blurred_control"]:
        notes.append(_BLUR_NOTE)
    if "grid" in settings["groups"]:
        grids = [tuple(image["grid"]) for image in images if image["grid"]]
        made = f"{_count(len(grids), 'target')} in {_count(len(set(grids)), 'grid')}" if grids else "no grid"
        notes.append(
            f"The grid pointing game has {made} of four images of different classes, drawn with the seed among images "
            "whose labelled class is predicted with a probability above 0.5."
        )
    checked = sum("sanity" in image["groups"] for image in images)
    if checked:
        notes.append(f"The sanity checks used {_count(checked, 'image')}.")
        if settings["unchecked"]:
            notes[-1] += (
                f" Methods without sanity checks, because they run the model many times: "
                f"{', '.join(settings['unchecked'])}; select a method with --method to check it."
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


def _write(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        # Names that are not valid UTF-8 are escaped in JSON and CSV.
        file.write(text.encode("utf-8", "backslashreplace"))
