"""What is asked of each picture: which class, and which pixels would be the right answer."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError
from vitflow.evaluation.data.datasets import Labelled
from vitflow.evaluation.data.regions import Label, Region, union
from vitflow.explaining.targets import class_index

_WORDNET = re.compile(r"n\d{8}")
_IMAGENET_CLASSES = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One picture's question.

    Attributes:
        target: class index that the maps are asked for; None for the class that the model predicts.
        region: the right answer, bool [height, width]; None where the data does not say.
        unknown: pixels of which the data says that nobody knows, bool [height, width]; they are left out.
    """

    target: int | None
    region: NDArray[np.bool_] | None = None
    unknown: NDArray[np.bool_] | None = None


def ask(picture: Labelled, num_classes: int, class_names: Sequence[str] | None) -> Question:
    """Choose the class that is asked for, and the region that belongs to it.

    1. Where the picture as a whole has a class that the model has, this one is asked for.
    2. Otherwise, of the classes of its objects that the model has, the one that covers the most pixels.
    3. Where the model has none of them, the class that it predicts.

    The region is the union of all objects of the asked class, and in case 3 the union of all objects; where the picture
    as a whole has a class and its objects have none, the union of all, too. A picture asks one question, so that
    pictures stay independent of each other in the statistics.

    Args:
        picture: as the data has it.
        num_classes: of the model; 0 where it has none.
        class_names: their names, where known. WordNet ids such as n01440764 are known to models of ImageNet-1k.
    """
    size = picture.image.shape[:2]
    target = _index(picture.label, num_classes, class_names)
    if picture.regions is None:
        return Question(target)
    unknown = [region for region in picture.regions if region.unknown]
    known = [region for region in picture.regions if not region.unknown]
    indices = [_index(region.label, num_classes, class_names) for region in known]
    if target is None:
        target = _largest(known, indices, (size[0], size[1]))
    own = [region for region, index in zip(known, indices, strict=True) if index is not None and index == target]
    mask = union(own or known, (size[0], size[1]))
    blurred = union(unknown, (size[0], size[1])) & ~mask if unknown else None
    return Question(target, mask, blurred)


def _largest(regions: Sequence[Region], indices: Sequence[int | None], size: tuple[int, int]) -> int | None:
    """The class that covers the most pixels; of equal ones the first."""
    by_class: dict[int, list[Region]] = {}
    for region, index in zip(regions, indices, strict=True):
        if index is not None:
            by_class.setdefault(index, []).append(region)
    if len(by_class) < 2:
        return next(iter(by_class), None)
    return max(by_class, key=lambda index: int(union(by_class[index], size).sum()))


def _index(label: Label, num_classes: int, class_names: Sequence[str] | None) -> int | None:
    """The model's class of that label; None where it has no such class, or several."""
    if label is None or not num_classes:
        return None
    if isinstance(label, str) and _WORDNET.fullmatch(label) and num_classes == _IMAGENET_CLASSES:
        return _imagenet_synsets().get(label)
    try:
        return class_index(label, num_classes, class_names)
    except OptionError:
        return None


@cache
def _imagenet_synsets() -> dict[str, int]:
    from timm.data import ImageNetInfo

    return {name: index for index, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
