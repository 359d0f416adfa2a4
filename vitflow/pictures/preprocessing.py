"""Preprocessing: what a model wants to see, and how a picture becomes that."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitflow.pictures import geometry
from vitflow.pictures.geometry import CropMode, Placement, Size
from vitflow.pictures.options import Fit


@dataclass(frozen=True, slots=True)
class InputSpec:
    """What a model wants to see: size and normalisation of its input, and how pictures were cropped for it.

    Attributes:
        size: (height, width) of the input in pixels.
        channels: 3, or 1 for grey.
        mean, std: per channel, for values in [0, 1].
        interpolation: the resize filter's name.
        crop_pct: share of the resized picture that the crop keeps.
        crop_mode: "center", "squash" or "border".
        patch_size: (height, width) of a patch in pixels, where the model has one.
        dynamic: whether the model takes other input sizes as it is.
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
    """How pictures become the input of one model: placed, cut and normalised.

    Attributes:
        spec: what the model wants to see.
        fit: "crop", "squash", "pad" or "native", as for `geometry.place`.

    >>> half = Preprocessing(InputSpec((224, 224), 3, (0.5,) * 3, (0.5,) * 3))
    >>> half.prepare(np.zeros((480, 640, 3), np.uint8), half.place((480, 640))).shape
    (3, 224, 224)
    """

    spec: InputSpec
    fit: Fit = "crop"

    def place(self, image_size: Size) -> Placement:
        """Where a picture of this (height, width) goes."""
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
        """What the model sees of a picture, in the picture's own colours: uint8 RGB [height, width, 3]."""
        return geometry.cut(image, placement, mean=self.spec.mean, interpolation=self.spec.interpolation)

    def prepare(self, image: NDArray[np.uint8], placement: Placement) -> NDArray[np.float32]:
        """The model input, normalised: float32 [channels, height, width]."""
        spec = self.spec
        if spec.channels == 1:  # luminance by ITU-R 601-2, as PIL's convert("L")
            grey = np.round(image @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)
            image = np.repeat(grey[..., None], 3, axis=2)
        prepared = geometry.prepare(image, placement, mean=spec.mean, std=spec.std, interpolation=spec.interpolation)
        return prepared[: spec.channels]
