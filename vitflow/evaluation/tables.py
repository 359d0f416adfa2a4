"""Values of an evaluation, and the estimates, differences and rankings computed from them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitflow.analysis.comparison import Comparison
from vitflow.errors import check_known
from vitflow.evaluation.metrics import METRICS, Metric, is_blurred
from vitflow.evaluation.statistics import (
    Difference,
    Estimate,
    defined_means,
    estimate_means,
    optional,
    paired_differences,
)
from vitflow.explaining.captions import departures_from_paper
from vitflow.folder.columns import kinds_in
from vitflow.images.typesetting import decimal
from vitflow.registry.choices import split_label
from vitflow.registry.method_table import BASELINES, METHODS

# Metrics to read first, if more than these are measured.
_MAIN = ("roc_auc", "pointing_game", "deletion_auc", "insertion_auc", "grid_auc")
# Columns of an image in the tidy table.
_IMAGE = tuple(kinds_in("results"))


class Table(NamedTuple):
    """Text in named columns, for display.

    >>> table = Table(("method", "mean"), [("rollout", "0.5")])
    >>> print(table.to_markdown())
    | method | mean |
    | --- | ---: |
    | rollout | 0.5 |
    >>> print(table)
    method   mean
    rollout   0.5
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def __str__(self) -> str:
        """Format in aligned columns for the terminal, all but the first to the right."""
        cells = [self.columns, *self.rows]
        first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
        lines = [[f"{row[0]:{first}}", *map(str.rjust, row[1:], widths)] for row in cells]
        return "\n".join("  ".join(line) for line in lines)

    def to_markdown(self) -> str:
        """Return a Markdown table, with all columns but the first aligned to the right."""
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        return "\n".join(f"| {' | '.join(row)} |" for row in [self.columns, rule, *self.rows])


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the table of a metric: the mean over images of a method, and whether it was measured for it at all.

    A baseline does not depend on the model.
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
        records: the record of each image, from `measure`, or with its error.
        settings: all other settings that the numbers depend on, as JSON data.
        kind: the kind of the images.
        skipped: notes on groups, methods and files that were left out.
        examples: maps of the images of `extremes` by all methods, if the evaluation was saved.
    """

    data: str
    model: str
    methods: tuple[str, ...]
    metrics: tuple[Metric, ...]
    records: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "images"
    skipped: tuple[str, ...] = ()
    examples: Comparison | None = None

    @cached_property
    def images(self) -> tuple[Mapping[str, Any], ...]:
        """Records of the measured images: name, class, probability, share of the area covered by the region, …."""
        return tuple(record for record in self.records if record["status"] == "measured")

    @cached_property
    def failures(self) -> tuple[Mapping[str, Any], ...]:
        """Records of the images that could not be measured."""
        return tuple(record for record in self.records if record["status"] != "measured")

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The tidy table: a row per image, method and metric, with the value; None if it is undefined."""
        return [
            {name: image.get(name) for name in _IMAGE}
            | {"method": method, "baseline": self.is_baseline(method), "metric": metric.name}
            | {"value": image["values"].get(method, {}).get(metric.name)}
            for image, method, metric in product(self.images, self.methods, self.metrics)
            if metric.group in image["groups"]
        ]

    @cached_property
    def values(self) -> dict[str, NDArray[np.float64]]:
        """For each metric float64 [images, methods], NaN if undefined or not measured."""
        return {metric.name: self._stacked(metric.name) for metric in self.metrics}

    @cached_property
    def series(self) -> dict[str, NDArray[np.float64]]:
        """Measured values with several numbers per image and method, float64 [images, methods, numbers].

        They are the "deletion" and "insertion" curves of the target's probability.
        """
        stored = {name for image in self.images for values in image["values"].values() for name in values}
        return {name: self._stacked(name) for name in sorted(stored - set(METRICS))}

    def _stacked(self, name: str) -> NDArray[np.float64]:
        entries = [[image["values"].get(label, {}).get(name) for label in self.methods] for image in self.images]
        shape = next((np.shape(value) for entry in entries for value in entry if value is not None), ())
        empty = np.full(shape, np.nan)
        return np.array([[empty if value is None else value for value in entry] for entry in entries], dtype=np.float64)

    @property
    def groups(self) -> list[str]:
        """Groups of the metrics, in order."""
        return list(dict.fromkeys(metric.group for metric in self.metrics))

    def is_baseline(self, method: str) -> bool:
        """Return True if the method does not depend on the model."""
        return split_label(method)[0] in BASELINES

    @property
    def main_methods(self) -> list[str]:
        """Methods without baselines and blurred controls."""
        return [name for name in self.methods if not (self.is_baseline(name) or is_blurred(name))]

    def is_measured(self, method: str, metric: Metric) -> bool:
        """Return True if the metric was measured for the method; controls are measured on one image and class only."""
        if metric.group == "sanity" and method in self.settings.get("unchecked", ()):
            return False
        return not (is_blurred(method) and metric.group in ("sanity", "grid", "sameness"))

    @property
    def departures(self) -> dict[str, str | None]:
        """Text on how the maps of each method differ from its publication; None for unpublished methods."""
        names, options = self.settings.get("methods", {}), self.settings.get("options", {})
        known = [label for label in self.methods if names.get(label) in METHODS]
        return {label: departures_from_paper(METHODS[names[label]], options[label]) for label in known}

    @property
    def fractions(self) -> list[float]:
        """Shares of removed patches at each point of the curves; empty without faithfulness."""
        points = self.series["deletion"].shape[-1] if "deletion" in self.series else 0
        return [float(share) for share in np.linspace(0.0, 1.0, points)]

    def mean_lines(self, name: str) -> dict[str, list[float | None]]:
        """Return the mean over images of a series for each method, without NaN; None if no value is left."""
        means = defined_means(self.series[name]).tolist()
        return {method: list(map(optional, line)) for method, line in zip(self.methods, means, strict=True)}

    # --- Estimates ---------------------------------------------------------------------------------------------------

    def table(self, metric: str) -> list[TableRow]:
        """Return the table of a metric: a row per method, in the requested order; OptionError if not measured."""
        check_known("metric of this evaluation", metric, self.values)
        return list(self._tables[metric])

    @cached_property
    def _tables(self) -> dict[str, list[TableRow]]:
        tables: dict[str, list[TableRow]] = {metric.name: [] for metric in self.metrics}
        for metric in self.metrics:
            estimates = estimate_means(self.measured_values(metric), limits=metric.limits, share=metric.share)
            for method, estimate in zip(self.methods, estimates, strict=True):
                measured = self.is_measured(method, metric)
                shown = estimate if measured else replace(estimate, undefined=0)
                tables[metric.name].append(TableRow(method, self.is_baseline(method), measured, shown))
        return tables

    def differences(self, metric: str) -> list[Difference]:
        """Return the paired differences of all methods and controls; OptionError as `table`."""
        check_known("metric of this evaluation", metric, self.values)
        return self._differences(METRICS[metric], self.methods)

    def difference(self, metric: str, first: str, second: str) -> Difference | None:
        """Return first minus second; None for a method and itself."""
        check_known("metric of this evaluation", metric, self.values)
        return None if first == second else self._differences(METRICS[metric], (first, second))[0]

    def _differences(self, metric: Metric, methods: Sequence[str]) -> list[Difference]:
        values = self.measured_values(metric)[:, [self.methods.index(method) for method in methods]]
        return paired_differences(list(methods), values, limits=metric.limits, share=metric.share)

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

    @cached_property
    def extremes(self) -> dict[str, float]:
        """The images with the best, the median and the worst mean over the methods, and this mean of `lead`."""
        if self.lead is None or not (columns := [self.methods.index(name) for name in self.main_methods]):
            return {}
        means = defined_means(self.values[self.lead.name][:, columns].T)
        order = np.argsort(means)[: int(np.isfinite(means).sum())]  # NaN last
        order = order[::-1] if self.lead.better == "higher" else order
        chosen = {int(order[place]) for place in (0, len(order) // 2, -1)} if len(order) else ()
        return {self.images[index]["input"]: float(means[index]) for index in order.tolist() if index in chosen}

    @property
    def lead(self) -> Metric | None:
        """The metric that `extremes` are chosen by: ROC-AUC, else insertion − deletion, else the first one."""
        leads = [metric for metric in self.metrics if metric.name in ("roc_auc", "gap")]
        return next(iter([*leads, *self.metrics]), None)

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

    # --- Tables for display ------------------------------------------------------------------------------------------

    @property
    def main_metrics(self) -> list[Metric]:
        """The metrics to read first, at most five: all if they are no more, else those of `_MAIN`, else the first."""
        few = len(self.metrics) <= len(_MAIN)
        main = [] if few else [METRICS[name] for name in _MAIN if name in self.values]
        return main or list(self.metrics[: len(_MAIN)])

    def overview(self, group: str | None = None) -> Table:
        """Return means ± standard errors: a row per method, a column per metric of a group, or per main metric."""
        columns = {"method": [*self.methods]}
        metrics = [metric for metric in self.metrics if metric.group == group]
        for metric in metrics if group else self.main_metrics:
            cells = [str(row.estimate) if row.measured else "not measured" for row in self.table(metric.name)]
            columns[f"{metric.title} {metric.arrow}"] = cells
        return Table(tuple(columns), list(zip(*columns.values(), strict=True)))
