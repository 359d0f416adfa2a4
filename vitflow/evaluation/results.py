"""`Evaluation`: results over all images as tables, differences between methods, files and an HTML report."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, unknown_name
from vitflow.evaluation.charts import draw_bars, save_charts
from vitflow.evaluation.page import verdict, write_page
from vitflow.evaluation.statistics import defined_means
from vitflow.evaluation.tables import Tables
from vitflow.files import write_atomically
from vitflow.images.figures import bundle, html_table, save_figure


class Evaluation(Tables):
    """Results of `evaluate`, with export to Markdown, JSON, CSV, figures and HTML; see `Tables` for its attributes."""

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
        if self.overlaps is not None:
            record["accumulated_mean_iou"] = self.accumulated_mean_iou()
        if self.fractions is not None:
            record["curves"] = {"fractions": self.fractions.tolist()} | {
                name: dict(zip(self.methods, _mean_curves(self.curves[name]), strict=True)) for name in self.curves
            }
        if self.randomisation is not None:
            means = _mean_curves(self.randomisation.transpose(0, 2, 1))
            record["randomisation"] = {"stages": list(self.stages)} | dict(zip(self.methods, means, strict=True))
        if self.correlation is not None:
            record["correlation"] = self.correlation.to_dict()
        return record

    def to_markdown(self, group: str | None = None) -> str:
        """Return tables of means ± standard errors, one per group of metrics, baselines last.

        Args:
            group: return only this group, without notes.
        """
        blocks = [self.overview(name).to_markdown() for name in self.groups if group in (None, name)]
        if group is None and self.correlation is not None:
            blocks.append(self.correlation.to_markdown().rstrip())
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
        charts = save_charts(self, path / "figures")
        return write_page(self, path / "report.html", charts)


def _mean_curves(values: NDArray[np.float64]) -> list[list[float | None]]:
    """Return the mean over images of [images, methods, points] without NaN; None if no value is left."""
    return [[None if np.isnan(mean) else mean for mean in row] for row in defined_means(values).tolist()]


def _write(path: Path, text: str) -> Path:
    with write_atomically(path) as file:
        # Names that are not valid UTF-8 are escaped in JSON and CSV.
        file.write(text.encode("utf-8", "backslashreplace"))
    return path
