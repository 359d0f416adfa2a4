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
        """Whether the data must say where the objects are."""
        return self.group == "localisation"

    @property
    def arrow(self) -> str:
        """Which way is better, as a sign."""
        return "↑" if self.better == "higher" else "↓"


METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            "pointing_game",
            "pointing game",
            "localisation",
            "higher",
            "How often the highest pixel lies in the object.",
            "One pixel decides: it says nothing about the rest of the map, and the centre of the image already hits "
            "often.",
        ),
        Metric(
            "energy",
            "energy in object",
            "localisation",
            "higher",
            "The share of the map's mass above its minimum that lies in the object.",
            "A model may rightly use what lies around the object; a map of few bright patches gains by that alone.",
        ),
        Metric(
            "roc_auc",
            "ROC-AUC",
            "localisation",
            "higher",
            "The chance that a pixel of the object is higher than one of the ground.",
            "Only the order counts: how much brighter the object is does not, and large objects are easier.",
        ),
        Metric(
            "average_precision",
            "average precision",
            "localisation",
            "higher",
            "How purely the highest pixels lie in the object, over all thresholds.",
            "Chance is the object's share of the area, so values of data sets with other object sizes do not compare.",
        ),
        Metric(
            "mean_iou",
            "mean IoU",
            "localisation",
            "higher",
            "How well the map, cut at its mean, covers object and ground.",
            "The mean is an arbitrary threshold: a sharp map inside the object loses against one that fills it.",
        ),
        Metric(
            "deletion_auc",
            "deletion AUC",
            "faithfulness",
            "lower",
            "The class's probability while the highest patches are removed first.",
            "Images with holes are unlike anything the model was trained on; that it fails on them may have other "
            "reasons.",
        ),
        Metric(
            "insertion_auc",
            "insertion AUC",
            "faithfulness",
            "higher",
            "The class's probability while the highest patches are put back first.",
            "A few patches that suffice need not be those that the model uses when it sees the whole image.",
        ),
        Metric(
            "gap",
            "insertion − deletion",
            "faithfulness",
            "higher",
            "How much longer the answer stands when the lowest patches go first instead of the highest, as an area.",
            "Only the order of the patches counts, and patches are removed one by one, as if they did not need each "
            "other.",
        ),
        Metric(
            "positive_perturbation",
            "positive perturbation",
            "faithfulness",
            "lower",
            "How often the class stays on top while the highest patches are removed, 0 to 90 %.",
            "A class that is never on top counts as removed from the start, so the model's accuracy is part of it.",
        ),
        Metric(
            "negative_perturbation",
            "negative perturbation",
            "faithfulness",
            "higher",
            "How often the class stays on top while the lowest patches are removed, 0 to 90 %.",
            "It rewards every map that keeps the object to the last, whether or not the model looks at all of it.",
        ),
        Metric(
            "randomisation",
            "after randomisation",
            "sanity",
            "lower",
            "How alike the maps still are when all weights are random: |Spearman|.",
            "That a map changes with the weights does not make it right; that it does not change makes it wrong.",
        ),
        Metric(
            "shift_stability",
            "shift stability",
            "sanity",
            "higher",
            "How alike the maps of the image and of the shifted image are: Spearman.",
            "A map that ignores the image is perfectly stable, and a model that reacts to the shift should move it.",
        ),
        Metric(
            "flip_stability",
            "flip stability",
            "sanity",
            "higher",
            "How alike the maps of the image and of its mirror image are: Spearman.",
            "A map that ignores the image and is symmetric is perfectly stable.",
        ),
        Metric(
            "class_sensitivity",
            "class sensitivity",
            "sanity",
            "higher",
            "How unlike the maps for two classes are: 1 − Spearman; 0 for methods that ask for no class.",
            "It does not say that either map is right, and classes that look alike may rightly share a map.",
        ),
        Metric(
            "grid_energy",
            "energy in cell",
            "grid",
            "higher",
            "Of four images in a grid, one class asked for: the share of the map in the cell that shows it.",
            "A map that is thin everywhere else gains by that alone. Chance, and every map that is the same for all "
            "classes, is 0.25.",
        ),
        Metric(
            "grid_auc",
            "ROC-AUC of cell",
            "grid",
            "higher",
            "The chance that a patch of the asked cell is higher than one of the other three cells.",
            "The ground of the asked cell counts as right, so that 1 is more than a map of the object alone can reach.",
        ),
        Metric(
            "grid_wins",
            "cell wins",
            "grid",
            "higher",
            "How often the asked cell has the largest mean of the four.",
            "It says nothing about where in its cell the map lies; and grids are unlike the images that a model was "
            "trained on.",
        ),
        Metric(
            "separation",
            "energy in asked object",
            "grid",
            "higher",
            "In images with labelled objects of several classes: of the map's mass in all of them, the share in the "
            "asked one.",
            "What lies beside all objects does not count. Chance is the asked object's share of their area.",
        ),
        Metric(
            "separation_wins",
            "asked object wins",
            "grid",
            "higher",
            "How often the asked object has the largest mean of the labelled ones.",
            "With two objects, chance wins every other time.",
        ),
    )
}

#: Groups of metrics; "correlation" is measured layer by layer and has tables of its own.
GROUPS = ("localisation", "faithfulness", "sanity", "grid", "correlation")

#: What is measured where nothing else is asked for.
DEFAULT_GROUPS = ("localisation", "faithfulness", "sanity")

CORRELATION_SILENT = (
    "Occlusion and input gradients are no ground truth either: that maps rank patches as these do says that they "
    "agree, not that they are right."
)


def choose_metrics(names: Iterable[str] | None = None) -> tuple[list[Metric], list[str]]:
    """The metrics of these names and groups, in the table's order, and the groups that must be computed for them.

    Args:
        names: of metrics or groups, or "all"; by default everything but "grid" and "correlation".

    Raises:
        OptionError: there is no such metric or group, or none was named.

    >>> metrics, groups = choose_metrics(["roc_auc", "sanity"])
    >>> [metric.name for metric in metrics][:2], groups
    (['roc_auc', 'randomisation'], ['localisation', 'sanity'])
    """
    asked = list(DEFAULT_GROUPS if names is None else names)
    if not asked:
        raise OptionError("Expected at least one metric, got none.")
    for name in asked:
        if name not in METRICS and name not in (*GROUPS, "all"):
            raise OptionError(unknown_name("metric", name, [*METRICS, *GROUPS, "all"]))
    chosen = [metric for metric in METRICS.values() if {metric.name, metric.group, "all"} & set(asked)]
    wanted = {metric.group for metric in chosen} | ({"correlation"} if {"correlation", "all"} & set(asked) else set())
    return chosen, [group for group in GROUPS if group in wanted]
