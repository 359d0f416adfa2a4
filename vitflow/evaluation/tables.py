"""Tables of an evaluation: what was measured on all images, and what follows from it for each metric."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import OptionError, check_known
from vitflow.evaluation.choices import is_twin, twin_of
from vitflow.evaluation.measures.correlation import RankCorrelation
from vitflow.evaluation.measures.localisation import accumulated_iou
from vitflow.evaluation.metrics import METRICS, Metric
from vitflow.evaluation.statistics import RESAMPLES, Difference, Estimate, estimate_means, paired_differences
from vitflow.explaining.captions import departures_from_paper
from vitflow.explaining.method import METHODS
from vitflow.explaining.method_table import BASELINES
from vitflow.runs.columns import kinds_in, plain_cell

# Columns of the tables: what is known of an image, and an estimate.
_IMAGE = tuple(kinds_in("results"))
_ESTIMATE = tuple(field.name for field in fields(Estimate))


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with named columns, for other programs.

    Attributes:
        columns: their names.
        rows: the values of each row; None or NaN if a value is undefined.

    >>> print(Table(("method", "mean"), [("rollout", 0.5), ("random", None)]).to_csv(), end="")
    method,mean
    rollout,0.5
    random,
    """

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as dicts for JSON; None for undefined values."""
        return [dict(zip(self.columns, map(_defined, row), strict=True)) for row in self.rows]

    def to_csv(self) -> str:
        """Return the rows as CSV; undefined values are empty, and cells cannot start a formula."""
        text = io.StringIO(newline="")
        rows = [["" if _defined(value) is None else value for value in row] for row in self.rows]
        csv.writer(text, lineterminator="\n").writerows(map(plain_cell, row) for row in [self.columns, *rows])
        return text.getvalue()

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


def _defined(value: Any) -> Any:
    return None if isinstance(value, float) and np.isnan(value) else value


@dataclass(frozen=True, slots=True)
class TableRow:
    """One method's line in the table of a metric.

    Attributes:
        method: its label.
        baseline: whether it knows nothing of the model.
        estimate: the mean over images, with its standard error and interval.
    """

    method: str
    baseline: bool
    estimate: Estimate


@dataclass(frozen=True, eq=False, repr=False)
class Tables:
    """Measured values per image, method and metric, and tables derived from them.

    Attributes:
        data: what was evaluated on, and what that is.
        model: the model's id.
        methods: labels, baselines last.
        metrics: those that were asked for and could be measured.
        images: what is known of each measured image: its name, class, probability, the region's share of the area.
        failures: rows of the images that could not be measured.
        values: for each metric float64 [images, methods], NaN where it is not defined or was not measured.
        overlaps: `Localisation.overlap` of each image and method, [images, methods, 4]; None without regions.
        fractions: shares of removed patches, [points]; None without faithfulness.
        curves: "deletion", "insertion" and "least_first": probabilities, [images, methods, points].
        stages: names of the stages of randomisation, from the top of the network down.
        randomisation: Spearman with the original map at each stage, [images, stages, methods].
        correlation: rank correlation by layer, where it was asked for.
        settings: what else the numbers depend on, ready for JSON.
        notes: sentences that belong beside the tables.
        grids: some grids of four images with their maps, drawn, where they were measured for a page.
        unchecked: methods that were left out of the sanity checks.
    """

    data: str
    model: str
    methods: tuple[str, ...]
    metrics: tuple[Metric, ...]
    images: tuple[Mapping[str, Any], ...]
    failures: tuple[Mapping[str, Any], ...] = ()
    values: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    overlaps: NDArray[np.float64] | None = None
    fractions: NDArray[np.float64] | None = None
    curves: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    stages: tuple[str, ...] = ()
    randomisation: NDArray[np.float64] | None = None
    correlation: RankCorrelation | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    grids: tuple[Figure, ...] = ()
    unchecked: tuple[str, ...] = ()
    _known: dict[tuple[str, str], Any] = field(default_factory=dict, init=False)

    @property
    def groups(self) -> list[str]:
        """The groups of the metrics, in order."""
        return list(dict.fromkeys(metric.group for metric in self.metrics))

    def is_baseline(self, method: str) -> bool:
        """Return True if a method does not depend on the model."""
        return method.partition(":")[0] in BASELINES

    @property
    def main_methods(self) -> list[str]:
        """The methods themselves, without the baselines and the blurred twins that stand beside them."""
        return [name for name in self.methods if not (self.is_baseline(name) or is_twin(name))]

    def is_measured(self, method: str, metric: Metric) -> bool:
        """Return True if a metric was measured for a method: blurred copies have no sanity checks and no grids."""
        if metric.group == "sanity" and method in self.unchecked:
            return False
        return not (is_twin(method) and metric.group in ("sanity", "grid"))

    @property
    def departures(self) -> dict[str, str | None]:
        """Departures of each method from its publication; None for a method without one."""
        names, options = self.settings.get("methods", {}), self.settings.get("options", {})
        known = [label for label in self.methods if names.get(label) in METHODS]
        return {label: departures_from_paper(METHODS[names[label]], options[label]) for label in known}

    def table(self, metric: str) -> list[TableRow]:
        """Return the table of one metric: one row per method, in the requested order.

        Raises:
            OptionError: the metric was not measured.
        """
        if ("table", metric) not in self._known:
            estimates = estimate_means(self._values_of(metric), resamples=self._resamples, seed=self._seed)
            self._known["table", metric] = [
                TableRow(
                    method,
                    self.is_baseline(method),
                    estimate if self.is_measured(method, METRICS[metric]) else replace(estimate, undefined=0),
                )
                for method, estimate in zip(self.methods, estimates, strict=True)
            ]
        return list(self._known["table", metric])

    def differences(self, metric: str) -> list[Difference]:
        """All pairs of methods, and each method with its blurred twin, compared on the same images.

        Raises:
            OptionError: the metric was not measured.
        """
        if ("differences", metric) not in self._known:
            self._known["differences", metric] = paired_differences(
                list(self.methods), self._values_of(metric), self._pairs, resamples=self._resamples, seed=self._seed
            )
        return list(self._known["differences", metric])

    def ranking(self, metric: str, methods: Sequence[str] | None = None) -> list[tuple[str, float]]:
        """Methods with their means, the best first; by default all but baselines and blurred twins."""
        means = {row.method: row.estimate.mean for row in self.table(metric)}
        known = [(name, mean) for name in methods or self.main_methods if (mean := means.get(name)) is not None]
        return sorted(known, key=lambda one: one[1], reverse=METRICS[metric].better == "higher")

    def results(self) -> Table:
        """Return one row per image, method and metric."""
        rows = [
            (*map(image.get, _IMAGE), method, metric.name, float(self.values[metric.name][number, place]))
            for number, image in enumerate(self.images)
            for place, method in enumerate(self.methods)
            for metric in self.metrics
            if metric.group in image["groups"]
        ]
        return Table((*_IMAGE, "method", "metric", "value"), rows)

    def summary(self) -> Table:
        """Return one row per metric and method: mean, standard error, interval, and the number of defined values."""
        rows = [
            (metric.name, metric.better, row.method, row.baseline, *astuple(row.estimate))
            for metric in self.metrics
            for row in self.table(metric.name)
        ]
        return Table(("metric", "better", "method", "baseline", *_ESTIMATE), rows)

    def pairs(self) -> Table:
        """Return one row per metric and pair of methods: first − second on the same images."""
        rows = [
            (metric.name, one.first, one.second, *astuple(one.estimate), one.above, one.is_clear)
            for metric in self.metrics
            for one in self.differences(metric.name)
        ]
        return Table(("metric", "first", "second", *_ESTIMATE, "above", "clear"), rows)

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        """The methods that are compared: a blurred twin is compared with its own method alone."""
        return [
            (i, j)
            for (i, first), (j, second) in combinations(enumerate(self.methods), 2)
            if second == twin_of(first) or not (is_twin(first) or is_twin(second))
        ]

    def accumulated_mean_iou(self) -> dict[str, float | None]:
        """Return the mean IoU with intersections and unions summed over all images, as in Chefer et al."""
        if self.overlaps is None:
            return {}
        means: dict[str, float | None] = {}
        for number, method in enumerate(self.methods):
            overlap = self.overlaps[:, number]
            overlap = overlap[~np.isnan(overlap).any(axis=1)]
            means[method] = accumulated_iou(overlap) if len(overlap) else None
        return means

    def _values_of(self, metric: str) -> NDArray[np.float64]:
        """Return the metric's values on the images on which it was measured."""
        check_known("metric of this evaluation", metric, self.values)
        values = self.values[metric]
        measured = np.array([METRICS[metric].group in image["groups"] for image in self.images], dtype=np.bool_)
        return values[measured]

    @property
    def _resamples(self) -> int:
        return int(self.settings.get("resamples", RESAMPLES))

    @property
    def _seed(self) -> int:
        return int(self.settings.get("seed", 0))
