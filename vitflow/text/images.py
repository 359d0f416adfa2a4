"""Images in a prompt: how they are given to a model that writes, and the map of a written word on each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from vitflow.errors import OptionError, UnsupportedModelError, unknown_name
from vitflow.images.geometry import Placement
from vitflow.images.reading import image_name, read_image
from vitflow.images.upsampling import lay_together
from vitflow.methods.tokens import relative_to
from vitflow.models.anatomy import read_layout
from vitflow.models.languages import load_processor
from vitflow.models.libraries import library_id
from vitflow.text.image_tokens import ImageTokens, image_token, image_tokens, refuse_videos, source_tokens
from vitflow.text.textpage import ShownImage

#: What is asked about an image where nobody asks anything else.
ASKING = "Describe the image."
Layout = ImageTokens | Sequence[ImageTokens] | None


@dataclass(frozen=True, slots=True, eq=False)
class PromptImages:
    """The images of one prompt, and where their patches stand among its tokens.

    Attributes:
        images: the images, uint8 RGB [height, width, 3] each.
        sources: what they are called.
        parts: their patches, in the order of the prompt; an image may have several parts, such as tiles.
        neutral: for each part the row at the end of a neutral prompt over its patches, float32 [patches, layers]; None
            where no such prompt was given.
        tower: for each part what its tokens hold of the vision tower's own patches, float32 [patches, patches of the
            tower]; None where that was not asked for.
    """

    images: tuple[NDArray[np.uint8], ...]
    sources: tuple[str, ...]
    parts: tuple[ImageTokens, ...]
    neutral: tuple[NDArray[np.float32], ...] | None = None
    tower: tuple[NDArray[np.float32], ...] | None = None

    def to_list(self) -> list[dict[str, Any]]:
        """Its parts, ready for JSON: whose they are, their positions, their grid, and the box that this covers."""
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
        """The numbers of an image's parts of a role, or of all; OptionError where it is not told which image."""
        count = len(self.images)
        if image is None and count > 1:
            raise OptionError(f"Expected one of the prompt's {count} images, got none: pass image=0 for the first.")
        number = 0 if image is None else image
        if not 0 <= number < count:
            raise OptionError(f"Expected an image from 0 to {count - 1}, got {number}.")
        own = [index for index, part in enumerate(self.parts) if part.image == number]
        roles = {self.parts[index].role: None for index in own}
        if role is not None and role not in roles:
            raise OptionError(unknown_name("role", role, roles))
        return [index for index in own if role in (None, self.parts[index].role)]

    def map_of(
        self,
        row: NDArray[Any],
        whole: float,
        chosen: Sequence[int],
        *,
        layer: int,
        relative: bool,
        through_tower: bool,
    ) -> tuple[NDArray[np.float32], Placement, dict[str, Any]]:
        """The map of a row over the prompt on some parts of an image, laid together by area; and what to know of it.

        Args:
            row: weights of the prompt's tokens, [tokens].
            whole: the sum of the whole row, which goes over earlier written tokens, too.
            chosen: numbers of the parts.
            layer: the index of the layer that the row is of.
            relative: as a multiple of the row of the neutral prompt.
            through_tower: carried on to the tower's own patches.
        """
        weights = [np.asarray(row, np.float64)[list(self.parts[index].positions)] for index in chosen]
        share = float(sum(part.sum() for part in weights)) / whole if whole else 0.0
        facts: dict[str, Any] = {"on_image": share}
        if relative:
            weights = self._relative(weights, chosen, layer)
        grids = [
            part.reshape(self.parts[index].rows, self.parts[index].cols)
            for part, index in zip(weights, chosen, strict=True)
        ]
        placements = [self._placement(index) for index in chosen]
        first, (grid, placement) = float(grids[0].flat[0]), _together(grids, placements)
        total = float(grid.sum())
        facts["on_first_patch"] = first / total if total else 0.0
        facts["on_edges"] = 1 - float(grid[1:-1, 1:-1].sum()) / total if total else 0.0
        if through_tower:
            grids = [self._through(grid, index) for grid, index in zip(grids, chosen, strict=True)]
            grid, placement = _together(grids, placements)
        return grid.astype(np.float32), placement, facts

    def shown(
        self, rows: NDArray[Any], wholes: NDArray[Any], *, relative: bool, through_tower: bool
    ) -> list[ShownImage]:
        """Each image with the maps of all rows up to each layer, as shares of these rows.

        Args:
            rows: weights of the prompt's tokens, [rows, tokens, layers].
            wholes: sums of the whole rows, which go over earlier written tokens, too, [rows, layers].
            relative, through_tower: as for `map_of`.
        """
        found = []
        for number, image in enumerate(self.images):
            chosen, maps = self.chosen(number, None), []
            for row, whole in zip(rows, wholes, strict=True):
                for layer in range(rows.shape[2]):
                    grid, placement, facts = self.map_of(
                        row[:, layer],
                        float(whole[layer]),
                        chosen,
                        layer=layer,
                        relative=relative,
                        through_tower=through_tower,
                    )
                    total = float(grid.sum())
                    maps.append(grid * (facts["on_image"] / total if total else 0.0))
            shape = (len(rows), rows.shape[2], *maps[0].shape)
            found.append(ShownImage(self.sources[number], image, placement.window, np.reshape(maps, shape)))
        return found

    def _relative(self, weights: list[NDArray[Any]], chosen: Sequence[int], layer: int) -> list[NDArray[Any]]:
        if self.neutral is None:
            raise OptionError(
                "Expected the row of a neutral prompt for relative=True, got none: pass "
                "neutral='Describe the image.' to explain_generation."
            )
        beside = np.concatenate([self.neutral[index][:, layer] for index in chosen])
        found = relative_to(torch.from_numpy(np.concatenate(weights)), torch.from_numpy(beside)).numpy()
        return np.split(found, np.cumsum([len(part) for part in weights])[:-1])

    def _through(self, grid: NDArray[Any], index: int) -> NDArray[Any]:
        if self.tower is None:
            raise OptionError(
                "Expected rows of the vision tower, got none: pass through_tower=True to explain_generation."
            )
        matrix = self.tower[index]
        finer = round((matrix.shape[1] / grid.size) ** 0.5)
        return (grid.reshape(-1) @ matrix).reshape(grid.shape[0] * finer, grid.shape[1] * finer)

    def _placement(self, index: int) -> Placement:
        part = self.parts[index]
        if part.placement is not None:
            return part.placement
        height, width = self.images[part.image].shape[:2]
        return Placement((height, width), (height, width), (0, 0), (height, width))


def _together(grids: Sequence[NDArray[Any]], placements: Sequence[Placement]) -> tuple[NDArray[Any], Placement]:
    return (grids[0], placements[0]) if len(grids) == 1 else lay_together(grids, placements)


def subtract_earlier(row: NDArray[Any], earlier: NDArray[Any], weights: NDArray[Any]) -> NDArray[np.float64]:
    """A row less what the rows of earlier words explain of it: their weighted sum times the factor that fits best.

    >>> subtract_earlier(np.array([0.5, 0.5]), np.array([[0.0, 1.0]]), np.array([1.0]))
    array([0.5, 0. ])
    """
    common = np.asarray(weights, np.float64) @ earlier
    size = float(common @ common)
    left: NDArray[np.float64] = np.clip(row - (float(row @ common) / size if size else 0.0) * common, 0.0, None)
    return left


def with_images(
    model: nn.Module, prompt: Any, image: Any, processor: Any, layout: Layout
) -> tuple[Mapping[str, Any], Any, PromptImages]:
    """A prompt with its images, as the processor makes it; the processor; and where the patches stand.

    Args:
        model: sees and writes.
        prompt: a text, or what the processor has made of it with these images; None to ask for a description.
        image: an image or several, as for `read_image`.
        processor: prepares them; by default the one saved beside the model, by name.
        layout: where the patches stand, for a family that is not known.

    Raises:
        OptionError: no image or a video among the tokens, several prompts, or a text where the model sees nothing.
        UnsupportedModelError: it is not known where the patches of this family stand.
        ModelError: there is no processor.
    """
    images, names = _read(image)
    config = getattr(model, "config", None)
    if image_token(config) is None and layout is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no token for the patches of an image in its text: it sees none there. But "
            "for VisionEncoderDecoder, models that attend to an image beside their text are not followed."
        )
    processor = _processor_of(model, processor)
    if not hasattr(processor, "tokenizer"):
        raise OptionError(
            f"Expected a processor of images and texts for {type(model).__name__}, got {type(processor).__name__}, "
            "which prepares images alone: pass processor=."
        )
    prompt = ASKING if prompt is None else prompt
    if isinstance(prompt, str):
        text = _with_token(prompt, processor, len(images))
        begin = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
        once = {"add_special_tokens": False} if begin and text.startswith(begin) else {}  # a template has it already
        drawn = [Image.fromarray(one) for one in images]
        try:
            inputs = dict(processor(images=drawn, text=text, return_tensors="pt", **once))
        except (ValueError, IndexError, StopIteration) as error:  # of the count of images in the text
            raise OptionError(
                f"Expected a prompt that {type(processor).__name__} can join with {len(images)} "
                f"image{'s'[: len(images) > 1]}, got {text!r:.80}: {type(error).__name__}: {error}"
            ) from error
    elif isinstance(prompt, Mapping) and isinstance(prompt.get("input_ids"), Tensor):
        inputs = dict(prompt)
    else:
        got = f"{len(prompt)} prompts" if isinstance(prompt, Sequence) else type(prompt).__name__
        raise OptionError(f"Expected one prompt with its images, as a text or as the processor makes it, got {got}.")
    inputs.pop("labels", None)  # of training
    if layout is None:
        given = None if isinstance(prompt, str) else images  # what was prepared here needs no check
        parts = image_tokens(config, processor, inputs, [(one.shape[0], one.shape[1]) for one in images], given)
    else:
        refuse_videos(config, inputs)
        parts = (layout,) if isinstance(layout, ImageTokens) else tuple(layout)
        _check_parts(parts, len(images), inputs["input_ids"])
    return inputs, processor, PromptImages(tuple(images), names, parts)


def with_source(
    model: nn.Module, inputs: Any, image: Any, processor: Any, layout: Layout
) -> tuple[dict[str, Any], PromptImages]:
    """The image that an encoder reads for the decoder, as its processor makes it; and where its patches stand.

    Args:
        model: writes with a decoder that attends to an encoder of images.
        inputs: what the processor has made of the image; anything else stands for none.
        image: the image, as for `read_image`.
        processor: prepares images; by default the one saved beside the model, by name.
        layout: where the patches stand, for an encoder that does not say.

    Raises:
        OptionError: there is not one image.
        UnsupportedModelError: it is not known how the encoder arranges its patches.
        ModelError: there is no processor.
    """
    images, names = _read(image)
    if len(images) != 1:
        raise OptionError(f"Expected one image for {type(model).__name__}, got {len(images)}: give one at a time.")
    processor = _processor_of(model, processor)
    if isinstance(inputs, Tensor):
        inputs = {"pixel_values": inputs}
    prepared_here = not isinstance(inputs, Mapping)
    if prepared_here:
        prepares = getattr(processor, "image_processor", processor)
        inputs = prepares(images=[Image.fromarray(images[0])], return_tensors="pt")
    pixels = inputs.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.ndim != 4 or len(pixels) != 1:
        told = tuple(pixels.shape) if isinstance(pixels, Tensor) else type(pixels).__name__
        raise OptionError(f"Expected pixel_values [1, channels, height, width] of the image, got {told}.")
    if layout is None:
        of_theirs: Any = model
        encoder = of_theirs.get_encoder()
        grid = read_layout(encoder, (pixels.shape[2], pixels.shape[3]), None)
        size = images[0].shape[0], images[0].shape[1]
        layout = source_tokens(encoder.config, processor, inputs, size, grid, None if prepared_here else images[0])
    parts = (layout,) if isinstance(layout, ImageTokens) else tuple(layout)
    return {"pixel_values": pixels}, PromptImages(tuple(images), names, parts)


def _read(image: Any) -> tuple[list[NDArray[np.uint8]], tuple[str, ...]]:
    """The images of a prompt, and what they are called."""
    given = list(image) if isinstance(image, list | tuple) else [image]
    if not given:
        raise OptionError("Expected an image or several, got an empty list: leave image out.")
    return [read_image(one) for one in given], tuple(image_name(one) for one in given)


def with_neutral(images: PromptImages, neutral: PromptImages, rows: NDArray[np.float32]) -> PromptImages:
    """The images with the rows [tokens, layers] of a neutral prompt that has them, too."""
    shapes = [[(part.rows, part.cols) for part in one.parts] for one in (images, neutral)]
    if shapes[0] != shapes[1]:
        raise OptionError("Expected a neutral prompt with the same images, got one with other patches.")
    return replace(images, neutral=tuple(rows[list(part.positions)] for part in neutral.parts))


def _processor_of(model: nn.Module, processor: Any) -> Any:
    if processor is None:
        processor = library_id(model)
        if processor is None:
            raise OptionError(
                f"Expected a processor for {type(model).__name__}, which was not loaded by name, got none: pass "
                "processor=."
            )
    return processor if callable(processor) else load_processor(processor)


def _with_token(prompt: str, processor: Any, count: int) -> str:
    """The prompt with a token for each image: as it is, by the processor's template, or these before it."""
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str) or token in prompt:
        return prompt
    if getattr(processor, "chat_template", None):
        content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": prompt}]
        asked: str = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        return asked
    return " ".join([*[token] * count, prompt])


def _check_parts(parts: Sequence[ImageTokens], images: int, ids: Tensor) -> None:
    """Raise OptionError unless the parts of one's own lie in the prompt and on its images."""
    last = max((place for part in parts for place in part.positions), default=-1)
    if not parts or last >= ids.shape[1] or any(not 0 <= part.image < images for part in parts):
        raise OptionError(
            f"Expected ImageTokens of {images} image{'s'[: images > 1]} in a prompt of {ids.shape[1]} tokens, "
            f"got {len(parts)} with positions up to {last}."
        )
