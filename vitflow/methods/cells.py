"""Cells: the model input cut into rows × cols rectangles, for methods that look at pixels and not at tokens."""

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, whole_number

# Cells on the shorter side where neither the model nor the caller says: what a 224-pixel input has in 16-pixel patches.
DEFAULT_CELLS = 14


def cell_grid(
    height: int, width: int, patch_size: int | None, patches: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Rows and columns of cells of about `patch_size` pixels.

    Where that is None, they are the model's own `patches` (rows and columns, of at least 7 pixels each), or cells of
    1/14 of the shorter side.

    Raises:
        OptionError: a cell would be smaller than a pixel or larger than the picture.

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
    """Where `count` cells begin and end on a side of `length` pixels: equal, or different by one pixel at most.

    Raises:
        ShapeError: there are more cells than pixels.

    >>> cell_edges(224, 14)[:3], cell_edges(10, 4)
    ([0, 16, 32], [0, 2, 5, 8, 10])
    """
    if not 1 <= count <= length:
        raise ShapeError(f"Expected 1 to {length} cells on a side of {length} pixels, got {count}.")
    return [round(number * length / count) for number in range(count + 1)]


def cell_owners(height: int, width: int, rows: int, cols: int) -> Tensor:
    """The number of the cell that each pixel belongs to, 0 for the top left, in raster order, [height, width].

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
    """Sum of a picture [..., height, width] over the pixels of each cell, [..., rows, cols].

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
