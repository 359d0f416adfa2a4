"""Tables of an evaluation: values of all images, and estimates, differences and rankings for each metric."""

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from itertools import combinations, product
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import check_known
from vitflow.evaluation.measures.localisation import accumulated_iou
from vitflow.evaluation.measures.references import LAYER_METHODS, REFERENCES, has_intervals
from vitflow.evaluation.measuring import is_twin, twin_of
from vitflow.evaluation.metrics import METRICS, Metric
from vitflow.evaluation.statistics import (
    RESAMPLES,
    Difference,
    Estimate,
    Table,
    defined_means,
    estimate_means,
    optional,
    paired_differences,
)
from vitflow.explaining.captions import departures_from_paper
from vitflow.explaining.method_table import BASELINES, METHODS, split_label
from vitflow.images.typesetting import decimal
from vitflow.runs.columns import kinds_in

# Table columns of an image and of an estimate.
_IMAGE = tuple(kinds_in("results"))
_ESTIMATE = tuple(field.name for field in fields(Estimate))

# Display names in the tables of rank correlation.
LAYER_TITLES = {
    "attention": "raw attention",
    "rollout": "attention rollout",
    "flow": "attention flow",
    "occlusion": "occlusion",
    "input_gradient": "input gradient",
}


@dataclass(frozen=True, slots=True)
class TableRow:
    """A row of the table of a metric.

    Attributes:
        method: its label.
        baseline: True if the method does not depend on the model.
        estimate: the mean over images, with its standard error and interval.
    """

    method: str
    baseline: bool
    estimate: Estimate


@dataclass(frozen=True, eq=False, repr=False)
class Tables:
    """Values of an evaluation, one per image, method and metric, and the tables computed from them.

    Attributes:
        data: name of the data set.
        model: the model's id.
        methods: labels, baselines last.
        metrics: the requested metrics that could be measured.
        images: metadata of each measured image: name, class, probability, share of the area covered by the region.
        failures: rows of the images that could not be measured.
        values: for each metric float64 [images, methods], NaN if undefined or not measured.
        series: values with several numbers per image and method, float64 [images, methods, numbers]: "overlap" of
            `Localisation`, the "deletion" and "insertion" curves of the target's probability, and "cascade", Spearman
            with the original map at each stage of randomisation.
        stages: names of the stages of randomisation, from the top of the network down.
        correlation: rank correlation by layer if requested, [images, references, methods, layers].
        settings: all other settings that the numbers depend on, as JSON data.
        notes: sentences to show with the tables.
        grids: figures of some grids of four images with their maps, if grids were measured and saved.
        unchecked: methods without sanity checks.
    """

    data: str
    model: str
    methods: tuple[str, ...]
    metrics: tuple[Metric, ...]
    images: tuple[Mapping[str, Any], ...]
    failures: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    series: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    correlation: NDArray[np.float64] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    grids: tuple[Figure, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def groups(self) -> list[str]:
        """Groups of the metrics, in order."""
        return list(dict.fromkeys(metric.group for metric in self.metrics))

    def is_baseline(self, method: str) -> bool:
        """Return True if the method does not depend on the model."""
        return split_label(method)[0] in BASELINES

    @property
    def main_methods(self) -> list[str]:
        """Methods without baselines and blurred twins."""
        return [name for name in self.methods if not (self.is_baseline(name) or is_twin(name))]

    def is_measured(self, method: str, metric: Metric) -> bool:
        """Return True if the metric was measured for the method; blurred twins have no sanity checks or grids."""
        if metric.group == "intervals":
            return has_intervals(self.settings.get("options", {}).get(method, {}))
        if metric.group == "sanity" and method in self.unchecked:
            return False
        return not (is_twin(method) and metric.group in ("sanity", "grid"))

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
            estimates = estimate_means(self.measured_values(metric), **self._resampling)
            tables[metric.name] = [
                TableRow(
                    method,
                    self.is_baseline(method),
                    estimate if self.is_measured(method, metric) else replace(estimate, undefined=0),
                )
                for method, estimate in zip(self.methods, estimates, strict=True)
            ]
        return tables

    def differences(self, metric: str) -> list[Difference]:
        """Return the paired differences of all methods, and of each method and its blurred twin.

        Raises:
            OptionError: the metric was not measured.
        """
        check_known("metric of this evaluation", metric, self.values)
        return list(self._differences[metric].values())

    def difference(self, metric: str, first: str, second: str) -> Difference | None:
        """Return first minus second; None for a method and itself, or another method's blurred twin."""
        check_known("metric of this evaluation", metric, self.values)
        pair = self._differences[metric].get((first, second))
        reverse = self._differences[metric].get((second, first))
        return pair if reverse is None else reverse.reversed()

    @cached_property
    def _differences(self) -> dict[str, dict[tuple[str, str], Difference]]:
        pairs = [
            (i, j)
            for (i, first), (j, second) in combinations(enumerate(self.methods), 2)
            if second == twin_of(first) or not (is_twin(first) or is_twin(second))
        ]
        differences = {}
        for metric in self.metrics:
            values = self.measured_values(metric)
            estimated = paired_differences(list(self.methods), values, pairs, **self._resampling)
            differences[metric.name] = {(pair.first, pair.second): pair for pair in estimated}
        return differences

    def measured_values(self, metric: Metric) -> NDArray[np.float64]:
        """Return the values of the metric on the images that it was measured on."""
        measured = np.array([metric.group in image["groups"] for image in self.images], dtype=np.bool_)
        return self.values[metric.name][measured]

    @property
    def _resampling(self) -> dict[str, int]:
        return {"resamples": self.settings.get("resamples", RESAMPLES), "seed": self.settings.get("seed", 0)}

    def ranking(self, metric: str) -> list[tuple[str, float]]:
        """Return methods and their means, best first, without baselines and blurred twins."""
        means = {row.method: row.estimate.mean for row in self.table(metric)}
        known = [(name, mean) for name in self.main_methods if (mean := means.get(name)) is not None]
        return sorted(known, key=lambda pair: pair[1], reverse=METRICS[metric].better == "higher")

    def overview(self, group: str) -> Table:
        """Return the means ± standard errors of a group as text: a row per method, a column per metric."""
        metrics = [metric for metric in self.metrics if metric.group == group]
        columns = [
            [str(row.estimate) if self.is_measured(row.method, metric) else "not measured" for row in rows]
            for metric in metrics
            for rows in [self.table(metric.name)]
        ]
        heads = [f"{metric.title} {metric.arrow}" for metric in metrics]
        return Table(("method", *heads), list(zip(self.methods, *columns, strict=True)))

    def results(self) -> Table:
        """Return a row per image, method and metric."""
        rows = [
            (*map(image.get, _IMAGE), method, metric.name, float(self.values[metric.name][i, j]))
            for i, image in enumerate(self.images)
            for j, method in enumerate(self.methods)
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
        rows = [(*cell, *pair) for cell, pair in zip(cells, means.reshape(-1, 2).tolist(), strict=True)]
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
