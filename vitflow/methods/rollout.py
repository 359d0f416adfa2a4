"""Attention rollout, gradient rollout and generic attention explainability, also of an encoder with a decoder."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitflow.errors import OptionError, whole_number
from vitflow.methods.fusion import (
    HeadFusion,
    SignedFusion,
    carry_rows,
    check_attentions,
    check_fraction,
    check_layer,
    check_readout,
    discard_low,
    fuse_heads,
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
    `torch.export` traces it, unless values are discarded, masked or without residual; the program checks no values.

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
    if torch.compiler.is_exporting() and (discard_ratio or not residual):
        raise OptionError("torch.export requires discard_ratio=0 and a residual above 0.")
    layers = check_attentions(attentions)
    first = check_layer("start_layer", start_layer, len(layers))
    whole_number("num_prefix_tokens", num_prefix_tokens, 0, layers[0].shape[-1])
    seen = visible_keys(layers, causal, attention_mask, visible)
    fused = [fuse_heads(layer, head_fusion) if layer.ndim == 4 else layer for layer in layers[first:]]
    masks: Sequence[Tensor | None] = [None] * len(fused) if seen is None else seen[first:]
    top = _top_rows(readout, layers[0])

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


def relevance(layers: Sequence[Tensor], *, start_layer: int = 1, readout: Tensor | None = None) -> Tensor:
    """Return R of generic attention explainability: R ← R + W_l R from R = I, [batch, tokens, tokens].

    Row i is the relevance of each input token to token i of the top layer. With a `readout` q only the row qᵀ (I + W_L)
    ⋯ (I + W_s) is computed, [batch, tokens], from the top in O(L · N²).

    Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", ICCV 2021, §3, self-attention.

    >>> relevance([torch.tensor([[[0.0, 0.5], [0.0, 0.0]]])], readout=torch.tensor([1.0, 0.0]))
    tensor([[1.0000, 0.5000]])
    """
    layers = check_attentions(layers)
    first = check_layer("start_layer", start_layer, len(layers))
    rows = _top_rows(readout, layers[0]).to(layers[0])
    for layer in reversed(layers[first:]):
        rows = rows + torch.bmm(rows, layer)
    return rows if readout is None else rows.squeeze(1)


def _top_rows(readout: Tensor | None, layer: Tensor) -> Tensor:
    """Return the rows with which a product from the top starts: the readout [batch, 1, tokens], or the identity."""
    batch, tokens = layer.shape[0], layer.shape[-1]
    if readout is None:
        return torch.eye(tokens, device=layer.device).expand(batch, -1, -1)
    return check_readout(readout, batch, tokens).unsqueeze(1)


def gradient_weighted_attention(
    attentions: Sequence[Tensor], gradients: Sequence[Tensor], head_fusion: SignedFusion
) -> list[Tensor]:
    """W_l, the fused (A_l ⊙ ∇A_l)⁺ of each layer, [batch, tokens, tokens], specific to one class.

    Gradient rollout is `attention_rollout` over them. Their entries are as small as the gradients, and their rows do
    not sum to 1, so `residual` sets the weight of longer paths: near 1 the map is a sum of the layers' rows. With
    "signed_mean", (mean_h (A_l ⊙ ∇A_l))⁺, heads with negative products cancel those with positive ones.

    Source: J. Gildenblat, "Exploring Explainability for Vision Transformers", 2020; with the gradient of the
    probabilities, per image, and its layers in the order of the attention.

    >>> layer = torch.tensor([[[[0.5, 0.5], [0.5, 0.5]]]])
    >>> weights = gradient_weighted_attention([layer], [torch.tensor([[[[0.0, 2.0], [-1.0, 0.0]]]])], "mean")
    >>> attention_rollout(weights), relevance(weights)
    (tensor([[[0.5000, 0.5000],
             [0.0000, 1.0000]]]), tensor([[[1., 1.],
             [0., 1.]]]))
    """
    layers = []
    for attention, gradient in zip(attentions, gradients, strict=True):
        products = at_least_float32(attention) * gradient
        if head_fusion == "signed_mean":
            layers.append(products.mean(dim=-3).clamp_min(0.0))
        else:
            layers.append(fuse_heads(products.clamp_min(0.0), head_fusion))
    return layers


def joint_steps(encoder: Sequence[Tensor], decoder: Sequence[Tensor], crossing: Sequence[Tensor]) -> list[Tensor]:
    """Return the joint graph of an encoder-decoder model: one matrix [m + n, m + n] per step, source tokens first.

    Each layer of the encoder is [m, m]; the decoder's self-attention is [n, n], and its cross-attention [n, m].

    >>> one = torch.tensor([[1.0]])
    >>> joint_steps([], [one], [torch.tensor([[0.25, 0.75]])])[1]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.0000, 1.0000, 0.0000],
            [0.2500, 0.7500, 0.0000]])
    """
    n, m = crossing[0].shape
    source, target = (torch.eye(size).to(crossing[0]) for size in (m, n))
    steps = [torch.block_diag(layer, target) for layer in encoder]
    for layer, across in zip(decoder, crossing, strict=True):
        steps.append(torch.block_diag(source, layer))
        steps.append(torch.cat([torch.block_diag(source, target)[:m], torch.nn.functional.pad(across, (0, n))]))
    return steps


def relevance_across(
    encoder: Sequence[Tensor], decoder: Sequence[Tensor], crossing: Sequence[Tensor], *, row: int, start_layer: int = 1
) -> Tensor:
    """Return the token's row of R_ts and R_tt if the decoder ends at each layer, [layers, m + n].

    Generic attention explainability of an encoder-decoder model: R_ss of the source, R_tt of the decoder's tokens and
    R_ts begin as I, I and 0. Each layer W of the encoder adds W R_ss to R_ss. Each of the decoder adds W R_tt and W
    R_ts to R_tt and R_ts, then W′, its attention to the source, adds R̄_ttᵀ W′ R̄_ss to R_ts, where R̄ is I plus R − I
    with each row normalised to sum 1. W and W′ are as `gradient_weighted_attention` returns them; `start_layer` is of
    the encoder.

    Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", ICCV 2021, §3.2.

    >>> one = torch.tensor([[1.0]])
    >>> relevance_across([0.5 * torch.eye(2)], [one], [torch.tensor([[0.25, 0.75]])], row=0)
    tensor([[1., 3., 2.]])
    """
    below = _normalised(relevance([layer.unsqueeze(0) for layer in encoder], start_layer=start_layer)[0])
    target, source = torch.eye(len(decoder[0])).to(below), torch.zeros_like(crossing[0])  # R_tt, R_ts
    rows = []
    for layer, across in zip(decoder, crossing, strict=True):
        source = source + layer @ source
        target = target + layer @ target
        source = source + _normalised(target).mT @ across @ below
        rows.append(torch.cat([source[row], target[row]]))
    return torch.stack(rows)


def _normalised(relevances: Tensor) -> Tensor:
    """Return R̄ = I + (R − I) with each row of R − I normalised to sum 1."""
    eye = torch.eye(len(relevances)).to(relevances)
    added = relevances - eye
    total = added.sum(dim=-1, keepdim=True)
    return eye + added / torch.where(total > 0, total, 1.0)
