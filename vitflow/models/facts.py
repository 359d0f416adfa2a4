"""What a model says of itself: its name, the images it wants to see, its classes."""

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


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What is known of a model, read once.

    Attributes:
        id: the name that it goes by.
        input: what it wants to see.
        outputs: what it can be asked about, by default its classes.
        layout: prefix tokens and patch grid, where the caller told them.
        note: what a reader of its maps must know, such as "knows eight drawn shapes only": see `model_note`.
    """

    id: str
    input: InputSpec
    outputs: Outputs
    layout: TokenLayout | None = None
    note: str = ""

    def fingerprint(self) -> dict[str, Any]:
        """The facts, ready for JSON; the class names as a hash."""
        names = None if self.outputs.names is None else json.dumps(self.outputs.names).encode()
        return {
            "model": self.id,
            "input": asdict(self.input),
            "activation": self.outputs.activation,
            "class_names_sha256": None if names is None else hashlib.sha256(names).hexdigest(),
            "layout": None if self.layout is None else asdict(self.layout),
            **({"outputs": own} if (own := self.outputs.fingerprint()) else {}),
            **({"note": self.note} if self.note else {}),
        }

    def preprocessing(self, fit: Fit) -> Preprocessing:
        """How images become its input.

        Raises:
            UnsupportedModelError: it does not take the images of this fit.
        """
        if fit == "native" and (self.input.patch_size is None or not self.input.dynamic):
            raise UnsupportedModelError(
                f"fit='native' needs a model that takes images of any size, and {self.id} was built for "
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
    """Ask a model what it is; what the caller tells goes before what it says.

    Raises:
        ModelError: it does not say how its images were normalised, and `data_config` does not either; or the class
            names are not as many as its classes.
        OptionError: there is no such activation; the answers are none; the layout is no TokenLayout; the name is none.

    >>> import timm
    >>> facts = read_facts(timm.create_model("vit_tiny_patch16_224", num_classes=5))
    >>> facts.id, facts.input.size, facts.outputs.count, facts.outputs.activation
    ('vit_tiny_patch16_224', (224, 224), 5, 'softmax')
    """
    spec = read_input_spec(model, data_config)
    check_layout(layout)
    outputs = _outputs(model, outputs, class_names, activation)
    called = model_id(model) if name is None else check_name(name)
    return ModelFacts(called, spec, outputs, layout, model_note(model))


def _outputs(model: nn.Module, told: Any, class_names: ClassNames | None, activation: str | None) -> Outputs:
    """What a model can be asked about: what the caller tells, or its classes."""
    count = class_count(model) if told is None else None
    names = None if class_names is None else tuple(checked_class_names(class_names, count))
    if isinstance(told, Outputs):
        return replace(told, names=names or told.names, activation=activation or told.activation)
    if told is not None:
        return outputs_of(told, names, activation)
    if class_names is None:
        own_names = class_names_of(model)
        names = None if own_names is None else tuple(own_names)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    own = config.get("activation") or library_reading(model) or "softmax"
    return Outputs(None, names, count, activation or own)


def check_name(name: str) -> str:
    """A name for a model as one line; OptionError where it is none."""
    if not isinstance(name, str) or not name.strip():
        raise OptionError(f"Expected a name for the model, such as 'my ViT, epoch 40', got {name!r:.80}.")
    return printable(name.strip())


def model_id(model: nn.Module) -> str:
    """The name a model goes by: what its weights were loaded as, else its architecture, or its class.

    timm writes a tag into every model of its own, also where the weights are random or somebody else's: it counts only
    where `load_model` has loaded these weights under it, and nobody has changed them since.
    """
    model = unwrap(model)
    name, changes = getattr(model, "_loaded_as", ("", 0))
    if name and _changes(model) <= changes:
        return str(name)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    return str(config.get("architecture") or library_id(model) or type(model).__name__)


def model_note(model: nn.Module) -> str:
    """Return the note for readers that a model carries, or an empty string.

    It is the attribute `note` of the model or of one of its modules, or "note" in timm's `pretrained_cfg` or in the
    configuration of a model of transformers.

    >>> import timm
    >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    >>> model.pretrained_cfg["note"] = "trained on one hospital's images"
    >>> model_note(model)
    "trained on one hospital's images"
    """
    for module in model.modules():
        timm_config: Any = getattr(module, "pretrained_cfg", None) or {}
        places = (
            getattr(module, "note", None),
            timm_config.get("note"),
            getattr(getattr(module, "config", 0), "note", 0),
        )
        for note in places:
            if note and isinstance(note, str):
                return printable(note)
    return ""


def remember_name(model: nn.Module, name: str) -> None:
    """Keep the name that a model's weights were loaded by, unless some of them are new: a head of other classes."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    architecture, tag, count = (config.get(key) for key in ("architecture", "tag", "num_classes"))
    if timm.is_model(name) and architecture and tag:
        name = f"{architecture}.{tag}"
    if class_count(model) in (None, 0, count):
        model._loaded_as = name, _changes(model)  # type: ignore[assignment]


def _changes(model: nn.Module) -> int:
    """How often the weights were written to, as torch counts it; a copy counts anew."""
    return sum(weight._version for weight in model.parameters() if not weight.is_inference())


def class_names_of(model: nn.Module) -> list[str] | None:
    """The names of a model's classes: its own, or ImageNet's where the class count is ImageNet's; else None."""
    model = unwrap(model)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    count = class_count(model)
    if not count:
        return None
    own = library_class_names(model)
    if own is not None:
        return own
    names, described = config.get("label_names"), config.get("label_descriptions")
    if isinstance(names, list | tuple) and names and len(names) == count:
        return [str(described.get(str(name), name)) if isinstance(described, Mapping) else str(name) for name in names]
    return _imagenet_names(infer_imagenet_subset({"num_classes": count}))


@lru_cache(maxsize=8)
def wordnet_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...] | None:
    """For each class its WordNet id and all its names there, where these are the classes of ImageNet; else None.

    Names of ImageNet's classes differ from library to library in case, in synonyms and in a few words.

    >>> wordnet_of(("cat", "dog")) is None
    True
    """
    subset = infer_imagenet_subset({"num_classes": len(names)})
    if subset is None:
        return None
    info = ImageNetInfo(subset)
    known = tuple((id, *info.label_name_to_description(id).split(", ")) for id in info.label_names())
    same = sum(name.split(", ")[0].lower() in map(str.lower, called) for name, called in zip(names, known, strict=True))
    return known if same > 0.9 * len(names) else None


@cache
def _imagenet_names(subset: str | None) -> list[str] | None:
    return _shortest_unique(ImageNetInfo(subset).label_descriptions()) if subset else None


def _shortest_unique(descriptions: Sequence[str]) -> list[str]:
    """The first of each class's comma-separated names, or as many as tell it apart from the others."""
    parts = [text.split(", ") for text in descriptions]
    names = [part[0] for part in parts]
    for length in range(2, 6):
        count = Counter(names)
        names = [", ".join(part[:length]) if count[name] > 1 else name for part, name in zip(parts, names, strict=True)]
    return names


def read_input_spec(model: nn.Module, data_config: Any = None) -> InputSpec:
    """What a model wants to see, from its `pretrained_cfg` and `patch_embed`; `data_config` overrides entries.

    Models of transformers and torchvision say their size themselves. Their normalisation is in the image processor's
    settings, which are found where they were saved beside the weights, or else given as `data_config`.

    Raises:
        ModelError: the model does not say how its images were normalised, and `data_config` does not either.
        OptionError: `data_config` is nothing of what `checked_data_config` takes.
    """
    model = unwrap(model)
    embedding = embedding_of(model)
    given = checked_data_config(data_config, 3 if embedding is None else embedding.channels)
    given = library_data_config(model) | given
    if not getattr(model, "pretrained_cfg", None) and not {"input_size", "mean", "std"} <= given.keys():
        raise ModelError(
            f"{type(model).__name__} does not say which images it was trained on. Pass data_config with at least "
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
    if channels not in (1, 3):
        raise ModelError(f"{model_id(model)} takes images of {channels} channels; vitflow reads RGB or grey ones.")
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
    """Raise ModelError where what a model wants to see is said in something else than numbers."""
    for name, count in (("input_size", 3), ("mean", None), ("std", None), ("crop_pct", 0)):
        value = config[name]
        parts = [value] if count == 0 else value
        numbers = isinstance(parts, Sequence) and all(isinstance(part, Real) for part in parts)
        if not numbers or (count and len(parts) != count):
            expected = "a number" if count == 0 else "three numbers"
            raise ModelError(f"Expected {name} of {model_id(model)} to be {expected}, got {str(value)[:60]!r}.")
