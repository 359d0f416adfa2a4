"""Choose methods and metrics of an evaluation, and the target class and region of each image."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from scipy.ndimage import gaussian_filter

from vitflow.errors import OptionError, VitflowError, VitflowWarning, check_known, whole_number
from vitflow.evaluation.annotations import Label, Labelled, Mask, Region, check_count, union
from vitflow.evaluation.datasets import Dataset, Sample
from vitflow.evaluation.measures.intervals import has_intervals
from vitflow.evaluation.measures.perturbation import REPLACEMENTS
from vitflow.explaining.choices import ChosenMethod, MethodChoice, check_methods, choose_methods, left_out
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.method_table import BASELINES, Method, list_methods
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import class_index

_WORDNET_ID = re.compile(r"n\d{8}")
_IMAGENET_CLASSES = 1000


def check_options(points: int, sanity_images: int, batch_size: int | None, replace_by: str | None) -> None:
    """Raise OptionError for invalid options, before anything is loaded."""
    whole_number("points", points, 2)
    whole_number("sanity_images", sanity_images, 0)
    if batch_size is not None:
        whole_number("batch_size", batch_size, 1)
    if replace_by is not None:
        check_known("replacement", replace_by, REPLACEMENTS)


def choose(methods: str | Sequence[MethodChoice] | None, options: Mapping[str, Any]) -> list[ChosenMethod]:
    """Return the methods to measure, then the baselines, labelled with the options given with their names."""
    if methods is None:
        choices: list[MethodChoice] = [m.name for m in list_methods() if not m.needs & {"predict", "tokens"}]
    elif methods == "all":
        choices = [method.name for method in list_methods()]
    else:
        choices = [methods] if isinstance(methods, str) else list(methods)
    names = [method.name for method in choose_methods(choices, {})] if choices else []
    choices += [name for name in BASELINES if name not in names]
    chosen: list[ChosenMethod] = []
    for choice, method in zip(choices, check_methods(choices, options), strict=True):
        given = {} if isinstance(choice, str | Method | ChosenMethod) else choice[1]
        label = method.name + (":" + ",".join(f"{key}={value}" for key, value in given.items()) if given else "")
        if any(label == other.label for other in chosen):
            raise OptionError(f"Expected different methods or options, got {label} twice.")
        chosen.append(replace(method, label=label))
    return sorted(chosen, key=lambda method: method.name in BASELINES)


def possible_groups(
    groups: Sequence[str], dataset: Dataset, explainer: Explainer, chosen: Sequence[ChosenMethod]
) -> tuple[list[str], list[str]]:
    """Return the groups that data, methods and model support, and notes on the others; OptionError if none is left."""
    missing: dict[str, str] = {}
    if not dataset.has_regions:
        missing["localisation"] = "the data has no masks or boxes"
    if not any(has_intervals(method.options) for method in chosen):
        missing["intervals"] = "only sampling and consensus with estimator=regression have intervals"
    if not explainer.num_classes:
        missing |= dict.fromkeys(("faithfulness", "correlation", "grid", "intervals"), "the model has no classes")
    left = [group for group in groups if group not in missing]
    notes = [f"Skipped {group}: {missing[group]}." for group in groups if group in missing]
    if not left:
        raise OptionError(f"None of the metrics can be measured. {' '.join(notes)}")
    return left, notes


def applicable_methods(
    explainer: Explainer, dataset: Dataset, chosen: list[ChosenMethod]
) -> tuple[list[ChosenMethod], list[str]]:
    """Return the methods that the model supports, tried on one image, and notes on the others."""
    image = next((image for sample in dataset.samples[:20] if (image := _image(sample)) is not None), None)
    if image is None:
        return chosen, []  # the run reports the errors of the images
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VitflowWarning)
        refused = explainer.refusals(chosen, image)
    return [method for method in chosen if method.name not in refused], left_out(refused)


def _image(sample: Sample) -> Any:
    try:
        return sample.read().image
    except (VitflowError, OSError):
        return None


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

    1. The label of the image, if the model has this class.
    2. Otherwise the class of its objects that covers the most pixels, among those that the model has.
    3. Otherwise the predicted class.

    The region is the union of all objects of the target class, or of all objects if none has this class. Each image has
    one target, so that images are independent in the statistics.

    Args:
        image: the image and its annotations.
        num_classes: number of classes of the model; 0 without a classifier.
        class_names: names of the classes, if known. Models of ImageNet-1k know WordNet ids such as n01440764.

    Raises:
        ShapeError: a region is invalid.
    """
    size = image.image.shape[0], image.image.shape[1]
    target = _index(image.label, num_classes, class_names)
    if image.regions is None:
        return TargetRegion(target)
    check_count(len(image.regions))
    unknown = [region for region in image.regions if region.unknown]
    known = [region for region in image.regions if not region.unknown]
    by_class: dict[int | None, list[Region]] = {}
    for region in known:
        by_class.setdefault(_index(region.label, num_classes, class_names), []).append(region)
    objects = {index: union(regions, size) for index, regions in by_class.items() if index is not None}
    if target is None:  # the first of tied classes
        target = max(objects, key=lambda index: int(objects[index].sum()), default=None)
    region_mask = objects[target] if target in objects else union(known, size)
    return TargetRegion(target, region_mask, union(unknown, size) & ~region_mask if unknown else None, objects)


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
    from timm.data import ImageNetInfo

    return {name: index for index, name in enumerate(ImageNetInfo("imagenet-1k").label_names())}


# Standard deviation of the blur, in patches.
SIGMA = 1.0

_SUFFIX = " (blurred)"

TWIN_NOTE = (
    "Each method is followed by its blurred twin, the same map after a Gaussian blur of one patch. Blur improves "
    "localisation, because objects are larger than a patch, and worsens deletion. A method that improves both does "
    "more than blur."
)


def twin_of(label: str) -> str:
    """Return the label of a method's blurred twin."""
    return f"{label}{_SUFFIX}"


def is_twin(label: str) -> bool:
    """Return True if the label is that of a blurred twin."""
    return label.endswith(_SUFFIX)


def blurred(saliency: Saliency) -> Saliency:
    """Return the map after a Gaussian blur with σ of one patch; reflecting at the border preserves the sum.

    >>> from vitflow.explaining.explainer import explain
    >>> from vitflow.demo import sample_images
    >>> saliency = explain(sample_images()[0], model="demo")
    >>> bool(np.isclose(blurred(saliency).grid.sum(), saliency.grid.sum()))
    True
    """
    smooth = gaussian_filter(saliency.grid.astype(np.float64), SIGMA, mode="reflect")
    return replace(saliency, grid=smooth.astype(np.float32))
