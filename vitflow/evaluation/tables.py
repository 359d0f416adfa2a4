"""Tables of an evaluation: values of all images, and estimates, differences and rankings for each metric."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import OptionError, check_known
from vitflow.evaluation.measures.localisation import accumulated_iou
from vitflow.evaluation.measures.references import LAYER_METHODS, REFERENCES
from vitflow.evaluation.metrics import METRICS, Metric, blurred_label, has_intervals, is_blurred
from vitflow.evaluation.statistics import (
    Difference,
    Estimate,
    defined_means,
    estimate_means,
    optional,
    paired_differences,
)
from vitflow.explaining.captions import departures_from_paper
from vitflow.folder.columns import escape_formula
from vitflow.images.typesetting import decimal
from vitflow.registry.method_table import BASELINES, METHODS, split_label

# Display names in the tables of rank correlation.
LAYER_TITLES = {
    "attention": "raw attention",
    "rollout": "attention rollout",
    "flow": "attention flow",
    "occlusion": "occlusion",
    "input_gradient": "input gradient",
}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with named columns, for export.

    Attributes:
        columns: their names.
        rows: the values of each row; None if a value is undefined.

    >>> table = Table(("method", "mean"), [("rollout", 0.5), ("random", None)])
    >>> print(table.to_csv(), end="")
    method,mean
    rollout,0.5
    random,
    >>> print(table.to_markdown())
    | method | mean |
    | --- | ---: |
    | rollout | 0.5 |
    | random | – |
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts for JSON."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]

    def to_csv(self) -> str:
        """Return the rows as CSV; undefined values are empty, and cells that look like formulas are escaped."""
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(map(escape_formula, row) for row in [self.columns, *self.rows])
        return text.getvalue()

    def to_markdown(self) -> str:
        """Return a Markdown table, with all columns but the first aligned to the right."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        rows = [["–" if value is None else str(value) for value in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(row)} |" for row in [self.columns, rule, *rows])

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            OptionError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise OptionError("to_pandas() requires pandas: pip install pandas, or use to_csv().") from error
        return pandas.DataFrame(self.to_dicts(), columns=list(self.columns))


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the table of a metric.

    Attributes:
        method: its label.
        baseline: True if the method does not depend on the model.
        measured: True if the metric was measured for the method.
        estimate: the mean over images, with its standard error and interval.
    """

    method: str
    baseline: bool
    measured: bool
    estimate: Estimate


@dataclass(frozen=True, eq=False, repr=False)
class Tables:
    """Values of an evaluation, one per image, method and metric, and the tables computed from them.

    Attributes:
        data: name of the data set.
        model: the model's id.
        methods: labels, baselines last.
        metrics: the requested metrics that were measured.
        rows: the row of each image, from `measure`, or with its error.
        settings: all other settings that the numbers depend on, as JSON data.
        kind: the kind of the images.
        skipped: notes on groups and methods that were left out.
        grids: figures of some grids of four images with their maps, if grids were measured and saved.
    """

    data: str
    model: str
    methods: tuple[str, ...]
    metrics: tuple[Metric, ...]
    rows: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "images"
    skipped: tuple[str, ...] = ()
    grids: tuple[Figure, ...] = ()

    @cached_property
    def images(self) -> tuple[Mapping[str, Any], ...]:
        """Rows of the measured images: name, class, probability, share of the area covered by the region, …."""
        return tuple(row for row in self.rows if row["status"] == "measured")

    @cached_property
    def failures(self) -> tuple[Mapping[str, Any], ...]:
        """Rows of the images that could not be measured."""
        return tuple(row for row in self.rows if row["status"] != "measured")

    @cached_property
    def values(self) -> dict[str, NDArray[np.float64]]:
        """For each metric float64 [images, methods], NaN if undefined or not measured."""
        return {metric.name: self._stacked(metric.name) for metric in self.metrics}

    @cached_property
    def series(self) -> dict[str, NDArray[np.float64]]:
        """Measured values with several numbers per image and method, float64 [images, methods, numbers].

        They are "overlap" of `Localisation`, the "deletion" and "insertion" curves of the target's probability, and
        "cascade", Spearman with the original map at each stage of randomisation.
        """
        stored = {name for image in self.images for values in image["values"].values() for name in values}
        return {name: self._stacked(name) for name in sorted(stored - set(METRICS))}

    def _stacked(self, name: str) -> NDArray[np.float64]:
        entries = [[image["values"].get(label, {}).get(name) for label in self.methods] for image in self.images]
        shape = next((np.shape(value) for entry in entries for value in entry if value is not None), ())
        empty = np.full(shape, np.nan)
        return np.array([[empty if value is None else value for value in entry] for entry in entries], dtype=np.float64)

    @property
    def stages(self) -> list[str]:
        """Names of the stages of randomisation, from the top of the network down."""
        return next((image["stages"] for image in self.images if "stages" in image), [])

    @cached_property
    def correlation(self) -> NDArray[np.float64] | None:
        """Rank correlation by layer if it was measured, [images, references, methods, layers]."""
        measured = [image["correlation"] for image in self.images if "correlation" in image]
        return np.array(measured, dtype=np.float64) if measured else None

    @property
    def groups(self) -> list[str]:
        """Groups of the metrics, in order, and "correlation" if it was measured."""
        groups = list(dict.fromkeys(metric.group for metric in self.metrics))
        return groups if self.correlation is None else [*groups, "correlation"]

    def is_baseline(self, method: str) -> bool:
        """Return True if the method does not depend on the model."""
        return split_label(method)[0] in BASELINES

    @property
    def main_methods(self) -> list[str]:
        """Methods without baselines and blurred controls."""
        return [name for name in self.methods if not (self.is_baseline(name) or is_blurred(name))]

    def is_measured(self, method: str, metric: Metric) -> bool:
        """Return True if the metric was measured for the method; blurred controls have no sanity checks or grids."""
        if metric.group == "intervals":
            return has_intervals(self.settings.get("options", {}).get(method, {}))
        if metric.group == "sanity" and method in self.settings.get("unchecked", ()):
            return False
        return not (is_blurred(method) and metric.group in ("sanity", "grid"))

    @property
    def departures(self) -> dict[str, str | None]:
        """Text on how the maps of each method differ from its publication; None for unpublished methods."""
        names, options = self.settings.get("methods", {}), self.settings.get("options", {})
        known = [label for label in self.methods if names.get(label) in METHODS]
        return {label: departures_from_paper(METHODS[names[label]], options[label]) for label in known}

    @property
    def fractions(self) -> NDArray[np.float64] | None:
        """Shares of removed patches at each point of the curves; None without faithfulness."""
        return np.linspace(0.0, 1.0, self.series["deletion"].shape[-1]) if "deletion" in self.series else None

    def mean_lines(self, name: str) -> dict[str, list[float | None]]:
        """Return the mean over images of a series for each method, without NaN; None if no value is left."""
        means = defined_means(self.series[name]).tolist()
        return {method: list(map(optional, line)) for method, line in zip(self.methods, means, strict=True)}

    def table(self, metric: str) -> list[TableRow]:
        """Return the table of a metric: a row per method, in the requested order.

        Raises:
            OptionError: the metric was not measured.
        """
        check_known("metric of this evaluation", metric, self.values)
        return list(self._tables[metric])

    @cached_property
    def _tables(self) -> dict[str, list[TableRow]]:
        tables = {}
        for metric in self.metrics:
            estimates = estimate_means(self.measured_values(metric), limits=metric.limits, share=metric.share)
            rows = []
            for method, estimate in zip(self.methods, estimates, strict=True):
                measured = self.is_measured(method, metric)
                shown = estimate if measured else replace(estimate, undefined=0)
                rows.append(TableRow(method, self.is_baseline(method), measured, shown))
            tables[metric.name] = rows
        return tables

    def differences(self, metric: str) -> list[Difference]:
        """Return the paired differences of all methods, and of each method and its blurred control.

        Raises:
            OptionError: the metric was not measured.
        """
        check_known("metric of this evaluation", metric, self.values)
        return list(self._differences[metric].values())

    def difference(self, metric: str, first: str, second: str) -> Difference | None:
        """Return first minus second; None for a method and itself, or another method's blurred control."""
        check_known("metric of this evaluation", metric, self.values)
        pair = self._differences[metric].get((first, second))
        reverse = self._differences[metric].get((second, first))
        return pair if reverse is None else reverse.reversed()

    @cached_property
    def _differences(self) -> dict[str, dict[tuple[str, str], Difference]]:
        pairs = [
            (i, j)
            for (i, first), (j, second) in combinations(enumerate(self.methods), 2)
            if second == blurred_label(first) or not (is_blurred(first) or is_blurred(second))
        ]
        differences = {}
        for metric in self.metrics:
            values = self.measured_values(metric)
            bounds: Any = {"limits": metric.limits, "share": metric.share}
            estimated = paired_differences(list(self.methods), values, pairs, **bounds)
            differences[metric.name] = {(pair.first, pair.second): pair for pair in estimated}
        return differences

    def measured_values(self, metric: Metric) -> NDArray[np.float64]:
        """Return the values of the metric on the images that it was measured on."""
        measured = np.array([metric.group in image["groups"] for image in self.images], dtype=np.bool_)
        return self.values[metric.name][measured]

    def count(self, metric: str) -> int:
        """Return the number of images with a value of the metric for any method."""
        return max(row.estimate.count for row in self.table(metric))

    def ranking(self, metric: str) -> list[tuple[str, float]]:
        """Return methods and their means, best first, without baselines and blurred controls."""
        main, rows = self.main_methods, self.table(metric)
        known = [(row.method, mean) for row in rows if row.method in main and (mean := row.estimate.mean) is not None]
        return sorted(known, key=lambda pair: pair[1], reverse=METRICS[metric].better == "higher")

    def best(self, metric: str) -> list[str]:
        """Return the method with the best mean, and those whose means are displayed as the same number."""
        ranking = self.ranking(metric)
        return [method for method, mean in ranking if decimal(mean) == decimal(ranking[0][1])]

    def state(self, metric: str, first: str, second: str) -> str:
        """Return "better" or "worse" if the first method clearly is, "unclear", or "" for a pair without difference."""
        pair = self.difference(metric, first, second)
        if pair is None or pair.estimate.mean is None or not pair.is_clear:
            return "" if pair is None else "unclear"
        return "better" if (pair.estimate.mean > 0) == (METRICS[metric].better == "higher") else "worse"

    def overview(self, group: str) -> Table:
        """Return the means ± standard errors of a group as text: a row per method, a column per metric."""
        metrics = [metric for metric in self.metrics if metric.group == group]
        columns = [
            [str(row.estimate) if row.measured else "not measured" for row in self.table(metric.name)]
            for metric in metrics
        ]
        heads = [f"{metric.title} {metric.arrow}" for metric in metrics]
        return Table(("method", *heads), list(zip(self.methods, *columns, strict=True)))

    def accumulated_mean_iou(self) -> dict[str, float | None]:
        """Return the mean IoU accumulated over all images for each method, as reported by Chefer et al."""
        if "overlap" not in self.series:
            return {}
        ious: dict[str, float | None] = {}
        for method, overlaps in zip(self.methods, self.series["overlap"].transpose(1, 0, 2), strict=True):
            defined = overlaps[~np.isnan(overlaps).any(axis=1)]
            ious[method] = accumulated_iou(defined) if len(defined) else None
        return ious

    @property
    def correlation_means(self) -> NDArray[np.float64]:
        """Means and standard deviations of rank correlation over images, [2, references, methods, layers]."""
        if self.correlation is None:
            return np.empty((2, len(REFERENCES), len(LAYER_METHODS), 0))
        spread = np.ma.masked_invalid(self.correlation).std(axis=0, ddof=1).filled(np.nan)
        return np.stack([defined_means(self.correlation), spread])

    def correlations(self) -> Table:
        """Return a row per reference, method and layer: mean and standard deviation of Spearman's ρ over images."""
        means = np.moveaxis(self.correlation_means, 0, -1)  # [references, methods, layers, 2]
        cells = product(REFERENCES, LAYER_METHODS, range(1, means.shape[2] + 1))
        rows = [(*cell, *map(optional, pair)) for cell, pair in zip(cells, means.reshape(-1, 2), strict=True)]
        return Table(("reference", "method", "layer", "mean", "standard_deviation"), rows)

    def correlation_tables(self) -> list[Table]:
        """Return a table per reference, as in the paper: mean ± standard deviation, a row per method."""
        tables = []
        for reference, means, spreads in zip(REFERENCES, *self.correlation_means, strict=True):
            head = (f"Spearman with {LAYER_TITLES[reference]}", *(f"L{layer + 1}" for layer in range(means.shape[1])))
            lines = zip(LAYER_METHODS, means.tolist(), spreads.tolist(), strict=True)
            rows = [(LAYER_TITLES[name], *map(_with_spread, *numbers)) for name, *numbers in lines]
            tables.append(Table(head, rows))
        return tables


def _with_spread(mean: float, spread: float) -> str:
    return decimal(optional(mean), 2) + ("" if np.isnan(spread) else f" ± {spread:.2f}")
