"""Model inputs: images and tensors with their place, as an explainer reads them."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, VitflowWarning
from vitflow.images.geometry import Placement, place
from vitflow.images.preprocessing import InputSpec, Preprocessing
from vitflow.images.reading import ImageSource, bands_in_colour, read_bands, read_image

# Tolerance around the range 0 to 1 of image values, because resizing overshoots.
_OVERSHOOT = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImage:
    """An image with its placement, ready for the model.

    Attributes:
        name: its name in results.
        image: uint8 RGB [height, width, 3].
        placement: position of the model input on the image.
        pixels: the model input, [channels, height, width], if the caller gave it; else it is cut from the image.
    """

    name: str
    image: NDArray[np.uint8]
    placement: Placement
    pixels: Tensor | None = None


#: An image, or a model input [channels, height, width].
ImageInput = ImageSource | Tensor | PlacedImage


class ModelInputs:
    """Read images for a model, place them, and make its inputs.

    Args:
        preprocessing: preprocessing from images to model inputs.
        channels: for a model that does not take RGB, which channels are displayed as red, green and blue, from 0; by
            default the first three.
        model_id: name of the model in messages.

    Raises:
        OptionError: the channels do not exist, or the model takes RGB or grey.
    """

    def __init__(self, preprocessing: Preprocessing, channels: Sequence[int] | None, model_id: str) -> None:
        self.preprocessing, self._model_id = preprocessing, model_id
        count = self.spec.channels
        self.in_colour = count in (1, 3)
        if channels is None:
            channels = (0, 1, 2) if count > 2 else (0, count - 1, count - 1)
        elif self.in_colour:
            raise OptionError("channels requires a model with input other than RGB or grey: leave it out.")
        if len(channels) != 3 or not all(isinstance(each, int) and 0 <= each < count for each in channels):
            raise OptionError(f"Expected channels as three numbers from 0 to {count - 1}, got {channels!r}.")
        self.channels = tuple(channels)
        self._warned = False  # of a tensor that does not look normalised

    @property
    def spec(self) -> InputSpec:
        """Input size and normalisation."""
        return self.preprocessing.spec

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a model input, (channels, height, width)."""
        return self.spec.channels, *self.spec.size

    def placed(self, source: ImageInput, name: str, original: ImageSource | None = None) -> PlacedImage:
        """Read an image and compute its placement; `original` is the image of a model input."""
        if isinstance(source, PlacedImage):
            return source
        if isinstance(source, Tensor):
            return self._placed_tensor(source, name, original)
        if not self.in_colour:
            return self._placed_bands(source, name, original)
        if original is not None:
            raise OptionError("original= requires a tensor, got an image: leave it out.")
        image = read_image(source)
        return PlacedImage(name, image, self.preprocessing.place((image.shape[0], image.shape[1])))

    def tensor(self, images: Sequence[PlacedImage], device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """Return the model inputs of images of one input size, [batch, channels, height, width]."""
        inputs = [
            torch.from_numpy(self.preprocessing.prepare(each.image, each.placement))
            if each.pixels is None
            else each.pixels
            for each in images
        ]
        return torch.stack([pixels.to(device, dtype) for pixels in inputs])

    def grey(self) -> NDArray[Any]:
        """Return a uniform image of the model's input size for trial runs: grey, or the mean of each channel."""
        if self.in_colour:
            return np.full((*self.spec.size, 3), 128, np.uint8)
        return np.tile(np.asarray(self.spec.mean, np.float32), (*self.spec.size, 1))

    def two_images(self) -> list[NDArray[Any]]:
        """Return two clearly different images for trial runs: dark and bright noise."""
        random, size = np.random.RandomState(0), self.spec.size
        if self.in_colour:
            noise = random.randint(0, 96, (2, *size, 3), dtype=np.uint8)
            return [noise[0], noise[1] + 160]
        values = random.standard_normal((2, *size, self.spec.channels)) * self.spec.std + self.spec.mean
        return [values[0], values[1] + self.spec.std]

    def _placed_bands(self, source: Any, name: str, original: ImageSource | None) -> PlacedImage:
        """Place an image with another number of channels; it is displayed by three of them, or by its original."""
        bands = read_bands(source, self.spec.channels)
        size = bands.shape[0], bands.shape[1]
        placement = self.preprocessing.place(size)
        image = bands_in_colour(bands, self.channels) if original is None else read_image(original)
        if image.shape[:2] != size:
            raise ShapeError(f"Expected an original of {size} pixels, as the image has, got {image.shape[:2]}.")
        return PlacedImage(name, image, placement, torch.from_numpy(self.preprocessing.prepare_bands(bands, placement)))

    def _placed_tensor(self, pixels: Tensor, name: str, original: ImageSource | None) -> PlacedImage:
        """Check a model input and place it on its original, or on the denormalised input."""
        pixels = pixels[0] if pixels.ndim == 4 and len(pixels) == 1 else pixels
        channels, height, width = self.shape
        size = (int(pixels.shape[1]), int(pixels.shape[2])) if pixels.ndim == 3 else (0, 0)
        fits = pixels.ndim == 3 and len(pixels) == channels and (size == self.spec.size or self.spec.dynamic)
        if not fits or not pixels.is_floating_point() or not torch.isfinite(pixels).all():
            raise ShapeError(
                f"Expected a finite float tensor [{channels}, {height}, {width}], normalised for {self._model_id}, or "
                f"a batch of them, got {pixels.dtype} {list(pixels.shape)}."
            )
        tall, wide = self.spec.patch_size or (1, 1)
        if size != self.spec.size and (size[0] % tall or size[1] % wide):
            raise ShapeError(
                f"Expected a tensor whose height and width are multiples of the patches of {self._model_id}, {tall} × "
                f"{wide} pixels, got {size[0]} × {size[1]}."
            )
        pixels = pixels.detach()
        values = pixels.float().cpu()
        mean, std = (torch.tensor(each[:channels]).view(-1, 1, 1) for each in (self.spec.mean, self.spec.std))
        shown = (values * std + mean).permute(1, 2, 0)
        if self.in_colour and not self._warned:
            self._warn_unless_normalised(values, mean, std)
        if original is not None:
            image = read_image(original)
            placement = self.preprocessing.place((image.shape[0], image.shape[1]))
            if placement.input_size != size:
                raise ShapeError(
                    f"Expected a tensor of {placement.input_size} pixels for this original and "
                    f"fit={self.preprocessing.fit!r}, got {size}."
                )
            return PlacedImage(name, image, placement, pixels)
        if self.in_colour:
            image = (255 * shown).round().clamp(0, 255).to(torch.uint8).expand(-1, -1, 3).numpy()
        else:
            image = bands_in_colour(shown.numpy(), self.channels)
        return PlacedImage(name, np.ascontiguousarray(image), place(size, size, fit="squash"), pixels)

    def _warn_unless_normalised(self, values: Tensor, mean: Tensor, std: Tensor) -> None:
        """Warn once about a tensor that is far outside the range of normalised images, or from 0 to 1."""
        lowest, highest = float(values.min()), float(values.max())
        low, high = float((-mean / std).min()), float(((1 - mean) / std).max())
        shown = values * std + mean
        beyond = float(shown.min()) < -_OVERSHOOT or float(shown.max()) > 1 + _OVERSHOOT
        if beyond or (lowest >= 0 and highest <= 1 < high):
            self._warned = True
            warnings.warn(
                f"The tensor does not look normalised for {self._model_id}: its range is {lowest:.3g} to "
                f"{highest:.3g}; (image - mean) / std has {low:.3g} to {high:.3g} with mean={self.spec.mean} and "
                f"std={self.spec.std}.",
                VitflowWarning,
                stacklevel=2,
            )


def several(images: Any) -> Any:
    """Return images as a sequence; a path, bytes, an array [height, width(, channels)] or a 3D tensor is one image.

    >>> several("cats/tabby.jpg"), len(several(np.zeros((5, 9, 13)))), len(several(np.zeros((5, 9, 9, 3))))
    (['cats/tabby.jpg'], 1, 5)
    """
    if isinstance(images, np.ndarray):
        return [images] if images.ndim in (2, 3) else images
    if isinstance(images, Tensor):
        return [images] if images.ndim == 3 else list(images)
    if isinstance(images, str | bytes | PlacedImage) or not isinstance(images, Iterable):
        return [images]
    return images if isinstance(images, Sequence) else list(images)


def at_least_one(images: Any) -> Any:
    """Return images as `several` does; OptionError if there are none."""
    if not len(sources := several(images)):
        raise OptionError("Expected at least one image, got none.")
    return sources


def name_of(source: ImageInput, index: int) -> str:
    """Return the name of an image: its path, or "image 1" and so on."""
    if isinstance(source, PlacedImage):
        return source.name
    return str(source) if isinstance(source, str | Path) else f"image {index}"
