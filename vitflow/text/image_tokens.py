"""Images among the tokens of a vision–language model: which tokens are whose patches, and where these lie."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, check_known
from vitflow.images.geometry import Placement, Size
from vitflow.methods.rollout import attention_rollout
from vitflow.methods.tokens import TokenLayout
from vitflow.models.image_families import READERS, ProcessedImage, Role, raster
from vitflow.recording.recorder import record_attention


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of a sequence that are patches of an image, or of a part of one, and where that part lies.

    Attributes:
        positions: their places in the sequence without padding, row by row from the top left.
        rows, cols: the grid that they form.
        placement: which rectangle of the image this grid covers; None for all of it.
        role: "whole" for all of the image, "tile" for a part of it in more detail, "thumbnail" for all of it, small,
            beside its tiles.
        image: which of the prompt's images it is, counted from 0.

    Raises:
        ShapeError: there are not rows × cols positions, or one of them twice.
        OptionError: an unknown role.

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
        object.__setattr__(self, "positions", tuple(int(place) for place in self.positions))
        check_known("role", self.role, get_args(Role))
        count = len(set(self.positions))
        if min(self.rows, self.cols) < 1 or not count == len(self.positions) == self.rows * self.cols:
            raise ShapeError(
                f"Expected {self.rows} × {self.cols} different positions of patches, got {len(self.positions)}, "
                f"{count} of them different."
            )

    def box(self, row: int, col: int) -> tuple[float, float, float, float]:
        """Where a patch lies, (left, top, right, bottom) in pixels of the image; it may reach beyond it.

        Raises:
            OptionError: it is not known which part of the image the grid covers.
        """
        if self.placement is None:
            raise OptionError("Expected ImageTokens with a placement, got none: where its patches lie is not known.")
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
) -> tuple[ImageTokens, ...]:
    """Where the patches of each image stand among the tokens of one prompt.

    Args:
        config: the model's configuration.
        processor: what made the inputs.
        inputs: what it made: input_ids [1, tokens], pixel_values, and what else its family needs.
        sizes: (height, width) of each image, as it was given to the processor, in the order of the prompt.
        images: the images themselves, uint8 [height, width, 3], to check that the inputs were made by the
            processor's stored settings.

    Raises:
        UnsupportedModelError: the family is not known, or the tokens are not as many as it makes.
        OptionError: the prompt has a video, no image, or there are several prompts; or the inputs were made by other
            settings.
    """
    family = str(getattr(config, "model_type", ""))
    token = image_token(config)
    ids = inputs["input_ids"]
    if len(ids) != 1:
        raise OptionError(f"Expected one prompt with its images, got {len(ids)} prompts: give one after the other.")
    refuse_videos(config, inputs)
    if family not in READERS or token is None:
        raise UnsupportedModelError(
            f"It is not known how {family or 'this model'} arranges the patches of an image among its tokens "
            f"(known: {', '.join(READERS)}): pass layout=ImageTokens(positions, rows, cols), the places of the "
            "patches in the sequence, row by row, and the grid that they form."
        )
    places = _places(ids[0], inputs.get("attention_mask"), token)
    if not places:
        raise OptionError(
            "Expected an image among the tokens of the prompt, got none: write the processor's image token into the "
            f"prompt ({getattr(processor, 'image_token', '<image>')!r}), and give it the image."
        )
    drawn: Sequence[NDArray[np.uint8] | None] = [None] * len(sizes) if images is None else images
    parts = [
        (part, number)
        for number, size in enumerate(sizes)
        for part in READERS[family](
            ProcessedImage(config, processor, inputs, number, size, len(sizes), len(places), drawn[number])
        )
    ]
    count = sum(part.length for part, _ in parts)
    if count != len(places):
        raise UnsupportedModelError(
            f"Expected {count} tokens of {len(sizes)} image{'s'[: len(sizes) > 1]} of {_sizes(sizes)} pixels by the "
            f"settings of {type(processor).__name__}, got {len(places)}: give the images that the prompt was made "
            "of and the processor as it was called, or pass layout=ImageTokens(positions, rows, cols)."
        )
    found, start = [], 0
    for part, number in parts:
        patches = [places[start + place] for place in part.places]
        found.append(ImageTokens(patches, part.rows, part.cols, part.placement, part.role, number))
        start += part.length
    return tuple(found)


def source_tokens(
    config: Any,
    processor: Any,
    inputs: Mapping[str, Any],
    size: Size,
    layout: TokenLayout,
    image: NDArray[np.uint8] | None = None,
) -> ImageTokens:
    """Where the patches of an image stand among the tokens of an encoder that reads nothing else.

    Args:
        config: the encoder's configuration.
        processor: what made the inputs.
        inputs: what it made, pixel_values [1, channels, height, width].
        size: (height, width) of the image.
        layout: how the encoder's tokens are arranged.
        image: the image itself, as for `image_tokens`.

    Raises:
        OptionError: the inputs were made by other settings.
    """
    processed = ProcessedImage(config, processor, inputs, 0, size, 1, 0, image)
    patch = getattr(config, "patch_size", None)
    placement = raster(
        processed, layout.rows, layout.cols, patch if isinstance(patch, int) else processed.pixels[0] // layout.rows
    )
    start = layout.num_prefix_tokens
    return ImageTokens(range(start, start + layout.rows * layout.cols), layout.rows, layout.cols, placement)


def image_token(config: Any) -> int | None:
    """The number of the token that stands for each patch of an image; None where the model has none."""
    numbers = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((number for number in numbers if isinstance(number, int)), None)


def refuse_videos(config: Any, inputs: Mapping[str, Any]) -> None:
    """Raise OptionError where a prompt holds a video."""
    token = getattr(config, "video_token_id", None)
    named = any("video" in name for name, value in inputs.items() if value is not None)
    if named or (isinstance(token, int) and bool((inputs["input_ids"] == token).any())):
        raise OptionError("Expected images, got a video: give its frames as images of their own.")


def _places(ids: Tensor, mask: Tensor | None, token: int) -> list[int]:
    """Where the image's token stands in a sequence, counted without its padding."""
    seen = ids[mask[0].bool().to(ids.device)] if isinstance(mask, Tensor) else ids
    places: list[int] = (seen == token).nonzero().flatten().tolist()
    return places


def _sizes(sizes: Sequence[Size]) -> str:
    return ", ".join(f"{width} × {height}" for height, width in sizes)


_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder")


def tower_rows(
    model: nn.Module, inputs: Mapping[str, Any], parts: Sequence[ImageTokens], *, residual: float = 0.5
) -> tuple[NDArray[np.float32], ...]:
    """What the tokens of each part hold of the tower's own patches, by rollout through its layers.

    A token that was merged of several patches speaks with all of them alike.

    Args:
        model: sees and writes.
        inputs: a prompt with its images.
        parts: where their patches stand.
        residual: the share of the residual connection.

    Returns:
        For each part, rows of the rollout [patches, patches of the tower], both row by row from the top left; what lies
        on the tower's class token is missing in their sums.

    Raises:
        UnsupportedModelError: the tower attends within windows, or its inputs are no parts of their own.
    """
    path = next((path for path, _ in model.named_modules() if path.split(".")[-1] in _TOWERS), None)
    sees: Any = getattr(getattr(model, "config", None), "vision_config", None)
    if path is None or getattr(sees, "fullatt_block_indexes", None) is not None:
        raise _refusal(model, "attends within windows" if path else "is not where others have it")
    with record_attention(model, fusions=[("mean", False)], within=path) as trace, torch.no_grad():
        model(**inputs)
    matrices = trace.fused()[: _feature_layer(model, len(trace.layers))]
    packed = inputs["pixel_values"].ndim == 2
    sizes = {tuple(one.shape) for one in matrices}
    if len(sizes) != 1 or len(matrices[0]) != len(parts):
        raise _refusal(model, f"runs on {len(matrices[0])} inputs for {len(parts)} grids of tokens")
    rolled = attention_rollout([one.cpu().double() for one in matrices], residual=residual, num_prefix_tokens=0)
    return tuple(_rows(one, part, packed) for one, part in zip(rolled, parts, strict=True))


def _refusal(model: nn.Module, words: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"The vision tower of {type(model).__name__} {words}: what a word rests on is told on the image's tokens "
        "alone. Leave out through_tower."
    )


def _feature_layer(model: nn.Module, layers: int) -> int:
    """After how many layers the tower's patches are handed on."""
    named = getattr(getattr(model, "config", None), "vision_feature_layer", -1)
    chosen = max(
        one if one >= 0 else layers + 1 + one for one in (named if isinstance(named, list | tuple) else [named])
    )
    return chosen or layers


def _rows(rolled: Tensor, part: ImageTokens, packed: bool) -> NDArray[np.float32]:
    """Rows of tokens over patches, of a product [tokens of the tower, tokens of the tower]."""
    side = math.isqrt(len(rolled) // (part.rows * part.cols))
    count = side * side * part.rows * part.cols
    order = torch.arange(len(rolled) - count, len(rolled), device=rolled.device)  # behind class and register tokens
    if packed:  # the patches of each token one after the other
        blocks = order.view(part.rows, part.cols, side, side)
        raster = blocks.transpose(1, 2)
    else:
        raster = order.view(part.rows, side, part.cols, side)
        blocks = raster.transpose(1, 2)
    rows = rolled[blocks.flatten(2).flatten(0, 1)].mean(dim=1)
    found: NDArray[np.float32] = rows[:, raster.flatten()].float().cpu().numpy()
    return found
