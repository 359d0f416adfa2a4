"""What chosen tokens rest on, layer by layer: the rows that each method gives where it ends at layer 1, 2, … L.

All for one text: matrices and masks are [tokens, tokens], and what speaks is a readout [rows, tokens].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.flow.layers import LayerRange, parse_window
from vitflow.methods.fusion import add_residual, check_layer, discard_low
from vitflow.methods.rollout import relevance
from vitflow.methods.tokens import (
    Causal,
    check_causal,
    relative_to,
    self_token,
    uniform_attention,
)


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
    """Rows of attention rollout, qᵀ Â_l ⋯ Â_s for l = 1 … L.

    Args:
        matrices: fused attention of each layer, [tokens, tokens], first layer first.
        visible: which keys each query may see in each layer, bool, of the same shapes.
        readout: what speaks, [rows, tokens].
        discard_ratio, residual, start_layer, causal: as for `attention_rollout`.

    Returns:
        [layers, rows, tokens]; and relative to the receptive field the raw share of each row's own token, [layers,
        rows], else None.

    >>> layer = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> rollout_rows([layer, layer], [layer > 0] * 2, torch.tensor([[0.0, 1.0]]))[0]
    tensor([[[0.2500, 0.7500]],
    <BLANKLINE>
            [[0.4375, 0.5625]]])
    """
    check_causal(causal)
    first = check_layer("start_layer", start_layer, len(matrices))
    relative = causal == "receptive_field"

    def rows(layers: Sequence[Tensor], ratio: float) -> Tensor:
        product = torch.eye(readout.shape[-1], dtype=layers[0].dtype, device=readout.device)
        found = []
        for number, (layer, seen) in enumerate(zip(layers, visible, strict=True)):
            if number >= first:
                matrix = add_residual(discard_low(layer, ratio, 0, seen), residual)
                product = matrix @ product
            found.append(readout.to(product) @ product)
        return torch.stack(found)

    found = rows([layer.double() for layer in matrices] if relative else matrices, discard_ratio)
    return _relative(found, lambda: rows([uniform_attention(seen) for seen in visible], 0.0), readout, relative)


def _relative(
    found: Tensor, reference: Callable[[], Tensor], readout: Tensor, relative: bool
) -> tuple[Tensor, Tensor | None]:
    if not relative:
        return found, None
    own = self_token(readout)
    return relative_to(found, reference(), own), (found * own).sum(dim=-1)


def attention_rows(
    matrices: Sequence[Tensor], visible: Sequence[Tensor], readout: Tensor, *, discard_ratio: float = 0.0
) -> Tensor:
    """Rows of each layer's own attention, qᵀ W_l: [layers, rows, tokens]; arguments as for `rollout_rows`."""
    pairs = zip(matrices, visible, strict=True)
    return torch.stack([readout.to(layer) @ discard_low(layer, discard_ratio, 0, seen) for layer, seen in pairs])


def flow_rows(
    matrices: Sequence[Tensor],
    visible: Sequence[Tensor],
    readout: Tensor,
    *,
    layers: LayerRange = "all",
    spans: Sequence[tuple[int, int]] | None = None,
    below: str = "none",
    discard_ratio: float = 0.0,
    residual: float = 0.5,
    causal: Causal = "raw",
    progress: Callable[[int], object] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Rows of attention flow from layer l down through as many layers as the window has, for l = 1 … L.

    Each row is normalised over its sinks. What arrives at the window's lower end is taken down to the input by rollout,
    where `below` is "rollout".

    Args:
        matrices, visible, readout: as for `rollout_rows`.
        layers: the window as for `attention_flow`; the rows of lower layers have windows of the same number of layers,
            as far as there are so many below them.
        spans: the windows themselves instead, each by how many layers lie below it and how many up to its end.
        below: "rollout" or "none".
        discard_ratio, residual, causal, progress: as for `attention_flow`.

    Returns:
        As for `rollout_rows`.
    """
    check_causal(causal)
    relative = causal == "receptive_field"
    if spans is None:
        begin, end = parse_window(layers, len(matrices))
        spans = [(max(top - (end - begin + 1), 0), top) for top in range(1, len(matrices) + 1)]

    def rows(given: Sequence[Tensor], ratio: float) -> Tensor:
        found = []
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
            found.append(shares)
        return torch.stack(found)

    found = rows(matrices, discard_ratio)
    return _relative(found, lambda: rows([uniform_attention(seen) for seen in visible], 0.0), readout, relative)


def relevance_rows(layers: Sequence[Tensor], readout: Tensor, *, start_layer: int = 1) -> Tensor:
    """Rows of generic attention explainability, qᵀ (I + W_l) ⋯ (I + W_s) for l = 1 … L: [layers, rows, tokens].

    Args:
        layers: W_l as `for_the_class` makes them, [tokens, tokens].
        readout: what speaks, [rows, tokens].
        start_layer: as for `relevance`.
    """
    first = check_layer("start_layer", start_layer, len(layers))
    found = []
    for top in range(1, len(layers) + 1):
        if top <= first:
            found.append(readout.to(layers[0]))
            continue
        stack = [layer.unsqueeze(0).expand(len(readout), -1, -1) for layer in layers[first:top]]
        found.append(relevance(stack, readout=readout))
    return torch.stack(found)


@dataclass(frozen=True, slots=True, eq=False)
class Streams:
    """One matrix for each layer: fused attention, or which keys each query may see (bool).

    Attributes:
        encoder: of the source's tokens among themselves, [m, m].
        decoder: of the decoder's tokens among themselves, [n, n].
        crossing: of the decoder's tokens to the source's, [n, m].

    Raises:
        ShapeError: the decoder's layers do not each have one of both.
    """

    encoder: Sequence[Tensor]
    decoder: Sequence[Tensor]
    crossing: Sequence[Tensor]

    def __post_init__(self) -> None:
        if not self.crossing or len(self.decoder) != len(self.crossing):
            raise ShapeError(
                "Expected attention to the source in each layer of the decoder, got "
                f"{len(self.crossing)} in {len(self.decoder)} layers."
            )

    @property
    def ends(self) -> list[int]:
        """Up to which step of the graph each layer of the decoder goes, the first layer first."""
        return [len(self.encoder) + 2 * number for number in range(1, len(self.decoder) + 1)]

    def steps(self) -> list[Tensor]:
        """The graph: [m + n, m + n] for each step, the source's tokens first.

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
        source, own = (torch.eye(size).to(self.crossing[0]) for size in (m, n))
        found = [torch.block_diag(layer, own) for layer in self.encoder]
        for among, across in zip(self.decoder, self.crossing, strict=True):
            found.append(torch.block_diag(source, among))
            found.append(torch.cat([torch.block_diag(source, own)[:m], torch.nn.functional.pad(across, (0, n))]))
        return found


def relevance_across(streams: Streams, row: int, *, start_layer: int = 1) -> Tensor:
    """Generic attention explainability of an encoder and a decoder, for one token of the decoder.

    R_ss of the source, R_tt of the decoder's tokens and R_ts begin as I, I and 0. Each layer W of the encoder adds
    W R_ss to R_ss. Each of the decoder adds W R_tt and W R_ts to R_tt and R_ts, then W′, its attention to the source,
    adds R̄_ttᵀ W′ R̄_ss to R_ts, where R̄ is I plus R − I with each row normalised to sum 1.

    Args:
        streams: W and W′ as `for_the_class` makes them.
        row: which token.
        start_layer: the first layer of the encoder that counts; 1 is the paper.

    Returns:
        The token's row of R_ts and R_tt where the decoder ends at each layer, [layers, m + n].

    Source: Chefer, Gur & Wolf, "Generic Attention-model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", ICCV 2021, §3.2.

    >>> one = torch.tensor([[1.0]])
    >>> relevance_across(Streams([0.5 * torch.eye(2)], [one], [torch.tensor([[0.25, 0.75]])]), 0)
    tensor([[1., 3., 2.]])
    """
    n = len(streams.decoder[0])
    below = _normalised(relevance([layer.unsqueeze(0) for layer in streams.encoder], start_layer=start_layer)[0])
    own, across = torch.eye(n).to(below), torch.zeros_like(streams.crossing[0])
    found = []
    for among, crossing in zip(streams.decoder, streams.crossing, strict=True):
        across = across + among @ across
        own = own + among @ own
        across = across + _normalised(own).mT @ crossing @ below
        found.append(torch.cat([across[row], own[row]]))
    return torch.stack(found)


def _normalised(relevances: Tensor) -> Tensor:
    """R̄: what was added to the identity, each row normalised to sum 1, beside the identity."""
    eye = torch.eye(len(relevances)).to(relevances)
    added = relevances - eye
    total = added.sum(dim=-1, keepdim=True)
    return eye + added / torch.where(total > 0, total, 1.0)
