"""Infer options of `timm.create_model` from the names and shapes of the tensors in a file."""

import inspect
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from vitflow.errors import ModelError
from vitflow.models.checkpoints import Weights
from vitflow.models.names import class_count

# timm's names of plain ViTs by width.
_PLAIN = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge"}
# Options by the tensors that they add: their values for a file with these tensors, and for one without.
_PARTS: dict[str, tuple[str, Any, Any]] = {
    "init_values": (r"\.ls1\.gamma$|\.gamma_1$", 1e-5, 0.0),
    "qk_norm": (r"\.attn\.q_norm\.weight$", True, False),
    "qkv_bias": (r"\.attn\.qkv\.bias$", True, False),
    "class_token": (r"^cls_token$", True, False),
}


def infer_parts(weights: Weights, draft: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the parts that a file has and a draft of its model lacks, or the other way round.

    They are the channels of the input, LayerScale, norm and bias of the attention, class and register tokens, pooling,
    and depth. A part that the file lacks is left out only if the draft knows all names in the file: timm may convert
    others. Therefore the options of a draft may require further ones.
    """
    state, options = draft.state_dict(), dict[str, Any]()
    head, (stem, expected) = (
        _named(draft, "classifier"),
        (each.get(f"{_named(draft, 'first_conv')}.weight") for each in (weights, state)),
    )
    by_name = all(name in state or name.startswith(f"{head}.") for name in weights)
    if stem is not None and expected is not None and stem.ndim == expected.ndim and stem.shape[1] != expected.shape[1]:
        options["in_chans"] = stem.shape[1]
    for option, (pattern, present, absent) in _PARTS.items():
        theirs, ours = (any(re.search(pattern, name) for name in each) for each in (weights, state))
        if theirs != ours and (theirs or by_name):
            options[option] = present if theirs else absent
    registers, expected_registers = (
        each["reg_token"].shape[1] if "reg_token" in each else 0 for each in (weights, state)
    )
    if registers != expected_registers and (registers or by_name):
        options |= {"reg_tokens": registers, "num_reg_tokens": registers}
    depth, expected_depth = (
        len({name.split(".")[1] for name in each if name.startswith("blocks.")}) for each in (weights, state)
    )
    if depth and depth != expected_depth:
        options["depth"] = depth
    options |= _pooling(weights, state, given, class_token=options.get("class_token", True))
    kinds = type(draft).__mro__[: type(draft).__mro__.index(nn.Module)]
    accepted = {name for kind in kinds for name in inspect.signature(kind).parameters} - given.keys()
    return {option: value for option, value in options.items() if option in accepted}


def _pooling(weights: Weights, state: Weights, given: Mapping[str, Any], *, class_token: bool) -> dict[str, Any]:
    """Return the options of the pooling of a file, by its attention pooling, its final norm and its class token."""
    if "attn_pool.latent" in weights.keys() - state.keys():
        return {"global_pool": "map"}
    after = "fc_norm.weight" in weights  # the pooling, which is then an average
    if "global_pool" in given:
        return (
            {"fc_norm": after} if after != ("fc_norm.weight" in state) and "norm.weight" in {*weights, *state} else {}
        )
    if after and "fc_norm.weight" not in state:
        return {"global_pool": "avg"}
    return {} if class_token else {"global_pool": "avg", "fc_norm": after}


def infer_sizes(weights: Weights, draft: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the class count and image size of a file, and whether its prefix tokens have positions, if they differ."""
    options = dict[str, Any]()
    if "num_classes" not in given:
        classifier, rows = _classes_in(weights, draft)
        if rows is not None and class_count(draft) not in (None, rows):
            options["num_classes"] = rows
        elif classifier and f"{classifier}.weight" not in weights:
            options["num_classes"] = 0
    positions, expected = weights.get("pos_embed"), draft.state_dict().get("pos_embed")
    embed: Any = getattr(draft, "patch_embed", None)
    if positions is None or expected is None or embed is None or positions.ndim != 3:
        return options
    if positions.shape[::2] != expected.shape[::2] or positions.shape == expected.shape:
        return options
    prefix, without = int(getattr(draft, "num_prefix_tokens", 0)), bool(getattr(draft, "no_embed_class", False))
    # With a class token alone, as many positions as patches may also be those of an oblong image.
    for no_embed_class in (without, not without)[: 1 + (prefix > 1)]:
        patches = positions.shape[1] - (0 if no_embed_class else prefix)
        rows = math.isqrt(max(patches, 0))
        if not rows or rows * rows != patches:
            continue
        side = rows * _patch_side(weights, embed)
        if no_embed_class is not without:
            options["no_embed_class"] = no_embed_class
        if (side, side) != embed.img_size and "img_size" not in given:
            options["img_size"] = side
        break
    return options


def with_plain_head(weights: Weights, draft: nn.Module, path: Path, name: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return weights whose head is one linear layer inside other modules under timm's name, with a note.

    Raises:
        ModelError: the head has further weights.
    """
    head = _named(draft, "classifier")
    inside = [each for each in weights if each.startswith(f"{head}.")]
    if not inside or f"{head}.weight" in inside or f"{head}.weight" not in draft.state_dict():
        return dict(weights), []
    matrices = [each for each in inside if weights[each].ndim == 2]
    layer = matrices[0].removesuffix(".weight") if len(matrices) == 1 else ""
    if not {f"{layer}.weight"} <= set(inside) <= {f"{layer}.weight", f"{layer}.bias"}:
        raise ModelError(
            f"The head in {path} is not one linear layer ({', '.join(inside[:6])}). Build the model in Python, and "
            f"pass it instead of its name: model = timm.create_model({name!r}); model.{head} = … (your head); "
            f"model.load_state_dict(torch.load({str(path)!r}))."
        )
    renamed = {each.replace(layer, str(head), 1) if each in inside else each: weights[each] for each in weights}
    note = f"{path.name}: {layer} is loaded as {head}; modules of its head without weights are taken to be dropout."
    return renamed, [note]


def size_hint(weights: Weights, draft: nn.Module, path: Path, name: str) -> str:
    """Return how to load weights whose positions are no square; empty if they are, or if there are none."""
    positions, embed = weights.get("pos_embed"), getattr(draft, "patch_embed", None)
    expected = draft.state_dict().get("pos_embed")
    if positions is None or expected is None or embed is None or positions.shape[::2] != expected.shape[::2]:
        return ""
    prefix = 0 if getattr(draft, "no_embed_class", False) else int(getattr(draft, "num_prefix_tokens", 0))
    patches, side = positions.shape[1] - prefix, _patch_side(weights, embed)
    if patches == expected.shape[1] - prefix or math.isqrt(max(patches, 0)) ** 2 == patches:
        return ""
    rows = [each for each in range(patches, 0, -1) if patches % each == 0 and 0.5 <= each**2 / patches <= 2]
    sizes = [f"({each * side}, {patches // each * side})" for each in rows] or ["(height, width)"]
    call = f"load_model({name!r}, checkpoint={str(path)!r}, img_size={sizes[0]})"
    others = f" (or {', '.join(sizes[1:])})" if sizes[1:] else ""
    return f"its {patches} patches are no square: pass their size in Python, as to timm.create_model: {call}{others}."


def plain_model_of(weights: Weights) -> str | None:
    """Return timm's name of the plain ViT that has these weights, except for its classes; None if there is none."""
    patches, positions = weights.get("patch_embed.proj.weight"), weights.get("pos_embed")
    if patches is None or positions is None or patches.ndim != 4 or positions.ndim != 3:
        return None
    pixels = math.isqrt(positions.shape[1]) * patches.shape[-1]
    name = f"vit_{_PLAIN.get(patches.shape[0])}_patch{patches.shape[-1]}_{pixels}"
    if not timm.is_model(name):
        return None
    with torch.device("meta"):
        state = timm.create_model(name).state_dict()
    shapes = ({key: one.shape for key, one in each.items() if key[:5] != "head."} for each in (state, weights))
    return name if next(shapes) == next(shapes) else None


def _named(draft: nn.Module, part: str) -> str | None:
    """Return the path of the "classifier" or the "first_conv" of a timm model, of two the first."""
    path: Any = (getattr(draft, "pretrained_cfg", None) or {}).get(part)
    path = path[0] if isinstance(path, list | tuple) else path
    return None if path is None else str(path)


def _classes_in(weights: Weights, draft: nn.Module) -> tuple[str | None, int | None]:
    """Return the name of a model's classifier and its number of classes in the file; None if it is missing there."""
    classifier = _named(draft, "classifier")
    name = f"{classifier}.weight"
    head, expected = weights.get(name), draft.state_dict().get(name)
    if head is None or not head.ndim or (expected is not None and head.shape[1:] != expected.shape[1:]):
        return classifier, None
    return classifier, len(head) or None


def _patch_side(weights: Weights, embed: Any) -> int:
    """Return the side of a file's patches, which may be resampled to those of the model."""
    kernel = weights.get("patch_embed.proj.weight")
    return int(embed.patch_size[0] if kernel is None or kernel.ndim != 4 else kernel.shape[-1])
