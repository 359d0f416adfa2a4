"""Preprocessing: the input that a model requires, and its computation from an image."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitflow.errors import OptionError, ShapeError, check_known
from vitflow.images import Fit, geometry
from vitflow.images.geometry import FILTERS, CropMode, Placement, Size

# Above this number of pixels, only the part that the model sees is resized: a 1 × 10,000 image whose short side is
# resized to 256 has a long side of 2,560,000.
_MAX_RESIZED_PIXELS = 2**26


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Input size, normalisation and cropping of a model.

    Attributes:
        size: (height, width) of the input in pixels.
        channels: 3, 1 for grey; with another number, only normalised tensors are inputs.
        mean, std: per channel, for values in [0, 1]; 0 and 1 if there are neither 1 nor 3 channels.
        interpolation: name of the resize filter.
        crop_pct: share of the resized image that the crop keeps.
        crop_mode: as for `geometry.place`.
        patch_size: (height, width) of a patch in pixels, if the model has one.
        dynamic: whether the model accepts other input sizes.
    """

    size: tuple[int, int]
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: CropMode = "center"
    patch_size: tuple[int, int] | None = None
    dynamic: bool = False


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Preprocessing of images for a model: placement, cropping and normalisation.

    Attributes:
        spec: input of the model.
        fit: "crop", "squash", "pad" or "native", as for `geometry.place`.

    >>> half = Preprocessing(InputSpec((224, 224), 3, (0.5,) * 3, (0.5,) * 3))
    >>> half.prepare(np.zeros((480, 640, 3), np.uint8), half.place((480, 640))).shape
    (3, 224, 224)
    """

    spec: InputSpec
    fit: Fit = "crop"

    def place(self, image_size: Size) -> Placement:
        """Return the placement of an image of this (height, width)."""
        spec = self.spec
        return geometry.place(
            image_size,
            spec.size,
            fit=self.fit,
            crop_pct=spec.crop_pct,
            crop_mode=spec.crop_mode,
            patch_size=spec.patch_size,
        )

    def cut(self, image: NDArray[np.uint8], placement: Placement) -> NDArray[np.uint8]:
        """Cut the region that the model sees, unnormalised: uint8 RGB [height, width, 3].

        >>> seen = Preprocessing(InputSpec((2, 2), 3, (0.5,) * 3, (0.5,) * 3))
        >>> seen.cut(np.zeros((2, 6, 3), np.uint8), seen.place((2, 6))).shape
        (2, 2, 3)
        """
        filter_name = self.spec.interpolation
        check_known("interpolation", filter_name, FILTERS)
        if image.dtype != np.uint8 or image.shape != (*placement.image_size, 3):
            raise ShapeError(
                f"Expected a uint8 RGB image of shape {(*placement.image_size, 3)}, as the placement was made for, "
                f"got {image.dtype} {image.shape}. Make the placement with place(image.shape[:2], …)."
            )
        inside, region = self._inside(Image.fromarray(image), placement)
        padding = [round(255 * value) for value in self.spec.mean] if placement.padding == "mean" else [0] * 3
        seen = np.empty((*placement.input_size, 3), dtype=np.uint8)
        seen[:] = np.asarray(padding, np.uint8)
        seen[region] = inside
        return seen

    def _inside(self, image: Image.Image, placement: Placement) -> tuple[NDArray[Any], tuple[slice, slice]]:
        """Resize the region that the model sees; return it and its rows and columns in the model input."""
        (height, width), (top, left), (rows, cols) = placement.resized_size, placement.offset, placement.input_size
        first_row, last_row = max(top, 0), min(top + rows, height)
        first_col, last_col = max(left, 0), min(left + cols, width)
        resample = Image.Resampling[self.spec.interpolation.upper()]
        region = slice(first_row - top, last_row - top), slice(first_col - left, last_col - left)
        if height * width <= _MAX_RESIZED_PIXELS:
            return np.asarray(image.resize((width, height), resample))[first_row:last_row, first_col:last_col], region
        upper, start = placement.to_image(float(first_row - top), float(first_col - left))
        lower, end = placement.to_image(float(last_row - top), float(last_col - left))
        size = (last_col - first_col, last_row - first_row)
        return np.asarray(image.resize(size, resample, box=(start, upper, end, lower))), region

    def prepare(self, image: NDArray[np.uint8], placement: Placement) -> NDArray[np.float32]:
        """Compute the normalised model input of an RGB image placed by `place`: float32 [channels, height, width].

        For fit="crop" it equals what timm's evaluation transform gives. Padding has the colour of the mean in 8 bits.
        """
        spec = self.spec
        if len(spec.mean) != 3 or len(spec.std) != 3 or min(spec.std) <= 0:
            raise OptionError(
                f"Expected three values each for mean and std, every std above 0, got {spec.mean} and {spec.std}."
            )
        if spec.channels == 1:  # luminance by ITU-R 601-2, as PIL's convert("L")
            grey = np.round(image @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
            image = np.repeat(grey[..., None], 3, axis=2)
        scaled = np.ascontiguousarray(self.cut(image, placement).transpose(2, 0, 1), dtype=np.float32) / np.float32(255)
        scaled -= np.asarray(spec.mean, dtype=np.float32)[:, None, None]
        scaled /= np.asarray(spec.std, dtype=np.float32)[:, None, None]
        return scaled[: spec.channels]
