"""Annotation files: COCO JSON, and JSON lists of boxes.

Invalid annotations of one image are an error of that image only.
"""

import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitflow.errors import FrameError, OptionError, VitflowError
from vitflow.evaluation.regions import (
    LONGEST_MESSAGE,
    WRONG,
    Label,
    Region,
    Size,
    as_label,
    check_boxes,
    check_size,
    read_box,
    with_turn,
)
from vitflow.evaluation.samples import Dataset, Labelled, Sample, digest_of, distinct
from vitflow.files import is_file
from vitflow.folder.saved import is_inside
from vitflow.images.reading import read_image

_LONGEST_NAME = 4096  # bytes of a path

#: Regions and class of an image of this size.
Parse = Callable[[Size], tuple[tuple[Region, ...], Label]]


def open_annotated(path: Path, name: str, images: Path | None) -> Dataset:
    """Open the images of an annotation file."""
    entries = _read_entries(path)
    here = path.resolve().parent
    folders = [images] if images is not None else [here, here / "images", here.parent / "images", here.parent]
    names = distinct([_row_name(file, number) for number, (file, _) in enumerate(entries, start=1)])
    samples = []
    for unique, (file, parse) in zip(names, entries, strict=True):
        try:
            place = _find_image(file, folders)
            samples.append(Sample(unique, partial(_read_annotated, path, unique, place, parse), (place,)))
        except WRONG as error:
            samples.append(Sample(unique, partial(_refuse, unreadable(path, error, unique))))
    if not any(is_file(file) for sample in samples for file in sample.files):
        if not samples[0].files:
            samples[0].read()  # raises a more specific error
        raise OptionError(
            f"None of the {len(samples)} images of {path.name!r} exists, such as {names[0]!r}. Pass their folder with "
            "--images (images=…)."
        )
    return Dataset(name, "images with annotated regions", samples, True, {"annotations": digest_of([path])})


def _row_name(file: Any, number: int) -> str:
    """Return the name of an entry's row: the file's name, without its folders if they may lead out."""
    candidates = [file, Path(file).name] if _is_name(file) else []
    return next(filter(is_inside, candidates), f"entry {number}")


def _is_name(file: Any) -> bool:
    try:
        return isinstance(file, str) and file != "" and "\0" not in file and len(os.fsencode(file)) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _find_image(file: Any, folders: Sequence[Path]) -> Path:
    """Return the path of an image in one of the folders; if it does not exist, its path in the first folder.

    Paths and links to images outside the folders are rejected.
    """
    if not _is_name(file):
        raise ValueError(f"expected an image's file name, got {reprlib.repr(file)}")
    inside: list[Path] = [
        folder / file for folder in folders if (folder / file).resolve().is_relative_to(folder.resolve())
    ]
    existing = next(filter(is_file, inside), None)
    if existing is None and len(inside) < len(folders):
        raise OptionError(
            f"The annotations name {file[:LONGEST_MESSAGE]!r}, which is outside the image folders ("
            f"{', '.join(repr(str(folder)) for folder in folders)}). To allow it, pass its folder with --images "
            "(images=…)."
        )
    return inside[0] if existing is None else existing


def _read_annotated(path: Path, name: str, place: Path, parse: Parse) -> Labelled:
    image = read_image(place)
    try:
        return Labelled(image, *parse((image.shape[0], image.shape[1])), source=place)
    except FrameError as error:
        raise with_turn(error, place) from error
    except WRONG as error:
        raise unreadable(path, error, name) from error


def _refuse(problem: VitflowError) -> Labelled:
    raise problem


def _read_entries(path: Path) -> list[tuple[Any, Parse]]:
    """Read COCO JSON, or a JSON list of boxes: the file name of each image, and a function that parses its entry.

    Raises:
        OptionError: the file is neither, or its boxes have another format.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = list(_coco_entries(content) if isinstance(content, dict) else _box_entries(content))
        if not entries:
            raise ValueError("they list no images")
    except WRONG as error:
        raise unreadable(path, error) from error
    return entries


def unreadable(path: Path, error: Exception, entry: str = "") -> VitflowError:
    """Return the error for an invalid annotation file or an invalid entry of it."""
    if isinstance(error, OptionError | FrameError):
        return error
    reason = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else reason
    reason = reason if len(reason) <= LONGEST_MESSAGE else reason[:LONGEST_MESSAGE] + "…"
    source = f"{path.name!r}, {entry[:LONGEST_MESSAGE]}" if entry else f"{path.name!r}"
    return OptionError(
        f"Could not read the annotations {source}: {reason}. Expected COCO JSON, a JSON list of {{file, boxes, "
        "label}, or labels.csv with the columns file and label or label_index."
    )


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {reprlib.repr(value)}")
    return value


def _box_entries(content: Any) -> Iterator[tuple[Any, Parse]]:
    for entry in _list(content):
        known = isinstance(entry, dict)
        if known and isinstance(boxes := entry.get("boxes", entry.get("boxes_xyxy")), list):
            check_boxes(box.get("box") if isinstance(box, dict) else box for box in boxes)
        yield entry.get("file") if known else entry, partial(_parse_boxes, entry)


def _parse_boxes(entry: Mapping[str, Any], size: Size) -> tuple[tuple[Region, ...], Label]:
    """Parse an entry of a JSON list: boxes and class."""
    if "size" in entry:
        width, height = entry["size"]
        check_size((height, width), size, "boxes")
    label = _label_of(entry)
    boxes = _list(entry["boxes"] if "boxes" in entry else entry["boxes_xyxy"])
    boxes = [box if isinstance(box, dict) else {"box": box, "label": label} for box in boxes]
    return tuple(Region(_label_of(box), read_box(box["box"])) for box in boxes), label


def _label_of(entry: Mapping[str, Any]) -> Label:
    return as_label(entry.get("label") if entry.get("label_index") is None else entry["label_index"])


def _coco_entries(content: Mapping[str, Any]) -> Iterator[tuple[Any, Parse]]:
    names = {category["id"]: category.get("name") for category in _list(content.get("categories") or [])}
    by_image: dict[Any, list[Mapping[str, Any]]] = {}
    for annotation in _list(content["annotations"]):
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    for entry in _list(content["images"]):
        file = entry.get("file_name") if isinstance(entry, dict) else entry
        yield file, partial(_parse_coco, names, by_image, entry)


def _parse_coco(
    names: Mapping[Any, Any],
    by_image: Mapping[Any, Sequence[Mapping[str, Any]]],
    entry: Mapping[str, Any],
    size: Size,
) -> tuple[tuple[Region, ...], Label]:
    """Parse an image of a COCO file; crowds are unknown regions."""
    check_size((entry["height"], entry["width"]), size, "annotations")
    regions = []
    for annotation in by_image.get(entry["id"], ()):
        category = annotation["category_id"]
        if names and category not in names:
            raise ValueError(f"no category {reprlib.repr(category)}")
        if not (shape := annotation.get("segmentation")):
            left, top, width, height = read_box(annotation["bbox"])
            shape = (left, top, left + width, top + height)
        regions.append(Region(as_label(names.get(category)), shape, unknown=bool(annotation.get("iscrowd"))))
    return tuple(regions), None
