"""Inputs of vision-language models: prompts with images or a video, and the positions of their patch tokens."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.explaining.clips import FRAMES, ClipSource, frames_of
from vitflow.images.reading import image_name, read_image
from vitflow.images.videos import seconds_of
from vitflow.models.anatomy import read_layout
from vitflow.models.parts import library_id
from vitflow.text.image_tokens import ImageTokens, image_token, image_tokens, refuse_other, source_tokens
from vitflow.text.languages import load_processor
from vitflow.text.prompt_images import PromptImages

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
    check = not isinstance(prompt, str)  # inputs prepared here need no check
    if isinstance(prompt, str):
        inputs = _processed(prompt, processor, images, video)
    elif isinstance(prompt, Mapping) and isinstance(prompt.get("input_ids"), Tensor):
        inputs = dict(prompt)
    else:
        got = f"{len(prompt)} prompts" if isinstance(prompt, Sequence) else type(prompt).__name__
        raise OptionError(f"Expected one prompt with its images, as text or processor output, got {got}.")
    for name in ("labels", "video_metadata"):  # for training, for processors
        inputs.pop(name, None)
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


def _processed(prompt: str, processor: Any, images: Sequence[NDArray[np.uint8]], video: Video | None) -> dict[str, Any]:
    """Return the output of a processor for a text with images or a video."""
    count = len(images)
    if video is None:
        text = _with_token(prompt, processor, "image", count)
        media: dict[str, Any] = {"images": [Image.fromarray(pixels) for pixels in images]}
    else:
        text = _with_token(prompt, processor, "video", 1)
        timing = {"fps": video.rate, "total_num_frames": count, "frames_indices": list(range(count))}
        media = {"videos": [video.frames], "do_sample_frames": False, "video_metadata": [timing]}
    bos = getattr(processor.tokenizer, "bos_token", None)
    if bos and text.startswith(bos):  # added by a chat template
        media["add_special_tokens"] = False
    try:
        return dict(processor(text=text, return_tensors="pt", **media))
    except (ValueError, IndexError, StopIteration) as error:  # wrong number of images in the text
        raise OptionError(
            f"{type(processor).__name__} cannot join the prompt {text!r:.80} with {count} "
            f"{'image' if video is None else 'frame'}{'s'[: count > 1]}: {type(error).__name__}: {error}"
        ) from error


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
