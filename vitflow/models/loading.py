"""Load a model (timm id, hf-hub:, local-dir:, a folder or file, `demo`), and say what pictures it wants to see."""

import json
import logging
import socket
import sys
import urllib.request
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import timm
import torch
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_model_data_config
from torch import nn

from vitflow.errors import ModelError, OptionError, VitflowWarning
from vitflow.models.anatomy import transformer_of, unwrap
from vitflow.models.checkpoints import Checkpoint, read_checkpoint, read_class_names
from vitflow.models.libraries import (
    class_count,
    embedding_of,
    from_processor,
    library_class_names,
    library_data_config,
    library_id,
)
from vitflow.pictures.geometry import CropMode


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


def load_model(
    name: str | Path,
    *,
    checkpoint: str | Path | None = None,
    num_classes: int | None = None,
    class_names: str | Path | Sequence[str] | None = None,
    dynamic_img_size: bool = False,
    **options: Any,
) -> nn.Module:
    """Load a model by name, in eval mode, on the CPU.

    Args:
        name: a timm model id, with its tag or without ("vit_base_patch16_224.augreg2_in21k_ft_in1k");
            "hf-hub:owner/repo"; "local-dir:folder" or the folder itself (config.json beside the weights, as timm saves
            them); a `.safetensors` file that names its own architecture; or "demo", the model that vitflow ships.
        checkpoint: weights to load instead of those from the hub: safetensors, or a torch file loaded with
            `weights_only=True`. A class count or picture size that differs from the model's is taken from the file.
        num_classes: build the model with that many classes.
        class_names: a file of class names (one per line, or JSON), or the names themselves.
        dynamic_img_size: build the model so that it takes pictures of any size (needed for fit="native").
        options: further keyword arguments for `timm.create_model`.

    Raises:
        ModelError: no such model, the hub cannot be reached, or the weights do not fit; the message names the remedy.

    >>> model = load_model("demo")
    >>> model.training
    False
    """
    name = str(name)
    if dynamic_img_size:
        options["dynamic_img_size"] = True
    model: nn.Module
    if name == "demo":
        model = _demo(checkpoint, options)
    else:
        name, checkpoint = _locate(name, checkpoint)
        if checkpoint is not None:
            model = _from_checkpoint(name, read_checkpoint(checkpoint), Path(checkpoint), num_classes, options)
        else:
            if num_classes is not None:
                options["num_classes"] = num_classes
            model = _create(name, pretrained=True, **options)
    if class_names is not None:
        _name_classes(model, class_names)
    model.eval()
    return model


def _demo(checkpoint: str | Path | None, options: dict[str, Any]) -> nn.Module:
    from vitflow.demo import load_demo_model

    if checkpoint is not None:
        raise OptionError("The demo model brings its own weights: leave out the checkpoint, or name another model.")
    model: nn.Module = load_demo_model(**options)
    return model


def _locate(name: str, checkpoint: str | Path | None) -> tuple[str, str | Path | None]:
    """Turn a path into what timm loads: a folder into "local-dir:", a weights file into architecture and checkpoint."""
    path = Path(name)
    if name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        return name, checkpoint
    if path.is_dir():
        return f"local-dir:{path}", checkpoint
    if path.is_file():
        metadata = read_checkpoint(path).metadata if path.suffix == ".safetensors" else {}
        if (path.parent / "config.json").is_file() and "architecture" not in metadata:
            return f"local-dir:{path.parent}", checkpoint or path
        if "architecture" not in metadata:
            raise ModelError(
                f"{path} holds weights but does not name their architecture: give the timm id as the model and this "
                "file as the checkpoint."
            )
        return metadata["architecture"], checkpoint or path
    return name, checkpoint


def _create(name: str, **options: Any) -> Any:
    """`timm.create_model`, with errors that name the remedy."""
    known = not name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))
    if known and not timm.is_model(name):
        close = get_close_matches(name.split(".")[0], timm.list_models(), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(f"Unknown model {name!r}.{hint} `vitflow models PATTERN` lists the known ones.")
    try:
        with _quiet_hub():
            return timm.create_model(name, **options)
    except RuntimeError as error:
        if "pretrained tag" in str(error):
            tags = ", ".join(sorted(timm.list_pretrained(f"{name.split('.')[0]}.*"))) or "none"
            raise ModelError(f"No pretrained weights are known for {name!r}. Known: {tags}.") from error
        raise ModelError(f"{name!r} cannot be loaded: {error}") from error
    except TypeError as error:
        raise ModelError(f"{name!r} cannot be built with these options: {error}.") from error
    except (OSError, ValueError) as error:  # every network and file error of the hub client is an OSError
        if name.startswith("local-dir:"):
            raise ModelError(
                f"{name!r} cannot be loaded: {error}. Expected a folder with config.json and model.safetensors."
            ) from error
        raise ModelError(
            f"The weights of {name!r} cannot be fetched from the Hugging Face hub ({type(error).__name__}) and are not "
            "in its cache. Remedies: a weights file (--checkpoint FILE, checkpoint=…), a folder (local-dir:FOLDER), or "
            "the bundled model (demo)."
        ) from error


@contextmanager
def _quiet_hub() -> Iterator[None]:
    """Keep the hub client from minutes of retries where there is no network: the cache is then used alone."""
    from huggingface_hub import constants

    logger, offline = logging.getLogger("huggingface_hub"), constants.HF_HUB_OFFLINE
    level = logger.level
    logger.setLevel(logging.ERROR)
    if not offline and not urllib.request.getproxies():
        host = urlparse(constants.ENDPOINT).hostname
        try:
            socket.getaddrinfo(host, 443)
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logger.setLevel(level)


def _from_checkpoint(
    name: str, checkpoint: Checkpoint, path: Path, num_classes: int | None, options: dict[str, Any]
) -> nn.Module:
    """Build the model without weights, with the file's own class count and picture size, and load the file into it."""
    extra = checkpoint.metadata.get("architecture_options")
    if extra is not None:
        options = {**json.loads(extra), **options}
    with torch.device("meta"):
        draft = _create(name, pretrained=False, **options)
    classifier = getattr(draft, "pretrained_cfg", {}).get("classifier")
    classifier = classifier[0] if isinstance(classifier, list | tuple) else classifier
    head = checkpoint.weights.get(f"{classifier}.weight")
    if num_classes is None and head is not None and len(head) != getattr(draft, "num_classes", len(head)):
        num_classes = len(head)
        _tell(f"{path.name} has {num_classes} classes, {name} by default {draft.num_classes}: taking the file's.")
    elif num_classes is None and classifier and head is None:
        num_classes = 0
        _tell(f"{path.name} has no classifier weights: {name} is loaded without classes.")
    if num_classes is not None:
        options["num_classes"] = num_classes
    side = _trained_side(checkpoint, draft)
    if side is not None and "img_size" not in options:
        options["img_size"] = side
        _tell(
            f"{path.name} was trained on {side} × {side} pixels, {name} by default on others: taking the file's size."
        )
    model: nn.Module = _create(name, pretrained=False, **options)
    _load_weights(model, checkpoint, path, name)
    if checkpoint.class_names is not None:
        _name_classes(model, checkpoint.class_names)
    config: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    for key in ("mean", "std", "input_size", "crop_pct", "interpolation", "crop_mode", "activation"):
        if key in checkpoint.metadata:
            text = checkpoint.metadata[key]
            config[key] = text if key in ("interpolation", "crop_mode", "activation") else json.loads(text)
    return model


def _trained_side(checkpoint: Checkpoint, draft: nn.Module) -> int | None:
    """Picture size that a file's square position grid stands for, where it differs from the model's; else None."""
    weight, own = checkpoint.weights.get("pos_embed"), getattr(draft, "pos_embed", None)
    if weight is None or own is None or weight.ndim != 3 or weight.shape == own.shape:
        return None
    prefix = 0 if getattr(draft, "no_embed_class", False) else int(getattr(draft, "num_prefix_tokens", 0))
    side = round((weight.shape[1] - prefix) ** 0.5)
    embed: Any = getattr(draft, "patch_embed", None)
    if embed is None or side * side != weight.shape[1] - prefix:
        return None
    return int(side * embed.patch_size[0])


def _load_weights(model: nn.Module, checkpoint: Checkpoint, path: Path, name: str) -> None:
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        weights = adapt(dict(checkpoint.weights), model) if adapt else checkpoint.weights
        result = model.load_state_dict(weights, strict=False)
    except (RuntimeError, KeyError, AttributeError, ValueError) as error:
        raise ModelError(f"The weights in {path} do not fit {name}: {error}") from error
    if result.missing_keys or result.unexpected_keys:
        missing, extra = result.missing_keys, result.unexpected_keys
        raise ModelError(
            f"The weights in {path} do not fit {name}: {len(missing)} are missing ({', '.join(missing[:3]) or '–'}), "
            f"{len(extra)} are unknown to it ({', '.join(extra[:3]) or '–'}). Is it the right model id for this file?"
        )


def _name_classes(model: nn.Module, names: str | Path | Sequence[str]) -> None:
    found = read_class_names(names) if isinstance(names, str | Path) else [str(name) for name in names]
    count = getattr(model, "num_classes", len(found))
    if len(found) != count:
        raise ModelError(f"Expected {count} class names, one for each class of the model, got {len(found)}.")
    config = getattr(model, "pretrained_cfg", None)
    model.pretrained_cfg = {**(config or {}), "label_names": found, "label_descriptions": None}  # type: ignore[assignment]


def _tell(message: str) -> None:
    warnings.warn(message, VitflowWarning, stacklevel=4)


def model_id(model: nn.Module) -> str:
    """The name a model goes by: its timm id with tag, the name transformers loaded it by, or its class."""
    model = unwrap(model)
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    architecture, tag = config.get("architecture"), config.get("tag")
    if architecture:
        return f"{architecture}.{tag}" if tag else str(architecture)
    return library_id(model) or type(model).__name__


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
    if names and len(names) == count:
        return [
            str(described[name]) if isinstance(described, Mapping) and name in described else name for name in names
        ]
    return _imagenet_names(infer_imagenet_subset({"num_classes": count}))


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


def read_input_spec(model: nn.Module, data_config: Mapping[str, Any] | None = None) -> InputSpec:
    """What a model wants to see, from its `pretrained_cfg` and `patch_embed`; `data_config` overrides entries.

    Models of transformers and torchvision say their size themselves. Their normalisation is in the image processor's
    settings, which are found where they were saved beside the weights, or else given as `data_config`.

    Raises:
        ModelError: the model does not say how its pictures were normalised, and `data_config` does not either.
    """
    model = unwrap(model)
    embedding = embedding_of(model)
    given = dict(data_config or {})
    if "image_mean" in given:
        given = from_processor(given, 3 if embedding is None else embedding.channels)
    given = library_data_config(model) | given
    if not getattr(model, "pretrained_cfg", None) and not {"input_size", "mean", "std"} <= given.keys():
        raise ModelError(
            f"{type(model).__name__} does not say which pictures it was trained on. Pass data_config with at least "
            "input_size=(3, height, width), mean and std, or processor.to_dict() of its transformers image processor; "
            "a wrong normalisation gives wrong maps without an error."
        )
    config: dict[str, Any] = {**resolve_model_data_config(model), **given}
    transformer: Any = transformer_of(model)
    embed = getattr(transformer, "patch_embed", None)
    channels, height, width = config["input_size"]
    built_for = getattr(embed, "img_size", None)
    if built_for is not None and "input_size" not in given:
        height, width = built_for
    stem = (module for module in embed.modules() if isinstance(module, nn.Conv2d)) if embed is not None else iter(())
    channels = int(getattr(next(stem, None), "in_channels", channels))
    if channels not in (1, 3):
        raise ModelError(f"{model_id(model)} takes pictures of {channels} channels; vitflow reads RGB or grey ones.")
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
