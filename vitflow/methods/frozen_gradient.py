"""The frozen gradient: what each token contributes to an output if nonlinearities are constants."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vitflow.methods.staged_rollout import carry
from vitflow.methods.tokens import TokenLayout


def contributions(tokens: Tensor, gradients: Tensor, *, axis: int = -1) -> Tensor:
    """Contribution of each token: s_i = Σ_c x_ic ∂f/∂x_ic.

    Args:
        tokens: x, [batch, tokens, channels], or a grid of tokens with the channels on `axis`.
        gradients: ∂f/∂x, of the same shape.
        axis: the axis of the channels.

    Returns:
        float64, [batch, tokens].

    >>> contributions(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, -1.0]]]))
    tensor([[1.]], dtype=torch.float64)
    """
    return (tokens.detach().double() * gradients.detach().double()).sum(dim=axis).flatten(1)


def frozen_gradient(layers: Sequence[Tensor], layouts: Sequence[TokenLayout]) -> Tensor:
    """Frozen gradient: the mean of s / Σ_j |s_j| over layers, where j are patches and s are `contributions`.

    The gradients are those of a pass in which attention probabilities, the deviations of norms and the gates act(x)/x
    of activations are constants. Then the contributions of all tokens and of the constants that are added add up to f.

    Args:
        layers: contributions of the tokens of some layers, [batch, tokens].
        layouts: the layout of each layer's tokens. A coarse patch is divided among the finest ones that it covers.

    Returns:
        [batch, rows, cols] of the finest layout, with signs; 0 for a layer whose patches contribute nothing.

    Source: Ali et al., "XAI for Transformers: Better Explanations through Conservative Propagation", ICML 2022, for
    constant attention and deviations; Mehri et al., "LibraGrad: Balancing Gradient Flow for Universally Better Vision
    Transformer Attributions", CVPR 2025, for constant gates. The choice of layers is ours.

    >>> frozen_gradient([torch.tensor([[9.0, 1.0, -3.0]])], [TokenLayout(1, 1, 2)])
    tensor([[[ 0.2500, -0.7500]]])
    """
    patches = [replace(each, num_prefix_tokens=0, num_suffix_tokens=0) for each in layouts]
    finest = max(patches, key=lambda each: each.num_patches)
    maps = []
    for row, layout, grid in zip(layers, layouts, patches, strict=True):
        shares = row[:, layout.patches]
        mass = shares.abs().sum(dim=1, keepdim=True).clamp_min(torch.finfo(row.dtype).tiny)
        maps.append(carry(shares / mass, grid, finest))
    mean: Tensor = finest.to_grid(torch.stack(maps).mean(dim=0))
    return mean
