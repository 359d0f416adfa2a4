"""Sampling: how much better the answer is where a patch was kept than where it was dropped, over random masks."""

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, whole_number

# Beside the field's values of about 1: so little that it decides between equals alone.
_NOISE = 1e-3


def draw_masks(rows: int, cols: int, *, masks: int, keep: float = 0.3, cells: int = 7, seed: int = 0) -> Tensor:
    """Random masks, each of which keeps the same number of patches, in coherent regions.

    A mask is a field of `cells × cells` normal numbers (no more a side than there are patches), enlarged to the grid by
    bicubic interpolation; its k = round(keep · patches) highest patches stay. The masks follow from the grid and the
    options alone, and the first of many are those of few.

    Args:
        rows: patches from top to bottom.
        cols: patches from left to right.
        masks: how many, at least 2.
        keep: share of the patches that stays, which must be one patch at least, and not all.
        cells: numbers on a side of the field, at least 2: more of them make smaller regions.
        seed: another seed gives other masks.

    Returns:
        Which patches stay, bool [masks, patches], in raster order.

    Raises:
        OptionError: an option lies outside its range.

    Source: Petsiuk, Das & Saenko, "RISE", BMVC 2018, §3.2, with as many patches in every mask.

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


def mean_differences(kept: Tensor, scores: Tensor) -> Tensor:
    """The mean score where a patch was kept, less the mean score where it was dropped.

    g_j = Σ_n (m_nj − m̄_j)(s_n − s̄) / Σ_n (m_nj − m̄_j)², in float64. A patch that every mask keeps, or that none does,
    was never compared: it has 0.

    Args:
        kept: m, which patches each mask keeps, bool [masks, patches].
        scores: s, the answer to each mask, [masks], or [masks, classes].

    Returns:
        g, signed, in the unit of the scores: [patches], or [patches, classes].

    Raises:
        ShapeError: wrong shapes, or fewer than two masks.

    Source: the estimator of Petsiuk, Das & Saenko, "RISE", BMVC 2018, §3.1, centred, so that the patches which happened
    to be kept more often have no more for it.

    >>> mean_differences(torch.tensor([[True, False], [False, True], [True, False]]), torch.tensor([3.0, 1.0, 5.0]))
    tensor([ 3., -3.], dtype=torch.float64)
    """
    if kept.ndim != 2 or kept.dtype != torch.bool or scores.ndim not in (1, 2) or len(scores) != len(kept):
        raise ShapeError(
            "Expected bool masks [masks, patches] and scores [masks] or [masks, classes], got "
            f"{kept.dtype} {tuple(kept.shape)} and {tuple(scores.shape)}."
        )
    if len(kept) < 2:
        raise ShapeError(f"Expected at least two masks, got {len(kept)}.")
    answers = scores.detach().cpu().double()
    answers = answers - answers.mean(dim=0)
    masks = kept.cpu().double()
    masks = masks - masks.mean(dim=0)
    spread = masks.square().sum(dim=0)  # exactly 0 where all masks agree
    return torch.where(spread > 0, masks / spread.where(spread > 0, 1.0), 0.0).T @ answers


def halves(kept: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """The maps of every other mask, from the first and from the second: as far as they agree, more masks say the same.

    Args:
        kept, scores: as for `mean_differences`, of four masks or more; of fewer, both maps are 0.

    Returns:
        Two maps of `mean_differences`.

    >>> kept = torch.tensor([[True, False], [True, False], [False, True], [False, True]])
    >>> [half.tolist() for half in halves(kept, torch.tensor([3.0, 4.0, 1.0, 1.0]))]
    [[2.0, -2.0], [3.0, -3.0]]
    """
    if len(kept) < 4:
        empty = torch.zeros(kept.shape[1], *scores.shape[1:], dtype=torch.float64)
        return empty, empty
    return mean_differences(kept[::2], scores[::2]), mean_differences(kept[1::2], scores[1::2])
