"""Evaluation: what was measured on all pictures, as tables, differences between methods, files and a page."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, unknown_name
from vitflow.evaluation.measures.correlation import RankCorrelation
from vitflow.evaluation.measures.localisation import accumulated_iou
from vitflow.evaluation.metrics import METRICS, Metric
from vitflow.evaluation.statistics import (
    RESAMPLES,
    Difference,
    Estimate,
    estimate_means,
    paired_differences,
)

BASELINES = ("random", "centre")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One method's line in the table of a metric.

    Attributes:
        method: its label.
        baseline: whether it knows nothing of the model.
        estimate: the mean over pictures, with its standard error and interval.
    """

    method: str
    baseline: bool
    estimate: Estimate


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """What was measured: one value per picture, method and metric, and what follows from them.

    Attributes:
        data: what was evaluated on, and what that is.
        model: the model's id.
        methods: labels, baselines last.
        metrics: those that were asked for and could be measured.
        pictures: what is known of each measured picture: its name, class, probability, the region's share of the area.
        failures: rows of the pictures that could not be measured.
        values: for each metric float64 [pictures, methods], NaN where it is not defined or was not measured.
        overlaps: `Localisation.overlap` of each picture and method, [pictures, methods, 4]; None without regions.
        fractions: shares of removed patches, [points]; None without faithfulness.
        curves: "deletion", "insertion" and "least_first": probabilities, [pictures, methods, points].
        stages: names of the stages of randomisation, from the top of the network down.
        randomisation: Spearman with the original map at each stage, [pictures, stages, methods].
        correlation: rank correlation by layer, where it was asked for.
        settings: what else the numbers depend on, ready for JSON.
        notes: sentences that belong beside the tables.
    """

    data: str
    model: str
    methods: tuple[str, ...]
    metrics: tuple[Metric, ...]
    pictures: tuple[Mapping[str, Any], ...]
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
    _known: dict[tuple[str, str], Any] = field(default_factory=dict, init=False)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return (
            f"Evaluation({self.model} on {self.data}: {len(self.methods)} methods, {len(self.metrics)} metrics{failed})"
        )

    def __str__(self) -> str:
        return self.to_markdown()

    @property
    def groups(self) -> list[str]:
        """The groups of the metrics, in order."""
        return list(dict.fromkeys(metric.group for metric in self.metrics))

    def is_baseline(self, method: str) -> bool:
        """Whether a method knows nothing of the model."""
        return method.partition(":")[0] in BASELINES

    def table(self, metric: str) -> list[TableRow]:
        """The table of one metric: a row per method, in the order in which they were asked for.

        Raises:
            OptionError: the metric was not measured.
        """
        if ("table", metric) not in self._known:
            estimates = estimate_means(self._values_of(metric), resamples=self._resamples, seed=self._seed)
            self._known["table", metric] = [
                TableRow(method, self.is_baseline(method), estimate)
                for method, estimate in zip(self.methods, estimates, strict=True)
            ]
        return list(self._known["table", metric])

    def differences(self, metric: str) -> list[Difference]:
        """All pairs of methods, compared on the same pictures.

        Raises:
            OptionError: the metric was not measured.
        """
        if ("differences", metric) not in self._known:
            self._known["differences", metric] = paired_differences(
                list(self.methods), self._values_of(metric), resamples=self._resamples, seed=self._seed
            )
        return list(self._known["differences", metric])

    def accumulated_mean_iou(self) -> dict[str, float | None]:
        """The mean IoU with intersections and unions added up over all pictures, as Chefer et al. report it."""
        if self.overlaps is None:
            return {}
        found: dict[str, float | None] = {}
        for number, method in enumerate(self.methods):
            own = self.overlaps[:, number]
            own = own[~np.isnan(own).any(axis=1)]
            found[method] = accumulated_iou(own) if len(own) else None
        return found

    def _values_of(self, metric: str) -> NDArray[np.float64]:
        """The metric's values on the pictures that it was measured on."""
        if metric not in self.values:
            raise OptionError(unknown_name("metric of this evaluation", metric, self.values))
        values = self.values[metric]
        measured = np.array([METRICS[metric].group in picture["groups"] for picture in self.pictures], dtype=np.bool_)
        return values[measured]

    @property
    def _resamples(self) -> int:
        return int(self.settings.get("resamples", RESAMPLES))

    @property
    def _seed(self) -> int:
        return int(self.settings.get("seed", 0))

    def to_dict(self) -> dict[str, Any]:
        """Every table, all pairs and the mean curves, ready for JSON; without the values of each picture."""
        tables = {metric.name: self._metric_record(metric) for metric in self.metrics}
        record: dict[str, Any] = {
            "data": self.data,
            "model": self.model,
            "pictures": len(self.pictures),
            "failed": len(self.failures),
            "methods": list(self.methods),
            "baselines": [method for method in self.methods if self.is_baseline(method)],
            "settings": dict(self.settings),
            "notes": list(self.notes),
            "metrics": tables,
        }
        if self.overlaps is not None:
            record["accumulated_mean_iou"] = self.accumulated_mean_iou()
        if self.fractions is not None:
            record["curves"] = {"fractions": self.fractions.tolist()} | {
                name: dict(zip(self.methods, _mean_or_none(self.curves[name]), strict=True)) for name in self.curves
            }
        if self.randomisation is not None:
            means = _mean_or_none(self.randomisation.transpose(0, 2, 1))
            record["randomisation"] = {"stages": list(self.stages)} | dict(zip(self.methods, means, strict=True))
        if self.correlation is not None:
            record["correlation"] = self.correlation.to_dict()
        return record

    def _metric_record(self, metric: Metric) -> dict[str, Any]:
        rows = [
            {"method": row.method, "baseline": row.baseline, **asdict(row.estimate)} for row in self.table(metric.name)
        ]
        pairs = [
            {
                "first": one.first,
                "second": one.second,
                **asdict(one.estimate),
                "above": one.above,
                "clear": one.is_clear,
            }
            for one in self.differences(metric.name)
        ]
        return {
            "title": metric.title,
            "group": metric.group,
            "better": metric.better,
            "says": metric.says,
            "does_not_show": metric.silent,
            "table": rows,
            "differences": pairs,
        }

    def to_markdown(self, group: str | None = None) -> str:
        """Tables of means ± standard errors, one per group of metrics, baselines last.

        Args:
            group: this group alone, without the notes.
        """
        blocks = [self._group_table(name) for name in self.groups if group in (None, name)]
        if group is None and self.correlation is not None:
            blocks.append(self.correlation.to_markdown().rstrip())
        if group is None:
            blocks += [f"{self.data}; {self.model}.", *self.notes]
        return "\n\n".join(blocks) + "\n"

    def _group_table(self, group: str) -> str:
        metrics = [metric for metric in self.metrics if metric.group == group]
        head = ["method", *(f"{metric.title} {metric.arrow}" for metric in metrics)]
        columns = [[str(row.estimate) for row in self.table(metric.name)] for metric in metrics]
        lines = [head, ["---", *["---:"] * len(metrics)]]
        lines += [[method, *cells] for method, *cells in zip(self.methods, *columns, strict=True)]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write everything into a folder, or the tables alone into a file (.json, .md or .csv).

        A folder gets `results.csv` (a row per picture, method and metric), `summary.csv`, `differences.csv`,
        `summary.json`, the figures as PNG and SVG, and `report.html`, one page with all of it.

        Returns:
            The page, or the file.

        Raises:
            OptionError: a file of another type.
        """
        from vitflow.evaluation import export

        return export.save(self, Path(path))


def _mean_or_none(values: NDArray[np.float64]) -> list[list[float | None]]:
    """The mean over pictures of [pictures, methods, points], NaN left out; None where nothing is left."""
    defined = ~np.isnan(values)
    counts = defined.sum(axis=0)
    sums = np.where(defined, values, 0.0).sum(axis=0)
    return [
        [float(total / count) if count else None for total, count in zip(row, numbers, strict=True)]
        for row, numbers in zip(sums, counts, strict=True)
    ]
