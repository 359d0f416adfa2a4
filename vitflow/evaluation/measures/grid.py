"""Whether a map tells classes apart: the grid pointing game, and the objects of one picture against each other."""

from collections.abc import Sequence
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError
from vitflow.evaluation.measures.localisation import Heatmap, Mask, roc_auc
from vitflow.methods.cells import cell_edges
from vitflow.methods.ranks import is_constant

#: Cells of a grid: two by two, numbered in raster order.
CELLS = 4


class CellScore(NamedTuple):
    """How much of a grid's map belongs to the cell that was asked for.

    Attributes:
        energy: share of the map, without what is below 0, that lies in the cell; of a map that has nothing above 0, ¼.
        auc: ROC-AUC of the map as a detector of the cell's patches.
        wins: 1 where the cell's mean is the largest, else 0; of equal ones, each its part.
    """

    energy: float
    auc: float
    wins: float


class ObjectScore(NamedTuple):
    """How a map divides itself among the labelled objects of a picture.

    Attributes:
        energy: of its mass in labelled objects, the share in the asked one.
        wins: 1 where the asked object's mean is the largest, else 0; of equal ones, each its part.
    """

    energy: float
    wins: float


def tile(windows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Four pictures of one size as a grid of two by two of that size, each shrunk to its cell: uint8 RGB.

    >>> tile([np.full((4, 6, 3), 60 * number, np.uint8) for number in range(4)])[[0, 0, 3, 3], [0, 5, 0, 5], 0].tolist()
    [0, 60, 120, 180]
    """
    height, width = windows[0].shape[:2]
    found = np.empty_like(windows[0])
    rows, cols = cell_edges(height, 2), cell_edges(width, 2)
    for number, window in enumerate(windows):
        row, col = divmod(number, 2)
        size = cols[col + 1] - cols[col], rows[row + 1] - rows[row]
        shrunk = cv2.resize(window, size, interpolation=cv2.INTER_AREA)
        found[rows[row] : rows[row + 1], cols[col] : cols[col + 1]] = shrunk
    return found


def score_cell(grid: NDArray[np.floating], cell: int) -> CellScore:
    """Score the map [rows, cols] of a grid whose class in this cell, 0 to 3, was asked for.

    Patches that lie in two cells belong to none.

    Raises:
        ShapeError: the map has fewer than 2 × 2 patches.

    Source: Böhle, Fritz & Schiele, "Convolutional Dynamic Alignment Networks for Interpretable Classifications", CVPR
    2021, §4 (the energy).

    >>> score_cell(np.array([[3.0, 1.0], [-1.0, 0.0]]), 0)
    CellScore(energy=0.75, auc=1.0, wins=1.0)
    """
    if grid.ndim != 2 or min(grid.shape) < 2:
        raise ShapeError(f"Expected a map of at least 2 × 2 patches, got {grid.shape}.")
    values = grid.astype(np.float64)
    if is_constant(values):
        values[:] = values.flat[0]  # without rounding
    rows, cols = (np.arange(count) // (count / 2) for count in values.shape)
    owner = 2 * rows[:, None] + cols[None, :]
    for axis, count in enumerate(values.shape):
        if count % 2:
            values = np.delete(values, count // 2, axis)
            owner = np.delete(owner, count // 2, axis)
    cells = [values[owner == number] for number in range(CELLS)]
    mass = np.array([np.clip(own, 0.0, None).sum() for own in cells])
    whole = float(mass.sum())
    auc = roc_auc(values, owner == cell)
    assert auc is not None
    return CellScore(
        float(mass[cell]) / whole if whole > 0 else 1 / CELLS, auc, _wins([own.mean() for own in cells], cell)
    )


def score_object(heatmap: Heatmap, objects: Sequence[Mask], asked: int) -> ObjectScore | None:
    """Score the map of a picture for one of its labelled objects, against all of them.

    Args:
        heatmap: the map for the asked object's class, [height, width], NaN where the model saw nothing. Its mass is
            what lies above its minimum, or above 0 where that lies below.
        objects: the pixels of each class's objects, bool [height, width].
        asked: number of the one that is asked for.

    Returns:
        None where the model saw nothing of one of the objects.

    >>> masks = [np.array([[True, True, False, False]]), np.array([[False, False, False, True]])]
    >>> score_object(np.array([[3.0, 1.0, 0.0, 2.0]]), masks, 0)
    ObjectScore(energy=0.6666666666666666, wins=0.5)
    """
    seen = np.isfinite(heatmap)
    if not all((seen & mask).any() for mask in objects):
        return None
    values = heatmap.astype(np.float64)
    mass = np.clip(values - max(float(values[seen].min()), 0.0), 0.0, None)
    sums = [float(mass[seen & mask].sum()) for mask in objects]
    areas = [int((seen & mask).sum()) for mask in objects]
    whole = sum(sums)
    energy = sums[asked] / whole if whole > 0 else areas[asked] / sum(areas)
    return ObjectScore(energy, _wins([own / area for own, area in zip(sums, areas, strict=True)], asked))


def _wins(means: Sequence[float], asked: int) -> float:
    largest = np.array(means) == max(means)
    return float(largest[asked]) / float(largest.sum())
