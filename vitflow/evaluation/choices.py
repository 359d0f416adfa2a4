"""What an evaluation asks: which methods and metrics, and of each picture which class and which pixels are right."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, VitflowError, VitflowWarning
from vitflow.evaluation.data.datasets import Dataset, Labelled, Sample
from vitflow.evaluation.data.regions import WORDNET_ID, Label, Region, union
from vitflow.evaluation.measures.perturbation import REPLACEMENTS
from vitflow.explaining.choices import ChosenMethod, MethodChoice, check_methods, choose_methods, left_out
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import BASELINES, list_methods
from vitflow.explaining.targets import class_index

_IMAGENET_CLASSES = 1000


def check_options(points: int, sanity_pictures: int, batch_size: int | None, replace_by: str | None) -> None:
    """What can be known to be wrong before anything is loaded."""
    for name, value, least in (
        ("points", points, 2),
        ("sanity_pictures", sanity_pictures, 0),
        ("batch_size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise OptionError(f"Expected {name} of at least {least}, got {value}.")
    if replace_by is not None and replace_by not in REPLACEMENTS:
        raise OptionError(f"Expected replace_by of {', '.join(REPLACEMENTS)}, got {replace_by!r}.")


def choose_all(methods: str | Sequence[MethodChoice] | None) -> list[MethodChoice]:
    """The methods that were asked for, and the baselines behind them."""
    if methods is None:
        found: list[MethodChoice] = [one.name for one in list_methods() if not one.needs & {"predict", "tokens"}]
    elif methods == "all":
        found = [method.name for method in list_methods()]
    else:
        found = [methods] if isinstance(methods, str) else list(methods)
    names = [one.name for one in choose_methods(found, {})] if found else []
    ahead = [choice for choice, name in zip(found, names, strict=True) if name not in BASELINES]
    last = [choice for choice, name in zip(found, names, strict=True) if name in BASELINES]
    return [*ahead, *last, *(name for name in BASELINES if name not in names)]


def label_methods(choices: Sequence[MethodChoice], options: Mapping[str, Any]) -> list[ChosenMethod]:
    """The methods that are measured; a label tells the options that were given with the name."""
    found: list[ChosenMethod] = []
    for choice, one in zip(choices, check_methods(choices, options), strict=True):
        own = {} if isinstance(choice, str | ChosenMethod) else choice[1]
        label = one.name + (":" + ",".join(f"{key}={value}" for key, value in own.items()) if own else "")
        if any(label == other.label for other in found):
            raise OptionError(f"Expected different methods or options, got {label} twice.")
        found.append(replace(one, label=label))
    return found


def possible_groups(groups: Sequence[str], dataset: Dataset, explainer: Explainer) -> tuple[list[str], list[str]]:
    """The groups that this data and model allow, and what to tell of the others; an error if nothing is left."""
    missing: dict[str, str] = {}
    if not dataset.has_regions:
        missing["localisation"] = "the data says nothing of where objects are (masks, boxes)"
    if not explainer.num_classes:
        missing |= dict.fromkeys(("faithfulness", "correlation", "grid"), "the model has no classes")
    left = [group for group in groups if group not in missing]
    told = [f"Left out: {group}, for {missing[group]}." for group in groups if group in missing]
    if not left:
        raise OptionError(f"None of the metrics can be measured. {' '.join(told)}")
    return left, told


def applicable_methods(
    explainer: Explainer, dataset: Dataset, chosen: list[ChosenMethod]
) -> tuple[list[ChosenMethod], list[str]]:
    """Of all methods those that apply to the model, tried on one picture; and what to tell of the others."""
    picture = next((image for sample in dataset.samples[:20] if (image := _image(sample)) is not None), None)
    if picture is None:
        return chosen, []  # the run will tell what is wrong with the pictures
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VitflowWarning)
        refused = explainer.refusals(chosen, picture)
    return [one for one in chosen if one.name not in refused], left_out(refused)


def _image(sample: Sample) -> Any:
    try:
        return sample.read().image
    except (VitflowError, OSError):
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One picture's question.

    Attributes:
        target: class index that the maps are asked for; None for the class that the model predicts.
        region: the right answer, bool [height, width]; None where the data does not say.
        unknown: pixels of which the data says that nobody knows, bool [height, width]; they are left out.
        objects: where the data says where objects are, the pixels of each class that the model has, by class.
    """

    target: int | None
    region: NDArray[np.bool_] | None = None
    unknown: NDArray[np.bool_] | None = None
    objects: Mapping[int, NDArray[np.bool_]] = field(default_factory=dict)


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
    objects = _by_class(known, indices, (size[0], size[1]))
    if target is None:
        # The class that covers the most pixels; of equal ones the first.
        target = max(objects, key=lambda index: int(objects[index].sum()), default=None)
    own = [region for region, index in zip(known, indices, strict=True) if index is not None and index == target]
    mask = union(own or known, (size[0], size[1]))
    blurred = union(unknown, (size[0], size[1])) & ~mask if unknown else None
    return Question(target, mask, blurred, objects)


def _by_class(
    regions: Sequence[Region], indices: Sequence[int | None], size: tuple[int, int]
) -> dict[int, NDArray[np.bool_]]:
    """The pixels of each class that the model has."""
    by_class: dict[int, list[Region]] = {}
    for region, index in zip(regions, indices, strict=True):
        if index is not None:
            by_class.setdefault(index, []).append(region)
    return {index: union(own, size) for index, own in by_class.items()}


def _index(label: Label, num_classes: int, class_names: Sequence[str] | None) -> int | None:
    """The model's class of that label; None where it has no such class, or several."""
    if label is None or not num_classes:
        return None
    if isinstance(label, str) and WORDNET_ID.fullmatch(label) and num_classes == _IMAGENET_CLASSES:
        return _imagenet_synsets().get(label)
    try:
        return class_index(label, num_classes, class_names)
    except OptionError:
        return None


@cache
def _imagenet_synsets() -> dict[str, int]:
    from timm.data import ImageNetInfo

    return {name: index for index, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}
