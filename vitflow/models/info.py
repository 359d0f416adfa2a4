"""Information on an image model: its name, the preprocessing of its images, and its outputs."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from numbers import Real
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from vitflow.errors import ModelError, OptionError, UnsupportedModelError, VitflowWarning
from vitflow.images import Fit
from vitflow.images.preprocessing import InputSpec, Preprocessing
from vitflow.methods.tokens import TokenLayout, check_layout
from vitflow.models.anatomy import embedding_of, height_width, patch_embed_of, transformer_of
from vitflow.models.classes import checked_class_names
from vitflow.models.data_configs import checked_data_config, default_config, library_data_config
from vitflow.models.names import (
    check_name,
    class_activation,
    class_count,
    class_names_of,
    model_id,
    model_note,
)
from vitflow.models.outputs import Binding, Outputs
from vitflow.models.parts import unwrap


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Display name, preprocessing and explained outputs of a model; its layout if given as argument; `model_note`."""

    id: str
    input: InputSpec
    outputs: Outputs
    layout: TokenLayout | None = None
    note: str = ""

    def fingerprint(self) -> dict[str, Any]:
        """Return the metadata for JSON."""
        return {
            "model": self.id,
            "input": asdict(self.input),
            "activation": self.outputs.activation,
            "class_names": None if self.outputs.names is None else list(self.outputs.names),
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


def read_model_info(binding: Binding) -> ModelInfo:
    """Read the metadata of a model; the settings of an explainer override it.

    >>> import timm
    >>> info = read_model_info(Binding(timm.create_model("vit_tiny_patch16_224", num_classes=5)))
    >>> info.id, info.input.size, info.outputs.count, info.outputs.activation
    ('vit_tiny_patch16_224', (224, 224), 5, 'softmax')
    """
    spec = read_input_spec(binding.model, binding.data_config)
    check_layout(binding.layout)
    outputs = _outputs(binding)
    name = model_id(binding.model) if binding.name is None else check_name(binding.name)
    return ModelInfo(name, spec, outputs, binding.layout, model_note(binding.model))


def _outputs(binding: Binding) -> Outputs:
    """Return the outputs given as argument, or computed by a given function, by default the model's classes."""
    model, outputs, activation = binding.model, binding.outputs, binding.activation
    count = class_count(model) if outputs is None else None
    names = None if binding.class_names is None else tuple(checked_class_names(binding.class_names, count))
    if isinstance(outputs, Outputs):
        return replace(outputs, names=names or outputs.names, activation=activation or outputs.activation)
    if outputs is not None and not callable(outputs):
        raise OptionError(
            f"Expected outputs as prompts(…), similarity_to(…), boxes(…), masks(…), a function of the model's "
            f"output or Outputs, got {outputs!r:.80}. An entry of a dict is outputs=lambda output: output['logits']."
        )
    if outputs is not None:
        count = None if names is None else len(names)
        return Outputs(outputs, names, count, activation or "value", against="the mean of the other outputs")
    if names is None and (model_names := class_names_of(model)) is not None:
        names = tuple(model_names)
    return Outputs(None, names, count, activation or class_activation(model))


def read_input_spec(model: nn.Module, data_config: Any = None) -> InputSpec:
    """Return the input spec of a model from `pretrained_cfg` and `patch_embed`; `data_config` overrides entries.

    For transformers and torchvision, the size is read from the model, and the normalisation from the image processor
    saved with the weights or from `data_config`.
    """
    model = unwrap(model)
    embedding, transformer = embedding_of(model), transformer_of(model)
    embed: Any = patch_embed_of(transformer)
    several = embed is None or isinstance(embed, nn.ModuleList | nn.ModuleDict)  # of groups of channels
    stem = [] if several else [module for module in embed.modules() if isinstance(module, nn.Conv2d)]
    channels = stem[0].in_channels if stem else 3 if embedding is None else embedding.channels
    given = checked_data_config(data_config, channels)
    given = library_data_config(model) | given
    known = getattr(model, "pretrained_cfg", None)
    if not known and "mean" not in given:
        given = default_config(model) | given
    if not known and not {"input_size", "mean", "std"} <= given.keys():
        raise ModelError(
            f"The preprocessing of {type(model).__name__} is unknown. Pass data_config with at least "
            "input_size=(3, height, width), mean and std, or its image processor of transformers, or "
            "weights.transforms() or a Compose of torchvision; a wrong normalisation gives wrong maps without an error."
        )
    config: dict[str, Any] = {**resolve_model_data_config(model), **given}
    _check_input(config, model)
    declared, height, width = config["input_size"]
    built_for = getattr(embed, "img_size", None)
    if built_for is not None and "input_size" not in given:
        height, width = built_for
    channels = stem[0].in_channels if stem else declared
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
