"""How each family of vision–language models arranges the patches of an image among its tokens.

A processor writes as many times the image's own token as the model makes patches of it, and says nothing of their
order. The order is the model's: it is told here for each family, as transformers 5 computes it.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import OptionError
from vitflow.images.geometry import Placement, Size

Role = Literal["whole", "tile", "thumbnail"]


@dataclass(frozen=True, slots=True)
class Part:
    """A grid of patches as it stands in a sequence, with the tokens that stand for no patch.

    Attributes:
        rows, cols, placement, role: as of `ImageTokens`.
        before: tokens before it, such as a class token.
        newline: tokens after each row.
        after: tokens after it.
    """

    rows: int
    cols: int
    placement: Placement
    role: Role = "whole"
    before: int = 0
    newline: int = 0
    after: int = 0

    @property
    def length(self) -> int:
        """How many tokens it has."""
        return self.before + self.rows * (self.cols + self.newline) + self.after

    @property
    def places(self) -> list[int]:
        """Where its patches stand among all of its tokens, row by row."""
        wide = self.cols + self.newline
        return [self.before + row * wide + col for row in range(self.rows) for col in range(self.cols)]


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image as a processor has prepared it: its number among all, its size, and how many tokens these have.

    `image` is the image itself, uint8 [height, width, 3], where the caller called the processor: with other settings
    than the processor holds, the patches would lie elsewhere.
    """

    config: Any
    processor: Any
    inputs: Mapping[str, Any]
    number: int
    size: Size
    count: int
    tokens: int
    image: NDArray[np.uint8] | None = None

    @property
    def images(self) -> Any:
        """The part of the processor that prepares images."""
        return getattr(self.processor, "image_processor", self.processor)

    @property
    def sees(self) -> Any:
        """The configuration of the vision tower."""
        return self.config.vision_config

    @property
    def pixels(self) -> Size:
        """Height and width of a model input."""
        shape = self.inputs["pixel_values"].shape
        return int(shape[-2]), int(shape[-1])


def _squashed(size: Size, into: Size) -> Placement:
    """The whole image, whatever its aspect, resized to this size."""
    return Placement(size, into, (0, 0), into)


def _padded_square(size: Size) -> Placement:
    """The image in the middle of a square of its longer side."""
    side = max(size)
    return Placement(size, size, tuple(-((side - own) // 2) for own in size), (side, side))  # type: ignore[arg-type]


def _prepared(processed: ProcessedImage) -> Placement:
    """Where the model input lies, by the settings of an image processor that resizes and crops."""
    images, size = processed.images, processed.size
    into = images.size
    shortest, height, width = (_setting(into, name) for name in ("shortest_edge", "height", "width"))
    if getattr(images, "do_pad", False) and min(size) < max(size):
        square = _padded_square(size)
        if processed.pixels[0] == processed.pixels[1]:
            return square
    resized = size
    if images.do_resize and height and width:
        resized = (height, width)
    elif images.do_resize and shortest:
        scaled = [int(shortest * side / min(size)) for side in size]
        resized = (shortest, scaled[1]) if size[0] <= size[1] else (scaled[0], shortest)
    if not getattr(images, "do_center_crop", False):
        return _squashed(size, resized)
    crop = [int(_setting(images.crop_size, name) or 0) for name in ("height", "width")]
    offset = [int((own - part) / 2) for own, part in zip(resized, crop, strict=True)]
    return Placement(size, resized, (offset[0], offset[1]), (crop[0], crop[1]))


def _setting(sizes: Any, name: str) -> int | None:
    """A side of a processor's size, which is a dictionary or has attributes."""
    found: int | None = sizes.get(name) if isinstance(sizes, Mapping) else getattr(sizes, name, None)
    return found


def _llava(processed: ProcessedImage) -> Iterator[Part]:
    """One raster; what the crop leaves out is unseen. The class token may be there, before it."""
    patch = processed.sees.patch_size
    rows, cols = (side // patch for side in processed.pixels)
    own = int(processed.tokens == processed.count * (rows * cols + 1))
    yield Part(rows, cols, raster(processed, rows, cols, patch), before=own)


def raster(processed: ProcessedImage, rows: int, cols: int, patch: int) -> Placement:
    """Where a grid of patches of so many pixels lies, which begins in the corner of the model input."""
    if processed.image is not None:
        _check_prepared(processed, processed.image)
    return _whole_patches(_prepared(processed), (rows * patch, cols * patch), processed.pixels)


def _check_prepared(processed: ProcessedImage, image: NDArray[np.uint8]) -> None:
    """Raise OptionError unless the processor's stored settings make the given model input of this image.

    Rounding to half precision, or by another backend of the processor, is far below the limit.
    """
    images, given = processed.images, processed.inputs["pixel_values"][processed.number].detach().cpu().float()
    expected = images(images=[Image.fromarray(image)], return_tensors="pt")["pixel_values"][0].float()
    if given.shape == expected.shape:
        distance = float((given - expected).square().mean().sqrt())
        if distance <= 0.02 + 0.1 * float(expected.std()):
            return
        got = f"pixel_values that differ from those by {distance:.2f} (root mean square)"
    else:
        got = f"pixel_values {tuple(given.shape)} instead of {tuple(expected.shape)}"
    raise OptionError(
        f"Expected pixel_values as {type(images).__name__} makes them of this image by its stored settings, got "
        f"{got}: where the patches lie is not known. Call the processor without do_pad, size, do_center_crop and the "
        "like, or store these in it first (processor.image_processor.do_pad = True), give the image that it was "
        "given, or pass layout=ImageTokens(positions, rows, cols, placement)."
    )


def _whole_patches(placement: Placement, covered: Size, pixels: Size) -> Placement:
    """Where the patches lie, where they leave a rest of the model input on the right and below."""
    sides = zip(placement.input_size, covered, pixels, strict=True)
    height, width = (round(side * part / whole) for side, part, whole in sides)
    return Placement(placement.image_size, placement.resized_size, placement.offset, (height, width))


def _llava_next(processed: ProcessedImage) -> Iterator[Part]:
    """First the whole image, squashed; then all tiles as one grid, without their padding, a newline after each row.

    Tiles are counted in patches that fill them, whose side is that of the tile over their number.
    """
    from transformers.image_processing_utils import select_best_resolution

    patch, tile = processed.sees.patch_size, processed.sees.image_size
    side = tile // patch
    whole = _whole_patches(_squashed(processed.size, (tile, tile)), (side * patch, side * patch), (tile, tile))
    together = processed.inputs.get("batch_num_images")
    if together is not None and _together(together, processed.number) > 1:
        whole = _whole_patches(_padded_square(processed.size), (side * patch, side * patch), (tile, tile))
        yield Part(side, side, whole, after=1)
        return
    yield Part(side, side, whole)
    height, width = processed.size
    best = select_best_resolution((height, width), [list(one) for one in processed.config.image_grid_pinpoints])
    scale_rows, scale_cols = best[0] / height, best[1] / width
    resized = (
        (min(math.ceil(height * scale_cols), best[0]), best[1])
        if scale_cols < scale_rows
        else (best[0], min(math.ceil(width * scale_rows), best[1]))
    )
    grid = [best[0] // tile * side, best[1] // tile * side]
    cut = [0, 0]  # rows above and below, columns on both sides, that are padding alone
    axis = 0 if width / height > grid[1] / grid[0] else 1
    inside = int(round(processed.size[axis] * (grid[1 - axis] / processed.size[1 - axis]), 7))
    cut[axis] = (grid[axis] - inside) // 2
    grid[axis] -= 2 * cut[axis]
    offset = [cut[own] * tile - (best[own] - resized[own]) // 2 * side for own in (0, 1)]  # in pixels times `side`
    placement = Placement(
        processed.size,
        (resized[0] * side, resized[1] * side),
        (offset[0], offset[1]),
        (grid[0] * tile, grid[1] * tile),
    )
    most = getattr(processed.config, "vision_aspect_ratio", None)
    if most is not None:  # OneVision shrinks a grid of too many patches
        ratio = math.sqrt(grid[0] * grid[1] / (int(str(most).removeprefix("anyres_max_")) * side**2))
        grid = [int(own // ratio) for own in grid] if ratio > 1.1 else grid
    yield Part(grid[0], grid[1], placement, "tile", newline=1)


def _together(counts: Any, number: int) -> int:
    """Of how many images of one prompt this is one."""
    last = 0
    for count in (int(one) for one in counts):
        last += count
        if number < last:
            return count
    return 1


def _qwen(processed: ProcessedImage) -> Iterator[Part]:
    """One raster of merged patches, whatever order the tower has them in; the sides were rounded to such."""
    merged = processed.sees.spatial_merge_size
    _, rows, cols = (int(one) for one in processed.inputs["image_grid_thw"][processed.number])
    patch = processed.sees.patch_size
    yield Part(rows // merged, cols // merged, _squashed(processed.size, (rows * patch, cols * patch)))


def _idefics3(processed: ProcessedImage) -> Iterator[Part]:
    """Tiles row by row, then the whole image, squashed."""
    side = math.isqrt(processed.processor.image_seq_len)
    tile = int(_setting(processed.images.max_image_size, "longest_edge") or processed.pixels[0])
    _, rows, cols = processed.images.get_number_of_image_patches(*processed.size, {})
    if processed.tokens == processed.count * side * side:
        rows = cols = 0  # it was called without splitting
    yield from _tiles(processed.size, rows, cols, tile, side)
    yield Part(side, side, _squashed(processed.size, (tile, tile)))


def _internvl(processed: ProcessedImage) -> Iterator[Part]:
    """Tiles row by row, then a thumbnail; one tile is the whole image."""
    side, images, tile = math.isqrt(processed.processor.image_seq_length), processed.images, processed.pixels[0]
    canvas = sys.modules[type(images).__module__].get_optimal_tiled_canvas
    cols, rows = canvas(processed.size, processed.pixels, images.min_patches, images.max_patches)
    whole = _squashed(processed.size, (tile, tile))
    if rows * cols == 1 or processed.tokens == processed.count * side * side:
        yield Part(side, side, whole)
        return
    yield from _tiles(processed.size, rows, cols, tile, side)
    yield Part(side, side, whole, "thumbnail")


def _tiles(size: Size, rows: int, cols: int, tile: int, side: int) -> Iterator[Part]:
    """Tiles of an image that was resized to rows × cols of them."""
    for row in range(rows):
        for col in range(cols):
            place = Placement(size, (rows * tile, cols * tile), (row * tile, col * tile), (tile, tile))
            yield Part(side, side, place, "tile")


def _paligemma(processed: ProcessedImage) -> Iterator[Part]:
    """One raster, squashed."""
    side = math.isqrt(processed.processor.image_seq_length)
    yield Part(side, side, _prepared(processed))


def _gemma3(processed: ProcessedImage) -> Iterator[Part]:
    """The whole image, squashed and pooled; then crops along its longer side, if it was processed to pan and scan."""
    side = math.isqrt(processed.processor.image_seq_length)
    yield Part(side, side, _prepared(processed))
    crops = processed.tokens // (side * side) - processed.count
    if not crops or processed.count > 1:
        return
    axis = 1 if processed.size[1] >= processed.size[0] else 0
    length = math.ceil(processed.size[axis] / crops)
    for start in range(0, processed.size[axis], length):
        offset, part = [0, 0], list(processed.size)
        offset[axis], part[axis] = start, min(length, processed.size[axis] - start)
        yield Part(
            side, side, Placement(processed.size, processed.size, (offset[0], offset[1]), (part[0], part[1])), "tile"
        )


#: The reader of each family, by its `model_type`.
READERS: dict[str, Callable[[ProcessedImage], Iterator[Part]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_next,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl,
    "paligemma": _paligemma,
    "gemma3": _gemma3,
}
