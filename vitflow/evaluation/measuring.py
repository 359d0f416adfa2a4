"""Measure an image: make its maps, and compute the values of each group of metrics."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from vitflow.errors import NoGradientError, ShapeError
from vitflow.evaluation.measures import sanity
from vitflow.evaluation.measures.faithfulness import faithfulness_curves
from vitflow.evaluation.measures.localisation import localise, score_object
from vitflow.evaluation.metrics import METRICS, blurred_label
from vitflow.evaluation.samples import Dataset, Labelled, is_turned
from vitflow.evaluation.targets import ImageGrid, TargetRegion, maps_by_class, random_order
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.folder.saved import run_fingerprint
from vitflow.methods.similarity import is_constant
from vitflow.registry.choices import ChosenMethod
from vitflow.registry.method_table import BASELINES

# Values of `Curves` that are stored: the metrics of faithfulness, and two curves.
_CURVES = [*(name for name, metric in METRICS.items() if metric.group == "faithfulness"), "deletion", "insertion"]


def blurred(saliency: Saliency) -> Saliency:
    """Return the map after a Gaussian blur with σ of one patch; reflecting at the border preserves the sum."""
    smooth = gaussian_filter(saliency.grid.astype(np.float64), 1.0, mode="reflect")
    return replace(saliency, grid=smooth.astype(np.float32))


@dataclass(frozen=True, slots=True)
class Protocol:
    """Methods with distinct labels, groups of metrics and settings of a run; `unchecked` have no sanity checks."""

    methods: tuple[ChosenMethod, ...]
    groups: tuple[str, ...]
    replace: str = "drop"
    points: int = 11
    seed: int = 0
    sanity_images: int = 24
    unchecked: tuple[str, ...] = ()
    blurred_control: bool = False

    def settings(self, dataset: Dataset, explainer: Explainer) -> dict[str, Any]:
        """Return everything that the rows depend on; runs with equal settings may share a folder."""
        data = {"data": dict(dataset.identity) or {"name": dataset.name}}
        measured: dict[str, Any] = {"groups": list(self.groups), "seed": self.seed}
        measured["blurred_control"] = self.blurred_control
        if "sanity" in self.groups:
            measured |= {"sanity_images": self.sanity_images, "unchecked": list(self.unchecked)}
        if "faithfulness" in self.groups:
            measured |= {"replace_by": self.replace, "points": self.points}
        return run_fingerprint("evaluation", data, explainer.fingerprint(), self.methods, measured)

    def groups_of(self, dataset: Dataset) -> dict[str, tuple[str, ...]]:
        """Return the groups of each image; sanity is measured on a random subset."""
        names = [sample.name for sample in dataset.samples]
        drawn = set(sorted(names, key=lambda name: random_order(name, self.seed))[: self.sanity_images])
        quick = tuple(group for group in self.groups if group != "sanity")
        return {name: self.groups if name in drawn else quick for name in names}


# Values by label of a map, then by name.
Values = dict[str, dict[str, Any]]
# The row of an image, and its maps by label for sameness.
MeasuredImage = tuple[dict[str, Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """An image to measure: its groups of metrics, its grid if any, and the maps for its target by label."""

    explainer: Explainer
    protocol: Protocol
    name: str
    image: Labelled
    truth: TargetRegion
    groups: tuple[str, ...]
    grid: ImageGrid | None = None
    maps: Mapping[str, Saliency] = field(default_factory=dict)


def with_maps(cases: Sequence[Case]) -> list[Case]:
    """Return the cases of one run with their maps, computed as a batch, each map followed by its blurred control."""
    protocol, targets = cases[0].protocol, [case.truth.target for case in cases]
    images, pairs = [case.image.image for case in cases], product(cases, protocol.methods)
    flat = cases[0].explainer.explain_batch(images, methods=protocol.methods, target=targets)
    maps: dict[str, dict[str, Saliency]] = {case.name: {} for case in cases}
    for (case, method), saliency in zip(pairs, flat, strict=True):
        maps[case.name][method.label] = saliency
        if protocol.blurred_control and method.name not in BASELINES:
            maps[case.name][blurred_label(method.label)] = blurred(saliency)
    return [replace(case, maps=maps[case.name]) for case in cases]


def measure(case: Case) -> dict[str, Any]:
    """Return the row of an image with maps: its metadata, and the values of its groups by label and name."""
    first, region = next(iter(case.maps.values())), case.truth.region
    values: Values = {label: {} for label in case.maps}
    row: dict[str, Any] = {
        "input": case.name,
        "status": "measured",
        "groups": case.groups,
        "target_source": "prediction" if case.truth.target is None else "label",
        **first.score.to_dict(),
        "turned": region is not None and is_turned(case.image.source),
        "region_share": None if region is None else float(region.mean()),
        "grid": None if case.grid is None else case.grid.names,
        "values": values,
    }
    for group in filter(_MEASURES.__contains__, case.groups):
        _MEASURES[group](case, values)
    plain: dict[str, Any] = _rounded(row)
    return plain


def add_sameness(images: Sequence[MeasuredImage]) -> list[str]:
    """Add the sameness of each method to the values of the rows; return a note on the methods that have none."""
    measured, skipped = [(row["values"], maps) for row, maps in images if maps], dict[str, list[str]]()
    labels = list(measured[0][1]) if measured else []
    for label in labels:
        try:
            for (values, _), value in zip(
                measured, sanity.sameness([maps[label] for _, maps in measured]), strict=True
            ):
                values[label]["sameness"] = value
        except ShapeError as error:
            skipped.setdefault(str(error), []).append(label)
    named = {reason: "" if without == labels else f" of {', '.join(without)}" for reason, without in skipped.items()}
    return [f"Skipped sameness{methods}. {reason}" for reason, methods in named.items()]


def _localisation(case: Case, values: Values) -> None:
    if case.truth.region is None:
        return
    for label, saliency in case.maps.items():
        heatmap = _heatmap(saliency)
        if case.truth.unknown is not None:
            heatmap[case.truth.unknown] = np.nan
        scores = localise(heatmap, case.truth.region)
        values[label] |= {} if scores is None else asdict(scores)


def _heatmap(saliency: Saliency) -> NDArray[np.float32]:
    """Return the map over the image; exactly constant for a constant grid, despite interpolation."""
    heatmap = saliency.heatmap
    if is_constant(saliency.grid):
        heatmap[np.isfinite(heatmap)] = saliency.grid.flat[0]
    return heatmap


def _faithfulness(case: Case, values: Values) -> None:
    """Add the curves of all maps that are not constant."""
    ranking = {label: saliency for label, saliency in case.maps.items() if not is_constant(saliency.grid)}
    if not ranking:
        return
    curves = faithfulness_curves(
        case.explainer, [*ranking.values()], replace=case.protocol.replace, points=case.protocol.points
    )
    for label, each in zip(ranking, curves, strict=True):
        values[label] |= {name: np.asarray(getattr(each, name)).tolist() for name in _CURVES}


def _sanity(case: Case, values: Values) -> None:
    labels = [method.label for method in case.protocol.methods if method.label not in case.protocol.unchecked]
    explainer, checked = case.explainer, [case.maps[label] for label in labels]
    # Different random weights for every image, reproducible across runs.
    seed = (case.protocol.seed + zlib.crc32(case.name.encode("utf-8", "surrogateescape"))) % 2**31
    similarities = sanity.randomisation(explainer, checked, seed=seed)
    checks = {"randomisation": [None if value is None else abs(value) for value in similarities]}
    if checked[0].target is not None:
        checks["class_sensitivity"] = sanity.class_sensitivity(explainer, checked)
    for name, by_map in checks.items():
        for label, value in zip(labels, by_map, strict=True):
            values[label][name] = value


def _grid(case: Case, values: Values) -> None:
    """Add the scores of the image's cell in its grid, and of its objects against each other, if all have a gradient."""
    methods, objects = case.protocol.methods, case.truth.objects
    if case.grid is not None:
        with suppress(NoGradientError):
            for label, cell in case.grid.scores(case.explainer, methods, case.name).items():
                values[label] |= dict(zip(("grid_energy", "grid_auc", "grid_wins"), cell, strict=True))
    if len(objects) < 2:
        return
    with suppress(NoGradientError):
        for label, maps in maps_by_class(case.explainer, case.image.image, methods, list(objects)).items():
            scores = [score_object(_heatmap(each), list(objects.values()), index) for index, each in enumerate(maps)]
            if defined := [score for score in scores if score is not None]:
                values[label] |= dict(zip(("separation", "separation_wins"), np.mean(defined, axis=0), strict=True))


# The function of each group that needs one image only.
_MEASURES: dict[str, Callable[[Case, Values], None]] = {
    "localisation": _localisation,
    "faithfulness": _faithfulness,
    "sanity": _sanity,
    "grid": _grid,
}


def _rounded(value: Any) -> Any:
    """Return JSON data with numbers rounded to the precision of float32; None for undefined numbers."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.7g}") if np.isfinite(value) else None
    return value
