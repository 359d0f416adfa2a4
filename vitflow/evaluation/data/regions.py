"""Regions: which pixels belong to a labelled object, painted from boxes, polygons, run lengths or masks."""

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as coco

from vitflow.errors import ShapeError
from vitflow.pictures.images import MAX_PIXELS, check_mask_size

Mask = NDArray[np.bool_]

# A class index of the model, a class name or WordNet id, or None where nothing is known.
Label = int | str | None
WORDNET_ID = re.compile(r"n\d{8}")

# Far beyond any honest annotation; more of it would fill the memory or take for ever.
_MOST_OBJECTS = 10_000  # of one picture
_MOST_POLYGONS = 1000  # of one object
_LONGEST_OUTLINE = 1_000_000  # of one polygon in pixels, which is also how far off a corner may be
_LONGEST_NUMBER = 7  # characters of a packed run length, five bits each


@dataclass(frozen=True, slots=True)
class Region:
    """One labelled object of a picture.

    Attributes:
        label: what it is.
        paint: marks its pixels in a mask [height, width] of the picture's size.
        unknown: it is left out of every measure, such as a crowd in which no object was told from another.
    """

    label: Label
    paint: Callable[[Mask], None]
    unknown: bool = False

    def mask(self, size: tuple[int, int]) -> Mask:
        """Its pixels in a picture of this (height, width), bool [height, width]."""
        mask = np.zeros(size, dtype=np.bool_)
        self.paint(mask)
        return mask


def union(regions: Sequence[Region], size: tuple[int, int]) -> Mask:
    """The pixels that belong to any of the regions, bool [height, width].

    >>> union([box_region(0, (0, 0, 1, 1)), box_region(1, (2, 0, 3, 1))], (1, 4)).tolist()
    [[True, False, True, False]]
    """
    mask = np.zeros(size, dtype=np.bool_)
    for region in regions:
        region.paint(mask)
    return mask


def check_count(objects: int, name: str) -> None:
    """Raise ShapeError where a picture's annotation or mask of this name has more objects than can be painted."""
    if objects > _MOST_OBJECTS:
        raise ShapeError(f"Expected at most {_MOST_OBJECTS} objects in {name!r}, got {objects}.")


def box_region(label: Label, box: Sequence[float | str]) -> Region:
    """A box (left, top, right, bottom) by its edges, in pixels: right and bottom are the first pixels outside.

    A pixel belongs to it if its centre does. What lies outside the picture is cut off.

    >>> box_region("cat", (1, 0, 3, 1)).mask((1, 4)).tolist()
    [[False, True, True, False]]
    """
    left, top, right, bottom = (math.ceil(edge - 0.5) for edge in read_box(box))
    return Region(label, partial(_paint_box, left, top, right, bottom))


def read_box(box: Any) -> tuple[float, float, float, float]:
    """Four finite numbers, which may be text; ShapeError where they are not."""
    edges = _numbers(box)
    if len(edges) != 4:
        raise ShapeError(f"Expected a box of four finite numbers, got {reprlib.repr(box)}.")
    return edges[0], edges[1], edges[2], edges[3]


def polygon_region(label: Label, polygons: Sequence[Sequence[float]]) -> Region:
    """Polygons as flat lists x, y, x, y, … of corners by pixel edges, as in COCO; together they are one object.

    >>> polygon_region("cat", [[1, 0, 3, 0, 3, 1, 1, 1]]).mask((1, 4)).tolist()
    [[False, True, True, False]]

    Source: pycocotools, so that pixels on the edge are those that COCO's own evaluation counts.
    """
    if not isinstance(polygons, Sequence | np.ndarray) or len(polygons) > _MOST_POLYGONS:
        raise ShapeError(f"Expected a list of at most {_MOST_POLYGONS} polygons, got {reprlib.repr(polygons)}.")
    return Region(label, partial(_paint_polygons, [_corners(polygon) for polygon in polygons]))


def run_length_region(label: Label, size: tuple[int, int], counts: str | bytes | Sequence[int]) -> Region:
    """COCO's run lengths: runs of ground and object in turn, column by column, as numbers or packed into text.

    >>> run_length_region("cat", (2, 2), [1, 2, 1]).mask((2, 2)).tolist()
    [[False, True], [True, False]]
    """
    return Region(label, partial(_paint_runs, size, _read_runs(counts, size)))


def mask_region(label: Label, mask: Mask, *, unknown: bool = False) -> Region:
    """A mask of the picture's own size, bool [height, width]."""
    return Region(label, partial(_paint_mask, mask), unknown)


def value_region(label: Label, values: NDArray[Any], value: int, *, unknown: bool = False) -> Region:
    """The pixels of one value in a mask of the picture's own size, [height, width]."""
    return Region(label, partial(_paint_value, values, value), unknown)


def _paint_box(left: int, top: int, right: int, bottom: int, mask: Mask) -> None:
    mask[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = True


def _paint_polygons(polygons: Sequence[NDArray[np.float64]], mask: Mask) -> None:
    height, width = mask.shape
    areas = [polygon.tolist() for polygon in polygons if len(polygon) >= 6]  # fewer than three corners hold no pixel
    for packed in coco.frPyObjects(areas, height, width) if areas else ():
        _paint_runs((height, width), _read_runs(packed["counts"], (height, width)), mask)


def _paint_runs(size: tuple[int, int], runs: NDArray[np.int64], mask: Mask) -> None:
    check_mask_size(size, mask.shape)
    mask |= np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(size, order="F")


def _paint_mask(own: Mask, mask: Mask) -> None:
    check_mask_size(own.shape, mask.shape)
    mask |= own


def _paint_value(values: NDArray[Any], value: int, mask: Mask) -> None:
    _paint_mask(values == value, mask)


def _numbers(values: Any) -> list[float]:
    """Finite numbers, which may be text; ShapeError where they are not."""
    try:
        found = [] if isinstance(values, str | bytes | dict) else [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        found = []
    if not found or not all(map(math.isfinite, found)):
        raise ShapeError(f"Expected finite numbers, got {reprlib.repr(values)}.")
    return found


def _corners(polygon: Any) -> NDArray[np.float64]:
    """A polygon's flat coordinates, of which none is so far off that drawing it would fill the memory."""
    numbers = np.array(_numbers(polygon))
    if len(numbers) % 2:
        raise ShapeError(f"Expected a polygon as x, y, x, y, …, got {len(numbers)} numbers.")
    corners = numbers.reshape(-1, 2)
    outline = np.abs(corners - np.roll(corners, 1, axis=0)).max(axis=1).sum()
    if max(outline, np.abs(corners).max()) > _LONGEST_OUTLINE:
        raise ShapeError(f"Expected a polygon in pixels of its picture, got {reprlib.repr(polygon)}.")
    return numbers


def _read_runs(counts: Any, size: tuple[int, int]) -> NDArray[np.int64]:
    """Run lengths that fill a picture of this (height, width), and nothing beyond; ShapeError where they do not."""
    pixels = size[0] * size[1]
    if min(size) < 1 or pixels > MAX_PIXELS:
        raise ShapeError(f"Expected a picture of at most {MAX_PIXELS:,} pixels, got {size[0]} × {size[1]}.")
    runs = _unpack(counts, pixels) if isinstance(counts, str | bytes) else _whole_numbers(counts)
    small = len(runs) and runs.min() >= 0 and runs.max() <= pixels  # or the sum could overflow
    if not small or runs.sum() != pixels:
        got = f"a sum of {runs.sum()}" if small else f"none, or some outside 0 … {pixels}"
        raise ShapeError(f"Expected run lengths that sum to {size[0]} × {size[1]} pixels, got {got}.")
    return runs


def _whole_numbers(counts: Iterable[Any]) -> NDArray[np.int64]:
    try:
        if all(isinstance(count, int | np.integer) for count in counts):
            return np.array(list(counts), dtype=np.int64)
    except (TypeError, OverflowError):
        pass
    raise ShapeError(f"Expected run lengths as whole numbers or packed into text, got {reprlib.repr(counts)}.")


def _unpack(text: str | bytes, pixels: int) -> NDArray[np.int64]:
    """COCO's packed run lengths: five bits to a character, and from the fourth run on the difference to two before."""
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    codes = np.frombuffer(data, dtype=np.uint8) - 48  # below 0 wraps to above 63
    # Runs sum to the picture's pixels, so that long numbers are few; even one-pixel runs take no more than this.
    if codes.size > 2 * pixels + 16 or not codes.size or codes.max() > 63:
        raise ShapeError(f"Expected packed run lengths of {pixels} pixels in COCO's form, got {reprlib.repr(text)}.")
    ends = np.flatnonzero(codes < 32)
    if not ends.size or ends[-1] != codes.size - 1:
        raise ShapeError("Expected packed run lengths in COCO's form, got a text that ends inside a number.")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > _LONGEST_NUMBER:
        raise ShapeError(f"Expected packed run lengths of {pixels} pixels, got a number of {lengths.max()} characters.")
    runs = np.where(codes[ends] & 16, -1 << 5 * lengths, 0)  # the last character tells the sign
    for place in range(lengths.max()):
        there = lengths > place
        runs[there] |= (codes[starts[there] + place] & 31).astype(np.int64) << 5 * place
    for first in (1, 2):
        runs[first::2] = np.cumsum(runs[first::2])
    return runs


def read_polygons_or_runs(label: Label, segmentation: Any, size: tuple[int, int]) -> Region:
    """A COCO annotation's `segmentation`, a list of polygons or an object with run lengths, of a picture of this size.

    Raises:
        ShapeError: it is neither, or it is for a picture of another (height, width).
    """
    if not isinstance(segmentation, dict):
        return polygon_region(label, segmentation)
    own = segmentation.get("size", list(size))
    if own != list(size):
        raise ShapeError(f"Expected run lengths of a picture of {size[0]} × {size[1]} pixels, got {reprlib.repr(own)}.")
    return run_length_region(label, size, segmentation.get("counts"))  # type: ignore[arg-type]
