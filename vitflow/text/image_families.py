"""Order of image and video patches among the tokens of each family of vision–language models, as in transformers 5.

A processor inserts one image or video token per patch, without their order.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import OptionError
from vitflow.images.geometry import Placement, Size

Role = Literal["whole", "tile", "thumbnail", "frame"]


@dataclass(frozen=True, slots=True)
class Part:
    """A grid of patches in a token sequence, with extra tokens.

    Attributes:
        rows, cols, placement, role: as in `ImageTokens`.
        before: number of tokens before the grid, such as a class token.
        newline: number of tokens after each row.
        after: number of tokens after the grid.
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
        """Number of tokens."""
        return self.before + self.rows * (self.cols + self.newline) + self.after

    @property
    def places(self) -> list[int]:
        """Token indices of its patches, row by row."""
        width = self.cols + self.newline
        return [self.before + row * width + col for row in range(self.rows) for col in range(self.cols)]


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """Image prepared by a processor: its index among `count` images, its size, and the token count of all images.

    `image` is uint8 [height, width, 3], given if the caller ran the processor: its settings may then differ from the
    stored ones, which would move the patches. With `video`, it is a video, [frames, height, width, 3].
    """

    config: Any
    processor: Any
    inputs: Mapping[str, Any]
    index: int
    size: Size
    count: int
    tokens: int
    image: NDArray[np.uint8] | None = None
    video: bool = False

    @property
    def image_processor(self) -> Any:
        """Image processor within the processor; for a video, its video processor."""
        return getattr(self.processor, "video_processor" if self.video else "image_processor", self.processor)

    @property
    def vision_config(self) -> Any:
        """Configuration of the vision tower."""
        return self.config.vision_config

    @property
    def pixel_values(self) -> Any:
        """Model inputs of all images, or of the video."""
        return self.inputs["pixel_values_videos" if self.video else "pixel_values"]

    @property
    def pixels(self) -> Size:
        """Height and width of a model input."""
        return int(self.pixel_values.shape[-2]), int(self.pixel_values.shape[-1])


def _squashed(size: Size, into: Size) -> Placement:
    """Return the placement of the whole image resized to this size, ignoring its aspect ratio."""
    return Placement(size, into, (0, 0), into)


def _padded_square(size: Size) -> Placement:
    """Return the placement of the image centred in a square of its longer side."""
    side = max(size)
    offset = tuple(-((side - length) // 2) for length in size)
    return Placement(size, size, offset, (side, side))  # type: ignore[arg-type]


def _prepared(processed: ProcessedImage) -> Placement:
    """Return the placement of the model input, from the settings of an image processor that resizes and crops."""
    images, size = processed.image_processor, processed.size
    shortest, height, width = (_setting(images.size, name) for name in ("shortest_edge", "height", "width"))
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
    offset = [int((side - part) / 2) for side, part in zip(resized, crop, strict=True)]
    return Placement(size, resized, (offset[0], offset[1]), (crop[0], crop[1]))


def _setting(sizes: Any, name: str) -> int | None:
    """Return a side of a processor's size, which is a dictionary or has attributes."""
    side: int | None = sizes.get(name) if isinstance(sizes, Mapping) else getattr(sizes, name, None)
    return side


def _llava(processed: ProcessedImage) -> Iterator[Part]:
    """Yield one raster, after the class token if there is one; the image may be cropped."""
    patch = processed.vision_config.patch_size
    rows, cols = (side // patch for side in processed.pixels)
    class_token = int(processed.tokens == processed.count * (rows * cols + 1))
    yield Part(rows, cols, raster(processed, rows, cols, patch), before=class_token)


def raster(processed: ProcessedImage, rows: int, cols: int, patch: int) -> Placement:
    """Return the placement of a grid of patches of `patch` pixels at the top left of the model input."""
    if processed.image is not None:
        _check_prepared(processed, processed.image)
    return _whole_patches(_prepared(processed), (rows * patch, cols * patch), processed.pixels)


def _check_prepared(processed: ProcessedImage, image: NDArray[np.uint8]) -> None:
    """Raise OptionError unless the processor's stored settings reproduce the model input from this image.

    The tolerance is far above the rounding of half precision or another backend of the processor.
    """
    images, given = processed.image_processor, processed.pixel_values[processed.index].detach().cpu().float()
    if processed.video:
        output = images(videos=[image], do_sample_frames=False, return_tensors="pt")
    else:
        output = images(images=[Image.fromarray(image)], return_tensors="pt")
    expected = next(output[name] for name in ("pixel_values", "pixel_values_videos") if name in output)[0].float()
    if given.shape == expected.shape:
        distance = float((given - expected).square().mean().sqrt())
        if distance <= 0.02 + 0.1 * float(expected.std()):
            return
        got = f"pixel_values that differ from those by {distance:.2f} (root mean square)"
    else:
        got = f"pixel_values {tuple(given.shape)} instead of {tuple(expected.shape)}"
    raise OptionError(
        f"Expected pixel_values as {type(images).__name__} computes them from this image with its stored settings, got "
        f"{got}: the placement of the patches is unknown. Call the processor without do_pad, size, do_center_crop and "
        "similar options, or store them first (processor.image_processor.do_pad = True), pass the same image, or pass "
        "layout=ImageTokens(positions, rows, cols, placement)."
    )


def _whole_patches(placement: Placement, covered: Size, pixels: Size) -> Placement:
    """Return the placement of patches that do not cover the right and bottom edges of the model input."""
    sides = zip(placement.input_size, covered, pixels, strict=True)
    height, width = (round(side * part / whole) for side, part, whole in sides)
    return Placement(placement.image_size, placement.resized_size, placement.offset, (height, width))


def _llava_next(processed: ProcessedImage) -> Iterator[Part]:
    """Yield the squashed image, then all tiles as one grid without padding, with a newline token after each row.

    Lengths of tiles are in patches, tile / side pixels each.
    """
    from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
    from transformers.models.llava_next.modeling_llava_next import unpad_image

    patch, tile = processed.vision_config.patch_size, processed.vision_config.image_size
    side = tile // patch
    whole = _whole_patches(_squashed(processed.size, (tile, tile)), (side * patch, side * patch), (tile, tile))
    counts = processed.inputs.get("batch_num_images")
    if counts is not None and _images_in_prompt(counts, processed.index) > 1:
        whole = _whole_patches(_padded_square(processed.size), (side * patch, side * patch), (tile, tile))
        yield Part(side, side, whole, after=1)
        return
    yield Part(side, side, whole)
    height, width = processed.size
    pinpoints = [list(pinpoint) for pinpoint in processed.config.image_grid_pinpoints]
    best = select_best_resolution((height, width), pinpoints)
    image = np.broadcast_to(np.uint8(0), (height, width, 1))  # only its size counts
    resized = get_patch_output_size(image, best, "channels_last")  # type: ignore[no-untyped-call]
    shape = best[0] // tile * side, best[1] // tile * side
    unpadded = unpad_image(torch.empty(1, *shape), (height, width))  # type: ignore[no-untyped-call]
    grid = list(unpadded.shape[1:])
    cut = [(padded - inside) // 2 for padded, inside in zip(shape, grid, strict=True)]  # rows and columns of padding
    offset = [cut[i] * tile - (best[i] - resized[i]) // 2 * side for i in (0, 1)]  # in pixels times `side`
    placement = Placement(
        processed.size,
        (resized[0] * side, resized[1] * side),
        (offset[0], offset[1]),
        (grid[0] * tile, grid[1] * tile),
    )
    aspect_ratio = getattr(processed.config, "vision_aspect_ratio", None)
    if aspect_ratio is not None:  # OneVision downsamples a grid of too many patches
        ratio = math.sqrt(grid[0] * grid[1] / (int(str(aspect_ratio).removeprefix("anyres_max_")) * side**2))
        grid = [int(length // ratio) for length in grid] if ratio > 1.1 else grid
    yield Part(grid[0], grid[1], placement, "tile", newline=1)


def _images_in_prompt(counts: Any, index: int) -> int:
    """Return the number of images in the prompt that contains the image of this index."""
    end = 0
    for count in map(int, counts):
        end += count
        if index < end:
            return count
    return 1


def _qwen(processed: ProcessedImage) -> Iterator[Part]:
    """Yield one raster of merged patches; the image is resized to a multiple of them."""
    merged = processed.vision_config.spatial_merge_size
    _, rows, cols = map(int, processed.inputs["image_grid_thw"][processed.index])
    patch = processed.vision_config.patch_size
    yield Part(rows // merged, cols // merged, _squashed(processed.size, (rows * patch, cols * patch)))


def _idefics3(processed: ProcessedImage) -> Iterator[Part]:
    """Yield tiles row by row, then the squashed image."""
    side = math.isqrt(processed.processor.image_seq_len)
    tile = int(_setting(processed.image_processor.max_image_size, "longest_edge") or processed.pixels[0])
    _, rows, cols = processed.image_processor.get_number_of_image_patches(*processed.size, {})
    if processed.tokens == processed.count * side * side:
        rows = cols = 0  # processed without splitting
    yield from _tiles(processed.size, rows, cols, tile, side)
    yield Part(side, side, _squashed(processed.size, (tile, tile)))


def _internvl(processed: ProcessedImage) -> Iterator[Part]:
    """Yield tiles row by row, then a thumbnail; or the whole image as a single tile."""
    side, images, tile = (
        math.isqrt(processed.processor.image_seq_length),
        processed.image_processor,
        processed.pixels[0],
    )
    canvas = sys.modules[type(images).__module__].get_optimal_tiled_canvas
    cols, rows = canvas(processed.size, processed.pixels, images.min_patches, images.max_patches)
    whole = _squashed(processed.size, (tile, tile))
    if rows * cols == 1 or processed.tokens == processed.count * side * side:
        yield Part(side, side, whole)
        return
    yield from _tiles(processed.size, rows, cols, tile, side)
    yield Part(side, side, whole, "thumbnail")


def _tiles(size: Size, rows: int, cols: int, tile: int, side: int) -> Iterator[Part]:
    """Yield the tiles of an image resized to rows × cols tiles."""
    for row in range(rows):
        for col in range(cols):
            placement = Placement(size, (rows * tile, cols * tile), (row * tile, col * tile), (tile, tile))
            yield Part(side, side, placement, "tile")


def _paligemma(processed: ProcessedImage) -> Iterator[Part]:
    """Yield one raster of the squashed image."""
    side = math.isqrt(processed.processor.image_seq_length)
    yield Part(side, side, _prepared(processed))


def _gemma3(processed: ProcessedImage) -> Iterator[Part]:
    """Yield the squashed image, then crops along its longer side if processed with pan and scan."""
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
        placement = Placement(processed.size, processed.size, (offset[0], offset[1]), (part[0], part[1]))
        yield Part(side, side, placement, "tile")


def _qwen_video(processed: ProcessedImage) -> Iterator[Part]:
    """Yield a raster of merged patches for each temporal patch, of two frames."""
    merged, patch = processed.vision_config.spatial_merge_size, processed.vision_config.patch_size
    times, rows, cols = map(int, processed.inputs["video_grid_thw"][0])
    for _ in range(times):
        yield Part(rows // merged, cols // merged, _squashed(processed.size, (rows * patch, cols * patch)), "frame")


def _llava_next_video(processed: ProcessedImage) -> Iterator[Part]:
    """Yield a raster of pooled patches for each frame; the frames may be cropped."""
    stride = processed.config.spatial_pool_stride
    patch = processed.vision_config.patch_size * stride
    rows, cols = (side // patch for side in processed.pixels)
    placement = raster(processed, rows, cols, patch)
    for _ in range(processed.pixel_values.shape[1]):
        yield Part(rows, cols, placement, "frame")


def _llava_onevision_video(processed: ProcessedImage) -> Iterator[Part]:
    """Yield a raster for each frame, squashed and downsampled to half its patches; a newline token ends the video."""
    patch, tile = processed.vision_config.patch_size, processed.vision_config.image_size
    side = tile // patch
    placement = _whole_patches(_squashed(processed.size, (tile, tile)), (side * patch, side * patch), (tile, tile))
    frames = processed.pixel_values.shape[1]
    for number in range(1, frames + 1):
        yield Part(math.ceil(side / 2), math.ceil(side / 2), placement, "frame", after=int(number == frames))


#: Layout function of the images of each family, by `model_type`.
READERS: dict[str, Callable[[ProcessedImage], Iterator[Part]]] = {
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
    "paligemma": _paligemma,
    "gemma3": _gemma3,
}

#: Layout function of the video of each family: a part for each position along time.
VIDEO_READERS: dict[str, Callable[[ProcessedImage], Iterator[Part]]] = {
    "qwen2_vl": _qwen_video,
    "qwen2_5_vl": _qwen_video,
    "qwen3_vl": _qwen_video,
    "qwen3_vl_moe": _qwen_video,
    "llava_next_video": _llava_next_video,
    "llava_onevision": _llava_onevision_video,
}
