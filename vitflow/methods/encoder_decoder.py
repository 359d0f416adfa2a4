"""The joint graph of an encoder and a decoder that attends to it, and generic attention explainability on it."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitflow.methods.rollout import relevance


def joint_steps(encoder: Sequence[Tensor], decoder: Sequence[Tensor], crossing: Sequence[Tensor]) -> list[Tensor]:
    """Return the joint graph of an encoder-decoder model: one matrix [m + n, m + n] per step, source tokens first.

    Args:
        encoder: encoder self-attention of each layer, fused or as mask, [m, m].
        decoder: decoder self-attention, [n, n].
        crossing: cross-attention, [n, m].

    >>> one = torch.tensor([[1.0]])
    >>> steps = joint_steps([torch.tensor([[0.5, 0.5], [0.0, 1.0]])], [one], [torch.tensor([[0.25, 0.75]])])
    >>> steps[0], steps[2]
    (tensor([[0.5000, 0.5000, 0.0000],
            [0.0000, 1.0000, 0.0000],
            [0.0000, 0.0000, 1.0000]]), tensor([[1.0000, 0.0000, 0.0000],
            [0.0000, 1.0000, 0.0000],
            [0.2500, 0.7500, 0.0000]]))
    """
    n, m = crossing[0].shape
    source, target = (torch.eye(size).to(crossing[0]) for size in (m, n))
    steps = [torch.block_diag(layer, target) for layer in encoder]
    for layer, across in zip(decoder, crossing, strict=True):
        steps.append(torch.block_diag(source, layer))
        steps.append(torch.cat([torch.block_diag(source, target)[:m], nn.functional.pad(across, (0, n))]))
    return steps


def relevance_across(
    encoder: Sequence[Tensor],
    decoder: Sequence[Tensor],
    crossing: Sequence[Tensor],
    *,
    row: int,
    start_layer: int = 1,
) -> Tensor:
    """Compute generic attention explainability of an encoder-decoder model for one token of the decoder.

    R_ss of the source, R_tt of the decoder's tokens and R_ts begin as I, I and 0. Each layer W of the encoder adds
    W R_ss to R_ss. Each of the decoder adds W R_tt and W R_ts to R_tt and R_ts, then W′, its attention to the source,
    adds R̄_ttᵀ W′ R̄_ss to R_ts, where R̄ is I plus R − I with each row normalised to sum 1.

    Args:
        encoder, decoder, crossing: W and W′ as returned by `gradient_weighted_attention`, shaped as for `joint_steps`.
        row: index of the decoder token.
        start_layer: first encoder layer to include; 1 in the paper.

    Returns:
        The token's row of R_ts and R_tt if the decoder ends at each layer, [layers, m + n].

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
