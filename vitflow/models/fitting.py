"""Check that the weights of a file fit a model (dtypes and shapes), and guess the model if they do not."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import timm
from torch import Tensor, nn

from vitflow.errors import ModelError
from vitflow.images.geometry import CROP_MODES, FILTERS
from vitflow.models.hub import without_values

Weights = Mapping[str, Tensor]

# Architecture options that a file may set: sizes and flags only; options that load files or run code are excluded.
ARCHITECTURE_OPTIONS = frozenset(
    {"img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "depths", "num_heads", "mlp_ratio"}
    | {"global_pool", "class_token", "reg_tokens", "pos_embed", "no_embed_class", "pre_norm", "final_norm", "fc_norm"}
    | {"qkv_bias", "qk_norm", "proj_bias", "init_values", "dynamic_img_size", "dynamic_img_pad", "window_size"}
)
_LONGEST_SIDE = 16_384  # pixels of a model input; also the limit of all other sizes
_DEEPEST = 512  # layers

# timm's plain ViTs by width, the most common first: candidates for a file without a name.
_PLAIN = {
    192: ("vit_tiny_patch16_224", "vit_tiny_patch16_384", "deit_tiny_distilled_patch16_224"),
    384: (
        *("vit_small_patch16_224", "vit_small_patch16_384", "vit_small_patch32_224", "vit_small_patch8_224"),
        *("deit_small_distilled_patch16_224", "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"),
    ),
    768: (
        *("vit_base_patch16_224", "vit_base_patch16_384", "vit_base_patch32_224", "vit_base_patch8_224"),
        *("deit_base_distilled_patch16_224", "vit_base_patch14_dinov2", "vit_base_patch14_reg4_dinov2"),
        *("vit_base_patch16_clip_224", "vit_base_patch32_clip_224", "vit_base_patch16_siglip_224"),
    ),
    1024: (
        *("vit_large_patch16_224", "vit_large_patch16_384", "vit_large_patch14_dinov2"),
        *("vit_large_patch14_reg4_dinov2", "vit_large_patch14_clip_224"),
    ),
    1152: ("vit_so400m_patch14_siglip_384",),
    1280: ("vit_huge_patch14_224",),
}


def check_numbers(weights: Weights, model: nn.Module, path: Path) -> None:
    """Check for weights that would be converted silently: integers, complex numbers and empty tensors.

    Raises:
        ModelError: a weight has the wrong dtype, no axes or no elements.
    """
    state = model.state_dict()
    for name, weight in weights.items():
        expected = state.get(name)
        if weight.is_complex() or (
            expected is not None and expected.is_floating_point() and not weight.is_floating_point()
        ):
            raise ModelError(
                f"Expected floating-point weights in {path}, got {_dtype(weight)} for {name}. Save the weights before "
                "quantisation, or convert them to float32."
            )
        if expected is not None and expected.ndim and (not weight.ndim or not weight.numel()):
            raise ModelError(
                f"Expected {name} of shape {tuple(expected.shape)} in {path}, got shape {tuple(weight.shape)}: the "
                "file is damaged or of another model."
            )


def _dtype(weight: Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")


def mismatch_error(
    raw: Weights, weights: Weights, model: nn.Module, path: Path, name: str, reason: str = ""
) -> ModelError:
    """Return the error that lists how a file's weights differ from a model's, with a guess of the right model.

    Args:
        raw: the weights in the file.
        weights: the weights after timm's conversion, if it succeeded.
        model: the model that they should fit.
        path: the file.
        name: the model's name.
        reason: the error if names and shapes match.
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
        parts = [reason]
    guess = guess_architecture(raw)
    hint = f"it may be {guess}." if guess not in (None, name) else "is it the right model id for this file?"
    return ModelError(f"The weights in {path} do not fit {name}: {', '.join(parts)}; {hint}")


def guess_architecture(weights: Weights) -> str | None:
    """Return the plain timm ViT with the same tensor names and shapes, except for classes and image size.

    >>> guess_architecture(timm.create_model("vit_tiny_patch16_384", num_classes=3).state_dict())
    'vit_tiny_patch16_384'
    """
    body, candidate = _shapes(weights), None
    for name in _PLAIN.get(_width(weights) or 0, ()):
        shapes, positions = _plain_shapes(name)
        if shapes == body:
            if "pos_embed" in weights and positions == tuple(weights["pos_embed"].shape):
                return name
            candidate = candidate or name
    return candidate


@cache
def _plain_shapes(name: str) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    with without_values():
        state = timm.create_model(name, pretrained=False).state_dict()
    return _shapes(state), tuple(state["pos_embed"].shape)


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(weight.shape)
        for name, weight in weights.items()
        if not name.startswith(("head.", "head_dist.", "pos_embed"))
    }


def _width(weights: Weights) -> int | None:
    weight = next((weights[name] for name in ("blocks.0.norm1.weight", "norm.weight") if name in weights), None)
    return weight.shape[0] if weight is not None and weight.ndim == 1 else None


def trained_side(weights: Weights, draft: nn.Module) -> int | None:
    """Return the image size of a file's square position grid; None if unknown or equal to the model's."""
    weight, expected = weights.get("pos_embed"), getattr(draft, "pos_embed", None)
    embed: Any = getattr(draft, "patch_embed", None)
    if weight is None or expected is None or embed is None or weight.ndim != 3 or weight.shape == expected.shape:
        return None
    if (weight.shape[0], weight.shape[2]) != (expected.shape[0], expected.shape[2]):
        return None
    prefix = 0 if getattr(draft, "no_embed_class", False) else int(getattr(draft, "num_prefix_tokens", 0))
    patches = max(weight.shape[1] - prefix, 0)
    side = round(patches**0.5)
    return int(side * embed.patch_size[0]) if side and side * side == patches else None


def class_rows(weights: Weights, draft: nn.Module) -> tuple[str | None, int | None]:
    """Return the name of a model's classifier and its number of classes in the file; None if it is missing there."""
    classifier = getattr(draft, "pretrained_cfg", {}).get("classifier")
    classifier = classifier[0] if isinstance(classifier, list | tuple) else classifier
    name = f"{classifier}.weight"
    head, expected = weights.get(name), draft.state_dict().get(name)
    if head is None or not head.ndim or (expected is not None and head.shape[1:] != expected.shape[1:]):
        return classifier, None
    return classifier, len(head) or None


def architecture_options(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return the architecture options in a file's metadata.

    Raises:
        ModelError: they are not a JSON object, or one is not in `ARCHITECTURE_OPTIONS` or out of range.
    """
    if "architecture_options" not in metadata:
        return {}
    options = _json(metadata, "architecture_options", path)
    if not isinstance(options, dict):
        raise ModelError(f"Expected architecture_options in {path} to be a JSON object, got {str(options)[:60]!r}.")
    for name, value in options.items():
        if name not in ARCHITECTURE_OPTIONS:
            raise ModelError(
                f"The file {path} must not set the architecture option {name[:60]!r}. Pass it to load_model. "
                f"Allowed in files: {', '.join(sorted(ARCHITECTURE_OPTIONS))}."
            )
        most = _DEEPEST if name in ("depth", "depths", "reg_tokens") else _LONGEST_SIDE
        parts = value if isinstance(value, list) and len(value) <= 8 else [value]
        if not all(part is None or isinstance(part, str) or _is_size(part, most) for part in parts):
            raise ModelError(f"Expected {name} of 0 to {most} in {path}, got {str(value)[:60]}.")
    return options


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, bool | int | float) and 0 <= value <= most


def input_config(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Return the preprocessing and activation in a file's metadata, as entries of timm's data config.

    Raises:
        ModelError: a value is unknown or out of range.
    """
    config: dict[str, Any] = {}
    choices = {"interpolation": FILTERS, "crop_mode": CROP_MODES, "activation": ("softmax", "sigmoid")}
    for key, known in choices.items():
        if key in metadata:
            if metadata[key] not in known:
                raise ModelError(f"Expected {key} in {path} to be {', '.join(known)}, got {metadata[key][:60]!r}.")
            config[key] = metadata[key]
    for key, least, most, lengths in (
        ("mean", -1e6, 1e6, (1, 3)),
        ("std", 1e-6, 1e6, (1, 3)),
        ("input_size", 1, _LONGEST_SIDE, (3,)),
        ("crop_pct", 0.01, 10, (0,)),
    ):
        if key in metadata:
            value = _json(metadata, key, path)
            parts = value if isinstance(value, list) else [value]
            kind: Any = int if key == "input_size" else int | float
            size = len(value) if isinstance(value, list) else 0
            if size not in lengths or not all(isinstance(part, kind) and least <= part <= most for part in parts):
                raise ModelError(f"Expected {key} of {least:g} to {most:g} in {path}, got {str(value)[:60]}.")
            config[key] = value
    return config


def _json(metadata: Mapping[str, str], key: str, path: Path) -> Any:
    try:
        return json.loads(metadata[key])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"Expected JSON for {key} in {path}, got {metadata[key][:60]!r}.") from error
