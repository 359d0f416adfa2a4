"""The computation on one batch of a folder run: from decoded images to rows and files, without disk access."""

import io
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from vitflow.errors import OptionError, check_known, printable
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import (
    Contrast,
    Target,
    check_class_specific,
    contrasts_among,
    is_several,
    resolve_targets,
    top_count,
)
from vitflow.files import in_file_name
from vitflow.folder.batches import WAITING_BYTES, Batches
from vitflow.folder.columns import Row, failed_row, placement_row, rank_label
from vitflow.folder.decoders import Decoded
from vitflow.images import OVERLAY_FORMATS, WRITE_OPTIONS
from vitflow.images.geometry import place
from vitflow.images.pen import Pen
from vitflow.registry.choices import ChosenMethod, check_methods, has_targets

#: The maps of an image by label.
SaliencyMaps = Mapping[str, Saliency]


@dataclass(frozen=True, slots=True)
class Job:
    """The methods, target and drawing options of a run.

    Attributes:
        methods: one for each map; its label is its name, numbered if a method is requested twice.
        target: class to explain, "top3" for the three most probable ones, or a contrast; by default each image's
            predicted class.
        drawing: options of `Saliency.overlay`.
        format: format of the overlays, "jpg", "png" or "webp".
        overlays: write an overlay for each map; without them, the maps can be drawn later.
    """

    methods: tuple[ChosenMethod, ...]
    target: Target | Contrast = None
    drawing: Mapping[str, Any] = field(default_factory=dict)
    format: str = "jpg"
    overlays: bool = True

    @property
    def ranks(self) -> int:
        """The maximal number of classes or detections of an image; 0 for a single target."""
        return (top_count(self.target) or 0) if is_several(self.target) else 0

    @property
    def labels(self) -> list[str]:
        """The labels of an image's maps: for several targets, one for each rank."""
        labels = [method.label for method in self.methods]
        ranks = range(1, self.ranks + 1)
        return [rank_label(label, rank) for label in labels for rank in ranks] if self.ranks else labels

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

    `has_target` is True if the explained outputs are not the model's classes; it determines the default of `methods`.

    Raises:
        OptionError: unknown method, option or format, or a list of targets.
    """
    check_known("format", format, OVERLAY_FORMATS)
    contrasting = bool(contrasts_among(target))
    one_class = target is None or isinstance(target, int | str)
    if not (contrasting or one_class):
        raise OptionError(f"Expected one class for all images, or 'top3', got {target!r}.")
    chosen = check_methods(methods, options, has_target=has_target or has_targets(target))
    if contrasting:
        check_class_specific(chosen)
    for position, method in enumerate(chosen):
        count = 1 + sum(other.name == method.name for other in chosen[:position])
        chosen[position] = method if count == 1 else replace(method, label=f"{method.name}-{count}")
    return Job(tuple(chosen), target, dict(drawing or {}), format, overlays)


def explainer_for(model: str | Path | nn.Module | Explainer | Callable[[], Explainer]) -> Explainer:
    """Return the explainer of a model, a model id, or a function that creates an explainer."""
    if isinstance(model, Explainer):
        return model
    if callable(model) and not isinstance(model, nn.Module):
        return model()
    return Explainer(model)


def auto_batch(explainer: Explainer) -> int:
    """Return the default batch size: larger ones do not speed up a CPU, and 64 saturate a GPU."""
    return {"cuda": 64}.get(explainer.device.type, 16)


def check_target(job: Job, explainer: Explainer) -> None:
    """Check the target before the run, rather than for each image.

    Raises:
        OptionError: the model has no such class, or both sides of a contrast are always the same class.
    """
    if job.target is not None:
        count = explainer.num_classes
        indices = resolve_targets(sides_of(job), torch.zeros(1, count) if count else None, explainer.class_names)
        if isinstance(job.target, Contrast) and not job.target.against_rest:
            # The predicted class depends on the image.
            sides = [None if top_count(side) else index for side, index in zip(job.target.sides, indices, strict=True)]
            if sides[0] == sides[1]:
                raise OptionError(
                    f"A contrast requires two classes, but {job.target.target!r} and {job.target.against!r} are the "
                    "same class."
                )


def sides_of(job: Job) -> Target | list[Target]:
    """Return the class to explain, or both classes of a contrast."""
    return job.target.sides if isinstance(job.target, Contrast) else job.target


def parts(batches: Batches, images: Iterable[Decoded]) -> Iterator[list[Decoded]]:
    """Split images, which are read lazily, into parts that fit into memory; the split depends on the images alone."""
    part: list[Decoded] = []
    for image in images:
        part.append(image)
        if len(part) >= batches.fits or sum(each.nbytes for each in part) > WAITING_BYTES:
            yield part
            part = []
    if part:
        yield part


def compute_maps(batches: Batches, images: Sequence[Decoded], job: Job) -> list[tuple[Row, SaliencyMaps]]:
    """Explain a batch: return each image's row, without files, and its maps by label, none if it failed.

    Raises:
        OptionError, UnsupportedModelError: no image can be explained with these options.
    """

    def explain(members: Sequence[Decoded]) -> list[tuple[Row, SaliencyMaps]]:
        started = time.perf_counter()
        arrays = [image.image for image in members if image.image is not None]
        names = [printable(image.row["input"]) for image in members]
        explain_batch = partial(batches.explainer.explain_batch, methods=job.methods, targets=job.target)
        if batches.explainer.regions is None:
            flat = explain_batch(arrays, names=names)
            each = len(flat) // len(arrays)
            by_image = [flat[start : start + each] for start in range(0, len(flat), each)]
        else:  # the number of detections depends on the image
            by_image = [explain_batch([array], names=[name]) for array, name in zip(arrays, names, strict=True)]
        seconds = round((time.perf_counter() - started) / len(arrays), 4)
        labelled = [_labelled(maps, job) for maps in by_image]
        return [
            (image.row | explained_row(maps, job) | {"seconds": seconds}, maps)
            for image, maps in zip(members, labelled, strict=True)
        ]

    results = batches.each([image for image in images if image.image is not None], explain, job.methods)
    return [(image.row, {}) if image.image is None else _row_or_error(image, next(results)) for image in images]


def _labelled(maps: Sequence[Saliency], job: Job) -> SaliencyMaps:
    """Return the maps of an image, in the order of methods and targets, by label."""
    if not job.ranks:
        return dict(zip(job.labels, maps, strict=True))
    by_method = groupby(maps, key=lambda saliency: (saliency.method, saliency.options))
    return {
        rank_label(chosen.label, rank): saliency
        for chosen, (_, group) in zip(job.methods, by_method, strict=True)
        for rank, saliency in enumerate(group, start=1)
    }


def _row_or_error(image: Decoded, result: tuple[Row, SaliencyMaps] | Exception) -> tuple[Row, SaliencyMaps]:
    if not isinstance(result, Exception):
        return result
    message = str(result)
    if isinstance(result, torch.OutOfMemoryError):
        message = "Out of device memory with a batch size of 1: " + message.partition("\n")[0]
    return failed_row(image.row, result, message), {}


def explained_row(maps: SaliencyMaps, job: Job) -> Row:
    """Return the columns of an image that its maps determine: status, score, facts, and the placement of its maps."""
    first = next(iter(maps.values()))
    facts = {label: dict(saliency.facts) for label, saliency in maps.items()}
    # Maps of methods without classes exist for the first target only.
    by_rank = [[maps.get(rank_label(method.label, rank)) for method in job.methods] for rank in range(1, job.ranks + 1)]
    ranks = [_score_columns(next(filter(None, of_rank))) for of_rank in by_rank if any(of_rank)]
    return {
        "status": "explained",
        "width": first.image.shape[1],
        "height": first.image.shape[0],
        **_score_columns(first),
        **({"ranks": ranks} if ranks else {}),
        "facts": json.loads(json.dumps(facts, default=float)),
        "placement": placement_row({label: saliency.placement for label, saliency in maps.items()}),
        "outputs": {},
        "written": {},
    }


def _score_columns(saliency: Saliency) -> dict[str, Any]:
    columns = saliency.score.to_dict().items()
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in columns}


def draw_files(row: Row, maps: SaliencyMaps, job: Job) -> tuple[Row, dict[str, bytes]]:
    """Return an image's row with its overlays, and these by path relative to the output folder."""
    started = time.perf_counter()
    drawn = maps if job.overlays else {}
    outputs = {label: f"{row['stem']}-{in_file_name(label)}.{job.format}" for label in drawn}
    files = {
        outputs[label]: encode_overlay(saliency.overlay(**job.drawing), job.format) for label, saliency in drawn.items()
    }
    written = {path: len(content) for path, content in files.items()}
    seconds = round(row["seconds"] + time.perf_counter() - started, 4)
    return row | {"outputs": outputs, "written": written, "seconds": seconds}, files


def check_drawing(drawing: Mapping[str, Any], format: str) -> None:
    """Raise OptionError for options of overlays that are invalid or do not suit the format."""
    pen, grid = Pen(None, **drawing), np.eye(2, dtype=np.float32)
    pen.overlay(grid, place((8, 8), (8, 8)), np.zeros((8, 8, 3), np.uint8), pen.limits(grid))
    if pen.transparent and format == "jpg":
        raise OptionError("JPEG has no transparency: use format png or webp, or another background than none.")


def encode_overlay(overlay: NDArray[np.uint8], format: str) -> bytes:
    """Encode an overlay as the bytes of a file."""
    file = io.BytesIO()
    Image.fromarray(overlay).save(file, **WRITE_OPTIONS[f".{format}"])
    return file.getvalue()
