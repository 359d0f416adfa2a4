"""Bayesian linear regression of scores on masks: the contribution of each patch, with its standard deviation."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError

#: Variance of the noise of a score, relative to the mean prior variance of the scores.
NOISE = 12.0
#: Standard deviations of a normal distribution on each side of its mean that contain 95 %.
NORMAL_95 = 1.96


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """Posterior of the weights of patches.

    Attributes:
        mean: [patches] or [patches, classes], float64, in the unit of the scores.
        std: standard deviation of each weight, of the same shape.
    """

    mean: Tensor
    std: Tensor


def regress(kept: Tensor, scores: Tensor, factor: Tensor, noise: float = NOISE) -> Posterior:
    """Linear regression of scores on masks, with a Gaussian prior whose covariance is F Fᵀ up to its scale.

    s = μ + X w + ε with X = m − m̄ (centred masks), w ~ N(0, σ² c F Fᵀ), ε ~ N(0, σ² λ), and c such that the kernel
    K = c X F Fᵀ Xᵀ has trace N. The posterior has mean c F Fᵀ Xᵀ (K + λ I)⁻¹ (s − s̄) and covariance
    σ² (c F Fᵀ − c² F Fᵀ Xᵀ (K + λ I)⁻¹ X F Fᵀ), where σ² = (s − s̄)ᵀ (K + λ I)⁻¹ (s − s̄) / N maximises the marginal
    likelihood. Correlated weights share evidence from the masks.

    Args:
        kept: m, kept patches of each mask, bool [masks, patches].
        scores: s, the score of each mask, [masks] or [masks, classes].
        factor: F, [patches, k]; zeros exclude a patch.
        noise: λ.

    Raises:
        OptionError: noise is not a positive number.
        ShapeError: wrong shapes, or fewer than two masks.

    Source: Rasmussen & Williams, "Gaussian Processes for Machine Learning", 2006, §2.1; regression of scores on masks
    as in Lundberg & Lee, NeurIPS 2017.

    >>> kept = torch.tensor([[True, False], [False, True], [True, False]])
    >>> regress(kept, torch.tensor([3.0, 1.0, 5.0]), torch.eye(2), noise=1.0).mean
    tensor([ 1.1250, -1.1250], dtype=torch.float64)
    """
    if kept.ndim != 2 or kept.dtype != torch.bool or scores.ndim not in (1, 2) or len(scores) != len(kept):
        raise ShapeError(
            "Expected bool masks [masks, patches] and scores [masks] or [masks, classes], got "
            f"{kept.dtype} {tuple(kept.shape)} and {tuple(scores.shape)}."
        )
    if factor.ndim != 2 or len(factor) != kept.shape[1]:
        raise ShapeError(f"Expected a factor [{kept.shape[1]} patches, k], got {tuple(factor.shape)}.")
    if len(kept) < 2:
        raise ShapeError(f"Expected at least two masks, got {len(kept)}.")
    if not 0.0 < noise < float("inf"):
        raise OptionError(f"Expected a positive noise, got {noise!r}.")
    centred = scores.detach().cpu().double().reshape(len(kept), -1)
    centred = centred - centred.mean(dim=0)
    masks = kept.cpu().double()
    factor = factor.detach().cpu().double()
    seen = (masks - masks.mean(dim=0)) @ factor  # [masks, k]
    scale = len(kept) / seen.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
    kernel = scale * seen @ seen.mT + noise * torch.eye(len(kept), dtype=torch.float64)
    root = torch.linalg.cholesky(kernel)
    solved = torch.cholesky_solve(centred, root)  # [masks, classes]
    mean = scale * factor @ (seen.mT @ solved)
    known = torch.linalg.solve_triangular(root, seen @ factor.mT, upper=False)  # [masks, patches]
    variance = scale * factor.square().sum(dim=1) - scale**2 * known.square().sum(dim=0)
    sigma = (centred * solved).sum(dim=0) / len(kept)  # [classes]
    std = (variance.clamp_min(0.0)[:, None] * sigma).sqrt()
    shape = (kept.shape[1], *scores.shape[1:])
    return Posterior(mean.reshape(shape), std.reshape(shape))
