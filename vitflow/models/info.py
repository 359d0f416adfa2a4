"""Information on an image model: its name, the preprocessing of its images, and its outputs."""

import hashlib
import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError, VitflowWarning, unknown_name
from vitflow.files import is_file
from vitflow.images import Fit
from vitflow.images.preprocessing import InputSpec, Preprocessing
from vitflow.methods.tokens import TokenLayout, check_layout
from vitflow.models.anatomy import embedding_of, height_width, patch_embed_of, transformer_of
from vitflow.models.names import (
    ClassNames,
    check_name,
    checked_class_names,
    class_activation,
    class_count,
    class_names_of,
    model_id,
    model_note,
)
from vitflow.models.outputs import Outputs, outputs_of
from vitflow.models.parts import library_id, unwrap

# Keys of a data_config, as in timm; and keys by which a processor of transformers is recognised.
_CONFIG = {"input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation"}
_PROCESSOR = {"image_mean", "image_std", "do_normalize", "do_resize", "image_processor_type", "max_num_patches"}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Display name, preprocessing and explained outputs of a model; its layout if given as argument; `model_note`."""

    id: str
    input: InputSpec
    outputs: Outputs
    layout: TokenLayout | None = None
    note: str = ""

    def fingerprint(self) -> dict[str, Any]:
        """Return the metadata for JSON, class names as a hash."""
        names = None if self.outputs.names is None else json.dumps(self.outputs.names).encode()
        return {
            "model": self.id,
            "input": asdict(self.input),
            "activation": self.outputs.activation,
            "class_names_sha256": None if names is None else hashlib.sha256(names).hexdigest(),
            "layout": None if self.layout is None else asdict(self.layout),
            **({"outputs": custom} if (custom := self.outputs.fingerprint()) else {}),
            **({"note": self.note} if self.note else {}),
        }

    def preprocessing(self, fit: Fit) -> Preprocessing:
        """Return the preprocessing for a fit, if the model supports it."""
        if fit == "native" and (self.input.patch_size is None or not self.input.dynamic):
            raise UnsupportedModelError(
                f"fit='native' requires a model for images of any size; {self.id} requires {self.input.size[0]} × "
                f"{self.input.size[1]} pixels. Build it with dynamic_img_size=True, or use fit='pad'."
            )
        return Preprocessing(self.input, fit)


def read_model_info(
    model: nn.Module,
    *,
    data_config: Any = None,
    class_names: ClassNames | None = None,
    activation: str | None = None,
    layout: TokenLayout | None = None,
    name: str | None = None,
    outputs: Any = None,
) -> ModelInfo:
    """Read the metadata of a model; arguments override it.

    >>> import timm
    >>> info = read_model_info(timm.create_model("vit_tiny_patch16_224", num_classes=5))
    >>> info.id, info.input.size, info.outputs.count, info.outputs.activation
    ('vit_tiny_patch16_224', (224, 224), 5, 'softmax')
    """
    spec = read_input_spec(model, data_config)
    check_layout(layout)
    outputs = _outputs(model, outputs, class_names, activation)
    name = model_id(model) if name is None else check_name(name)
    return ModelInfo(name, spec, outputs, layout, model_note(model))


def _outputs(model: nn.Module, outputs: Any, class_names: ClassNames | None, activation: str | None) -> Outputs:
    """Return the outputs given as argument, by default the model's classes."""
    count = class_count(model) if outputs is None else None
    names = None if class_names is None else tuple(checked_class_names(class_names, count))
    if isinstance(outputs, Outputs):
        return replace(outputs, names=names or outputs.names, activation=activation or outputs.activation)
    if outputs is not None:
        return outputs_of(outputs, names, activation)
    if class_names is None:
        model_names = class_names_of(model)
        names = None if model_names is None else tuple(model_names)
    return Outputs(None, names, count, activation or class_activation(model))


def read_input_spec(model: nn.Module, data_config: Any = None) -> InputSpec:
    """Return the input spec of a model from `pretrained_cfg` and `patch_embed`; `data_config` overrides entries.

    For transformers and torchvision, the size is read from the model, and the normalisation from the image processor
    saved with the weights or from `data_config`.
    """
    model = unwrap(model)
    embedding = embedding_of(model)
    given = checked_data_config(data_config, 3 if embedding is None else embedding.channels)
    given = library_data_config(model) | given
    if not getattr(model, "pretrained_cfg", None) and not {"input_size", "mean", "std"} <= given.keys():
        raise ModelError(
            f"The preprocessing of {type(model).__name__} is unknown. Pass data_config with at least "
            "input_size=(3, height, width), mean and std, or its image processor of transformers, or "
            "weights.transforms() of torchvision; a wrong normalisation gives wrong maps without an error."
        )
    config: dict[str, Any] = {**resolve_model_data_config(model), **given}
    transformer: Any = transformer_of(model)
    embed = patch_embed_of(transformer)
    _check_input(config, model)
    channels, height, width = config["input_size"]
    built_for = getattr(embed, "img_size", None)
    if built_for is not None and "input_size" not in given:
        height, width = built_for
    stem = [module for module in embed.modules() if isinstance(module, nn.Conv2d)] if embed is not None else []
    channels = stem[0].in_channels if stem else channels
    patch = getattr(embed, "patch_size", None) if embedding is None else embedding.patch_size
    spec = InputSpec(
        (int(height), int(width)),
        channels,
        tuple(config["mean"]),
        tuple(config["std"]),
        str(config["interpolation"]),
        float(config["crop_pct"]),
        config["crop_mode"],
        None if patch is None else height_width(patch),
        bool(getattr(transformer, "dynamic_img_size", False)) or (embedding is not None and embedding.dynamic),
    )
    if channels in (1, 3) and max(spec.mean) > 1:
        warnings.warn(
            f"mean={spec.mean} of data_config is above 1, but pixels have values from 0 to 1: divide mean and std by "
            "the largest pixel value, such as 255.",
            VitflowWarning,
            stacklevel=2,
        )
    if channels == 1:
        return replace(spec, mean=spec.mean[:1] * 3, std=spec.std[:1] * 3)
    if channels != 3:  # inputs are normalised tensors
        return replace(spec, mean=(0.0,) * channels, std=(1.0,) * channels)
    return spec


def _check_input(config: Mapping[str, Any], model: nn.Module) -> None:
    """Raise ModelError if the data config of a model has entries of the wrong type or length."""
    for name, count in (("input_size", 3), ("mean", -1), ("std", -1), ("crop_pct", 0)):
        value = config[name]
        parts = [value] if count == 0 else value
        numbers = isinstance(parts, Sequence) and all(isinstance(part, Real) for part in parts)
        if not numbers or (count > 0 and len(parts) != count):
            expected = {0: "a number", 3: "three numbers"}.get(count, "a list of numbers, one for each channel")
            raise ModelError(
                f"Expected {name} of {model_id(model)} to be {expected}, got {type(value).__name__} "
                f"{str(value)[:60]!r}. Pass it in data_config."
            )


# -- data configs, as in timm -----------------------------------------------------------------------------------------


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


def processor_settings(name: str) -> Mapping[str, Any]:
    """Return the image processor's settings of a model by name or folder; empty if not available locally."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for file in ("preprocessor_config.json", "processor_config.json"):
        path: Any = Path(name) / file
        if not is_file(path):
            try:
                path = try_to_load_from_cache(name, file)
            except HFValidationError:  # not a valid hub id
                continue
        if isinstance(path, str | Path):
            try:
                settings: Any = json.loads(Path(path).read_text(encoding="utf-8"))
                return dict(settings.get("image_processor", settings))
            except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
                raise ModelError(f"Expected image processor settings as a JSON object in {path}: {error}.") from error
    return {}


def checked_data_config(config: Any, channels: int = 3) -> dict[str, Any]:
    """Check a user's data config and convert it to timm's names.

    It is a mapping with timm's names; an image processor of transformers, or its settings; or the result of
    `weights.transforms()` of torchvision.
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
    if (unknown := sorted(known - _CONFIG)) and "architecture" not in known:  # with it, it is a whole pretrained_cfg
        raise OptionError(unknown_name("entry of data_config", unknown[0], _CONFIG))
    return dict(settings)


def _from_preset(preset: Any, channels: int) -> dict[str, Any]:
    """Return the settings of a torchvision preset for classification, with timm's names."""
    crop, resized = height_width(preset.crop_size), height_width(preset.resize_size)
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
