"""From a trace to maps: each method's own function, called with what the recorder saw."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitflow.methods.attention import check_layer, raw_attention
from vitflow.methods.fusion import HeadFusion
from vitflow.methods.rollout import attention_rollout
from vitflow.trace import Trace

Patch = Sequence[int]


@dataclass(frozen=True, slots=True)
class Maps:
    """What a method found: one map per picture, and facts about it worth telling.

    Attributes:
        grids: maps [batch, rows, cols], unscaled.
        facts: per picture, numbers and words that belong beside the map, such as the saturated share of a flow.
    """

    grids: Tensor
    facts: list[dict[str, Any]] = field(default_factory=list)


def readout_of(trace: Trace, patch: Patch | None) -> Tensor:
    """The trace's own readout [batch, tokens], or one-hot on the patch at (row, col)."""
    if patch is None:
        return trace.readout
    row, col = patch
    one_hot = torch.zeros_like(trace.readout)
    one_hot[:, trace.layout.token_of_patch(row, col)] = 1.0
    return one_hot


def rollout(
    trace: Trace,
    *,
    head_fusion: HeadFusion,
    discard_ratio: float,
    residual: float,
    start_layer: int,
    value_weighted: bool,
    patch: Patch | None,
) -> Maps:
    """Attention rollout of the readout, on the patch grid."""
    tokens = attention_rollout(
        trace.fused(head_fusion, value_weighted=value_weighted),
        discard_ratio=discard_ratio,
        residual=residual,
        start_layer=start_layer,
        num_prefix_tokens=trace.layout.num_prefix_tokens,
        readout=readout_of(trace, patch),
    )
    return Maps(trace.layout.to_grid(tokens))


def attention(
    trace: Trace,
    *,
    head_fusion: HeadFusion,
    layer: int,
    head: int | None,
    discard_ratio: float,
    value_weighted: bool,
    patch: Patch | None,
) -> Maps:
    """Raw attention of the readout in one layer, on the patch grid."""
    index = check_layer("layer", layer, len(trace.layers))
    one_head = head is not None
    matrices = trace.heads() if one_head else trace.fused(head_fusion, value_weighted=value_weighted)
    tokens = raw_attention(
        [matrices[index].detach()],
        readout=readout_of(trace, patch),
        head=head,
        discard_ratio=discard_ratio,
        num_prefix_tokens=trace.layout.num_prefix_tokens,
        value_norms=[trace.value_norms()[index]] if one_head and value_weighted else None,
    )
    return Maps(trace.layout.to_grid(tokens))
