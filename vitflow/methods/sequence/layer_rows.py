"""What chosen tokens rest on, layer by layer: the rows that each method gives where it ends at layer 1, 2, … L.

All for one text: matrices and masks are [tokens, tokens], and what speaks is a readout [rows, tokens].
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vitflow.methods.attention import check_layer
from vitflow.methods.flow.attention_flow import attention_flow
from vitflow.methods.flow.layers import LayerRange, parse_window
from vitflow.methods.rollout import relevance
from vitflow.methods.visibility import (
    Causal,
    check_causal,
    discard_in_rows,
    matrix_among,
    own_token,
    relative_to,
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
                matrix = matrix_among(layer, seen, discard_ratio=ratio, residual=residual, num_prefix_tokens=0)
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
    own = own_token(readout)
    return relative_to(found, reference(), own), (found * own).sum(dim=-1)


def attention_rows(
    matrices: Sequence[Tensor], visible: Sequence[Tensor], readout: Tensor, *, discard_ratio: float = 0.0
) -> Tensor:
    """Rows of each layer's own attention, qᵀ W_l: [layers, rows, tokens]; arguments as for `rollout_rows`."""
    pairs = zip(matrices, visible, strict=True)
    return torch.stack([readout.to(layer) @ discard_in_rows(layer, seen, discard_ratio) for layer, seen in pairs])


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
