"""Model inputs: images and tensors with their place, as an explainer reads them."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
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
from vitflow.images.reading import ImageSource, is_open_file, read_image

# Tolerance around the range 0 to 1 of image values, because resizing overshoots.
_OVERSHOOT = 0.5
# Share of an image below which a crop is mentioned.
_SMALL_CROP = 0.1


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
    """Read images for a model, place them, and make its inputs."""

    def __init__(self, preprocessing: Preprocessing, model_id: str) -> None:
        self.preprocessing, self._model_id = preprocessing, model_id
        self.in_colour = self.spec.channels in (1, 3)
        self._cropped = False  # True once a small crop was mentioned

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
            raise OptionError(
                f"{self._model_id} requires images of {self.spec.channels} channels: pass the normalised tensor "
                f"{list(self.shape)}, and an RGB image to draw on as original=."
            )
        if original is not None:
            raise OptionError("original= requires a tensor, got an image: leave it out.")
        image = read_image(source)
        placement = self.preprocessing.place((image.shape[0], image.shape[1]))
        if (note := crop_note(placement)) and not self._cropped:
            self._cropped = True
            warnings.warn(f"{name or 'The image'}: {note}.", VitflowWarning, stacklevel=3)
        return PlacedImage(name, image, placement)

    def tensor(self, images: Sequence[PlacedImage], device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """Return the model inputs of images of one input size, [batch, channels, height, width].

        Those on the CPU are copied to the device together; a GPU may still be busy with an earlier batch.
        """
        inputs = [
            torch.from_numpy(self.preprocessing.prepare(each.image, each.placement))
            if each.pixels is None
            else each.pixels
            for each in images
        ]
        here = torch.device("cpu") if all(pixels.is_cpu for pixels in inputs) else device
        batch = torch.stack([pixels.to(here, dtype) for pixels in inputs])
        if device.type == "cuda" and batch.is_cpu:
            batch = batch.pin_memory()
        return batch.to(device, non_blocking=True)

    def two_images(self) -> list[NDArray[np.uint8]] | list[Tensor]:
        """Return two clearly different images for trial runs: dark and bright noise."""
        random = np.random.RandomState(0)
        if not self.in_colour:
            noise = torch.from_numpy(random.standard_normal((2, *self.shape))).float()
            return [noise[0], noise[1] + 1]
        values = random.randint(0, 96, (2, *self.spec.size, 3), dtype=np.uint8)
        return [values[0], values[1] + 160]

    def _placed_tensor(self, pixels: Tensor, name: str, original: ImageSource | None) -> PlacedImage:
        """Check a model input and place it on its original, or on the denormalised input."""
        pixels = pixels[0] if pixels.ndim == 4 and len(pixels) == 1 else pixels
        channels, height, width = self.shape
        size = (int(pixels.shape[1]), int(pixels.shape[2])) if pixels.ndim == 3 else (0, 0)
        fits = pixels.ndim == 3 and len(pixels) == channels and (size == self.spec.size or self.spec.dynamic)
        if not fits or not pixels.is_floating_point() or not torch.isfinite(pixels).all():
            raise ShapeError(
                f"Expected a finite float tensor [{channels}, {height}, {width}], normalised for {self._model_id}, got "
                f"{pixels.dtype} {list(pixels.shape)}{f' for {name}' if name else ''}: "
                f"{_remedy(pixels, channels, fits)}."
            )
        tall, wide = self.spec.patch_size or (1, 1)
        if size != self.spec.size and (size[0] % tall or size[1] % wide):
            expected = f"multiples of the patches of {self._model_id}, {tall} × {wide} pixels"
            raise ShapeError(f"Expected height and width as {expected}, got {size[0]} × {size[1]}.")
        pixels = pixels.detach()
        values = pixels.float().cpu()
        if not self.in_colour:
            shown = values.mean(dim=0, keepdim=True)
            shown = (shown - shown.min()) / (shown.max() - shown.min()).clamp(min=1e-12)
        else:
            mean, std = (torch.tensor(each[:channels]).view(-1, 1, 1) for each in (self.spec.mean, self.spec.std))
            shown = values * std + mean
            lowest, highest = float(values.min()), float(values.max())
            beyond = float(shown.min()) < -_OVERSHOOT or float(shown.max()) > 1 + _OVERSHOOT
            if beyond or (0 <= lowest < highest <= 1 and not torch.equal(values, shown)):
                warnings.warn(
                    f"{name or 'image'}: the tensor does not look normalised for {self._model_id}: its range is "
                    f"{lowest:.3g} to {highest:.3g}. Expected (image - mean) / std with mean={self.spec.mean} and "
                    f"std={self.spec.std}, for images from 0 to 1.",
                    VitflowWarning,
                    stacklevel=2,
                )
        if original is not None:
            drawn_on = read_image(original)
            placement = self.preprocessing.place((drawn_on.shape[0], drawn_on.shape[1]))
            if placement.input_size != size:
                fit = self.preprocessing.fit
                expected = f"a tensor of {placement.input_size} pixels for this original and fit={fit!r}"
                raise ShapeError(f"Expected {expected}, got {size}.")
            return PlacedImage(name, drawn_on, placement, pixels)
        image = (255 * shown).round().clamp(0, 255).to(torch.uint8).expand(3, -1, -1).permute(1, 2, 0).numpy()
        return PlacedImage(name, np.ascontiguousarray(image), place(size, size, fit="squash"), pixels)


def crop_note(placement: Placement) -> str:
    """Return the note on a model input that sees a small part of an image; empty if it sees enough.

    >>> crop_note(place((100, 2000), (224, 224)))
    "the model sees 5.0% of the image: fit='pad' or fit='squash' shows it the whole image"
    """
    left, top, right, bottom = placement.window
    height, width = placement.image_size
    share = (min(right, width) - max(left, 0)) * (min(bottom, height) - max(top, 0)) / (height * width)
    if share >= _SMALL_CROP:
        return ""
    return f"the model sees {share:.1%} of the image: fit='pad' or fit='squash' shows it the whole image"


def _remedy(pixels: Tensor, channels: int, fits: bool) -> str:
    """Return what to do about a tensor that is not a model input."""
    if not pixels.is_floating_point():
        return "pass the image as a path, PIL image or array [height, width, 3], which is prepared for the model"
    if pixels.ndim == 3 and pixels.shape[-1] == channels != len(pixels):
        return "its channels are last, pass tensor.movedim(-1, -3)"
    if fits:
        return "it has NaN or infinite values"
    if pixels.ndim > 3:
        return "pass a batch of images to explain_batch as [batch, channels, height, width]"
    return "pass the image itself, which is resized, or a tensor of this shape"


def several(images: Any) -> Any:
    """Return images as a sequence; a path, bytes, a file, an array [height, width(, channels)] or a 3D tensor is one.

    >>> several("cats/tabby.jpg"), len(several(np.zeros((5, 9, 13)))), len(several(np.zeros((5, 9, 9, 3))))
    (['cats/tabby.jpg'], 1, 5)
    """
    if isinstance(images, np.ndarray):
        return [images] if images.ndim in (2, 3) else images
    if isinstance(images, Tensor):
        return [images] if images.ndim == 3 else list(images)
    one = isinstance(images, str | bytes | bytearray | memoryview | PlacedImage | Mapping) or is_open_file(images)
    if one or not isinstance(images, Iterable):
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
