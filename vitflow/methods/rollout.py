"""Attention rollout, gradient rollout, generic attention explainability: attention multiplied through the layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.fusion import (
    HeadFusion,
    SignedFusion,
    carry_rows,
    check_attentions,
    check_fraction,
    check_layer,
    check_prefix,
    check_readout,
    discard_low,
    fuse_heads,
    layers_of,
)
from vitflow.methods.gradients import at_least_float32
from vitflow.methods.tokens import Causal, relative_to, self_token, uniform_attention, visible_keys


def attention_rollout(
    attentions: Sequence[Tensor] | Tensor,
    *,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 1,
    num_prefix_tokens: int = 1,
    readout: Tensor | None = None,
    causal: Causal | None = None,
    attention_mask: Tensor | None = None,
    visible: Sequence[Tensor] | Tensor | None = None,
) -> Tensor:
    """Attention rollout: the product Â_L Â_{L−1} ⋯ Â_s of the layers' attention, each with its residual connection.

    With a `readout` q only the row qᵀ Â_L ⋯ Â_s is computed, from the top, in O(L · N²); without one, all rows.

    Args:
        attentions: layers of [batch, heads, tokens, tokens] or fused [batch, tokens, tokens], first layer first; or one
            tensor with a leading layer axis.
        head_fusion: "mean" (the paper), "max" or "min" over heads; fused attention is used unchanged.
        discard_ratio: share of the smallest values per image and layer to set to 0, 0 <= ratio < 1.
        residual: α, the share of the residual connection; the paper uses 0.5.
        start_layer: s, the first layer of the product; 1 is the paper, 2 leaves out the first layer.
        num_prefix_tokens: tokens before the patches, which are never discarded as keys.
        readout: weight of each token of the top layer in the model's output, [tokens] or [batch, tokens].
        causal: for attention restricted to visible keys, as in a decoder: "raw"; or "receptive_field", the rollout
            divided by that of uniform attention over the same keys; then a row's own token is 0 and the others sum to
            1. In both cases, values are discarded per row.
        attention_mask: [batch, tokens], 1 for tokens and 0 for padding, as in transformers; padding has no effect.
        visible: mask of the keys that each query may see, layers of bool [batch, tokens, tokens] or one for all; by
            default those that some head attends to.

    Returns:
        [batch, tokens, tokens], rows sum to 1: share of each input token (column) in each top token (row). With a
        readout, [batch, tokens]. In float64 relative to the receptive field.

    Raises:
        OptionError: an option is out of range.
        ShapeError: wrong shapes, or values that are not finite or negative.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §3.1.

    >>> layer = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> attention_rollout([layer, layer], residual=0.0)
    tensor([[[0.2500, 0.7500],
             [0.0000, 1.0000]]])
    """
    check_fraction("discard_ratio", discard_ratio)
    check_fraction("residual", residual)
    layers = check_attentions(attentions)
    first = check_layer("start_layer", start_layer, len(layers))
    batch, tokens = layers[0].shape[0], layers[0].shape[-1]
    check_prefix(num_prefix_tokens, tokens)
    seen = visible_keys(layers, causal, attention_mask, visible)
    fused = [fuse_heads(layer, head_fusion) if layer.ndim == 4 else layer for layer in layers[first:]]
    masks: Sequence[Tensor | None] = [None] * len(fused) if seen is None else seen[first:]
    if readout is None:
        top = torch.eye(tokens, device=fused[0].device).expand(batch, -1, -1)  # [batch, rows, tokens]
    else:
        top = check_readout(readout, batch, tokens).unsqueeze(1)

    def carried(layers: Sequence[Tensor], ratio: float) -> Tensor:
        rows = top.to(layers[0])
        for layer, mask in zip(reversed(layers), reversed(masks), strict=True):
            rows = carry_rows(rows, discard_low(layer, ratio, num_prefix_tokens, mask), residual)
        return rows

    if causal == "receptive_field":
        uniform = carried([uniform_attention(mask) for mask in masks if mask is not None], 0.0)
        rows = relative_to(carried([layer.double() for layer in fused], discard_ratio), uniform, self_token(top))
    else:
        rows = carried(fused, discard_ratio)
    return rows if readout is None else rows.squeeze(1)


def rollout_step(fused: Tensor, below: Tensor | None, residual: float, *, normal: bool = False) -> Tensor:
    """One more layer of rollout's product from the bottom up: Â P, for Â = rownorm(α I + (1 − α) W).

    Args:
        fused: fused attention W of the layer, [batch, tokens, tokens]; nothing is discarded.
        below: P, the product of the layers below it, of the same shape; None for the identity.
        residual: α, above 0.
        normal: True if the rows of W sum to 1.

    Returns:
        [batch, tokens, tokens].

    >>> rollout_step(torch.tensor([[[0.5, 0.5], [0.0, 1.0]]]), None, 0.5)
    tensor([[[0.7500, 0.2500],
             [0.0000, 1.0000]]])
    """
    if below is None:
        step = fused * (1.0 - residual)
        step.diagonal(dim1=-2, dim2=-1).add_(residual)
    else:  # into an existing tensor, without autocast
        step = torch.empty_like(below)
        torch.baddbmm(below, fused, below, beta=residual, alpha=1.0 - residual, out=step)
    return step if normal else step.div_(residual + (1.0 - residual) * fused.sum(dim=-1, keepdim=True))


def relevance(layers: Sequence[Tensor], *, start_layer: int = 1, readout: Tensor | None = None) -> Tensor:
    """Compute generic attention explainability: R ← R + W_l R from R = I, without normalisation.

    With a `readout` q only the row qᵀ (I + W_L) ⋯ (I + W_s) is computed, from the top, in O(L · N²).

    Args:
        layers: W_l as returned by `gradient_weighted_attention`, [batch, tokens, tokens], first layer first.
        start_layer: s, the first layer of the product; 1 is the paper.
        readout: weight of each token of the top layer in the model's output, [tokens] or [batch, tokens].

    Returns:
        [batch, tokens, tokens], row i: relevance of each input token (column) to token i of the top layer. With a
        readout, [batch, tokens].

    Raises:
        OptionError: there is no such layer.
        ShapeError: wrong shapes, or values that are not finite.

    Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", ICCV 2021, §3, self-attention.

    >>> relevance([torch.tensor([[[0.0, 0.5], [0.0, 0.0]]])], readout=torch.tensor([1.0, 0.0]))
    tensor([[1.0000, 0.5000]])
    """
    layers = check_attentions(layers)
    first = check_layer("start_layer", start_layer, len(layers))
    batch, tokens = layers[0].shape[0], layers[0].shape[-1]
    if readout is None:
        product = torch.eye(tokens, dtype=layers[0].dtype, device=layers[0].device).expand(batch, -1, -1)
        for layer in layers[first:]:
            product = product + layer @ product
        return product
    row = check_readout(readout, batch, tokens).to(layers[0]).unsqueeze(1)  # [batch, 1, tokens]
    for layer in reversed(layers[first:]):
        row = row + torch.bmm(row, layer)
    return row.squeeze(1)


def gradient_weighted_attention(
    attentions: Sequence[Tensor] | Tensor, gradients: Sequence[Tensor] | Tensor, head_fusion: SignedFusion
) -> list[Tensor]:
    """W_l, the fused (A_l ⊙ ∇A_l)⁺ of each layer, [batch, tokens, tokens], specific to one class.

    Gradient rollout is `attention_rollout` over them. Their entries are as small as the gradients, and their rows do
    not sum to 1, so `residual` sets the weight of longer paths: near 1 the map is a sum of the layers' rows.

    Args:
        attentions: layers of [batch, heads, tokens, tokens], first layer first; optionally weighted by their values.
        gradients: of each image's target logit with respect to the attention probabilities, of the same shapes.
        head_fusion: "mean" (both papers), "max" or "min" over heads; or "signed_mean", (mean_h (A_l ⊙ ∇A_l))⁺, in which
            heads with negative products cancel those with positive ones.

    Raises:
        OptionError: an unknown head fusion.
        ShapeError: the shapes do not agree.

    Source: J. Gildenblat, "Exploring Explainability for Vision Transformers", 2020; with the gradient of the
    probabilities, per image, and its layers in the order of the attention.

    >>> layer = torch.tensor([[[[0.5, 0.5], [0.5, 0.5]]]])
    >>> weights = gradient_weighted_attention([layer], [torch.tensor([[[[0.0, 2.0], [-1.0, 0.0]]]])], "mean")
    >>> attention_rollout(weights), relevance(weights)
    (tensor([[[0.5000, 0.5000],
             [0.0000, 1.0000]]]), tensor([[[1., 1.],
             [0., 1.]]]))
    """
    attentions, gradients = layers_of(attentions), layers_of(gradients)
    if len(attentions) != len(gradients):
        raise ShapeError(
            f"Expected as many layers of gradients as of attention, {len(attentions)}, got {len(gradients)}."
        )
    layers = []
    for number, (attention, gradient) in enumerate(zip(attentions, gradients, strict=True), start=1):
        if attention.ndim != 4 or gradient.shape != attention.shape:
            raise ShapeError(
                "Expected attention and its gradient of one shape [batch, heads, tokens, tokens], got "
                f"{tuple(attention.shape)} and {tuple(gradient.shape)} in layer {number}."
            )
        products = at_least_float32(attention) * gradient
        if head_fusion == "signed_mean":
            layers.append(products.mean(dim=-3).clamp_min(0.0))
        else:
            layers.append(fuse_heads(products.clamp_min(0.0), head_fusion))
    return layers
