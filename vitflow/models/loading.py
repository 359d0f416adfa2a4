"""Load a model by name: a timm id, hf-hub:, local-dir:, a folder or file, or `demo`."""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from vitflow.errors import ModelError, OptionError, VitflowWarning
from vitflow.files import is_file, is_folder
from vitflow.models import fitting
from vitflow.models.checkpoints import Checkpoint, ClassNames, checked_class_names, read_checkpoint
from vitflow.models.facts import remember_name
from vitflow.models.hub import create_model, is_of_transformers, load_open_clip, load_transformers, without_values
from vitflow.models.libraries import class_count

# Parameters allowed beyond twice those of the file, for classes that the file lacks.
_EXTRA_PARAMETERS = 25_000_000


def load_model(
    name: str | Path,
    *,
    checkpoint: str | Path | None = None,
    num_classes: int | None = None,
    class_names: ClassNames | None = None,
    dynamic_img_size: bool = False,
    **options: Any,
) -> nn.Module:
    """Load a model by name, in eval mode, on the CPU.

    Args:
        name: a timm model id with or without tag ("vit_base_patch16_224.augreg2_in21k_ft_in1k");
            "hf-hub:owner/repo"; "local-dir:folder" or the folder itself (config.json and weights, as saved by timm);
            a `.safetensors` file with an architecture in its metadata; "demo", the bundled model; a transformers model
            by id ("openai/clip-vit-base-patch16") or folder; "open_clip:ViT-B-32/openai"; or "demo-text", the bundled
            image–text model.
        checkpoint: weights to load instead of those from the hub: safetensors, or a torch file loaded with
            `weights_only=True`. A class count or image size that differs from the model's is taken from the file.
        num_classes: number of classes of the model.
        class_names: a file of class names (one per line, or JSON), the names in order, or {index: name}.
        dynamic_img_size: build a timm model for images of any size (required for fit="native").
        options: further keyword arguments for `timm.create_model`.

    Raises:
        ModelError: the model is unknown, the hub is unreachable, or the weights do not fit; with a remedy.

    >>> model = load_model("demo")
    >>> model.training
    False
    """
    name = str(name)
    model: nn.Module
    if name.startswith("open_clip:") or is_of_transformers(name):
        if checkpoint is not None or num_classes is not None:
            raise OptionError(f"{name!r} includes weights: omit the checkpoint and the number of classes.")
        return (load_open_clip if name.startswith("open_clip:") else load_transformers)(name)
    if dynamic_img_size:
        options["dynamic_img_size"] = True
    if name == "demo":
        model = _demo(checkpoint, options)
    else:
        name, checkpoint = _locate(name, checkpoint)
        checkpoint = checkpoint or _folder_weights(name)
        if checkpoint is not None:
            model = _from_checkpoint(name, read_checkpoint(checkpoint), Path(checkpoint), num_classes, options)
            # A name with a tag identifies the weights of a file; an architecture or a folder's config does not.
            known = timm.is_model(name) and "." in name
        else:
            if num_classes is not None:
                options["num_classes"] = num_classes
            model = create_model(name, pretrained=True, **options)
            known = not name.startswith("local-dir:")
        if known:
            remember_name(model, name)
    if class_names is not None:
        _name_classes(model, class_names)
    model.eval()
    return model


def _demo(checkpoint: str | Path | None, options: dict[str, Any]) -> nn.Module:
    from vitflow.demo import load_demo_model

    if checkpoint is not None:
        raise OptionError("The demo model includes weights: omit the checkpoint, or choose another model.")
    model: nn.Module = load_demo_model(**options)
    return model


def _locate(name: str, checkpoint: str | Path | None) -> tuple[str, str | Path | None]:
    """Convert a path for timm: a folder to "local-dir:", a weights file to architecture and checkpoint."""
    path = Path(name)
    if name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        return name, checkpoint
    if is_folder(path):
        return f"local-dir:{path}", checkpoint
    if is_file(path):
        metadata = read_checkpoint(path).metadata
        if (path.parent / "config.json").is_file() and "architecture" not in metadata:
            return f"local-dir:{path.parent}", checkpoint or path
        if "architecture" not in metadata:
            raise ModelError(
                f"{path} has no architecture in its metadata: pass the timm id as the model and this file as the "
                "checkpoint."
            )
        if not timm.is_model(metadata["architecture"]):
            raise ModelError(
                f"Expected a timm model as the architecture of {path}, got {metadata['architecture'][:60]!r}."
            )
        return metadata["architecture"], checkpoint or path
    return name, checkpoint


def _folder_weights(name: str) -> Path | None:
    """Return the weights file in a folder saved by timm; vitflow loads it to apply its checks."""
    if not name.startswith("local-dir:"):
        return None
    folder = Path(name.removeprefix("local-dir:"))
    files = (folder / file for file in ("model.safetensors", "pytorch_model.bin"))
    return next((file for file in files if file.is_file()), None)


def _from_checkpoint(
    name: str, checkpoint: Checkpoint, path: Path, num_classes: int | None, options: dict[str, Any]
) -> nn.Module:
    """Build the model with the file's class count and image size, and load the file's weights."""
    weights, notes = checkpoint.weights, []
    options = {**fitting.architecture_options(checkpoint.metadata, path), **options}
    config = fitting.input_config(checkpoint.metadata, path)
    with without_values():
        draft = create_model(name, pretrained=False, **options)
    fitting.check_numbers(weights, draft, path)
    if _count(draft.state_dict()) > 2 * _count(weights) + _EXTRA_PARAMETERS:
        raise fitting.mismatch_error(weights, weights, draft, path, name)  # before memory is allocated
    classifier, rows = fitting.class_rows(weights, draft)
    if num_classes is None and rows is not None and class_count(draft) not in (None, rows):
        num_classes = rows
        notes.append(f"{path.name} has {rows} classes, {name} by default {class_count(draft)}: using {rows}.")
    elif num_classes is None and classifier and f"{classifier}.weight" not in weights:
        num_classes = 0
        notes.append(f"{path.name} has no classifier weights: {name} is loaded without classes.")
    if num_classes is not None:
        options["num_classes"] = num_classes
    side = fitting.trained_side(weights, draft)
    if side is not None and "img_size" not in options:
        options["img_size"] = side
        notes.append(f"{path.name} was trained on {side} × {side} pixels, unlike {name}: using {side} × {side}.")
    model: nn.Module = create_model(name, pretrained=False, **options)
    _load_weights(model, weights, path, name)
    for note in notes:  # only once the weights are known to fit
        warnings.warn(note, VitflowWarning, stacklevel=3)
    if checkpoint.class_names is not None:
        _name_classes(model, checkpoint.class_names)
    pretrained_cfg: dict[str, Any] = getattr(model, "pretrained_cfg", {})
    pretrained_cfg.update(config)
    return model


def _count(weights: Mapping[str, Tensor]) -> int:
    return sum(weight.numel() for weight in weights.values())


def _load_weights(model: nn.Module, raw: Mapping[str, Tensor], path: Path, name: str) -> None:
    adapt = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        weights = adapt(dict(raw), model) if adapt else raw
    except Exception as error:  # timm assumes weights that fit
        raise fitting.mismatch_error(raw, raw, model, path, name, type(error).__name__) from error
    fitting.check_numbers(weights, model, path)
    try:
        result = model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise fitting.mismatch_error(raw, weights, model, path, name, str(error).splitlines()[0]) from error
    if result.missing_keys or result.unexpected_keys:
        raise fitting.mismatch_error(raw, weights, model, path, name)


def _name_classes(model: nn.Module, names: ClassNames) -> None:
    labels = checked_class_names(names, class_count(model))
    config = getattr(model, "pretrained_cfg", None)
    model.pretrained_cfg = {**(config or {}), "label_names": labels, "label_descriptions": None}  # type: ignore[assignment]
