"""Evaluate methods on a model and data: a resumable run over images, and its results."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from vitflow.errors import VitflowError
from vitflow.evaluation.annotations import Labelled
from vitflow.evaluation.choices import (
    Question,
    applicable_methods,
    ask,
    check_options,
    choose_all,
    label_methods,
    possible_groups,
)
from vitflow.evaluation.collecting import collect
from vitflow.evaluation.datasets import Dataset, Sample, open_dataset
from vitflow.evaluation.gridding import Grid, draw_grids, lot, make_grids
from vitflow.evaluation.measures.perturbation import can_drop_tokens
from vitflow.evaluation.metrics import choose_metrics
from vitflow.evaluation.results import Evaluation
from vitflow.evaluation.scoring import Case, Protocol, measure
from vitflow.evaluation.statistics import RESAMPLES
from vitflow.explaining.choices import MethodChoice
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import is_slow
from vitflow.explaining.options import takes_method_options
from vitflow.explaining.progress import watched
from vitflow.folder.work import explainer_for
from vitflow.images.reading import ImageSource
from vitflow.runs.batches import Batches, RunProgress, Tally
from vitflow.runs.columns import failed_row
from vitflow.runs.fingerprints import run_fingerprint, without_probe
from vitflow.runs.store import Run, finishing, versions

#: Default number of images for costly groups.
SANITY_IMAGES = 24

# Groups of metrics that require many forward passes per image.
_COSTLY = ("sanity", "correlation")

# Number of maps per image and method in the sanity checks: stages of random weights, shifts, flips, classes.
_SANITY_ROUNDS = 9

_AUTO_BATCH = {"cpu": 8, "cuda": 64}


@takes_method_options
def evaluate(
    data: str | os.PathLike[str] | Dataset | Iterable[ImageSource],
    *,
    model: str | Path | nn.Module | Explainer | Callable[[], Explainer],
    methods: str | Sequence[MethodChoice] | None = None,
    metrics: Iterable[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    replace_by: str | None = None,
    points: int = 11,
    blurred_twin: bool = True,
    sanity_images: int = SANITY_IMAGES,
    batch_size: int | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
    overwrite: bool = False,
    progress: Callable[[RunProgress], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Measure the quality of several methods' maps on your model and images, with two baselines.

    An image that cannot be measured becomes a row with an error. With an output folder the run is resumable: a second
    run with the same options computes missing and failed images.

    Args:
        data: drawn images ("demo:500"), annotations, a folder or list of images; see `open_dataset`.
        model: a model id (see `load_model`), a module, an Explainer, or a function that returns one.
        methods: names, or (name, options) pairs; "all" for every method that the model supports; by default all except
            similarity and the methods that run the model many times (occlusion, sampling, consensus and LeGrad; with
            "all" they have no sanity checks). The baselines `random` and `centre` are added.
        metrics: names or groups ("localisation", "faithfulness", "sanity", "grid", "correlation"), or "all" among them;
            by default the first three groups.
        output: folder for rows, tables, figures and the page.
        images: folder with the images of an annotation file; by default the folder of the file.
        limit: maximum number of images.
        replace_by: replacement of removed patches: "drop" (drop their tokens), "blank" or "blur"; by default "drop" if
            the model supports it, else "blank".
        points: points of the deletion and insertion curves, both ends included.
        blurred_twin: also measure a blurred copy of each map, the control for smoothness.
        sanity_images: number of randomly chosen images for sanity and rank correlation, which require many forward
            passes.
        batch_size: images per forward pass; by default 8 on a CPU and 64 on a GPU, halved if memory runs out.
        resamples: resamples of each bootstrap interval.
        seed: seed of resamples, random weights, and the choice of images for sanity.
        overwrite: discard the rows of an earlier run in the output folder.
        progress: called for each finished image.
        options: options for every method that accepts them.

    Raises:
        OptionError: an option is invalid, or the output folder contains a run with other options and overwrite is
            False.
        VitflowError: the data or the model cannot be read, or no image could be measured.
        KeyboardInterrupt: finished rows are kept in the output folder.

    >>> evaluation = evaluate("demo:4", model="demo", methods=["gae"], metrics=["localisation"])
    >>> [(row.method, row.estimate.mean > 0.9) for row in evaluation.table("roc_auc")]
    [('gae', True), ('gae (blurred)', True), ('random', False), ('centre', False)]
    """
    shown, groups = choose_metrics(metrics)
    check_options(points, sanity_images, batch_size, replace_by)
    chosen = label_methods(choose_all(methods), options)
    dataset = open_dataset(data, images=images, limit=limit)
    explainer = explainer_for(model)
    groups, notes = possible_groups(groups, dataset, explainer)
    if methods is None or methods == "all":
        chosen, left_out = applicable_methods(explainer, dataset, chosen)
        notes += left_out
    how = replace_by or ("drop" if "faithfulness" in groups and can_drop_tokens(explainer) else "blank")
    # Of "all" methods those that run the model many times would take longer than all others together.
    slow = [one.label for one in chosen if methods == "all" and "predict" in one.method.needs]
    twins = blurred_twin and bool({"localisation", "faithfulness"} & set(groups))
    protocol = Protocol(
        methods=tuple(chosen),
        groups=tuple(groups),
        replace=how,
        points=points,
        seed=seed,
        unchecked=tuple(slow),
        blurred_twin=twins,
    )
    settings = _settings(dataset, explainer, protocol, sanity_images)
    groups_of_images = _groups_of(dataset, protocol, sanity_images)
    grids = make_grids(dataset.samples, explainer, _questions(explainer), seed) if "grid" in groups else {}
    run = _Run(dataset, explainer, protocol, groups_of_images, batch_size, progress, grids)
    evaluation = collect(
        list(run.rows()) if output is None else run.kept_rows(Path(output), settings, overwrite),
        dataset=dataset,
        model=explainer.model_id,
        protocol=protocol,
        metrics=[metric for metric in shown if metric.group in groups],
        settings=without_probe(settings) | {"resamples": resamples, "versions": versions()},
        notes=notes,
    )
    if not evaluation.images:
        raise VitflowError(_nothing_measured(evaluation.failures))
    if output is not None:
        with finishing(output):
            if grids:
                best = [name for name, _ in evaluation.ranking("grid_auc")] if "grid_auc" in evaluation.values else []
                evaluation = replace(evaluation, grids=draw_grids(grids, explainer, protocol.methods, best))
            evaluation.save(Path(output))
    return evaluation


def _settings(dataset: Dataset, explainer: Explainer, protocol: Protocol, sanity_images: int) -> dict[str, Any]:
    """Return everything that the rows depend on; runs with equal settings may share a folder."""
    costly = {"sanity_images": sanity_images} if set(_COSTLY) & set(protocol.groups) else {}
    removing = {"replace_by": protocol.replace, "points": protocol.points} if "faithfulness" in protocol.groups else {}
    data = {"data": dict(dataset.identity) or {"own": dataset.name}}
    measured = {
        "groups": list(protocol.groups),
        "seed": protocol.seed,
        "blurred_twin": protocol.blurred_twin,
        **costly,
        **removing,
    }
    return run_fingerprint("evaluation", data, explainer.fingerprint(), protocol.methods, measured)


def _questions(explainer: Explainer) -> Callable[[Labelled], Question]:
    return partial(ask, num_classes=explainer.num_classes, class_names=explainer.class_names)


def _nothing_measured(failures: Sequence[Mapping[str, Any]]) -> str:
    if not failures:
        return "There is no image to measure."
    first = failures[0]
    return (
        f"None of the {len(failures)} images could be measured. The first was {first['input']!r}: "
        f"{first['error']}: {first['message']}"
    )


@dataclass(frozen=True, slots=True)
class _Run:
    """Measures the images of a data set in batches; `groups` are the groups of metrics for each image."""

    dataset: Dataset
    explainer: Explainer
    protocol: Protocol
    groups: Mapping[str, tuple[str, ...]]
    batch_size: int | None
    progress: Callable[[RunProgress], None] | None
    grids: Mapping[str, Grid]

    def grid_names(self, name: str) -> list[str] | None:
        """Return the names of the images in the same grid, or None."""
        return self.grids[name].names if name in self.grids else None

    def kept_rows(self, folder: Path, settings: Mapping[str, Any], overwrite: bool) -> list[dict[str, Any]]:
        """Measure images without a row in the folder, and return all rows in the order of the data."""
        samples = {sample.name: sample for sample in self.dataset.samples}

        def is_done(row: Mapping[str, Any]) -> bool:
            name = row["input"]
            return _is_done(row, samples[name], self.groups[name], self.grid_names(name))

        with Run(folder, settings, overwrite=overwrite) as run:
            for row in self.rows(run.missing(list(samples), is_done)):
                run.put([(row, {})])
            run.finish()
            # Leave out groups that an earlier run measured on more images.
            return [_only(row, self.groups[row["input"]]) for row in run.rows()]

    def rows(self, names: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Measure these images, by default all, in batches; yields a row for each."""
        requested = {sample.name for sample in self.dataset.samples} if names is None else set(names)
        missing = [sample for sample in self.dataset.samples if sample.name in requested]
        tally = Tally(self.progress, len(self.dataset), len(self.dataset) - len(missing))
        size = self.batch_size or _AUTO_BATCH.get(self.explainer.device.type, 8)
        batches = Batches(self.explainer, size)
        question_of = _questions(self.explainer)
        for start in range(0, len(missing), size):
            samples = missing[start : start + size]
            with watched(partial(_report_share, tally, tally.done, len(samples)), self._rounds(samples)):
                for row in self._measure(batches, samples, question_of):
                    tally.row(row)
                    yield row

    def _measure(
        self, batches: Batches, samples: Sequence[Sample], question_of: Callable[[Labelled], Question]
    ) -> Iterator[dict[str, Any]]:
        cases: list[Case] = []
        stamps = {}
        for sample in samples:
            stamps[sample.name] = {"stamp": sample.stamp()}
            try:
                image = sample.read()
                question = question_of(image)
            except (VitflowError, OSError) as error:
                yield failed_row({"input": sample.name}, error) | stamps[sample.name]
            else:
                cases.append(Case(sample.name, image, question, self.groups[sample.name], self.grids.get(sample.name)))
        for row in measure(batches, cases, self.protocol):
            yield row | stamps[row["input"]]

    def _rounds(self, samples: Sequence[Sample]) -> float:
        """Return the expected number of computations of slow methods for the batch."""
        slow = [one.label for one in self.protocol.methods if is_slow(one.name)]
        checked = len([label for label in slow if label not in self.protocol.unchecked])
        share = sum("sanity" in self.groups[sample.name] for sample in samples) / len(samples)
        return max(len(slow) + checked * share * _SANITY_ROUNDS, 1)


def _groups_of(dataset: Dataset, protocol: Protocol, sanity_images: int) -> dict[str, tuple[str, ...]]:
    """Return the groups measured on each image; costly groups on a subset."""
    quick = tuple(group for group in protocol.groups if group not in _COSTLY)
    names = [sample.name for sample in dataset.samples]
    drawn = set(sorted(names, key=lambda name: lot(name, protocol.seed))[:sanity_images])
    return {name: protocol.groups if name in drawn else quick for name in names}


def _report_share(tally: Tally, before: int, images: int, share: float) -> None:
    """Report the completed share of a batch, in addition to its images that already have a row."""
    tally.share(max(before + share * images - tally.done, 0.0))


def _is_done(row: Mapping[str, Any], sample: Sample, groups: Sequence[str], grid: list[str] | None) -> bool:
    """Return True if an earlier run measured this version of the image in this grid, with all requested groups."""
    same = row["status"] == "measured" and row["stamp"] == sample.stamp() and set(groups) <= set(row["groups"])
    return same and ("grid" not in groups or row.get("grid") == grid)


def _only(row: dict[str, Any], groups: Sequence[str]) -> dict[str, Any]:
    """Return a row without groups of metrics that this run does not measure on the image."""
    if row["status"] != "measured" or set(row["groups"]) <= set(groups):
        return row
    kept = {name: value for name, value in row.items() if name not in ("stages", "correlation")}
    return kept | {"groups": list(groups)}
