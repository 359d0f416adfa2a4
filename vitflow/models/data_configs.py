"""Data configs with timm's names, from image processors of transformers and transforms of torchvision."""

import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import FunctionType
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from vitflow.errors import ModelError, OptionError, VitflowWarning, printable, unknown_name
from vitflow.files import is_folder
from vitflow.models.anatomy import embedding_of, height_width
from vitflow.models.parts import library_id, pretrained_of

# Keys of a data_config, as in timm; and keys by which a processor of transformers is recognised.
_CONFIG = {"input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation"}
_PROCESSOR = {"image_mean", "image_std", "do_normalize", "do_resize", "image_processor_type", "max_num_patches"}


def library_data_config(model: nn.Module, processor: Any = None) -> dict[str, Any]:
    """Return the known entries of timm's data config for a non-timm model.

    The size is read from the model; normalisation and crop from the image processor inside `processor`, by default
    from the one saved with the model.
    """
    embedding = embedding_of(model)
    if embedding is None:
        return {}
    config = {"input_size": (embedding.channels, *embedding.image_size)} | saved_config(model, embedding.channels)
    image_processor = getattr(processor, "image_processor", None)
    return config | ({} if image_processor is None else from_processor(image_processor.to_dict()))


def saved_config(model: nn.Module, channels: int = 3) -> dict[str, Any]:
    """Return the entries of the image processor saved with a transformers model; empty if not available locally."""
    name = library_id(model)
    return {} if name is None else from_processor(processor_settings(name), channels)


def default_config(model: nn.Module) -> dict[str, Any]:
    """Return the mean, std and filter of the image processor of a model's type, for a folder without one; with a note.

    The note names the values: a model may have been trained with others.
    """
    name, pretrained = library_id(model), pretrained_of(model)
    if pretrained is None or name is None or not is_folder(name):
        return {}
    transformers = import_module("transformers")
    table = import_module("transformers.models.auto.image_processing_auto").IMAGE_PROCESSOR_MAPPING_NAMES
    config: Any = pretrained.config
    own = str(config.model_type)  # or the type of the model that its vision tower belongs to
    kinds: Any = table.get(own) or table.get(own.removesuffix("_model").removesuffix("_vision"), ())
    kinds = [kinds] if isinstance(kinds, str) else kinds.values() if isinstance(kinds, Mapping) else kinds
    kind = next((getattr(transformers, each) for each in kinds if each and hasattr(transformers, each)), None)
    if kind is None:
        return {}
    found = from_processor(kind().to_dict())
    found.pop("input_size", None)  # that of the model is known
    if "mean" in found:
        mean, std = (tuple(round(value, 3) for value in found[name]) for name in ("mean", "std"))
        warnings.warn(
            f"{printable(name)} has no preprocessor_config.json: using the default of {kind.__name__}, mean {mean} and "
            f"std {std}. If the model was trained with others, pass data_config.",
            VitflowWarning,
            stacklevel=4,
        )
    return found


def processor_settings(name: str) -> Mapping[str, Any]:
    """Return the image processor's settings of a model by name or folder; empty if not available locally."""
    auto = import_module("transformers.models.auto.image_processing_auto")
    try:
        return dict(auto.get_image_processor_config(name, local_files_only=True))
    except (OSError, ValueError, RecursionError) as error:
        if is_folder(name):
            raise ModelError(f"Expected image processor settings as a JSON object in {name}: {error}.") from error
        return {}


def checked_data_config(config: Any, channels: int = 3) -> dict[str, Any]:
    """Check a user's data config and convert it to timm's names.

    It is a mapping with timm's names; an image processor of transformers, or its settings; the result of
    `weights.transforms()` of torchvision; or a Compose of its transforms.
    """
    if config is None:
        return {}
    settings = getattr(config, "image_processor", config)  # a processor of texts and images
    if not isinstance(settings, Mapping) and hasattr(settings, "to_dict"):
        settings = settings.to_dict()
    if all(hasattr(settings, name) for name in ("crop_size", "resize_size", "mean", "std", "interpolation")):
        sizes = tuple(settings.resize_size), height_width(settings.crop_size)
        resized = _resized(*sizes, settings.interpolation, channels)
        return {"mean": tuple(settings.mean), "std": tuple(settings.std), **resized}
    if type(settings).__name__ in ("Compose", "Sequential"):
        return from_steps([*getattr(settings, "transforms", settings)], channels)
    known = settings.keys() if isinstance(settings, Mapping) else set()
    if known & _PROCESSOR:
        return from_processor(settings, channels)
    if not isinstance(settings, Mapping) or (known and not known & _CONFIG):
        got = f"the keys {', '.join(map(str, known))}" if known else repr(settings)
        raise OptionError(
            "Expected data_config as a mapping with input_size=(3, height, width), mean and std (also crop_pct, "
            "crop_mode, interpolation), an image processor of transformers, or torchvision's weights.transforms() or "
            f"Compose, got {got:.120}."
        )
    if (unknown := sorted(known - _CONFIG)) and "architecture" not in known:  # with it, it is a whole pretrained_cfg
        raise OptionError(unknown_name("entry of data_config", unknown[0], _CONFIG))
    return dict(settings)


def _resized(sides: tuple[int, ...], seen: tuple[int, int], interpolation: Any, channels: int) -> dict[str, Any]:
    """Return the settings of a resize to one side or (height, width), and the crop of a part of it that is seen."""
    return {
        "input_size": (channels, *seen),
        "crop_pct": _share(seen[0], sides[0]),
        "crop_mode": "center" if len(sides) == 1 else "squash",
        "interpolation": str(getattr(interpolation, "value", interpolation)),
    }


def _share(crop: int, resized: int) -> float:
    """Return the crop_pct from which timm's rounding down gives exactly the resized side."""
    share = crop / resized
    return share if math.floor(crop / share) == resized else math.nextafter(share, 0.0)


def from_steps(steps: Sequence[Any], channels: int = 3) -> dict[str, Any]:
    """Return the settings of transforms of torchvision that are applied in order, with timm's names.

    They are Resize, CenterCrop, Normalize, conversions to a tensor from 0 to 1, and functions that change no RGB image.

    Raises:
        OptionError: another transform, or images that keep their size.
    """
    settings, scaled = dict[str, Any](), False
    for step in steps:
        name = type(step).__name__
        if name in _SCALING and getattr(step, "scale", True):
            scaled = True
        elif name in _READ_STEPS and name not in settings and _is_plain(step, scaled):
            settings[name] = step
        elif not _changes_nothing(step, channels, scaled):
            raise OptionError(
                "Expected data_config as a Compose of Resize, CenterCrop, ToTensor and Normalize of torchvision, once "
                f"each, got {step!r:.120}. Pass the transform of the evaluation, or a mapping with input_size=(3, "
                "height, width), mean and std."
            )
    resize, crop, normalize = map(settings.get, _READ_STEPS)
    if not scaled or [*settings] != [name for name in _READ_STEPS if name in settings]:
        raise OptionError("Expected a Compose that resizes, crops and scales images from 0 to 1 (ToTensor), in order.")
    config = {"mean": (0.0,) * channels, "std": (1.0,) * channels, "crop_pct": 1.0}
    if normalize is not None:
        config |= {"mean": tuple(map(float, normalize.mean)), "std": tuple(map(float, normalize.std))}
    return config if resize is None and crop is None else config | _size_of(resize, crop, channels)


def _size_of(resize: Any, crop: Any, channels: int) -> dict[str, Any]:
    """Return the settings of a Resize and a CenterCrop."""
    side = getattr(resize, "size", ())
    resized = (side,) if isinstance(side, int) else tuple(side)
    seen = resized if crop is None else height_width(crop.size)
    squares = seen[:1] * 2 == seen if len(resized) == 1 else len(resized) == 2
    share = _share(seen[0], resized[0]) if squares else 1.0
    if not squares or tuple(math.floor(each / share) for each in seen)[-len(resized) :] != resized:
        raise OptionError(
            "Expected Resize(side) and a square CenterCrop, or Resize((height, width)) and a CenterCrop of its shape, "
            f"got {resize} and {crop}: explain tensors of other sizes or shapes with explain_batch."
        )
    return _resized(resized, seen, resize.interpolation, channels)


# Transforms whose settings are read, in their order, and those that change no values of an RGB image.
_READ_STEPS = ("Resize", "CenterCrop", "Normalize")
_SCALING = ("ToTensor", "MaybeToTensor", "ConvertImageDtype", "ToDtype")  # to values from 0 to 1
_CONVERSIONS = ("PILToTensor", "ToImage", "ToPureTensor", "MaybePILToTensor", "RGB")


def _is_plain(step: Any, scaled: bool) -> bool:
    """Return True for a transform of torchvision that does what the settings of timm express."""
    smooth = not scaled or getattr(step, "antialias", True)  # images, unlike tensors, are always resized with it
    return type(step).__module__.startswith("torchvision.") and getattr(step, "max_size", None) is None and bool(smooth)


def _changes_nothing(step: Any, channels: int, scaled: bool) -> bool:
    """Return True for a conversion, or a function or Lambda that returns an RGB image unchanged."""
    name = type(step).__name__
    if name in _CONVERSIONS or (name == "Grayscale" and channels == step.num_output_channels == 1):
        return True
    if scaled or not (name == "Lambda" or isinstance(step, FunctionType)):
        return False
    noise = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    try:
        return np.array_equal(np.asarray(step(Image.fromarray(noise))), noise)
    except Exception:  # of a function of anything else
        return False


# Settings of processors that are refused if they are True: BGR instead of RGB, and a second normalisation.
_UNSUPPORTED = ("do_flip_channel_order", "include_top")
# Interpolations by their number in Pillow.
_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}


def from_processor(settings: Mapping[str, Any], channels: int = 3) -> dict[str, Any]:
    """Return the settings of a transformers image processor, with timm's names.

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
        data_config["crop_pct"] = _share(seen[0], resized[0])
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
        name, library = kind.replace("FeatureExtractor", "ImageProcessor"), sys.modules.get("transformers")
        known: list[Any] = [
            getattr(library, each, None) for each in (name, f"{name}Fast")
        ]  # in early releases of 5 the second
        squares = (kind.default_to_square for kind in known if hasattr(kind, "default_to_square"))
        return (size, size), not next(squares, True)
    if isinstance(size, Mapping):
        if size.get("shortest_edge"):
            return (int(size["shortest_edge"]),) * 2, True
        if size.get("height") and size.get("width"):
            return (int(size["height"]), int(size["width"])), False
    return None, False
