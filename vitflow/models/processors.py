"""Data configs from image processors of transformers and presets of torchvision, as in timm."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from vitflow.errors import OptionError
from vitflow.models.anatomy import pair

# Keys of a data_config, as in timm; and keys by which a processor of transformers is recognised.
_CONFIG = {"input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation"}
_PROCESSOR = {"image_mean", "image_std", "do_normalize", "do_resize", "image_processor_type", "max_num_patches"}


def checked_data_config(config: Any, channels: int = 3) -> dict[str, Any]:
    """Check a user's data config and convert it to timm's names.

    Args:
        config: a mapping with timm's names; an image processor of transformers, or its settings; or the result of
            `weights.transforms()` of torchvision.
        channels: number of channels of an image.

    Raises:
        OptionError: another type, or unknown keys.

    >>> checked_data_config({"mean": (0.5,) * 3})
    {'mean': (0.5, 0.5, 0.5)}
    """
    if config is None:
        return {}
    settings = getattr(config, "image_processor", config)  # a processor of texts and images
    if not isinstance(settings, Mapping) and hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if all(hasattr(settings, name) for name in ("crop_size", "resize_size", "mean", "std", "interpolation")):
        return _from_preset(settings, channels)
    known = settings.keys() if isinstance(settings, Mapping) else set()
    if known & _PROCESSOR:
        return from_processor(settings, channels)
    if not isinstance(settings, Mapping) or (known and not known & _CONFIG):
        got = f"the keys {', '.join(map(str, known))}" if known else repr(settings)
        raise OptionError(
            "Expected data_config as a mapping with input_size=(3, height, width), mean and std (also crop_pct, "
            "crop_mode, interpolation), an image processor of transformers, or torchvision's weights.transforms(), "
            f"got {got:.120}."
        )
    return dict(settings)


def _from_preset(preset: Any, channels: int) -> dict[str, Any]:
    """Return the settings of a torchvision preset for classification, with timm's names."""
    crop, resized = pair(preset.crop_size), pair(preset.resize_size)
    return {
        "input_size": (channels, *crop),
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
        "crop_pct": crop[0] / resized[0],
        "crop_mode": "center" if len(preset.resize_size) == 1 else "squash",
        "interpolation": str(getattr(preset.interpolation, "value", preset.interpolation)),
    }


# Settings of processors that are refused if they are True: BGR instead of RGB, and a second normalisation.
_UNSUPPORTED = ("do_flip_channel_order", "include_top")
# Interpolations by their number in Pillow.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def from_processor(settings: Mapping[str, Any], channels: int = 3) -> dict[str, Any]:
    """Return the settings of a transformers image processor, with timm's names.

    Args:
        settings: `processor.to_dict()`, or the contents of preprocessor_config.json.
        channels: number of channels of an image.

    >>> from_processor({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 32, "width": 32}})
    {'mean': (0.5, 0.5, 0.5), 'std': (0.5, 0.5, 0.5), 'input_size': (3, 32, 32), 'crop_pct': 1.0, 'crop_mode': 'squash'}
    """
    kind = str(settings.get("image_processor_type", settings.get("feature_extractor_type")))
    if unsupported := [name for name in _UNSUPPORTED if settings.get(name)]:
        raise OptionError(
            f"The image processor has {unsupported[0]}=True, which vitflow does not support: explain tensors from the "
            "processor with explain_batch, and pass input_size, mean and std as data_config."
        )
    data_config: dict[str, Any] = {}
    # Values are divided by `unit` and lowered by `offset` before the normalisation; usually 1 and 0.
    rescales = settings.get("do_rescale", True)
    unit = 255.0 * float(settings.get("rescale_factor", 1 / 255)) if rescales else 255.0
    offset = 1.0 if rescales and (settings.get("offset") or settings.get("rescale_offset")) else 0.0
    if settings.get("do_normalize", True) and "image_mean" in settings:
        data_config["mean"] = tuple((mean + offset) / unit for mean in settings["image_mean"])
        data_config["std"] = tuple(std / unit for std in settings["image_std"])
    elif "do_normalize" in settings and not settings["do_normalize"]:
        data_config = {"mean": (offset / unit,) * 3, "std": (1.0 / unit,) * 3}
    resized, shortest = _sides(settings.get("size"), kind)
    cropped, _ = _sides(settings.get("crop_size"))
    crops = settings.get("do_center_crop", False) and cropped is not None
    seen = cropped if crops else resized
    if resized is not None and shortest and kind.startswith("Levit"):
        resized = (int(256 / 224 * resized[0]),) * 2
    elif resized is not None and shortest and kind.startswith("ConvNext"):
        shortest = resized[0] < 384  # larger images are squashed
        resized = (int(resized[0] / settings.get("crop_pct", 224 / 256)),) * 2 if shortest else resized
    if seen is not None and resized is not None:
        data_config["input_size"] = (channels, *seen)
        data_config["crop_pct"] = seen[0] / resized[0]
        data_config["crop_mode"] = "floor" if shortest else "squash"
    if settings.get("do_pad", True) and str(settings.get("image_processor_type")).startswith("Owlv2"):
        data_config["crop_mode"] = "corner"
    if settings.get("max_num_patches"):  # as many patches as fit, at any aspect ratio
        side = math.isqrt(int(settings["max_num_patches"])) * int(settings.get("patch_size", 16))
        data_config |= {"input_size": (channels, side, side), "crop_pct": 1.0, "crop_mode": "patches"}
    if settings.get("resample") is not None:
        data_config["interpolation"] = _FILTERS.get(int(settings["resample"]), "bicubic")
    return data_config


def _sides(size: Any, kind: str = "") -> tuple[tuple[int, int] | None, bool]:
    """Return (height, width) of a processor's size, and True if it is the size of the shorter side.

    The class of the processor determines which of them a single number is.
    """
    if isinstance(size, int):
        processor = getattr(sys.modules.get("transformers"), kind.replace("FeatureExtractor", "ImageProcessor"), None)
        return (size, size), not getattr(processor, "default_to_square", True)
    if isinstance(size, Mapping):
        if size.get("shortest_edge"):
            return (int(size["shortest_edge"]),) * 2, True
        if size.get("height") and size.get("width"):
            return (int(size["height"]), int(size["width"])), False
    return None, False
