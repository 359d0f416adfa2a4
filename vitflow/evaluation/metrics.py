"""Table of metrics by group: names, directions, requirements and limitations.

This module imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from vitflow.errors import OptionError, check_known


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per image and method.

    Attributes:
        group: name of its group in `GROUPS`; metrics of a group are computed together.
        name: name in arguments and table columns.
        title: name for display.
        description: one sentence.
        limitations: what the metric does not show.
        better: "higher" or "lower".
        limits: smallest and largest possible value; None if there are none.
        share: True if an image is a hit or a miss, at the ends of the range.
    """

    group: str
    name: str
    title: str
    description: str
    limitations: str
    better: str = "higher"
    limits: tuple[float, float] | None = (0.0, 1.0)
    share: bool = False

    @property
    def arrow(self) -> str:
        """Arrow in the direction of better values."""
        return "↑" if self.better == "higher" else "↓"


@dataclass(frozen=True, slots=True)
class Group:
    """Metrics that answer one question and are computed together.

    Attributes:
        title: heading of their section.
        question: the question.
        needs: what it requires: "regions" (in the data) or "classes" (of the model), or nothing.
    """

    title: str
    question: str
    needs: str = ""


#: Groups of metrics by name.
GROUPS = {
    "localisation": Group("Localisation", "Does the map highlight the object?", "regions"),
    "faithfulness": Group(
        "Faithfulness", "Does the prediction depend on the patches that the map ranks highest?", "classes"
    ),
    "sanity": Group("Sanity", "Does the map depend on the weights, and differ between classes?"),
    "grid": Group("One class against another", "Among several objects, does the map highlight the target?", "classes"),
    "sameness": Group("Sameness", "Does the map depend on the image, or are the maps of all images the same?"),
}

_localisation, _faithfulness, _sanity, _grid, _sameness = (partial(Metric, group) for group in GROUPS)

# Name, title, description and limitations.
_METRICS = (
    _localisation(
        "pointing_game",
        "pointing game",
        "Share of images whose highest pixel is in the object.",
        "Depends on one pixel only, and the centre of the image often hits the object, too.",
        share=True,
    ),
    _localisation(
        "energy",
        "energy in object",
        "Share of the map's mass above its minimum that is in the object.",
        "A model may rightly use the context of the object; sparse maps score higher.",
    ),
    _localisation(
        "roc_auc",
        "ROC-AUC",
        "Probability that a pixel of the object is higher than one of the background.",
        "Depends on the order of values only, and large objects are easier.",
    ),
    _localisation(
        "mean_iou",
        "mean IoU",
        "IoU of the map, thresholded at its mean, with object and background.",
        "The threshold is arbitrary: a sharp map inside the object scores lower than one that fills it.",
    ),
    _faithfulness(
        "deletion_auc",
        "deletion AUC",
        "Probability of the class while the highest patches are removed first.",
        "Images with removed patches differ from the training data, so the model may fail for other reasons.",
        better="lower",
    ),
    _faithfulness(
        "insertion_auc",
        "insertion AUC",
        "Probability of the class while the highest patches are inserted first.",
        "A few sufficient patches need not be those that the model uses in the whole image.",
    ),
    _faithfulness(
        "gap",
        "insertion − deletion",
        "Area between the curves with the lowest and with the highest patches removed first.",
        "Depends on the order of patches only, and ignores interactions between patches.",
        limits=(-1.0, 1.0),
    ),
    _sanity(
        "randomisation",
        "after randomisation",
        "Similarity to the map of a model with random weights: |Spearman|.",
        "A map that changes with the weights may still be wrong; one that does not change is wrong.",
        better="lower",
    ),
    _sanity(
        "class_sensitivity",
        "class sensitivity",
        "Difference of the maps for two classes: 1 − Spearman; 0 for methods that are not class-specific.",
        "Both maps may be wrong, and similar classes may rightly share a map.",
        limits=(0.0, 2.0),
    ),
    _grid(
        "grid_energy",
        "energy in cell",
        "In a grid of four images: share of the map in the cell of the target class.",
        "Sparse maps score higher. Chance, and every map that is the same for all classes, is 0.25.",
    ),
    _grid(
        "grid_auc",
        "grid ROC-AUC",
        "Probability that a patch of the target cell is higher than one of the other three cells.",
        "The background of the target cell counts as correct, so a map of the object alone does not reach 1.",
    ),
    _grid(
        "grid_wins",
        "cell wins",
        "Share of targets whose cell has the largest mean of the four.",
        "Ignores positions within the cell, and grids differ from the images that a model was trained on.",
        share=True,
    ),
    _grid(
        "separation",
        "energy in target object",
        "In images with labelled objects of several classes: share of the map's mass in all objects that is in the "
        "target object.",
        "Ignores the background. Chance is the target object's share of the area of all objects.",
    ),
    _grid(
        "separation_wins",
        "target object wins",
        "Share of targets with the largest mean among the labelled objects.",
        "With two objects, chance is 0.5.",
        share=True,
    ),
    _sameness(
        "sameness",
        "sameness",
        "Similarity to the mean map of the same method on the other images: Spearman.",
        "By construction the centre prior has 1 and a random map about 0: neither depends on the model. Objects in "
        "similar places rightly have similar maps.",
        better="lower",
        limits=(-1.0, 1.0),
    ),
)
METRICS: dict[str, Metric] = {metric.name: metric for metric in _METRICS}


def choose_metrics(names: Iterable[str] | None = None) -> tuple[list[Metric], list[str]]:
    """Return the metrics of these names and groups, by default all, in table order, and the groups to compute for them.

    >>> metrics, groups = choose_metrics(["roc_auc", "sanity"])
    >>> [metric.name for metric in metrics][:2], groups
    (['roc_auc', 'randomisation'], ['localisation', 'sanity'])
    """
    requested = list(GROUPS if names is None else names)
    if not requested:
        raise OptionError("Expected at least one metric, got none.")
    for name in requested:
        check_known("metric", name, [*METRICS, *GROUPS])
    chosen = [metric for metric in METRICS.values() if {metric.name, metric.group} & set(requested)]
    groups = {metric.group for metric in chosen}
    return chosen, [name for name in GROUPS if name in groups]


_SUFFIX = " (blurred)"


def blurred_label(label: str) -> str:
    """Return the label of a method's blurred control."""
    return f"{label}{_SUFFIX}"


def is_blurred(label: str) -> bool:
    """Return True if the label is that of a blurred control."""
    return label.endswith(_SUFFIX)
