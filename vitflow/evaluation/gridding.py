"""Grid pointing game: choose images of a grid, and score how well maps separate their classes."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import cv2
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import ShapeError, VitflowError
from vitflow.evaluation.annotations import Labelled
from vitflow.evaluation.choices import choose_target
from vitflow.evaluation.datasets import Sample
from vitflow.evaluation.measures.localisation import Heatmap, Mask, roc_auc
from vitflow.evaluation.measures.sanity import as_it_is
from vitflow.explaining.choices import ChosenMethod
from vitflow.explaining.comparison import Comparison
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.strips import columns_of
from vitflow.methods.cells import cell_edges
from vitflow.methods.similarity import is_constant

#: Cells of a grid: two by two, numbered in raster order.
CELLS = 4


class CellScore(NamedTuple):
    """Scores of a grid's map for the target cell.

    Attributes:
        energy: share of the map's positive mass in the cell; ¼ for a map without positive values.
        auc: ROC-AUC of the map as a detector of the cell's patches.
        wins: 1 if the cell has the largest mean, else 0; 1/n for n tied cells.
    """

    energy: float
    auc: float
    wins: float


class ObjectScore(NamedTuple):
    """Scores of a map for the target among the labelled objects of an image.

    Attributes:
        energy: share of the mass in labelled objects that is in the target object.
        wins: 1 if the target object has the largest mean, else 0; 1/n for n tied objects.
    """

    energy: float
    wins: float


def tile(windows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return four images of equal size as a 2 × 2 grid of that size, each shrunk to its cell: uint8 RGB.

    >>> tile([np.full((4, 6, 3), 60 * i, np.uint8) for i in range(4)])[[0, 0, 3, 3], [0, 5, 0, 5], 0].tolist()
    [0, 60, 120, 180]
    """
    heights, widths = (np.diff(cell_edges(length, 2)).tolist() for length in windows[0].shape[:2])
    cells = [
        cv2.resize(window, (widths[index % 2], heights[index // 2]), interpolation=cv2.INTER_AREA)
        for index, window in enumerate(windows)
    ]
    return np.vstack([np.hstack(cells[:2]), np.hstack(cells[2:])]).astype(np.uint8, copy=False)


def score_cell(grid: NDArray[np.floating], cell: int) -> CellScore:
    """Score the map [rows, cols] of a grid for the class in a cell (0 to 3).

    Patches that overlap two cells are ignored.

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
    # Rows and columns of each half, without the middle one of an odd number.
    rows, cols = ([range(count // 2), range(-(-count // 2), count)] for count in values.shape)
    cells = np.stack([values[np.ix_(rows[index // 2], cols[index % 2])] for index in range(CELLS)])
    mass = np.clip(cells, 0.0, None).sum(axis=(1, 2))
    whole = float(mass.sum())
    inside = np.zeros(cells.shape, dtype=np.bool_)
    inside[cell] = True
    auc = roc_auc(cells.reshape(CELLS, -1), inside.reshape(CELLS, -1))
    assert auc is not None
    return CellScore(
        float(mass[cell]) / whole if whole > 0 else 1 / CELLS, auc, _wins(cells.mean(axis=(1, 2)).tolist(), cell)
    )


def score_object(heatmap: Heatmap, objects: Sequence[Mask], target: int) -> ObjectScore | None:
    """Score the map of an image for one of its labelled objects, against all of them.

    Args:
        heatmap: the map for the target object's class, [height, width], NaN outside the model input. Its mass is its
            excess over its minimum, or over 0 if the minimum is negative.
        objects: pixels of each class's objects, bool [height, width].
        target: index of the target object.

    Returns:
        None if one of the objects is outside the model input.

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
    energy = sums[target] / whole if whole > 0 else areas[target] / sum(areas)
    return ObjectScore(energy, _wins([mass_sum / area for mass_sum, area in zip(sums, areas, strict=True)], target))


def _wins(means: Sequence[float], target: int) -> float:
    largest = np.array(means) == max(means)
    return float(largest[target]) / float(largest.sum())


# Minimum probability of the labelled class of an image in a grid, exclusive.
_MIN_PROBABILITY = 0.5
# Largest number of grids to draw, and of methods in each.
_MAX_DRAWN = 3, 4


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Four images of different classes that the model classifies correctly.

    Attributes:
        samples: the images, in raster order.
        classes: the class of each.
    """

    samples: tuple[Sample, ...]
    classes: tuple[int, ...]
    _scores: dict[str, list[CellScore]] = field(default_factory=dict)  # by method, computed once for all images

    @property
    def names(self) -> list[str]:
        """Names of the images."""
        return [sample.name for sample in self.samples]

    def image(self, explainer: Explainer) -> NDArray[np.uint8]:
        """Return the images after preprocessing, tiled as one model input, uint8 RGB."""
        windows = []
        for sample in self.samples:
            image = sample.read().image
            sized = as_it_is(explainer, explainer.spec.size) if explainer.fit == "native" else explainer
            placement = sized.preprocessing.place((image.shape[0], image.shape[1]))
            windows.append(sized.preprocessing.cut(image, placement))
        return tile(windows)

    def maps(self, explainer: Explainer, methods: Sequence[ChosenMethod]) -> dict[str, list[Saliency]]:
        """Return the maps of each method, by label, for each class of the grid."""
        image = self.image(explainer)
        names = [" + ".join(self.names)]
        flat = as_it_is(explainer, image.shape[:2]).explain_batch(
            [image], methods=methods, targets=list(self.classes), names=names
        )
        return {
            method.label: list(maps) * (CELLS // len(maps))  # one map for all classes, or one for each
            for method, maps in zip(methods, columns_of(flat), strict=True)
        }

    def scores(self, explainer: Explainer, methods: Sequence[ChosenMethod], name: str) -> dict[str, CellScore]:
        """Return the score of each method's map for the class of this image, by label."""
        if not self._scores:
            for label, maps in self.maps(explainer, methods).items():
                self._scores[label] = [score_cell(saliency.grid, cell) for cell, saliency in enumerate(maps)]
        cell = self.names.index(name)
        return {label: scores[cell] for label, scores in self._scores.items()}


def make_grids(samples: Sequence[Sample], explainer: Explainer, seed: int) -> dict[str, Grid]:
    """Return the grid of each image, by name, without the images that are in no grid.

    Candidates are images whose labelled class is predicted with a probability above ½, in an order drawn with the seed.
    Each grid takes the next four images of which none shows another's class.
    """
    candidates: list[tuple[Sample, int, frozenset[int]]] = []
    for sample in sorted(samples, key=lambda sample: random_order(sample.name, seed)):
        try:
            image = sample.read()
            truth = choose_target(image, explainer.num_classes, explainer.class_names)
        except (VitflowError, OSError):
            continue  # reported in the row of the image
        if truth.target is not None and _is_predicted(explainer, image, truth.target):
            candidates.append((sample, truth.target, frozenset(truth.objects) | {truth.target}))
    grids: dict[str, Grid] = {}
    while members := _first_grid(candidates):
        candidates = [candidate for candidate in candidates if candidate not in members]
        grid = Grid(tuple(sample for sample, _, _ in members), tuple(target for _, target, _ in members))
        grids |= dict.fromkeys(grid.names, grid)
    return grids


def _first_grid(candidates: Sequence[tuple[Sample, int, frozenset[int]]]) -> list[tuple[Sample, int, frozenset[int]]]:
    """Return the first four compatible candidates, or an empty list."""
    for start in range(len(candidates)):
        chosen: list[tuple[Sample, int, frozenset[int]]] = []
        for candidate in candidates[start:]:
            if all(candidate[1] not in classes and target not in candidate[2] for _, target, classes in chosen):
                chosen.append(candidate)
                if len(chosen) == CELLS:
                    return chosen
    return []


def _is_predicted(explainer: Explainer, image: Labelled, target: int) -> bool:
    with torch.no_grad():
        probabilities = explainer.outputs.scores(explainer.logits(explainer.pixels(image.image)))[0]
    return int(probabilities.argmax()) == target and float(probabilities[target]) > _MIN_PROBABILITY


def random_order(name: str, seed: int) -> bytes:
    """Return the sort key of a random order of images, stable when images are added to the data."""
    return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()


def draw_grids(
    grids: Mapping[str, Grid], explainer: Explainer, methods: Sequence[ChosenMethod], best: Sequence[str]
) -> tuple[Figure, ...]:
    """Draw the first grids with their maps: a row per class, a column for each of the best class-specific methods.

    Args:
        grids: grids from `make_grids`.
        explainer: explainer of the model.
        methods: the measured methods.
        best: labels of the methods, best first.
    """
    specific = [m for label in best for m in methods if m.label == label and m.method.class_specific]
    drawn = []
    for grid in list(dict.fromkeys(grids.values()))[: _MAX_DRAWN[0]] if specific else ():
        try:
            by_method = grid.maps(explainer, specific[: _MAX_DRAWN[1]])
        except (VitflowError, OSError):
            continue  # the image is no longer readable
        drawn.append(Comparison((tuple(saliency for maps in by_method.values() for saliency in maps),)).figure())
    return tuple(drawn)
