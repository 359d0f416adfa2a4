"""Cells: the model input cut into rows × cols rectangles, for occlusion, and for maps without any model."""

import zlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OptionError, whole_number
from vitflow.images.geometry import Extent, Span

# Default number of cells on the shorter side, that of a 224-pixel input in 16-pixel patches.
DEFAULT_CELLS = 14


def cell_grid(
    height: int, width: int, patch_size: int | None, patches: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return rows and columns of cells of about `patch_size` pixels.

    If that is None: the model's `patches` (rows and columns) if they have at least 7 pixels each, else cells of 1/14 of
    the shorter side.

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


def cell_edges(length: int, count: int, span: Span | None = None) -> list[int]:
    """Return the boundaries of `count` cells on a side of `length` pixels: those of a span, or equal to within a pixel.

    The outermost cells reach to the borders of the image, as pixels beyond the span have no influence of their own.

    >>> cell_edges(224, 14)[:3], cell_edges(10, 4), cell_edges(10, 3, Span(0, 3, 0, 9))
    ([0, 16, 32], [0, 2, 5, 8, 10], [0, 3, 6, 10])
    """
    if span is None:
        return [round(number * length / count) for number in range(count + 1)]
    inner = span.edges(count)[1:-1].clip(0, length)
    return [0, *(round(edge) for edge in inner.tolist()), length]


def cell_owners(height: int, width: int, rows: int, cols: int, extent: Extent | None = None) -> Tensor:
    """Return the index of the cell of each pixel, in raster order from the top left, [height, width].

    >>> cell_owners(2, 4, 1, 2)
    tensor([[0, 0, 1, 1],
            [0, 0, 1, 1]])
    """
    spans = extent or (None, None)
    of_row, of_col = (
        torch.repeat_interleave(torch.arange(count), torch.tensor(cell_edges(length, count, span)).diff())
        for length, count, span in zip((height, width), (rows, cols), spans, strict=True)
    )
    return of_row[:, None] * cols + of_col


def sum_cells(values: Tensor, rows: int, cols: int, extent: Extent | None = None) -> Tensor:
    """Sum of an image [..., height, width] over the pixels of each cell, [..., rows, cols].

    >>> sum_cells(torch.arange(8.0).reshape(2, 4), 1, 2)
    tensor([[10., 18.]])
    """
    for axis, count, span in zip((-2, -1), (rows, cols), extent or (None, None), strict=True):
        edges = torch.tensor(cell_edges(values.shape[axis], count, span), device=values.device)
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
    extent: Extent | None = None,
    batch_size: int = 32,
    progress: Callable[[int], object] = lambda _: None,
) -> Tensor:
    """Occlusion: the drop in the target's score if a patch is replaced by the image's mean colour, [batch, rows, cols].

    The mean is that of the model input, per channel. A negative value means that the score is higher without the patch.
    `predict` maps model inputs [images, channels, height, width] to scores [images, classes]: log-odds, or
    probabilities as in the paper; it gets up to `batch_size` images with a blanked patch. Without `extent`, patches
    divide the image evenly.

    Source: Zeiler & Fergus, "Visualizing and Understanding Convolutional Networks", ECCV 2014, §3; the occlusion scores
    of Abnar & Zuidema, ACL 2020, §4.

    >>> brightness = lambda pixels: pixels.mean(dim=(1, 2, 3)).unsqueeze(1)
    >>> occlusion(brightness, torch.tensor([[[[0.0, 4.0]]]]), torch.tensor([0]), rows=1, cols=2)
    tensor([[[-1.,  1.]]])
    """
    batch_size, pixels = whole_number("occlusion_batch", batch_size, 1), pixels.detach()
    owners = cell_owners(pixels.shape[2], pixels.shape[3], rows, cols, extent).to(pixels.device)
    jobs = torch.cartesian_prod(torch.arange(len(pixels)), torch.arange(rows * cols))
    blank, remaining = mean_colour(pixels), []
    for chunk, there in zip(jobs.split(batch_size), jobs.to(pixels.device).split(batch_size), strict=True):
        images, cells = there.unbind(dim=1)
        blanked = torch.where(owners == cells.view(-1, 1, 1, 1), blank[images], pixels[images])
        remaining.append(_of_target(predict(blanked), targets[chunk[:, 0]]))
        progress(len(chunk))
    whole = _of_target(predict(pixels), targets)
    return whole[:, None, None] - torch.cat(remaining).reshape(len(pixels), rows, cols)


def mean_colour(pixels: Tensor) -> Tensor:
    """Return the mean colour of each model input at all of its pixels, [batch, channels, height, width]."""
    return pixels.mean(dim=(2, 3), keepdim=True).expand_as(pixels)


def _of_target(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the score of each image's target, [images]."""
    return scores.gather(1, targets.to(scores.device).unsqueeze(1)).squeeze(1)


def random_map(pixels: Tensor, *, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Random map: a uniform number from [0, 1) for each patch, float32 [batch, rows, cols].

    The numbers depend only on the content of the image and the seed: an image has the same map in every run, alone or
    in a batch, and different images have independent maps.

    >>> images = torch.arange(24.0).reshape(2, 3, 2, 2)
    >>> bool((random_map(images, rows=2, cols=3)[1] == random_map(images[1:], rows=2, cols=3)[0]).all())
    True
    """
    seed, maps = whole_number("random_seed", seed, 0), []
    for image in pixels.detach().float().cpu():
        generator = np.random.default_rng((seed, zlib.crc32(image.numpy().tobytes())))
        maps.append(torch.from_numpy(generator.random((rows, cols), dtype=np.float32)))
    return torch.stack(maps)


def centre_prior(rows: int, cols: int, *, sigma: float = 0.25) -> Tensor:
    """Centre prior: exp(−(x² + y²) / 2σ²), with x and y from the centre of the model input in shares of its sides.

    Subjects of photographs tend to be in the centre, so this baseline scores well on many benchmarks.

    >>> centre_prior(1, 3, sigma=0.5)
    tensor([[0.8007, 1.0000, 0.8007]])
    """
    y, x = (((torch.arange(count, dtype=torch.float64) + 0.5) / count - 0.5) / sigma for count in (rows, cols))
    return torch.exp(-(y[:, None] ** 2 + x[None, :] ** 2) / 2.0).float()
