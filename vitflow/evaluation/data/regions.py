"""Regions: which pixels belong to a labelled object, painted from boxes, polygons, run lengths or masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError

Mask = NDArray[np.bool_]

# A class index of the model, a class name or WordNet id, or None where nothing is known.
Label = int | str | None

_SUBPIXEL_BITS = 8


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


def box_region(label: Label, box: Sequence[float]) -> Region:
    """A box (left, top, right, bottom) by its edges, in pixels: right and bottom are the first pixels outside.

    A pixel belongs to it if its centre does. What lies outside the picture is cut off.

    >>> box_region("cat", (1, 0, 3, 1)).mask((1, 4)).tolist()
    [[False, True, True, False]]
    """
    left, top, right, bottom = (int(np.ceil(float(edge) - 0.5)) for edge in box)
    return Region(label, partial(_paint_box, left, top, right, bottom))


def polygon_region(label: Label, polygons: Sequence[Sequence[float]]) -> Region:
    """Polygons as flat lists x, y, x, y, … of corners by pixel edges, as in COCO; together they are one object.

    The outline is drawn too, so that a pixel which a polygon only touches may belong to it.
    """
    corners = [np.asarray(polygon, dtype=np.float64).reshape(-1, 2) for polygon in polygons]
    return Region(label, partial(_paint_polygons, corners))


def run_length_region(label: Label, size: tuple[int, int], counts: str | bytes | Sequence[int]) -> Region:
    """COCO's run lengths: runs of ground and object in turn, column by column, as numbers or packed into text.

    >>> run_length_region("cat", (2, 2), [1, 2, 1]).mask((2, 2)).tolist()
    [[False, True], [True, False]]
    """
    runs = _unpack(counts) if isinstance(counts, str | bytes) else [int(count) for count in counts]
    if min(runs, default=0) < 0 or sum(runs) != size[0] * size[1]:
        raise ShapeError(f"Expected run lengths that sum to {size[0]} × {size[1]} pixels, got a sum of {sum(runs)}.")
    return Region(label, partial(_paint_runs, size, runs), unknown=False)


def mask_region(label: Label, mask: Mask, *, unknown: bool = False) -> Region:
    """A mask of the picture's own size, bool [height, width]."""
    return Region(label, partial(_paint_mask, mask), unknown)


def _paint_box(left: int, top: int, right: int, bottom: int, mask: Mask) -> None:
    mask[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = True


def _paint_polygons(corners: Sequence[NDArray[np.float64]], mask: Mask) -> None:
    for polygon in corners:
        # OpenCV's coordinates name pixel centres, COCO's pixel edges, hence the half.
        points = np.rint((polygon - 0.5) * 2**_SUBPIXEL_BITS).astype(np.int32)
        canvas = np.zeros(mask.shape, dtype=np.uint8)
        cv2.fillPoly(canvas, [points], 1, shift=_SUBPIXEL_BITS)
        mask |= canvas.astype(np.bool_)


def _paint_runs(size: tuple[int, int], runs: Sequence[int], mask: Mask) -> None:
    values = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    _paint_mask(values.reshape(size, order="F"), mask)


def _paint_mask(own: Mask, mask: Mask) -> None:
    if own.shape != mask.shape:
        raise ShapeError(
            f"Expected a mask of the picture's size, {mask.shape[0]} × {mask.shape[1]} pixels (height × width), got "
            f"{own.shape[0]} × {own.shape[1]}. Make the mask of this very picture, without its EXIF rotation."
        )
    mask |= own


def _unpack(text: str | bytes) -> list[int]:
    """COCO's packed run lengths: five bits to a character, and from the fourth run on the difference to two before."""
    data = text.encode() if isinstance(text, str) else text
    runs: list[int] = []
    position = 0
    while position < len(data):
        value = shift = 0
        more = True
        while more:
            if position >= len(data):
                raise ShapeError("Expected packed run lengths in COCO's form, got a text that ends inside a number.")
            byte = data[position] - 48
            position += 1
            value |= (byte & 0x1F) << shift
            shift += 5
            more = bool(byte & 0x20)
            if not more and byte & 0x10:
                value |= -1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
    return runs


def read_polygons_or_runs(label: Label, segmentation: Any, size: tuple[int, int]) -> Region:
    """A COCO annotation's `segmentation`: a list of polygons, or an object with run lengths."""
    if isinstance(segmentation, dict):
        height, width = segmentation.get("size", size)
        return run_length_region(label, (int(height), int(width)), segmentation["counts"])
    return polygon_region(label, segmentation)
