"""Measure images: all values of one image as a row."""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import stops_all
from vitflow.evaluation.annotations import Labelled
from vitflow.evaluation.choices import Question, blurred, twin_of
from vitflow.evaluation.gridding import Grid, score_object
from vitflow.evaluation.measures import sanity
from vitflow.evaluation.measures.correlation import rank_correlation
from vitflow.evaluation.measures.faithfulness import faithfulness_curves
from vitflow.evaluation.measures.localisation import localise
from vitflow.explaining.choices import ChosenMethod
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import BASELINES
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.strips import columns_of
from vitflow.methods.ranks import is_constant
from vitflow.runs.batches import Batches
from vitflow.runs.columns import failed_row

Item = TypeVar("Item")

_LOCALISATION = ("pointing_game", "energy", "roc_auc", "average_precision", "mean_iou")
_FAITHFULNESS = ("deletion_auc", "insertion_auc", "gap", "positive_perturbation", "negative_perturbation")
CURVES = ("deletion", "insertion", "least_first", "correct_most", "correct_least")


@dataclass(frozen=True, slots=True)
class Protocol:
    """Methods and settings of a run.

    Attributes:
        methods: the measured methods, with distinct labels.
        groups: groups of metrics.
        replace: replacement of removed patches: "drop", "blank" or "blur".
        points: number of points of the deletion and insertion curves.
        batch_size: perturbed images or shortened sequences per forward pass.
        seed: seed of the random weights.
        unchecked: labels of the methods without sanity checks.
        blurred_twin: also measure each map blurred, as a control, except for baselines and in sanity checks.
    """

    methods: tuple[ChosenMethod, ...]
    groups: tuple[str, ...]
    replace: str = "drop"
    points: int = 11
    batch_size: int = 32
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
        question: target class and region.
        groups: groups of metrics to measure on this image, a subset of the protocol's.
        grid: the grid that contains the image, if any.
    """

    name: str
    image: Labelled
    question: Question
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
    by_case: list[list[Saliency]] = [[] for _ in cases]
    labelled = [index for index, case in enumerate(cases) if case.question.target is not None]
    unlabelled = [index for index, case in enumerate(cases) if case.question.target is None]
    for indices, targets in (
        (labelled, np.array([cases[index].question.target for index in labelled], dtype=np.int64)),
        (unlabelled, None),
    ):
        if indices:
            images = [cases[index].image.image for index in indices]
            flat = explainer.explain_batch(images, methods=protocol.methods, targets=targets)
            count = len(protocol.methods)
            for position, index in enumerate(indices):
                by_case[index] = protocol.with_controls(flat[position * count : (position + 1) * count])
    return by_case


def _row(explainer: Explainer, case: Case, maps: Sequence[Saliency], protocol: Protocol) -> dict[str, Any]:
    first = maps[0]
    region = case.question.region
    row: dict[str, Any] = {
        "input": case.name,
        "status": "measured",
        "groups": list(case.groups),
        "target_source": "prediction" if case.question.target is None else "label",
        "class_index": first.target,
        "class_name": first.class_name,
        "probability": _rounded(first.probability),
        "predicted_index": first.predicted,
        "width": first.image.shape[1],
        "height": first.image.shape[0],
        "region_share": None if region is None else _rounded(float(region.mean())),
        "constant": [label for label, m in zip(protocol.labels, maps, strict=True) if is_constant(m.grid)],
        "seconds": {label: _rounded(m.seconds) for label, m in zip(protocol.labels, maps, strict=True)},
        "values": {label: {} for label in protocol.labels},
    }
    if "localisation" in case.groups:
        _add_localisation(row, case.question, maps, protocol)
    if "faithfulness" in case.groups and first.target is not None:
        _add_faithfulness(row, explainer, maps, protocol)
    if "sanity" in case.groups:
        _add_sanity(row, explainer, case, maps, protocol)
    if "grid" in case.groups:
        _add_grid(row, explainer, case, protocol)
    if "correlation" in case.groups:
        _add_correlation(row, explainer, case)
    return row


def _add_localisation(row: dict[str, Any], question: Question, maps: Sequence[Saliency], protocol: Protocol) -> None:
    row["overlap"] = {}
    for label, saliency in zip(protocol.labels, maps, strict=True):
        scores = None
        if question.region is not None:
            heatmap = _heatmap(saliency)
            if question.unknown is not None:
                heatmap[question.unknown] = np.nan
            scores = localise(heatmap, question.region)
        row["values"][label] |= {
            name: None if scores is None else _rounded(getattr(scores, name)) for name in _LOCALISATION
        }
        row["overlap"][label] = None if scores is None else list(scores.overlap)


def _heatmap(saliency: Saliency) -> NDArray[np.float32]:
    """Return the map over the image; exactly constant for a constant grid, despite interpolation."""
    heatmap = saliency.heatmap
    if is_constant(saliency.grid):
        heatmap[np.isfinite(heatmap)] = saliency.grid.flat[0]
    return heatmap


def _add_faithfulness(row: dict[str, Any], explainer: Explainer, maps: Sequence[Saliency], protocol: Protocol) -> None:
    """Add the curves of all maps that are not constant."""
    ranking = [(label, m) for label, m in zip(protocol.labels, maps, strict=True) if not is_constant(m.grid)]
    curves = (
        faithfulness_curves(
            explainer,
            [saliency for _, saliency in ranking],
            replace=protocol.replace,
            points=protocol.points,
            batch_size=protocol.batch_size,
        )
        if ranking
        else []
    )
    row["curves"] = {}
    for (label, _), curve in zip(ranking, curves, strict=True):
        row["values"][label] |= {name: _rounded(getattr(curve, name)) for name in _FAITHFULNESS}
        row["curves"][label] = {name: [_rounded(float(value)) for value in getattr(curve, name)] for name in CURVES}
    row["fractions"] = [_rounded(float(value)) for value in curves[0].fractions] if curves else None


def _add_sanity(
    row: dict[str, Any], explainer: Explainer, case: Case, maps: Sequence[Saliency], protocol: Protocol
) -> None:
    methods = [method for method in protocol.methods if method.label not in protocol.unchecked]
    labels, image = [method.label for method in methods], case.image.image
    by_label = dict(zip(protocol.labels, maps, strict=True))
    maps = [by_label[label] for label in labels]
    # Different random weights for every image, reproducible across runs.
    seed = (protocol.seed + zlib.crc32(case.name.encode("utf-8", "surrogateescape"))) % 2**31
    stages = sanity.cascading_randomisation(explainer, image, methods, seed=seed, maps=maps)
    checks = {
        "randomisation": [None if value is None else abs(value) for value in stages[-1][1]],
        "shift_stability": sanity.shift_stability(explainer, image, methods, maps=maps),
        "flip_stability": sanity.flip_stability(explainer, image, methods, maps=maps),
    }
    if maps[0].target is not None:
        checks["class_sensitivity"] = sanity.class_sensitivity(explainer, image, methods)
    row["stages"] = [
        [name, {label: _rounded(value) for label, value in zip(labels, values, strict=True)}] for name, values in stages
    ]
    for name, values in checks.items():
        for label, value in zip(labels, values, strict=True):
            row["values"][label][name] = _rounded(value)


def _add_grid(row: dict[str, Any], explainer: Explainer, case: Case, protocol: Protocol) -> None:
    """Add the scores of the image's cell in its grid, and of its objects against each other."""
    row["grid"] = None if case.grid is None else case.grid.names
    if case.grid is not None:
        for label, score in case.grid.scores(explainer, protocol.methods, case.name).items():
            row["values"][label] |= {f"grid_{name}": _rounded(value) for name, value in score._asdict().items()}
    objects = case.question.objects
    if len(objects) < 2:
        return
    flat = explainer.explain_batch([case.image.image], methods=protocol.methods, targets=list(objects))
    for method, maps in zip(protocol.methods, columns_of(flat), strict=True):
        by_class = list(maps) * (len(objects) if len(maps) == 1 else 1)
        scores = [score_object(_heatmap(m), list(objects.values()), index) for index, m in enumerate(by_class)]
        defined = [score for score in scores if score is not None]
        if defined:
            energy, wins = np.mean(defined, axis=0)
            row["values"][method.label] |= {"separation": _rounded(energy), "separation_wins": _rounded(wins)}


def _add_correlation(row: dict[str, Any], explainer: Explainer, case: Case) -> None:
    """Add Spearman of each layer's attention, rollout and flow with the references: [references][methods][layers]."""
    result = rank_correlation([case.image.image], model=explainer, target=case.question.target)
    values = result.values[..., 0]
    row["correlation"] = {
        "methods": list(result.methods),
        "references": list(result.references),
        "layers": list(result.layers),
        "values": [[[_rounded(v) for v in layers] for layers in methods] for methods in values.tolist()],
    }


def _rounded(value: float | None) -> float | None:
    """Round to seven digits, the precision of float32; None for undefined values."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.7g}")
