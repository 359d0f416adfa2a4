"""Determine which methods a timm model supports, by running its architecture once on torch's `meta` device.

Tensors on that device have shapes but no values, so that neither weights nor a download are required.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal

import timm
import torch
from timm.models import get_arch_name, model_entrypoint

from vitflow.errors import ModelError, NoAttentionError, UnsupportedModelError
from vitflow.models.hub import without_values
from vitflow.progress import tracking
from vitflow.recording.attention_kinds import is_difference, other_attention_in, refusal_in_words
from vitflow.recording.recorder import record_attention

# "windows": through windows and stages, from the top layer to the finest patch grid.
Extent = Literal["yes", "windows", "no", "unknown"]

# timm's model files for which two blocks, or two in each of four stages, are representative.
_UNIFORM = (
    *("beit", "cait", "deepseek_vit", "deit", "eva", "gemma4_vit", "naflexvit", "qwen3_vit", "tnt", "vitamin"),
    *("vision_transformer", "vision_transformer_hybrid", "vision_transformer_relpos", "vision_transformer_sam"),
)
_STAGED = (
    *("davit", "efficientformer", "efficientformer_v2", "maxxvit", "pvt_v2", "tiny_vit", "twins"),
    *("swin_transformer", "swin_transformer_v2", "swin_transformer_v2_cr"),
)
# Maximum number of parameters of models that are run with values if they do not run without.
_SMALL = 50_000_000


@dataclass(frozen=True, slots=True)
class Support:
    """Methods that an architecture supports. Grad-CAM, input gradient and occlusion support every model.

    Attributes:
        rollout: support of attention rollout and raw attention.
        flow: support of attention flow.
        gradients: support of gradient rollout and generic attention explainability.
        reason: reason for missing support; None if everything is supported.
        num_prefix_tokens: number of class, distillation and register tokens; None if unknown.
        grid: (rows, cols) of the patches at the default image size; the finest grid of stages.
        pooling: pooling of the top layer's tokens, as declared by the model.
    """

    rollout: Extent
    flow: Extent
    gradients: Extent
    reason: str | None = None
    num_prefix_tokens: int | None = None
    grid: tuple[int, int] | None = None
    pooling: str | None = None


def support_of(name: str) -> Support:
    """Return the support of a timm model by its id, with or without tag; no weights are loaded.

    >>> support_of("vit_tiny_patch16_224").grid
    (14, 14)
    >>> support_of("resnet18").reason
    'no attention between tokens'
    """
    config: Any = timm.get_pretrained_cfg(name, allow_unregistered=True)
    key = get_arch_name(name), None if config is None else tuple(config.input_size)
    if key not in _cache:
        _cache[key] = _find(name)
    return _cache[key]


# By architecture and image size, which may differ between tags.
_cache: dict[tuple[str, tuple[int, ...] | None], Support] = {}


def _find(name: str) -> Support:
    family, model = _family(get_arch_name(name)), None
    if family in (*_UNIFORM, *_STAGED):
        short: dict[str, Any] = {"depth": 2} if family in _UNIFORM else {"depths": (2, 2, 2, 2)}
        with suppress(Exception):  # some cannot be built with that depth
            return _support_in(_draft(name, **short), "meta")
    try:
        model = _draft(name)
        return _support_in(model, "meta")
    except Exception as error:  # some operations require values
        reason = f"unknown without running it ({type(error).__name__})"
    if model is not None and sum(parameter.numel() for parameter in model.parameters()) <= _SMALL:
        with suppress(Exception):
            return _support_in(timm.create_model(name).eval(), "cpu")
    return Support("unknown", "unknown", "unknown", reason)


def _draft(name: str, **options: Any) -> Any:
    """Build a model on the meta device."""
    with without_values():
        model = timm.create_model(name, **options)
    return model.eval()


def _support_in(model: Any, device: str) -> Support:
    """Determine the support of a model on a device by running it once."""
    pixels = torch.zeros(1, *model.pretrained_cfg["input_size"], device=device)
    try:
        with torch.no_grad(), record_attention(model, head_fusion="mean") as trace:
            model(pixels)
    except NoAttentionError:
        return _none(other_attention_in(model) or "no attention between tokens")
    except UnsupportedModelError:
        if any(is_difference(module) for module in model.modules()):
            return _none("the difference of two attention matrices, which has negative entries")
        raise
    if trace.refusal is not None:
        return _none(refusal_in_words(model, trace.layers) or "its windows cannot be mapped to the image")
    layout = trace.layout
    tokens = layout.num_prefix_tokens, (layout.rows, layout.cols), trace.pooling
    if trace.staged:
        return Support("windows", "no", "windows", "flow needs the same tokens in every layer", *tokens)
    return Support("yes", "yes", "yes", None, *tokens)


def _none(reason: str) -> Support:
    return Support("no", "no", "no", reason)


def list_models(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Determine the support of timm's models, once for each architecture.

    Args:
        names: model ids, such as those of `matching`.

    Yields:
        model (the id), architecture, tag, family (timm's file), input_size, num_classes, and the fields of `Support`.
    """
    with tracking("models", len(names)) as done:
        for name in names:
            architecture, tag = get_arch_name(name), name.partition(".")[2]
            config: Any = timm.get_pretrained_cfg(name, allow_unregistered=True)
            support = support_of(name)
            yield {
                "model": name,
                "architecture": architecture,
                "tag": tag or None,
                "family": _family(architecture),
                "input_size": None if config is None else list(config.input_size),
                "num_classes": None if config is None else config.num_classes,
                **asdict(support),
                "grid": support.grid and list(support.grid),
            }
            done(1)


def matching(pattern: str, *, untrained: bool = False) -> list[str]:
    """Return the ids of timm's pretrained models that match a pattern.

    Args:
        pattern: a model id with * as a wildcard, or an architecture for all its tags.
        untrained: include architectures without pretrained weights.

    Raises:
        ModelError: nothing matches.

    >>> matching("vit_tiny_patch16_384")
    ['vit_tiny_patch16_384.augreg_in21k_ft_in1k']
    """
    names: list[str] = timm.list_pretrained(pattern)
    if untrained or not (names or any(sign in pattern for sign in "*?[")):
        trained = {get_arch_name(name) for name in timm.list_pretrained()}
        names = names + [name for name in timm.list_models(pattern) if name not in trained]
    if not names:
        close = get_close_matches(pattern.strip("*").split(".")[0], timm.list_models(), n=3)
        hint = f" Did you mean {' or '.join(close)}?" if close else ""
        raise ModelError(
            f"No pretrained timm model matches {pattern!r}.{hint} Use * as a wildcard, such as 'vit_base*'."
        )
    return names


def _family(architecture: str) -> str:
    return str(model_entrypoint(architecture).__module__).rpartition(".")[2]
