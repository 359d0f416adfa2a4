"""Rows of each method for selected tokens, if the method ends at layer 1, 2, … L.

All functions take one text: matrices and masks are [tokens, tokens], query weights are a readout [rows, tokens].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import check_known
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.fusion import add_residual, check_fraction, check_head_fusion, check_layer, discard_low
from vitflow.methods.rollout import relevance
from vitflow.methods.tokens import (
    Causal,
    check_causal,
    relative_to,
    self_token,
    uniform_attention,
)


def check_options(options: Mapping[str, Any]) -> None:
    """Raise OptionError for values of options that no method for texts accepts, before text is generated."""
    check_causal(options.get("causal"))
    check_head_fusion(options.get("head_fusion", "mean"))
    check_known("below", options.get("below", "none"), ("none", "rollout"))
    for name in ("discard_ratio", "residual"):
        check_fraction(name, options.get(name, 0.0))


def rollout_rows(
    matrices: Sequence[Tensor],
    visible: Sequence[Tensor],
    readout: Tensor,
    *,
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    start_layer: int = 1,
    causal: Causal = "raw",
) -> tuple[Tensor, Tensor | None]:
    """Compute rows of attention rollout, qᵀ Â_l ⋯ Â_s for l = 1 … L.

    Args:
        matrices: fused attention of each layer, [tokens, tokens], first layer first.
        visible: attention mask of each layer, bool, of the same shape.
        readout: query weights [rows, tokens].
        discard_ratio, residual, start_layer, causal: as for `attention_rollout`.

    Returns:
        Rows [layers, rows, tokens], and the raw share of each row's query token, [layers, rows], if relative to the
        receptive field, else None.

    >>> layer = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> rollout_rows([layer, layer], [layer > 0] * 2, torch.tensor([[0.0, 1.0]]))[0]
    tensor([[[0.2500, 0.7500]],
    <BLANKLINE>
            [[0.4375, 0.5625]]])
    """
    first = check_layer("start_layer", start_layer, len(matrices))
    relative = causal == "receptive_field"

    def rows(layers: Sequence[Tensor], ratio: float) -> Tensor:
        product = torch.eye(readout.shape[-1], dtype=layers[0].dtype, device=readout.device)
        results = []
        for index, (layer, seen) in enumerate(zip(layers, visible, strict=True)):
            if index >= first:
                matrix = add_residual(discard_low(layer, ratio, 0, seen), residual)
                product = matrix @ product
            results.append(readout.to(product) @ product)
        return torch.stack(results)

    raw = rows([layer.double() for layer in matrices] if relative else matrices, discard_ratio)
    return _relative(raw, lambda: rows([uniform_attention(seen) for seen in visible], 0.0), readout, relative)


def _relative(
    raw: Tensor, reference: Callable[[], Tensor], readout: Tensor, relative: bool
) -> tuple[Tensor, Tensor | None]:
    if not relative:
        return raw, None
    query = self_token(readout)
    return relative_to(raw, reference(), query), (raw * query).sum(dim=-1)


def attention_rows(
    matrices: Sequence[Tensor], visible: Sequence[Tensor], readout: Tensor, *, discard_ratio: float = 0.0
) -> Tensor:
    """Compute rows of the attention of each layer, qᵀ W_l: [layers, rows, tokens]; arguments as for `rollout_rows`."""
    pairs = zip(matrices, visible, strict=True)
    return torch.stack([readout.to(layer) @ discard_low(layer, discard_ratio, 0, seen) for layer, seen in pairs])


def flow_rows(
    matrices: Sequence[Tensor],
    visible: Sequence[Tensor],
    readout: Tensor,
    spans: Sequence[tuple[int, int]],
    *,
    below: str = "none",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    causal: Causal = "raw",
    progress: Callable[[int], object] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute rows of attention flow through windows of layers.

    Each row is normalised over its sinks. If `below` is "rollout", it is propagated from the lowest layer of the window
    to the input by rollout.

    Args:
        matrices, visible, readout: as for `rollout_rows`.
        spans: windows as (start, end) indices of matrices, the end excluded.
        below: "rollout" or "none".
        discard_ratio, residual, causal, progress: as for `attention_flow`.

    Returns:
        As for `rollout_rows`, with a row for each window.
    """
    relative = causal == "receptive_field"

    def rows(given: Sequence[Tensor], ratio: float) -> Tensor:
        results = []
        for low, top in spans:
            flows = []
            for row in readout:
                result = attention_flow(
                    [layer.unsqueeze(0) for layer in given[low:top]],
                    source=row,
                    visible=[seen.unsqueeze(0) for seen in visible[low:top]],
                    discard_ratio=ratio,
                    residual=residual,
                    num_prefix_tokens=0,
                    progress=progress,
                )
                flows.append(result.normalized[0])
            shares = torch.stack(flows)
            if below == "rollout" and low:
                lower, _ = rollout_rows(given[:low], visible[:low], shares, discard_ratio=ratio, residual=residual)
                shares = lower[-1].double()
            results.append(shares)
        return torch.stack(results)

    raw = rows(matrices, discard_ratio)
    return _relative(raw, lambda: rows([uniform_attention(seen) for seen in visible], 0.0), readout, relative)


def relevance_rows(layers: Sequence[Tensor], readout: Tensor, *, start_layer: int = 1) -> Tensor:
    """Compute rows of generic attention explainability, qᵀ (I + W_l) ⋯ (I + W_s) for l = 1 … L: [layers, rows, tokens].

    Args:
        layers: W_l as returned by `gradient_weighted_attention`, [tokens, tokens].
        readout: query weights [rows, tokens].
        start_layer: as for `relevance`.
    """
    first = check_layer("start_layer", start_layer, len(layers))
    rows = []
    for top in range(1, len(layers) + 1):
        if top <= first:
            rows.append(readout.to(layers[0]))
            continue
        stack = [layer.unsqueeze(0).expand(len(readout), -1, -1) for layer in layers[first:top]]
        rows.append(relevance(stack, readout=readout))
    return torch.stack(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """One matrix per layer of an encoder-decoder model: fused attention, or attention masks (bool).

    Attributes:
        encoder: encoder self-attention [m, m].
        decoder: decoder self-attention [n, n].
        crossing: cross-attention [n, m].
    """

    encoder: Sequence[Tensor]
    decoder: Sequence[Tensor]
    crossing: Sequence[Tensor]

    def steps(self) -> list[Tensor]:
        """Return the joint graph: one matrix [m + n, m + n] per step, source tokens first.

        >>> one = torch.tensor([[1.0]])
        >>> steps = Streams([torch.tensor([[0.5, 0.5], [0.0, 1.0]])], [one], [torch.tensor([[0.25, 0.75]])]).steps()
        >>> steps[0], steps[2]
        (tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 1.0000, 0.0000],
                [0.0000, 0.0000, 1.0000]]), tensor([[1.0000, 0.0000, 0.0000],
                [0.0000, 1.0000, 0.0000],
                [0.2500, 0.7500, 0.0000]]))
        """
        n, m = self.crossing[0].shape
        source, target = (torch.eye(size).to(self.crossing[0]) for size in (m, n))
        steps = [torch.block_diag(layer, target) for layer in self.encoder]
        for layer, crossing in zip(self.decoder, self.crossing, strict=True):
            steps.append(torch.block_diag(source, layer))
            steps.append(torch.cat([torch.block_diag(source, target)[:m], torch.nn.functional.pad(crossing, (0, n))]))
        return steps


def relevance_across(streams: Streams, row: int, *, start_layer: int = 1) -> Tensor:
    """Compute generic attention explainability of an encoder-decoder model for one token of the decoder.

    R_ss of the source, R_tt of the decoder's tokens and R_ts begin as I, I and 0. Each layer W of the encoder adds
    W R_ss to R_ss. Each of the decoder adds W R_tt and W R_ts to R_tt and R_ts, then W′, its attention to the source,
    adds R̄_ttᵀ W′ R̄_ss to R_ts, where R̄ is I plus R − I with each row normalised to sum 1.

    Args:
        streams: W and W′ as returned by `gradient_weighted_attention`.
        row: index of the decoder token.
        start_layer: first encoder layer to include; 1 in the paper.

    Returns:
        The token's row of R_ts and R_tt if the decoder ends at each layer, [layers, m + n].

    Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", ICCV 2021, §3.2.

    >>> one = torch.tensor([[1.0]])
    >>> relevance_across(Streams([0.5 * torch.eye(2)], [one], [torch.tensor([[0.25, 0.75]])]), 0)
    tensor([[1., 3., 2.]])
    """
    n = len(streams.decoder[0])
    below = _normalised(relevance([layer.unsqueeze(0) for layer in streams.encoder], start_layer=start_layer)[0])
    target, source = torch.eye(n).to(below), torch.zeros_like(streams.crossing[0])  # R_tt, R_ts
    rows = []
    for layer, crossing in zip(streams.decoder, streams.crossing, strict=True):
        source = source + layer @ source
        target = target + layer @ target
        source = source + _normalised(target).mT @ crossing @ below
        rows.append(torch.cat([source[row], target[row]]))
    return torch.stack(rows)


def _normalised(relevances: Tensor) -> Tensor:
    """Return R̄ = I + (R − I) with each row of R − I normalised to sum 1."""
    eye = torch.eye(len(relevances)).to(relevances)
    added = relevances - eye
    total = added.sum(dim=-1, keepdim=True)
    return eye + added / torch.where(total > 0, total, 1.0)
