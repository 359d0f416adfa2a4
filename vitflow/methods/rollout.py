"""Attention rollout: attention as proportions, multiplied through the layers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitflow.methods.attention import check_layer, check_readout
from vitflow.methods.fusion import HeadFusion, check_attentions, layer_matrix


def attention_rollout(
    attentions: Sequence[Tensor] | Tensor,
    *,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 1,
    num_prefix_tokens: int = 1,
    readout: Tensor | None = None,
) -> Tensor:
    """Attention rollout: the product Â_L Â_{L−1} ⋯ Â_s of the layers' attention, each with its residual connection.

    With a `readout` q only the row qᵀ Â_L ⋯ Â_s is computed, from the top, in O(L · N²); without one, all rows.

    Args:
        attentions: layers of [batch, heads, tokens, tokens] or fused [batch, tokens, tokens], first layer first; or one
            tensor with a leading layer axis.
        head_fusion: "mean" (the paper), "max" or "min" over heads; fused attention is taken as it is.
        discard_ratio: share of the smallest values per picture and layer to set to 0, 0 <= ratio < 1.
        residual: α, the share of the residual connection; the paper uses 0.5.
        start_layer: s, the first layer of the product; 1 is the paper, 2 leaves out the first layer.
        num_prefix_tokens: tokens before the patches, which are never discarded as keys.
        readout: weight of each token of the top layer in the model's answer, [tokens] or [batch, tokens].

    Returns:
        [batch, tokens, tokens], rows sum to 1: how much of each input token (column) each top token (row) holds. With a
        readout, [batch, tokens].

    Raises:
        OptionError: an option lies outside its range.
        ShapeError: wrong shapes, or values that are not finite or negative.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §3.1.

    >>> layer = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> attention_rollout([layer, layer], residual=0.0)
    tensor([[[0.2500, 0.7500],
             [0.0000, 1.0000]]])
    """
    layers = check_attentions(attentions)
    first = check_layer("start_layer", start_layer, len(layers))
    batch, tokens = layers[0].shape[0], layers[0].shape[-1]

    def matrix(layer: Tensor) -> Tensor:
        return layer_matrix(
            layer,
            head_fusion=head_fusion,
            discard_ratio=discard_ratio,
            residual=residual,
            num_prefix_tokens=num_prefix_tokens,
        )

    if readout is None:
        product = matrix(layers[-1])
        for layer in reversed(layers[first:-1]):
            product = product @ matrix(layer)
        return product
    row = check_readout(readout, batch, tokens).to(layers[0]).unsqueeze(1)  # [batch, 1, tokens]
    for layer in reversed(layers[first:]):
        row = torch.bmm(row, matrix(layer))
    return row.squeeze(1)
