"""Read annotation files: COCO JSON, plain JSON of boxes, CSV of classes.

They may come from anywhere: what is wrong with one image's entry is kept in that entry.
"""

import csv
import json
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitflow.errors import OptionError, VitflowError
from vitflow.evaluation.data.regions import Label, Region, box_region, read_box, read_polygons_or_runs
from vitflow.pictures.images import MAX_PIXELS

_LONGEST_NAME = 4096  # bytes of a path
_LONGEST_TOLD = 200  # characters of an error's own words, which may quote the file

# What a column or key may be called.
_FILE_KEYS = ("file", "file_name")
_BOX_KEYS = ("boxes_xyxy", "boxes")
_LABEL_KEYS = ("label_index", "label")


@dataclass(frozen=True, slots=True)
class Annotation:
    """What an annotation file says of one picture.

    Attributes:
        file: the picture's file name, perhaps without its suffix.
        regions: its objects; None where the file only tells a class.
        label: the class of the whole picture, where it has one.
        size: (height, width) that the regions were drawn for, where told.
        problem: what is wrong with it, if anything; then nothing else of it counts.
    """

    file: str
    regions: tuple[Region, ...] | None
    label: Label = None
    size: tuple[int, int] | None = None
    problem: VitflowError | None = None


def read_annotations(path: Path) -> list[Annotation]:
    """Read an annotation file; its content tells which format it is.

    - **JSON of boxes**: a list of `{"file": …, "boxes": [[left, top, right, bottom], …], "label_index": …}`, or an
      object with such entries by file name. `boxes_xyxy`, `label` (a name), `size` (`[width, height]`) are known, too,
      and a box may be `{"box": […], "label": …}`. Edges are in pixels; right and bottom are the first ones outside.
    - **COCO JSON**: `images`, `annotations` (polygons, run lengths or boxes) and `categories`; crowds are unknown.
    - **CSV of classes**, which is also called `labels.csv`: columns `file` and `label` (a name) or `label_index`.

    Raises:
        OptionError: the file is none of these.
        VitflowError: it is one of these, and something is wrong with every entry in it.
    """
    reader = {".csv": _read_labels, ".json": _read_json}.get(path.suffix.lower())
    if reader is None:
        raise OptionError(f"Expected annotations in a file that ends in .json or .csv, got {path.name!r}.")
    try:
        entries = list(reader(path))
        if not entries:
            raise ValueError("they list no pictures")
    except _WRONG as error:
        raise _unreadable(path, error) from error
    if entries[0].problem is not None and all(entry.problem is not None for entry in entries):
        raise entries[0].problem
    return entries


_FORMATS = (
    "Expected COCO JSON, a JSON list of {file, boxes, label}, or CSV with the columns file and label or label_index."
)

# What reading values of wrong types raises.
_WRONG = (
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError),
    *(csv.Error, VitflowError),
)


def _unreadable(path: Path, error: Exception, entry: str = "") -> VitflowError:
    """Say what is wrong with a file, or with one entry of it."""
    if isinstance(error, OptionError):
        return error
    told = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
    told = "it is nested too deeply" if isinstance(error, RecursionError) else told
    told = told if len(told) <= _LONGEST_TOLD else told[:_LONGEST_TOLD] + "…"
    where = f"{path.name!r}, {entry[:_LONGEST_TOLD]}" if entry else f"{path.name!r}"
    return OptionError(f"Could not read the annotations {where}: {told}. {_FORMATS}")


def _attempt(path: Path, number: int, file: Any, read: Callable[[str], Annotation]) -> Annotation:
    """One picture's entry, or what is wrong with it."""
    place = f"entry {number}"
    try:
        place = _file_name(file)
        return read(place)
    except _WRONG as error:
        return Annotation(place, None, problem=_unreadable(path, error, place))


# --- JSON ------------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> Iterator[Annotation]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "images" in content and "annotations" in content:
        yield from _coco(path, content)
        return
    if isinstance(content, dict):
        content = [
            {"file": file, **(entry if isinstance(entry, dict) else {"boxes": entry})}
            for file, entry in content.items()
        ]
    for number, entry in enumerate(_list(content), start=1):
        file = _first(entry, _FILE_KEYS) if isinstance(entry, dict) else entry
        yield _attempt(path, number, file, partial(_entry, entry))


def _entry(entry: Mapping[str, Any], file: str) -> Annotation:
    """One picture of a plain JSON file."""
    label, boxes, size = _label_of(entry), _first(entry, _BOX_KEYS), entry.get("size")
    regions = None
    if boxes is not None:
        own = [box if isinstance(box, dict) else {"box": box, "label": label} for box in _list(boxes)]
        regions = tuple(box_region(_label_of(box), box["box"]) for box in own)
    return Annotation(file, regions, label, _size(size[1], size[0]) if size else None)


def _coco(path: Path, content: Mapping[str, Any]) -> Iterator[Annotation]:
    names = {
        category["id"]: category.get("name")
        for category in _list(content.get("categories") or [])
        if isinstance(category, dict) and _is_id(category.get("id"))
    }
    by_image: dict[Any, list[Mapping[str, Any]]] = {}
    lost = []
    for number, annotation in enumerate(_list(content["annotations"]), start=1):
        owner = annotation.get("image_id") if isinstance(annotation, dict) else None
        if _is_id(owner):
            by_image.setdefault(owner, []).append(annotation)
        else:
            error = ValueError(f"it belongs to no image, but to {reprlib.repr(owner)}")
            place = f"annotation {number}"
            lost.append(Annotation(place, None, problem=_unreadable(path, error, place)))
    for number, image in enumerate(_list(content["images"]), start=1):
        file = image.get("file_name") if isinstance(image, dict) else image
        yield _attempt(path, number, file, partial(_coco_image, image, names, by_image))
    yield from lost


def _is_id(value: Any) -> bool:
    return isinstance(value, int | str) or (isinstance(value, float) and value.is_integer())


def _coco_image(
    image: Mapping[str, Any], names: Mapping[Any, Any], by_image: Mapping[Any, Sequence[Mapping[str, Any]]], file: str
) -> Annotation:
    size = _size(image["height"], image["width"])
    return Annotation(file, tuple(_coco_region(one, names, size) for one in by_image.get(image["id"], ())), size=size)


def _coco_region(annotation: Mapping[str, Any], names: Mapping[Any, Any], size: tuple[int, int]) -> Region:
    category = annotation["category_id"]
    if names and category not in names:
        raise ValueError(f"no category {reprlib.repr(category)}")
    label = _label(names.get(category))
    if annotation.get("segmentation"):
        region = read_polygons_or_runs(label, annotation["segmentation"], size)
    else:
        left, top, width, height = read_box(annotation["bbox"])
        region = box_region(label, (left, top, left + width, top + height))
    return Region(label, region.paint, unknown=bool(annotation.get("iscrowd")))


# --- CSV -------------------------------------------------------------------------------------------------------------


def _read_labels(path: Path) -> Iterator[Annotation]:
    """Classes of images: `file,label` or `file,label_index`."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        if "file" not in columns or not {"label", "label_index"} & set(columns):
            raise ValueError(f"its columns are {reprlib.repr(list(columns))}")
        for number, row in enumerate(reader, start=1):
            yield _attempt(path, number, row["file"], partial(_labelled_row, row))


def _labelled_row(row: Mapping[str, Any], file: str) -> Annotation:
    return Annotation(file, None, _label_of(row))


# --- What the formats share ------------------------------------------------------------------------------------------


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {reprlib.repr(value)}")
    return value


def _first(entry: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value of the first of these keys that there is."""
    return next((entry[key] for key in keys if entry.get(key) is not None and entry[key] != ""), None)


def _file_name(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value or len(os.fsencode(value)) > _LONGEST_NAME:
        raise ValueError(f"expected a picture's file name, got {reprlib.repr(value)}")
    return value


def _label_of(entry: Mapping[str, Any]) -> Label:
    """The class of an entry, of an index as a whole number."""
    key = next((key for key in _LABEL_KEYS if entry.get(key) is not None and entry[key] != ""), "")
    return _whole(entry[key]) if key.endswith("_index") else _label(entry.get(key))


def _label(value: Any) -> Label:
    return value if value is None or isinstance(value, str) else _whole(value)


def _whole(value: Any) -> int:
    """A whole number, perhaps as text or with a point; one that is no index or size of anything is refused."""
    try:
        number = float(value)
        if number.is_integer() and abs(number) < 2**31:
            return int(number)
    except (TypeError, ValueError, OverflowError):
        pass
    raise ValueError(f"expected a whole number, got {reprlib.repr(value)}")


def _size(height: Any, width: Any) -> tuple[int, int]:
    size = _whole(height), _whole(width)
    if min(size) < 1 or size[0] * size[1] > MAX_PIXELS:
        raise ValueError(f"expected a picture's size, got {size[0]} × {size[1]} pixels")
    return size
