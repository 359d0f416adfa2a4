"""Localisation: five measures of a map over pixels against a region.

All of them look at the pixels of the original image that the model saw: a heatmap is NaN elsewhere (and may be made
NaN where nobody knows whether a pixel belongs to the region), and such pixels are left out. Where the region covers all
of the remaining pixels, or none of them, nothing can be told apart, and every measure is None.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError

Heatmap = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Localisation:
    """The five measures of one map, and what its mean IoU is made of.

    Attributes:
        pointing_game, energy, roc_auc, average_precision, mean_iou: as the functions of these names give them.
        overlap: pixels in the (ground ∩, region ∩, ground ∪, region ∪) of the thresholded map and the truth.
    """

    pointing_game: float
    energy: float
    roc_auc: float
    average_precision: float
    mean_iou: float
    overlap: tuple[int, int, int, int]


def localise(heatmap: Heatmap, region: Mask) -> Localisation | None:
    """Measure one map against one region in all five ways; the pixels are sorted once.

    Args:
        heatmap: the map over the image, [height, width], NaN where the model saw nothing.
        region: the pixels that belong to the object, bool [height, width].

    Raises:
        ShapeError: the shapes differ, or the region is not bool.

    >>> found = localise(np.array([[0.9, 0.8, 0.1, np.nan]]), np.array([[True, False, False, True]]))
    >>> found.roc_auc, found.pointing_game, found.average_precision
    (1.0, 1.0, 1.0)
    """
    sorted_out = _seen(heatmap, region)
    if sorted_out is None:
        return None
    values, inside = sorted_out
    hits, misses = _by_threshold(values, inside)
    overlap = _overlap(values, inside)
    return Localisation(
        pointing_game=_pointing(heatmap, region),
        energy=_energy(values, inside),
        roc_auc=_area_under_roc(hits, misses),
        average_precision=_average_precision(hits, misses),
        mean_iou=accumulated_iou([overlap]),
        overlap=overlap,
    )


def pointing_game(heatmap: Heatmap, region: Mask) -> float | None:
    """1.0 where the map's highest pixel lies in the region, else 0.0.

    Of several highest pixels the one nearest to the middle of them all counts, so that a plateau is asked for its
    middle and not for its corner; of equally near ones the first in reading order.

    Source: Zhang et al., "Top-Down Neural Attention by Excitation Backprop", ECCV 2016, §4.1, here without their
    tolerance of 15 pixels.

    >>> pointing_game(np.array([[0.1, 0.7, 0.2]]), np.array([[True, False, False]]))
    0.0
    """
    return None if _seen(heatmap, region) is None else _pointing(heatmap, region)


def energy_in_region(heatmap: Heatmap, region: Mask) -> float | None:
    """Share of the map's mass above its minimum inside the region; for a constant map the region's share of area.

    Source: the energy-based pointing game of Wang et al., "Score-CAM", CVPR workshops 2020, §4.3, here with the
    smallest value taken off, which they reach by scaling.

    >>> energy_in_region(np.array([[3.0, 1.0, 2.0]]), np.array([[True, False, False]]))
    0.6666666666666666
    """
    pixels = _seen(heatmap, region)
    return None if pixels is None else _energy(*pixels)


def roc_auc(heatmap: Heatmap, region: Mask) -> float | None:
    """Area under the ROC curve of the map as a detector of the region's pixels.

    It is the chance that a pixel of the region is higher than one of the ground, where ties count half: 0.5 for a
    constant map.

    Source: Hanley & McNeil, "The Meaning and Use of the Area under a ROC Curve", Radiology, 1982.

    >>> roc_auc(np.array([[0.9, 0.5, 0.5, 0.1]]), np.array([[True, True, False, False]]))
    0.875
    """
    pixels = _seen(heatmap, region)
    return None if pixels is None else _area_under_roc(*_by_threshold(*pixels))


def average_precision(heatmap: Heatmap, region: Mask) -> float | None:
    """Σ (R_k − R_{k−1}) P_k over the distinct values of the map as thresholds, highest first, without interpolation.

    A constant map has the region's share of the area, which is what chance gives; so small regions have low values.

    Source: as scikit-learn's `average_precision_score` defines it.

    >>> round(average_precision(np.array([[0.9, 0.5, 0.4, 0.1]]), np.array([[True, False, True, False]])), 4)
    0.8333
    """
    pixels = _seen(heatmap, region)
    return None if pixels is None else _average_precision(*_by_threshold(*pixels))


def mean_iou(heatmap: Heatmap, region: Mask) -> float | None:
    """Mean intersection over union of region and background, with the map thresholded at its mean.

    The steps are those of the segmentation test of Chefer et al.:

    1. Spread the map over the image, bilinearly.
    2. Scale it to 0 … 1 by its smallest and largest value (which changes nothing in what follows).
    3. The threshold is the mean of the map over the pixels.
    4. A pixel above the threshold is called region, one at or below it ground.
    5. Intersection and union with the truth are counted in pixels, for the region and for the ground.
    6. IoU = intersection / union for each of the two; the result is the mean of both.

    Here the pixels are those of the original image that the model saw, not those of the model's input, and the
    result is one image's own, so that methods can be compared image by image. Chefer et al. add intersections and
    unions up over all images before they divide: that number is `accumulated_iou` of all overlaps.

    Source: Chefer, Gur & Wolf, "Transformer Interpretability Beyond Attention Visualization", CVPR 2021, §4.2.

    >>> mean_iou(np.array([[0.9, 0.8, 0.2, 0.1]]), np.array([[True, False, False, False]]))
    0.5833333333333333
    """
    pixels = _seen(heatmap, region)
    return None if pixels is None else accumulated_iou([_overlap(*pixels)])


def accumulated_iou(overlaps: Sequence[Sequence[float]] | NDArray[np.floating[Any]]) -> float:
    """Mean IoU of region and background over all images, from each image's `Localisation.overlap`.

    >>> accumulated_iou([(2, 1, 3, 2), (4, 0, 4, 1)])
    0.5952380952380952
    """
    ground, region, ground_union, region_union = np.asarray(overlaps, dtype=np.float64).sum(axis=0)
    # Where neither the map nor the truth has a pixel of a kind, they agree about it.
    shares = [
        np.divide(part, whole) if whole else 1.0 for part, whole in ((ground, ground_union), (region, region_union))
    ]
    return float(np.mean(shares))


def _seen(heatmap: Heatmap, region: Mask) -> tuple[NDArray[np.floating[Any]], Mask] | None:
    """Value and membership of each pixel that counts; None where region or ground has none."""
    if heatmap.ndim != 2 or heatmap.shape != region.shape or region.dtype != np.bool_:
        raise ShapeError(
            f"Expected a heatmap [height, width] and a bool region of the same shape, got {heatmap.shape} and "
            f"{region.dtype} {region.shape}."
        )
    seen = np.isfinite(heatmap)
    inside = region[seen]
    return None if inside.all() or not inside.any() else (heatmap[seen], inside)


def _pointing(heatmap: Heatmap, region: Mask) -> float:
    values = np.where(np.isfinite(heatmap), heatmap, -np.inf)
    highest = np.argwhere(values == values.max())
    distance = ((highest - np.rint(highest.mean(axis=0))) ** 2).sum(axis=1)
    row, col = highest[distance.argmin()]
    return float(region[row, col])


def _energy(values: NDArray[np.floating[Any]], inside: Mask) -> float:
    mass = values.astype(np.float64) - float(values.min())
    whole = float(mass.sum())
    return float(mass[inside].sum()) / whole if whole > 0 else float(inside.mean())


def _by_threshold(values: NDArray[np.floating[Any]], inside: Mask) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Pixels of the region and of the ground at or above each distinct value, highest value first, after a 0."""
    order = np.argsort(values)[::-1]
    ordered = values[order]
    last = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(ordered) - 1)
    hits = np.cumsum(inside[order], dtype=np.float64)[last]
    return np.append(0.0, hits), np.append(0.0, last + 1 - hits)


def _area_under_roc(hits: NDArray[np.float64], misses: NDArray[np.float64]) -> float:
    area = np.diff(misses) @ (hits[1:] + hits[:-1]) / 2.0
    return float(area / (hits[-1] * misses[-1]))


def _average_precision(hits: NDArray[np.float64], misses: NDArray[np.float64]) -> float:
    precision = hits[1:] / (hits[1:] + misses[1:])
    return float(np.diff(hits) @ precision / hits[-1])


def _overlap(values: NDArray[np.floating[Any]], inside: Mask) -> tuple[int, int, int, int]:
    # In float64 and from the minimum on, so that the mean of a constant map is that constant.
    mass = values.astype(np.float64) - float(values.min())
    called = mass > mass.mean()
    return (
        int((~called & ~inside).sum()),
        int((called & inside).sum()),
        int((~called | ~inside).sum()),
        int((called | inside).sum()),
    )
