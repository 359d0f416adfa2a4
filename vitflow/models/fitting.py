"""Whether the weights of a file fit a model: numbers of the right kind, of the right shapes, and else which model's."""

import json
import re
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

# What a file may say of its architecture: sizes and switches of timm's models, nothing that reads, fetches or runs.
ARCHITECTURE_OPTIONS = frozenset(
    {"img_size", "patch_size", "in_chans", "num_classes", "embed_dim", "depth", "depths", "num_heads", "mlp_ratio"}
    | {"global_pool", "class_token", "reg_tokens", "pos_embed", "no_embed_class", "pre_norm", "final_norm", "fc_norm"}
    | {"qkv_bias", "qk_norm", "proj_bias", "init_values", "dynamic_img_size", "dynamic_img_pad", "window_size"}
)
_LONGEST_SIDE = 16_384  # pixels of a model input, and what any other size of a model stays below
_DEEPEST = 512  # layers

# timm's plain ViTs by width, the usual one first: what a file without a name may be of.
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
    """Refuse weights that would be changed in silence: whole or complex numbers, or no tensor where there is one.

    Raises:
        ModelError: a weight has the wrong kind of numbers or no axes; it is named.
    """
    own = model.state_dict()
    for name, weight in weights.items():
        expected = own.get(name)
        if weight.is_complex() or (
            expected is not None and expected.is_floating_point() and not weight.is_floating_point()
        ):
            raise ModelError(
                f"Expected floating-point weights in {path}, got {_kind(weight)} for {name}: loaded as they are, they "
                "would lose what they stand for. Save the model's weights before quantisation, or turn them back into "
                "float32."
            )
        if expected is not None and expected.ndim and (not weight.ndim or not weight.numel()):
            raise ModelError(
                f"Expected {name} of shape {tuple(expected.shape)} in {path}, got shape {tuple(weight.shape)}: the "
                "file is damaged, or of another model."
            )


def _kind(weight: Tensor) -> str:
    return str(weight.dtype).removeprefix("torch.")


def misfit(raw: Weights, weights: Weights, model: nn.Module, path: Path, name: str, reason: str = "") -> ModelError:
    """The error that says how far a file's weights are from a model's, and whose they may be.

    Args:
        raw: the weights as they stand in the file.
        weights: the same in the model's own words, as far as they could be translated.
        model: the model that they should fit.
        path: the file.
        name: the model's name.
        reason: what else is wrong where names and shapes agree.
    """
    own = model.state_dict()
    missing = [key for key in own if key not in weights]
    unknown = [key for key in weights if key not in own]
    shapes = [key for key in own if key in weights and own[key].shape != weights[key].shape]
    parts = [f"{len(missing) + len(shapes)} of {len(own)} tensors differ"]
    parts += [
        f"the file's {what} is {theirs}, the model's {ours}"
        for what, theirs, ours in _sizes(raw, own)
        if theirs != ours
    ]
    if len(parts) == 1:
        parts += [f"{key} is {tuple(weights[key].shape)}, not {tuple(own[key].shape)}" for key in shapes[:2]]
        parts += [f"{len(missing)} are missing ({', '.join(missing[:3])})"] if missing else []
        parts += [f"{len(unknown)} are unknown to the model ({', '.join(unknown[:3])})"] if unknown else []
    if reason and not (missing or shapes or unknown):
        parts = [reason]
    guess = guess_architecture(raw)
    hint = f"it may be {guess}." if guess not in (None, name) else "is it the right model id for this file?"
    return ModelError(f"The weights in {path} do not fit {name}: {', '.join(parts)}; {hint}")


def _sizes(weights: Weights, own: Weights) -> list[tuple[str, int, int]]:
    """(what it is, in the file, in the model) of the sizes of a plain ViT, where both have them."""
    found = []
    for what, size_of in (("width", _width), ("number of blocks", _depth), ("patch size", _patch_size)):
        theirs, ours = size_of(weights), size_of(own)
        if theirs is not None and ours is not None:
            found.append((what, theirs, ours))
    return found


def _width(weights: Weights) -> int | None:
    weight = next((weights[name] for name in ("blocks.0.norm1.weight", "norm.weight") if name in weights), None)
    return weight.shape[0] if weight is not None and weight.ndim == 1 else None


def _depth(weights: Weights) -> int | None:
    return len({found[1] for name in weights if (found := re.match(r"blocks\.(\d+)\.", name))}) or None


def _patch_size(weights: Weights) -> int | None:
    weight = weights.get("patch_embed.proj.weight")
    return weight.shape[-1] if weight is not None and weight.ndim == 4 else None


def guess_architecture(weights: Weights) -> str | None:
    """The plain ViT of timm whose tensors have the file's names and shapes; classes and image size may differ.

    >>> guess_architecture(timm.create_model("vit_tiny_patch16_384", num_classes=3).state_dict())
    'vit_tiny_patch16_384'
    """
    body, close = _shapes(weights), None
    for name in _PLAIN.get(_width(weights) or 0, ()):
        shapes, positions = _plain_shapes(name)
        if shapes == body:
            if "pos_embed" in weights and positions == tuple(weights["pos_embed"].shape):
                return name
            close = close or name
    return close


@cache
def _plain_shapes(name: str) -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    with without_values():
        own = timm.create_model(name, pretrained=False).state_dict()
    return _shapes(own), tuple(own["pos_embed"].shape)


def _shapes(weights: Weights) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(weight.shape)
        for name, weight in weights.items()
        if not name.startswith(("head.", "head_dist.", "pos_embed"))
    }


def trained_side(weights: Weights, draft: nn.Module) -> int | None:
    """Image size that a file's square position grid stands for, where it differs from the model's; else None."""
    weight, own = weights.get("pos_embed"), getattr(draft, "pos_embed", None)
    embed: Any = getattr(draft, "patch_embed", None)
    if weight is None or own is None or embed is None or weight.ndim != 3 or weight.shape == own.shape:
        return None
    if (weight.shape[0], weight.shape[2]) != (own.shape[0], own.shape[2]):
        return None
    prefix = 0 if getattr(draft, "no_embed_class", False) else int(getattr(draft, "num_prefix_tokens", 0))
    patches = max(weight.shape[1] - prefix, 0)
    side = round(patches**0.5)
    return int(side * embed.patch_size[0]) if side and side * side == patches else None


def class_rows(weights: Weights, draft: nn.Module) -> tuple[str | None, int | None]:
    """The name of a model's classifier, and how many classes the file's has: None where it has none like it."""
    classifier = getattr(draft, "pretrained_cfg", {}).get("classifier")
    classifier = classifier[0] if isinstance(classifier, list | tuple) else classifier
    name = f"{classifier}.weight"
    head, own = weights.get(name), draft.state_dict().get(name)
    alike = head is not None and (own is None or head.shape[1:] == own.shape[1:]) and head.ndim and len(head)
    return classifier, len(head) if alike and head is not None else None


def architecture_options(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """The options of its architecture that a file tells, each of them known and within reason.

    Raises:
        ModelError: they are no JSON object, or one is not in `ARCHITECTURE_OPTIONS` or makes no sense.
    """
    if "architecture_options" not in metadata:
        return {}
    options = _json(metadata, "architecture_options", path)
    if not isinstance(options, dict):
        raise ModelError(f"Expected architecture_options in {path} to be a JSON object, got {str(options)[:60]!r}.")
    for name, value in options.items():
        if name not in ARCHITECTURE_OPTIONS:
            raise ModelError(
                f"The file {path} asks for the option {name[:60]!r} of its architecture, which a file may not set. "
                f"Allowed: {', '.join(sorted(ARCHITECTURE_OPTIONS))}. Pass others to load_model yourself."
            )
        most = _DEEPEST if name in ("depth", "depths", "reg_tokens") else _LONGEST_SIDE
        parts = value if isinstance(value, list) and len(value) <= 8 else [value]
        if not all(part is None or isinstance(part, str) or _is_size(part, most) for part in parts):
            raise ModelError(f"Expected {name} of 0 to {most} in {path}, got {str(value)[:60]}.")
    return options


def _is_size(value: Any, most: int) -> bool:
    return isinstance(value, bool | int | float) and 0 <= value <= most


def input_config(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    """What a file tells of the images that its model wants, in timm's words.

    Raises:
        ModelError: a value makes no sense.
    """
    found: dict[str, Any] = {}
    words = {"interpolation": FILTERS, "crop_mode": CROP_MODES, "activation": ("softmax", "sigmoid")}
    for key, known in words.items():
        if key in metadata:
            if metadata[key] not in known:
                raise ModelError(f"Expected {key} in {path} to be {', '.join(known)}, got {metadata[key][:60]!r}.")
            found[key] = metadata[key]
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
            found[key] = value
    return found


def _json(metadata: Mapping[str, str], key: str, path: Path) -> Any:
    try:
        return json.loads(metadata[key])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"Expected JSON for {key} in {path}, got {metadata[key][:60]!r}.") from error
