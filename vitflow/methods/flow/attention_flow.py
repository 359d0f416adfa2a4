"""Attention flow: maximum flow from the output to each input token, with attention as capacities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import OptionError, ShapeError
from vitflow.methods.flow.layers import LayerRange, check_window, layer_capacities
from vitflow.methods.fusion import HeadFusion, check_fraction, check_head_fusion, fuse_heads
from vitflow.methods.tokens import Causal, relative_to, self_token, uniform_attention, visible_keys

Floats = NDArray[np.float64]
# A token of the top layer, or capacities of a super-source over the top layer's tokens.
Source = int | Tensor | Floats | Sequence[float]

# Relative distance to the trivial cut below which a flow is saturated.
SATURATED = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class FlowResult:
    """Maximum flows from the source to each input token, and their cuts; tensors are on the device of the attention.

    Attributes:
        values: float64 [batch, tokens], the maximum flow into each input token, in the same unit as attention.
        cuts: float64 [batch, tokens], the smaller of the two trivial cuts: min(Σ source capacities, Σ_i Â_s[i, j]).
        layers: the window, (first, last), counted from 1.
        num_prefix_tokens: number of tokens before the patches.
        reference: the flows of uniform attention among visible keys, if the result is relative to them.
        self_mask: mask of the source's own token, bool [batch, tokens]; None without a reference.
    """

    values: Tensor
    cuts: Tensor
    layers: tuple[int, int]
    num_prefix_tokens: int = 1
    reference: Tensor | None = None
    self_mask: Tensor | None = None

    @property
    def normalized(self) -> Tensor:
        """The values divided by their sum over the tokens, as the paper's code does; zeros if all flows are 0.

        With a reference, relative to it: the quotients without the source's own token, divided by their
        sum.
        """
        if self.reference is not None:
            return relative_to(self.values, self.reference, self.self_mask)
        total = self.values.sum(dim=-1, keepdim=True)
        return self.values / torch.where(total > 0, total, 1.0)

    @property
    def saturated(self) -> Tensor:
        """Mask of flows that equal their trivial cut, to a relative 1e-9, of the shape of `values`.

        Such a value is the first layer's column sum or the source's capacity, regardless of the layers in between.
        """
        return self.values >= self.cuts * (1 - SATURATED)

    @property
    def saturated_share(self) -> Tensor:
        """Share of saturated flows among the patches (among all tokens if there are none): float64 [batch]."""
        patches = self.saturated[..., self.num_prefix_tokens :]
        return (patches if patches.shape[-1] else self.saturated).double().mean(dim=-1)


def attention_flow(
    attentions: Sequence[Tensor] | Tensor,
    *,
    source: Source = 0,
    layers: LayerRange = "all",
    head_fusion: HeadFusion = "mean",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    num_prefix_tokens: int = 1,
    causal: Causal | None = None,
    attention_mask: Tensor | None = None,
    visible: Sequence[Tensor] | Tensor | None = None,
    progress: Callable[[int], object] | None = None,
) -> FlowResult:
    """Attention flow: the maximum flow from the source to each input token through the layers.

    The graph has a node (l, i) for token i after layer l and an edge of capacity Â_l[i, j] from (l, i) to (l − 1, j).
    Each sink has its own maximum flow. Over many layers most flows are *saturated*: they equal the first layer's
    column sums and do not depend on the layers above. Check `saturated_share`, and use fewer layers.

    Args:
        attentions: layers of [batch, heads, tokens, tokens] or fused [batch, tokens, tokens], first layer first; or one
            tensor with a leading layer axis.
        source: a token of the window's top layer; or capacities [tokens] or [batch, tokens] of a super-source over the
            top layer's tokens, such as the readout of a model that averages over patches.
        layers: "all" (the paper), N for the last N layers, or (first, last), counted from 1 and both included.
        head_fusion: "mean" (the paper), "max" or "min" over heads; fused attention is used unchanged.
        discard_ratio: share of the smallest values per image and layer to set to 0, 0 <= ratio < 1.
        residual: α, the share of the residual connection; the paper uses 0.5.
        num_prefix_tokens: tokens before the patches, which are never discarded as keys.
        causal, attention_mask, visible: as for `attention_rollout`; with "receptive_field", `normalized` is relative to
            the flows of uniform attention, which are solved too.
        progress: called with the number of further flows solved, such as the `update` of a progress bar.

    Raises:
        OptionError: an option is out of range.
        ShapeError: wrong shapes, or values that are not finite or negative.

    Source: Abnar & Zuidema, "Quantifying Attention Flow in Transformers", ACL 2020, §3.2.

    >>> layer = torch.tensor([[[0.5, 0.5], [0.0, 1.0]]])
    >>> attention_flow([layer, layer], residual=0.0).values  # two layers: Σ_i min(Â_2[0, i], Â_1[i, j])
    tensor([[0.5000, 1.0000]], dtype=torch.float64)
    """
    from vitflow.methods.flow.solver import max_flow  # imports numba, for a second

    check_head_fusion(head_fusion)
    check_fraction("discard_ratio", discard_ratio)
    check_fraction("residual", residual)
    chosen, first = check_window(attentions, layers)
    batch, tokens = chosen[0].shape[0], chosen[0].shape[-1]
    sources = _sources(source, batch, tokens)
    last = first + len(chosen) - 1
    if visible is not None and not isinstance(visible, Tensor):
        if len(visible) != len(attentions):
            raise ShapeError(f"Expected visible as {len(attentions)} layers or one for all, got {len(visible)} layers.")
        visible = visible[first - 1 : last]
    seen = visible_keys(chosen, causal, attention_mask, visible)
    device = chosen[0].device if chosen[0].device.type != "mps" else torch.device("cpu")  # MPS has no float64
    chosen = [(fuse_heads(layer, head_fusion) if layer.ndim == 4 else layer).detach().cpu() for layer in chosen]
    seen = None if seen is None else [mask.cpu() for mask in seen]

    def flows(matrices: Sequence[Tensor], discard_ratio: float) -> list[Tensor]:
        """Return the flows, and their trivial cuts."""
        solved = []
        for index, source in enumerate(sources):
            capacities = layer_capacities(
                [matrix[index] for matrix in matrices],
                discard_ratio=discard_ratio,
                residual=residual,
                num_prefix_tokens=num_prefix_tokens,
                visible=None if seen is None else [mask[index] for mask in seen],
            )
            solved.append(max_flow(capacities, source, progress=progress))
        return [torch.from_numpy(np.stack(parts)).to(device) for parts in zip(*solved, strict=True)]

    values, cuts = flows(chosen, discard_ratio)
    result = FlowResult(values, cuts, (first, last), num_prefix_tokens)
    if causal != "receptive_field" or seen is None:
        return result
    rows = [np.eye(tokens)[source] if isinstance(source, int) else source for source in sources]
    is_self = self_token(torch.from_numpy(np.stack(rows))).to(values.device)
    return replace(result, reference=flows([uniform_attention(one) for one in seen], 0.0)[0], self_mask=is_self)


def _sources(source: Any, batch: int, tokens: int) -> list[int | Floats]:
    """One source per image: a token, or capacities [tokens]."""
    if isinstance(source, int | np.integer):
        if not 0 <= source < tokens:
            raise OptionError(f"Expected a source token from 0 to {tokens - 1}, got {source}.")
        return [int(source)] * batch
    try:
        vector = torch.as_tensor(source).detach().cpu().double()
    except (TypeError, ValueError, RuntimeError) as error:  # no numbers at all
        raise OptionError(f"Expected a source token, or capacities, got {source!r:.80}.") from error
    if vector.shape not in ((tokens,), (batch, tokens)):
        expected = f"a source token, or capacities [{tokens}] or [{batch}, {tokens}]"
        raise ShapeError(f"Expected {expected}, got {list(vector.shape)}.")
    if not (vector.min() >= 0.0 and torch.isfinite(vector.sum())):  # also true of NaN
        values = f"{vector.min():g} to {vector.max():g}"
        raise ShapeError(f"Expected source capacities of at least 0 with a finite sum, got {values}.")
    return list(vector.expand(batch, tokens).numpy())
