"""Load a model by name: a timm id, hf-hub:, local-dir:, a folder or file, or `demo`."""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vitflow.errors import ModelError, OptionError, VitflowWarning
from vitflow.files import is_file, is_folder
from vitflow.models.architectures import infer_parts, infer_sizes, plain_model_of, size_hint, with_plain_head
from vitflow.models.checkpoints import WHOLE, Weights, weights_for
from vitflow.models.classes import ClassNames, checked_class_names
from vitflow.models.hub import create_model, is_of_transformers, load_open_clip, load_transformers
from vitflow.models.names import class_count, remember_name

# Arguments of `Explainer` that timm would take for options of a model.
_OF_EXPLAINER = {"device", "dtype", "fit", "data_config", "layout", "activation", "outputs"}


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
            "hf-hub:owner/repo"; "local-dir:folder", or the folder itself or its weights file (config.json and weights,
            as saved by timm); "demo", the bundled model; a transformers model by id ("openai/clip-vit-base-patch16") or
            folder; "open_clip:ViT-B-32/openai"; or "demo-text", the bundled image–text model.
        checkpoint: weights to load instead of those from the hub: safetensors, a torch file loaded with
            `weights_only=True`, or the folder of a training run, also with weights in several files. Class count, image
            size and parts that differ from the model's, such as LayerScale, are inferred from the tensors.
        num_classes: number of classes of the model.
        class_names: a file of class names (one per line, or JSON), the names in order, {index: name} or
            {name: index}.
        dynamic_img_size: build a timm model for images of any size (required for fit="native").
        options: further keyword arguments for `timm.create_model`.

    Raises:
        OptionError: an option is one of `Explainer`, or this model does not support it.
        ModelError: the model is unknown, the hub is unreachable, or the weights do not fit; with a remedy.

    >>> model = load_model("demo")
    >>> model.training
    False
    """
    name = str(name)
    model: nn.Module
    if misplaced := _OF_EXPLAINER & options.keys():
        raise OptionError(f"{min(misplaced)}= is an argument of Explainer: Explainer(model, {min(misplaced)}=…).")
    clip, of_transformers = name.startswith("open_clip:"), is_of_transformers(name)
    if clip or of_transformers or name == "demo":
        given = options | {"checkpoint": None if of_transformers else checkpoint, "num_classes": num_classes}
        if unsupported := [option for option, value in given.items() if value is not None]:
            raise OptionError(f"{name!r} includes weights and architecture: omit {', '.join(unsupported)}.")
    if clip or of_transformers:
        return load_open_clip(name) if clip else load_transformers(name, checkpoint)
    if name == "demo":
        from vitflow.demo import load_demo_model

        model = load_demo_model(dynamic_img_size=dynamic_img_size)
    else:
        if dynamic_img_size:
            options["dynamic_img_size"] = True
        name, checkpoint = _locate(name, checkpoint)
        if num_classes is not None:
            options["num_classes"] = num_classes
        if checkpoint is None:
            model = create_model(name, pretrained=True, **options)
            known = not name.startswith("local-dir:")
        else:
            model = _with_weights(name, Path(checkpoint), options)
            # A name with a tag identifies the weights of a file; an architecture or a folder's config does not.
            known = timm.is_model(name) and "." in name
        config: Any = getattr(model, "pretrained_cfg", None) or {}
        if known and class_count(model) in (None, 0, config.get("num_classes")):  # otherwise its head is new
            tagged = timm.is_model(name) and config.get("architecture") and config.get("tag")
            remember_name(model, f"{config['architecture']}.{config['tag']}" if tagged else name)
    if class_names is not None:
        names, config = checked_class_names(class_names, class_count(model)), getattr(model, "pretrained_cfg", None)
        model.pretrained_cfg = {**(config or {}), "label_names": names, "label_descriptions": None}  # type: ignore[assignment]
    return model.eval()


def _locate(name: str, checkpoint: str | Path | None) -> tuple[str, str | Path | None]:
    """Return the name for timm, "local-dir:FOLDER" for a path, and the file of weights to load, if there is one."""
    path = Path(name.removeprefix("local-dir:"))
    if name.startswith(("hf-hub:", "hf_hub:")):
        return name, checkpoint
    if name.startswith("local-dir:") or is_folder(path):
        files = (path / file for file in WHOLE)
        return f"local-dir:{path}", checkpoint or next((file for file in files if file.is_file()), None)
    if is_file(path):
        if not (path.parent / "config.json").is_file():
            weights, _ = weights_for(("pos_embed", "patch_embed.proj.weight"), path)  # or its error
            guess = plain_model_of(weights)
            raise ModelError(
                f"{path} does not name its architecture{f', which may be {guess}' if guess else ''}. Pass timm's id as "
                f"the model and this file as the checkpoint: --model {guess or 'ID'} --checkpoint {path}, or "
                f"load_model({guess or 'ID'!r}, checkpoint={str(path)!r})."
            )
        return f"local-dir:{path.parent}", checkpoint or path
    return name, checkpoint


def _with_weights(name: str, path: Path, options: dict[str, Any]) -> nn.Module:
    """Build the model with the parts and sizes that the file's weights have, and load them."""
    draft = _draft(name, options)
    weights, notes = weights_for(draft.state_dict().keys(), path)
    weights, renamed = with_plain_head(weights, draft, path, name)
    _check_patches(weights, draft, path, name, options)
    inferred: dict[str, Any] = {}
    while parts := infer_parts(weights, draft, options | inferred):
        inferred |= parts
        draft = _draft(name, options | inferred)
    _check_numbers(weights, draft, path)
    inferred |= infer_sizes(weights, draft, options)
    model: nn.Module = create_model(name, pretrained=False, **options, **inferred)
    adapt, adapted = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None), weights
    try:
        adapted = adapt(dict(weights), model) if adapt else weights
        _check_numbers(adapted, model, path)
        model.load_state_dict(adapted)
    except ModelError:
        raise
    except Exception as error:  # timm assumes weights that fit
        raise _mismatch(weights, adapted, model, path, name, str(error)) from error
    if inferred:
        listed = ", ".join(f"{option}={value!r}" for option, value in inferred.items())
        renamed.append(f"{path.name}: built {name} with {listed}, as its tensors require.")
    for note in (*notes, *renamed):  # only once the weights are known to fit
        warnings.warn(note, VitflowWarning, stacklevel=3)
    return model


def _draft(name: str, options: dict[str, Any]) -> Any:
    """Return a model without values."""
    with torch.device("meta"):
        return create_model(name, pretrained=False, **options)


def _check_patches(weights: Weights, draft: nn.Module, path: Path, name: str, options: Mapping[str, Any]) -> None:
    """Raise ModelError for weights of other patches than the model's, which timm would resample, unless requested."""
    patches, expected = weights.get("patch_embed.proj.weight"), draft.state_dict().get("patch_embed.proj.weight")
    if patches is None or expected is None or patches.ndim != expected.ndim or "patch_size" in options:
        return
    if patches.shape[2:] != expected.shape[2:]:
        guess = plain_model_of(weights)
        theirs, its = (" × ".join(map(str, each.shape[2:])) for each in (patches, expected))
        hint = f"it may be {guess}." if guess else "is it the right model id for this file? patch_size= resamples them."
        raise ModelError(f"The weights in {path} do not fit {name}: patches of {theirs} pixels, not {its}; {hint}")


def _check_numbers(weights: Weights, model: nn.Module, path: Path) -> None:
    """Raise ModelError for weights that would be converted silently: integers and complex numbers."""
    state = model.state_dict()
    for name, weight in weights.items():
        expected = state.get(name)
        if weight.is_complex() or (
            expected is not None and expected.is_floating_point() and not weight.is_floating_point()
        ):
            raise ModelError(
                f"Expected floating-point weights in {path}, got {weight.dtype} for {name}. Save the weights before "
                "quantisation, or convert them to float32."
            )


def _mismatch(raw: Weights, weights: Weights, model: nn.Module, path: Path, name: str, reason: str = "") -> ModelError:
    """Return the error that lists how a file's weights, after timm's conversion, differ from a model's.

    The right model is guessed from the weights in the file, `raw`; `reason` is the error if names and shapes match.
    """
    state = model.state_dict()
    missing = [key for key in state if key not in weights]
    unknown = [key for key in weights if key not in state]
    shapes = [key for key in state if key in weights and state[key].shape != weights[key].shape]
    parts = [f"{len(missing) + len(shapes)} of {len(state)} tensors differ"]
    parts += [f"{key} is {tuple(weights[key].shape)}, not {tuple(state[key].shape)}" for key in shapes[:2]]
    parts += [f"{len(missing)} are missing ({', '.join(missing[:3])})"] if missing else []
    parts += [f"{len(unknown)} are unknown to the model ({', '.join(unknown[:3])})"] if unknown else []
    if reason and not (missing or shapes or unknown):
        parts = reason.splitlines()[:1]
    guess, hint = plain_model_of(raw), size_hint(raw, model, path, name)
    if guess not in (None, name):
        hint = f"it may be {guess}."
    elif any("embeddings.patch_embeddings." in each for each in raw):
        hint = "its names are those of transformers: pass the folder with its config.json as the model."
    elif not hint:
        hint = (
            "is it the right model id for this file? Otherwise build the model in Python, load_state_dict this file, "
            "and pass the model instead of its name."
        )
    return ModelError(f"The weights in {path} do not fit {name}: {', '.join(parts)}; {hint}")
