"""Patch tokens of images and videos in the sequences of vision-language models: positions, grid and covered region."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, check_known
from vitflow.images.geometry import Placement, Size
from vitflow.methods.rollout import attention_rollout
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.recorder import record_attention
from vitflow.text.image_families import READERS, VIDEO_READERS, ProcessedImage, Role, raster


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The patch tokens of an image, of a part of it such as a tile, or of a position along the time of a video.

    Attributes:
        positions: positions in the sequence without padding, row by row from the top left.
        rows, cols: patch grid.
        placement: rectangle of the image covered by the grid; None for the whole image.
        role: "whole" for the whole image, "tile" for a part at higher resolution, "thumbnail" for the downscaled whole
            image alongside its tiles, "frame" for the frames of a video.
        image: index of the image in the prompt, or of the position along time.

    Raises:
        ShapeError: not rows × cols distinct positions.
        OptionError: unknown role.

    >>> part = ImageTokens(range(3, 9), rows=2, cols=3, placement=Placement((20, 30), (20, 30), (0, 0), (20, 30)))
    >>> part.box(1, 2)
    (20.0, 10.0, 30.0, 20.0)
    """

    positions: Sequence[int]
    rows: int
    cols: int
    placement: Placement | None = None
    role: Role = "whole"
    image: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(int(position) for position in self.positions))
        check_known("role", self.role, get_args(Role))
        count = len(set(self.positions))
        if min(self.rows, self.cols) < 1 or not count == len(self.positions) == self.rows * self.cols:
            raise ShapeError(
                f"Expected {self.rows} × {self.cols} distinct patch positions, got {len(self.positions)}, {count} of "
                "them distinct."
            )

    def box(self, row: int, col: int) -> tuple[float, float, float, float]:
        """Return the box of a patch, (left, top, right, bottom) in pixels of the image; it may exceed the image.

        Raises:
            OptionError: the placement is None.
        """
        if self.placement is None:
            raise OptionError("box() requires ImageTokens with a placement.")
        height, width = self.placement.input_size[0] / self.rows, self.placement.input_size[1] / self.cols
        top, left = self.placement.to_image(row * height, col * width)
        bottom, right = self.placement.to_image((row + 1) * height, (col + 1) * width)
        return left, top, right, bottom


def image_tokens(
    config: Any,
    processor: Any,
    inputs: Mapping[str, Any],
    sizes: Sequence[Size],
    images: Sequence[NDArray[np.uint8]] | None = None,
    *,
    video: bool = False,
) -> tuple[ImageTokens, ...]:
    """Locate the patch tokens of each image in a prompt, or of its video.

    Args:
        config: model configuration.
        processor: processor of the inputs.
        inputs: output of the processor: input_ids [1, tokens], pixel_values, and other arguments of the family.
        sizes: (height, width) of each image before processing, in the order of the prompt.
        images: the images, uint8 [height, width, 3], to check that the processor's stored settings produced the
            inputs.
        video: locate the tokens of a video instead; `sizes` and `images` then have one entry, the video
            [frames, height, width, 3].

    Raises:
        UnsupportedModelError: unknown family, or unexpected number of image tokens.
        OptionError: several prompts, no image, images and a video, or inputs produced with other settings.
    """
    family = str(getattr(config, "model_type", ""))
    kind: Literal["image", "video"] = "video" if video else "image"
    readers = VIDEO_READERS if video else READERS
    token = image_token(config, kind)
    ids = inputs["input_ids"]
    if len(ids) != 1:
        raise OptionError(f"Expected one prompt with its images, got {len(ids)} prompts: pass one at a time.")
    refuse_other(config, inputs, "image" if video else "video")
    if family not in readers or token is None:
        remedy = (
            "pass some of its frames as images, image=[…]."
            if video
            else "pass layout=ImageTokens(positions, rows, cols) with the positions of the patches, row by row, and "
            "their grid."
        )
        raise UnsupportedModelError(
            f"Unknown layout of the {kind} tokens of {family or 'this model'} (known families: {', '.join(readers)}): "
            f"{remedy}"
        )
    positions = _positions(ids[0], inputs.get("attention_mask"), token)
    if not positions:
        raise OptionError(
            f"The prompt has no {kind} tokens: insert the processor's {kind} token "
            f"({getattr(processor, f'{kind}_token', f'<{kind}>')!r}) into the prompt and pass the {kind} to the "
            "processor."
        )
    originals: Sequence[NDArray[np.uint8] | None] = [None] * len(sizes) if images is None else images
    parts = [
        (part, index)
        for index, size in enumerate(sizes)
        for part in readers[family](
            ProcessedImage(config, processor, inputs, index, size, len(sizes), len(positions), originals[index], video)
        )
    ]
    count = sum(part.length for part, _ in parts)
    if count != len(positions):
        raise UnsupportedModelError(
            f"Expected {count} tokens of {len(sizes)} {kind}{'s'[: len(sizes) > 1]} of {_sizes(sizes)} pixels for the "
            f"settings of {type(processor).__name__}, got {len(positions)}: pass the {kind}s and processor that "
            "produced the prompt, or layout=ImageTokens(positions, rows, cols)."
        )
    layouts, start = [], 0
    for number, (part, index) in enumerate(parts):
        patches = [positions[start + place] for place in part.places]
        image = number if video else index
        layouts.append(ImageTokens(patches, part.rows, part.cols, part.placement, part.role, image))
        start += part.length
    return tuple(layouts)


def source_tokens(
    config: Any,
    processor: Any,
    inputs: Mapping[str, Any],
    size: Size,
    layout: TokenLayout,
    image: NDArray[np.uint8] | None = None,
) -> ImageTokens:
    """Locate the patch tokens of an image in an image encoder.

    Args:
        config: configuration of the encoder.
        processor: processor of the inputs.
        inputs: output of the processor, pixel_values [1, channels, height, width].
        size: (height, width) of the image before processing.
        layout: token layout of the encoder.
        image: the image, as for `image_tokens`.

    Raises:
        OptionError: inputs produced with other settings.
    """
    processed = ProcessedImage(config, processor, inputs, 0, size, 1, 0, image)
    patch = getattr(config, "patch_size", None)
    placement = raster(
        processed, layout.rows, layout.cols, patch if isinstance(patch, int) else processed.pixels[0] // layout.rows
    )
    start = layout.num_prefix_tokens
    return ImageTokens(range(start, start + layout.rows * layout.cols), layout.rows, layout.cols, placement)


def image_token(config: Any, kind: Literal["image", "video"] = "image") -> int | None:
    """Return the id of the image or video token; None if the model has none."""
    ids = (getattr(config, f"{kind}_token_{name}", None) for name in ("id", "index"))
    return next((token_id for token_id in ids if isinstance(token_id, int)), None)


def refuse_other(config: Any, inputs: Mapping[str, Any], kind: Literal["image", "video"]) -> None:
    """Raise OptionError if a prompt of images contains a video, or the other way round."""
    token, argument = image_token(config, kind), "pixel_values" if kind == "image" else "pixel_values_videos"
    if inputs.get(argument) is not None or (token is not None and bool((inputs["input_ids"] == token).any())):
        expected, got = ("images", "a video") if kind == "video" else ("a video", "images")
        raise OptionError(f"Expected {expected}, got {got}: pass {kind}=, and omit the tokens of {expected}.")


def _positions(ids: Tensor, mask: Tensor | None, token: int) -> list[int]:
    """Return the positions of a token in a sequence without its padding."""
    unpadded = ids[mask[0].bool().to(ids.device)] if isinstance(mask, Tensor) else ids
    positions: list[int] = (unpadded == token).nonzero().flatten().tolist()
    return positions


def _sizes(sizes: Sequence[Size]) -> str:
    return ", ".join(f"{width} × {height}" for height, width in sizes)


_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder")


def tower_rows(
    model: nn.Module, inputs: Mapping[str, Any], parts: Sequence[ImageTokens], *, residual: float = 0.5
) -> tuple[NDArray[np.float32], ...]:
    """Compute attention rollout through the vision tower, from the image tokens to the tower's patches.

    For tokens merged from several patches, the rows of these patches are averaged.

    Args:
        model: vision-language model.
        inputs: a prompt with images.
        parts: patch tokens of the images.
        residual: share of the residual connection.

    Returns:
        For each part, rollout rows [patches, tower patches], both row by row from the top left, without the weight of
        the tower's class token.

    Raises:
        UnsupportedModelError: the tower uses window attention, or its inputs do not correspond to the parts.
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
