"""Labelled regions of an image: boxes, polygons, run lengths or masks, and what is wrong with them.

Annotations are untrusted: sizes are checked before anything is painted. Pixels are those of the image as displayed,
turned by its EXIF orientation.
"""

import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pycocotools import mask as coco

from vitflow.errors import FrameError, OptionError, ShapeError, VitflowError

Mask = NDArray[np.bool_]
Size = tuple[int, int]

# A class index of the model, a class name or WordNet id, or None if unknown.
Label = int | str | None

# Limits far above real annotations, to bound memory and time.
_MOST_POLYGONS = 1000  # of one object
_LONGEST_OUTLINE = 1_000_000  # pixels of one polygon
LONGEST_MESSAGE = 200  # characters of an error message, which may quote the file

# Pixels by which rounding, or counting from 1, may place an edge outside of the image.
_SLACK = 1.0
# Largest edge of boxes that are relative to the image.
_RELATIVE = 1.05
_EXIF_ORIENTATION = 274

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
            FrameError: the shape reaches out of the image, or is for an image of another size.
            ShapeError: the shape is none of the above.
        """
        shape = self.shape() if callable(self.shape) else self.shape
        height, width = mask.shape
        if isinstance(shape, np.ndarray) and shape.ndim == 2:
            check_size(shape.shape, (height, width), "a mask")
            mask |= shape != 0
        elif isinstance(shape, Mapping):
            if (size := shape.get("size")) is not None:
                check_size(size, (height, width), "run lengths")
            _paint_runs(_read_runs(shape.get("counts"), mask.size), mask)
        elif _is_polygons(shape):
            _paint_polygons(shape, mask)
        else:
            box = read_box(shape)
            _check_inside(box, (height, width), "a box")
            left, top, right, bottom = (max(math.ceil(edge - 0.5), 0) for edge in box)
            mask[top:bottom, left:right] = True

    def mask(self, size: Size) -> Mask:
        """Return the mask for an image of this (height, width), bool [height, width].

        >>> Region("cat", (1, 0, 3, 1)).mask((1, 4)).tolist()
        [[False, True, True, False]]
        >>> Region("cat", {"size": [2, 2], "counts": [1, 2, 1]}).mask((2, 2)).tolist()
        [[False, True], [True, False]]
        """
        mask = np.zeros(size, dtype=np.bool_)
        self.paint(mask)
        return mask


def as_label(value: Any) -> Label:
    """Return a class name, or a class index as int; ValueError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and float(value).is_integer():
        return int(value)
    raise ValueError(f"expected a class name or a class index, got {reprlib.repr(value)}")


# --- Frames and formats ----------------------------------------------------------------------------------------------


def file_frame(source: Any) -> Size | None:
    """Return (height, width) of an image file or PIL image before its EXIF turn; None if it is not turned."""
    try:
        with nullcontext(source) if isinstance(source, Image.Image) else Image.open(source) as opened:
            turned = opened.getexif().get(_EXIF_ORIENTATION, 1) in range(2, 9)
            return (opened.height, opened.width) if turned else None
    except Exception:  # an array, or a file that Pillow cannot open
        return None


@contextmanager
def naming_turn(source: Any) -> Iterator[None]:
    """Name the EXIF turn in a FrameError if the annotation fits the image before the turn."""
    try:
        yield
    except FrameError as error:
        frame = file_frame(source)
        if frame is None or not error.fits(frame):
            raise
        raise ShapeError(
            f"{error} It fits the file before its EXIF orientation turns it, {frame[1]} × {frame[0]}: annotate the "
            "image as it is displayed, or remove the orientation from the file."
        ) from error


def check_size(given: Any, size: Size, kind: str) -> None:
    """Raise FrameError unless an annotation is for an image of this (height, width)."""
    actual = tuple(given) if isinstance(given, list | tuple) else given
    if actual != tuple(size):
        raise FrameError(
            f"Expected {kind} for an image of {size} pixels (height, width), got {reprlib.repr(actual)}.",
            lambda other: other == actual,
        )


def check_boxes(shapes: Iterable[Any]) -> None:
    """Raise OptionError for boxes of another format than (left, top, right, bottom) in pixels.

    >>> check_boxes([(10, 20, 5, 8)])
    Traceback (most recent call last):
    vitflow.errors.OptionError: Expected boxes [left, top, right, bottom], got [10, 20, 5, 8]. For boxes [left, top, \
width, height], pass [left, top, left + width, top + height].
    """
    numbers: list[float] = []
    for shape in shapes:
        try:
            if _is_polygons(shape):
                numbers += [number for polygon in shape for number in _numbers(polygon)]
                continue
            left, top, right, bottom = box = read_box(shape)
        except WRONG:
            continue  # not a box, or reported when it is painted
        if right < left or bottom < top:
            raise OptionError(
                f"Expected boxes [left, top, right, bottom], got {reprlib.repr(list(shape))}. For boxes [left, top, "
                "width, height], pass [left, top, left + width, top + height]."
            )
        numbers += box
    if numbers and min(numbers) >= 0 and max(numbers) <= _RELATIVE and any(number % 1 for number in numbers):
        raise OptionError(
            f"Expected boxes and polygons in pixels, got coordinates from 0 to 1 such as {max(numbers):g}. Multiply "
            "them by the width and height of the image."
        )


def _check_inside(numbers: Sequence[float], size: Size, kind: str) -> None:
    """Raise FrameError if points x, y, x, y, … are outside of the image by more than a pixel."""

    def fits(size: Size) -> bool:
        return (
            min(numbers) >= -_SLACK
            and max(numbers[0::2]) <= size[1] + _SLACK
            and max(numbers[1::2]) <= size[0] + _SLACK
        )

    if not fits(size):
        raise FrameError(
            f"Expected {kind} inside the image, {size[1]} × {size[0]} pixels (width × height), got "
            f"{reprlib.repr([round(number, 1) for number in numbers])}. Scale annotations of a resized copy.",
            fits,
        )


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


def read_box(box: Any) -> list[float]:
    """Return the four edges of a box; ShapeError if it has others."""
    edges = _numbers(box)
    if len(edges) != 4:
        raise ShapeError(f"Expected a box of four finite numbers, got {reprlib.repr(box)}.")
    return edges


def _is_polygons(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and bool(shape) and isinstance(shape[0], list | tuple | np.ndarray)


def _paint_polygons(polygons: Sequence[Any], mask: Mask) -> None:
    if len(polygons) > _MOST_POLYGONS:
        raise ShapeError(f"Expected at most {_MOST_POLYGONS} polygons, got {len(polygons)}.")
    areas = []
    for numbers in map(_numbers, polygons):
        if len(numbers) % 2:
            raise ShapeError(f"Expected a polygon as x, y, x, y, …, got {len(numbers)} numbers.")
        _check_inside(numbers, (mask.shape[0], mask.shape[1]), "a polygon")
        corners = np.array(numbers).reshape(-1, 2)
        if np.abs(corners - np.roll(corners, 1, axis=0)).max(axis=1).sum() > _LONGEST_OUTLINE:
            raise ShapeError(f"Expected a polygon with an outline of at most {_LONGEST_OUTLINE} pixels.")
        if len(numbers) >= 6:  # fewer corners cover no pixel
            areas.append(numbers)
    for packed in coco.frPyObjects(areas, *mask.shape) if areas else ():
        _paint_runs(_read_runs(packed["counts"], mask.size), mask)


def _paint_runs(runs: Sequence[int], mask: Mask) -> None:
    """Mark every other run, column by column; the runs must fill the mask."""
    mask |= np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(mask.shape, order="F")


def _read_runs(counts: Any, pixels: int) -> list[int]:
    """Return run lengths that sum to this number of pixels, or raise ShapeError.

    Packed run lengths have five bits in each character and, from the fourth run, the difference to the run two before.
    They are decoded here: the decoder of pycocotools 2.0.11 returns uninitialised memory for those that sum to too few
    pixels, and a DeprecationWarning under NumPy 2.
    """
    if isinstance(counts, str | bytes):
        data = counts.encode("utf-8", "surrogatepass") if isinstance(counts, str) else counts
        # At most one number a pixel and seven characters a number; the last one of a number has no continuation bit.
        if len(data) > 2 * pixels + 16 or not re.fullmatch(rb"([P-o]{0,6}[0-O])*", data):
            raise ShapeError(f"Expected packed run lengths in COCO's form, got {reprlib.repr(counts)}.")
        runs: list[int] = []
        for digits in re.findall(rb"[P-o]*[0-O]", data):
            number = sum((code - 48 & 31) << 5 * place for place, code in enumerate(digits))
            number -= (digits[-1] - 48 & 16) << 5 * len(digits) - 4  # the sign
            runs.append(number + (runs[-2] if len(runs) > 2 else 0))
    elif isinstance(counts, list | tuple) and all(isinstance(count, int) for count in counts):
        runs = list(counts)
    else:
        raise ShapeError(f"Expected run lengths as whole numbers or packed text, got {reprlib.repr(counts)}.")
    if sum(runs) != pixels or min(runs) < 0:
        raise ShapeError(f"Expected run lengths that sum to {pixels} pixels, got {reprlib.repr(runs)}.")
    return runs
