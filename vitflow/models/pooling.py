"""Poolings: how a model computes its output from tokens, as it declares it and as other models commonly do."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import embedding_of, has_class_token, transformer_of
from vitflow.models.parts import pretrained_of

#: Name of a readout that is taken from the attention of a pooling head.
ATTENTION_POOLING = "attention pooling"
#: Name of a readout that includes the prefix tokens.
ALL_TOKENS = "average over all tokens"
_CLASS_TOKEN = "class token"
_BOTH_TOKENS = "class and distillation token"
_PATCH_MEAN = "average over patches"
# Packages whose models declare how they pool.
_LIBRARIES = ("timm.", "transformers.", "torchvision.", "open_clip.")
# Classifiers of transformers that average over patches (Dinov2 together with its class token).
_AVERAGING = {
    f"{name}ForImageClassification"
    for name in ("Dinov2", "Dinov2WithRegisters", "CLIP", "MetaClip2", "Siglip", "IJepa", "Swin", "Swinv2")
}


@dataclass(frozen=True, slots=True, eq=False)
class Pooling:
    """A known pooling.

    Attributes:
        name: "class token", "average over patches", …
        weights: weights of the top layer's tokens, [1 or batch, tokens]; rows sum to 1.
    """

    name: str
    weights: Tensor


def declared_pooling(model: nn.Module, layout: TokenLayout, pooling_attention: Tensor | None) -> Pooling | None:
    """Return the pooling that a model declares; None for a model whose forward method is not a library's.

    Args:
        model: any model.
        layout: layout of the top layer's tokens.
        pooling_attention: recorded attention of an attention-pooling head, [batch, heads, queries, tokens], or None.
    """
    if not type(model).forward.__module__.startswith(_LIBRARIES) or "forward" in vars(model):
        return None
    if pooling_attention is not None:
        return Pooling(ATTENTION_POOLING, pool_queries(model, layout, pooling_attention.detach().mean(dim=1)))
    return _pooling(_declared(model, layout), layout)


def pooling_name(readout: Tensor, layout: TokenLayout, rounding: float) -> str:
    """Return the name of the known pooling that a readout [tokens] equals, or an empty string.

    Args:
        readout: weights of the top layer's tokens, which sum to 1.
        layout: layout of these tokens.
        rounding: limit of the sum of absolute differences.

    >>> pooling_name(torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25]), TokenLayout(1, 2, 2), 1e-5)
    'average over patches'
    """
    names = (_CLASS_TOKEN, _PATCH_MEAN, ALL_TOKENS) if layout.num_prefix_tokens else (_PATCH_MEAN,)
    for name in names:
        if float((readout - _pooling(name, layout).weights[0].to(readout)).abs().sum()) <= rounding:
            return name
    both = layout.num_prefix_tokens == 2 and bool((readout[:2] > 0).all()) and float(readout[2:].sum()) <= rounding
    return _BOTH_TOKENS if both else ""


def _pooling(name: str, layout: TokenLayout) -> Pooling:
    weights = torch.zeros(1, layout.num_tokens)
    if name == _CLASS_TOKEN:
        weights[0, 0] = 1.0
    elif name == _BOTH_TOKENS:
        weights[0, :2] = 0.5
    elif "all tokens" in name:
        weights[:] = 1.0 / layout.num_tokens
    else:
        weights[0, layout.patches] = 1.0 / layout.num_patches
    return Pooling(name, weights)


def _declared(model: nn.Module, layout: TokenLayout) -> str:
    """Return the name of the pooling that the class, the configuration or the attributes of a model declare."""
    transformer: Any = transformer_of(model)
    pool, pretrained, embedding = getattr(transformer, "global_pool", None), pretrained_of(model), embedding_of(model)
    kinds = {kind.__name__ for kind in type(pretrained).__mro__}
    if (
        kinds & _AVERAGING
        or getattr(getattr(pretrained, "config", None), "use_mean_pooling", False)  # BEiT and Data2Vec
        or (embedding is not None and getattr(embedding.module, "pool_type", None) == "avg")  # open_clip
    ):
        return _PATCH_MEAN
    distilled = getattr(transformer, "head_dist", None) is not None or "DeiTForImageClassificationWithTeacher" in kinds
    if distilled and layout.num_prefix_tokens == 2:
        return _BOTH_TOKENS
    if has_class_token(model, layout) and pool not in ("avg", "avgmax", "max"):
        return _CLASS_TOKEN
    include_prefix = layout.num_prefix_tokens and getattr(transformer, "pool_include_prefix", False)
    words = {"max": "maximum", "avgmax": "average and maximum"}.get(str(pool), "average")
    over = "all tokens" if include_prefix else "patches"
    return f"{words} over {over}" + ("" if pool else " (the model does not pool)")


def pool_queries(model: nn.Module, layout: TokenLayout, queries: Tensor) -> Tensor:
    """Return the token weights [batch, tokens] of an attention-pooling head, its queries pooled as in the model.

    Args:
        model: the model that contains the head.
        layout: layout of the top layer's tokens.
        queries: attention of the head's queries, heads fused, [batch, queries, patches or tokens].

    Raises:
        UnsupportedModelError: the head pools a different number of tokens.
    """
    transformer: Any = transformer_of(model)
    pool = getattr(getattr(transformer, "attn_pool", None), "pool", "token")
    weights = queries.mean(dim=1) if pool == "avg" else queries[:, 0]
    missing = layout.num_tokens - layout.num_suffix_tokens - weights.shape[-1]
    if missing not in (0, layout.num_prefix_tokens) or layout.num_suffix_tokens:
        raise UnsupportedModelError(
            f"The attention pooling of {type(transformer).__name__} has {weights.shape[-1]} tokens, expected "
            f"{layout.num_tokens} or the {layout.num_patches} patches. Pass readout=, or use sampling, input_gradient "
            "or occlusion."
        )
    return torch.nn.functional.pad(weights, (missing, 0))
