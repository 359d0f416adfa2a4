"""Collect the rows of a run into an Evaluation: arrays over images, and notes for the tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.evaluation.choices import TWIN_NOTE
from vitflow.evaluation.datasets import Dataset
from vitflow.evaluation.measures.correlation import RankCorrelation
from vitflow.evaluation.metrics import Metric
from vitflow.evaluation.results import Evaluation
from vitflow.evaluation.scoring import CURVES, Protocol
from vitflow.runs.columns import kinds_in

Array = NDArray[np.float64]

_REPLACED = {
    "drop": "Tokens of removed patches are dropped from the sequence.",
    "blank": "Removed patches are filled with the image's mean colour.",
    "blur": "Removed patches are blurred.",
}
# Reasons for undefined values, by group.
_UNDEFINED = {
    "localisation": "the model input shows no object or no background, or the data has no regions",
    "faithfulness": "a constant map does not rank patches",
    "sanity": "a map is constant, or does not shift by whole patches",
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
    rows = list(rows)
    measured = [row for row in rows if row["status"] == "measured"]
    failures = [row for row in rows if row["status"] != "measured"]
    known = ("input", *kinds_in("measured"), "seconds", "grid")
    images: tuple[dict[str, Any], ...] = tuple({name: row.get(name) for name in known} for row in measured)

    def stack(entries: Sequence[Mapping[str, Any]], empty: Any = None) -> Array:
        """Return values by label as [images, methods, ...], with NaN for None."""
        return np.array([[entry.get(label, empty) for label in protocol.labels] for entry in entries], dtype=np.float64)

    curves = [row["curves"] for row in measured if "curves" in row]
    overlaps = [row["overlap"] for row in measured if "overlap" in row]
    stages = [row["stages"] for row in measured if "stages" in row]
    names = tuple(stages[0]) if stages else ()
    shown = tuple(metric for metric in metrics if any(metric.group in image["groups"] for image in images))
    evaluation = Evaluation(
        data=dataset.name,
        model=model,
        methods=tuple(protocol.labels),
        metrics=shown,
        images=images,
        failures=tuple(failures),
        values={metric.name: stack([row["values"].get(metric.name, {}) for row in measured]) for metric in shown},
        overlaps=stack(overlaps, [None] * 4) if overlaps else None,
        curves={name: stack([row[name] for row in curves], [None] * protocol.points) for name in CURVES if curves},
        stages=names,
        randomisation=np.stack([stack([row[name] for row in stages]) for name in names], axis=1) if names else None,
        correlation=_correlation(model, [row["correlation"] for row in measured if "correlation" in row]),
        settings=dict(settings),
        unchecked=protocol.unchecked,
    )
    return replace(evaluation, notes=(*_notes(evaluation, dataset, protocol), *_undefined(evaluation), *notes))


def _correlation(model: str, records: Sequence[Mapping[str, Any]]) -> RankCorrelation | None:
    if not records:
        return None
    first = records[0]
    values = np.array([record["values"] for record in records], dtype=np.float64)
    return RankCorrelation(
        model, tuple(first["methods"]), tuple(first["references"]), tuple(first["layers"]), np.moveaxis(values, 0, -1)
    )


def _notes(evaluation: Evaluation, dataset: Dataset, protocol: Protocol) -> list[str]:
    """Return notes on data, targets, replacement, controls, grids and sanity checks."""
    images = evaluation.images
    count, failed = len(images), len(evaluation.failures)
    measured = f"{count} measured, {failed} failed" if failed else "all measured"
    labelled = sum(image["target_source"] == "label" for image in images)
    target = "the labelled class" if labelled else "the predicted class"
    if 0 < labelled < count:
        target += (
            f" on {_count(labelled, 'image')}, and the predicted class on the other {count - labelled}, whose labels "
            "are not classes of the model"
        )
    notes = [
        f"{dataset.kind}, {measured}. Tables show means over images ± standard error.",
        f"Class-specific methods explain {target}.",
    ]
    if "faithfulness" in protocol.groups:
        notes.append(f"{_REPLACED[protocol.replace]} Curves have {protocol.points} points.")
    if protocol.blurred_twin:
        notes.append(TWIN_NOTE)
    if "grid" in protocol.groups:
        grids = [tuple(image["grid"]) for image in images if image["grid"]]
        made = f"{_count(len(grids), 'target')} in {_count(len(set(grids)), 'grid')}" if grids else "no grid"
        notes.append(
            f"The grid pointing game has {made} of four images of different classes, drawn with the seed among images "
            "whose labelled class is predicted with a probability above 0.5."
        )
    checked = sum("sanity" in image["groups"] for image in images)
    if checked:
        notes.append(f"The sanity checks used {_count(checked, 'image')}.")
        if protocol.unchecked:
            notes[-1] += (
                f" Methods without sanity checks, because they run the model many times: "
                f"{', '.join(protocol.unchecked)}; select a method with --method to check it."
            )
    return notes


def _undefined(evaluation: Evaluation) -> list[str]:
    """Return notes on undefined values, which the means exclude."""
    notes = []
    for group, reason in _UNDEFINED.items():
        counts = dict.fromkeys(evaluation.methods, 0)
        for metric in evaluation.metrics:
            missing = np.isnan(evaluation.measured_values(metric)).sum(axis=0)
            for label, count in zip(evaluation.methods, missing.tolist(), strict=True):
                if metric.group == group and evaluation.is_measured(label, metric):
                    counts[label] = max(counts[label], count)
        listed = [f"{label} on {_count(count, 'image')}" for label, count in counts.items() if count]
        if listed:
            everywhere = len(listed) == len(counts) and len(set(counts.values())) == 1
            where = f"all methods on {_count(max(counts.values()), 'image')}" if everywhere else ", ".join(listed)
            notes.append(f"Undefined values in {group}, because {reason}: {where}.")
    return notes


def _count(count: int, word: str) -> str:
    return f"{count:,} {word}{'' if count == 1 else 's'}".replace(",", " ")
