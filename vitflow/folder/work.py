"""The computation of batches, from decoded images to rows and maps: it adapts to memory and isolates failing images."""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from vitflow.errors import OptionError, check_known, printable, stops_all
from vitflow.explaining.applying import needs_gradients
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Contrast, Target, check_class_specific, contrasts_among, resolve_targets
from vitflow.files import in_file_name
from vitflow.folder.columns import Row, failed_row, placement_row
from vitflow.folder.decoders import Decoded
from vitflow.images import OVERLAY_FORMATS
from vitflow.models.classes import is_several, top_count
from vitflow.registry.choices import ChosenMethod, check_methods, has_targets, is_slow

T = TypeVar("T")
R = TypeVar("R")

#: Memory limit of the pixels waiting for the model, and of those waiting to be written (plus one image).
WAITING_BYTES = 192 * 2**20


#: The maps of an image by label.
SaliencyMaps = Mapping[str, Saliency]


class Batches:
    """Compute images in batches, and remember the batch size that fits into memory, at first `size`."""

    def __init__(self, explainer: Explainer, size: int) -> None:
        self.explainer = explainer
        self.fits = size

    def each(self, images: Sequence[T], work: Callable[[Sequence[T]], Sequence[R]]) -> Iterator[R | Exception]:
        """Yield the result of `work` for each image in order, or the image's error.

        If memory runs out, the batch size is halved, in later calls as well. After any other error, the rest of this
        call computes image by image, to attribute the error; one that applies to every image is raised.
        """
        one_by_one, start = False, 0
        while start < len(images):
            members = images[start : start + (1 if one_by_one else self.fits)]
            try:
                results: Sequence[R | Exception] = work(members)
            except Exception as error:
                if stops_all(error, self.explainer.fit):
                    raise
                # The traceback references the tensors that did not fit.
                results = [error.with_traceback(None)]
            memory_ran_out = isinstance(results[0], torch.OutOfMemoryError)
            if memory_ran_out and self.explainer.device.type == "cuda":
                torch.cuda.empty_cache()
            if isinstance(results[0], Exception) and len(members) > 1:
                one_by_one = not memory_ran_out
                self.fits = (len(members) + 1) // 2 if memory_ran_out else self.fits
                continue
            yield from results
            start += len(members)


@dataclass(frozen=True, slots=True)
class Job:
    """The methods, target and drawing options of a run.

    The label of a method is its name, numbered if it is requested twice; a target of None is each image's predicted
    class.
    """

    methods: tuple[ChosenMethod, ...]
    target: Target | Contrast = None
    drawing: Mapping[str, Any] = field(default_factory=dict)
    format: str = "jpg"
    overlays: bool = True

    @property
    def labels(self) -> list[str]:
        """The labels of an image's maps."""
        return [method.label for method in self.methods]

    @property
    def endings(self) -> list[str]:
        """The suffixes of an image's stem, one for each of its files; the same without overlays."""
        return [f"-{in_file_name(label)}.{self.format}" for label in self.labels]


def make_job(
    methods: Sequence[Any] | None,
    options: Mapping[str, Any],
    *,
    target: Target | Contrast = None,
    drawing: Mapping[str, Any] | None = None,
    format: str = "jpg",
    overlays: bool = True,
    has_target: bool = False,
) -> Job:
    """Complete and check the options of a run, before anything is loaded or read.

    `has_target`: the explained outputs are not the model's classes, which determines the default of `methods`.
    """
    check_known("format", format, OVERLAY_FORMATS)
    contrasting = bool(contrasts_among(target))
    one_class = target is None or isinstance(target, int | str)
    if not (contrasting or one_class) or is_several(target):
        raise OptionError(f"Expected one class for all images, got {target!r}: explain_batch takes several.")
    chosen = check_methods(methods, options, has_target=has_target or has_targets(target))
    if contrasting:
        check_class_specific(chosen)
    for position, method in enumerate(chosen):
        count = 1 + sum(other.name == method.name for other in chosen[:position])
        chosen[position] = method if count == 1 else replace(method, label=f"{method.name}-{count}")
    return Job(tuple(chosen), target, dict(drawing or {}), format, overlays)


def explainer_for(model: str | Path | nn.Module | Explainer | Callable[[], nn.Module | Explainer]) -> Explainer:
    """Return the explainer of a model, a model id, or a function that creates either."""
    return Explainer.of(model() if callable(model) and not isinstance(model, nn.Module) else model)


def auto_batch(explainer: Explainer, job: Job) -> int:
    """Return the default batch size: 64 saturate a GPU; on a CPU, more than 32 are not faster.

    A backward pass needs the memory of all layers, and slow methods form batches of their own.
    """
    if explainer.device.type == "cuda":
        return 64
    return 16 if needs_gradients(job.methods) or any(is_slow(each.name) for each in job.methods) else 32


def check_target(job: Job, explainer: Explainer) -> None:
    """Raise OptionError for a class that the model does not have, or a contrast of a class with itself."""
    if job.target is not None:
        count = explainer.num_classes
        indices = resolve_targets(sides_of(job), torch.zeros(1, count) if count else None, explainer.class_names)
        if isinstance(job.target, Contrast) and not job.target.against_rest:
            # The predicted class depends on the image.
            sides = [None if top_count(side) else index for side, index in zip(job.target.sides, indices, strict=True)]
            if sides[0] == sides[1]:
                names = f"{job.target.target!r} and {job.target.against!r}"
                raise OptionError(f"A contrast requires two classes, but {names} are the same class.")


def sides_of(job: Job) -> Target | list[Target]:
    """Return the class to explain, or both classes of a contrast."""
    return job.target.sides if isinstance(job.target, Contrast) else job.target


def parts(batches: Batches, images: Iterable[Decoded], most: int | None = None) -> Iterator[list[Decoded]]:
    """Split images, which are read lazily, into parts of at most `most` that fit into memory."""
    part: list[Decoded] = []
    for image in images:
        part.append(image)
        if len(part) >= min(batches.fits, most or batches.fits) or sum(each.nbytes for each in part) > WAITING_BYTES:
            yield part
            part = []
    if part:
        yield part


def compute_maps(batches: Batches, images: Sequence[Decoded], job: Job) -> list[tuple[Row, SaliencyMaps]]:
    """Explain a batch: return each image's row, without files, and its maps by label, none if it failed.

    An OptionError or UnsupportedModelError applies to every image.
    """

    def explain(members: Sequence[Decoded]) -> list[tuple[Row, SaliencyMaps]]:
        started = time.perf_counter()
        arrays = [image.image for image in members if image.image is not None]
        names = [printable(image.row["input"]) for image in members]
        maps = batches.explainer.explain_batch(arrays, methods=job.methods, targets=job.target, names=names)
        seconds = round((time.perf_counter() - started) / len(arrays), 4)
        each = len(job.methods)
        starts = range(0, len(maps), each)
        labelled = [dict(zip(job.labels, maps[start : start + each], strict=True)) for start in starts]
        return [
            (image.row | explained_row(by_label) | {"seconds": seconds}, by_label)
            for image, by_label in zip(members, labelled, strict=True)
        ]

    results = batches.each([image for image in images if image.image is not None], explain)
    return [(image.row, {}) if image.image is None else _row_or_error(image, next(results)) for image in images]


def _row_or_error(image: Decoded, result: tuple[Row, SaliencyMaps] | Exception) -> tuple[Row, SaliencyMaps]:
    if not isinstance(result, Exception):
        return result
    message = str(result)
    if isinstance(result, torch.OutOfMemoryError):
        message = "Out of device memory with a batch size of 1: " + message.partition("\n")[0]
    return failed_row(image.row, result, message), {}


def explained_row(maps: SaliencyMaps) -> Row:
    """Return the columns that an image's maps determine: status, score, facts, and the placement of the maps."""
    first = next(iter(maps.values()))
    facts = {label: dict(saliency.facts) for label, saliency in maps.items()}
    return {
        "status": "explained",
        "width": first.image.shape[1],
        "height": first.image.shape[0],
        **_score_columns(first),
        "facts": json.loads(json.dumps(facts, default=float)),
        "placement": placement_row({label: saliency.placement for label, saliency in maps.items()}),
        "outputs": {},
        "written": {},
    }


def _score_columns(saliency: Saliency) -> dict[str, Any]:
    columns = saliency.score.to_dict().items()
    top = [[index, round(value, 6)] for index, value in saliency.score.top]
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in columns} | {"top": top}


# -- the order and progress of runs


def in_order(futures: Iterable[Future[R]], most: int, nbytes: Callable[[R], int] = lambda result: 0) -> Iterator[R]:
    """Yield results in order; futures are submitted ahead, at most `most`, and about WAITING_BYTES of results."""
    waiting: deque[Future[R]] = deque()
    for future in futures:
        waiting.append(future)
        while len(waiting) > most or sum(nbytes(each.result()) for each in waiting if each.done()) > WAITING_BYTES:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


@dataclass(frozen=True, slots=True)
class RunProgress:
    """Progress of a run, passed to the callback at the start (without a row), then once per image.

    Attributes:
        done: images with a row, including those of earlier runs.
        total: images of the run.
        row: the newest row.
        under_way: further work done, in images, as far as it is known. Slow methods report it between rows, without a
            row.
        seconds: expected duration of the whole run, once it is known.
    """

    done: int
    total: int
    row: Mapping[str, Any] | None
    under_way: float = 0.0
    seconds: float | None = None


class Tally:
    """Count the images of a run that have a row, and report progress to a callback."""

    def __init__(self, callback: Callable[[RunProgress], None] | None, total: int, done: int = 0) -> None:
        self._callback, self._total, self.done = callback, total, done
        self.seconds: float | None = None
        self.share(0.0)

    def row(self, row: Mapping[str, Any], under_way: float = 0.0) -> None:
        """Count an image that has a row now."""
        self.done += 1
        self._report(row, under_way)

    def share(self, under_way: float) -> None:
        """Report further work done, in images."""
        self._report(None, under_way)

    def _report(self, row: Mapping[str, Any] | None, under_way: float) -> None:
        if self._callback is not None:
            self._callback(RunProgress(self.done, self._total, row, under_way, self.seconds))
