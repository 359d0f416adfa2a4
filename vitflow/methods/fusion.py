"""From the heads of one layer to one row-stochastic matrix: head fusion, discard, residual."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, check_known, whole_number

HeadFusion = Literal["mean", "max", "min"]
HEAD_FUSIONS: tuple[HeadFusion, ...] = get_args(HeadFusion)
# For signed values: average heads before clamping negatives.
SignedFusion = HeadFusion | Literal["signed_mean"]


def check_head_fusion(head_fusion: str) -> None:
    """Raise OptionError unless the name is one of mean, max, min."""
    check_known("head fusion", head_fusion, HEAD_FUSIONS)


def check_fraction(name: str, value: Any) -> None:
    """Raise OptionError unless 0 <= value < 1."""
    if not isinstance(value, int | float | np.floating) or not 0.0 <= value < 1.0:
        raise OptionError(f"Expected a number 0 <= {name} < 1, got {value!r}.")


def fuse_heads(attention: Tensor, head_fusion: HeadFusion = "mean", *, out: Tensor | None = None) -> Tensor:
    """Fuse the heads of one layer: [..., heads, queries, keys] → [..., queries, keys].

    Source: Abnar & Zuidema 2020, §3 (mean); max and min are common practice.

    >>> fuse_heads(torch.tensor([[[0.2, 0.8]], [[0.6, 0.4]]]), "max")
    tensor([[0.6000, 0.8000]])
    """
    check_head_fusion(head_fusion)
    if head_fusion == "mean":
        return torch.mean(attention, dim=-3, out=out)
    extreme = torch.amax if head_fusion == "max" else torch.amin
    return extreme(attention, dim=-3, out=out)


def discard_low(
    fused: Tensor, discard_ratio: float, num_prefix_tokens: int = 1, visible: Tensor | None = None
) -> Tensor:
    """Set the smallest attention values to 0: [..., tokens, tokens] → the same shape.

    Exactly k = ⌊ratio · N · n⌋ entries of each matrix are discarded among the N · n whose key is a patch token, the
    smallest first and ties by position; an entry whose key is a prefix token is never discarded. With `visible`, hidden
    entries become 0 and k is counted in each row, among its visible keys.

    >>> layer = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.4, 0.4]])
    >>> discard_low(layer, 0.5)
    tensor([[0.5000, 0.0000, 0.0000],
            [0.1000, 0.6000, 0.0000],
            [0.2000, 0.4000, 0.4000]])
    """
    check_fraction("discard_ratio", discard_ratio)
    if visible is not None:
        fused, droppable = fused.masked_fill(~visible, 0.0), visible.clone()
        droppable[..., :num_prefix_tokens] = False
        counts = (discard_ratio * droppable.sum(dim=-1, keepdim=True).double()).long()
        order = fused.masked_fill(~droppable, torch.inf).argsort(dim=-1, stable=True)
        return fused.masked_fill(order.argsort(dim=-1) < counts, 0.0) if discard_ratio else fused
    patches = fused[..., num_prefix_tokens:]  # [..., tokens, patches]
    count = int(discard_ratio * patches.shape[-2] * patches.shape[-1])
    if count == 0:
        return fused
    kept = larger_than(patches.flatten(-2), count).view(patches.shape)
    return torch.cat([fused[..., :num_prefix_tokens], patches * kept], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class LargestValues:
    """The values of fused attention that `discard_low` keeps.

    Attributes:
        index, values: positions in the flat matrix, int32, and values, [batch, count], of entries with a patch as key.
        prefix: the columns of the prefix tokens, [batch, tokens, prefix tokens].
    """

    index: Tensor
    values: Tensor
    prefix: Tensor

    @classmethod
    def of(cls, fused: Tensor, discard_ratio: float, num_prefix_tokens: int) -> "LargestValues":
        """Keep the largest values of matrices [batch, tokens, tokens] on the CPU, whose memory may be changed.

        >>> layer = torch.tensor([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.4, 0.4]]])
        >>> LargestValues.of(layer, 0.5, 1).values
        tensor([[0.6000, 0.4000, 0.4000]])
        """
        batch, tokens = len(fused), fused.shape[-1]
        prefix = fused[..., :num_prefix_tokens].clone()
        fused[..., :num_prefix_tokens] = -1.0  # smaller than any attention
        discarded = num_prefix_tokens * tokens + int(discard_ratio * tokens * (tokens - num_prefix_tokens))
        rows = fused.flatten(1)
        index = larger_than(rows, discarded).nonzero()[:, 1].view(batch, -1)
        return cls(index.int(), rows.gather(1, index), prefix)

    @property
    def matrix(self) -> Tensor:
        """The matrices, [batch, tokens, tokens], with 0 for the other values."""
        batch, tokens, prefix = self.prefix.shape
        flat = self.values.new_zeros(batch, tokens * tokens).scatter_(1, self.index.long(), self.values)
        matrix = flat.view(batch, tokens, tokens)
        matrix[..., :prefix] = self.prefix
        return matrix


def dense(fused: Tensor | LargestValues) -> Tensor:
    """Return fused attention as a matrix."""
    return fused.matrix if isinstance(fused, LargestValues) else fused


def larger_than(values: Tensor, count: int) -> Tensor:
    """Return the mask of all but the `count` smallest of the last axis, ties by position; `count` is at least 1.

    >>> larger_than(torch.tensor([3.0, 1.0, 1.0, 2.0]), 1)
    tensor([ True, False,  True,  True])
    """
    values = values.detach()
    if values.is_cpu and values.dtype.itemsize >= 4:  # NumPy is ten times as fast
        limit = torch.from_numpy(np.partition(values.numpy(), count - 1)[..., count - 1, None])
    else:
        limit = values.kthvalue(count, dim=-1, keepdim=True).values
    larger = values > limit
    missing = values.shape[-1] - count - larger.count_nonzero(dim=-1).unsqueeze(-1)
    if missing.any():  # of the values equal to the limit, the last ones
        equal = values == limit
        larger |= equal & (equal.flip(-1).cumsum(dim=-1).flip(-1) <= missing)
    return larger


def normalize_rows(matrix: Tensor, *, in_place: bool = False) -> Tensor:
    """Divide each row by its sum; a row of zeros becomes that of the identity, if the matrix is square.

    With `in_place`, the memory of the matrix may be used for the result.

    >>> normalize_rows(torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    tensor([[0.2500, 0.7500],
            [0.0000, 1.0000]])
    """
    total = matrix.sum(dim=-1, keepdim=True)
    # Nearly always, in a fifth of the time of the code below; but a GPU would wait for the answer.
    if total.is_cpu and (total > 0).all():
        return matrix.div_(total) if in_place else matrix / total
    empty = total <= 0
    normal = matrix / torch.where(empty, 1.0, total)
    if matrix.shape[-2] != matrix.shape[-1]:
        return normal
    return torch.where(empty, torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device), normal)


def add_residual(fused: Tensor, residual: float = 0.5) -> Tensor:
    """Mix in the residual connection: Â = rownorm(α I + (1 − α) W), for W [..., tokens, tokens].

    A row of W with all entries discarded becomes the identity row, even if α = 0.

    Source: Abnar & Zuidema 2020, §3: A = 0.5 W_att + 0.5 I, re-normalized.

    >>> add_residual(torch.tensor([[0.0, 1.0], [0.0, 1.0]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000]])
    """
    check_fraction("residual", residual)
    mixed = (1.0 - residual) * fused
    if residual > 0:
        mixed = mixed + residual * torch.eye(fused.shape[-1], dtype=fused.dtype, device=fused.device)
    return normalize_rows(mixed)


def residual_shares(sums: Tensor, residual: float) -> tuple[Tensor, Tensor]:
    """Return the weight of the residual connection in each row of Â, and the factor of W's row, from W's row sums.

    If α is 0, rows with sums far below 1 must have been normalised before.

    >>> residual_shares(torch.tensor([1.0, 3.0, 0.0]), 0.5)
    (tensor([0.5000, 0.2500, 1.0000]), tensor([0.5000, 0.2500, 0.0000]))
    """
    empty = sums <= 0
    whole = torch.where(empty, 1.0, residual + (1.0 - residual) * sums)
    return torch.where(empty, 1.0, residual / whole), torch.where(empty, 0.0, (1.0 - residual) / whole)


def carry_rows(rows: Tensor, fused: Tensor, residual: float) -> Tensor:
    """Carry rows [batch, rows, tokens] through one layer: rows · Â for Â = rownorm(α I + (1 − α) W), not formed.

    >>> layer = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> carry_rows(torch.tensor([[[1.0, 0.0]]]), layer, 0.5)
    tensor([[[0.7500, 0.2500]]])
    """
    if residual == 0.0:
        return rows @ normalize_rows(fused)
    kept, passed = residual_shares(fused.sum(dim=-1).unsqueeze(-2), residual)
    return (rows * passed) @ fused + rows * kept


def check_attentions(attentions: Sequence[Tensor] | Tensor, first: int = 1) -> list[Tensor]:
    """Return attention as a list of [batch, heads, tokens, tokens] or fused [batch, tokens, tokens], first layer first.

    Half precision becomes float32; if a layer is float64, all become float64. In errors, layers count from `first`.

    Raises:
        ShapeError: no layers, other shapes, or values that are negative, NaN or infinite.
    """
    layers = layers_of(attentions)
    for number, layer in enumerate(layers, start=first):
        shape = tuple(layer.shape)
        if layer.ndim not in (3, 4) or shape[-1] != shape[-2]:
            expected = "[batch, heads, tokens, tokens] or fused [batch, tokens, tokens]"
            raise ShapeError(f"Expected attention {expected}, got {shape} in layer {number}.")
        if (shape[0], shape[-1]) != (layers[0].shape[0], layers[0].shape[-1]):
            raise ShapeError(
                f"Expected the same batch and tokens in every layer, got {tuple(layers[0].shape)} in layer {first} and "
                f"{shape} in layer {number}. For models with stages use vitflow.Explainer."
            )
        if layer.numel() == 0:
            raise ShapeError(f"Expected at least one image, head and token, got {shape} in layer {number}.")
        if torch.compiler.is_exporting():  # torch.export has no values to check
            continue
        # One pass: a NaN or an infinity makes either extreme not finite.
        low, high = layer.aminmax()
        if not (torch.isfinite(low) and torch.isfinite(high)) or low < 0:
            raise ShapeError(
                f"Expected finite attention values of at least 0, got values from {low.item():g} to {high.item():g} "
                f"in layer {number}. Pass probabilities, after the softmax."
            )
    dtype = torch.float64 if any(layer.dtype == torch.float64 for layer in layers) else torch.float32
    return [layer.to(dtype) for layer in layers]


def layers_of(attentions: object) -> list[Tensor]:
    """Return the layers of a sequence, or of one tensor, as a list; ShapeError unless they are tensors."""
    expected = "Expected attention as a sequence of torch tensors, first layer first"
    if isinstance(attentions, Tensor) and attentions.ndim == 4:
        raise ShapeError(
            f"{expected}, got one tensor {list(attentions.shape)}: pass [attention] for one layer [batch, heads, "
            "tokens, tokens], or list(attention) for the fused attention of several layers."
        )
    try:
        layers: list[Tensor] = list(attentions)  # type: ignore[call-overload]
    except TypeError as error:
        raise ShapeError(f"{expected}, got {type(attentions).__name__}.") from error
    if not layers:
        raise ShapeError(f"{expected}, got no layers: expected at least one layer.")
    for number, layer in enumerate(layers, start=1):
        if not isinstance(layer, Tensor):
            raise ShapeError(
                f"{expected}, got {type(layer).__name__} in layer {number}. Convert it with torch.as_tensor(…)."
            )
    return layers


def check_layer(name: str, layer: int, count: int) -> int:
    """Turn a layer or head, 1 … L or −1 for the last, into a list index; OptionError if there is none."""
    layer = whole_number(name, layer)
    if 1 <= layer <= count:
        return layer - 1
    if -count <= layer <= -1:
        return count + layer
    raise OptionError(f"Expected {name} from 1 to {count} (or -1 for the last), got {layer}.")


def check_readout(readout: Tensor, batch: int, num_tokens: int) -> Tensor:
    """Check a readout over tokens and return it as [batch, tokens]; a single vector applies to the whole batch."""
    if not isinstance(readout, Tensor) or not (torch.compiler.is_exporting() or torch.isfinite(readout).all()):
        raise ShapeError(f"Expected a readout as a torch tensor of finite numbers, got {readout!r:.80}.")
    if (
        readout.shape[-1:] != (num_tokens,)
        or readout.ndim > 2
        or (readout.ndim == 2 and len(readout) not in (1, batch))
    ):
        raise ShapeError(
            f"Expected a readout of shape [{num_tokens}] or [{batch}, {num_tokens}], got {tuple(readout.shape)}."
        )
    return readout.reshape(-1, num_tokens).expand(batch, -1)


def raw_attention(fused: Tensor, *, readout: Tensor, discard_ratio: float = 0.0, num_prefix_tokens: int = 1) -> Tensor:
    """Return the attention qᵀ W of the readout in one fused layer [batch, tokens, tokens], as [batch, tokens].

    Source: the baseline of Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers", ACL 2020.

    >>> raw_attention(torch.tensor([[[0.2, 0.8], [0.5, 0.5]]]), readout=torch.tensor([1.0, 0.0]))
    tensor([[0.2000, 0.8000]])
    """
    weights = check_readout(readout, *fused.shape[::2]).to(fused)
    return (weights.unsqueeze(1) @ discard_low(fused, discard_ratio, num_prefix_tokens)).squeeze(1)
