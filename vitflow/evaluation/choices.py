"""Questions of an evaluation: methods, metrics, and for each image the target and the correct region."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from vitflow.errors import OptionError, VitflowError, VitflowWarning
from vitflow.evaluation.annotations import Label, Labelled, Mask, Region, check_count, union
from vitflow.evaluation.datasets import Dataset, Sample
from vitflow.evaluation.measures.perturbation import REPLACEMENTS
from vitflow.explaining.choices import ChosenMethod, MethodChoice, check_methods, choose_methods, left_out
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import BASELINES, list_methods
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import class_index

_WORDNET_ID = re.compile(r"n\d{8}")
_IMAGENET_CLASSES = 1000


def check_options(points: int, sanity_images: int, batch_size: int | None, replace_by: str | None) -> None:
    """Check options before anything is loaded."""
    for name, value, least in (
        ("points", points, 2),
        ("sanity_images", sanity_images, 0),
        ("batch_size", batch_size, 1),
    ):
        if value is not None and value < least:
            raise OptionError(f"Expected {name} of at least {least}, got {value}.")
    if replace_by is not None and replace_by not in REPLACEMENTS:
        raise OptionError(f"Expected replace_by of {', '.join(REPLACEMENTS)}, got {replace_by!r}.")


def choose_all(methods: str | Sequence[MethodChoice] | None) -> list[MethodChoice]:
    """Return the requested methods, followed by the baselines."""
    if methods is None:
        choices: list[MethodChoice] = [one.name for one in list_methods() if not one.needs & {"predict", "tokens"}]
    elif methods == "all":
        choices = [method.name for method in list_methods()]
    else:
        choices = [methods] if isinstance(methods, str) else list(methods)
    names = [one.name for one in choose_methods(choices, {})] if choices else []
    ahead = [choice for choice, name in zip(choices, names, strict=True) if name not in BASELINES]
    last = [choice for choice, name in zip(choices, names, strict=True) if name in BASELINES]
    return [*ahead, *last, *(name for name in BASELINES if name not in names)]


def label_methods(choices: Sequence[MethodChoice], options: Mapping[str, Any]) -> list[ChosenMethod]:
    """Complete the methods; labels include options given with the name."""
    labelled: list[ChosenMethod] = []
    for choice, one in zip(choices, check_methods(choices, options), strict=True):
        specific = {} if isinstance(choice, str | ChosenMethod) else choice[1]
        label = one.name + (":" + ",".join(f"{key}={value}" for key, value in specific.items()) if specific else "")
        if any(label == other.label for other in labelled):
            raise OptionError(f"Expected different methods or options, got {label} twice.")
        labelled.append(replace(one, label=label))
    return labelled


def possible_groups(groups: Sequence[str], dataset: Dataset, explainer: Explainer) -> tuple[list[str], list[str]]:
    """Return the groups that data and model support, with notes on the others; an error if none is left."""
    missing: dict[str, str] = {}
    if not dataset.has_regions:
        missing["localisation"] = "the data says nothing of where objects are (masks, boxes)"
    if not explainer.num_classes:
        missing |= dict.fromkeys(("faithfulness", "correlation", "grid"), "the model has no classes")
    left = [group for group in groups if group not in missing]
    notes = [f"Left out: {group}, because {missing[group]}." for group in groups if group in missing]
    if not left:
        raise OptionError(f"None of the metrics can be measured. {' '.join(notes)}")
    return left, notes


def applicable_methods(
    explainer: Explainer, dataset: Dataset, chosen: list[ChosenMethod]
) -> tuple[list[ChosenMethod], list[str]]:
    """Of all methods those that apply to the model, tried on one image; and what to tell of the others."""
    image = next((image for sample in dataset.samples[:20] if (image := _image(sample)) is not None), None)
    if image is None:
        return chosen, []  # the run will tell what is wrong with the images
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VitflowWarning)
        refused = explainer.refusals(chosen, image)
    return [one for one in chosen if one.name not in refused], left_out(refused)


def _image(sample: Sample) -> Any:
    try:
        return sample.read().image
    except (VitflowError, OSError):
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """The question that an evaluation asks of one image.

    Attributes:
        target: class index that the maps explain; None for the class that the model predicts.
        region: the pixels that are right, bool [height, width]; None if the data does not say.
        unknown: pixels that are left out, bool [height, width].
        objects: the pixels of each class that the model has, by class.
    """

    target: int | None
    region: Mask | None = None
    unknown: Mask | None = None
    objects: Mapping[int, Mask] = field(default_factory=dict)


def ask(image: Labelled, num_classes: int, class_names: Sequence[str] | None) -> Question:
    """Choose the class to explain, and the region that belongs to it.

    1. The class of the image as a whole, if it has one that the model has.
    2. Otherwise, of the classes of its objects that the model has, the one that covers the most pixels.
    3. If the model has none of them, the class that it predicts.

    The region is the union of all objects of that class. In case 3, and if the image has a class and its objects have
    none, it is the union of all objects. An image asks one question, so that images are independent in the statistics.

    Args:
        image: the image and what is known about it.
        num_classes: of the model; 0 if it has none.
        class_names: their names, if known. Models of ImageNet-1k know WordNet ids such as n01440764.

    Raises:
        ShapeError: a region cannot be painted.
    """
    size = image.image.shape[0], image.image.shape[1]
    target = _index(image.label, num_classes, class_names)
    if image.regions is None:
        return Question(target)
    check_count(len(image.regions))
    unknown = [region for region in image.regions if region.unknown]
    known = [region for region in image.regions if not region.unknown]
    by_class: dict[int | None, list[Region]] = {}
    for region in known:
        by_class.setdefault(_index(region.label, num_classes, class_names), []).append(region)
    objects = {index: union(regions, size) for index, regions in by_class.items() if index is not None}
    if target is None:  # of classes that cover equally many pixels the first
        target = max(objects, key=lambda index: int(objects[index].sum()), default=None)
    right = objects[target] if target in objects else union(known, size)
    return Question(target, right, union(unknown, size) & ~right if unknown else None, objects)


def _index(label: Label, num_classes: int, class_names: Sequence[str] | None) -> int | None:
    """Return the model's class index of a label; None if there is none, or several."""
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
    from timm.data import ImageNetInfo

    return {name: index for index, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}


# Standard deviation of the blur, in patches.
SIGMA = 1.0

_SUFFIX = " (blurred)"

SAYS = (
    "Each method has a blurred twin as a control, the same map after a Gaussian blur of one patch. Blur alone improves "
    "localisation, because objects are larger than a patch, and worsens deletion."
)


def twin_of(label: str) -> str:
    """Return the label of a method's blurred copy."""
    return f"{label}{_SUFFIX}"


def is_twin(label: str) -> bool:
    """Return True if a label is that of a blurred copy."""
    return label.endswith(_SUFFIX)


def blurred(saliency: Saliency) -> Saliency:
    """Blur a map with a Gaussian of one patch; mirrored borders preserve the sum.

    >>> from vitflow.explaining.explainer import explain
    >>> from vitflow.demo import sample_images
    >>> saliency = explain(sample_images()[0], model="demo")
    >>> bool(np.isclose(blurred(saliency).grid.sum(), saliency.grid.sum()))
    True
    """
    smooth = gaussian_filter(saliency.grid.astype(np.float64), SIGMA, mode="reflect")
    return replace(saliency, grid=smooth.astype(np.float32))
