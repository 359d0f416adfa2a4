"""Readers of annotations: COCO JSON, JSON lists of boxes, classes in labels.csv, masks, and truths in Python.

Each returns the regions and the class of one image. Invalid annotations of one image are an error of that image only.
"""

import csv
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitflow.errors import OptionError, ShapeError, VitflowError
from vitflow.evaluation.samples import (
    Label,
    Labelled,
    Region,
    Size,
    as_label,
    check_boxes,
    check_size,
    naming_turn,
    read_box,
)
from vitflow.images.reading import read_image, read_mask

_LONGEST_REASON = 200  # characters of a reason, which may quote the file

Truth = tuple[tuple[Region, ...] | None, Label]
#: Regions (None without masks or boxes) and class of an image of this (height, width).
Parse = Callable[[Size], Truth]


@contextmanager
def _reading(name: str, kind: type[VitflowError]) -> Iterator[None]:
    """Raise an error of this kind, with the expected formats, for annotations of another structure."""
    try:
        yield
    except VitflowError:
        raise
    except Exception as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise kind(
            f"Could not read the annotations {name}: {reason[:_LONGEST_REASON]}. Expected COCO JSON, a JSON list of "
            "{file, boxes, label}, or labels.csv with the columns file and label or label_index; in Python a mask, "
            "boxes [objects, 4], a class, or a dict with masks or boxes, labels and label."
        ) from error


def read_labelled(source: Any, parse: Parse) -> Labelled:
    """Return an image, and its annotations by `parse`."""
    image = read_image(source)
    with naming_turn(source), _reading("of this image", ShapeError):
        return Labelled(image, *parse((image.shape[0], image.shape[1])), source=source)


def read_entries(path: Path) -> list[tuple[Any, Parse]]:
    """Return the file name of each image of COCO JSON or a JSON list of boxes, and a function that parses its entry.

    Boxes of another format are an OptionError.
    """
    with _reading(f"{path.name!r}", OptionError):
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = list(_coco_entries(content) if isinstance(content, dict) else _box_entries(content))
        if not entries:
            raise ValueError("they list no images")
    return entries


def _box_entries(content: Any) -> Iterator[tuple[Any, Parse]]:
    for entry in content:
        known = isinstance(entry, dict)
        if known and isinstance(boxes := entry.get("boxes", entry.get("boxes_xyxy")), list):
            check_boxes(box.get("box") if isinstance(box, dict) else box for box in boxes)
        yield entry.get("file") if known else entry, partial(_parse_boxes, entry)


def _parse_boxes(entry: Mapping[str, Any], size: Size) -> Truth:
    """Return boxes and class of an entry of a JSON list."""
    if "size" in entry:
        width, height = entry["size"]
        check_size((height, width), size, "boxes")
    label = _label_of(entry)
    boxes = entry["boxes"] if "boxes" in entry else entry["boxes_xyxy"]
    boxes = [box if isinstance(box, dict) else {"box": box, "label": label} for box in boxes]
    return tuple(Region(_label_of(box), read_box(box["box"])) for box in boxes), label


def _label_of(entry: Mapping[str, Any]) -> Label:
    return as_label(entry.get("label") if entry.get("label_index") is None else entry["label_index"])


def _coco_entries(content: Mapping[str, Any]) -> Iterator[tuple[Any, Parse]]:
    names = {category["id"]: category.get("name") for category in content.get("categories") or ()}
    by_image: dict[Any, list[Mapping[str, Any]]] = {}
    for annotation in content["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    for entry in content["images"]:
        file = entry.get("file_name") if isinstance(entry, dict) else entry
        yield file, partial(_parse_coco, names, by_image, entry)


def _parse_coco(names: Mapping[Any, Any], by_image: Mapping[Any, Any], entry: Mapping[str, Any], size: Size) -> Truth:
    """Return the regions of an image of a COCO file; crowds are unknown."""
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


# --- Masks, classes and truths in Python -----------------------------------------------------------------------------


def read_labels(path: Path) -> dict[str, dict[str, Any]]:
    """Return the entry of each file, with `label_index` and `label` as text."""
    with _reading(f"{path.name!r}", OptionError), path.open(encoding="utf-8-sig", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


def parse_mask(mask: Path | None, written: Mapping[str, Any], size: Size) -> Truth:
    """Return the region of a mask (None without one), and the written class."""
    index = written.get("label_index")
    label = as_label(float(index)) if index else written.get("label") or None
    return None if mask is None else (Region(label, read_mask(mask, size) > 0),), label


def parse_truth(truth: Any, size: Size) -> Truth:
    """Return regions and class from the truth of an item."""
    if truth is None or isinstance(truth, str):
        return None, truth
    if not isinstance(truth, Mapping):
        values = np.asarray(truth)
        if values.ndim == 0:
            return None, as_label(values.item())
        boxes = values.shape != size and values.shape[-1] == 4
        truth = {"boxes": truth} if boxes else {"masks": [values]}
    shapes, label = truth.get("masks", truth.get("boxes")), as_label(truth.get("label"))
    if shapes is None:
        return None, label
    order = getattr(shapes, "format", None)  # of torchvision's BoundingBoxes
    if (order := getattr(order, "value", "XYXY")) != "XYXY":
        raise OptionError(f"Expected boxes in the format XYXY, got {order}: convert_bounding_box_format converts them.")
    shapes = [np.asarray(shape) for shape in shapes]
    labels = np.asarray(truth.get("labels", [None] * len(shapes)), dtype=object).tolist()
    return tuple(
        Region(as_label(name), shape if shape.ndim == 2 else shape.tolist())
        for name, shape in zip(labels, shapes, strict=True)
    ), label
