"""Patch tokens of images and videos in prompts: positions, grid and covered region, by family of transformers 5.

A processor inserts one image or video token per patch, without their order.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from vitflow.errors import ShapeError, UnsupportedModelError
from vitflow.images.geometry import Placement, Size
from vitflow.methods.tokens import TokenLayout

Kind = Literal["image", "video"]


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The patch tokens of an image, of a part of it such as a tile, or of a position along the time of a video.

    Attributes:
        positions: positions in the sequence without padding, row by row from the top left.
        rows, cols: patch grid.
        placement: rectangle of the image covered by the grid; None for the whole image.
        image: index of the image in the prompt, or of the position along time.

    Raises:
        ShapeError: not rows × cols distinct positions.

    >>> ImageTokens(range(3, 9), rows=2, cols=3).positions
    (3, 4, 5, 6, 7, 8)
    """

    positions: Sequence[int]
    rows: int
    cols: int
    placement: Placement | None = None
    image: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(int(position) for position in self.positions))
        count = len(set(self.positions))
        if min(self.rows, self.cols) < 1 or not count == len(self.positions) == self.rows * self.cols:
            raise ShapeError(
                f"Expected {self.rows} × {self.cols} distinct patch positions, got {len(self.positions)}, {count} of "
                "them distinct."
            )


def image_token(config: Any, kind: Kind = "image") -> int | None:
    """Return the id of the image or video token; None if the model has none."""
    token: int | None = getattr(config, f"{kind}_token_id", None)
    return token


def image_tokens(
    config: Any, processor: Any, inputs: Mapping[str, Any], sizes: Sequence[Size], kind: Kind = "image"
) -> tuple[ImageTokens, ...]:
    """Locate the patch tokens of each image in a prompt, or of its video.

    Args:
        config, processor: the model's configuration, and the processor of the inputs.
        inputs: output of the processor: input_ids [1, tokens], pixel_values, and other arguments of the family.
        sizes: (height, width) of each image before processing, in the order of the prompt; or of the video.
        kind: locate the images, or the video.
    """
    family, token = str(getattr(config, "model_type", "")), image_token(config, kind)
    readers = READERS if kind == "image" else VIDEO_READERS
    if family not in readers or token is None:
        of_patches = "pass layout=ImageTokens(positions, rows, cols) with the positions of the patches, row by row."
        remedy = of_patches if kind == "image" else "pass some of its frames as images, image=[…]."
        raise UnsupportedModelError(
            f"Unknown layout of the {kind} tokens of {family or 'this model'} (known families: {', '.join(readers)}): "
            f"{remedy}"
        )
    positions = [position for position, id in enumerate(inputs["input_ids"][0].tolist()) if id == token]
    parts = [
        (part, index)
        for index, size in enumerate(sizes)
        for part in readers[family](Processed(config, processor, inputs, index, size, len(sizes), len(positions), kind))
    ]
    count = sum(part.length for part, _ in parts)
    if count != len(positions):
        pixels = ", ".join(f"{width} × {height}" for height, width in sizes)
        raise UnsupportedModelError(
            f"Expected {count} tokens of {len(sizes)} {kind}{'s'[: len(sizes) > 1]} of {pixels} pixels, got "
            f"{len(positions)} from {type(processor).__name__}: pass the processor of the model, or "
            "layout=ImageTokens(positions, rows, cols)."
        )
    layouts, start = [], 0
    for number, (part, index) in enumerate(parts):
        patches = [positions[start + place] for place in part.places]
        image = number if kind == "video" else index
        layouts.append(ImageTokens(patches, part.rows, part.cols, part.placement, image))
        start += part.length
    return tuple(layouts)


def source_tokens(
    config: Any, processor: Any, inputs: Mapping[str, Any], size: Size, layout: TokenLayout
) -> ImageTokens:
    """Locate the patch tokens of an image of `size` (height, width) in an image encoder with this token layout."""
    processed = Processed(config, processor, inputs, 0, size, 1, 0)
    patch = getattr(config, "patch_size", None)
    patch = patch if isinstance(patch, int) else processed.pixels[0] // layout.rows
    start = layout.num_prefix_tokens
    positions = range(start, start + layout.rows * layout.cols)
    return ImageTokens(positions, layout.rows, layout.cols, _raster(processed, layout.rows, layout.cols, patch))


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """A grid of patches in a token sequence, with this number of tokens before it, after each row, and after it."""

    rows: int
    cols: int
    placement: Placement
    before: int = 0
    newline: int = 0
    after: int = 0

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.before + self.rows * (self.cols + self.newline) + self.after

    @property
    def places(self) -> list[int]:
        """Token indices of its patches, row by row."""
        width = self.cols + self.newline
        return [self.before + row * width + col for row in range(self.rows) for col in range(self.cols)]


@dataclass(frozen=True, slots=True)
class Processed:
    """Image or video prepared by a processor: its index among `count`, its size, and the token count of all."""

    config: Any
    processor: Any
    inputs: Mapping[str, Any]
    index: int
    size: Size
    count: int
    tokens: int
    kind: Kind = "image"

    @property
    def image_processor(self) -> Any:
        """Image or video processor within the processor."""
        return getattr(self.processor, f"{self.kind}_processor", self.processor)

    @property
    def pixels(self) -> Size:
        """Height and width of a model input."""
        height, width = self.inputs["pixel_values_videos" if self.kind == "video" else "pixel_values"].shape[-2:]
        return int(height), int(width)

    @property
    def patch(self) -> int:
        """Size of a patch of the vision tower in pixels."""
        size: int = self.config.vision_config.patch_size
        return size


def _squashed(size: Size, into: Size) -> Placement:
    """Return the placement of the whole image resized to this size, ignoring its aspect ratio."""
    return Placement(size, into, (0, 0), into)


def _prepared(processed: Processed) -> Placement:
    """Return the placement of the model input, from the settings of an image processor that resizes and crops."""
    images, size = processed.image_processor, processed.size
    shortest, height, width = (_setting(images.size, name) for name in ("shortest_edge", "height", "width"))
    if getattr(images, "do_pad", False) and min(size) < max(size) and processed.pixels[0] == processed.pixels[1]:
        side = max(size)  # the image is centred in a square of its longer side
        return Placement(size, size, (-((side - size[0]) // 2), -((side - size[1]) // 2)), (side, side))
    resized = size
    if images.do_resize and height and width:
        resized = (height, width)
    elif images.do_resize and shortest:
        scaled = [int(shortest * side / min(size)) for side in size]
        resized = (shortest, scaled[1]) if size[0] <= size[1] else (scaled[0], shortest)
    if not getattr(images, "do_center_crop", False):
        return _squashed(size, resized)
    crop = [int(_setting(images.crop_size, name) or 0) for name in ("height", "width")]
    offset = [int((side - part) / 2) for side, part in zip(resized, crop, strict=True)]
    return Placement(size, resized, (offset[0], offset[1]), (crop[0], crop[1]))


def _setting(sizes: Any, name: str) -> int | None:
    """Return a side of a processor's size, which is a dictionary or has attributes."""
    side: int | None = sizes.get(name) if isinstance(sizes, Mapping) else getattr(sizes, name, None)
    return side


def _raster(processed: Processed, rows: int, cols: int, patch: int) -> Placement:
    """Return the placement of a grid of patches of `patch` pixels at the top left of the model input."""
    return _whole_patches(_prepared(processed), (rows * patch, cols * patch), processed.pixels)


def _whole_patches(placement: Placement, covered: Size, pixels: Size) -> Placement:
    """Return the placement of patches that do not cover the right and bottom edges of the model input."""
    sides = zip(placement.input_size, covered, pixels, strict=True)
    height, width = (round(side * part / whole) for side, part, whole in sides)
    return Placement(placement.image_size, placement.resized_size, placement.offset, (height, width))


def _squashed_tile(processed: Processed, tile: int) -> tuple[int, Placement]:
    """Return the number of patches of a side of a tile, and the placement of the whole image squashed into it."""
    side = tile // processed.patch
    covered = side * processed.patch
    return side, _whole_patches(_squashed(processed.size, (tile, tile)), (covered, covered), (tile, tile))


def _llava(processed: Processed) -> Iterator[TokenGrid]:
    """Yield one raster, after the class token if there is one; the image may be cropped."""
    rows, cols = (side // processed.patch for side in processed.pixels)
    class_token = int(processed.tokens == processed.count * (rows * cols + 1))
    yield TokenGrid(rows, cols, _raster(processed, rows, cols, processed.patch), before=class_token)


def _llava_next(processed: Processed) -> Iterator[TokenGrid]:
    """Yield the squashed image, then all tiles as one grid without padding, with a newline token after each row.

    Lengths of tiles are in patches, tile / side pixels each.
    """
    from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    tile = processed.config.vision_config.image_size
    side, whole = _squashed_tile(processed, tile)
    yield TokenGrid(side, side, whole)
    height, width = processed.size
    pinpoints = [list(pinpoint) for pinpoint in processed.config.image_grid_pinpoints]
    best = select_best_resolution((height, width), pinpoints)
    image = np.broadcast_to(np.uint8(0), (height, width, 1))  # only its size counts
    resized = get_patch_output_size(image, best, "channels_last")  # type: ignore[no-untyped-call]
    shape = best[0] // tile * side, best[1] // tile * side
    unpadded = unpad_image(torch.empty(1, *shape), (height, width))  # type: ignore[no-untyped-call]
    grid = list(unpadded.shape[1:])
    cut = [(padded - inside) // 2 for padded, inside in zip(shape, grid, strict=True)]  # rows and columns of padding
    y, x = (cut[i] * tile - (best[i] - resized[i]) // 2 * side for i in (0, 1))  # in pixels times `side`
    whole_size, covered = (resized[0] * side, resized[1] * side), (grid[0] * tile, grid[1] * tile)
    placement = Placement(processed.size, whole_size, (y, x), covered)
    aspect_ratio = getattr(processed.config, "vision_aspect_ratio", None)
    if aspect_ratio is not None:  # OneVision downsamples a grid of too many patches
        ratio = math.sqrt(grid[0] * grid[1] / (int(str(aspect_ratio).removeprefix("anyres_max_")) * side**2))
        grid = [int(length // ratio) for length in grid] if ratio > 1.1 else grid
    yield TokenGrid(grid[0], grid[1], placement, newline=1)


def _qwen(processed: Processed) -> Iterator[TokenGrid]:
    """Yield a raster of merged patches, for a video one for every two frames; it is resized to a multiple of them."""
    merged, patch = processed.config.vision_config.spatial_merge_size, processed.patch
    times, rows, cols = map(int, processed.inputs[f"{processed.kind}_grid_thw"][processed.index])
    placement = _squashed(processed.size, (rows * patch, cols * patch))
    for _ in range(times):
        yield TokenGrid(rows // merged, cols // merged, placement)


def _idefics3(processed: Processed) -> Iterator[TokenGrid]:
    """Yield tiles row by row, then the whole image."""
    _, rows, cols = processed.image_processor.get_number_of_image_patches(*processed.size, {})
    yield from _tiles(processed, rows, cols, processed.processor.image_seq_len)


def _internvl(processed: Processed) -> Iterator[TokenGrid]:
    """Yield tiles row by row, then a thumbnail; or the whole image as a single tile."""
    images = processed.image_processor
    canvas = sys.modules[type(images).__module__].get_optimal_tiled_canvas
    cols, rows = canvas(processed.size, processed.pixels, images.min_patches, images.max_patches)
    yield from _tiles(processed, rows, cols, processed.processor.image_seq_length)


def _tiles(processed: Processed, rows: int, cols: int, tokens: int) -> Iterator[TokenGrid]:
    """Yield the tiles of an image resized to rows × cols of them, if it was split, and the squashed image."""
    side, tile, size = math.isqrt(tokens), processed.pixels[0], processed.size
    split = rows * cols > 1 and processed.tokens != processed.count * tokens
    for row, col in np.ndindex(rows, cols) if split else ():
        placement = Placement(size, (rows * tile, cols * tile), (row * tile, col * tile), (tile, tile))
        yield TokenGrid(side, side, placement)
    yield TokenGrid(side, side, _squashed(size, (tile, tile)))


def _gemma(processed: Processed) -> Iterator[TokenGrid]:
    """Yield the squashed image, then crops along its longer side if processed with pan and scan, as in Gemma 3."""
    side = math.isqrt(processed.processor.image_seq_length)
    yield TokenGrid(side, side, _prepared(processed))
    crops = processed.tokens // (side * side) - processed.count
    if not crops or processed.count > 1:
        return
    axis = 1 if processed.size[1] >= processed.size[0] else 0
    length = math.ceil(processed.size[axis] / crops)
    for start in range(0, processed.size[axis], length):
        offset, part = [0, 0], list(processed.size)
        offset[axis], part[axis] = start, min(length, processed.size[axis] - start)
        placement = Placement(processed.size, processed.size, (offset[0], offset[1]), (part[0], part[1]))
        yield TokenGrid(side, side, placement)


def _llava_next_video(processed: Processed) -> Iterator[TokenGrid]:
    """Yield a raster of pooled patches for each frame; the frames may be cropped."""
    stride = processed.config.spatial_pool_stride
    patch = processed.patch * stride
    rows, cols = (side // patch for side in processed.pixels)
    placement = _raster(processed, rows, cols, patch)
    for _ in range(processed.inputs["pixel_values_videos"].shape[1]):
        yield TokenGrid(rows, cols, placement)


def _llava_onevision_video(processed: Processed) -> Iterator[TokenGrid]:
    """Yield a raster for each frame, squashed and downsampled to half its patches; a newline token ends the video."""
    side, placement = _squashed_tile(processed, processed.config.vision_config.image_size)
    frames = processed.inputs["pixel_values_videos"].shape[1]
    for number in range(1, frames + 1):
        yield TokenGrid(math.ceil(side / 2), math.ceil(side / 2), placement, after=int(number == frames))


#: Layout function of the images of each family, by `model_type`.
READERS: dict[str, Callable[[Processed], Iterator[TokenGrid]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": _llava_next,
    "llava_onevision": _llava_next,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "internvl": _internvl,
    "paligemma": _gemma,
    "gemma3": _gemma,
}

#: Layout function of the video of each family: a part for each position along time.
VIDEO_READERS: dict[str, Callable[[Processed], Iterator[TokenGrid]]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "llava_next_video": _llava_next_video,
    "llava_onevision": _llava_onevision_video,
}
