"""Metadata of a model: name, preprocessing, outputs and classes."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from numbers import Real
from typing import Any

import timm
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_model_data_config
from torch import nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError, printable
from vitflow.images import Fit
from vitflow.images.preprocessing import InputSpec, Preprocessing
from vitflow.methods.tokens import TokenLayout, check_layout
from vitflow.models.anatomy import transformer_of, unwrap
from vitflow.models.checkpoints import ClassNames, checked_class_names
from vitflow.models.libraries import (
    class_count,
    embedding_of,
    library_class_names,
    library_data_config,
    library_id,
    library_reading,
)
from vitflow.models.outputs import Outputs, outputs_of
from vitflow.models.processors import checked_data_config

# Note of models whose tokens are not patches of the image.
_OVERLAPPING = "tokens are cells of a convolutional feature map, whose receptive fields overlap"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Metadata of a model.

    Attributes:
        id: display name.
        input: preprocessing of its images.
        outputs: explained outputs, by default its classes.
        layout: prefix tokens and patch grid, if given as argument.
        note: limitation to display with its maps, such as "knows eight drawn shapes only"; see `model_note`.
    """

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
        """Return the preprocessing for a fit.

        Raises:
            UnsupportedModelError: the model does not support this fit.
        """
        if fit == "native" and (self.input.patch_size is None or not self.input.dynamic):
            raise UnsupportedModelError(
                f"fit='native' requires a model for images of any size; {self.id} requires "
                f"{self.input.size[0]} × {self.input.size[1]} pixels. Build it with dynamic_img_size=True, or use "
                "fit='pad'."
            )
        return Preprocessing(self.input, fit)


def read_facts(
    model: nn.Module,
    *,
    data_config: Any = None,
    class_names: ClassNames | None = None,
    activation: str | None = None,
    layout: TokenLayout | None = None,
    name: str | None = None,
    outputs: Any = None,
) -> ModelFacts:
    """Read the metadata of a model; arguments override it.

    Raises:
        ModelError: neither the model nor `data_config` gives the normalisation; or there is not one name per class.
        OptionError: an argument is invalid.

    >>> import timm
    >>> facts = read_facts(timm.create_model("vit_tiny_patch16_224", num_classes=5))
    >>> facts.id, facts.input.size, facts.outputs.count, facts.outputs.activation
    ('vit_tiny_patch16_224', (224, 224), 5, 'softmax')
    """
    spec = read_input_spec(model, data_config)
    check_layout(layout)
    outputs = _outputs(model, outputs, class_names, activation)
    name = model_id(model) if name is None else check_name(name)
    return ModelFacts(name, spec, outputs, layout, model_note(model))


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
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    default = config.get("activation") or library_reading(model) or "softmax"
    return Outputs(None, names, count, activation or default)


def check_name(name: str) -> str:
    """Return a model name as one line; raise OptionError if it is empty or not a string."""
    if not isinstance(name, str) or not name.strip():
        raise OptionError(f"Expected a name for the model, such as 'my ViT, epoch 40', got {name!r:.80}.")
    return printable(name.strip())


def model_id(model: nn.Module) -> str:
    """Return the name of a model: of its weights if known, otherwise of its architecture or class.

    timm tags models even if their weights are random or replaced, so the tag is used only for weights that `load_model`
    has loaded and that have not changed since.
    """
    model = unwrap(model)
    name, changes = getattr(model, "_loaded_as", ("", 0))
    if name and _changes(model) <= changes:
        return str(name)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    return str(config.get("architecture") or library_id(model) or type(model).__name__)


def model_note(model: nn.Module) -> str:
    """Return the note of a model, or an empty string.

    This is the attribute `note` of the model or one of its modules, or `note` in timm's `pretrained_cfg` or the config
    of transformers. Models like DETR without a note have one on their tokens.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    >>> model.pretrained_cfg["note"] = "trained on one hospital's images"
    >>> model_note(model)
    "trained on one hospital's images"
    """
    for module in model.modules():
        timm_config: Any = getattr(module, "pretrained_cfg", None) or {}
        config = getattr(module, "config", None)
        for note in (getattr(module, "note", None), timm_config.get("note"), getattr(config, "note", None)):
            if note and isinstance(note, str):
                return printable(note)
    # DETR and its variants: a convolutional backbone below the transformer.
    if any({"backbone", "input_projection"} <= module._modules.keys() for module in model.modules()):
        return _OVERLAPPING
    return ""


def remember_name(model: nn.Module, name: str) -> None:
    """Store the name of a model's weights, unless its head has a different class count and is thus new."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    architecture, tag, count = (config.get(key) for key in ("architecture", "tag", "num_classes"))
    if timm.is_model(name) and architecture and tag:
        name = f"{architecture}.{tag}"
    if class_count(model) in (None, 0, count):
        model._loaded_as = name, _changes(model)  # type: ignore[assignment]


def _changes(model: nn.Module) -> int:
    """Return how often the weights were modified, by torch's version counters; a copy starts at 0."""
    return sum(weight._version for weight in model.parameters() if not weight.is_inference())


def class_names_of(model: nn.Module) -> list[str] | None:
    """Return the class names of a model, or ImageNet's if the class count matches; otherwise None."""
    model = unwrap(model)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    count = class_count(model)
    if not count:
        return None
    names = library_class_names(model)
    if names is not None:
        return names
    names, described = config.get("label_names"), config.get("label_descriptions")
    if isinstance(names, list | tuple) and names and len(names) == count:
        return [str(described.get(str(name), name)) if isinstance(described, Mapping) else str(name) for name in names]
    return _imagenet_names(infer_imagenet_subset({"num_classes": count}))


@lru_cache(maxsize=8)
def wordnet_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...] | None:
    """Return the WordNet id and synonyms of each class if these are ImageNet's classes; otherwise None.

    More than 90 % of the names must match, as libraries use different cases, synonyms and words.

    >>> wordnet_of(("cat", "dog")) is None
    True
    """
    subset = infer_imagenet_subset({"num_classes": len(names)})
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    known = tuple((id, *info.label_name_to_description(id).split(", ")) for id in info.label_names())
    pairs = zip(names, known, strict=True)
    matches = sum(name.split(", ")[0].lower() in map(str.lower, synonyms) for name, synonyms in pairs)
    return known if matches > 0.9 * len(names) else None


@cache
def _imagenet_names(subset: str | None) -> list[str] | None:
    return _shortest_unique(ImageNetInfo(subset).label_descriptions()) if subset else None


def _shortest_unique(descriptions: Sequence[str]) -> list[str]:
    """Return the shortest unique prefix of each class's comma-separated names."""
    parts = [text.split(", ") for text in descriptions]
    names = [part[0] for part in parts]
    for length in range(2, 6):
        count = Counter(names)
        names = [", ".join(part[:length]) if count[name] > 1 else name for part, name in zip(parts, names, strict=True)]
    return names


def read_input_spec(model: nn.Module, data_config: Any = None) -> InputSpec:
    """Return the input spec of a model from `pretrained_cfg` and `patch_embed`; `data_config` overrides entries.

    For transformers and torchvision, the size is read from the model, and the normalisation from the image processor
    saved with the weights or from `data_config`.

    Raises:
        ModelError: neither the model nor `data_config` gives the normalisation.
        OptionError: `checked_data_config` does not support this `data_config`.
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
    embed = getattr(transformer, "patch_embed", None)
    _check_input(config, model)
    channels, height, width = config["input_size"]
    built_for = getattr(embed, "img_size", None)
    if built_for is not None and "input_size" not in given:
        height, width = built_for
    stem = (module for module in embed.modules() if isinstance(module, nn.Conv2d)) if embed is not None else iter(())
    channels = int(getattr(next(stem, None), "in_channels", channels))
    # As stated: for other channels timm repeats the mean of RGB.
    stated = {**config, **(getattr(model, "pretrained_cfg", None) or {}), **given}
    if channels not in (1, 3) and not len(stated["mean"]) == len(stated["std"]) == channels:
        raise ModelError(
            f"{model_id(model)} requires images of {channels} channels, but mean has {len(stated['mean'])} values and "
            f"std {len(stated['std'])}. Pass data_config with a mean and a std for each channel, in the units of your "
            "images."
        )
    patch = getattr(embed, "patch_size", None) if embedding is None else embedding.patch_size
    spec = InputSpec(
        (int(height), int(width)),
        channels,
        tuple(config["mean"]),
        tuple(config["std"]),
        str(config["interpolation"]),
        float(config["crop_pct"]),
        config["crop_mode"],
        None if patch is None else (patch, patch) if isinstance(patch, int) else (int(patch[0]), int(patch[1])),
        bool(getattr(transformer, "dynamic_img_size", False)) or (embedding is not None and embedding.dynamic),
    )
    if channels == 1:
        spec = replace(spec, mean=spec.mean[:1] * 3, std=spec.std[:1] * 3)
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
