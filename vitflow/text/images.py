"""Images or a video in a prompt: preparing the inputs of vision-language models, and the maps of generated words."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError, unknown_name
from vitflow.explaining.clips import FRAMES, ClipSource, frames_of, seconds_of
from vitflow.images.geometry import Placement
from vitflow.images.reading import image_name, read_image
from vitflow.images.upsampling import lay_together
from vitflow.methods.tokens import relative_to
from vitflow.models.anatomy import read_layout
from vitflow.models.libraries import library_id
from vitflow.text.image_tokens import ImageTokens, image_token, image_tokens, refuse_other, source_tokens
from vitflow.text.languages import load_processor
from vitflow.text.textpage import ShownImage

#: Default prompt for an image; for a video, with "video".
DEFAULT_PROMPT = "Describe the image."
#: Assumed frames per second of frames that were not read from a file, as Qwen-VL samples them.
FRAME_RATE = 2.0
Layout = ImageTokens | Sequence[ImageTokens] | None


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
    def read(cls, video: ClipSource, count: int | None = None) -> "Video":
        """Read a video file or frames.

        Args:
            video: a file or frames, as for `explain_clip`.
            count: the number of frames of a file; by default 8.

        Raises:
            OptionError: the frames are tensors.
            VitflowError: the file cannot be read, or the frames differ in size.
        """
        frames = frames_of(video, FRAMES if count is None else count)
        if isinstance(frames[0], Tensor):
            raise OptionError("Expected frames as images, got a tensor: pass uint8 frames or a video file.")
        if not isinstance(video, str | os.PathLike):
            return cls(np.stack(frames), "video", FRAME_RATE)
        seconds = seconds_of(video)
        return cls(np.stack(frames), image_name(video), FRAME_RATE if seconds is None else len(frames) / seconds)


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images or the video of one prompt, and the positions of their patch tokens.

    Attributes:
        images: images, uint8 RGB [height, width, 3]; for a video, the first frame of each position along time.
        sources: file name or description of each image.
        parts: patch tokens of each part, in the order of the prompt; an image may have several parts, such as tiles.
        neutral: for each part, the row at the end of the neutral prompt over its patches, float32 [patches, layers];
            None without a neutral prompt.
        tower: for each part, the rollout through the vision tower, float32 [patches, tower patches]; None if the tower
            was not recorded.
        video: file name or description of the video; None for images.
        span: the number of frames of each position along time.
    """

    images: tuple[NDArray[np.uint8], ...]
    sources: tuple[str, ...]
    parts: tuple[ImageTokens, ...]
    neutral: tuple[NDArray[np.float32], ...] | None = None
    tower: tuple[NDArray[np.float32], ...] | None = None
    video: str | None = None
    span: int = 1

    def to_list(self) -> list[dict[str, Any]]:
        """Return the parts as JSON-serializable dicts: image, role, grid, positions and covered box."""
        names = ("left", "top", "right", "bottom")
        return [
            {
                "image": part.image,
                "source": self.sources[part.image],
                "role": part.role,
                "rows": part.rows,
                "columns": part.cols,
                "positions": list(part.positions),
                "covers": dict(zip(names, self._placement(index).window, strict=True)),
            }
            for index, part in enumerate(self.parts)
        ]

    def chosen(self, image: int | None, role: str | None) -> list[int]:
        """Return the indices of the parts of an image, optionally of one role.

        Raises:
            OptionError: unknown image or role, or no image index for several images.
        """
        count = len(self.images)
        if image is None and self.video is not None:
            raise OptionError("The prompt has a video: use generation.clip(word), or pass image=0 for its first frame.")
        if image is None and count > 1:
            raise OptionError(f"The prompt has {count} images: pass image=0 for the first.")
        image = 0 if image is None else image
        if not 0 <= image < count:
            raise OptionError(f"Expected an image index from 0 to {count - 1}, got {image}.")
        indices = [index for index, part in enumerate(self.parts) if part.image == image]
        roles = {self.parts[index].role: None for index in indices}
        if role is not None and role not in roles:
            raise OptionError(unknown_name("role", role, roles))
        return [index for index in indices if role in (None, self.parts[index].role)]

    def map_of(
        self,
        row: NDArray[Any],
        total: float,
        indices: Sequence[int],
        *,
        layer: int,
        relative: bool,
        through_tower: bool,
    ) -> tuple[NDArray[np.float32], Placement, dict[str, Any]]:
        """Return the map of a row on parts of an image, combined by area, its placement, and facts about it.

        Args:
            row: weights of the tokens of the prompt, [tokens].
            total: sum of the row including earlier generated tokens.
            indices: indices of the parts.
            layer: layer index of the row.
            relative: divide by the row of the neutral prompt.
            through_tower: propagate to the patches of the vision tower.
        """
        grids, share = self._grids(row, total, indices, layer=layer, relative=relative)
        facts: dict[str, Any] = {"on_image": share}
        placements = [self._placement(index) for index in indices]
        first, (grid, placement) = float(grids[0].flat[0]), _combine(grids, placements)
        total = float(grid.sum())
        facts["on_first_patch"] = first / total if total else 0.0
        facts["on_edges"] = 1 - float(grid[1:-1, 1:-1].sum()) / total if total else 0.0
        if through_tower:
            grids = [self._through(grid, index) for grid, index in zip(grids, indices, strict=True)]
            grid, placement = _combine(grids, placements)
        return grid.astype(np.float32), placement, facts

    def frame_maps(
        self, row: NDArray[Any], total: float, *, layer: int, relative: bool
    ) -> tuple[list[NDArray[np.float32]], list[Placement], float]:
        """Return the map of each position along the time of a video, their placements, and the share on the video.

        Args:
            row, total, layer, relative: as for `map_of`.

        Raises:
            OptionError: the prompt has no video.
        """
        if self.video is None:
            raise OptionError("Expected a video in the prompt, got images: use generation.image(word, image=0).")
        indices = range(len(self.parts))
        grids, share = self._grids(row, total, indices, layer=layer, relative=relative)
        return [grid.astype(np.float32) for grid in grids], [self._placement(index) for index in indices], share

    def _grids(
        self, row: NDArray[Any], total: float, indices: Sequence[int], *, layer: int, relative: bool
    ) -> tuple[list[NDArray[np.float64]], float]:
        """Return the weights of parts as grids, and their share of the row."""
        weights = [np.asarray(row, np.float64)[list(self.parts[index].positions)] for index in indices]
        share = float(sum(part.sum() for part in weights)) / total if total else 0.0
        if relative:
            weights = self._relative(weights, indices, layer)
        shapes = [(self.parts[index].rows, self.parts[index].cols) for index in indices]
        return [part.reshape(shape) for part, shape in zip(weights, shapes, strict=True)], share

    def shown(
        self, rows: NDArray[Any], totals: NDArray[Any], *, relative: bool, through_tower: bool
    ) -> list[ShownImage]:
        """Return each image with the maps of all rows and layers; each map sums to the share of its row on the image.

        Args:
            rows: weights of the tokens of the prompt, [rows, tokens, layers].
            totals: sums of the rows including earlier generated tokens, [rows, layers].
            relative, through_tower: as for `map_of`.
        """
        shown = []
        for index, image in enumerate(self.images):
            indices, maps = self.chosen(index, None), []
            for row, sums in zip(rows, totals, strict=True):
                for layer in range(rows.shape[2]):
                    grid, placement, facts = self.map_of(
                        row[:, layer],
                        float(sums[layer]),
                        indices,
                        layer=layer,
                        relative=relative,
                        through_tower=through_tower,
                    )
                    total = float(grid.sum())
                    maps.append(grid * (facts["on_image"] / total if total else 0.0))
            shape = (len(rows), rows.shape[2], *maps[0].shape)
            shown.append(ShownImage(self.sources[index], image, placement.window, np.reshape(maps, shape)))
        return shown

    def _relative(self, weights: list[NDArray[Any]], indices: Sequence[int], layer: int) -> list[NDArray[Any]]:
        if self.neutral is None:
            raise OptionError(
                "relative=True requires a neutral prompt: pass neutral='Describe the image.' to explain_generation."
            )
        neutral = np.concatenate([self.neutral[index][:, layer] for index in indices])
        quotients = relative_to(torch.from_numpy(np.concatenate(weights)), torch.from_numpy(neutral)).numpy()
        return np.split(quotients, np.cumsum([len(part) for part in weights])[:-1])

    def _through(self, grid: NDArray[Any], index: int) -> NDArray[Any]:
        if self.tower is None:
            raise OptionError("The vision tower was not recorded: pass through_tower=True to explain_generation.")
        matrix = self.tower[index]
        scale = round((matrix.shape[1] / grid.size) ** 0.5)
        return (grid.reshape(-1) @ matrix).reshape(grid.shape[0] * scale, grid.shape[1] * scale)

    def _placement(self, index: int) -> Placement:
        part = self.parts[index]
        if part.placement is not None:
            return part.placement
        height, width = self.images[part.image].shape[:2]
        return Placement((height, width), (height, width), (0, 0), (height, width))


def _combine(grids: Sequence[NDArray[Any]], placements: Sequence[Placement]) -> tuple[NDArray[Any], Placement]:
    return (grids[0], placements[0]) if len(grids) == 1 else lay_together(grids, placements)


def subtract_earlier(row: NDArray[Any], earlier: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
    """Subtract the weighted sum of earlier rows times its least-squares factor; negative values become 0.

    >>> subtract_earlier(np.array([0.5, 0.5]), np.array([[0.0, 1.0]]), np.array([1.0]))
    array([0.5, 0. ])
    """
    common = np.asarray(weights, np.float64) @ earlier
    square = float(common @ common)
    rest: NDArray[np.float64] = np.clip(row - (float(row @ common) / square if square else 0.0) * common, 0.0, None)
    return rest


def with_images(
    model: nn.Module, prompt: Any, image: Any, processor: Any, layout: Layout
) -> tuple[Mapping[str, Any], Any, PromptImages]:
    """Prepare a prompt with images or a video: return the inputs, the processor, and the images with their tokens.

    Args:
        model: vision-language model.
        prompt: text, or the processor's output for text and images; None for `DEFAULT_PROMPT`.
        image: one or several images, as for `read_image`; or a video.
        processor: processor or its name; by default the one saved with the model.
        layout: patch tokens, for unknown model families; not for a video.

    Raises:
        OptionError: no image among the tokens, images and a video, several prompts, or a processor without a tokenizer.
        UnsupportedModelError: the model has no image or video tokens, or its family is unknown.
        ModelError: no processor.
    """
    video = image if isinstance(image, Video) else None
    images, names = _read(image) if video is None else ([*video.frames], ())
    kind: Literal["image", "video"] = "image" if video is None else "video"
    config = getattr(model, "config", None)
    if image_token(config, kind) is None and layout is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {kind} token in its vocabulary. "
            + (
                "Models that cross-attend to an image are not supported, except VisionEncoderDecoder."
                if video is None
                else "Pass some frames as images, image=[…]."
            )
        )
    processor = _processor_of(model, processor)
    if not hasattr(processor, "tokenizer"):
        raise OptionError(
            f"Expected a processor for images and text for {type(model).__name__}, got {type(processor).__name__}, "
            "which prepares images only: pass processor=."
        )
    prompt = DEFAULT_PROMPT.replace("image", kind) if prompt is None else prompt
    if isinstance(prompt, str):
        text = _with_token(prompt, processor, kind, 1 if video is not None else len(images))
        bos = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
        options = {"add_special_tokens": False} if bos and text.startswith(bos) else {}  # added by a chat template
        try:
            inputs = dict(processor(text=text, return_tensors="pt", **_media(images, video), **options))
        except (ValueError, IndexError, StopIteration) as error:  # wrong number of images in the text
            raise OptionError(
                f"{type(processor).__name__} cannot join the prompt {text!r:.80} with {len(images)} "
                f"{'image' if video is None else 'frame'}{'s'[: len(images) > 1]}: {type(error).__name__}: {error}"
            ) from error
    elif isinstance(prompt, Mapping) and isinstance(prompt.get("input_ids"), Tensor):
        inputs = dict(prompt)
    else:
        got = f"{len(prompt)} prompts" if isinstance(prompt, Sequence) else type(prompt).__name__
        raise OptionError(f"Expected one prompt with its images, as text or processor output, got {got}.")
    for name in ("labels", "video_metadata"):  # for training, for processors
        inputs.pop(name, None)
    check = not isinstance(prompt, str)  # inputs prepared here need no check
    if video is not None:
        return inputs, processor, _video_images(config, processor, inputs, video, check)
    if layout is None:
        sizes = [(pixels.shape[0], pixels.shape[1]) for pixels in images]
        parts = image_tokens(config, processor, inputs, sizes, images if check else None)
    else:
        refuse_other(config, inputs, "video")
        parts = (layout,) if isinstance(layout, ImageTokens) else tuple(layout)
        _check_parts(parts, len(images), inputs["input_ids"])
    return inputs, processor, PromptImages(tuple(images), names, parts)


def _media(images: Sequence[NDArray[np.uint8]], video: Video | None) -> dict[str, Any]:
    """Return the arguments of a processor for images or a video."""
    if video is None:
        return {"images": [Image.fromarray(pixels) for pixels in images]}
    count = len(video.frames)
    timing = {"fps": video.rate, "total_num_frames": count, "frames_indices": list(range(count))}
    return {"videos": [video.frames], "do_sample_frames": False, "video_metadata": [timing]}


def _video_images(config: Any, processor: Any, inputs: Mapping[str, Any], video: Video, check: bool) -> PromptImages:
    """Return the first frame of each position along time, with its patch tokens."""
    frames = video.frames
    size = frames.shape[1], frames.shape[2]
    parts = image_tokens(config, processor, inputs, [size], [frames] if check else None, video=True)
    span = getattr(config.vision_config, "temporal_patch_size", 1)
    if len(parts) != math.ceil(len(frames) / span):
        raise OptionError(
            f"Expected the {len(parts) * span} frames of the processor's output, got {len(frames)}: pass the sampled "
            "frames, or do_sample_frames=False to the processor."
        )
    names = tuple(f"{video.source}, frame {number}" for number in range(1, len(frames) + 1, span))
    return PromptImages(tuple(frames[::span]), names, parts, video=video.source, span=span)


def with_source(
    model: nn.Module, inputs: Any, image: Any, processor: Any, layout: Layout
) -> tuple[dict[str, Any], PromptImages]:
    """Prepare the image of an image encoder: return the inputs, and the image with its patch tokens.

    Args:
        model: model with an image encoder and a text decoder.
        inputs: the processor's output, or pixel_values; anything else is ignored.
        image: the image, as for `read_image`.
        processor: processor or its name; by default the one saved with the model.
        layout: patch tokens, for unknown encoders.

    Raises:
        OptionError: not exactly one image.
        UnsupportedModelError: the arrangement of the encoder's patches is unknown.
        ModelError: no processor.
    """
    images, names = _read(image)
    if len(images) != 1:
        raise OptionError(f"Expected one image for {type(model).__name__}, got {len(images)}: pass one at a time.")
    processor = _processor_of(model, processor)
    if isinstance(inputs, Tensor):
        inputs = {"pixel_values": inputs}
    prepared_here = not isinstance(inputs, Mapping)
    if prepared_here:
        image_processor = getattr(processor, "image_processor", processor)
        inputs = image_processor(images=[Image.fromarray(images[0])], return_tensors="pt")
    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or len(pixels) != 1:
        got = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise OptionError(f"Expected pixel_values [1, channels, height, width] of the image, got {got}.")
    if layout is None:
        untyped: Any = model
        encoder = untyped.get_encoder()
        grid = read_layout(encoder, (pixels.shape[2], pixels.shape[3]), None)
        size = images[0].shape[0], images[0].shape[1]
        layout = source_tokens(encoder.config, processor, inputs, size, grid, None if prepared_here else images[0])
    parts = (layout,) if isinstance(layout, ImageTokens) else tuple(layout)
    return {"pixel_values": pixels}, PromptImages(tuple(images), names, parts)


def _read(image: Any) -> tuple[list[NDArray[np.uint8]], tuple[str, ...]]:
    """Return the images of a prompt and their names."""
    images = list(image) if isinstance(image, list | tuple) else [image]
    if not images:
        raise OptionError("Expected one or several images, got an empty list: omit image.")
    return [read_image(image) for image in images], tuple(image_name(image) for image in images)


def with_neutral(images: PromptImages, neutral: PromptImages, rows: NDArray[np.float32]) -> PromptImages:
    """Return the images with the rows [tokens, layers] of a neutral prompt with the same images."""
    shapes = [[(part.rows, part.cols) for part in prompt.parts] for prompt in (images, neutral)]
    if shapes[0] != shapes[1]:
        raise OptionError("Expected a neutral prompt with the same images, got different patch grids.")
    return replace(images, neutral=tuple(rows[list(part.positions)] for part in neutral.parts))


def _processor_of(model: nn.Module, processor: Any) -> Any:
    if processor is None:
        processor = library_id(model)
        if processor is None:
            raise OptionError(
                f"Expected a processor for {type(model).__name__}, which was not loaded by name: pass processor=."
            )
    return processor if callable(processor) else load_processor(processor)


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


def _check_parts(parts: Sequence[ImageTokens], images: int, ids: Tensor) -> None:
    """Raise OptionError unless all parts given by `layout` are within the prompt and its images."""
    last = max((position for part in parts for position in part.positions), default=-1)
    if not parts or last >= ids.shape[1] or any(not 0 <= part.image < images for part in parts):
        raise OptionError(
            f"Expected ImageTokens of {images} image{'s'[: images > 1]} in a prompt of {ids.shape[1]} tokens, "
            f"got {len(parts)} with positions up to {last}."
        )
