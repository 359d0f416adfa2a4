"""Read annotation files: COCO JSON, Pascal VOC and ImageNet XML, ImageNet CSV, plain JSON and CSV of boxes.

They may come from anywhere: what is wrong with one picture's entry stands in that entry.
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
from xml.etree.ElementTree import Element

from defusedxml import DefusedXmlException, ElementTree

from vitflow.errors import OptionError, VitflowError
from vitflow.evaluation.data.regions import WORDNET_ID, Label, Region, box_region, read_box, read_polygons_or_runs
from vitflow.pictures.images import MAX_PIXELS

_LONGEST_NAME = 4096  # bytes of a path
_LONGEST_TOLD = 200  # characters of an error's own words, which may quote the file

# What a column or key may be called.
_FILE_KEYS = ("file", "file_name", "filename", "image", "ImageId")
_BOX_KEYS = ("boxes_xyxy", "boxes")
_LABEL_KEYS = ("label_index", "class_index", "label", "class", "category")
_EDGE_KEYS = (("left", "top", "right", "bottom"), ("xmin", "ymin", "xmax", "ymax"))


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
    - **XML** of Pascal VOC (1 is the first pixel, and the last one is inside) or of ImageNet (edges as they stand).
    - **CSV** of ImageNet (`ImageId,PredictionString`), of boxes (`file,label,left,top,right,bottom`, a row for each),
      or of classes alone (`file,label` or `file,label_index`).

    Raises:
        OptionError: the file is none of these.
        VitflowError: it is one of these, and something is wrong with every entry in it.
    """
    reader = {".xml": _read_xml, ".csv": _read_csv, ".json": _read_json}.get(path.suffix.lower())
    if reader is None:
        raise OptionError(f"Expected annotations in a file that ends in .json, .xml or .csv, got {path.name!r}.")
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
    "Expected COCO JSON, a JSON list of {file, boxes, label}, Pascal VOC or ImageNet XML, or CSV with the columns "
    "ImageId,PredictionString or file,label,left,top,right,bottom."
)

# What reading values of wrong types raises; a broken XML file is a SyntaxError.
_WRONG = (
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, SyntaxError, OSError),
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


# --- XML -------------------------------------------------------------------------------------------------------------


def _read_xml(path: Path) -> Iterator[Annotation]:
    """One XML file of Pascal VOC or ImageNet.

    A file that defines entities of its own is refused: none of these formats does, and such definitions can make a
    parser read other files or fill the memory.
    """
    try:
        root = ElementTree.fromstring(path.read_bytes(), forbid_dtd=True)
    except DefusedXmlException as error:
        raise OptionError(
            f"The annotations {path.name!r} hold a document type definition, which could make a parser read other "
            "files. Annotations need none: remove it."
        ) from error
    if root.tag != "annotation":
        raise ValueError(f"its root is <{root.tag}>")
    # ImageNet's files name the picture without its suffix, or not at all ("%s").
    name = (root.findtext("filename") or "").strip()
    regions = tuple(_voc_region(item) for item in root.iter("object"))
    size = [root.findtext(f"size/{side}") or 0 for side in ("height", "width")]
    told = all(float(side) for side in size)
    yield Annotation(
        _file_name(name if name and "%" not in name else path.stem), regions, size=_size(*size) if told else None
    )


def _voc_region(item: Element) -> Region:
    label = (item.findtext("name") or "").strip() or None
    left, top, right, bottom = read_box([item.findtext(f"bndbox/{edge}") for edge in _EDGE_KEYS[1]])
    if label is None or not WORDNET_ID.fullmatch(label):
        left, top = left - 1, top - 1  # VOC counts from 1, and its last pixel is inside
    return box_region(label, (left, top, right, bottom))


# --- CSV -------------------------------------------------------------------------------------------------------------


def _read_csv(path: Path) -> Iterator[Annotation]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    columns = rows[0] if rows else {}
    predicted = "PredictionString" in columns
    edges = next((keys for keys in _EDGE_KEYS if all(key in columns for key in keys)), None)
    if not any(key in columns for key in _FILE_KEYS):
        raise ValueError("they list no pictures")
    if not predicted and edges is None and not any(key in columns for key in _LABEL_KEYS):
        raise ValueError("no boxes and no classes")
    by_file: dict[Any, list[Mapping[str, Any]]] = {}
    for number, row in enumerate(rows):
        name = _first(row, _FILE_KEYS)
        by_file.setdefault((name, number) if predicted else name, []).append(row)
    for number, own in enumerate(by_file.values(), start=1):
        yield _attempt(path, number, _first(own[0], _FILE_KEYS), partial(_csv_picture, own, edges))


def _csv_picture(rows: Sequence[Mapping[str, Any]], edges: Sequence[str] | None, file: str) -> Annotation:
    """What the rows of one picture say."""
    if "PredictionString" in rows[0]:
        return Annotation(file, tuple(_predictions(rows[0]["PredictionString"])))
    if edges is None:
        return Annotation(file, None, _label_of(rows[0]))
    return Annotation(file, tuple(box_region(_label_of(row), [row[edge] for edge in edges]) for row in rows))


def _predictions(text: str) -> Iterator[Region]:
    """ImageNet's `n01440764 left top right bottom`, once per box."""
    words = text.split()
    for start in range(0, len(words), 5):
        label, *box = words[start : start + 5]
        yield box_region(label, box)


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
