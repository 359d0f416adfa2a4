"""The kinds of attention that models compute, where the tensors alone do not tell them apart.

Everything is recognised by the class names that timm gives its modules; a module that is not listed here is taken to be
plain self-attention between tokens.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.models.languages import text_config
from vitflow.models.parts import those_that
from vitflow.recording.layers import Arrange, AttentionLayer

# Softmaxes that are no attention between tokens.
_OTHER = {
    "XCA": "attention over channels (cross-covariance)",
    "CrossCovarianceAttn": "attention over channels (cross-covariance)",
    "ChannelAttention": "attention over channels",
    "ChannelAttentionV2": "attention over channels",
    "FactorAttnConvRelPosEnc": "factorised attention, which never makes a matrix between tokens",
    "LinearSelfAttention": "separable linear attention, which never makes a matrix between tokens",
    "LambdaLayer": "lambda layers, which never make a matrix between tokens",
    "HSMSSD": "a state space model",
    "EfficientViMBlock": "a state space model",
    "GlobalContext": "a gate over channels",
    "NonLocalAttn": "a non-local gate",
    "BilinearAttnTransform": "a bilinear gate",
    "SpatialTransformerBlock": "a spatial transformer",
    "LiteMLA": "linear attention, which never makes a matrix between tokens",
    "EfficientAdditiveAttention": "additive attention, which never makes a matrix between tokens",
}
# The heads of transformers' SigLIP models, around torch's own MultiheadAttention.
_SIGLIP_POOLING = ("SiglipMultiheadAttentionPoolingHead", "Siglip2MultiheadAttentionPoolingHead")
# Modules that pool the tokens by attention for the head, instead of mixing them in a layer.
_POOLING = ("AttentionPoolLatent", "AttentionPoolPrr", "AttentionPool2d", "RotAttentionPool2d", *_SIGLIP_POOLING)
# Modules whose one query is the class token, which stands before the keys and goes on through the layers.
_CLASS_ATTENTION = ("ClassAttn", "ClassAttention")
# The difference of two attention matrices.
_DIFFERENCE = ("DiffAttention", "DiffParallelScalingBlock", "DiffLlamaAttention")
# Modules that fold their heads into the batch, before their windows; and those that put windows before heads.
_FOLDED_WINDOWS = ("HaloAttn",)
_WINDOWS_FIRST = ("LocallyGroupedAttn",)
# Modules that compute each of their heads by itself, without a head axis.
_HEAD_BY_HEAD = ("CascadedGroupAttention",)
# Modules whose windows cannot be followed to the image.
_UNTRACED = ("HaloAttn", "CascadedGroupAttention")
# Models as a whole, to which a product of layers does not apply.
_REFUSED = {
    "CrossVit": "two branches of tokens at two scales, which exchange only their class tokens",
    "NextViT": "attention to runs of neighbours in the order of the tokens, which are no regions of the image",
}


# Modules whose own forward method only calls those of their parts, which adds, cuts and joins tokens at most.
_RELAYS = {
    "torch.nn.modules.container": ("Sequential", "ModuleList"),
    "timm.layers.mlp": ("Mlp", "GluMlp", "SwiGLU"),
    "timm.layers.patch_embed": ("PatchEmbed",),
    "timm.models.vision_transformer": ("VisionTransformer", "Block"),
    "timm.models.deit": ("VisionTransformerDistilled",),
    "timm.models.eva": ("Eva", "EvaBlock"),
    "timm.models.beit": ("Beit", "Block"),
}
# Where modules without parts come from that compute no attention by themselves; but for those that are one softmax.
_PLAIN_PARTS = ("torch.nn.modules.", "timm.layers.norm", "timm.layers.layer_scale", "timm.layers.drop")
_ALSO_PLAIN = ("LayerScale", "RotaryEmbeddingCat", "RotaryEmbeddingDinoV3", "PatchDropout")


# Layers that mix tokens without a matrix between them, as transformers names them in a configuration.
_OTHER_LAYERS = {
    "linear_attention": "linear attention or a state space model",
    "mamba": "a state space model",
    "conv": "convolutions over the text",
    "hybrid": "a state space model beside attention",
    "hybrid_sliding": "a state space model beside attention",
    "recurrent": "a recurrence",
}


def refuse_other_layers(model: nn.Module, method: str) -> None:
    """Refuse a method that multiplies layers, where some mix the tokens of a text otherwise than by attention.

    Raises:
        UnsupportedModelError: so it is; the message names what they compute.
    """
    config = text_config(model)
    types = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
    found = sorted({_OTHER_LAYERS[kind] for kind in types if kind in _OTHER_LAYERS})
    if found and method in ("rollout", "flow", "gae"):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers that mix its tokens by {' and '.join(found)}: {method}, a product of "
            "layers of attention, would leave them out. Use method='attention', the rows of one layer of attention."
        )


def _kind(module: nn.Module) -> str:
    return type(module).__name__


@those_that
def may_attend(module: nn.Module) -> bool:
    """Whether a module with parts may compute attention by itself, as far as its class does not tell that it cannot."""
    parts = [part for part in module._modules.values() if part is not None]
    if not parts or "_orig_mod" in module._modules:
        return False  # a leaf computes no attention between tokens by itself, nor does the wrapper of a compiled module
    kind = type(module)
    relays = kind.__qualname__ in _RELAYS.get(kind.__module__, ()) and kind.forward.__module__ == kind.__module__
    own = "forward" in module.__dict__
    return own or not relays or not all(part._modules or _is_plain(part) for part in parts)


def _is_plain(leaf: nn.Module) -> bool:
    kind = type(leaf)
    known = kind.__module__.startswith(_PLAIN_PARTS) or kind.__qualname__ in _ALSO_PLAIN
    return known and "forward" not in leaf.__dict__ and "softmax" not in kind.__qualname__.lower()


def other_attention(module: nn.Module) -> str | None:
    """What a module computes, if its softmax is no attention between tokens; else None."""
    return _OTHER.get(_kind(module))


def other_attention_in(model: nn.Module) -> str:
    """What a model computes beside or instead of attention between tokens, in words; empty if nothing is known."""
    found = {words for module in model.modules() if (words := other_attention(module)) is not None}
    return " and ".join(sorted(found))


def is_pooling(name: str, module: nn.Module) -> bool:
    """Whether a module pools the tokens for the head by attention, instead of mixing them in a layer."""
    return _kind(module) in _POOLING or name == "attn_pool" or name.endswith(".attn_pool")


def is_class_attention(module: nn.Module) -> bool:
    """Whether a module's only query is the class token, the first of its keys."""
    return _kind(module) in _CLASS_ATTENTION


def is_head_by_head(module: nn.Module) -> bool:
    """Whether a module is known to compute each of its heads by itself."""
    return _kind(module) in _HEAD_BY_HEAD


def is_difference(module: nn.Module) -> bool:
    """Whether a module applies the difference of two attention matrices."""
    return _kind(module) in _DIFFERENCE


def is_traced(module: nn.Module) -> bool:
    """Whether the windows of a module, if it has any, can be followed to the image."""
    return _kind(module) not in _UNTRACED


def is_packed(module: nn.Module, tensor: Tensor) -> bool:
    """Whether the heads that share a key stand in the place of queries, [batch, key heads, heads of a key, …].

    So transformers runs a single query of grouped heads.
    """
    groups = module.__dict__.get("num_key_value_groups", 1)
    if groups == 1 or tensor.ndim != 4 or tensor.shape[2] != groups:
        return False
    heads: Any = getattr(getattr(module, "config", None), "num_attention_heads", None)
    return bool(tensor.shape[1] * groups == heads)


def arrangement(module: nn.Module, tensor: Tensor, batch: int) -> Arrange | None:
    """How to bring what a module computed into the form [batch · windows, heads, tokens, …]; None if it has it.

    Args:
        module: the module that computed it.
        tensor: attention probabilities or values as the module made them.
        batch: how many images it ran on.
    """
    kind = _kind(module)
    if kind in _FOLDED_WINDOWS and tensor.ndim == 4:  # [batch · heads, windows, …]
        return lambda found: found.unflatten(0, (batch, -1)).transpose(1, 2).flatten(0, 1)
    if is_packed(module, tensor):
        return lambda found: found.flatten(1, 2).unsqueeze(2)
    if tensor.ndim == 4:
        return None
    if tensor.ndim == 3:
        heads: Any = getattr(module, "num_heads", None)
        folded = not is_head_by_head(module) and isinstance(heads, int) and heads > 1
        if folded and len(tensor) % (batch * heads) == 0:
            return lambda found: found.unflatten(0, (-1, heads))
        return lambda found: found.unsqueeze(1)
    if tensor.ndim == 5 and kind in _WINDOWS_FIRST:  # [batch, windows, heads, …]
        return lambda found: found.flatten(0, 1)
    if tensor.ndim == 5:  # [batch, heads, windows, …]
        return lambda found: found.transpose(1, 2).flatten(0, 1)
    return lambda found: found.reshape(-1, 1, *found.shape[-2:])


def refusal_of(model: nn.Module, layers: Sequence[AttentionLayer]) -> str | None:
    """Why rollout and flow do not apply to a model whose attention was seen, or None if they may."""
    words = refusal_in_words(model, layers)
    if not words:
        return None
    transformer = _refused(model) or model
    return (
        f"{type(transformer).__name__} computes {words}: a product of its layers is no rollout. Use gradcam, "
        "input_gradient or occlusion, which work on it; the attention itself is in trace.attentions."
    )


def refusal_of_words(model: nn.Module) -> str:
    """Why rollout and flow do not apply as a map to a pass that read a text."""
    return (
        f"{type(model).__name__} read a text, whose words have no place on an image and no readout of their own: use "
        "vitflow.text.explain_text, or vitflow.attention_rollout(trace.fused()); trace.streams tells its layers apart."
    )


def refusal_in_words(model: nn.Module, layers: Sequence[AttentionLayer]) -> str:
    """What a model computes to which rollout and flow do not apply; empty if they may."""
    transformer = _refused(model)
    if transformer is not None:
        return _REFUSED[_kind(transformer)]
    if any(not is_class_attention(model.get_submodule(layer.name)) for layer in layers):
        return ""
    return other_attention_in(model) or "no attention between patches"


def _refused(model: nn.Module) -> nn.Module | None:
    return next(iter(_is_refused(model)), None)


@those_that
def _is_refused(module: nn.Module) -> bool:
    return _kind(module) in _REFUSED
