"""Kinds of attention that cannot be distinguished by their tensors.

Kinds are recognised by timm's class names, or those of base classes; a module that is not listed is treated as plain
self-attention.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS, UnsupportedModelError
from vitflow.models.parts import ModelState, modules_of, text_config

# Rearranges probabilities or values to [batch · windows, heads, tokens, …].
Arrange = Callable[[Tensor], Tensor]
# Softmaxes that are not attention between tokens.
_OTHER = {
    "XCA": "attention over channels (cross-covariance)",
    "CrossCovarianceAttn": "attention over channels (cross-covariance)",
    "ChannelAttention": "attention over channels",
    "ChannelAttentionV2": "attention over channels",
    "FactorAttnConvRelPosEnc": "factorised attention without a matrix between tokens",
    "LinearSelfAttention": "separable linear attention without a matrix between tokens",
    "LambdaLayer": "lambda layers without a matrix between tokens",
    "HSMSSD": "a state space model",
    "EfficientViMBlock": "a state space model",
    "GlobalContext": "a gate over channels",
    "NonLocalAttn": "a non-local gate",
    "BilinearAttnTransform": "a bilinear gate",
    "SpatialTransformerBlock": "a spatial transformer",
    "LiteMLA": "linear attention without a matrix between tokens",
    "EfficientAdditiveAttention": "additive attention without a matrix between tokens",
}
# Attention pooling modules of the head; those of transformers' SigLIP models are around torch's MultiheadAttention.
_POOLING = (
    *("AttentionPoolLatent", "AttentionPoolPrr", "AttentionPool2d", "RotAttentionPool2d"),
    *("SiglipMultiheadAttentionPoolingHead", "Siglip2MultiheadAttentionPoolingHead"),
)
# Modules whose only query is the class token, which is also the first key.
_CLASS_ATTENTION = ("ClassAttn", "ClassAttention")
# The difference of two attention matrices.
_DIFFERENCE = ("DiffAttention", "DiffParallelScalingBlock", "DiffLlamaAttention")
# Modules that fold heads into the batch, before windows; and modules with windows before heads.
_FOLDED_WINDOWS = ("HaloAttn",)
_WINDOWS_FIRST = ("LocallyGroupedAttn", "RelativePositionalMultiHeadAttention")
# Names of the number of heads.
_HEADS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head", "nhead", "nheads", "h")
# Modules that compute each head separately, without a head axis, and from the output of the previous head.
_HEAD_BY_HEAD = ("CascadedGroupAttention",)
# Modules that add queries to the results of attention, or sum those of overlapping windows, before the projection.
_ADDING = ("MultiScaleAttention", "OutlookAttention")
# Models that a product of layers does not support.
_REFUSED = {
    "CrossVit": "two branches of tokens at two scales, which exchange only their class tokens",
    "NextViT": "attention to runs of neighbours in token order, which are not image regions",
}
_LISTED = {*_OTHER, *_POOLING, *_CLASS_ATTENTION, *_DIFFERENCE, *_FOLDED_WINDOWS, *_WINDOWS_FIRST, *_HEAD_BY_HEAD}
_LISTED |= {*_REFUSED, *_ADDING}
# Modules whose forward method only calls submodules, and adds, splits or concatenates tokens at most.
_RELAYS = {
    "torch.nn.modules.container": ("Sequential", "ModuleList"),
    "timm.layers.mlp": ("Mlp", "GluMlp", "SwiGLU"),
    "timm.layers.patch_embed": ("PatchEmbed",),
    "timm.models.vision_transformer": ("VisionTransformer", "Block"),
    "timm.models.deit": ("VisionTransformerDistilled",),
    "timm.models.eva": ("Eva", "EvaBlock"),
    "timm.models.beit": ("Beit", "Block"),
}
# Packages of leaf modules without attention, except softmax modules.
_PLAIN_PARTS = ("torch.nn.modules.", "timm.layers.norm", "timm.layers.layer_scale", "timm.layers.drop")
_ALSO_PLAIN = ("LayerScale", "RotaryEmbeddingCat", "RotaryEmbeddingDinoV3", "PatchDropout")
# Layer types of transformers' configurations that mix tokens without an attention matrix.
_OTHER_LAYERS = {
    "linear_attention": "linear attention or a state space model",
    "mamba": "a state space model",
    "conv": "convolutions over the text",
    "hybrid": "a state space model alongside attention",
    "hybrid_sliding": "a state space model alongside attention",
    "recurrent": "a recurrence",
}


def refuse_other_layers(model: nn.Module, method: str) -> None:
    """Raise UnsupportedModelError if a method multiplies layers, some of which mix text without attention."""
    config = text_config(model)
    types = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    others = sorted({_OTHER_LAYERS[kind] for kind in types if kind in _OTHER_LAYERS})
    if others and method in ("rollout", "flow", "gae"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with {' and '.join(others)}, which {method}, a product of attention "
            "layers, would omit. Use method='attention', the rows of one attention layer."
        )


def _kind(module: nn.Module) -> str:
    kind: type = type(module)
    return _listed(kind)


@cache
def _listed(kind: type[nn.Module]) -> str:
    """Return the name of a class, or of its nearest base class that is listed here, as a subclass computes the same."""
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in _LISTED), kind.__name__)


def may_attend(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that may compute attention themselves, by path."""
    return {path: module for path, module in ModelState(model).modules.items() if _may_attend(module)}


def _may_attend(module: nn.Module) -> bool:
    """Return True for a module with submodules, unless its class excludes that it attends."""
    if not module._modules or "_orig_mod" in module._modules:
        return False  # leaves and wrappers of compiled modules compute no attention
    parts = [part for part in module._modules.values() if part is not None]
    kind = type(module)
    relays = kind.__qualname__ in _RELAYS.get(kind.__module__, ()) and kind.forward.__module__ == kind.__module__
    patched = "forward" in module.__dict__
    return bool(parts) and (patched or not relays or not all(part._modules or _is_plain(part) for part in parts))


def _is_plain(leaf: nn.Module) -> bool:
    kind = type(leaf)
    known = kind.__module__.startswith(_PLAIN_PARTS) or kind.__qualname__ in _ALSO_PLAIN
    return known and "forward" not in leaf.__dict__ and "softmax" not in kind.__qualname__.lower()


def other_attention(module: nn.Module) -> str | None:
    """Return what a module computes, if its softmax is not attention between tokens; otherwise None."""
    return _OTHER.get(_kind(module))


def other_attention_in(model: nn.Module) -> str:
    """Describe what a model computes in addition to or instead of attention between tokens; empty if unknown."""
    words = {kind for module in model.modules() if (kind := other_attention(module)) is not None}
    return " and ".join(sorted(words))


def is_pooling(name: str, module: nn.Module) -> bool:
    """Return True if a module is the attention pooling of a head."""
    return _kind(module) in _POOLING or name == "attn_pool" or name.endswith(".attn_pool")


def is_class_attention(module: nn.Module) -> bool:
    """Return True if a module's only query is the class token, the first key."""
    return _kind(module) in _CLASS_ATTENTION


def is_head_by_head(module: nn.Module) -> bool:
    """Return True if a module computes each head separately."""
    return _kind(module) in _HEAD_BY_HEAD


def is_difference(module: nn.Module) -> bool:
    """Return True if a module applies the difference of two attention matrices."""
    return _kind(module) in _DIFFERENCE


def adds_to_results(module: nn.Module) -> bool:
    """Return True if a module adds something linear to the results of its attention before they are projected."""
    return _kind(module) in _ADDING


def convolves_tokens(module: nn.Module) -> bool:
    """Return True if a module contains a convolution over several tokens, as Nyströmformer and ConvBERT."""
    kinds = (nn.Conv1d, nn.Conv2d)
    return any(isinstance(part, kinds) and max(part.kernel_size) > 1 for part in module.modules())


def is_packed(module: nn.Module, tensor: Tensor) -> bool:
    """Return True for [batch, key heads, heads per key, …], as transformers computes grouped queries of one token."""
    groups = module.__dict__.get("num_key_value_groups", 1)
    if groups == 1 or tensor.ndim != 4 or tensor.shape[2] != groups:
        return False
    heads: Any = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return bool(tensor.shape[1] * groups == heads)


def arrangement(path: Sequence[tuple[str, nn.Module]], tensor: Tensor, batch: int) -> Arrange | None:
    """Return a function that rearranges a tensor to [batch · windows, heads, tokens, …]; None if it is so already.

    `path` has the running modules, outermost first. The number of heads is an attribute of the last one, or of the
    module around it.
    """
    module = path[-1][1]
    kind = _kind(module)
    if kind in _FOLDED_WINDOWS and tensor.ndim == 4:  # [batch · heads, windows, …]
        return lambda tensor: tensor.unflatten(0, (batch, -1)).transpose(1, 2).flatten(0, 1)
    if is_packed(module, tensor):
        return lambda tensor: tensor.flatten(1, 2).unsqueeze(2)
    if tensor.ndim == 4:
        return None
    named: Any = (getattr(each, name, None) for _, each in reversed(path[-2:]) for name in _HEADS)
    heads: int = next((each for each in named if isinstance(each, int)), 1)
    if tensor.ndim == 3:
        if heads > 1 and len(tensor) % (batch * heads) == 0 and not is_head_by_head(module):
            return lambda tensor: tensor.unflatten(0, (-1, heads))
        return lambda tensor: tensor.unsqueeze(1)
    if tensor.ndim == 5 and (kind in _WINDOWS_FIRST or tensor.shape[1] != heads == tensor.shape[2]):
        # [batch, windows, heads, …]
        return lambda tensor: tensor.flatten(0, 1)
    if tensor.ndim == 5:  # [batch, heads, windows, …]
        return lambda tensor: tensor.transpose(1, 2).flatten(0, 1)
    return lambda tensor: tensor.reshape(-1, 1, *tensor.shape[-2:])


def refusal_of(model: nn.Module, layers: Sequence[str]) -> str | None:
    """Return why rollout and flow do not apply to a model whose attention layers have these paths, or None."""
    words = refusal_in_words(model, layers)
    sentence = f"{type(model).__name__} computes {words}: a product of its layers is not a rollout. {OTHER_METHODS}"
    return sentence if words else None


def refusal_of_text(model: nn.Module) -> str:
    """Return why rollout and flow give no map for a text input."""
    return (
        f"The input of {type(model).__name__} is text, which has no image positions and no readout: use "
        "vitflow.text.explain_text, or vitflow.attention_rollout(trace.fused()); trace.layers.streams groups them."
    )


def refusal_in_words(model: nn.Module, layers: Sequence[str]) -> str:
    """Describe what makes rollout and flow inapplicable to a model; empty if nothing."""
    refused = _REFUSED.keys() & set(map(_listed, set(map(type, modules_of(model)))))
    if refused:
        return _REFUSED[refused.pop()]
    if any(not is_class_attention(model.get_submodule(path)) for path in layers):
        return ""
    return other_attention_in(model) or "no attention between patches"
