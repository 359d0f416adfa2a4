"""Names of a model and of its classes, and notes about it."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from vitflow.errors import OptionError, printable
from vitflow.models.anatomy import transformer_of
from vitflow.models.classes import imagenet_names
from vitflow.models.parts import CLASSIFIERS, library_id, pretrained_of, unwrap

#: Name of the last class of a detector with a softmax.
NO_OBJECT = "no object"
# Activations by the problem type of transformers.
_ACTIVATIONS = {"multi_label_classification": "sigmoid", "regression": "value"}
# Note of models whose tokens are not patches of the image.
_OVERLAPPING = "tokens are cells of a convolutional feature map, whose receptive fields overlap"


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


def remember_name(model: nn.Module, name: str) -> None:
    """Store the name of a model's weights."""
    model._loaded_as = name, _changes(model)  # type: ignore[assignment]


def _changes(model: nn.Module) -> int:
    """Return how often the weights were modified, by torch's version counters; a copy starts at 0."""
    return sum(weight._version for weight in model.parameters() if not weight.is_inference())


def model_note(model: nn.Module) -> str:
    """Return the note of a model, or an empty string.

    This is the attribute `note` of the model or one of its modules, or `note` in timm's `pretrained_cfg` or the config
    of transformers. Models like DETR without a note have one on their tokens.
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


# -- classes ----------------------------------------------------------------------------------------------------------


def class_count(model: nn.Module) -> int | None:
    """Return the number of classes of a model: 0 if its output is features, None if unknown."""
    pretrained: Any = pretrained_of(model)
    if pretrained is not None:
        if any(hasattr(pretrained, name) for name in CLASSIFIERS):
            return int(pretrained.config.num_labels)
        return None if _has_head(model, pretrained) else 0
    count, encoder = getattr(model, "num_classes", None), transformer_of(model)
    if isinstance(count, int):
        return count
    features = encoder is not model and getattr(encoder, "num_classes", None) == 0 and not _has_head(model, encoder)
    return 0 if features else None


def _has_head(model: nn.Module, encoder: nn.Module) -> bool:
    """Return True if a module around an encoder has matrices of its own."""
    inside = set(map(id, encoder.parameters()))
    return any(weight.ndim > 1 and id(weight) not in inside for weight in model.parameters())


def class_activation(model: nn.Module) -> str:
    """Return the activation of a model's classes: that of its timm configuration, or by its problem type."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    problem: Any = getattr(getattr(pretrained_of(model), "config", None), "problem_type", None)
    return str(config.get("activation") or _ACTIVATIONS.get(problem, "softmax"))


def class_names_of(model: nn.Module) -> list[str] | None:
    """Return the class names of a model, or ImageNet's if the class count matches; otherwise None."""
    model = unwrap(model)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    count = class_count(model)
    if not count:
        return None
    labels = config_labels(pretrained_of(model))
    if len(labels) == count and labels != [f"LABEL_{index}" for index in range(count)]:
        return labels
    names, described = config.get("label_names"), config.get("label_descriptions")
    if isinstance(names, list | tuple) and names and len(names) == count:
        return [str(described.get(str(name), name)) if isinstance(described, Mapping) else str(name) for name in names]
    return imagenet_names(count)


def config_labels(model: nn.Module | None) -> list[str]:
    """Return the labels in the configuration of a transformers model, by index; empty for other models."""
    names: Any = getattr(getattr(model, "config", None), "id2label", None) or {}
    return [str(names[index]) for index in sorted(names, key=int)]


def output_names(model: nn.Module, given: list[str] | None, count: int) -> tuple[str, ...] | None:
    """Return the name of each output: those given, or of the model's configuration; the last may be "no object"."""
    listed = given or config_labels(model)
    if len(listed) in (count, count - 1):
        return (*listed, NO_OBJECT)[:count]
    if given:
        raise OptionError(f"Expected {count} class names, or {count - 1} without {NO_OBJECT!r}, got {len(given)}.")
    return None


def is_segmenting(model: nn.Module) -> bool:
    """Return True for a model of transformers for semantic segmentation."""
    name = type(model).__name__
    return name.endswith(("ForSemanticSegmentation", "ForUniversalSegmentation", "ForInstanceSegmentation"))


def has_regions(model: nn.Module) -> bool:
    """Return True for a model of transformers for object detection or segmentation."""
    return is_segmenting(model) or type(model).__name__.endswith("ForObjectDetection")
