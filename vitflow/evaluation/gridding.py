"""The grid pointing game: which images stand together in a grid, and whether a map tells their classes apart."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import cv2
import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import ShapeError, VitflowError
from vitflow.evaluation.annotations import Labelled
from vitflow.evaluation.choices import Question
from vitflow.evaluation.datasets import Sample
from vitflow.evaluation.measures.localisation import Heatmap, Mask, roc_auc
from vitflow.evaluation.measures.sanity import as_it_is
from vitflow.explaining.choices import ChosenMethod
from vitflow.explaining.comparison import Comparison
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.strips import columns_of
from vitflow.methods.cells import cell_edges
from vitflow.methods.ranks import is_constant

#: Cells of a grid: two by two, numbered in raster order.
CELLS = 4


class CellScore(NamedTuple):
    """Scores of a map for the target cell of a grid.

    Attributes:
        energy: share of the map, without what is below 0, that lies in the cell; of a map that has nothing above 0, ¼.
        auc: ROC-AUC of the map as a detector of the cell's patches.
        wins: 1 where the cell's mean is the largest, else 0; of equal ones, each its part.
    """

    energy: float
    auc: float
    wins: float


class ObjectScore(NamedTuple):
    """Scores of a map for the target object among all labelled objects of an image.

    Attributes:
        energy: of its mass in labelled objects, the share in the asked one.
        wins: 1 where the asked object's mean is the largest, else 0; of equal ones, each its part.
    """

    energy: float
    wins: float


def tile(windows: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Four images of one size as a grid of two by two of that size, each shrunk to its cell: uint8 RGB.

    >>> tile([np.full((4, 6, 3), 60 * number, np.uint8) for number in range(4)])[[0, 0, 3, 3], [0, 5, 0, 5], 0].tolist()
    [0, 60, 120, 180]
    """
    height, width = windows[0].shape[:2]
    tiled = np.empty_like(windows[0])
    rows, cols = cell_edges(height, 2), cell_edges(width, 2)
    for number, window in enumerate(windows):
        row, col = divmod(number, 2)
        size = cols[col + 1] - cols[col], rows[row + 1] - rows[row]
        shrunk = cv2.resize(window, size, interpolation=cv2.INTER_AREA)
        tiled[rows[row] : rows[row + 1], cols[col] : cols[col + 1]] = shrunk
    return tiled


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
    mass = np.array([np.clip(cell_values, 0.0, None).sum() for cell_values in cells])
    whole = float(mass.sum())
    auc = roc_auc(values, owner == cell)
    assert auc is not None
    return CellScore(
        float(mass[cell]) / whole if whole > 0 else 1 / CELLS,
        auc,
        _wins([cell_values.mean() for cell_values in cells], cell),
    )


def score_object(heatmap: Heatmap, objects: Sequence[Mask], target: int) -> ObjectScore | None:
    """Score the map of an image for one of its labelled objects, against all of them.

    Args:
        heatmap: the map for the asked object's class, [height, width], NaN where the model saw nothing. Its mass is
            what lies above its minimum, or above 0 where that lies below.
        objects: the pixels of each class's objects, bool [height, width].
        target: number of the one that is asked for.

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
    energy = sums[target] / whole if whole > 0 else areas[target] / sum(areas)
    return ObjectScore(energy, _wins([total / area for total, area in zip(sums, areas, strict=True)], target))


def _wins(means: Sequence[float], target: int) -> float:
    largest = np.array(means) == max(means)
    return float(largest[target]) / float(largest.sum())


# What the model must give the right class of an image in a grid.
_KNOWN = 0.5
# Grids, and methods of each, that are drawn.
_DRAWN = 3, 4


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Four images of different classes, each of which the model knows.

    Attributes:
        samples: the images, in raster order.
        classes: the class of each.
    """

    samples: tuple[Sample, ...]
    classes: tuple[int, ...]
    _scores: dict[str, list[CellScore]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of its images."""
        return [sample.name for sample in self.samples]

    def image(self, explainer: Explainer) -> NDArray[np.uint8]:
        """Tile the model inputs of its images into one image, uint8 RGB."""
        windows = []
        for sample in self.samples:
            image = sample.read().image
            placing = as_it_is(explainer, explainer.spec.size) if explainer.fit == "native" else explainer
            placement = placing.preprocessing.place((image.shape[0], image.shape[1]))
            windows.append(placing.preprocessing.cut(image, placement))
        return tile(windows)

    def maps(self, explainer: Explainer, methods: Sequence[ChosenMethod]) -> dict[str, list[Saliency]]:
        """For each method's label its map for each class of the grid."""
        image = self.image(explainer)
        saliencies = as_it_is(explainer, image.shape[:2]).explain_batch(
            [image],
            methods=methods,
            targets=list(self.classes),
            names=[" + ".join(self.names)],
        )
        columns = columns_of(saliencies)
        labels = [one.label for one in methods]
        return {
            label: list(maps) * (1 if len(maps) == CELLS else CELLS)
            for label, maps in zip(labels, columns, strict=True)
        }

    def scores(self, explainer: Explainer, methods: Sequence[ChosenMethod], name: str) -> dict[str, CellScore]:
        """Return the scores of each method's map for the class of this image, by label."""
        if not self._scores:
            for label, maps in self.maps(explainer, methods).items():
                self._scores[label] = [score_cell(one.grid, cell) for cell, one in enumerate(maps)]
        cell = self.names.index(name)
        return {label: scores[cell] for label, scores in self._scores.items()}


def make_grids(
    samples: Sequence[Sample], explainer: Explainer, question_of: Callable[[Labelled], Question], seed: int
) -> dict[str, Grid]:
    """Assign images to grids; images without a grid are left out.

    Those images come in question whose labelled class the model finds most probable, with more than ½. Their order is
    drawn by the seed; each grid takes the next four of which none shows another's class.
    """
    known: list[tuple[Sample, int, frozenset[int]]] = []
    for sample in sorted(samples, key=lambda one: lot(one.name, seed)):
        try:
            image = sample.read()
            question = question_of(image)
        except (VitflowError, OSError):
            continue  # its own row tells of it
        if question.target is not None and _knows(explainer, image, question.target):
            known.append((sample, question.target, frozenset(question.objects) | {question.target}))
    grids: dict[str, Grid] = {}
    while grid := _first_grid(known):
        known = [one for one in known if one not in grid]
        made = Grid(tuple(sample for sample, _, _ in grid), tuple(target for _, target, _ in grid))
        grids |= dict.fromkeys(made.names, made)
    return grids


def _first_grid(known: Sequence[tuple[Sample, int, frozenset[int]]]) -> list[tuple[Sample, int, frozenset[int]]]:
    """Return the first four compatible images, or an empty list."""
    for start in range(len(known)):
        chosen: list[tuple[Sample, int, frozenset[int]]] = []
        for one in known[start:]:
            if all(one[1] not in classes and target not in one[2] for _, target, classes in chosen):
                chosen.append(one)
                if len(chosen) == CELLS:
                    return chosen
    return []


def _knows(explainer: Explainer, image: Labelled, target: int) -> bool:
    with torch.no_grad():
        probabilities = explainer.outputs.scores(explainer.logits(explainer.pixels(image.image)))[0]
    return int(probabilities.argmax()) == target and float(probabilities[target]) > _KNOWN


def lot(name: str, seed: int) -> bytes:
    """Return a hash that orders images at random; stable when images are added."""
    return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()


def draw_grids(
    grids: Mapping[str, Grid], explainer: Explainer, methods: Sequence[ChosenMethod], best: Sequence[str]
) -> tuple[Figure, ...]:
    """Draw the first grids with their maps: one row per class, one column per best class-specific method.

    Args:
        grids: as `make_grids` makes them.
        explainer: of the model.
        methods: those that were measured.
        best: their labels, the best first.
    """
    specific = [one for label in best for one in methods if one.label == label and one.method.class_specific]
    drawn = []
    for grid in list(dict.fromkeys(grids.values()))[: _DRAWN[0]] if specific else ():
        try:
            by_method = grid.maps(explainer, specific[: _DRAWN[1]])
        except (VitflowError, OSError):
            continue  # an image has disappeared since
        drawn.append(Comparison((tuple(one for maps in by_method.values() for one in maps),)).figure())
    return tuple(drawn)
