"""Measure images: all values of one image as a row."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import stops_all
from vitflow.evaluation.annotations import Labelled
from vitflow.evaluation.choices import TargetRegion, blurred, twin_of
from vitflow.evaluation.gridding import Grid, ObjectScore, score_object
from vitflow.evaluation.measures import randomisation, sanity
from vitflow.evaluation.measures.correlation import rank_correlation
from vitflow.evaluation.measures.faithfulness import Curves, faithfulness_curves
from vitflow.evaluation.measures.intervals import coverage, has_intervals
from vitflow.evaluation.measures.localisation import Localisation, localise
from vitflow.explaining.choices import ChosenMethod
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import BASELINES
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.strips import columns_of
from vitflow.methods.similarity import is_constant
from vitflow.runs.batches import Batches
from vitflow.runs.columns import failed_row

Item = TypeVar("Item")

# The attribute of each metric in the scores of its measure.
_LOCALISATION = {name: name for name in ("pointing_game", "energy", "roc_auc", "average_precision", "mean_iou")}
_FAITHFULNESS = {
    name: name for name in ("deletion_auc", "insertion_auc", "gap", "positive_perturbation", "negative_perturbation")
}
_GRID = {"grid_energy": "energy", "grid_auc": "auc", "grid_wins": "wins"}
_SEPARATION = {"separation": "energy", "separation_wins": "wins"}
CURVES = ("deletion", "insertion")


@dataclass(frozen=True, slots=True)
class Protocol:
    """Methods and settings of a run.

    Attributes:
        methods: the measured methods, with distinct labels.
        groups: groups of metrics.
        replace: replacement of removed patches: "drop", "blank" or "blur".
        points: number of points of the deletion and insertion curves.
        seed: seed of the random weights.
        unchecked: labels of the methods without sanity checks.
        blurred_twin: also measure each map blurred, as a control, except for baselines and in sanity checks.
    """

    methods: tuple[ChosenMethod, ...]
    groups: tuple[str, ...]
    replace: str = "drop"
    points: int = 11
    seed: int = 0
    unchecked: tuple[str, ...] = ()
    blurred_twin: bool = False

    @property
    def labels(self) -> list[str]:
        """Labels of the methods in tables, each followed by its control."""
        return [label for m in self.methods for label in self._with_control(m.name, m.label, twin_of)]

    def with_controls(self, maps: Sequence[Saliency]) -> list[Saliency]:
        """Return the maps of the methods and of their controls, in the order of the labels."""
        return [m for saliency in maps for m in self._with_control(saliency.method, saliency, blurred)]

    def _with_control(self, method: str, item: Item, control: Callable[[Item], Item]) -> tuple[Item, ...]:
        return (item, control(item)) if self.blurred_twin and method not in BASELINES else (item,)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """An image to measure, with its target and groups.

    Attributes:
        name: name of the sample.
        image: the image and its annotations.
        truth: target class and region.
        groups: groups of metrics to measure on this image, a subset of the protocol's.
        grid: the grid that contains the image, if any.
    """

    name: str
    image: Labelled
    truth: TargetRegion
    groups: tuple[str, ...]
    grid: Grid | None = None


def measure(batches: Batches, cases: Sequence[Case], protocol: Protocol) -> Iterator[dict[str, Any]]:
    """Measure images and yield a row for each; the error of an image is in its row.

    Raises:
        OptionError, UnsupportedModelError: no image can be measured with these options or this model.
    """
    explainer = batches.explainer
    maps = batches.each(cases, lambda batch: _explain(explainer, batch, protocol), protocol.methods)
    for case, result in zip(cases, maps, strict=True):
        try:
            row = result if isinstance(result, Exception) else _row(explainer, case, result, protocol)
        except Exception as error:
            if stops_all(error, explainer.fit):
                raise
            row = error
        yield failed_row({"input": case.name}, row) if isinstance(row, Exception) else row


def _explain(explainer: Explainer, cases: Sequence[Case], protocol: Protocol) -> list[list[Saliency]]:
    """Return the maps of each image for its target, in the order of the methods."""
    maps: dict[str, list[Saliency]] = {}
    count = len(protocol.methods)
    for has_target in (True, False):
        batch = [case for case in cases if (case.truth.target is not None) == has_target]
        if not batch:
            continue
        targets = np.array([case.truth.target for case in batch]) if has_target else None
        images = [case.image.image for case in batch]
        flat = explainer.explain_batch(images, methods=protocol.methods, targets=targets)
        for index, case in enumerate(batch):
            maps[case.name] = protocol.with_controls(flat[index * count : (index + 1) * count])
    return [maps[case.name] for case in cases]


def _row(explainer: Explainer, case: Case, maps: Sequence[Saliency], protocol: Protocol) -> dict[str, Any]:
    """Return the row of an image; everything that is measured by map is a dict by label."""
    first, region = maps[0], case.truth.region
    by_label = dict(zip(protocol.labels, maps, strict=True))
    row: dict[str, Any] = {
        "input": case.name,
        "status": "measured",
        "groups": list(case.groups),
        "target_source": "prediction" if case.truth.target is None else "label",
        "class_index": first.target,
        "class_name": first.class_name,
        "probability": first.probability,
        "predicted_index": first.predicted,
        "width": first.image.shape[1],
        "height": first.image.shape[0],
        "region_share": None if region is None else float(region.mean()),
        "constant": [label for label, saliency in by_label.items() if is_constant(saliency.grid)],
        "seconds": {label: saliency.seconds for label, saliency in by_label.items()},
        "values": {},
    }
    if "localisation" in case.groups:
        _add_localisation(row, case.truth, by_label)
    if "faithfulness" in case.groups and first.target is not None:
        _add_faithfulness(row, explainer, by_label, protocol)
    if "sanity" in case.groups:
        _add_sanity(row, explainer, case, by_label, protocol)
    if "grid" in case.groups:
        _add_grid(row, explainer, case, protocol)
    if "intervals" in case.groups:
        sampled = [method.label for method in protocol.methods if has_intervals(method.options)]
        row["values"]["coverage"] = {label: coverage(explainer, by_label[label]) for label in sampled}
    if "correlation" in case.groups:
        result = rank_correlation([case.image.image], model=explainer, target=case.truth.target)
        values = result.values[..., 0]  # [references, methods, layers]
        row["correlation"] = {
            "methods": result.methods,
            "references": result.references,
            "layers": result.layers,
            "values": values.tolist(),
        }
    plain: dict[str, Any] = _rounded(row)
    return plain


def _by_metric(scores: Mapping[str, Any], attributes: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the attribute of each metric of each label's scores, by metric and label; None without scores."""
    return {
        metric: {label: getattr(score, attribute, None) for label, score in scores.items()}
        for metric, attribute in attributes.items()
    }


def _add_localisation(row: dict[str, Any], truth: TargetRegion, maps: Mapping[str, Saliency]) -> None:
    scores: dict[str, Localisation | None] = dict.fromkeys(maps)
    if truth.region is not None:
        for label, saliency in maps.items():
            heatmap = _heatmap(saliency)
            if truth.unknown is not None:
                heatmap[truth.unknown] = np.nan
            scores[label] = localise(heatmap, truth.region)
    row["values"] |= _by_metric(scores, _LOCALISATION)
    row["overlap"] = {label: score.overlap for label, score in scores.items() if score is not None}


def _heatmap(saliency: Saliency) -> NDArray[np.float32]:
    """Return the map over the image; exactly constant for a constant grid, despite interpolation."""
    heatmap = saliency.heatmap
    if is_constant(saliency.grid):
        heatmap[np.isfinite(heatmap)] = saliency.grid.flat[0]
    return heatmap


def _add_faithfulness(
    row: dict[str, Any], explainer: Explainer, maps: Mapping[str, Saliency], protocol: Protocol
) -> None:
    """Add the curves of all maps that are not constant."""
    ranking = {label: saliency for label, saliency in maps.items() if label not in row["constant"]}
    by_label: dict[str, Curves] = {}
    if ranking:
        curves = faithfulness_curves(explainer, [*ranking.values()], replace=protocol.replace, points=protocol.points)
        by_label = dict(zip(ranking, curves, strict=True))
    row["values"] |= _by_metric(by_label, _FAITHFULNESS)
    row["curves"] = {
        name: {label: getattr(curve, name).tolist() for label, curve in by_label.items()} for name in CURVES
    }


def _add_sanity(
    row: dict[str, Any], explainer: Explainer, case: Case, maps: Mapping[str, Saliency], protocol: Protocol
) -> None:
    labels = [method.label for method in protocol.methods if method.label not in protocol.unchecked]
    checked = [maps[label] for label in labels]
    # Different random weights for every image, reproducible across runs.
    seed = (protocol.seed + zlib.crc32(case.name.encode("utf-8", "surrogateescape"))) % 2**31
    stages = randomisation.cascading_randomisation(explainer, checked, seed=seed)
    checks = {
        "randomisation": [None if value is None else abs(value) for value in stages[-1][1]],
        "shift_stability": sanity.shift_stability(explainer, checked),
        "flip_stability": sanity.flip_stability(explainer, checked),
    }
    if row["class_index"] is not None:
        checks["class_sensitivity"] = sanity.class_sensitivity(explainer, checked)
    row["values"] |= {name: dict(zip(labels, values, strict=True)) for name, values in checks.items()}
    row["stages"] = {name: dict(zip(labels, values, strict=True)) for name, values in stages}


def _add_grid(row: dict[str, Any], explainer: Explainer, case: Case, protocol: Protocol) -> None:
    """Add the scores of the image's cell in its grid, and of its objects against each other."""
    row["grid"] = None if case.grid is None else case.grid.names
    if case.grid is not None:
        row["values"] |= _by_metric(case.grid.scores(explainer, protocol.methods, case.name), _GRID)
    objects = case.truth.objects
    if len(objects) < 2:
        return
    flat = explainer.explain_batch([case.image.image], methods=protocol.methods, targets=list(objects))
    means = {}
    for method, maps in zip(protocol.methods, columns_of(flat), strict=True):
        by_class = list(maps) * (len(objects) if len(maps) == 1 else 1)
        scores = [score_object(_heatmap(m), list(objects.values()), index) for index, m in enumerate(by_class)]
        defined = [score for score in scores if score is not None]
        means[method.label] = ObjectScore(*np.mean(defined, axis=0)) if defined else None
    row["values"] |= _by_metric(means, _SEPARATION)


def _rounded(value: Any) -> Any:
    """Return JSON data with numbers rounded to seven digits, the precision of float32; None for undefined numbers."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if np.isfinite(value) else None
    return value
