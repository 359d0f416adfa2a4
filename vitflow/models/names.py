"""Names of a model and of its classes, and notes about it."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from vitflow.errors import ModelError, OptionError, printable
from vitflow.models.anatomy import transformer_of
from vitflow.models.parts import CLASSIFIERS, library_id, pretrained_of, unwrap

# Class names as an argument: a file of names, the names in order, {index: name} or {name: index}.
ClassNames = str | os.PathLike[str] | Sequence[str] | Mapping[int, str] | Mapping[str, int]
_LARGEST_NAMES = 64 * 2**20
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
    return _imagenet_names(infer_imagenet_subset({"num_classes": count}))


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


@lru_cache(maxsize=8)
def wordnet_of(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...] | None:
    """Return the WordNet id and synonyms of each class if these are ImageNet's classes; otherwise None.

    More than 90 % of the names must match, as libraries use different cases, synonyms and words.
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


def _names(value: Any) -> list[str] | None:
    """Return class names from a list, a complete mapping with their indices, or either as JSON; otherwise None."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    if isinstance(value, Mapping):
        value = _in_order(value)
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Set):
        return None
    names = list(value)
    return [str(name) for name in names] if all(isinstance(name, str | int | float) for name in names) else None


def _in_order(mapping: Mapping[Any, Any]) -> list[Any] | None:
    """Return the names of {index: name}, or of {name: index} for texts and integers; None if an index is missing.

    >>> _in_order({1: "dog", 0: "cat"}), _in_order({"dog": 1, "cat": 0}), _in_order({0: "cat", 2: "dog"})
    (['cat', 'dog'], ['cat', 'dog'], None)
    """
    names = [(index, name) for name, index in mapping.items() if isinstance(name, str) and type(index) is int]
    for pairs in (names, list(mapping.items())):
        with suppress(TypeError, ValueError, KeyError):
            by_index = {int(index): name for index, name in pairs}
            return [by_index[index] for index in range(len(mapping))]
    return None


def checked_class_names(names: ClassNames, count: int | None) -> list[str]:
    """Return class names given as an argument, one for each class of the model; `count` is None if not known yet."""
    checked = read_class_names(names) if isinstance(names, str | os.PathLike) else _names(names)
    if checked is None:
        raise ModelError(
            "Expected class names as a file, a list, {index: name} or {name: index} with every index from 0, got "
            f"{names!r:.80}."
        )
    check_name_count(checked, count)
    return checked


def check_name_count(names: Sequence[str], count: int | None) -> None:
    """Raise ModelError unless there are `count` names."""
    if count is not None and len(names) != count:
        raise ModelError(f"Expected {count} class names, one for each class of the model, got {len(names)}.")


def read_class_names(path: str | os.PathLike[str]) -> list[str]:
    """Read class names from a file: JSON (a list, {index: name} or {name: index}), or text with one name per line."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > _LARGEST_NAMES:
            raise ModelError(f"Expected class names of at most {_LARGEST_NAMES:,} bytes, got {size:,}: {path}.")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read class names from {path}: {error}.") from error
    is_json = path.suffix.lower() == ".json"
    names = _names(text) if is_json else [line.strip() for line in text.splitlines() if line.strip()]
    if not names:
        expected = "a JSON list of names, or an object of names and indices," if is_json else "one class name per line"
        raise ModelError(f"Expected {expected} in {path}, got {'something else' if is_json else 'none'}.")
    return names
