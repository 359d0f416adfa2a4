"""Write an evaluation into files: tables as CSV and JSON, figures, and the page.

Text that a spreadsheet would take for a formula stands in CSV with an apostrophe before it
(see `vitflow.folder.spreadsheet`).
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from vitflow.errors import OptionError, unknown_name
from vitflow.evaluation.charts import save_charts
from vitflow.evaluation.page import write_page
from vitflow.evaluation.results import Evaluation
from vitflow.folder.spreadsheet import plain_cell
from vitflow.pictures.files import write_atomically

_PICTURE = ("input", "asked", "class_index", "class_name", "probability", "predicted_index", "region_share")
_ESTIMATE = ("mean", "standard_error", "low", "high", "count", "undefined")


def save(evaluation: Evaluation, path: Path) -> Path:
    """Write everything into a folder, or the tables alone into a .json, .md or .csv; see `Evaluation.save`."""
    writers: dict[str, Callable[[Evaluation], str]] = {
        ".json": summary_json,
        ".md": Evaluation.to_markdown,
        ".csv": summary_csv,
    }
    suffix = path.suffix.lower()
    if suffix in writers:
        return _write(path, writers[suffix](evaluation))
    if suffix and not path.is_dir() and suffix in (".html", ".txt", ".png", ".pdf", ".svg", ".jsonl", ".parquet"):
        raise OptionError(unknown_name("file type", suffix, writers) + " A name without a suffix is a folder.")
    _write(path / "results.csv", results_csv(evaluation))
    _write(path / "summary.csv", summary_csv(evaluation))
    _write(path / "differences.csv", differences_csv(evaluation))
    _write(path / "summary.json", summary_json(evaluation))
    return write_page(evaluation, path / "report.html", save_charts(evaluation, path / "figures"))


def summary_json(evaluation: Evaluation) -> str:
    """`Evaluation.to_dict()` as text."""
    return json.dumps(evaluation.to_dict(), indent=1) + "\n"


def results_csv(evaluation: Evaluation) -> str:
    """A row per picture, method and metric; the value is empty where it is not defined."""
    rows: list[Sequence[Any]] = [[*_PICTURE, "method", "metric", "value"]]
    for number, picture in enumerate(evaluation.pictures):
        known = [picture.get(name) for name in _PICTURE]
        metrics = [metric for metric in evaluation.metrics if metric.group in picture["groups"]]
        for place, method in enumerate(evaluation.methods):
            for metric in metrics:
                value = evaluation.values[metric.name][number, place]
                rows.append([*known, method, metric.name, "" if np.isnan(value) else float(value)])
    return _csv(rows)


def summary_csv(evaluation: Evaluation) -> str:
    """A row per metric and method: mean, standard error, interval, how many pictures have a value."""
    rows: list[Sequence[Any]] = [["metric", "better", "method", "baseline", *_ESTIMATE]]
    for metric in evaluation.metrics:
        for row in evaluation.table(metric.name):
            estimate = asdict(row.estimate)
            rows.append([metric.name, metric.better, row.method, row.baseline, *map(estimate.get, _ESTIMATE)])
    return _csv(rows)


def differences_csv(evaluation: Evaluation) -> str:
    """A row per metric and pair of methods: first − second on the same pictures."""
    rows: list[Sequence[Any]] = [["metric", "first", "second", *_ESTIMATE, "above", "clear"]]
    for metric in evaluation.metrics:
        for one in evaluation.differences(metric.name):
            estimate = asdict(one.estimate)
            rows.append([metric.name, one.first, one.second, *map(estimate.get, _ESTIMATE), one.above, one.is_clear])
    return _csv(rows)


def _csv(rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(map(plain_cell, row) for row in rows)
    return text.getvalue()


def _write(path: Path, text: str) -> Path:
    with write_atomically(path) as file:
        # Names that are not valid UTF-8 stand in JSON and CSV as escapes.
        file.write(text.encode("utf-8", "backslashreplace"))
    return path
