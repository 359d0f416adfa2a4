"""Cells: the model input cut into rows × cols rectangles, for methods that operate on pixels instead of tokens."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, whole_number

# Default number of cells on the shorter side, that of a 224-pixel input in 16-pixel patches.
DEFAULT_CELLS = 14


def cell_grid(
    height: int, width: int, patch_size: int | None, patches: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Rows and columns of cells of about `patch_size` pixels.

    If that is None: the model's `patches` (rows and columns) if they have at least 7 pixels each, else cells of 1/14 of
    the shorter side.

    Raises:
        OptionError: a cell would be smaller than a pixel or larger than the image.

    >>> cell_grid(224, 320, None), cell_grid(224, 320, 32), cell_grid(224, 320, None, (16, 16))
    ((14, 20), (7, 10), (16, 16))
    """
    shorter = min(height, width)
    if patch_size is None:
        if patches is not None and height >= 7 * patches[0]:
            return patches
        side = shorter / min(DEFAULT_CELLS, shorter)
        return round(height / side), round(width / side)
    patch_size = whole_number("patch_size", patch_size)
    if not 1 <= patch_size <= shorter:
        raise OptionError(f"Expected patch_size from 1 to {shorter} pixels, got {patch_size}.")
    return round(height / patch_size), round(width / patch_size)


def cell_edges(length: int, count: int) -> list[int]:
    """Return the boundaries of `count` cells on a side of `length` pixels, equal to within a pixel.

    Raises:
        ShapeError: there are more cells than pixels.

    >>> cell_edges(224, 14)[:3], cell_edges(10, 4)
    ([0, 16, 32], [0, 2, 5, 8, 10])
    """
    if not 1 <= count <= length:
        raise ShapeError(f"Expected 1 to {length} cells on a side of {length} pixels, got {count}.")
    return [round(number * length / count) for number in range(count + 1)]


def cell_owners(height: int, width: int, rows: int, cols: int) -> Tensor:
    """Return the index of the cell of each pixel, in raster order from the top left, [height, width].

    >>> cell_owners(2, 4, 1, 2)
    tensor([[0, 0, 1, 1],
            [0, 0, 1, 1]])
    """
    of_row, of_col = (
        torch.repeat_interleave(torch.arange(count), torch.tensor(cell_edges(length, count)).diff())
        for length, count in ((height, rows), (width, cols))
    )
    return of_row[:, None] * cols + of_col


def sum_cells(values: Tensor, rows: int, cols: int) -> Tensor:
    """Sum of an image [..., height, width] over the pixels of each cell, [..., rows, cols].

    >>> sum_cells(torch.arange(8.0).reshape(2, 4), 1, 2)
    tensor([[10., 18.]])
    """
    for axis, count in ((-2, rows), (-1, cols)):
        edges = torch.tensor(cell_edges(values.shape[axis], count), device=values.device)
        owner = torch.repeat_interleave(torch.arange(count, device=values.device), edges.diff())
        shape = list(values.shape)
        shape[axis] = count
        values = values.new_zeros(shape).index_add_(axis, owner, values)
    return values


def occlusion(
    predict: Callable[[Tensor], Tensor],
    pixels: Tensor,
    targets: Tensor,
    *,
    rows: int,
    cols: int,
    batch_size: int = 32,
    progress: Callable[[int], object] = lambda _: None,
) -> Tensor:
    """Occlusion: the drop in the target's score when one patch is replaced by the image's mean colour.

    The mean is that of the image, per channel, over its model input. A negative value means that the score is higher
    without the patch. The map is in the unit of the scores.

    Args:
        predict: maps model inputs [images, channels, height, width] to scores [images, classes]: log-odds, or
            probabilities as in the paper.
        pixels: the model inputs, [batch, channels, height, width].
        targets: class index of each image, [batch].
        rows: patches from top to bottom.
        cols: patches from left to right.
        batch_size: images with a blanked patch per call of `predict`; affects the time only.
        progress: called with the number of patches occluded since the last call.

    Returns:
        [batch, rows, cols].

    Raises:
        OptionError: batch_size is less than 1.
        ShapeError: pixels or targets have the wrong shape, or there are more patches than pixels.

    Source: Zeiler & Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014, §3; the occlusion scores
    of Abnar & Zuidema, ACL 2020, §4.

    >>> brightness = lambda pixels: pixels.mean(dim=(1, 2, 3)).unsqueeze(1)
    >>> occlusion(brightness, torch.tensor([[[[0.0, 4.0]]]]), torch.tensor([0]), rows=1, cols=2)
    tensor([[[-1.,  1.]]])
    """
    if batch_size < 1:
        raise OptionError(f"Expected a batch_size of at least 1, got {batch_size}.")
    if pixels.ndim != 4 or targets.shape != pixels.shape[:1]:
        raise ShapeError(
            "Expected pixels [batch, channels, height, width] and one target per image, got "
            f"{tuple(pixels.shape)} and targets {tuple(targets.shape)}."
        )
    pixels = pixels.detach()
    means = pixels.mean(dim=(2, 3), keepdim=True)  # [batch, channels, 1, 1]
    tops, lefts = cell_edges(pixels.shape[2], rows), cell_edges(pixels.shape[3], cols)
    jobs = [(image, row, col) for image in range(len(pixels)) for row in range(rows) for col in range(cols)]
    remaining = []
    for start in range(0, len(jobs), batch_size):
        chunk = jobs[start : start + batch_size]
        blanked = pixels[[image for image, _, _ in chunk]]
        for copy, (image, row, col) in zip(blanked, chunk, strict=True):
            copy[:, tops[row] : tops[row + 1], lefts[col] : lefts[col + 1]] = means[image]
        remaining.append(_of_target(predict(blanked), targets[[image for image, _, _ in chunk]]))
        progress(len(chunk))
    whole = _of_target(predict(pixels), targets)
    return whole[:, None, None] - torch.cat(remaining).reshape(len(pixels), rows, cols)


def channel_occlusion(
    predict: Callable[[Tensor], Tensor], pixels: Tensor, targets: Tensor, *, batch_size: int = 32
) -> Tensor:
    """Drop in the target's score when one channel of the image is replaced by its mean.

    Args:
        predict, pixels, targets, batch_size: as for `occlusion`.

    Returns:
        [batch, channels].

    >>> difference = lambda pixels: (pixels[:, 0] - pixels[:, 1]).amax(dim=(1, 2)).unsqueeze(1)
    >>> channel_occlusion(difference, torch.tensor([[[[0.0, 4.0]], [[1.0, 1.0]]]]), torch.tensor([0]))
    tensor([[2., 0.]])
    """
    drops = []
    for image, target in zip(pixels.detach(), targets, strict=True):
        every = torch.arange(len(image), device=image.device)
        hidden = image.repeat(len(image), 1, 1, 1)
        hidden[every, every] = image.mean(dim=(1, 2))[:, None, None]
        scores = [
            _of_target(predict(part), target.expand(len(part)))
            for part in (image.unsqueeze(0), *hidden.split(batch_size))
        ]
        drops.append(scores[0] - torch.cat(scores[1:]))
    return torch.stack(drops)


def _of_target(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the score of each image's target, [images]."""
    return scores.gather(1, targets.to(scores.device).unsqueeze(1)).squeeze(1)


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
    if kept.ndim != 2 or kept.dtype != torch.bool or scores.ndim not in (1, 2) or len(scores) != len(kept):
        raise ShapeError(
            "Expected bool masks [masks, patches] and scores [masks] or [masks, classes], got "
            f"{kept.dtype} {tuple(kept.shape)} and {tuple(scores.shape)}."
        )
    if len(kept) < 2:
        raise ShapeError(f"Expected at least two masks, got {len(kept)}.")
    centred_scores = scores.detach().cpu().double()
    centred_scores = centred_scores - centred_scores.mean(dim=0)
    masks = kept.cpu().double()
    masks = masks - masks.mean(dim=0)
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
