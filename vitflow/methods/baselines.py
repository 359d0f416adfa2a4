"""Baselines that know nothing of the model: a map that looks no better than these says nothing."""

import zlib

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError


def random_map(pixels: Tensor, *, rows: int, cols: int, seed: int = 0) -> Tensor:
    """Random map: a number from [0, 1) for each patch, each picture its own.

    The numbers follow from the picture's content and the seed alone: a picture has the same map in every run, alone or
    in a batch, and two pictures have independent ones.

    Args:
        pixels: model inputs, [batch, channels, height, width].
        rows: patches from top to bottom.
        cols: patches from left to right.
        seed: another seed gives another map.

    Returns:
        [batch, rows, cols], float32.

    Raises:
        OptionError: the seed is negative.

    >>> pictures = torch.arange(24.0).reshape(2, 3, 2, 2)
    >>> bool((random_map(pictures, rows=2, cols=3)[1] == random_map(pictures[1:], rows=2, cols=3)[0]).all())
    True
    """
    if seed < 0:
        raise OptionError(f"Expected a seed of at least 0, got {seed}.")
    maps = []
    for picture in pixels.detach().float().cpu():
        generator = np.random.default_rng((seed, zlib.crc32(picture.numpy().tobytes())))
        maps.append(torch.from_numpy(generator.random((rows, cols), dtype=np.float32)))
    return torch.stack(maps)


def centre_prior(rows: int, cols: int, *, sigma: float = 0.25) -> Tensor:
    """Centre prior: exp(−(x² + y²) / 2σ²), with x and y from the centre of the model input in shares of its sides.

    Photographers put their subject in the middle, so that many a benchmark is half solved by this.

    Args:
        rows: patches from top to bottom.
        cols: patches from left to right.
        sigma: σ, as a share of the side.

    Returns:
        [rows, cols], float32.

    Raises:
        OptionError: sigma is not positive.
        ShapeError: there is not at least one row and column.

    >>> centre_prior(1, 3, sigma=0.5)
    tensor([[0.8007, 1.0000, 0.8007]])
    """
    if not sigma > 0:
        raise OptionError(f"Expected sigma > 0, got {sigma}.")
    if rows < 1 or cols < 1:
        raise ShapeError(f"Expected at least 1 × 1 patches, got {rows} × {cols}.")
    # In shares of σ, whose own square may be more or less than a float can hold.
    y, x = (((torch.arange(count, dtype=torch.float64) + 0.5) / count - 0.5) / sigma for count in (rows, cols))
    return torch.exp(-(y[:, None] ** 2 + x[None, :] ** 2) / 2.0).float()
