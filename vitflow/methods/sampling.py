"""Random masks of patches, and the weight of each patch in the scores of the masked images."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, whole_number

#: Variance of the noise of a score, relative to the mean prior variance of the scores.
NOISE = 12.0
#: Standard deviations of a normal distribution on each side of its mean that contain 95 %.
NORMAL_95 = 1.96
# Breaks ties between values of the field, which are about 1.
_NOISE = 1e-3


def draw_masks(rows: int, cols: int, *, masks: int, keep: float = 0.3, cells: int = 7, seed: int = 0) -> Tensor:
    """Random masks, each of which keeps the same number of patches, in coherent regions.

    A mask is a field of `cells × cells` normal numbers (at most the number of patches per side), upsampled to the grid
    by bicubic interpolation; its k = round(keep · patches) highest patches stay. The masks depend on the grid and the
    options only; fewer masks are the first of more masks.

    Args:
        rows: patches from top to bottom.
        cols: patches from left to right.
        masks: number of masks, at least 2.
        keep: share of the patches that stays: at least one patch, and not all.
        cells: numbers per side of the field, at least 2; more cells give smaller regions.
        seed: seed of the random numbers.

    Returns:
        Mask of the patches that stay, bool [masks, patches], in raster order.

    Raises:
        OptionError: an option is out of range.

    Source: Petsiuk, Das & Saenko, "RISE", BMVC 2018, §3.2, with the same number of patches in every mask.

    >>> draw_masks(2, 3, masks=4, keep=0.5).sum(dim=1)
    tensor([3, 3, 3, 3])
    """
    masks, cells = whole_number("masks", masks, 2), whole_number("cells", cells, 2)
    patches, seed = rows * cols, whole_number("random_seed", seed, 0)
    if not isinstance(keep, int | float) or not 0.0 < keep < 1.0 or not 1 <= round(keep * patches) < patches:
        raise OptionError(
            f"Expected keep as a share of the {rows} × {cols} patches that leaves one of them at least and not all, "
            f"got {keep!r}."
        )
    random = np.random.default_rng(seed)
    height, width = min(cells, rows), min(cells, cols)
    drawn = random.standard_normal((masks, height * width + patches))  # mask by mask
    fields = torch.from_numpy(drawn[:, : height * width]).reshape(masks, 1, height, width)
    enlarged = torch.nn.functional.interpolate(fields, size=(rows, cols), mode="bicubic", align_corners=False)
    values = enlarged.flatten(1) + _NOISE * torch.from_numpy(drawn[:, height * width :])
    highest = values.topk(round(keep * patches), dim=1).indices
    return torch.zeros(masks, patches, dtype=torch.bool).scatter_(1, highest, True)


def _centred(kept: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Check masks and their scores, and return both minus their means, float64 on the CPU."""
    if kept.ndim != 2 or kept.dtype != torch.bool or scores.ndim not in (1, 2) or len(scores) != len(kept):
        raise ShapeError(
            "Expected bool masks [masks, patches] and scores [masks] or [masks, classes], got "
            f"{kept.dtype} {tuple(kept.shape)} and {tuple(scores.shape)}."
        )
    if len(kept) < 2:
        raise ShapeError(f"Expected at least two masks, got {len(kept)}.")
    masks, values = kept.cpu().double(), scores.detach().cpu().double()
    return masks - masks.mean(dim=0), values - values.mean(dim=0)


def mean_differences(kept: Tensor, scores: Tensor) -> Tensor:
    """Return the mean score with a patch minus the mean score without it.

    g_j = Σ_n (m_nj − m̄_j)(s_n − s̄) / Σ_n (m_nj − m̄_j)², in float64. A patch that is in every mask or in
    none has 0.

    Args:
        kept: m, which patches each mask keeps, bool [masks, patches].
        scores: s, the score of each mask, [masks], or [masks, classes].

    Returns:
        g, signed, in the unit of the scores: [patches], or [patches, classes].

    Raises:
        ShapeError: wrong shapes, or fewer than two masks.

    Source: the estimator of Petsiuk, Das & Saenko, "RISE", BMVC 2018, §3.1, centred, so that
    the map does not depend on how often a patch was kept.

    >>> mean_differences(torch.tensor([[True, False], [False, True], [True, False]]), torch.tensor([3.0, 1.0, 5.0]))
    tensor([ 3., -3.], dtype=torch.float64)
    """
    masks, centred_scores = _centred(kept, scores)
    spread = masks.square().sum(dim=0)  # exactly 0 if all masks agree
    return torch.where(spread > 0, masks / spread.where(spread > 0, 1.0), 0.0).T @ centred_scores


def split_half_maps(kept: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maps of the even and the odd masks; their agreement is the split-half reliability.

    Args:
        kept, scores: as for `mean_differences`; with fewer than four masks, both maps are 0.

    Returns:
        Two maps of `mean_differences`.

    >>> kept = torch.tensor([[True, False], [True, False], [False, True], [False, True]])
    >>> [half.tolist() for half in split_half_maps(kept, torch.tensor([3.0, 4.0, 1.0, 1.0]))]
    [[2.0, -2.0], [3.0, -3.0]]
    """
    if len(kept) < 4:
        empty = torch.zeros(kept.shape[1], *scores.shape[1:], dtype=torch.float64)
        return empty, empty
    return mean_differences(kept[::2], scores[::2]), mean_differences(kept[1::2], scores[1::2])


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """Posterior of the weights of patches.

    Attributes:
        mean: [patches] or [patches, classes], float64, in the unit of the scores.
        std: standard deviation of each weight, of the same shape.
        t_value: coefficient of the prior mean divided by its standard error, a number or [classes]: how clearly the
            scores agree with the prior mean (negative: they contradict it). None without a prior mean.
    """

    mean: Tensor
    std: Tensor
    t_value: Tensor | None = None


def regress(
    kept: Tensor, scores: Tensor, factor: Tensor, noise: float = NOISE, prior_mean: Tensor | None = None
) -> Posterior:
    """Linear regression of scores on masks, with a Gaussian prior whose covariance is F Fᵀ up to its scale.

    s = μ + X (κ r + w) + ε with X = m − m̄ (centred masks), w ~ N(0, σ² c F Fᵀ), ε ~ N(0, σ² λ), and c such that the
    kernel K = c X F Fᵀ Xᵀ has trace N. With V = K + λ I, u = X r and G = c F Fᵀ Xᵀ V⁻¹, the coefficient of the prior
    mean is estimated by generalised least squares, κ = uᵀ V⁻¹ s / uᵀ V⁻¹ u, and may have any sign. The weights have
    mean κ r + G (s − s̄ − κ u) and covariance σ² (c F Fᵀ − c G X F Fᵀ + d dᵀ / uᵀ V⁻¹ u) with d = r − G u, where
    σ² = (s − s̄ − κ u)ᵀ V⁻¹ (s − s̄ − κ u) / N maximises the likelihood. Correlated weights share evidence from the
    masks.

    Args:
        kept: m, kept patches of each mask, bool [masks, patches].
        scores: s, the score of each mask, [masks] or [masks, classes].
        factor: F, [patches, k]; zeros exclude a patch.
        noise: λ.
        prior_mean: r, a map that the weights are expected to be proportional to, [patches]; None for r = 0.

    Raises:
        OptionError: noise is not a positive number.
        ShapeError: wrong shapes, or fewer than two masks.

    Source: Rasmussen & Williams, "Gaussian Processes for Machine Learning", 2006, §2.1 and §2.7; regression of scores
    on masks as in Lundberg & Lee, NeurIPS 2017.

    >>> kept = torch.tensor([[True, False], [False, True], [True, False]])
    >>> regress(kept, torch.tensor([3.0, 1.0, 5.0]), torch.eye(2), noise=1.0).mean
    tensor([ 1.1250, -1.1250], dtype=torch.float64)
    """
    masks, centred = _centred(kept, scores)
    if factor.ndim != 2 or len(factor) != kept.shape[1]:
        raise ShapeError(f"Expected a factor [{kept.shape[1]} patches, k], got {tuple(factor.shape)}.")
    if not 0.0 < noise < float("inf"):
        raise OptionError(f"Expected a positive noise, got {noise!r}.")
    if prior_mean is not None and prior_mean.shape != kept.shape[1:]:
        raise ShapeError(f"Expected a prior mean [{kept.shape[1]} patches], got {tuple(prior_mean.shape)}.")
    centred = centred.reshape(len(kept), -1)
    factor = factor.detach().cpu().double()
    seen = masks @ factor  # [masks, k]
    tiny = torch.finfo(torch.float64).tiny
    scale = len(kept) / seen.square().sum().clamp_min(tiny)
    kernel = scale * seen @ seen.mT + noise * torch.eye(len(kept), dtype=torch.float64)
    root = torch.linalg.cholesky(kernel)
    half_solved = torch.linalg.solve_triangular(root, seen @ factor.mT, upper=False)  # [masks, patches]
    variance = (scale * factor.square().sum(dim=1) - scale**2 * half_solved.square().sum(dim=0)).clamp_min(0.0)
    coefficient = precision = None
    mean = torch.zeros(kept.shape[1], centred.shape[1], dtype=torch.float64)
    if prior_mean is not None and (known := prior_mean.detach().cpu().double()).any():
        expected = masks @ known  # [masks]
        solved_expected = torch.cholesky_solve(expected[:, None], root)[:, 0]
        precision = (expected @ solved_expected).clamp_min(tiny)
        coefficient = solved_expected @ centred / precision  # [classes]
        mean = known[:, None] * coefficient
        centred = centred - expected[:, None] * coefficient
        unexplained = known - scale * factor @ (seen.mT @ solved_expected)
        variance = variance + unexplained.square() / precision
    solved = torch.cholesky_solve(centred, root)  # [masks, classes]
    mean = mean + scale * factor @ (seen.mT @ solved)
    sigma = (centred * solved).sum(dim=0) / len(kept)  # [classes]
    std = (variance[:, None] * sigma).sqrt()
    shape = (kept.shape[1], *scores.shape[1:])
    t_value = None
    if coefficient is not None and precision is not None:
        t_value = (coefficient * (precision / sigma.clamp_min(tiny)).sqrt()).reshape(scores.shape[1:])
    return Posterior(mean.reshape(shape), std.reshape(shape), t_value)
