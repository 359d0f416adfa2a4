"""Raw attention: what the readout attends to in one layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, whole_number
from vitflow.methods.fusion import (
    HeadFusion,
    check_attentions,
    check_prefix,
    discard_low,
    fuse_heads,
    kind_of,
    layers_of,
)


def check_layer(name: str, layer: int, count: int) -> int:
    """Turn a layer number, 1 … L or −1 for the last, into a list index; OptionError if there is no such layer."""
    layer = whole_number(name, layer)
    if 1 <= layer <= count:
        return layer - 1
    if -count <= layer <= -1:
        return count + layer
    raise OptionError(f"Expected {name} from 1 to {count} (or -1 for the last), got {layer}.")


def one_head(attention: Tensor, head: int) -> Tensor:
    """One head of [batch, heads, tokens, tokens], [batch, tokens, tokens]; OptionError if there is no such head."""
    if attention.ndim == 3:
        raise OptionError("A single head needs attention with all heads, got fused attention.")
    return attention[:, whole_number("head", head, 0, attention.shape[1] - 1)]


def check_readout(readout: Tensor, batch: int, num_tokens: int) -> Tensor:
    """Check a readout over tokens and return it as [batch, tokens]; a single vector serves the whole batch."""
    if not isinstance(readout, Tensor) or readout.is_complex() or not torch.isfinite(readout).all():
        raise ShapeError(
            f"Expected a readout of finite real numbers as a torch tensor, got {kind_of(readout)}: make one with "
            "torch.as_tensor(…)."
        )
    if (
        readout.shape[-1:] != (num_tokens,)
        or readout.ndim > 2
        or (readout.ndim == 2 and len(readout) not in (1, batch))
    ):
        raise ShapeError(
            f"Expected a readout of shape [{num_tokens}] or [{batch}, {num_tokens}], got {tuple(readout.shape)}."
        )
    return readout.reshape(-1, num_tokens).expand(batch, -1)


def raw_attention(
    attentions: Sequence[Tensor] | Tensor,
    *,
    readout: Tensor,
    layer: int = -1,
    head: int | None = None,
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    num_prefix_tokens: int = 1,
) -> Tensor:
    """Attention of the readout in one layer: qᵀ W_l, as [batch, tokens].

    Args:
        attentions: layers of [batch, heads, tokens, tokens] or fused [batch, tokens, tokens], first layer first.
        readout: weight of each token in the model's answer, [tokens] or [batch, tokens].
        layer: layer number, 1 for the first, −1 for the last.
        head: one head's own attention, 0 … H − 1, instead of the fused heads.
        head_fusion: "mean", "max" or "min" over heads.
        discard_ratio: share of the smallest values to set to 0.
        num_prefix_tokens: tokens before the patches.

    Raises:
        OptionError: no such layer or head; a head of fused attention.
        ShapeError: wrong shapes, or values that are not finite or negative.

    Source: the baseline of Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers", ACL 2020.

    >>> import torch
    >>> attention = torch.tensor([[[[0.2, 0.8], [0.5, 0.5]]]])
    >>> raw_attention([attention], readout=torch.tensor([1.0, 0.0]))
    tensor([[0.2000, 0.8000]])
    """
    layers = layers_of(attentions)
    index = check_layer("layer", layer, len(layers))
    [chosen] = check_attentions([layers[index]])
    check_prefix(num_prefix_tokens, chosen.shape[-1])
    if head is not None:
        chosen = one_head(chosen, head).unsqueeze(1)
    fused = fuse_heads(chosen, head_fusion) if chosen.ndim == 4 else chosen
    fused = discard_low(fused, discard_ratio, num_prefix_tokens)
    weights = check_readout(readout, *fused.shape[::2]).to(fused)
    return (weights.unsqueeze(1) @ fused).squeeze(1)
