"""Blank-out: what the answer loses when a patch is hidden."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError
from vitflow.methods.cells import cell_edges


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
    """Blank-out: the drop in the target's score when one patch is replaced by the picture's mean colour.

    The mean is each picture's own, per channel, over its whole model input. A negative value says that the model is
    surer without the patch. The map is in the unit of the scores.

    Args:
        predict: maps model inputs [pictures, channels, height, width] to scores [pictures, classes]: log-odds, or
            probabilities as in the paper.
        pixels: the model inputs, [batch, channels, height, width].
        targets: class index of each picture, [batch].
        rows: patches from top to bottom.
        cols: patches from left to right.
        batch_size: pictures with a blanked patch per call of `predict`; it changes the time, not the map.
        progress: called with how many patches were hidden since the last call.

    Returns:
        [batch, rows, cols].

    Raises:
        OptionError: batch_size is less than 1.
        ShapeError: pixels or targets have the wrong shape, or there are more patches than pixels.

    Source: Zeiler & Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014, §3; the blank-out scores
    of Abnar & Zuidema, ACL 2020, §4.

    >>> brightness = lambda pixels: pixels.mean(dim=(1, 2, 3)).unsqueeze(1)
    >>> occlusion(brightness, torch.tensor([[[[0.0, 4.0]]]]), torch.tensor([0]), rows=1, cols=2)
    tensor([[[-1.,  1.]]])
    """
    if batch_size < 1:
        raise OptionError(f"Expected a batch_size of at least 1, got {batch_size}.")
    if pixels.ndim != 4 or targets.shape != pixels.shape[:1]:
        raise ShapeError(
            "Expected pixels [batch, channels, height, width] and one target per picture, got "
            f"{tuple(pixels.shape)} and targets {tuple(targets.shape)}."
        )
    pixels = pixels.detach()
    means = pixels.mean(dim=(2, 3), keepdim=True)  # [batch, channels, 1, 1]
    tops, lefts = cell_edges(pixels.shape[2], rows), cell_edges(pixels.shape[3], cols)
    jobs = [(picture, row, col) for picture in range(len(pixels)) for row in range(rows) for col in range(cols)]
    remaining = []
    for start in range(0, len(jobs), batch_size):
        chunk = jobs[start : start + batch_size]
        blanked = pixels[[picture for picture, _, _ in chunk]]
        for copy, (picture, row, col) in zip(blanked, chunk, strict=True):
            copy[:, tops[row] : tops[row + 1], lefts[col] : lefts[col + 1]] = means[picture]
        remaining.append(_of_target(predict(blanked), targets[[picture for picture, _, _ in chunk]]))
        progress(len(chunk))
    whole = _of_target(predict(pixels), targets)
    return whole[:, None, None] - torch.cat(remaining).reshape(len(pixels), rows, cols)


def _of_target(scores: Tensor, targets: Tensor) -> Tensor:
    """The score of each picture's own target, [pictures]."""
    return scores.gather(1, targets.to(scores.device).unsqueeze(1)).squeeze(1)
