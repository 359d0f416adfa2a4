"""Localisation: four measures of a heatmap against the pixels of a region.

All of them use the pixels of the original image inside the model input. A heatmap is NaN outside of it (and may be set
to NaN at unknown pixels), and NaN pixels are ignored. If the region covers all or none of the other pixels, every
measure is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from vitflow.errors import ShapeError
from vitflow.methods.similarity import is_constant

Heatmap = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]

#: Cells of a grid: two by two, numbered in raster order.
CELLS = 4


@dataclass(frozen=True, slots=True)
class Localisation:
    """The four measures of a map and a region.

    Attributes:
        pointing_game: 1.0 if the map's highest pixel is in the region, else 0.0. Of tied pixels the one nearest to
            their centroid counts, so that a plateau is represented by its middle. Source: Zhang et al., "Top-Down
            Neural Attention by Excitation Backprop", ECCV 2016, §4.1, here without their tolerance of 15 pixels.
        energy: share of the map's mass above its minimum that is in the region; the share of area for a constant map.
            Source: the energy-based pointing game of Wang et al., "Score-CAM", CVPR workshops 2020, §4.3, here minus
            the minimum, where they rescale the map.
        roc_auc: probability that a pixel of the region is higher than one of the background, ties counted half. Source:
            Hanley & McNeil, "The Meaning and Use of the Area under a ROC Curve", Radiology, 1982.
        mean_iou: mean of the IoU of the region with the pixels above the map's mean, and of the background with the
            others. Source: the segmentation test of Chefer, Gur & Wolf, "Transformer Interpretability Beyond Attention
            Visualization", CVPR 2021, §4.2, here for each image, over the pixels of the original image inside the model
            input.
    """

    pointing_game: float
    energy: float
    roc_auc: float
    mean_iou: float


def localise(heatmap: Heatmap, region: Mask) -> Localisation | None:
    """Compute all four measures of a map and a region; the pixels are sorted once.

    Args:
        heatmap: the map over the image, [height, width], NaN outside the model input.
        region: pixels of the object, bool [height, width].

    Raises:
        ShapeError: the shapes differ, or the region is not bool.

    >>> scores = localise(np.array([[0.9, 0.8, 0.1, np.nan]]), np.array([[True, False, False, True]]))
    >>> scores.roc_auc, scores.pointing_game
    (1.0, 1.0)
    """
    if heatmap.ndim != 2 or heatmap.shape != region.shape or region.dtype != np.bool_:
        raise ShapeError(
            f"Expected a heatmap [height, width] and a bool region of the same shape, got {heatmap.shape} and "
            f"{region.dtype} {region.shape}."
        )
    visible = np.isfinite(heatmap)
    values, inside = heatmap[visible], region[visible]
    if inside.all() or not inside.any():
        return None
    mass = values.astype(np.float64) - float(values.min())
    whole = float(mass.sum())
    count, others = int(inside.sum()), int((~inside).sum())
    # In float64 and minus the minimum, so that a constant map is not above its mean.
    predicted = mass > mass.mean()
    return Localisation(
        pointing_game=float(region[_highest_pixel(heatmap)]),
        energy=float(mass[inside].sum()) / whole if whole > 0 else float(inside.mean()),
        roc_auc=(float(rankdata(values)[inside].sum()) - count * (count + 1) / 2) / (count * others),
        mean_iou=(_iou(predicted, inside) + _iou(~predicted, ~inside)) / 2.0,
    )


def _iou(first: Mask, second: Mask) -> float:
    union = int((first | second).sum())
    return int((first & second).sum()) / union if union else 1.0  # nothing united: agreement


def _highest_pixel(heatmap: Heatmap) -> tuple[int, int]:
    """Return the highest pixel; of tied pixels the one nearest to their centroid."""
    highest = np.argwhere(heatmap == np.nanmax(heatmap))
    row, col = highest[((highest - np.rint(highest.mean(axis=0))) ** 2).sum(axis=1).argmin()]
    return int(row), int(col)


# --- One class against another --------------------------------------------------------------------------------------


def score_cell(grid: NDArray[np.floating], cell: int) -> tuple[float, float, float]:
    """Score the map [rows, cols] of a grid of four images for the class in a cell (0 to 3).

    Patches that overlap two cells are ignored.

    Returns:
        The share of the map's positive mass in the cell, ¼ for a map without positive values; the ROC-AUC of the map as
        a detector of the cell's patches; 1 if the cell has the largest mean, else 0, and 1/n for n tied cells.

    Raises:
        ShapeError: the map has fewer than 2 × 2 patches.

    Source: Böhle, Fritz & Schiele, "Convolutional Dynamic Alignment Networks for Interpretable Classifications", CVPR
    2021, §4 (the energy).

    >>> score_cell(np.array([[3.0, 1.0], [-1.0, 0.0]]), 0)
    (0.75, 1.0, 1.0)
    """
    if grid.ndim != 2 or min(grid.shape) < 2:
        raise ShapeError(f"Expected a map of at least 2 × 2 patches, got {grid.shape}.")
    values = grid.astype(np.float64)
    if is_constant(values):
        values[:] = values.flat[0]  # without rounding
    # Rows and columns of each half, without the middle one of an odd number.
    rows, cols = ([range(count // 2), range(-(-count // 2), count)] for count in values.shape)
    cells = np.stack([values[np.ix_(rows[index // 2], cols[index % 2])] for index in range(CELLS)])
    mass = np.clip(cells, 0.0, None).sum(axis=(1, 2))
    whole = float(mass.sum())
    inside = np.zeros(cells.shape, dtype=np.bool_)
    inside[cell] = True
    scores = localise(cells.reshape(CELLS, -1), inside.reshape(CELLS, -1))
    assert scores is not None
    return float(mass[cell]) / whole if whole > 0 else 1 / CELLS, scores.roc_auc, _wins(cells.mean(axis=(1, 2)), cell)


def score_object(heatmap: Heatmap, objects: Sequence[Mask], target: int) -> tuple[float, float] | None:
    """Score the map of an image for one of its labelled objects, against all of them.

    Args:
        heatmap: the map for the target object's class, [height, width], NaN outside the model input. Its mass is its
            excess over its minimum, or over 0 if the minimum is negative.
        objects: pixels of each class's objects, bool [height, width].
        target: index of the target object.

    Returns:
        The share of the mass in labelled objects that is in the target object; 1 if the target object has the largest
        mean, else 0, and 1/n for n tied objects. None if one of the objects is outside the model input.

    >>> masks = [np.array([[True, True, False, False]]), np.array([[False, False, False, True]])]
    >>> score_object(np.array([[3.0, 1.0, 0.0, 2.0]]), masks, 0)
    (0.6666666666666666, 0.5)
    """
    seen = np.isfinite(heatmap)
    areas = np.array([(seen & mask).sum() for mask in objects])
    if not areas.all():
        return None
    values = heatmap.astype(np.float64)
    mass = np.clip(values - max(float(values[seen].min()), 0.0), 0.0, None)
    sums = np.array([mass[seen & mask].sum() for mask in objects])
    shares = sums / sums.sum() if sums.any() else areas / areas.sum()
    return float(shares[target]), _wins(sums / areas, target)


def _wins(means: NDArray[np.float64], target: int) -> float:
    largest = means == means.max()
    return float(largest[target]) / float(largest.sum())
