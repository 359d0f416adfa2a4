"""The table of metrics: what each is called, which way is better, what it needs, and what it does not show.

This module imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from vitflow.errors import OptionError, unknown_name


@dataclass(frozen=True, slots=True)
class Metric:
    """One number per image and method.

    Attributes:
        name: what callers write, and its column in the tables.
        title: what readers see.
        group: "localisation", "faithfulness", "sanity" or "grid"; metrics of a group are computed together.
        better: "higher" or "lower".
        says: what it measures.
        silent: what it does not show.
    """

    name: str
    title: str
    group: str
    better: str
    says: str
    silent: str

    @property
    def needs_regions(self) -> bool:
        """True if the data must have regions."""
        return self.group == "localisation"

    @property
    def arrow(self) -> str:
        """Direction of improvement, 1 or -1."""
        return "↑" if self.better == "higher" else "↓"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "pointing_game",
            "pointing game",
            "localisation",
            "higher",
            "Share of images whose highest pixel is in the object.",
            "Depends on a single pixel; the centre of the image is often a hit.",
        ),
        Metric(
            "energy",
            "energy in object",
            "localisation",
            "higher",
            "Share of the map's mass above its minimum that is in the object.",
            "A model may use the surroundings of the object; maps with few bright patches have an advantage.",
        ),
        Metric(
            "roc_auc",
            "ROC-AUC",
            "localisation",
            "higher",
            "Probability that a pixel of the object is higher than a pixel of the background.",
            "Only the order of pixels matters, and large objects are easier.",
        ),
        Metric(
            "average_precision",
            "average precision",
            "localisation",
            "higher",
            "Precision of the highest pixels as a detector of the object, over all thresholds.",
            "Chance is the object's share of the area, so that data sets with other object sizes are not comparable.",
        ),
        Metric(
            "mean_iou",
            "mean IoU",
            "localisation",
            "higher",
            "Overlap of the map, thresholded at its mean, with object and background.",
            "The threshold is arbitrary: a sharp map inside the object scores lower than one that fills it.",
        ),
        Metric(
            "deletion_auc",
            "deletion AUC",
            "faithfulness",
            "lower",
            "Probability of the class while the highest patches are removed first.",
            "Images with removed patches are unlike the training data; the model may fail for other reasons.",
        ),
        Metric(
            "insertion_auc",
            "insertion AUC",
            "faithfulness",
            "higher",
            "Probability of the class while the highest patches are inserted first.",
            "Sufficient patches need not be those that the model uses in the whole image.",
        ),
        Metric(
            "gap",
            "insertion − deletion",
            "faithfulness",
            "higher",
            "Area between the curves of removing the lowest and the highest patches first.",
            "Only the order of patches matters, and interactions between patches are ignored.",
        ),
        Metric(
            "positive_perturbation",
            "positive perturbation",
            "faithfulness",
            "lower",
            "Accuracy for the class while the highest patches are removed, 0 to 90 %.",
            "A class that is never predicted counts as removed from the start, so that the model's accuracy matters.",
        ),
        Metric(
            "negative_perturbation",
            "negative perturbation",
            "faithfulness",
            "higher",
            "Accuracy for the class while the lowest patches are removed, 0 to 90 %.",
            "Rewards maps that cover the whole object, whether or not the model uses all of it.",
        ),
        Metric(
            "randomisation",
            "after randomisation",
            "sanity",
            "lower",
            "Similarity of the maps with original and with random weights: |Spearman|.",
            "A map that changes with the weights need not be right; a map that does not change is wrong.",
        ),
        Metric(
            "shift_stability",
            "shift stability",
            "sanity",
            "higher",
            "Similarity of the maps of the image and of the shifted image: Spearman.",
            "A map that ignores the image is perfectly stable, and a model that reacts to the shift should change it.",
        ),
        Metric(
            "flip_stability",
            "flip stability",
            "sanity",
            "higher",
            "Similarity of the maps of the image and of its mirror image: Spearman.",
            "A map that ignores the image and is symmetric is perfectly stable.",
        ),
        Metric(
            "class_sensitivity",
            "class sensitivity",
            "sanity",
            "higher",
            "Dissimilarity of the maps for two classes: 1 − Spearman; 0 for methods that are not class-specific.",
            "Neither map need be right, and similar classes may have similar maps.",
        ),
        Metric(
            "grid_energy",
            "energy in cell",
            "grid",
            "higher",
            "Grid of four images, one target class: share of the map in the cell of that class.",
            "Sparse maps have an advantage. Chance is 0.25, also for maps that are not class-specific.",
        ),
        Metric(
            "grid_auc",
            "ROC-AUC of cell",
            "grid",
            "higher",
            "Probability that a patch of the target cell is higher than a patch of the other cells.",
            "The background of the target cell counts as right, so that a map of only the object cannot reach 1.",
        ),
        Metric(
            "grid_wins",
            "cell wins",
            "grid",
            "higher",
            "Share of questions in which the target cell has the largest mean.",
            "Does not depend on the position within the cell; grids are unlike the training data.",
        ),
        Metric(
            "separation",
            "energy in target object",
            "grid",
            "higher",
            "Images with labelled objects of several classes: share of the map's mass in all objects that is in the "
            "target object.",
            "The background does not count. Chance is the target object's share of the objects' area.",
        ),
        Metric(
            "separation_wins",
            "target object wins",
            "grid",
            "higher",
            "Share of questions in which the target object has the largest mean of the labelled objects.",
            "With two objects, chance is one half.",
        ),
    )
}

#: Groups of metrics; "correlation" is measured layer by layer and has separate tables.
GROUPS = ("localisation", "faithfulness", "sanity", "grid", "correlation")

#: Groups that are measured by default.
DEFAULT_GROUPS = ("localisation", "faithfulness", "sanity")

CORRELATION_SILENT = (
    "Occlusion and input gradients are not ground truth: a high correlation shows agreement, not correctness."
)


def choose_metrics(names: Iterable[str] | None = None) -> tuple[list[Metric], list[str]]:
    """Return the metrics of these names and groups, in the order of the table, and the groups to compute.

    Args:
        names: of metrics or groups, or "all"; by default everything but "grid" and "correlation".

    Raises:
        OptionError: there is no such metric or group, or none was named.

    >>> metrics, groups = choose_metrics(["roc_auc", "sanity"])
    >>> [metric.name for metric in metrics][:2], groups
    (['roc_auc', 'randomisation'], ['localisation', 'sanity'])
    """
    requested = list(DEFAULT_GROUPS if names is None else names)
    if not requested:
        raise OptionError("Expected at least one metric, got none.")
    for name in requested:
        if name not in METRICS and name not in (*GROUPS, "all"):
            raise OptionError(unknown_name("metric", name, [*METRICS, *GROUPS, "all"]))
    chosen = [metric for metric in METRICS.values() if {metric.name, metric.group, "all"} & set(requested)]
    wanted = {metric.group for metric in chosen} | (
        {"correlation"} if {"correlation", "all"} & set(requested) else set()
    )
    return chosen, [group for group in GROUPS if group in wanted]
