"""Labelled regions of an image, from boxes, polygons, run lengths or masks, and annotation files.

Annotations are untrusted: invalid annotations of one image are an error of that image only, and sizes are checked
before anything is painted.
"""

import json
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco

from vitflow.errors import OptionError, ShapeError, VitflowError
from vitflow.images.reading import check_mask_size

Mask = NDArray[np.bool_]
Size = tuple[int, int]

# A class index of the model, a class name or WordNet id, or None if unknown.
Label = int | str | None

# Limits far above real annotations, to bound memory and time.
_MOST_OBJECTS = 10_000  # of one image
_MOST_POLYGONS = 1000  # of one object
_LONGEST_OUTLINE = 1_000_000  # pixels of one polygon; also the largest coordinate of a corner
_LONGEST_NUMBER = 7  # characters of a packed run length, five bits each
LONGEST_MESSAGE = 200  # characters of an error message, which may quote the file

#: Exceptions raised when values of wrong types are read.
WRONG = (
    *(TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, OSError),
    VitflowError,
)


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """One labelled object of an image.

    Attributes:
        label: class index, class name or WordNet id; None if unknown.
        shape: the pixels, as one of

            - a box (left, top, right, bottom) by its edges in pixels, right and bottom exclusive; a pixel is in the box
              if its centre is;
            - polygons [[x, y, x, y, …], …], painted as in COCO's evaluation;
            - COCO's run lengths {"size": [height, width], "counts": numbers or packed text};
            - a mask [height, width] of the image's size, nonzero in the object, or a function that returns it.
        unknown: exclude the pixels from all metrics, as for crowds.
    """

    label: Label
    shape: Any
    unknown: bool = False

    def paint(self, mask: Mask) -> None:
        """Mark the pixels in a mask of the image's size.

        Raises:
            ShapeError: the shape is none of the above, or has another image size.
        """
        shape = self.shape() if callable(self.shape) else self.shape
        if isinstance(shape, np.ndarray) and shape.ndim == 2:
            check_mask_size(shape.shape, mask.shape)
            mask |= shape != 0
        elif isinstance(shape, Mapping):
            if (size := shape.get("size")) not in (None, list(mask.shape)):
                raise ShapeError(
                    f"Expected run lengths of {mask.shape[0]} × {mask.shape[1]} pixels, got {reprlib.repr(size)}."
                )
            _paint_runs(_read_runs(shape.get("counts"), mask.size), mask)
        elif isinstance(shape, list | tuple) and shape and isinstance(shape[0], list | tuple | np.ndarray):
            _paint_polygons(shape, mask)
        else:
            left, top, right, bottom = (max(math.ceil(edge - 0.5), 0) for edge in _read_box(shape))
            mask[top:bottom, left:right] = True

    def mask(self, size: Size) -> Mask:
        """Return the mask for an image of this (height, width), bool [height, width].

        >>> Region("cat", (1, 0, 3, 1)).mask((1, 4)).tolist()
        [[False, True, True, False]]
        >>> Region("cat", {"size": [2, 2], "counts": [1, 2, 1]}).mask((2, 2)).tolist()
        [[False, True], [True, False]]
        """
        return union([self], size)


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """An image and its annotations.

    Attributes:
        image: RGB uint8 [height, width, 3].
        regions: the objects; None if the data has no masks or boxes.
        label: class of the whole image, if known.

    Raises:
        ShapeError: there are too many objects.
    """

    image: NDArray[np.uint8]
    regions: tuple[Region, ...] | None = None
    label: Label = None

    def __post_init__(self) -> None:
        if self.regions is not None and len(self.regions) > _MOST_OBJECTS:
            raise ShapeError(f"Expected at most {_MOST_OBJECTS} objects in an image, got {len(self.regions)}.")


def union(regions: Sequence[Region], size: Size) -> Mask:
    """Return the union of the regions, bool [height, width]."""
    mask = np.zeros(size, dtype=np.bool_)
    for region in regions:
        region.paint(mask)
    return mask


# --- Painting --------------------------------------------------------------------------------------------------------


def _numbers(values: Any) -> list[float]:
    """Return the values as finite floats, converted from text if needed; ShapeError for anything else."""
    try:
        numbers = [] if isinstance(values, str | bytes) else [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if not numbers or not all(map(math.isfinite, numbers)):
        raise ShapeError(f"Expected finite numbers, got {reprlib.repr(values)}.")
    return numbers


def _read_box(box: Any) -> list[float]:
    edges = _numbers(box)
    if len(edges) != 4:
        raise ShapeError(f"Expected a box of four finite numbers, got {reprlib.repr(box)}.")
    return edges


def _paint_polygons(polygons: Sequence[Any], mask: Mask) -> None:
    if len(polygons) > _MOST_POLYGONS:
        raise ShapeError(f"Expected at most {_MOST_POLYGONS} polygons, got {len(polygons)}.")
    areas = [numbers for numbers in map(_outline, polygons) if len(numbers) >= 6]  # fewer corners cover no pixel
    for packed in coco.frPyObjects(areas, *mask.shape) if areas else ():
        _paint_runs(_read_runs(packed["counts"], mask.size), mask)


def _outline(polygon: Any) -> list[float]:
    """Return the flat coordinates of a polygon; ShapeError if drawing it would take too much memory."""
    numbers = _numbers(polygon)
    if len(numbers) % 2:
        raise ShapeError(f"Expected a polygon as x, y, x, y, …, got {len(numbers)} numbers.")
    corners = np.array(numbers).reshape(-1, 2)
    outline = np.abs(corners - np.roll(corners, 1, axis=0)).max(axis=1).sum()
    if max(outline, np.abs(corners).max()) > _LONGEST_OUTLINE:
        raise ShapeError(f"Expected a polygon in pixels of its image, got {reprlib.repr(polygon)}.")
    return numbers


def _paint_runs(runs: Sequence[int], mask: Mask) -> None:
    """Mark every other run, column by column; the runs must fill the mask."""
    mask |= np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(mask.shape, order="F")


def _read_runs(counts: Any, pixels: int) -> list[int]:
    """Return run lengths that sum to this number of pixels, or raise ShapeError.

    Packed run lengths are decoded here: the decoder of pycocotools 2.0.11 returns uninitialised memory for those that
    sum to too few pixels, and a DeprecationWarning under NumPy 2.
    """
    if isinstance(counts, str | bytes):
        runs = _unpack(counts, pixels)
    elif isinstance(counts, list | tuple) and all(isinstance(count, int) for count in counts):
        runs = list(counts)
    else:
        raise ShapeError(f"Expected run lengths as whole numbers or packed text, got {reprlib.repr(counts)}.")
    if sum(runs) != pixels or min(runs) < 0:
        raise ShapeError(f"Expected run lengths that sum to {pixels} pixels, got {reprlib.repr(runs)}.")
    return runs


def _unpack(text: str | bytes, pixels: int) -> list[int]:
    """Decode COCO's packed run lengths: five bits per character; from the fourth run, minus the run two before."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    wrong = ShapeError(f"Expected packed run lengths of {pixels} pixels in COCO's form, got {reprlib.repr(text)}.")
    if len(data) > 2 * pixels + 16:  # one-pixel runs take no more than this
        raise wrong
    runs: list[int] = []
    number = bits = 0
    for code in data:
        if not 48 <= code < 112 or bits == 5 * _LONGEST_NUMBER:
            raise wrong
        number |= (code - 48 & 31) << bits
        bits += 5
        if code < 80:  # the number's last character, which has its sign
            number -= (code - 48 & 16) << bits - 4
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
            number = bits = 0
    if bits:
        raise wrong
    return runs


# --- Files -----------------------------------------------------------------------------------------------------------

#: Regions and class of an image of this size.
Parse = Callable[[Size], tuple[tuple[Region, ...], Label]]


def read_annotations(path: Path) -> list[tuple[Any, Parse]]:
    """Read COCO JSON, or a JSON list of boxes: the file name of each image, and a function that parses its entry.

    Raises:
        OptionError: the file is neither.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = list(_coco_entries(content) if isinstance(content, dict) else _box_entries(content))
        if not entries:
            raise ValueError("they list no images")
    except WRONG as error:
        raise unreadable(path, error) from error
    return entries


def unreadable(path: Path, error: Exception, entry: str = "") -> OptionError:
    """Return the error for an invalid annotation file or an invalid entry of it."""
    if isinstance(error, OptionError):
        return error
    reason = f"no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else reason
    reason = reason if len(reason) <= LONGEST_MESSAGE else reason[:LONGEST_MESSAGE] + "…"
    source = f"{path.name!r}, {entry[:LONGEST_MESSAGE]}" if entry else f"{path.name!r}"
    return OptionError(
        f"Could not read the annotations {source}: {reason}. Expected COCO JSON, a JSON list of {{file, boxes, "
        "label}, or labels.csv with the columns file and label or label_index."
    )


def as_label(value: Any) -> Label:
    """Return a class name, or a class index as int; ValueError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and float(value).is_integer():
        return int(value)
    raise ValueError(f"expected a class name or a class index, got {reprlib.repr(value)}")


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected a list, got {reprlib.repr(value)}")
    return value


def _check_size(width: Any, height: Any, size: Size) -> None:
    if (height, width) != size:
        raise ShapeError(
            f"expected an image of {reprlib.repr(height)} × {reprlib.repr(width)} pixels (height × width), got "
            f"{size[0]} × {size[1]}"
        )


def _box_entries(content: Any) -> Iterator[tuple[Any, Parse]]:
    for entry in _list(content):
        yield entry.get("file") if isinstance(entry, dict) else entry, partial(_parse_boxes, entry)


def _parse_boxes(entry: Mapping[str, Any], size: Size) -> tuple[tuple[Region, ...], Label]:
    """Parse an entry of a JSON list: boxes and class."""
    if "size" in entry:
        width, height = entry["size"]
        _check_size(width, height, size)
    label = _label_of(entry)
    boxes = _list(entry["boxes"] if "boxes" in entry else entry["boxes_xyxy"])
    boxes = [box if isinstance(box, dict) else {"box": box, "label": label} for box in boxes]
    return tuple(Region(_label_of(box), _read_box(box["box"])) for box in boxes), label


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
    _check_size(entry["width"], entry["height"], size)
    regions = []
    for annotation in by_image.get(entry["id"], ()):
        category = annotation["category_id"]
        if names and category not in names:
            raise ValueError(f"no category {reprlib.repr(category)}")
        shape = annotation.get("segmentation")
        if not shape:
            left, top, width, height = _read_box(annotation["bbox"])
            shape = (left, top, left + width, top + height)
        regions.append(Region(as_label(names.get(category)), shape, unknown=bool(annotation.get("iscrowd"))))
    return tuple(regions), None
