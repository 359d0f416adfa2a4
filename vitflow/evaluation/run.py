"""Evaluate methods on a model and data: choose what to measure, and measure image by image, with resume."""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import nn

from vitflow.analysis.removal import REPLACEMENTS, can_drop_tokens
from vitflow.errors import (
    NoGradientError,
    OptionError,
    VitflowError,
    VitflowWarning,
    check_known,
    stops_all,
    whole_number,
)
from vitflow.evaluation.card import card_method, check_count, draw_card, median_images
from vitflow.evaluation.datasets import open_dataset
from vitflow.evaluation.measuring import Case, MeasuredImage, Protocol, add_sameness, measure, with_maps
from vitflow.evaluation.metrics import GROUPS, choose_metrics, is_blurred
from vitflow.evaluation.results import Evaluation
from vitflow.evaluation.samples import Dataset, Sample
from vitflow.evaluation.targets import ImageGrid, choose_target, explain_samples, make_grids
from vitflow.explaining.explainer import Explainer
from vitflow.folder.columns import failed_row, pack_half, unpack_half
from vitflow.folder.store import Run, finishing, versions
from vitflow.folder.work import Batches, RunProgress, Tally, explainer_for
from vitflow.images.figures import check_format, save_figure
from vitflow.images.reading import ImageSource
from vitflow.progress import watched
from vitflow.registry.choices import (
    ChosenMethod,
    MethodChoice,
    check_methods,
    choose_methods,
    is_slow,
    left_out,
)
from vitflow.registry.method_table import BASELINES, Method, list_methods
from vitflow.registry.option_types import MethodOptions

#: Default number of images for the sanity checks.
SANITY_IMAGES = 24

# Maps per image and method in the sanity checks: random weights and another class.
_SANITY_ROUNDS = 2

_AUTO_BATCH = {"cpu": 8, "cuda": 64}

# Reasons for groups that cannot be measured, by what they need.
_MISSING = {
    "regions": "the data has no masks or boxes (XML files of Pascal VOC and text files of YOLO are not read)",
    "classes": "the model has no classes",
}


def evaluate(
    data: str | os.PathLike[str] | Dataset | Iterable[ImageSource],
    model: str | Path | nn.Module | Explainer | Callable[[], Explainer],
    *,
    methods: str | Sequence[MethodChoice] | None = None,
    metrics: Iterable[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    card: str | os.PathLike[str] | None = None,
    images: str | os.PathLike[str] | None = None,
    limit: int | None = None,
    replace_by: str | None = None,
    points: int = 11,
    blurred_control: bool = False,
    sanity_images: int = SANITY_IMAGES,
    batch_size: int | None = None,
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
            these except similarity and methods that run the model again: frozen gradient, occlusion, sampling,
            consensus and LeGrad (with "all" without sanity checks). The baselines `random` and `centre` are added.
        metrics: names or groups ("localisation", "faithfulness", "sanity", "grid", "sameness"); by default all that
            have a value on these images.
        output: folder for the rows, tables, figures and the HTML report.
        card: file (.png, .pdf or .svg) for a card of the only method, or of that of the verdict: three images with
            their maps, deletion and localisation. It requires ten images.
        images: folder of the images of an annotation file, if they are not next to it.
        limit: maximum number of images, taken from the start.
        replace_by: replacement of removed patches: "drop" (drop their tokens from the sequence) or "blank"; by default
            "drop" if the model supports it, else "blank".
        points: number of points of the deletion and insertion curves, both ends included.
        blurred_control: also measure each map blurred, as a control for the effect of smoothness.
        sanity_images: number of randomly drawn images for sanity, which takes many forward passes.
        batch_size: images per forward pass; by default 8 on a CPU and 64 on a GPU, halved when memory runs out.
        seed: seed of the random weights and the draw of images.
        overwrite: discard the rows of an earlier run in the output folder.
        progress: called after each progress of the run.
        options: options for every method that accepts them.

    Raises:
        OptionError: an option is invalid, or the output folder has a run with other options and overwrite is False.
        VitflowError: the data or the model cannot be read, or no image could be measured.
        KeyboardInterrupt: the finished rows stay in the output folder.

    >>> result = evaluate("demo:4", model="demo", methods=["gae"], metrics=["localisation"])
    >>> [(row.method, row.estimate.mean > 0.9) for row in result.table("roc_auc")]
    [('gae', True), ('random', False), ('centre', False)]
    """
    shown, groups = choose_metrics(metrics)
    whole_number("points", points, 2)
    whole_number("sanity_images", sanity_images, 0)
    if batch_size is not None:
        whole_number("batch_size", batch_size, 1)
    if replace_by is not None:
        check_known("replacement", replace_by, REPLACEMENTS)
    chosen = choose(methods, options)
    dataset = open_dataset(data, images=images, limit=limit)
    if card is not None:
        check_format(card)
        check_count(len(dataset))
    explainer = explainer_for(model)
    groups, notes = _possible_groups(groups, dataset, explainer)
    if methods is None or methods == "all":
        chosen, refused = _applicable_methods(explainer, dataset, chosen)
        notes += refused
    protocol = Protocol(
        methods=tuple(chosen),
        groups=tuple(groups),
        replace=replace_by or ("drop" if "faithfulness" in groups and can_drop_tokens(explainer) else "blank"),
        points=points,
        seed=whole_number("seed", seed, 0),
        sanity_images=sanity_images,
        # With "all", methods that run the model again would dominate the time of the sanity checks.
        unchecked=tuple(each.label for each in chosen if methods == "all" and "predict" in each.method.needs),
        blurred_control=blurred_control and bool({"localisation", "faithfulness"} & set(groups)),
    )
    settings = protocol.settings(dataset, explainer)
    grids = make_grids(dataset.samples, explainer, protocol.seed) if "grid" in groups else {}
    run = _Run(dataset, explainer, protocol, protocol.groups_of(dataset), grids, batch_size, progress)
    rows = list(run.rows(dataset.samples)) if output is None else run.kept_rows(Path(output), settings, overwrite)
    measured = [row for row, _ in rows if row["status"] == "measured"]
    if not measured:
        raise VitflowError(
            f"None of the {len(dataset)} images could be measured. First error: {rows[0][0]['input']!r}: "
            f"{rows[0][0]['error']}: {rows[0][0]['message']}"
        )
    notes += add_sameness(rows) if "sameness" in protocol.groups else []
    groups = [group for row in measured for group in row["groups"]]
    by_method = [values for row in measured for values in row["values"].values()]
    defined = {name for values in by_method for name, value in values.items() if value is not None}
    evaluation = Evaluation(
        data=dataset.name,
        model=explainer.model_id,
        methods=tuple(measured[0]["values"]),
        metrics=tuple(m for m in shown if m.group in groups and (metrics is not None or m.name in defined)),
        records=tuple(row for row, _ in rows),
        settings=settings | {"versions": versions()},
        kind=dataset.kind,
        skipped=tuple(notes),
    )
    return _finished(evaluation, run, output, card)


def _finished(
    evaluation: Evaluation, run: "_Run", output: str | os.PathLike[str] | None, card: str | os.PathLike[str] | None
) -> Evaluation:
    """Write the output folder with maps of some images, and the card; return the evaluation with these maps."""
    samples, explainer = {sample.name: sample for sample in run.dataset.samples}, run.explainer
    methods = run.protocol.methods
    if output is not None:
        with finishing(output):
            examples = explain_samples([samples[name] for name in evaluation.extremes], explainer, methods)
            evaluation = replace(evaluation, examples=examples)
            evaluation.save(Path(output))
    if card is not None:
        check_count(len(evaluation.images))
        label = card_method(evaluation)
        middle = [samples[name] for name in median_images(evaluation, label)]
        maps = explain_samples(middle, explainer, [each for each in methods if each.label == label])
        save_figure(draw_card(evaluation, label, maps.saliencies if maps else ()), card)
    return evaluation


def choose(methods: str | Sequence[MethodChoice] | None, options: Mapping[str, Any]) -> list[ChosenMethod]:
    """Return the methods to measure, then the baselines, labelled with the options given with their names."""
    if methods is None:
        choices: list[MethodChoice] = [m.name for m in list_methods() if not m.needs & {"predict", "repeat", "tokens"}]
    elif methods == "all":
        choices = [method.name for method in list_methods()]
    else:
        choices = [methods] if isinstance(methods, str) else list(methods)
    names = [method.name for method in choose_methods(choices, {})] if choices else []
    choices += [name for name in BASELINES if name not in names]
    chosen: list[ChosenMethod] = []
    for choice, method in zip(choices, check_methods(choices, options), strict=True):
        given = {} if isinstance(choice, str | Method | ChosenMethod) else choice[1]
        label = method.name + (":" + ",".join(f"{key}={value}" for key, value in given.items()) if given else "")
        if any(label == other.label for other in chosen):
            raise OptionError(f"Expected different methods or options, got {label} twice.")
        chosen.append(replace(method, label=label))
    return sorted(chosen, key=lambda method: method.name in BASELINES)


def _possible_groups(groups: Sequence[str], dataset: Dataset, explainer: Explainer) -> tuple[list[str], list[str]]:
    """Return the groups that data and model support, and notes on the others; OptionError if none is left."""
    available = {"": True, "regions": dataset.has_regions, "classes": bool(explainer.num_classes)}
    left = [group for group in groups if available[GROUPS[group].needs]]
    notes = [f"Skipped {group}: {_MISSING[GROUPS[group].needs]}." for group in groups if group not in left]
    if not left:
        raise OptionError(f"None of the metrics can be measured. {' '.join(notes)}")
    return left, notes


def _applicable_methods(
    explainer: Explainer, dataset: Dataset, chosen: list[ChosenMethod]
) -> tuple[list[ChosenMethod], list[str]]:
    """Return the methods that the model supports, tried on an image that has a gradient, and notes on the others."""
    refused: dict[str, VitflowError] = {}
    for sample in dataset.samples[:20]:
        try:
            image = sample.read().image
        except (VitflowError, OSError):  # the run reports the errors of the images
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VitflowWarning)
            refused = explainer.refusals([each for each in chosen if not refused or each.name in refused], image)
        if not any(isinstance(error, NoGradientError) for error in refused.values()):
            break
    return [method for method in chosen if method.name not in refused], left_out(refused)


@dataclass(frozen=True, slots=True)
class _Run:
    """Measures the images of a data set in batches; `groups` and `grids` are by image."""

    dataset: Dataset
    explainer: Explainer
    protocol: Protocol
    groups: Mapping[str, tuple[str, ...]]
    grids: Mapping[str, ImageGrid]
    batch_size: int | None
    progress: Callable[[RunProgress], None] | None

    def kept_rows(self, folder: Path, settings: Mapping[str, Any], overwrite: bool) -> list[MeasuredImage]:
        """Measure the images without a row in the folder, and return all rows in the order of the data."""
        samples = {sample.name: sample for sample in self.dataset.samples}

        def is_done(row: Mapping[str, Any]) -> bool:
            """Return True if an earlier run measured these groups on this image, unchanged and in the same grid."""
            sample, grid = samples[row["input"]], self.grids.get(row["input"])
            same = row["groups"] == list(self.groups[sample.name]) if row["status"] == "measured" else False
            return same and row["stamp"] == sample.stamp() and row.get("grid") == (grid and grid.names)

        with Run(folder, settings, overwrite=overwrite) as run:
            for measured in self.rows([samples[name] for name in run.missing(list(samples), is_done)]):
                run.put([measured])
            run.finish()
            return list(run.with_maps())

    def rows(self, samples: Sequence[Sample]) -> Iterator[MeasuredImage]:
        """Measure these images of the data set, and yield a row for each, with the maps for sameness."""
        tally = Tally(self.progress, len(self.dataset), len(self.dataset) - len(samples))
        most = self.batch_size or _AUTO_BATCH.get(self.explainer.device.type, 8)
        batches, start = Batches(self.explainer, most), 0
        while start < len(samples):
            # The first image is alone: its time tells that of the others.
            batch = samples[start : start + (1 if tally.seconds is None else most)]
            begin = time.perf_counter()
            with watched(partial(_report_share, tally, tally.done, len(batch)), self._rounds(batch)):
                for row, maps in self._measure(batches, batch):
                    tally.row(row)
                    yield row, maps
            if tally.seconds is None and row["status"] == "measured":
                tally.seconds = (time.perf_counter() - begin) * self._work(samples) / self._work(batch)
                tally.share(0.0)
            start += len(batch)

    def _measure(self, batches: Batches, samples: Sequence[Sample]) -> Iterator[MeasuredImage]:
        """Yield the row of each image of a batch, with its error if it fails; raise the error of all images."""
        cases: list[Case] = []
        stamps = {sample.name: {"stamp": sample.stamp()} for sample in samples}
        for sample in samples:
            name = sample.name
            try:
                image = sample.read()
                truth = choose_target(image, self.explainer.num_classes, self.explainer.class_names)
            except (VitflowError, OSError) as error:
                yield failed_row({"input": name}, error) | stamps[name], {}
                continue
            cases.append(
                Case(self.explainer, self.protocol, name, image, truth, self.groups[name], self.grids.get(name))
            )
        for case, result in zip(cases, batches.each(cases, with_maps), strict=True):
            maps: dict[str, Any] = {}
            try:
                row = result if isinstance(result, Exception) else measure(result)
                if isinstance(result, Case) and "sameness" in case.groups:
                    # As they are stored, so that the numbers of a run with and without a folder are the same.
                    grids = {label: each.grid for label, each in result.maps.items() if not is_blurred(label)}
                    maps = {label: unpack_half(*pack_half(grid)) for label, grid in grids.items()}
            except Exception as error:
                if stops_all(error, self.explainer.fit):
                    raise
                row = error
            row = failed_row({"input": case.name}, row) if isinstance(row, Exception) else row
            yield row | stamps[case.name], maps

    def _work(self, samples: Sequence[Sample]) -> int:
        """Return the expected work on images, in runs of every method."""
        names = [sample.name for sample in samples]
        return sum(1 + (name in self.grids) + _SANITY_ROUNDS * ("sanity" in self.groups[name]) for name in names)

    def _rounds(self, samples: Sequence[Sample]) -> float:
        """Return the expected work on a batch, in runs of one slow method over it."""
        slow = [method.label for method in self.protocol.methods if is_slow(method.name)]
        checked = len([label for label in slow if label not in self.protocol.unchecked])
        share = sum("sanity" in self.groups[sample.name] for sample in samples) / len(samples)
        return max(len(slow) + checked * share * _SANITY_ROUNDS, 1)


def _report_share(tally: Tally, before: int, images: int, share: float) -> None:
    """Report the progress of a batch, minus its images that already have a row."""
    tally.share(max(before + share * images - tally.done, 0.0))
