"""Read annotation files: COCO JSON, Pascal VOC and ImageNet XML, ImageNet CSV, plain JSON and CSV of boxes."""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.parsers import expat

from vitflow.errors import OptionError, VitflowError
from vitflow.evaluation.data.regions import Label, Region, box_region, read_polygons_or_runs
from vitflow.pictures.images import find_images

_WORDNET = re.compile(r"n\d{8}")

# What a column or key may be called.
_FILE_KEYS = ("file", "file_name", "filename", "image", "ImageId")
_BOX_KEYS = ("boxes_xyxy", "boxes")
_LABEL_KEYS = ("label_index", "class_index", "label", "class", "category")
_EDGE_KEYS = (("left", "top", "right", "bottom"), ("xmin", "ymin", "xmax", "ymax"))


@dataclass(frozen=True, slots=True)
class Annotated:
    """What an annotation file says of one picture.

    Attributes:
        file: the picture's file name, perhaps without its suffix.
        regions: its objects; None where the file only tells a class.
        label: the class of the whole picture, where it has one.
        size: (height, width) that the regions were drawn for, where told.
    """

    file: str
    regions: tuple[Region, ...] | None
    label: Label = None
    size: tuple[int, int] | None = None


def read_annotations(path: Path) -> list[Annotated]:
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
        VitflowError: it is one of these, and something in it is wrong.
    """
    kind = path.suffix.lower()
    try:
        if kind == ".xml":
            return [read_voc(path)]
        if kind == ".csv":
            return _read_csv(path)
        if kind == ".json":
            return _read_json(path)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        if isinstance(error, VitflowError):
            raise
        told = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise OptionError(f"Could not read the annotations {path.name!r}: {told}. {_FORMATS}") from error
    raise OptionError(f"Expected annotations in a file that ends in .json, .xml or .csv, got {path.name!r}.")


_FORMATS = (
    "Expected COCO JSON, a JSON list of {file, boxes, label}, Pascal VOC or ImageNet XML, or CSV with the columns "
    "ImageId,PredictionString or file,label,left,top,right,bottom."
)


# --- JSON ------------------------------------------------------------------------------------------------------------


def _read_json(path: Path) -> list[Annotated]:
    content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and "images" in content and "annotations" in content:
        return list(_coco(content))
    if isinstance(content, dict):
        content = [
            {"file": file, **(entry if isinstance(entry, dict) else {"boxes": entry})}
            for file, entry in content.items()
        ]
    if not isinstance(content, list) or not content:
        raise OptionError(f"Could not read the annotations {path.name!r}: they list no pictures. {_FORMATS}")
    return [_entry(entry) for entry in content]


def _entry(entry: Mapping[str, Any]) -> Annotated:
    """One picture of a plain JSON file."""
    file, label, boxes = (_first(entry, keys) for keys in (_FILE_KEYS, _LABEL_KEYS, _BOX_KEYS))
    if file is None:
        raise ValueError(f"an entry names no file, but has {', '.join(entry)}")
    size = entry.get("size")
    regions = None
    if boxes is not None:
        own = [box if isinstance(box, dict) else {"box": box, "label": label} for box in boxes]
        regions = tuple(box_region(_first(box, _LABEL_KEYS), _four(box["box"])) for box in own)
    return Annotated(str(file), regions, label, (int(size[1]), int(size[0])) if size else None)


def _coco(content: Mapping[str, Any]) -> Iterator[Annotated]:
    names = {category["id"]: category["name"] for category in content.get("categories", ())}
    by_image: dict[Any, list[Mapping[str, Any]]] = {}
    for annotation in content["annotations"]:
        by_image.setdefault(annotation["image_id"], []).append(annotation)
    for image in content["images"]:
        size = (int(image["height"]), int(image["width"]))
        regions = tuple(_coco_region(one, names, size) for one in by_image.get(image["id"], ()))
        yield Annotated(image["file_name"], regions, size=size)


def _coco_region(annotation: Mapping[str, Any], names: Mapping[Any, str], size: tuple[int, int]) -> Region:
    label = names.get(annotation["category_id"])
    crowd = bool(annotation.get("iscrowd"))
    if annotation.get("segmentation"):
        region = read_polygons_or_runs(label, annotation["segmentation"], size)
    else:
        left, top, width, height = _four(annotation["bbox"])
        region = box_region(label, (left, top, left + width, top + height))
    return Region(label, region.paint, unknown=crowd)


# --- XML -------------------------------------------------------------------------------------------------------------


def read_voc(path: Path) -> Annotated:
    """Read one XML file of Pascal VOC or ImageNet.

    A file that defines entities of its own is refused: none of these formats does, and such definitions can make a
    parser read other files or fill the memory.

    Raises:
        OptionError: it is not such a file.
    """
    data = path.read_bytes()
    _refuse_definitions(data, path)
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise OptionError(f"Could not read the annotations {path.name!r}: {error}. {_FORMATS}") from error
    if root.tag != "annotation":
        raise OptionError(f"Could not read the annotations {path.name!r}: its root is <{root.tag}>. {_FORMATS}")
    regions = tuple(_voc_region(item) for item in root.iter("object"))
    width, height = (int(float(root.findtext(f"size/{side}") or 0)) for side in ("width", "height"))
    # ImageNet's files name the picture without its suffix, or not at all ("%s").
    name = (root.findtext("filename") or "").strip()
    file = name if name and "%" not in name else path.stem
    return Annotated(file, regions, size=(height, width) if width and height else None)


def _voc_region(item: ElementTree.Element) -> Region:
    label = (item.findtext("name") or "").strip() or None
    left, top, right, bottom = _four([item.findtext(f"bndbox/{edge}") for edge in _EDGE_KEYS[1]])
    if label is None or not _WORDNET.fullmatch(label):
        left, top = left - 1, top - 1  # VOC counts from 1, and its last pixel is inside
    return box_region(label, (left, top, right, bottom))


def _refuse_definitions(data: bytes, path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OptionError(
            f"The annotations {path.name!r} hold a document type definition, which could make a parser read other "
            "files. Annotations need none: remove it."
        )

    parser = expat.ParserCreate()
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise OptionError(f"Could not read the annotations {path.name!r}: {error}. {_FORMATS}") from error


# --- CSV -------------------------------------------------------------------------------------------------------------


def _read_csv(path: Path) -> list[Annotated]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not any(key in rows[0] for key in _FILE_KEYS):
        raise OptionError(f"Could not read the annotations {path.name!r}: they list no pictures. {_FORMATS}")
    if "PredictionString" in rows[0]:
        return [Annotated(row["ImageId"], tuple(_predictions(row["PredictionString"]))) for row in rows]
    edges = next((keys for keys in _EDGE_KEYS if all(key in rows[0] for key in keys)), None)
    labelled = any(key in rows[0] for key in _LABEL_KEYS)
    if edges is None and not labelled:
        raise OptionError(f"Could not read the annotations {path.name!r}: no boxes and no classes. {_FORMATS}")
    found: dict[str, list[Region]] = {}
    labels: dict[str, Label] = {}
    for row in rows:
        name = str(_first(row, _FILE_KEYS))
        labels.setdefault(name, _first(row, _LABEL_KEYS) if edges is None else None)
        if edges is not None:
            box = box_region(_first(row, _LABEL_KEYS), _four([row[edge] for edge in edges]))
            found.setdefault(name, []).append(box)
    return [Annotated(name, tuple(found[name]) if edges else None, label) for name, label in labels.items()]


def _predictions(text: str) -> Iterator[Region]:
    """ImageNet's `n01440764 left top right bottom`, once per box."""
    words = text.split()
    for start in range(0, len(words), 5):
        label, *box = words[start : start + 5]
        yield box_region(label, _four(box))


# --- What the formats share ------------------------------------------------------------------------------------------


def _first(entry: Mapping[str, Any], keys: Sequence[str]) -> Any:
    """The value of the first of these keys that there is; a class index as a whole number."""
    for key in keys:
        value = entry.get(key)
        if value is not None and value != "":
            return int(value) if key.endswith("_index") else value
    return None


def _four(box: Sequence[Any]) -> tuple[float, float, float, float]:
    left, top, right, bottom = (float(edge) for edge in box)
    return left, top, right, bottom


def _index_files(folders: Sequence[Path]) -> dict[str, Path]:
    """Pictures below these folders by name and by name without suffix; the first folder goes first."""
    index: dict[str, Path] = {}
    for folder in folders:
        for file in find_images(folder, recursive=True):
            index.setdefault(file.name, file)
            index.setdefault(file.stem, file)
    return index


class PictureFinder:
    """Find the pictures that annotations name: by path below one of the folders, or by name anywhere below them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder for folder in folders if folder.is_dir()]
        self._names: dict[str, Path] | None = None

    def find(self, file: str) -> Path:
        """The picture's path; where there is none, the path at which it was expected first."""
        for folder in self.folders:
            if (folder / file).is_file():
                return folder / file
        if self._names is None:  # only where a name is not enough: the folders may be large
            self._names = _index_files(self.folders)
        name = Path(file).name
        found = self._names.get(name) or self._names.get(Path(name).stem)
        return found or (self.folders[0] if self.folders else Path()) / file
