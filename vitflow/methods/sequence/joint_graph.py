"""An encoder and a decoder that attends to it as one graph, over the tokens of the source and those of the decoder.

All for one text. The graph has a step for each layer of the encoder, in which the decoder's tokens stay as they are,
and two for each layer of the decoder, in which the source's do: attention among its own tokens, then to the source.
Rollout and flow of this graph are those of any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.rollout import relevance


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
