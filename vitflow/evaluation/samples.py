"""Images with labelled regions (boxes, polygons, run lengths or masks), and data sets of them.

Shapes are checked before they are painted. Pixels are those of the image as displayed, turned by its EXIF orientation.
"""

import contextlib
import hashlib
import math
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import FrameError, OptionError, ShapeError, VitflowError, load_extra

Mask = NDArray[np.bool_]
Size = tuple[int, int]

# A class index of the model, a class name or WordNet id, or None if unknown.
Label = int | str | None

# Pixels by which rounding, or counting from 1, may place an edge outside of the image.
_SLACK = 1.0
# Largest edge of boxes that are relative to the image.
_RELATIVE = 1.05
_EXIF_ORIENTATION = 274


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
            - a mask [height, width] of the image's size, nonzero in the object.
        unknown: exclude the pixels from all metrics, as for crowds.
    """

    label: Label
    shape: Any
    unknown: bool = False

    def mask(self, size: Size) -> Mask:
        """Return the mask for an image of this (height, width), bool [height, width].

        Raises:
            ShapeError: the shape is none of the above, reaches out of the image, or is for an image of another size.

        >>> Region("cat", (1, 0, 3, 1)).mask((1, 4)).tolist()
        [[False, True, True, False]]
        >>> Region("cat", {"size": [2, 2], "counts": [1, 2, 1]}).mask((2, 2)).tolist()
        [[False, True], [True, False]]
        """
        shape = self.shape
        if isinstance(shape, np.ndarray) and shape.ndim == 2:
            check_size(shape.shape, size, "a mask")
            return np.asarray(shape != 0)
        if isinstance(shape, Mapping):
            check_size(shape.get("size", size), size, "run lengths")
            return _mask_of_runs(shape.get("counts"), size)
        if _is_polygons(shape):
            return _mask_of_polygons(shape, size)
        box = read_box(shape)
        _check_inside(box, size, "a box")
        left, top, right, bottom = (max(math.ceil(edge - 0.5), 0) for edge in box)
        mask = np.zeros(size, dtype=np.bool_)
        mask[top:bottom, left:right] = True
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Labelled:
    """An image and its annotations.

    Attributes:
        image: RGB uint8 [height, width, 3].
        regions: the objects; None if the data has no masks or boxes.
        label: class of the whole image, if known.
        source: its path or PIL image, for errors that concern its EXIF orientation.

    Raises:
        OptionError: boxes have another format.
    """

    image: NDArray[np.uint8]
    regions: tuple[Region, ...] | None = None
    label: Label = None
    source: Any = None

    def __post_init__(self) -> None:
        check_boxes(region.shape for region in self.regions or ())

    def union(self, regions: Sequence[Region]) -> Mask:
        """Return the union of some of its regions, bool [height, width]; errors as of `Region.mask`."""
        size = self.image.shape[0], self.image.shape[1]
        mask = np.zeros(size, dtype=np.bool_)
        with naming_turn(self.source):
            for region in regions:
                mask |= region.mask(size)
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """An image of a data set, read when needed.

    Attributes:
        name: unique name in tables.
        read: returns the image and its annotations, or raises VitflowError.
        files: files that it is read from, to detect changes.
    """

    name: str
    read: Callable[[], Labelled]
    files: tuple[Path, ...] = ()

    def stamp(self) -> list[Any]:
        """Return size and modification time of its files, or a hash of an image in memory, to detect changes."""
        stamps: list[Any] = []
        for file in self.files:
            try:
                status = file.stat()
                stamps.append([status.st_size, status.st_mtime_ns])
            except OSError:
                stamps.append([])
        if not self.files:
            with contextlib.suppress(VitflowError, OSError):
                content = self.read()
                digest = hashlib.sha256(f"{content.image.shape} {content.label!r}".encode("utf-8", "surrogatepass"))
                digest.update(content.image.tobytes())
                for region in content.regions or ():
                    digest.update(f"{region.label!r} {region.unknown}".encode("utf-8", "surrogatepass"))
                    digest.update(content.union([region]).tobytes())
                stamps.append(digest.hexdigest())
        return stamps


@dataclass(frozen=True, slots=True)
class Dataset:
    """Images with their annotations.

    Attributes:
        name: name of the data set.
        kind: the kind of the images, for display.
        samples: the images.
        has_regions: True if it has masks or boxes, which localisation requires.
        identity: fingerprint as JSON data.
    """

    name: str
    kind: str
    samples: Sequence[Sample] = field(repr=False)
    has_regions: bool
    identity: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.samples)


# --- Checks ----------------------------------------------------------------------------------------------------------


def as_label(value: Any) -> Label:
    """Return a class name, or a class index as int; ValueError for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | float) and float(value).is_integer():
        return int(value)
    raise ValueError(f"expected a class name or a class index, got {reprlib.repr(value)}")


def is_turned(source: Any) -> bool:
    """Return True for an image file or PIL image that its EXIF orientation turns."""
    try:
        with contextlib.nullcontext(source) if isinstance(source, Image.Image) else Image.open(source) as opened:
            return opened.getexif().get(_EXIF_ORIENTATION, 1) in range(2, 9)
    except Exception:  # an array, or a file that Pillow cannot open
        return False


@contextlib.contextmanager
def naming_turn(source: Any) -> Iterator[None]:
    """Name the EXIF turn in the error of an annotation that does not fit a turned image."""
    try:
        yield
    except FrameError as error:
        if not is_turned(source):
            raise
        raise ShapeError(
            f"{error} The EXIF orientation turns this image: annotate it as displayed, or remove the orientation."
        ) from error


def check_size(given: Any, size: Size, kind: str) -> None:
    """Raise FrameError unless an annotation is for an image of this (height, width)."""
    if not isinstance(given, list | tuple) or tuple(given) != size:
        raise FrameError(f"Expected {kind} for an image of {size} pixels (height, width), got {reprlib.repr(given)}.")


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
            polygons = _is_polygons(shape)
            edges = [edge for polygon in shape for edge in _numbers(polygon)] if polygons else read_box(shape)
        except Exception:  # not a box, or reported when it is painted
            continue
        if not polygons and (edges[2] < edges[0] or edges[3] < edges[1]):
            raise OptionError(
                f"Expected boxes [left, top, right, bottom], got {reprlib.repr(list(shape))}. For boxes [left, top, "
                "width, height], pass [left, top, left + width, top + height]."
            )
        numbers += edges
    if numbers and min(numbers) >= 0 and max(numbers) <= _RELATIVE and any(number % 1 for number in numbers):
        raise OptionError(
            f"Expected boxes and polygons in pixels, got coordinates from 0 to 1 such as {max(numbers):g}. Multiply "
            "them by the width and height of the image."
        )


def _check_inside(numbers: Sequence[float], size: Size, kind: str) -> None:
    """Raise FrameError if points x, y, x, y, … are outside of the image by more than a pixel."""
    height, width = size
    if min(numbers) < -_SLACK or max(numbers[0::2]) > width + _SLACK or max(numbers[1::2]) > height + _SLACK:
        raise FrameError(
            f"Expected {kind} inside the image, {width} × {height} pixels (width × height), got "
            f"{reprlib.repr([round(number, 1) for number in numbers])}. Scale annotations of a resized copy."
        )


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


# --- Painting --------------------------------------------------------------------------------------------------------


def _is_polygons(shape: Any) -> bool:
    return isinstance(shape, list | tuple) and bool(shape) and isinstance(shape[0], list | tuple | np.ndarray)


def _mask_of_polygons(polygons: Sequence[Any], size: Size) -> Mask:
    areas = []
    for numbers in map(_numbers, polygons):
        if len(numbers) % 2:
            raise ShapeError(f"Expected a polygon as x, y, x, y, …, got {len(numbers)} numbers.")
        _check_inside(numbers, size, "a polygon")
        if len(numbers) >= 6:  # fewer corners cover no pixel
            areas.append(numbers)
    mask = np.zeros(size, dtype=np.bool_)
    coco = load_extra("pycocotools.mask", "A polygon", "evaluate") if areas else None
    for packed in coco.frPyObjects(areas, *size) if coco else ():
        mask |= _mask_of_runs(packed["counts"], size)
    return mask


def _mask_of_runs(counts: Any, size: Size) -> Mask:
    """Return the mask of run lengths, column by column, or raise ShapeError.

    Packed run lengths have five bits in each character and, from the fourth run, the difference to the run two before.
    They are decoded here: the decoder of pycocotools 2.0.11 returns uninitialised memory for those that sum to too few
    pixels, and a DeprecationWarning under NumPy 2.
    """
    if isinstance(counts, str | bytes):
        data = counts.encode("utf-8", "surrogatepass") if isinstance(counts, str) else counts
        # At most seven characters a number; the last one of a number has no continuation bit.
        if not re.fullmatch(rb"([P-o]{0,6}[0-O])*", data):
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
    pixels = size[0] * size[1]
    if sum(runs) != pixels or min(runs) < 0:
        raise ShapeError(f"Expected run lengths that sum to {pixels} pixels, got {reprlib.repr(runs)}.")
    return np.repeat(np.arange(len(runs)) % 2 == 1, runs).reshape(size, order="F")
