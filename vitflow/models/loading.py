"""Load a model by name: a timm id, hf-hub:, local-dir:, a folder or file, or `demo`."""

import math
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
from torch import nn

from vitflow.errors import ModelError, OptionError, VitflowWarning
from vitflow.files import is_file, is_folder
from vitflow.models.checkpoints import Weights, weights_for
from vitflow.models.hub import create_model, is_of_transformers, load_open_clip, load_transformers, without_values
from vitflow.models.names import ClassNames, checked_class_names, class_count, remember_name

# Parameters allowed beyond twice those of the file, for classes that the file lacks.
_EXTRA_PARAMETERS = 25_000_000
# Arguments of `Explainer` that timm would take for options of a model.
_OF_EXPLAINER = {"device", "dtype", "fit", "data_config", "layout", "activation", "outputs"}
# timm's names of plain ViTs by width.
_PLAIN = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}


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
        checkpoint: weights to load instead of those from the hub: safetensors, or a torch file loaded with
            `weights_only=True`. A class count or image size that differs from the model's is taken from the file.
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
    if (clip := name.startswith("open_clip:")) or name == "demo" or is_of_transformers(name):
        given = options | {"checkpoint": checkpoint, "num_classes": num_classes}
        if unsupported := [option for option, value in given.items() if value is not None]:
            raise OptionError(f"{name!r} includes weights and architecture: omit {', '.join(unsupported)}.")
    if clip or is_of_transformers(name):
        return load_open_clip(name) if clip else load_transformers(name)
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
        files = (path / file for file in ("model.safetensors", "pytorch_model.bin"))
        return f"local-dir:{path}", checkpoint or next((file for file in files if file.is_file()), None)
    if is_file(path):
        if not (path.parent / "config.json").is_file():
            weights, _ = weights_for(("pos_embed", "patch_embed.proj.weight"), path)  # or its error
            guess = _plain_model_of(weights)
            raise ModelError(
                f"{path} does not name its architecture{f', which may be {guess}' if guess else ''}. Pass timm's id as "
                f"the model and this file as the checkpoint: --model {guess or 'ID'} --checkpoint {path}, or "
                f"load_model({guess or 'ID'!r}, checkpoint={str(path)!r})."
            )
        return f"local-dir:{path.parent}", checkpoint or path
    return name, checkpoint


def _with_weights(name: str, path: Path, options: dict[str, Any]) -> nn.Module:
    """Build the model with the file's class count and image size, and load the file's weights."""
    with without_values():
        draft = create_model(name, pretrained=False, **options)
    weights, notes = weights_for(draft.state_dict().keys(), path)
    after_pooling = "fc_norm.weight" in weights  # the norm
    if hasattr(draft, "fc_norm") and after_pooling != ("fc_norm.weight" in draft.state_dict()):
        if "global_pool" in options:
            options.setdefault("fc_norm", after_pooling)
        elif after_pooling:
            options["global_pool"] = "avg"
            notes.append(f"{path.name} has an fc_norm, unlike {name}: using global_pool='avg'.")
        with without_values():
            draft = create_model(name, pretrained=False, **options)
    _check_patches(weights, draft, path, name, options)
    _check_numbers(weights, draft, path)
    needed, given = (sum(weight.numel() for weight in state.values()) for state in (draft.state_dict(), weights))
    if needed > 2 * given + _EXTRA_PARAMETERS:
        raise _mismatch(weights, weights, draft, path, name)  # before memory is allocated
    notes += _set_by_file(weights, draft, path, name, options)
    model: nn.Module = create_model(name, pretrained=False, **options)
    adapt, adapted = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None), weights
    try:
        adapted = adapt(dict(weights), model) if adapt else weights
        _check_numbers(adapted, model, path)
        model.load_state_dict(adapted)
    except ModelError:
        raise
    except Exception as error:  # timm assumes weights that fit
        raise _mismatch(weights, adapted, model, path, name, str(error)) from error
    for note in notes:  # only once the weights are known to fit
        warnings.warn(note, VitflowWarning, stacklevel=3)
    return model


def _set_by_file(weights: Weights, draft: nn.Module, path: Path, name: str, options: dict[str, Any]) -> list[str]:
    """Set the class count and the image size of a file in the options, unless they were requested; return notes."""
    notes = []
    if "num_classes" not in options:
        classifier, rows = _classes_in(weights, draft)
        if rows is not None and class_count(draft) not in (None, rows):
            options["num_classes"] = rows
            notes.append(f"{path.name} has {rows} classes, {name} by default {class_count(draft)}: using {rows}.")
        elif classifier and f"{classifier}.weight" not in weights:
            options["num_classes"] = 0
            notes.append(f"{path.name} has no classifier weights: {name} is loaded without classes.")
    side = _trained_side(weights, draft)
    if side is not None and "img_size" not in options:
        options["img_size"] = side
        notes.append(f"{path.name} was trained on {side} × {side} pixels, unlike {name}: using {side} × {side}.")
    return notes


def _check_patches(weights: Weights, draft: nn.Module, path: Path, name: str, options: Mapping[str, Any]) -> None:
    """Raise ModelError for weights of other patches than the model's, which timm would resample, unless requested."""
    patches, expected = weights.get("patch_embed.proj.weight"), draft.state_dict().get("patch_embed.proj.weight")
    if patches is None or expected is None or patches.ndim != expected.ndim or "patch_size" in options:
        return
    if patches.shape[2:] != expected.shape[2:]:
        guess = _plain_model_of(weights)
        theirs, its = (" × ".join(map(str, each.shape[2:])) for each in (patches, expected))
        hint = f"it may be {guess}." if guess else "is it the right model id for this file? patch_size= resamples them."
        raise ModelError(f"The weights in {path} do not fit {name}: patches of {theirs} pixels, not {its}; {hint}")


def _check_numbers(weights: Weights, model: nn.Module, path: Path) -> None:
    """Raise ModelError for weights that would be converted silently: integers, complex numbers and empty tensors."""
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
        if expected is not None and expected.ndim and (not weight.ndim or not weight.numel()):
            raise ModelError(
                f"Expected {name} of shape {tuple(expected.shape)} in {path}, got shape {tuple(weight.shape)}: the "
                "file is damaged or of another model."
            )


def _classes_in(weights: Weights, draft: nn.Module) -> tuple[str | None, int | None]:
    """Return the name of a model's classifier and its number of classes in the file; None if it is missing there."""
    classifier = getattr(draft, "pretrained_cfg", {}).get("classifier")
    classifier = classifier[0] if isinstance(classifier, list | tuple) else classifier
    name = f"{classifier}.weight"
    head, expected = weights.get(name), draft.state_dict().get(name)
    if head is None or not head.ndim or (expected is not None and head.shape[1:] != expected.shape[1:]):
        return classifier, None
    return classifier, len(head) or None


def _trained_side(weights: Weights, draft: nn.Module) -> int | None:
    """Return the image size of a file's square position grid; None if unknown or equal to the model's."""
    weight, expected = weights.get("pos_embed"), getattr(draft, "pos_embed", None)
    embed: Any = getattr(draft, "patch_embed", None)
    if weight is None or expected is None or embed is None or weight.ndim != 3 or weight.shape == expected.shape:
        return None
    if (weight.shape[0], weight.shape[2]) != (expected.shape[0], expected.shape[2]):
        return None
    prefix = 0 if getattr(draft, "no_embed_class", False) else int(getattr(draft, "num_prefix_tokens", 0))
    patches = max(weight.shape[1] - prefix, 0)
    rows = math.isqrt(patches)
    kernel = weights.get("patch_embed.proj.weight")  # its patches may be resampled to those of the model
    side = rows * int(embed.patch_size[0] if kernel is None or kernel.ndim != 4 else kernel.shape[-1])
    return side if side and rows * rows == patches and (side, side) != embed.img_size else None


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
    guess = _plain_model_of(raw)
    hint = f"it may be {guess}." if guess not in (None, name) else "is it the right model id for this file?"
    return ModelError(f"The weights in {path} do not fit {name}: {', '.join(parts)}; {hint}")


def _plain_model_of(weights: Weights) -> str | None:
    """Return timm's name of the plain ViT that has these weights, except for its classes; None if there is none."""
    patches, positions = weights.get("patch_embed.proj.weight"), weights.get("pos_embed")
    if patches is None or positions is None or patches.ndim != 4 or positions.ndim != 3:
        return None
    pixels = math.isqrt(positions.shape[1]) * patches.shape[-1]
    name = f"vit_{_PLAIN.get(patches.shape[0])}_patch{patches.shape[-1]}_{pixels}"
    if not timm.is_model(name):
        return None
    with without_values():
        state = timm.create_model(name).state_dict()
    shapes = ({key: one.shape for key, one in each.items() if key[:5] != "head."} for each in (state, weights))
    return name if next(shapes) == next(shapes) else None
