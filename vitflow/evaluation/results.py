"""`Evaluation`: the result of `evaluate`, with export to Markdown, JSON, CSV, pandas, figures and a page."""

import csv
import io
import json
import os
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError
from vitflow.evaluation.report import draw_bars, draw_charts, write_page
from vitflow.evaluation.tables import Table, Tables
from vitflow.evaluation.verdict import counted, notes_on, undefined_values, verdict
from vitflow.files import write_atomically
from vitflow.folder.columns import escape_formula
from vitflow.images.figures import bundle, html_table, save_figure


class Evaluation(Tables):
    """Results of `evaluate`; see `Tables` for its attributes.

    `rows` is the tidy table, a row per image, method and metric; `table` and `differences` have the estimates of a
    metric.
    """

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Sentences to show with the tables."""
        return (*notes_on(self), *undefined_values(self), *self.skipped)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        measured = f"{counted(len(self.main_methods), 'method')}, {counted(len(self.metrics), 'metric')}"
        return f"Evaluation({self.model} on {self.data}: {measured}{failed})"

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

    def to_pandas(self) -> Any:
        """Return `rows` as a pandas DataFrame.

        Raises:
            OptionError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise OptionError("to_pandas() requires pandas: pip install pandas, or use rows.") from error
        return pandas.DataFrame(self.rows)

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
            "verdict": verdict(self),
            "metrics": {metric.name: asdict(metric) for metric in self.metrics},
            "summary": [
                {"metric": metric.name, "method": row.method, "baseline": row.baseline, **asdict(row.estimate)}
                for metric in self.metrics
                for row in self.table(metric.name)
            ],
            "differences": [
                {"metric": metric.name, "first": pair.first, "second": pair.second, **asdict(pair.estimate)}
                | {"above": pair.above, "clear": pair.is_clear}
                for metric in self.metrics
                for pair in self.differences(metric.name)
            ],
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
            record["correlation"] = {"images": len(self.correlation), "spearman": self.correlations()}
        return record

    def to_markdown(self) -> str:
        """Return the verdict, and tables of means ± standard errors for each group, baselines last, with the notes."""
        blocks = [*filter(None, [verdict(self)]), *(table.to_markdown() for table in self._shown())]
        if self.correlation is not None:
            blocks.append(f"Mean ± standard deviation over {counted(len(self.correlation), 'image')}, {self.model}.")
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
        for index, figure in enumerate(self.grids, start=1):
            save_figure(figure, folder / "figures" / f"grid-{index}.png")
        charts = draw_charts(self)
        for name, figure in charts.items():
            for suffix in ("png", "svg"):
                save_figure(figure, folder / "figures" / f"{name}.{suffix}")
        return write_page(self, folder / "report.html", charts, self.notes)


def _write(path: Path, text: str) -> None:
    with write_atomically(path) as file:
        # Names that are not valid UTF-8 are escaped in JSON and CSV.
        file.write(text.encode("utf-8", "backslashreplace"))
