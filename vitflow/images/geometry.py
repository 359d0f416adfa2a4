"""Placement: the part of an image that the model sees, and the pixels of its input that the cells of a grid cover."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vitflow.errors import OptionError, ShapeError, check_known
from vitflow.images import Fit

CropMode = Literal["center", "squash", "border", "floor", "patches", "corner"]
# Those of timm.
CROP_MODES: tuple[CropMode, ...] = ("center", "squash", "border")
FILTERS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")

Size = tuple[int, int]
Coordinate = TypeVar("Coordinate", float, NDArray[np.float64])


class Span(NamedTuple):
    """Extent of a grid along one axis of the model input, in pixels; cells may exceed the input, where it is padded.

    Attributes:
        start: the first pixel of the first cell.
        step: pixels per cell.
        first, last: tokens are computed from the pixels first ≤ k < last; others are unseen.
    """

    start: float
    step: float
    first: int
    last: int

    def edges(self, count: int) -> NDArray[np.float64]:
        """Return the boundaries of `count` cells, [count + 1]."""
        return self.start + self.step * np.arange(count + 1, dtype=np.float64)

    def is_even(self, count: int, length: int) -> bool:
        """Return True if `count` cells divide a side of `length` pixels evenly.

        >>> Span(0, 14, 0, 378).is_even(27, 378), Span(0, 14, 0, 378).is_even(27, 384)
        (True, False)
        """
        whole = math.isclose(self.step * count, length) and abs(self.start) <= 1e-9 * length
        return whole and (self.first, self.last) == (0, length)


#: The spans of the rows and of the columns.
Extent = tuple[Span, Span]


def even_extent(grid: tuple[int, int], size: tuple[int, int]) -> Extent:
    """Return the extent of a grid of (rows, columns) that divides an input of (height, width) evenly."""
    rows, cols = (Span(0.0, length / count, 0, length) for count, length in zip(grid, size, strict=True))
    return rows, cols


def overlaps(source: ArrayLike, target: ArrayLike) -> NDArray[np.float64]:
    """Return the common length of cell i of `target` and cell j of `source`, given their edges, [target, source].

    >>> overlaps([0, 2, 4], [0, 1, 4]).tolist()
    [[1.0, 0.0], [1.0, 2.0]]
    """
    low = np.maximum.outer(np.asarray(target)[:-1], np.asarray(source)[:-1])
    high = np.minimum.outer(np.asarray(target)[1:], np.asarray(source)[1:])
    shared: NDArray[np.float64] = np.clip(high - low, 0.0, None).astype(np.float64)
    return shared


@dataclass(frozen=True, slots=True)
class Placement:
    """Position of a model input on its image: the image is resized, then cropped or padded.

    Coordinates are continuous (y, x) in the pixel-edge convention: pixel k covers [k, k + 1) and has its centre at
    k + 0.5. Sizes are (height, width) in pixels.

    Attributes:
        image_size: size of the original image.
        resized_size: size of the whole image after the resize.
        offset: (top, left) corner of the model input inside the resized image; negative where padded.
        input_size: size of the model input.
        padding: colour outside the image: the mean of the normalisation, or black.
        extent: the pixels of the model input that the cells of a map cover; None if they divide it evenly.

    >>> placement = place((480, 640), (224, 224), crop_pct=0.875)
    >>> placement.resized_size, placement.offset, placement.seen_box
    ((256, 341), (16, 58), (109, 30, 529, 450))
    """

    image_size: Size
    resized_size: Size
    offset: tuple[int, int]
    input_size: Size
    padding: Literal["mean", "black"] = "mean"
    extent: Extent | None = None

    def __post_init__(self) -> None:
        for name in ("image_size", "resized_size", "input_size"):
            _check_size(name, getattr(self, name))
        sides = zip(self.offset, self.input_size, self.resized_size, strict=True)
        if not all(-length < start < resized for start, length, resized in sides):
            raise ShapeError(
                f"Expected a model input that overlaps the image, got the offset {self.offset} of an input of "
                f"{self.input_size} in an image resized to {self.resized_size}."
            )

    @property
    def seen_box(self) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) of the pixels of the original whose centres are in the seen part of the input.

        Right and bottom are exclusive. The box is empty only if that part is between two pixel centres.
        """
        (top, bottom), (left, right) = (
            (_first_centre(size, resized, start + first), _first_centre(size, resized, start + last))
            for size, resized, start, (first, last) in zip(
                self.image_size, self.resized_size, self.offset, self._seen, strict=True
            )
        )
        return left, top, right, bottom

    @property
    def _seen(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """First and last edge of the rows and columns of the model input that the map's tokens are computed from."""
        rows, cols = ((0, length) for length in self.input_size) if self.extent is None else self.extent
        return (rows[-2], rows[-1]), (cols[-2], cols[-1])

    @property
    def window(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of the seen input on the image; it exceeds the image if the input was padded.

        >>> Placement((100, 200), (50, 100), (0, 25), (50, 50)).window
        (50.0, 0.0, 150.0, 100.0)
        """
        (top, bottom), (left, right) = self._seen
        return self.box_on_image((top, bottom), (left, right))

    def area(self, grid: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return (left, top, right, bottom) of a grid of (rows, columns) on the image; cells may exceed the window."""
        (top, height), (left, width) = self.cells(grid)
        return self.box_on_image((top, top + height), (left, left + width))

    def cells(self, grid: tuple[int, int]) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return first pixel and length in pixels of the rows, and of the columns, of a grid on the model input."""
        if self.extent is None:
            return (0.0, float(self.input_size[0])), (0.0, float(self.input_size[1]))
        rows, cols = self.extent
        return (rows.start, rows.step * grid[0]), (cols.start, cols.step * grid[1])

    def patch_box(self, patch: tuple[int, int], grid: tuple[int, int]) -> tuple[float, float, float, float]:
        """Return (left, top, right, bottom) of a patch (row, column) of a grid on the image, cut at the model input.

        >>> Placement((100, 200), (50, 100), (0, 25), (50, 50)).patch_box((0, 1), (5, 5))
        (70.0, 0.0, 90.0, 20.0)
        """
        edges = []
        for index, count, length, (start, extent) in zip(patch, grid, self.input_size, self.cells(grid), strict=True):
            step = extent / count
            edges.append([min(max(start + step * each, 0.0), float(length)) for each in (index, index + 1)])
        return self.box_on_image(*edges)

    def box_on_image(self, rows: Sequence[float], cols: Sequence[float]) -> tuple[float, float, float, float]:
        """Return (left, top, right, bottom) on the image of a part of the model input."""
        (top, left), (bottom, right) = (self.to_image(float(y), float(x)) for y, x in zip(rows, cols, strict=True))
        return left, top, right, bottom

    @property
    def sees_everything(self) -> bool:
        """True if the centre of every pixel of the image is inside the model input."""
        return self.seen_box == (0, 0, self.image_size[1], self.image_size[0])

    def to_input(self, y: Coordinate, x: Coordinate) -> tuple[Coordinate, Coordinate]:
        """Map a point of the original image to the model input; the result may be outside of it."""
        return (
            y * self.resized_size[0] / self.image_size[0] - self.offset[0],
            x * self.resized_size[1] / self.image_size[1] - self.offset[1],
        )

    def to_image(self, y: Coordinate, x: Coordinate) -> tuple[Coordinate, Coordinate]:
        """Map a point of the model input to the original image; points of the padding are outside of it.

        >>> Placement((100, 200), (50, 100), (0, 25), (50, 50)).to_image(5.0, 0.0)
        (10.0, 50.0)
        """
        return (
            (y + self.offset[0]) * self.image_size[0] / self.resized_size[0],
            (x + self.offset[1]) * self.image_size[1] / self.resized_size[1],
        )

    def patch_at(self, y: float, x: float, grid: tuple[int, int]) -> tuple[int, int]:
        """Return row and column of the patch at a point of the original image, for a grid of (rows, columns).

        >>> Placement((100, 200), (50, 100), (0, 25), (50, 50)).patch_at(10.0, 99.0, (5, 5))
        (0, 2)
        """
        if not (0 <= y < self.image_size[0] and 0 <= x < self.image_size[1]):
            width, height = self.image_size[1], self.image_size[0]
            raise OptionError(f"Expected a point inside the image of {width} × {height} pixels, got ({x:g}, {y:g}).")
        places = self.to_input(y, x)
        if not all(first <= place < last for place, (first, last) in zip(places, self._seen, strict=True)):
            raise OptionError(
                f"Expected a point inside the region that the model saw, {self.seen_box}, got ({x:g}, {y:g})."
            )
        row, col = (
            min(max(math.floor((place - start) * count / length), 0), count - 1)
            for place, count, (start, length) in zip(places, grid, self.cells(grid), strict=True)
        )
        return row, col

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as lists and strings, for JSON, without an even extent."""
        fields = asdict(replace(self, extent=None))
        del fields["extent"]
        fields = {name: value if isinstance(value, str) else list(value) for name, value in fields.items()}
        return fields if self.extent is None else fields | {"extent": [list(span) for span in self.extent]}


def place(
    image_size: Size,
    input_size: Size,
    *,
    fit: Fit = "crop",
    crop_pct: float = 1.0,
    crop_mode: CropMode = "center",
    patch_size: Size | None = None,
) -> Placement:
    """Compute the placement of a model input on an image. All sizes are (height, width) in pixels.

    Args:
        image_size, input_size: sizes of the image, and of the input of the model.
        fit: "crop" equals timm's evaluation transform with this crop_pct and crop_mode; "squash" resizes the
            whole image to the input size, whatever its aspect; "pad" keeps the aspect and pads; "native" keeps the
            aspect with about as many patches as input_size has, each side rounded to whole patches.
        crop_pct: share of the resized image that is cropped out; for "crop" only.
        crop_mode: timm's "center", "squash" or "border"; "floor": "center" with the offset rounded down, as by
            transformers; "patches": the largest size of nearly the image's aspect
            that has no more whole patches than input_size, each side rounded up; or "corner": the whole image at the
            top left, padded with black below or to the right, as by OWLv2. For "crop" only.
        patch_size: size of a patch; for "native" and "patches", which require it.

    Source: timm.data.transforms_imagenet_eval, and Resize and CenterCrop of torchvision.

    >>> place((480, 640), (224, 224), fit="native", patch_size=(16, 16)).input_size
    (192, 256)
    """
    if fit == "squash":
        return Placement(image_size, input_size, (0, 0), input_size)
    if fit == "pad":
        return _border(image_size, input_size, input_size)
    if fit == "native" or crop_mode == "patches":
        assert patch_size is not None
        whole = _whole_patches(image_size, input_size, patch_size, native=fit == "native")
        return Placement(image_size, whole, (0, 0), whole)
    if crop_mode == "corner":
        return replace(_border(image_size, input_size, input_size), offset=(0, 0), padding="black")
    return _place_like_timm(image_size, input_size, crop_pct, crop_mode)


def _check_size(name: str, size: Sequence[int]) -> None:
    if len(size) != 2 or min(size) < 1:
        raise ShapeError(f"Expected {name} as (height, width) of at least 1 pixel each, got {tuple(size)}.")


def _first_centre(size: int, resized: int, start: int) -> int:
    """Return the index of the first of `size` pixels whose centre is at or after `start` in the resized image."""
    # (k + 1/2) · resized / size >= start, solved for k in whole numbers, so that no rounding decides about a pixel.
    return min(max(-((resized - 2 * size * start) // (2 * resized)), 0), size)


def _whole_patches(image_size: Size, input_size: Size, patch_size: Size, *, native: bool) -> Size:
    """Return a size of whole patches in the image's aspect ratio: about as many as in the input, or not more.

    Source of the latter: the image processor of SigLIP 2 (Tschannen et al. 2025, §2.4.2, NaFlex).
    """
    tall, wide = patch_size
    most = max((input_size[0] // tall) * (input_size[1] // wide), 1)
    height, width = image_size
    if native:
        # rows · cols = most and (rows · tall) / (cols · wide) = height / width; at least one row and column each
        exact_rows = math.sqrt(most * (height / width) * (wide / tall))
        rows, cols = (min(max(round(exact), 1), most) for exact in (exact_rows, most / exact_rows))
        return rows * tall, cols * wide
    # The scales at which one side is an integer number of patches long.
    candidates = [(Fraction(n * tall, height), n, -(-n * tall * width // (height * wide))) for n in range(1, most + 1)]
    candidates += [(Fraction(n * wide, width), -(-n * wide * height // (width * tall)), n) for n in range(1, most + 1)]
    _, rows, cols = max(one for one in candidates if one[1] * one[2] <= most)
    return rows * tall, cols * wide


def _place_like_timm(image_size: Size, input_size: Size, crop_pct: float, crop_mode: CropMode) -> Placement:
    """Compute the resize and crop of timm's evaluation transform, with the same rounding."""
    check_known("crop mode", crop_mode, (*CROP_MODES, "floor"))
    if not 0 < crop_pct <= min(input_size):
        raise OptionError(f"Expected crop_pct as a share above 0, such as 0.9, got {crop_pct}.")
    scale_size = math.floor(input_size[0] / crop_pct), math.floor(input_size[1] / crop_pct)
    if crop_mode == "border":
        return _border(image_size, scale_size, input_size)
    if crop_mode == "squash":
        resized = scale_size
    elif scale_size[0] == scale_size[1]:
        # torchvision's Resize of the short side truncates the long side …
        short, long = min(image_size), max(image_size)
        other = int(scale_size[0] * long / short)
        resized = (other, scale_size[0]) if image_size[1] <= image_size[0] else (scale_size[0], other)
    else:
        # … while timm's ResizeKeepRatio rounds both.
        ratio = min(image_size[0] / scale_size[0], image_size[1] / scale_size[1])
        resized = round(image_size[0] / ratio), round(image_size[1] / ratio)
    offset = _centred(resized, input_size, math.floor if crop_mode == "floor" else round)
    return Placement(image_size, resized, offset, input_size, padding="black")


def _border(image_size: Size, scale_size: Size, input_size: Size) -> Placement:
    """Resize with the aspect ratio kept until the longer side, relative to the input, is scale_size; pad the rest."""
    ratio = max(image_size[0] / scale_size[0], image_size[1] / scale_size[1])
    resized = max(round(image_size[0] / ratio), 1), max(round(image_size[1] / ratio), 1)
    return Placement(image_size, resized, _centred(resized, input_size), input_size)


def _centred(resized: Size, input_size: Size, rounded: Callable[[float], int] = round) -> tuple[int, int]:
    """Return (top, left) of a centred model input; padding puts the odd pixel last, cropping rounds half to even."""
    top, left = (
        -((inner - outer) // 2) if inner > outer else rounded((outer - inner) / 2)
        for outer, inner in zip(resized, input_size, strict=True)
    )
    return top, left


def strips(height: int, width: int) -> Iterator[slice]:
    """Yield row slices of an image, small enough for a processor cache."""
    rows = max(1, 2**15 // max(width, 1))
    return (slice(top, top + rows) for top in range(0, height, rows))
