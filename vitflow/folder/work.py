"""The computation on one batch of a folder run: from decoded images to rows and files, without disk access."""

import io
import json
import time
from collections.abc import Callable, Mapping, Sequence
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

from vitflow.errors import OptionError, printable
from vitflow.explaining.choices import ChosenMethod, check_methods, has_targets
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import (
    Contrast,
    Target,
    check_class_specific,
    contrasts_among,
    is_several,
    is_top,
    resolve_targets,
    top_count,
)
from vitflow.files import in_file_name
from vitflow.folder.decoders import Decoded
from vitflow.folder.plan import Input
from vitflow.images import OVERLAY_FORMATS, WRITE_OPTIONS
from vitflow.runs.batches import Batches
from vitflow.runs.columns import Maps, Row, failed_row, rank_label


@dataclass(frozen=True, slots=True)
class Job:
    """The methods, target and drawing options of a run.

    Attributes:
        methods: one for each map; its label is its name, numbered if a method is requested twice.
        target: class to explain, "top3" for the three most probable ones, or a contrast; by default each image's
            predicted class.
        drawing: options of `Saliency.overlay`.
        format: format of the overlays, "jpg", "png" or "webp".
        save_map: also write each unscaled map as .npz.
        overlays: write an overlay for each map; without them, the maps can be drawn later.
    """

    methods: tuple[ChosenMethod, ...]
    target: Target | Contrast = None
    drawing: Mapping[str, Any] = field(default_factory=dict)
    format: str = "jpg"
    save_map: bool = False
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
        """The suffixes of an image's stem, one for each of its files."""
        suffixes = [self.format, "npz"] if self.save_map else [self.format]  # names are the same without overlays
        return [f"-{in_file_name(label)}.{suffix}" for label in self.labels for suffix in suffixes]


@dataclass(frozen=True, slots=True, eq=False)
class InputImage:
    """An input and the result of reading it."""

    item: Input
    decoded: Decoded

    @property
    def known(self) -> Row:
        """The columns that describe its file."""
        item, read = self.item, self.decoded
        changed = item.listed[1] if item.listed is not None else read.mtime_ns
        return {"input": item.key, "stem": item.stem, "size": read.size, "mtime_ns": changed, "sha256": read.sha256}


def make_job(
    methods: Sequence[Any] | None,
    options: Mapping[str, Any],
    *,
    target: Target | Contrast = None,
    drawing: Mapping[str, Any] | None = None,
    format: str = "jpg",
    save_map: bool = False,
    overlays: bool = True,
    has_target: bool = False,
) -> Job:
    """Complete and check the options of a run, before anything is loaded or read.

    `has_target` is True if the explained outputs are not the model's classes; it determines the default of `methods`.

    Raises:
        OptionError: unknown method, option or format, or a list of targets.
    """
    if format not in OVERLAY_FORMATS:
        raise OptionError(f"Expected a format of {', '.join(OVERLAY_FORMATS)}, got {format!r}.")
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
    return Job(tuple(chosen), target, dict(drawing or {}), format, save_map, overlays)


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
            sides = [None if is_top(side) else index for side, index in zip(job.target.sides, indices, strict=True)]
            if sides[0] == sides[1]:
                raise OptionError(
                    f"A contrast requires two classes, but {job.target.target!r} and {job.target.against!r} are the "
                    "same class."
                )


def sides_of(job: Job) -> Target | list[Target]:
    """Return the class to explain, or both classes of a contrast."""
    return job.target.sides if isinstance(job.target, Contrast) else job.target


@dataclass(frozen=True, slots=True, eq=False)
class ImageMaps:
    """An image's maps by label, and the time that they took."""

    maps: Mapping[str, Saliency]
    seconds: float = 0.0


def compute_maps(batches: Batches, images: Sequence[InputImage], job: Job) -> list[ImageMaps | Row]:
    """Explain a batch; the result of an image that cannot be read or explained is its row.

    Raises:
        OptionError, UnsupportedModelError: no image can be explained with these options.
    """

    def explain(members: Sequence[InputImage]) -> list[ImageMaps]:
        started = time.perf_counter()
        arrays = [image.decoded.image for image in members if image.decoded.image is not None]
        names = [printable(image.item.key) for image in members]
        explain_batch = partial(batches.explainer.explain_batch, methods=job.methods, targets=job.target)
        if batches.explainer.regions is None:
            flat = explain_batch(arrays, names=names)
            each = len(flat) // len(arrays)
            by_image = [flat[start : start + each] for start in range(0, len(flat), each)]
        else:  # the number of detections depends on the image
            by_image = [explain_batch([array], names=[name]) for array, name in zip(arrays, names, strict=True)]
        seconds = (time.perf_counter() - started) / len(arrays)
        return [ImageMaps(_labelled(maps, job), seconds=seconds) for maps in by_image]

    results = batches.each([image for image in images if image.decoded.image is not None], explain, job.methods)
    return [
        failed_row(image.known, image.decoded.error or "", image.decoded.message or "")
        if image.decoded.image is None
        else _or_failed(image, next(results))
        for image in images
    ]


def _labelled(maps: Sequence[Saliency], job: Job) -> dict[str, Saliency]:
    """Return the maps of an image, in the order of methods and targets, by label."""
    if not job.ranks:
        return dict(zip(job.labels, maps, strict=True))
    by_method = groupby(maps, key=lambda saliency: (saliency.method, saliency.options))
    return {
        rank_label(chosen.label, rank): saliency
        for chosen, (_, group) in zip(job.methods, by_method, strict=True)
        for rank, saliency in enumerate(group, start=1)
    }


def _or_failed(image: InputImage, result: ImageMaps | Exception) -> ImageMaps | Row:
    if isinstance(result, ImageMaps):
        return result
    message = str(result)
    if isinstance(result, torch.OutOfMemoryError):
        message = "Out of device memory with a batch size of 1: " + message.partition("\n")[0]
    return failed_row(image.known, result, message)


def describe(image: InputImage, result: ImageMaps | Row, job: Job) -> tuple[Row, Maps]:
    """Return an image's row without files (status, score, facts, placement of its maps), and its grids by label."""
    if not isinstance(result, ImageMaps):
        return result, {}
    first = next(iter(result.maps.values()))
    facts = {label: dict(saliency.facts) for label, saliency in result.maps.items()}
    row = image.known | {
        "status": "explained",
        "width": first.image.shape[1],
        "height": first.image.shape[0],
        **_score_columns(first),
        **_ranked(result.maps, job),
        "facts": json.loads(json.dumps(facts, default=float)),
        "saturated_share": _saturated_share(facts),
        "placement": first.placement.to_dict(),
        "outputs": {},
        "maps": None,
        "written": {},
        "seconds": round(result.seconds, 4),
    }
    return row, {label: saliency.grid for label, saliency in result.maps.items()}


def _score_columns(saliency: Saliency) -> dict[str, Any]:
    columns = saliency.score.to_dict().items()
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in columns}


def _ranked(maps: Mapping[str, Saliency], job: Job) -> dict[str, Any]:
    """Return the column `ranks` of a run with several targets: the score columns of each."""
    by_rank = {int(label.rpartition("-top")[2]): saliency for label, saliency in maps.items()} if job.ranks else {}
    return {"ranks": [_score_columns(by_rank[rank]) for rank in sorted(by_rank)]} if by_rank else {}


def draw_files(image: InputImage, result: ImageMaps | Row, job: Job) -> tuple[Row, Maps, dict[str, bytes]]:
    """Return an image's row, its grids by label, and its files by path relative to the output folder."""
    row, grids = describe(image, result, job)
    if not isinstance(result, ImageMaps):
        return row, grids, {}
    started = time.perf_counter()
    files: dict[str, bytes] = {}
    outputs: dict[str, str] = {}
    saved: dict[str, str] = {}
    for label, saliency in result.maps.items():
        if job.overlays:
            outputs[label] = f"{image.item.stem}-{in_file_name(label)}.{job.format}"
            files[outputs[label]] = encode_overlay(saliency.overlay(**job.drawing), job.format)
        if job.save_map:
            saved[label] = f"{image.item.stem}-{in_file_name(label)}.npz"
            files[saved[label]] = encode_maps(saliency.to_dict(), grid=saliency.grid, heatmap=saliency.heatmap)
    row |= {
        "outputs": outputs,
        "maps": saved or None,
        "written": {path: len(content) for path, content in files.items()},
        "seconds": round(result.seconds + time.perf_counter() - started, 4),
    }
    return row, grids, files


def _saturated_share(facts: Mapping[str, Mapping[str, Any]]) -> float | None:
    shares = [
        value for method_facts in facts.values() for name, value in method_facts.items() if name.startswith("saturated")
    ]
    return float(shares[0]) if shares and isinstance(shares[0], int | float) else None


def encode_overlay(overlay: NDArray[np.uint8], format: str) -> bytes:
    """Encode an overlay as the bytes of a file."""
    file = io.BytesIO()
    Image.fromarray(overlay).save(file, **WRITE_OPTIONS[f".{format}"])
    return file.getvalue()


def encode_maps(metadata: Mapping[str, Any], **arrays: NDArray[Any]) -> bytes:
    """Encode arrays and metadata as .npz, without the duration, so that the bytes are reproducible."""
    text = json.dumps({name: value for name, value in metadata.items() if name != "seconds"}, ensure_ascii=False)
    file = io.BytesIO()
    np.savez_compressed(file, metadata=np.array(text), **arrays)  # type: ignore[arg-type]
    return file.getvalue()
