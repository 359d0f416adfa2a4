"""Prompts of vision–language models: their images or video, the positions of the patch tokens, and maps over them."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitflow.analysis.clips import FRAMES, ClipSource, frames_of
from vitflow.errors import OptionError, UnsupportedModelError, printable
from vitflow.images.geometry import Placement
from vitflow.images.preprocessing import merge_maps
from vitflow.images.reading import image_name, read_image
from vitflow.images.videos import seconds_of
from vitflow.methods.rollout import attention_rollout
from vitflow.models.anatomy import read_layout
from vitflow.recording.recorder import record_attention
from vitflow.text.image_tokens import ImageTokens, Kind, image_token, image_tokens, source_tokens
from vitflow.text.languages import part_of
from vitflow.text.words import Words, words_of
from vitflow.viewer.pages import data_uri, pack_half, thumbnail

_PAGE_SIZE = 768  # longer side of an image on a page, in pixels
#: Default prompt for an image; for a video, with "video".
DEFAULT_PROMPT = "Describe the image."
#: Assumed frames per second of frames that were not read from a file, as Qwen-VL samples them.
FRAME_RATE = 2.0
Layout = Sequence[ImageTokens] | None


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images or the video of one prompt, and the positions of their patch tokens.

    Attributes:
        images: images, uint8 RGB [height, width, 3]; for a video, the first frame of each position along time.
        sources: file name or description of each image.
        parts: patch tokens of each part, in the order of the prompt; an image may have several parts, such as tiles.
        tower: for each part, the rollout through the vision tower, float32 [patches, tower patches]; None if the tower
            was not recorded.
        video: file name or description of the video; None for images.
        span: the number of frames of each position along time.
    """

    images: tuple[NDArray[np.uint8], ...]
    sources: tuple[str, ...]
    parts: tuple[ImageTokens, ...]
    tower: tuple[NDArray[np.float32], ...] | None = None
    video: str | None = None
    span: int = 1

    @property
    def placements(self) -> list[Placement]:
        """The rectangle of its image that each part covers."""
        sizes = [self.images[part.image].shape[:2] for part in self.parts]
        return [
            part.placement or Placement(size, size, (0, 0), size) for part, size in zip(self.parts, sizes, strict=True)
        ]

    def chosen(self, image: int | None) -> list[int]:
        """Return the indices of the parts of an image; OptionError if there is no such image."""
        count = len(self.images)
        if image is None and self.video is not None:
            raise OptionError("The prompt has a video: use generation.clip(word), or pass image=0 for its first frame.")
        if image is None and count > 1:
            raise OptionError(f"The prompt has {count} images: pass image=0 for the first.")
        image = 0 if image is None else image
        if not 0 <= image < count:
            raise OptionError(f"Expected an image index from 0 to {count - 1}, got {image}.")
        return [index for index, part in enumerate(self.parts) if part.image == image]

    def grids(self, row: NDArray[Any], indices: Sequence[int]) -> list[NDArray[np.float64]]:
        """Return the weights of parts as grids, from a row [tokens] over the prompt."""
        parts = [self.parts[index] for index in indices]
        return [np.asarray(row, np.float64)[list(part.positions)].reshape(part.rows, part.cols) for part in parts]

    def map_of(
        self, row: NDArray[Any], total: float, indices: Sequence[int]
    ) -> tuple[NDArray[np.float32], Placement, dict[str, Any]]:
        """Return the map of a row [tokens] on parts of an image, combined by area, its placement, and facts about it.

        If the vision tower was recorded, the map is propagated to its patches. `total` is the sum of the row including
        earlier generated tokens.
        """
        grids = self.grids(row, indices)
        share = sum(float(grid.sum()) for grid in grids)
        first, (grid, placement) = float(grids[0].flat[0]), self._combined(grids, indices)
        on_grid = float(grid.sum())
        facts = {
            "on_image": share / total if total else 0.0,
            "on_first_patch": first / on_grid if on_grid else 0.0,
            "on_edges": 1 - float(grid[1:-1, 1:-1].sum()) / on_grid if on_grid else 0.0,
        }
        if self.tower is not None:
            rows = [part.reshape(-1) @ self.tower[index] for part, index in zip(grids, indices, strict=True)]
            scales = [round((len(fine) / part.size) ** 0.5) for fine, part in zip(rows, grids, strict=True)]
            shapes = [(part.shape[0] * scale, part.shape[1] * scale) for part, scale in zip(grids, scales, strict=True)]
            finer = [fine.reshape(shape) for fine, shape in zip(rows, shapes, strict=True)]
            grid, placement = self._combined(finer, indices)
        return grid.astype(np.float32), placement, facts

    def _combined(self, grids: Sequence[NDArray[Any]], indices: Sequence[int]) -> tuple[NDArray[Any], Placement]:
        placements = [self.placements[index] for index in indices]
        return (grids[0], placements[0]) if len(grids) == 1 else merge_maps(grids, placements)

    def records(self, rows: NDArray[Any], totals: NDArray[Any]) -> list[dict[str, Any]]:
        """Return each image with the maps of all rows and layers, for a page.

        Each map sums to the share of its row [rows, tokens, layers] on the image; `totals` [rows, layers] are the sums
        of the rows including earlier generated tokens.
        """
        records = []
        for index, image in enumerate(self.images):
            indices, maps = self.chosen(index), []
            for row, layer in np.ndindex(totals.shape):
                total = float(totals[row, layer])
                grid, placement, facts = self.map_of(rows[row, :, layer], total, indices)
                on_grid = float(grid.sum())
                maps.append(grid * (facts["on_image"] / on_grid if on_grid else 0.0))
            records.append(
                {
                    "name": printable(PurePath(self.sources[index]).name, lines=True),
                    "image": data_uri(thumbnail(image, _PAGE_SIZE)),
                    "size": [image.shape[1], image.shape[0]],
                    "window": placement.window,
                    "grid": maps[0].shape,
                    "maps": pack_half(np.reshape(maps, (*totals.shape, *maps[0].shape))),
                }
            )
        return records


@dataclass(frozen=True, slots=True, eq=False)
class Video:
    """Frames of a video.

    Attributes:
        frames: uint8 RGB [frames, height, width, 3].
        source: file name or description.
        rate: frames per second.
    """

    frames: NDArray[np.uint8]
    source: str
    rate: float

    @classmethod
    def read(cls, video: "ClipSource | Video", count: int | None = None) -> "Video":
        """Read a video file or frames.

        Args:
            video: a file or frames, as for `explain_clip`; or a `Video`, which is returned as it is.
            count: the number of frames of a file; by default 8.

        Raises:
            OptionError: the frames are tensors.
            VitflowError: the file cannot be read, or the frames differ in size.
        """
        if isinstance(video, Video):
            return video
        frames = frames_of(video, FRAMES if count is None else count)
        if isinstance(frames[0], Tensor):
            raise OptionError("Expected frames as images, got a tensor: pass uint8 frames or a video file.")
        if not isinstance(video, str | os.PathLike):
            return cls(np.stack(frames), "video", FRAME_RATE)
        seconds = seconds_of(video)
        return cls(np.stack(frames), image_name(video), FRAME_RATE if seconds is None else len(frames) / seconds)


def with_images(
    model: nn.Module, prompt: str | None, image: Any, processor: Any, layout: Layout
) -> tuple[dict[str, Any], Any, PromptImages]:
    """Prepare a prompt with images or a video: return the inputs, the processor, and the images with their tokens."""
    kind: Kind = "video" if isinstance(image, Video) else "image"
    config: Any = getattr(model, "config", None)
    if image_token(config, kind) is None and layout is None:
        remedy = {
            "image": "Models that cross-attend to an image are not supported, except VisionEncoderDecoder.",
            "video": "Pass some frames as images, image=[…].",
        }
        raise UnsupportedModelError(f"{type(model).__name__} has no {kind} token in its vocabulary. {remedy[kind]}")
    processor = part_of("processor", model, processor)
    if not hasattr(processor, "tokenizer"):
        raise OptionError(
            f"Expected a processor for images and text for {type(model).__name__}, got {type(processor).__name__}, "
            "which prepares images only: pass processor=."
        )
    prompt = DEFAULT_PROMPT.replace("image", kind) if prompt is None else prompt
    if isinstance(image, Video):
        frames, span = image.frames, getattr(config.vision_config, "temporal_patch_size", 1)
        timing = {"fps": image.rate, "total_num_frames": len(frames), "frames_indices": list(range(len(frames)))}
        media = {"videos": [frames], "do_sample_frames": False, "video_metadata": [timing]}
        inputs = _processed(prompt, processor, kind, 1, media)
        parts = image_tokens(config, processor, inputs, [frames.shape[1:3]], kind)
        names = tuple(f"{image.source}, frame {number}" for number in range(1, len(frames) + 1, span))
        return inputs, processor, PromptImages(tuple(frames[::span]), names, parts, video=image.source, span=span)
    images, names = _read(image)
    media = {"images": [Image.fromarray(pixels) for pixels in images]}
    inputs = _processed(prompt, processor, kind, len(images), media)
    if layout is None:
        parts = image_tokens(config, processor, inputs, [pixels.shape[:2] for pixels in images])
    else:
        parts = tuple(layout)
        check_parts(parts, len(images), inputs["input_ids"].shape[1])
    return inputs, processor, PromptImages(tuple(images), names, parts)


def _processed(prompt: str, processor: Any, kind: Kind, count: int, media: dict[str, Any]) -> dict[str, Any]:
    """Return the output of a processor for a text with images or a video."""
    text = _with_token(prompt, processor, kind, count)
    bos = getattr(processor.tokenizer, "bos_token", None)
    if bos and text.startswith(bos):  # added by a chat template
        media = {**media, "add_special_tokens": False}
    try:
        inputs = dict(processor(text=text, return_tensors="pt", **media))
    except (ValueError, IndexError, StopIteration) as error:  # wrong number of images in the text
        raise OptionError(
            f"{type(processor).__name__} cannot join the prompt {text!r:.80} with {count} {kind}{'s'[: count > 1]}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return {name: value for name, value in inputs.items() if name not in ("labels", "video_metadata")}


def with_source(model: Any, image: Any, processor: Any, layout: Layout) -> tuple[dict[str, Any], PromptImages]:
    """Prepare the image of an image encoder: return the inputs, and the image with its patch tokens."""
    images, names = _read(image)
    if len(images) != 1:
        raise OptionError(f"Expected one image for {type(model).__name__}, got {len(images)}: pass one at a time.")
    processor = part_of("processor", model, processor)
    image_processor = getattr(processor, "image_processor", processor)
    inputs = {"pixel_values": image_processor(images=[Image.fromarray(images[0])], return_tensors="pt")["pixel_values"]}
    if layout is None:
        encoder = model.get_encoder()
        grid = read_layout(encoder, inputs["pixel_values"].shape[-2:], None)
        layout = [source_tokens(encoder.config, processor, inputs, images[0].shape[:2], grid)]
    return inputs, PromptImages(tuple(images), names, tuple(layout))


def source_words(arguments: Mapping[str, Any], tokenizer: Any, count: int) -> Words:
    """Return the `count` tokens of the source; those of an image have no text."""
    if "input_ids" in arguments:
        return words_of(tokenizer, arguments["input_ids"][0].tolist())
    return Words((" [image]",) * count, tuple(range(count)), (False,) * count)


def _read(image: Any) -> tuple[list[NDArray[np.uint8]], tuple[str, ...]]:
    """Return the images of a prompt and their names."""
    images = list(image) if isinstance(image, list | tuple) else [image]
    if not images:
        raise OptionError("Expected one or several images, got an empty list: omit image.")
    return [read_image(image) for image in images], tuple(image_name(image) for image in images)


def _with_token(prompt: str, processor: Any, kind: str, count: int) -> str:
    """Return the prompt with a token per image or video, inserted by the chat template or prepended if missing."""
    token = getattr(processor, f"{kind}_token", None)
    if not isinstance(token, str) or token in prompt:
        return prompt
    if getattr(processor, "chat_template", None):
        content = [*({"type": kind} for _ in range(count)), {"type": "text", "text": prompt}]
        text: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return text
    return " ".join([*[token] * count, prompt])


def check_parts(parts: Sequence[ImageTokens], images: int, tokens: int) -> None:
    """Raise OptionError unless all parts given by `layout` are within the prompt, or the source, and its images."""
    places = [position for part in parts for position in part.positions]
    if not places or min(places) < 0 or max(places) >= tokens or any(not 0 <= part.image < images for part in parts):
        raise OptionError(
            f"Expected ImageTokens of {images} image{'s'[: images > 1]} in a prompt of {tokens} tokens, "
            f"got {len(parts)} with positions up to {max(places, default=-1)}."
        )


_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder")


def tower_rows(
    model: nn.Module, inputs: Mapping[str, Any], parts: Sequence[ImageTokens], *, residual: float = 0.5
) -> tuple[NDArray[np.float32], ...]:
    """Compute attention rollout through the vision tower: for each part, rows [patches, tower patches].

    Both are row by row from the top left, without the tower's class token. For tokens merged from several patches, the
    rows of these patches are averaged.
    """
    path = next((path for path, _ in model.named_modules() if path.split(".")[-1] in _TOWERS), None)
    config: Any = getattr(getattr(model, "config", None), "vision_config", None)
    if path is None or getattr(config, "fullatt_block_indexes", None) is not None:
        raise _unsupported_tower(model, "uses window attention" if path else f"has none of the names {_TOWERS}")
    with record_attention(model, fusions=[("mean", False)], within=path) as trace, torch.no_grad():
        model(**inputs)
    matrices = trace.fused()[: _feature_layer(model, len(trace.layers))]
    packed = inputs["pixel_values"].ndim == 2
    sizes = {tuple(matrix.shape) for matrix in matrices}
    if len(sizes) != 1 or len(matrices[0]) != len(parts):
        raise _unsupported_tower(model, f"has {len(matrices[0])} inputs for {len(parts)} token grids")
    rollouts = attention_rollout([matrix.cpu().double() for matrix in matrices], residual=residual, num_prefix_tokens=0)
    return tuple(_rows(rollout, part, packed) for rollout, part in zip(rollouts, parts, strict=True))


def _unsupported_tower(model: nn.Module, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"The vision tower of {type(model).__name__} {reason}: omit through_tower.")


def _feature_layer(model: nn.Module, layers: int) -> int:
    """Return the number of tower layers before its features are taken."""
    feature_layer = getattr(getattr(model, "config", None), "vision_feature_layer", -1)
    indices = feature_layer if isinstance(feature_layer, list | tuple) else [feature_layer]
    return max(index if index >= 0 else layers + 1 + index for index in indices) or layers


def _rows(rollout: Tensor, part: ImageTokens, packed: bool) -> NDArray[np.float32]:
    """Return rows of image tokens over patches from a rollout [tower tokens, tower tokens]."""
    side = math.isqrt(len(rollout) // (part.rows * part.cols))
    count = side * side * part.rows * part.cols
    order = torch.arange(len(rollout) - count, len(rollout), device=rollout.device)  # after prefix tokens
    if packed:  # the patches of each token are consecutive
        blocks = order.view(part.rows, part.cols, side, side)
        raster = blocks.transpose(1, 2)
    else:
        raster = order.view(part.rows, side, part.cols, side)
        blocks = raster.transpose(1, 2)
    rows = rollout[blocks.flatten(2).flatten(0, 1)].mean(dim=1)
    array: NDArray[np.float32] = rows[:, raster.flatten()].float().cpu().numpy()
    return array
