"""Random masks of patches, and the weight of each patch in the scores of the masked images."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OptionError, whole_number

#: Noise λ of maps: larger than the estimated noise, since smoother maps localise better.
SMOOTHING = 6.0
#: Variances of the noise of a score that are tried, relative to the mean prior variance of the scores.
NOISES = torch.logspace(-1.0, 2.0, 31, dtype=torch.float64)
#: Standard deviations of a normal distribution on each side of its mean that contain 95 %.
NORMAL_95 = 1.96
#: Share of the patches that a mask keeps.
KEPT = 0.3
#: Share of the variance of masks' fields that similar patches have in common.
SIMILARITY = 0.75
# Products of masks are rounding errors below this share of the product of squares.
_ROUNDING = 1e-18
# Breaks ties between values of the field, which are about 1.
_NOISE = 1e-3


def draw_masks(
    rows: int,
    cols: int,
    *,
    masks: int,
    keep: float = KEPT,
    cells: int = 7,
    seed: int = 0,
    affinity: Tensor | None = None,
) -> Tensor:
    """Random masks, each of which keeps the same number of patches, in coherent regions.

    A mask is a field of `cells × cells` normal numbers (at most the number of patches per side), upsampled to the grid
    by bicubic interpolation; its k = round(keep · patches) highest patches stay. With an affinity A, the field is
    √(1 − α) g + √α A z, where g is the upsampled field, z are normal numbers, α = 0.75, and each patch of g and of A z
    has variance 1: then similar patches tend to stay together, so that whole objects are kept or dropped. The masks
    depend on the arguments only; fewer masks are the first of more masks.

    Args:
        rows: patches from top to bottom.
        cols: patches from left to right.
        masks: number of masks, at least 2.
        keep: share of the patches that stays: at least one patch, and not all.
        cells: numbers per side of the field, at least 2; more cells give smaller regions.
        seed: seed of the random numbers.
        affinity: A, similarity of the patches, [patches, k]; only the direction of each row matters.

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
    sizes = [height * width, patches if affinity is None else affinity.shape[1]]
    drawn = torch.from_numpy(random.standard_normal((masks, sum(sizes))))  # mask by mask
    field, further = drawn.split(sizes, dim=1)
    values = _enlarge(field.reshape(masks, height, width), rows, cols)
    if affinity is None:
        values = values + _NOISE * further
    else:
        std = _enlarge(torch.eye(height * width).double().reshape(-1, height, width), rows, cols).norm(dim=0)
        directions = torch.nn.functional.normalize(affinity.detach().cpu().double(), dim=1)
        values = (1.0 - SIMILARITY) ** 0.5 * values / std + SIMILARITY**0.5 * further @ directions.T
    highest = values.topk(round(keep * patches), dim=1).indices
    return torch.zeros(masks, patches, dtype=torch.bool).scatter_(1, highest, True)


def _enlarge(fields: Tensor, rows: int, cols: int) -> Tensor:
    """Upsample fields [n, height, width] to the patches, [n, patches]."""
    larger = torch.nn.functional.interpolate(fields[:, None], size=(rows, cols), mode="bicubic", align_corners=False)
    return larger.flatten(1)


def _centred(kept: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return masks and their scores minus their means, float64 on the CPU."""
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

    Source: the estimator of Petsiuk, Das & Saenko, "RISE", BMVC 2018, §3.1, centred, so that
    the map does not depend on how often a patch was kept.

    >>> mean_differences(torch.tensor([[True, False], [False, True], [True, False]]), torch.tensor([3.0, 1.0, 5.0]))
    tensor([ 3., -3.], dtype=torch.float64)
    """
    masks, centred_scores = _centred(kept, scores)
    spread = masks.square().sum(dim=0)  # exactly 0 if all masks agree
    return torch.where(spread > 0, masks / spread.where(spread > 0, 1.0), 0.0).T @ centred_scores


@dataclass(frozen=True, slots=True, eq=False)
class Posterior:
    """Posterior of the weights of patches.

    Attributes:
        mean: float64 [patches], in the unit of the scores.
        std: standard deviations, of the same shape.
        noise: λ, the variance of the noise of a score relative to the mean prior variance of the scores.
    """

    mean: Tensor
    std: Tensor
    noise: float


def regress(kept: Tensor, scores: Tensor, factor: Tensor, *, noise: float | None = None) -> Posterior:
    """Linear regression of scores on masks, with a Gaussian prior whose covariance is F Fᵀ up to its scale.

    s = μ + X w + ε with X = m − m̄ (centred masks), w ~ N(0, σ² c F Fᵀ), ε ~ N(0, σ² λ), and c such that the kernel
    K = c X F Fᵀ Xᵀ has trace N. With V = K + λ I and G = c F Fᵀ Xᵀ V⁻¹, the weights have mean G (s − s̄) and covariance
    σ² (c F Fᵀ − c G X F Fᵀ), where σ² = (s − s̄)ᵀ V⁻¹ (s − s̄) / (N − 1). Unless given, λ is the one of 0.1 … 100 with
    the largest restricted likelihood. Correlated weights share evidence from the masks.

    Args:
        kept: m, kept patches of each mask, bool [masks, patches].
        scores: s, the score of each mask, [masks].
        factor: F, [patches, k]; zeros exclude a patch.
        noise: λ; None to estimate it.

    Source: Rasmussen & Williams, "Gaussian Processes for Machine Learning", 2006, §2.1, §2.7 and §5.4; regression of
    scores on masks as in Lundberg & Lee, NeurIPS 2017.

    >>> kept = torch.tensor([[True, False], [False, True], [True, False]])
    >>> regress(kept, torch.tensor([3.0, 1.0, 5.0]), torch.eye(2), noise=1.0).mean
    tensor([ 1.1250, -1.1250], dtype=torch.float64)
    """
    masks, centred = _centred(kept, scores)
    count = len(kept)
    factor = factor.detach().cpu().double()
    seen = masks @ factor  # [masks, k]
    spread = float(seen.square().sum())
    # Masks that keep equally many of equal patches say nothing: what differs is rounding.
    scale = count / spread if spread > _ROUNDING * float(masks.square().sum() * factor.square().sum()) else 0.0
    # In the basis of the kernel, the scores are independent with variances σ² (values + λ).
    values, basis = torch.linalg.eigh(scale * seen @ seen.mT)
    values, rotated = values.clamp_min(0.0), basis.mT @ centred
    noise = _likeliest_noise(values, rotated) if noise is None else noise
    inverse = 1.0 / (values + noise)
    covariance = scale * basis.mT @ seen @ factor.mT  # of scores and weights, [masks, patches]
    variance = scale * factor.square().sum(dim=1) - inverse @ covariance.square()
    sigma = (rotated.square() @ inverse) / (count - 1)
    return Posterior((inverse * rotated) @ covariance, (variance.clamp_min(0.0) * sigma).sqrt(), noise)


def _likeliest_noise(values: Tensor, rotated: Tensor) -> float:
    """Return the λ of `NOISES` with the largest restricted likelihood of scores in the basis of the kernel."""
    sums = values + NOISES[:, None]  # [λ, masks]
    residual = (rotated.square() / sums).sum(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    # The direction of the mean, whose value is 0, does not count.
    likelihood = -(len(values) - 1) * residual.log() - sums.log().sum(dim=1) + NOISES.log()
    return float(NOISES[likelihood.argmax()])
