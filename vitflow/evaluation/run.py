"""Evaluate methods on a model and data: measure image by image, with resume, and collect the results."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from vitflow.errors import VitflowError
from vitflow.evaluation.choices import (
    applicable_methods,
    check_options,
    choose,
    choose_target,
    possible_groups,
)
from vitflow.evaluation.collecting import collect
from vitflow.evaluation.datasets import Dataset, Sample, open_dataset
from vitflow.evaluation.gridding import Grid, draw_grids, make_grids, random_order
from vitflow.evaluation.measures.perturbation import can_drop_tokens
from vitflow.evaluation.metrics import choose_metrics
from vitflow.evaluation.results import Evaluation
from vitflow.evaluation.scoring import Case, Protocol, measure
from vitflow.evaluation.statistics import RESAMPLES
from vitflow.explaining.choices import MethodChoice
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import is_slow
from vitflow.explaining.option_types import MethodOptions
from vitflow.explaining.options import takes_method_options
from vitflow.folder.work import explainer_for
from vitflow.images.reading import ImageSource
from vitflow.progress import watched
from vitflow.runs.batches import Batches, RunProgress, Tally
from vitflow.runs.columns import failed_row
from vitflow.runs.fingerprints import run_fingerprint, without_probe
from vitflow.runs.store import Run, finishing, versions

#: Default number of images for the costly groups.
SANITY_IMAGES = 24

# Groups of metrics that take many forward passes per image.
_COSTLY = ("sanity", "correlation", "intervals")

# Maps per image and method in the sanity checks: randomisation stages, shifts, flips and classes.
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
    **options: Unpack[MethodOptions],
) -> Evaluation:
    """Evaluate the maps of several methods and two baselines on a model and data.

    An image that cannot be measured becomes a row with an error, and the run continues. With an output folder the rows
    are saved as they are made: a second run with the same options resumes the first and retries failed images.

    Args:
        data: demo images ("demo:500"), annotations, or a folder or list of images; see `open_dataset`.
        model: a model id (see `load_model`), a module, an Explainer, or a function that returns one.
        methods: names, or (name, options) pairs; "all" for every method that the model supports; by default all of
            these except similarity and methods that run the model many times: occlusion, sampling, consensus and LeGrad
            (with "all" these have no sanity checks). The baselines `random` and `centre` are added.
        metrics: names or groups ("localisation", "faithfulness", "sanity", "grid", "intervals", "correlation"), or
            "all"; by default the first three groups.
        output: folder for the rows, tables, figures and the HTML report.
        images: folder of the images of an annotation file, if they are not next to it.
        limit: maximum number of images, taken from the start.
        replace_by: replacement of removed patches: "drop" (drop their tokens from the sequence), "blank" or "blur"; by
            default "drop" if the model supports it, else "blank".
        points: number of points of the deletion and insertion curves, both ends included.
        blurred_twin: also measure each map blurred, as a control for the effect of smoothness.
        sanity_images: number of randomly drawn images for sanity, intervals and rank correlation, which take many
            forward passes.
        batch_size: images per forward pass; by default 8 on a CPU and 64 on a GPU, halved when memory runs out.
        resamples: bootstrap resamples of each interval.
        seed: seed of the resamples, the random weights and the draw of images.
        overwrite: discard the rows of an earlier run in the output folder.
        progress: called after each progress of the run.
        options: options for every method that accepts them.

    Raises:
        OptionError: an option is invalid, or the output folder has a run with other options and overwrite is False.
        VitflowError: the data or the model cannot be read, or no image could be measured.
        KeyboardInterrupt: the finished rows stay in the output folder.

    >>> result = evaluate("demo:4", model="demo", methods=["gae"], metrics=["localisation"])
    >>> [(row.method, row.estimate.mean > 0.9) for row in result.table("roc_auc")]
    [('gae', True), ('gae (blurred)', True), ('random', False), ('centre', False)]
    """
    shown, groups = choose_metrics(metrics)
    check_options(points, sanity_images, batch_size, replace_by)
    chosen = choose(methods, options)
    dataset = open_dataset(data, images=images, limit=limit)
    explainer = explainer_for(model)
    groups, notes = possible_groups(groups, dataset, explainer, chosen)
    if methods is None or methods == "all":
        chosen, left_out = applicable_methods(explainer, dataset, chosen)
        notes += left_out
    replacement = replace_by or ("drop" if "faithfulness" in groups and can_drop_tokens(explainer) else "blank")
    # With "all", methods that run the model many times would dominate the time of the sanity checks.
    slow = [choice.label for choice in chosen if methods == "all" and "predict" in choice.method.needs]
    twins = blurred_twin and bool({"localisation", "faithfulness"} & set(groups))
    protocol = Protocol(
        methods=tuple(chosen),
        groups=tuple(groups),
        replace=replacement,
        points=points,
        seed=seed,
        unchecked=tuple(slow),
        blurred_twin=twins,
    )
    settings = _settings(dataset, explainer, protocol, sanity_images)
    grids = make_grids(dataset.samples, explainer, seed) if "grid" in groups else {}
    image_groups = _groups_of(dataset, protocol, sanity_images)
    run = _Run(dataset, explainer, protocol, image_groups, grids, batch_size, progress)
    evaluation = collect(
        list(run.rows(dataset.samples)) if output is None else run.kept_rows(Path(output), settings, overwrite),
        dataset=dataset,
        model=explainer.model_id,
        protocol=protocol,
        metrics=[metric for metric in shown if metric.group in groups],
        settings=without_probe(settings) | {"resamples": resamples, "versions": versions()},
        notes=notes,
    )
    if not evaluation.images:
        first = evaluation.failures[0]
        raise VitflowError(
            f"None of the {len(dataset)} images could be measured. First error: {first['input']!r}: {first['error']}: "
            f"{first['message']}"
        )
    if output is not None:
        with finishing(output):
            if grids:
                best = [name for name, _ in evaluation.ranking("grid_auc")] if "grid_auc" in evaluation.values else []
                evaluation = replace(evaluation, grids=draw_grids(grids, explainer, protocol.methods, best))
            evaluation.save(Path(output))
    return evaluation


def _settings(dataset: Dataset, explainer: Explainer, protocol: Protocol, sanity_images: int) -> dict[str, Any]:
    """Return everything that the rows depend on; runs with equal settings may share a folder."""
    data = {"data": dict(dataset.identity) or {"name": dataset.name}}
    measured: dict[str, Any] = {
        "groups": list(protocol.groups),
        "seed": protocol.seed,
        "blurred_twin": protocol.blurred_twin,
    }
    if set(_COSTLY) & set(protocol.groups):
        measured["sanity_images"] = sanity_images
    if "faithfulness" in protocol.groups:
        measured |= {"replace_by": protocol.replace, "points": protocol.points}
    return run_fingerprint("evaluation", data, explainer.fingerprint(), protocol.methods, measured)


@dataclass(frozen=True, slots=True)
class _Run:
    """Measures the images of a data set in batches; `groups` and `grids` are by image."""

    dataset: Dataset
    explainer: Explainer
    protocol: Protocol
    groups: Mapping[str, tuple[str, ...]]
    grids: Mapping[str, Grid]
    batch_size: int | None
    progress: Callable[[RunProgress], None] | None

    def kept_rows(self, folder: Path, settings: Mapping[str, Any], overwrite: bool) -> list[dict[str, Any]]:
        """Measure the images without a row in the folder, and return all rows in the order of the data."""
        samples = {sample.name: sample for sample in self.dataset.samples}

        def is_done(row: Mapping[str, Any]) -> bool:
            """Return True if an earlier run measured these groups on this image, unchanged and in the same grid."""
            name = row["input"]
            grid = self.grids[name].names if name in self.grids else None
            groups = list(self.groups[name])
            unchanged = row["stamp"] == samples[name].stamp() and row.get("grid") == grid
            return unchanged and row["status"] == "measured" and row["groups"] == groups

        with Run(folder, settings, overwrite=overwrite) as run:
            for row in self.rows([samples[name] for name in run.missing(list(samples), is_done)]):
                run.put([(row, {})])
            run.finish()
            return list(run.rows())

    def rows(self, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        """Measure these images of the data set, and yield a row for each."""
        tally = Tally(self.progress, len(self.dataset), len(self.dataset) - len(samples))
        size = self.batch_size or _AUTO_BATCH.get(self.explainer.device.type, 8)
        batches = Batches(self.explainer, size)
        for start in range(0, len(samples), size):
            batch = samples[start : start + size]
            with watched(partial(_report_share, tally, tally.done, len(batch)), self._rounds(batch)):
                for row in self._measure(batches, batch):
                    tally.row(row)
                    yield row

    def _measure(self, batches: Batches, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
        cases: list[Case] = []
        stamps = {sample.name: {"stamp": sample.stamp()} for sample in samples}
        for sample in samples:
            name = sample.name
            try:
                image = sample.read()
                truth = choose_target(image, self.explainer.num_classes, self.explainer.class_names)
                cases.append(Case(name, image, truth, self.groups[name], self.grids.get(name)))
            except (VitflowError, OSError) as error:
                yield failed_row({"input": name}, error) | stamps[name]
        for row in measure(batches, cases, self.protocol):
            yield row | stamps[row["input"]]

    def _rounds(self, samples: Sequence[Sample]) -> float:
        """Return the expected work on a batch, in runs of one slow method over it."""
        slow = [method.label for method in self.protocol.methods if is_slow(method.name)]
        checked = len([label for label in slow if label not in self.protocol.unchecked])
        share = sum("sanity" in self.groups[sample.name] for sample in samples) / len(samples)
        return max(len(slow) + checked * share * _SANITY_ROUNDS, 1)


def _groups_of(dataset: Dataset, protocol: Protocol, sanity_images: int) -> dict[str, tuple[str, ...]]:
    """Return the groups of each image; the costly groups are measured on a random subset."""
    quick = tuple(group for group in protocol.groups if group not in _COSTLY)
    names = [sample.name for sample in dataset.samples]
    drawn = set(sorted(names, key=lambda name: random_order(name, protocol.seed))[:sanity_images])
    return {name: protocol.groups if name in drawn else quick for name in names}


def _report_share(tally: Tally, before: int, images: int, share: float) -> None:
    """Report the progress of a batch, minus its images that already have a row."""
    tally.share(max(before + share * images - tally.done, 0.0))
