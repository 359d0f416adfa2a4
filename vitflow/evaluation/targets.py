"""Choose the target class and the true region of each image, and the images of grids.

Grid pointing game: four images of different classes in one model input, with the class of each as target.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from vitflow.analysis.comparison import Comparison
from vitflow.analysis.strips import columns_of
from vitflow.errors import OptionError, VitflowError
from vitflow.evaluation.measures.localisation import CELLS, score_cell
from vitflow.evaluation.samples import Label, Labelled, Mask, Region, Sample
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import ImageInput
from vitflow.explaining.saliency import Saliency
from vitflow.methods.cells import cell_edges
from vitflow.models.classes import class_index, imagenet_classes
from vitflow.registry.choices import ChosenMethod

_WORDNET_ID = re.compile(r"n\d{8}")
_IMAGENET_CLASSES = 1000

# Minimum probability of the labelled class of an image in a grid, exclusive, and number of images that are tried.
_MIN_PROBABILITY, _MOST_TRIED = 0.5, 200


@dataclass(frozen=True, slots=True, eq=False)
class TargetRegion:
    """Target class and true region of an image.

    Attributes:
        target: class index that the maps explain; None for the class that the model predicts.
        region: pixels of the target's objects, bool [height, width]; None if the data has no regions.
        unknown: pixels to ignore, bool [height, width].
        objects: pixels of each class that the model knows, by class index.
    """

    target: int | None
    region: Mask | None = None
    unknown: Mask | None = None
    objects: Mapping[int, Mask] = field(default_factory=dict)


def choose_target(image: Labelled, num_classes: int, class_names: Sequence[str] | None) -> TargetRegion:
    """Choose the target class and its region.

    The target is the image's label if the model has this class, else the class of its objects that covers the most
    pixels, else the predicted class. The region is the union of the target's objects, or of all objects if none has
    this class. Each image has one target, so that images are independent in the statistics.
    """
    target = _index(image.label, num_classes, class_names)
    if image.regions is None:
        return TargetRegion(target)
    unknown = [region for region in image.regions if region.unknown]
    known = [region for region in image.regions if not region.unknown]
    by_class: dict[int | None, list[Region]] = {}
    for region in known:
        by_class.setdefault(_index(region.label, num_classes, class_names), []).append(region)
    objects = {index: image.union(regions) for index, regions in by_class.items() if index is not None}
    if target is None:  # the first of tied classes
        target = max(objects, key=lambda index: int(objects[index].sum()), default=None)
    region_mask = objects[target] if target in objects else image.union(known)
    return TargetRegion(target, region_mask, image.union(unknown) & ~region_mask if unknown else None, objects)


def _index(label: Label, num_classes: int, class_names: Sequence[str] | None) -> int | None:
    """Return the class index of a label; None if the model has no such class, or several."""
    if label is None or not num_classes:
        return None
    if num_classes == _IMAGENET_CLASSES and _WORDNET_ID.fullmatch(str(label)):
        return _imagenet_synsets().get(str(label))
    try:
        return class_index(label, num_classes, class_names)
    except OptionError:
        return None


@cache
def _imagenet_synsets() -> dict[str, int]:
    return {names[0]: index for index, names in enumerate(imagenet_classes(_IMAGENET_CLASSES) or ())}


# --- Grids -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ImageGrid:
    """Four images of different classes that the model classifies correctly, in raster order, with their classes."""

    samples: tuple[Sample, ...]
    classes: tuple[int, ...]
    _scores: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)  # by method, computed once for all images

    @property
    def names(self) -> list[str]:
        """Names of the images."""
        return [sample.name for sample in self.samples]

    def pixels(self, explainer: Explainer) -> Tensor:
        """Return the images as one model input, each shrunk to its cell, [channels, height, width]."""
        rows, cols = (np.diff(cell_edges(length, 2)).tolist() for length in explainer.spec.size)
        cells = [
            adaptive_avg_pool2d(explainer.pixels(sample.read().image)[0].float(), (rows[place // 2], cols[place % 2]))
            for place, sample in enumerate(self.samples)
        ]
        return torch.cat([torch.cat(cells[:2], dim=2), torch.cat(cells[2:], dim=2)], dim=1)

    def scores(self, explainer: Explainer, methods: Sequence[ChosenMethod], name: str) -> dict[str, tuple[float, ...]]:
        """Return the score of each method's map for the class of this image, by label."""
        if not self._scores:
            for label, maps in maps_by_class(explainer, self.pixels(explainer), methods, self.classes).items():
                self._scores[label] = [score_cell(saliency.grid, cell) for cell, saliency in enumerate(maps)]
        cell = self.names.index(name)
        return {label: scores[cell] for label, scores in self._scores.items()}


def maps_by_class(
    explainer: Explainer, image: ImageInput, methods: Sequence[ChosenMethod], classes: Sequence[int]
) -> dict[str, list[Saliency]]:
    """Return the maps of each method, by label, for each class; a method that is not class-specific has one map."""
    flat = explainer.explain_batch([image], methods=methods, targets=list(classes))
    columns = zip(methods, columns_of(flat), strict=True)
    return {method.label: maps * (len(classes) // len(maps)) for method, maps in columns}


def make_grids(samples: Sequence[Sample], explainer: Explainer, seed: int) -> dict[str, ImageGrid]:
    """Return the grid of each image, by name, without the images that are in no grid.

    Candidates are images whose labelled class is predicted with a probability above ½, among 200 drawn with the seed.
    Each grid takes the next four images of which none shows another's class.
    """
    candidates: list[tuple[Sample, int, frozenset[int]]] = []
    for sample in sorted(samples, key=lambda sample: random_order(sample.name, seed))[:_MOST_TRIED]:
        try:
            image = sample.read()
            truth = choose_target(image, explainer.num_classes, explainer.class_names)
        except (VitflowError, OSError):
            continue  # reported in the row of the image
        if truth.target is None:
            continue
        with torch.no_grad():
            scores = explainer.outputs.scores(explainer.logits(explainer.pixels(image.image)))[0]
        if int(scores.argmax()) == truth.target and float(scores[truth.target]) > _MIN_PROBABILITY:
            candidates.append((sample, truth.target, frozenset(truth.objects) | {truth.target}))
    grids: dict[str, ImageGrid] = {}
    while members := _first_grid(candidates):
        candidates = [candidate for candidate in candidates if candidate not in members]
        grid = ImageGrid(tuple(sample for sample, _, _ in members), tuple(target for _, target, _ in members))
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


def random_order(name: str, seed: int) -> bytes:
    """Return the sort key of a random order of images, stable when images are added to the data."""
    return hashlib.sha256(f"{seed} {name}".encode("utf-8", "surrogateescape")).digest()


def explain_samples(
    samples: Sequence[Sample], explainer: Explainer, methods: Sequence[ChosenMethod]
) -> Comparison | None:
    """Return the maps of images for their targets, in the order of the methods; None if no image is readable."""
    rows = []
    for sample in samples:
        with suppress(VitflowError, OSError):  # no longer readable
            image = sample.read()
            target = choose_target(image, explainer.num_classes, explainer.class_names).target
            maps = explainer.explain_batch([image.image], methods=methods, targets=target, names=[sample.name])
            rows.append(tuple(maps))
    return Comparison(tuple(rows)) if rows else None
