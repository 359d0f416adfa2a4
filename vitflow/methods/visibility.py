"""Which keys each query may see, and attention relative to what uniform attention among these would give.

A token of a decoder sees those before it, fewer with a sliding window, more inside a prefix that sees both ways; nobody
sees padding. The product of layers then favours tokens that many others see, whatever the attention.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, unknown_name
from vitflow.methods.fusion import add_residual

Causal = Literal["raw", "receptive_field"]


def check_causal(causal: str | None) -> None:
    """Raise OptionError unless it is "raw", "receptive_field" or None."""
    if causal is not None and causal not in get_args(Causal):
        raise OptionError(unknown_name("causal", causal, get_args(Causal)))


def visible_keys(
    layers: Sequence[Tensor],
    causal: Causal | None = None,
    attention_mask: Tensor | None = None,
    visible: Sequence[Tensor] | Tensor | None = None,
) -> list[Tensor] | None:
    """Which keys each query of each layer may see, bool [batch, queries, keys]; None where nothing was said of it.

    Args:
        layers: [batch, heads, queries, keys] or fused [batch, queries, keys].
        causal, attention_mask, visible: as for `attention_rollout`.

    Raises:
        OptionError: an unknown word for causal.
        ShapeError: a mask does not fit the attention.

    >>> layer = torch.tensor([[[1.0, 0.0], [0.5, 0.5]]])
    >>> visible_keys([layer], "raw")[0].int()
    tensor([[[1, 0],
             [1, 1]]], dtype=torch.int32)
    """
    check_causal(causal)
    if causal is None and attention_mask is None and visible is None:
        return None
    batch, (queries, keys) = layers[0].shape[0], layers[0].shape[-2:]
    if visible is None:
        found = [(layer.amax(dim=1) if layer.ndim == 4 else layer) > 0 for layer in layers]
    else:
        given = [visible] * len(layers) if isinstance(visible, Tensor) else list(visible)
        if len(given) != len(layers) or any(one.shape[-2:] != (queries, keys) for one in given):
            raise ShapeError(
                f"Expected visible as {len(layers)} layers of [batch, {queries}, {keys}], or one of them for all, got "
                f"{[tuple(one.shape) for one in given]}."
            )
        found = [one.bool().to(layers[0].device).expand(batch, queries, keys) for one in given]
    if attention_mask is None:
        return found
    if attention_mask.shape != (batch, keys):
        raise ShapeError(
            f"Expected an attention_mask of shape [{batch}, {keys}], 1 for tokens and 0 for padding, got "
            f"{tuple(attention_mask.shape)}."
        )
    tokens = attention_mask.bool().to(layers[0].device)
    among = tokens.unsqueeze(1) & tokens[:, -queries:].unsqueeze(2)
    return [one & among for one in found]


def matrix_among(
    fused: Tensor, visible: Tensor, *, discard_ratio: float, residual: float, num_prefix_tokens: int
) -> Tensor:
    """One layer's Â among visible keys: discard in each row among these, then the residual.

    Args:
        fused: fused attention [..., tokens, tokens].
        visible: which keys each query may see, bool, of the same shape.
        discard_ratio: share of each row's visible keys to set to 0, the smallest first, ties by position; keys among
            the first `num_prefix_tokens` are never discarded.
        residual: α, the share of the residual connection.
        num_prefix_tokens: as for `attention_rollout`.

    Returns:
        Row-stochastic matrices of the same shape; a query that sees nothing keeps to itself.
    """
    return add_residual(discard_in_rows(fused, visible, discard_ratio, num_prefix_tokens), residual)


def discard_in_rows(fused: Tensor, visible: Tensor, discard_ratio: float, num_prefix_tokens: int = 0) -> Tensor:
    """Set what a query may not see to 0, and the smallest values of each row among the rest.

    >>> discard_in_rows(torch.tensor([[0.5, 0.2, 0.3]]), torch.tensor([[True, True, False]]), 0.5)
    tensor([[0.5000, 0.0000, 0.0000]])
    """
    kept = fused.masked_fill(~visible, 0.0)
    if not discard_ratio:
        return kept
    droppable = visible.clone()
    droppable[..., :num_prefix_tokens] = False
    count = (discard_ratio * droppable.sum(dim=-1, keepdim=True).double()).long()
    order = kept.masked_fill(~droppable, torch.inf).argsort(dim=-1, stable=True)
    return kept.masked_fill(order.argsort(dim=-1) < count, 0.0)


def uniform_attention(visible: Tensor) -> Tensor:
    """Attention that is the same for every key that a query may see: float64, of the same shape.

    >>> uniform_attention(torch.tensor([[True, False], [True, True]]))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    seen = visible.double()
    return seen / seen.sum(dim=-1, keepdim=True).clamp_min(1.0)


def relative_to(found: Tensor, reference: Tensor, own: Tensor | None = None) -> Tensor:
    """What was found as a multiple of what uniform attention gives, each row normalised to sum 1.

    Args:
        found: rows over tokens, [..., tokens].
        reference: the same of uniform attention; where it is 0, nothing can arrive, and the quotient is 0.
        own: which entry of a row is its own token, bool. It gets 0: deep and long, its share of the reference is so
            small that the quotient would be all its own.

    Returns:
        float64, of the same shape.

    >>> relative_to(torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.6, 0.1, 0.1]))
    tensor([0.2000, 0.6000, 0.2000], dtype=torch.float64)
    """
    reference = reference.double()
    quotient = torch.where(reference > 0, found.double() / torch.where(reference > 0, reference, 1.0), 0.0)
    if own is not None:
        quotient = quotient.masked_fill(own, 0.0)
    total = quotient.sum(dim=-1, keepdim=True)
    return quotient / torch.where(total > 0, total, 1.0)


def own_token(readout: Tensor) -> Tensor:
    """The token that a readout [batch, tokens] is of, as a mask of the same shape; none where it is of several."""
    spoken = readout != 0
    return spoken & (spoken.sum(dim=-1, keepdim=True) == 1)
