"""Value weighting: attention counts by what it passes on, not by itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError
from vitflow.methods import onepass
from vitflow.methods.fusion import HeadFusion, check_head_fusion, fuse_heads, normalize_rows

# False: attention as it is. True: times the norm of the transformed value vector. "output": times the length of that
# vector along the output that it becomes part of.
ValueWeighting = bool | Literal["output"]
VALUE_WEIGHTINGS: tuple[ValueWeighting, ...] = (False, True, "output")

#: Matrices of more channels than this would take too much memory, and are not made.
MAX_CHANNELS = 1280

# W_Oᵀ W_O by the module that the projection belongs to: it is the same for all pictures, and costs as much as a part of
# one. They live as long as it does, and take a small part of its memory.
_kept: WeakKeyDictionary[object, tuple[bytes, Tensor]] = WeakKeyDictionary()


def check_value_weighting(value_weighted: object) -> None:
    """Raise OptionError unless the value is False, True or "output"."""
    if not any(value_weighted is known or (known == "output" == value_weighted) for known in VALUE_WEIGHTINGS):
        raise OptionError(f"Expected value_weighted to be False, True or 'output', got {value_weighted!r}.")


@dataclass(frozen=True, slots=True)
class Values:
    """What the attention of one layer passes on.

    Attributes:
        vectors: value vectors v of each head, [batch, heads, tokens, width].
        projection: W_O, which joins the heads to one output, [out, heads · width]; head h owns the columns from
            h · width on.
        owner: the module that the projection belongs to, if any: what is made of its weights alone is kept for it.
        gram: W_Oᵀ W_O, where it is known already.

    Raises:
        ShapeError: the projection does not take the joined heads.

    >>> values = Values(torch.tensor([[[[1.0], [0.0]], [[0.0], [2.0]]]]), torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
    >>> values.norms()
    tensor([[[3., 0.],
             [0., 8.]]])
    """

    vectors: Tensor
    projection: Tensor
    owner: object | None = None
    gram: Tensor | None = None

    def __post_init__(self) -> None:
        joined = self.vectors.shape[1] * self.vectors.shape[-1]
        if self.vectors.ndim != 4 or self.projection.ndim != 2 or self.projection.shape[1] != joined:
            raise ShapeError(
                "Expected values [batch, heads, tokens, width] and a projection [out, heads · width], got "
                f"{tuple(self.vectors.shape)} and {tuple(self.projection.shape)}."
            )

    def norms(self) -> Tensor:
        """‖v_j W_O‖₂ per head and token, [batch, heads, tokens], from one small Gram matrix per head.

        Source: Kobayashi et al., "Attention is Not Only a Weight", EMNLP 2020; ‖v W‖² = v (W Wᵀ) vᵀ.
        """
        heads, width = self.vectors.shape[1], self.vectors.shape[-1]
        with torch.autocast(self.vectors.device.type, enabled=False):
            slices = self.projection.reshape(-1, heads, width).permute(1, 2, 0)  # [heads, width, out]
            gram = slices @ slices.transpose(-2, -1)  # [heads, width, width]
            norms: Tensor = ((self.vectors @ gram) * self.vectors).sum(dim=-1).clamp_min(0).sqrt()
        return norms

    def weigh(self, attention: Tensor, value_weighted: ValueWeighting) -> Tensor:
        """Attention probabilities of all heads, weighted by what they pass on.

        - False: A[h, i, j] itself.
        - True: A[h, i, j] · ‖v_j W_O‖, the length of what token j passes on to token i through head h.
        - "output": A[h, i, j] · (v_j W_O · o_i)⁺ / ‖o_i‖, that vector's length along the output o_i = Σ_hj A[h, i, j]
          v_j W_O that all of them make together; what points elsewhere cancels out there, and does not count. Without
          the cut at 0, the row of token i sums to ‖o_i‖ over all heads and tokens.

        Args:
            attention: [batch, heads, tokens, tokens] of the same layer.
            value_weighted: False, True or "output".

        Returns:
            [batch, heads, tokens, tokens], not normalised.

        Source: Kobayashi et al., EMNLP 2020, for the norm. For the part along the output: the same vectors, measured as
        Ferrando et al., "Measuring the Mixing of Contextual Information in the Transformer", EMNLP 2022, measure them
        (by how near they come to their sum), with the inner product for the distance.
        """
        check_value_weighting(value_weighted)
        if value_weighted is False:
            return attention
        if value_weighted is True:
            return attention * self.norms().unsqueeze(-2)
        (batch, heads, _, width), queries = self.vectors.shape, attention.shape[-2]
        with torch.autocast(self.vectors.device.type, enabled=False):
            joined = (attention @ self.vectors).transpose(1, 2).reshape(batch, queries, heads * width)
            output = joined @ self.projection.T  # [batch, queries, out]
            along = torch.nn.functional.normalize(output, dim=-1) @ self.projection
            along = along.reshape(batch, queries, heads, width).transpose(1, 2)  # of query i and head h, as a value
            return (along @ self.vectors.transpose(-2, -1)).clamp_min_(0.0).mul_(attention)


def join_values(parts: Sequence[Values], owner: object | None = None) -> Values:
    """The values of attention modules that work side by side: all their heads, and the sum of their outputs."""
    vectors, projections = [part.vectors for part in parts], [part.projection for part in parts]
    return Values(torch.cat(vectors, dim=1), torch.cat(projections, dim=1), owner)


def fuse_weighted(
    attention: Tensor,
    head_fusion: HeadFusion,
    value_weighted: ValueWeighting,
    values: Values | None,
    *,
    mixed: Tensor | None = None,
    out: Tensor | None = None,
    room: Tensor | None = None,
) -> Tensor:
    """Weigh the heads of one layer and fuse them: [batch, heads, tokens, tokens] → [batch, tokens, tokens].

    Weighted rows are normalised to 1 again after the fusion.

    Args:
        values: of the same layer; needed where value_weighted is not False.
        mixed: attention @ values.vectors, [batch, heads, tokens, width], where it is known already; it saves making it.
        out: where to write the result, [batch, tokens, tokens]; by default a tensor of its own.
        room: memory of the attention's shape that may be written to.
    """
    if value_weighted is not False and values is None:
        raise OptionError("Value weighting needs the value vectors of the layer, got none.")
    check_head_fusion(head_fusion)
    if values is None or value_weighted is False:
        fused = fuse_heads(attention, head_fusion)
    else:
        if value_weighted == "output" and onepass.in_memory(attention, values.vectors, values.projection):
            lengths = _along_output(attention, values, mixed, room)
            if lengths is not None:
                return onepass.fuse_products(lengths, attention, head_fusion, out)
        fused = normalize_rows(fuse_heads(values.weigh(attention, value_weighted), head_fusion))
    return fused if out is None else out.copy_(fused)


def _along_output(attention: Tensor, values: Values, mixed: Tensor | None, room: Tensor | None) -> Tensor | None:
    """(v_j W_O · o_i) for each head, up to a factor per query, [batch, heads, queries, keys]; None if not all finite.

    With x_i the heads' mixed values side by side, o_i = W_O x_i, and all products with it need W_Oᵀ W_O x_i alone, by a
    matrix that is the same for all pictures. Dividing by ‖o_i‖ is left to the normalisation of the rows.
    """
    (batch, heads, _, width), queries = values.vectors.shape, attention.shape[-2]
    with torch.autocast("cpu", enabled=False):
        mixed = attention @ values.vectors if mixed is None else mixed
        joined = mixed.transpose(1, 2).reshape(batch, queries, heads * width)
        gram = gram_matrix(values.projection, values.owner) if values.gram is None else values.gram
        along = joined @ values.projection.T @ values.projection if gram is None else joined @ gram
        if not math.isfinite(along.sum()):
            return None
        along = along.reshape(batch, queries, heads, width).transpose(1, 2)
        turned, room = values.vectors.mT, torch.empty_like(attention) if room is None else room
        torch.bmm(along.flatten(0, 1), turned.flatten(0, 1), out=room.flatten(0, 1))
        return room


def gram_matrix(projection: Tensor, owner: object | None) -> Tensor | None:
    """W_Oᵀ W_O of a projection [out, channels] in a processor's memory: [channels, channels].

    It is kept for its owner, and made again where the projection has another effect on one fixed vector: that tells
    weights apart that were changed in place, and knows those that are converted anew for each call.

    Args:
        projection: the weights W_O.
        owner: the module that they belong to, with which the matrix is forgotten.

    Returns:
        The matrix, or None if it is too large, or belongs to nobody and would be made for one call alone.

    >>> gram_matrix(torch.tensor([[1.0, 2.0]]), torch.nn.Identity())
    tensor([[1., 2.],
            [2., 4.]])
    """
    if owner is None or projection.shape[1] > MAX_CHANNELS:
        return None
    projection = projection.detach()
    probe = _probe(projection.shape[1], projection.dtype)
    effect = (projection @ probe).numpy().tobytes()
    known = _kept.get(owner)
    if known is not None and known[0] == effect:
        return known[1]
    # An ordinary tensor, whatever mode it is first asked for in: later calls may be under another one.
    with torch.inference_mode(False), torch.no_grad():
        gram = projection.clone().T @ projection.clone() if projection.is_inference() else projection.T @ projection
    _kept[owner] = effect, gram
    return gram


@lru_cache(maxsize=16)
def _probe(channels: int, dtype: torch.dtype) -> Tensor:
    """Fixed numbers from −1 to 1 that no weights will be orthogonal to."""
    with torch.inference_mode(False):
        return torch.sin(torch.arange(1, channels + 1, dtype=torch.float64) ** 2).to(dtype)
