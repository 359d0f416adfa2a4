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
# Classifiers of transformers that average over patches (Dinov2 together with its class token).
_AVERAGING = {
    f"{name}ForImageClassification"
    for name in ("Dinov2", "Dinov2WithRegisters", "CLIP", "MetaClip2", "Siglip", "IJepa", "Swin", "Swinv2")
}


@dataclass(frozen=True, slots=True, eq=False)
class ClosedReadout:
    """Readout implied by a known pooling, to be verified before use.

    Attributes:
        weights: weights of the top layer's tokens, [1 or batch, tokens]; rows sum to 1.
        name: the pooling: "class token", "average over patches", …
        convention: "exact" if the gradient of an output must equal the weights, "support" if it must be 0 exactly where
            they are 0, "pooling" if the output must depend on the output of an attention-pooling head only.
    """

    weights: Tensor
    name: str
    convention: str = "exact"


def closed_readouts(model: nn.Module, layout: TokenLayout, pooling_attention: Tensor | None) -> list[ClosedReadout]:
    """Return the readouts of known poolings, the one that the model declares first.

    Args:
        model: any model.
        layout: layout of the top layer's tokens.
        pooling_attention: recorded attention of an attention-pooling head, [batch, heads, queries, tokens], or None.
    """
    if pooling_attention is None:
        declared = _closed_readout(_declared(model, layout), layout)
    else:
        weights = pool_queries(model, layout, pooling_attention.detach().mean(dim=1))
        declared = ClosedReadout(weights, ATTENTION_POOLING, "pooling")
    common = [_PATCH_MEAN, *([_CLASS_TOKEN, ALL_TOKENS] if layout.num_prefix_tokens else [])]
    return [declared, *(_closed_readout(name, layout) for name in common if name != declared.name)]


def _closed_readout(pooling: str, layout: TokenLayout) -> ClosedReadout:
    weights = torch.zeros(1, layout.num_tokens)
    if pooling == _CLASS_TOKEN:
        weights[0, 0] = 1.0
    elif pooling == _BOTH_TOKENS:
        weights[0, :2] = 0.5
    elif "all tokens" in pooling:
        weights[:] = 1.0 / layout.num_tokens
    else:
        weights[0, layout.patches] = 1.0 / layout.num_patches
    return ClosedReadout(weights, pooling, "support" if pooling == _BOTH_TOKENS else "exact")


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
