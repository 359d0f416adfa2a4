"""Which pictures stand together in grids, and what the methods' maps of each grid are worth."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from vitflow.errors import VitflowError
from vitflow.evaluation.annotations import Labelled
from vitflow.evaluation.choices import Question
from vitflow.evaluation.datasets import Sample
from vitflow.evaluation.measures.grid import CELLS, CellScore, score_cell, tile
from vitflow.evaluation.measures.sanity import as_it_is
from vitflow.explaining.choices import ChosenMethod
from vitflow.explaining.comparison import Comparison
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.strips import columns_of

# What the model must give the right class of a picture in a grid.
_KNOWN = 0.5
# Grids, and methods of each, that are drawn.
_DRAWN = 3, 4


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """Four pictures of different classes, each of which the model knows.

    Attributes:
        samples: the pictures, in raster order.
        classes: the class of each.
    """

    samples: tuple[Sample, ...]
    classes: tuple[int, ...]
    _scores: dict[str, list[CellScore]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The names of its pictures."""
        return [sample.name for sample in self.samples]

    def image(self, explainer: Explainer) -> NDArray[np.uint8]:
        """The pictures as the model sees each, side by side as one model input, uint8 RGB."""
        windows = []
        for sample in self.samples:
            picture = sample.read().image
            own = as_it_is(explainer, explainer.spec.size) if explainer.fit == "native" else explainer
            placement = own.preprocessing.place((picture.shape[0], picture.shape[1]))
            windows.append(own.preprocessing.cut(picture, placement))
        return tile(windows)

    def maps(self, explainer: Explainer, methods: Sequence[ChosenMethod]) -> dict[str, list[Saliency]]:
        """For each method's label its map for each class of the grid."""
        image = self.image(explainer)
        found = as_it_is(explainer, image.shape[:2]).explain_batch(
            [image],
            methods=methods,
            targets=list(self.classes),
            names=[" + ".join(self.names)],
        )
        columns = columns_of(found)
        labels = [one.label for one in methods]
        return {
            label: list(maps) * (1 if len(maps) == CELLS else CELLS)
            for label, maps in zip(labels, columns, strict=True)
        }

    def scores(self, explainer: Explainer, methods: Sequence[ChosenMethod], name: str) -> dict[str, CellScore]:
        """What each method's map is worth that was asked for the class of this picture, by label."""
        if not self._scores:
            for label, maps in self.maps(explainer, methods).items():
                self._scores[label] = [score_cell(one.grid, cell) for cell, one in enumerate(maps)]
        cell = self.names.index(name)
        return {label: scores[cell] for label, scores in self._scores.items()}


def make_grids(
    samples: Sequence[Sample], explainer: Explainer, question_of: Callable[[Labelled], Question], seed: int
) -> dict[str, Grid]:
    """The grid that each picture stands in, by its name; pictures that stand in none are left out.

    Those pictures come in question whose labelled class the model finds most probable, with more than ½. Their order is
    drawn by the seed; each grid takes the next four of which none shows another's class.
    """
    known: list[tuple[Sample, int, frozenset[int]]] = []
    for sample in sorted(samples, key=lambda one: lot(one.name, seed)):
        try:
            picture = sample.read()
            question = question_of(picture)
        except (VitflowError, OSError):
            continue  # its own row tells of it
        if question.target is not None and _knows(explainer, picture, question.target):
            known.append((sample, question.target, frozenset(question.objects) | {question.target}))
    found: dict[str, Grid] = {}
    while grid := _first_grid(known):
        known = [one for one in known if one not in grid]
        made = Grid(tuple(sample for sample, _, _ in grid), tuple(target for _, target, _ in grid))
        found |= dict.fromkeys(made.names, made)
    return found


def _first_grid(known: Sequence[tuple[Sample, int, frozenset[int]]]) -> list[tuple[Sample, int, frozenset[int]]]:
    """The first four that go together, beginning with the first that has three; empty where there are none."""
    for start in range(len(known)):
        chosen: list[tuple[Sample, int, frozenset[int]]] = []
        for one in known[start:]:
            if all(one[1] not in classes and target not in one[2] for _, target, classes in chosen):
                chosen.append(one)
                if len(chosen) == CELLS:
                    return chosen
    return []


def _knows(explainer: Explainer, picture: Labelled, target: int) -> bool:
    with torch.no_grad():
        probabilities = explainer.answers.told(explainer.logits(explainer.pixels(picture.image)))[0]
    return int(probabilities.argmax()) == target and float(probabilities[target]) > _KNOWN


def lot(name: str, seed: int) -> bytes:
    """A picture's lot: those with the smallest are drawn, and more pictures in the data change little of it."""
    return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()


def draw_grids(
    grids: Mapping[str, Grid], explainer: Explainer, methods: Sequence[ChosenMethod], best: Sequence[str]
) -> tuple[Figure, ...]:
    """The first grids with their maps: a row for each class, a column for each of the best class-specific methods.

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
            found = grid.maps(explainer, specific[: _DRAWN[1]])
        except (VitflowError, OSError):
            continue  # a picture that was there before
        drawn.append(Comparison((tuple(one for maps in found.values() for one in maps),)).strip())
    return tuple(drawn)
