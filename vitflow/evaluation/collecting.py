"""Collect the rows of a run into an Evaluation: arrays over images, and notes for the tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.evaluation.choices import TWIN_NOTE, is_twin
from vitflow.evaluation.datasets import Dataset
from vitflow.evaluation.measures.correlation import RankCorrelation
from vitflow.evaluation.metrics import METRICS, Metric
from vitflow.evaluation.results import Evaluation
from vitflow.evaluation.scoring import CURVES, Protocol
from vitflow.runs.columns import kinds_in

Array = NDArray[np.float64]

_REPLACED = {
    "drop": "Tokens of removed patches are dropped from the sequence.",
    "blank": "Removed patches are filled with the image's mean colour.",
    "blur": "Removed patches are blurred.",
}


def collect(
    rows: Iterable[Mapping[str, Any]],
    *,
    dataset: Dataset,
    model: str,
    protocol: Protocol,
    metrics: Sequence[Metric],
    settings: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> Evaluation:
    """Collect the rows of all images.

    Args:
        rows: rows from `measure`, in the order of the data.
        dataset: the measured data.
        model: the model's id.
        protocol: the measured methods and groups.
        metrics: the metrics to show.
        settings: stored with the result.
        notes: additional notes.
    """
    labels = protocol.labels
    images: list[dict[str, Any]] = []
    failures: list[Mapping[str, Any]] = []
    table: list[Array] = []
    overlaps: list[Array] = []
    curves: list[Array] = []
    stages: list[Array] = []
    correlations: list[Mapping[str, Any]] = []
    names: tuple[str, ...] = ()
    for row in rows:
        if row["status"] != "measured":
            failures.append(row)
            continue
        known = {name: row[name] for name in ("input", *kinds_in("measured"), "seconds")}
        images.append(known | {"grid": row.get("grid")})
        table.append(_array([[row["values"][label].get(name) for label in labels] for name in METRICS]))
        if "overlap" in row:
            overlaps.append(_array([row["overlap"][label] or [None] * 4 for label in labels]))
        if "curves" in row:
            empty = {name: [None] * protocol.points for name in CURVES}
            by_method = [row["curves"].get(label, empty) for label in labels]
            curves.append(_array([[curve[name] for curve in by_method] for name in CURVES]))
        if "stages" in row:
            names = tuple(name for name, _ in row["stages"])
            stages.append(_array([[values.get(label) for label in labels] for _, values in row["stages"]]))
        if "correlation" in row:
            correlations.append(row["correlation"])
    values = np.array(table, dtype=np.float64).reshape(len(table), len(METRICS), len(labels))
    by_metric = {name: values[:, index] for index, name in enumerate(METRICS)}
    shown = [metric for metric in metrics if metric.group in {g for image in images for g in image["groups"]}]
    return Evaluation(
        data=dataset.name,
        model=model,
        methods=tuple(labels),
        metrics=tuple(shown),
        images=tuple(images),
        failures=tuple(failures),
        values={metric.name: by_metric[metric.name] for metric in shown},
        overlaps=np.array(overlaps) if overlaps else None,
        fractions=np.linspace(0.0, 1.0, protocol.points) if curves else None,
        curves={name: np.array([curve[index] for curve in curves]) for index, name in enumerate(CURVES)}
        if curves
        else {},
        stages=names,
        randomisation=np.array(stages) if stages else None,
        correlation=_correlation(model, correlations),
        settings=dict(settings),
        unchecked=protocol.unchecked,
        notes=(
            *_notes(dataset, images, failures, protocol),
            *_undefined(images, protocol, by_metric, shown),
            *notes,
        ),
    )


def _array(values: Any) -> Array:
    """Return a float64 array with NaN for None."""
    return np.array(values, dtype=np.float64)


def _correlation(model: str, records: Sequence[Mapping[str, Any]]) -> RankCorrelation | None:
    if not records:
        return None
    first = records[0]
    values = np.stack([_array(record["values"]) for record in records], axis=-1)
    return RankCorrelation(model, tuple(first["methods"]), tuple(first["references"]), tuple(first["layers"]), values)


def _notes(
    dataset: Dataset,
    images: Sequence[Mapping[str, Any]],
    failures: Sequence[Mapping[str, Any]],
    protocol: Protocol,
) -> list[str]:
    """Return notes on data, targets, replacement and sanity checks."""
    count = len(images)
    measured = "all measured" if not failures else f"{count} measured, {len(failures)} failed"
    notes = [f"{dataset.kind}, {measured}. Tables show means over images ± standard error."]
    labelled = sum(image["target_source"] == "label" for image in images)
    if labelled == count and count:
        notes.append("Class-specific methods explain the labelled class.")
    elif labelled:
        notes.append(
            f"Class-specific methods explain the labelled class on {_count(labelled, 'image')}, and the predicted "
            f"class on the other {count - labelled}, whose labels are not classes of the model."
        )
    elif count:
        notes.append("Class-specific methods explain the predicted class.")
    if "faithfulness" in protocol.groups:
        notes.append(f"{_REPLACED[protocol.replace]} Curves have {protocol.points} points.")
    if protocol.blurred_twin:
        notes.append(TWIN_NOTE)
    if "grid" in protocol.groups:
        notes.append(_about_grids([image["grid"] for image in images if image["grid"] is not None]))
    checked = sum("sanity" in image["groups"] for image in images)
    if checked:
        notes.append(f"The sanity checks used {_count(checked, 'image')}.")
        if protocol.unchecked:
            notes[-1] += (
                f" Methods without sanity checks, because they run the model many times: "
                f"{', '.join(protocol.unchecked)}; select a method with --method to check it."
            )
    return notes


def _about_grids(grids: Sequence[Sequence[str]]) -> str:
    if not grids:
        return (
            "No grid was made: a grid requires four labelled images of different classes, each predicted with a "
            "probability above 0.5."
        )
    count = len({tuple(names) for names in grids})
    return (
        f"The grid pointing game has {_count(len(grids), 'target')} in {_count(count, 'grid')} of four images, drawn "
        "with the seed among images whose labelled class is predicted with a probability above 0.5."
    )


def _undefined(
    images: Sequence[Mapping[str, Any]],
    protocol: Protocol,
    values: Mapping[str, Array],
    metrics: Sequence[Metric],
) -> list[str]:
    """Return notes on undefined values, which the means leave out."""
    notes = []
    missing = {
        metric.name: np.isnan(values[metric.name]) & np.array([[metric.group in image["groups"]] for image in images])
        for metric in metrics
    }
    undefined = next((missing[metric.name].all(axis=1) for metric in metrics if metric.needs_regions), None)
    if undefined is not None and undefined.any():
        notes.append(
            f"Localisation is not defined on {_count(int(undefined.sum()), 'image')}: the model input shows no "
            "object or no background, or the data has no regions."
        )
    constant = {label: sum(label in image["constant"] for image in images) for label in protocol.labels}
    if any(constant.values()):
        notes.append(
            f"Constant maps rank no patches: {_listed(constant)}. They count as chance in localisation and have "
            "no faithfulness or sanity values."
        )
    for metric in metrics:
        if metric.group == "sanity":
            counts = dict(zip(protocol.labels, missing[metric.name].sum(axis=0).tolist(), strict=True))
            counts = {
                label: count
                for label, count in counts.items()
                if label not in protocol.unchecked and not is_twin(label)
            }
            if any(counts.values()):
                reason = ", or does not shift by whole patches" if metric.name == "shift_stability" else ""
                notes.append(f"No value for {metric.title}, because a map is constant{reason}: {_listed(counts)}.")
    return notes


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{label} on {_count(count, 'image')}" for label, count in counts.items() if count)


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}".replace(",", " ")
