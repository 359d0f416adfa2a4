"""Sentences about an evaluation: the verdict, and notes on what was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitflow.evaluation.metrics import METRICS
from vitflow.evaluation.statistics import MIN_CLEAR
from vitflow.evaluation.tables import Tables
from vitflow.registry.choices import is_slow, split_label
from vitflow.registry.method_table import get_method

# What the best method of each question does, and the metrics that answer it: the first one with enough values. A map
# that changes with the class need not be on it, so class sensitivity is no answer.
_QUESTIONS = {
    "is most often on the object": ("roc_auc", "mean_iou", "energy", "pointing_game"),
    "ranks best the patches that the prediction depends on": ("gap", "deletion_auc", "insertion_auc"),
    "separates one class from another best": ("grid_auc", "separation"),
}
_BLUR_NOTE = (
    "Blurred controls are the same maps after a Gaussian blur of one patch. Blur improves localisation, because "
    "objects are larger than a patch, and worsens deletion. A method that improves both does more than blur."
)
_REPLACED = {
    "drop": "Tokens of removed patches are dropped from the sequence.",
    "blank": "Removed patches are filled with the image's mean colour.",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a question: a sentence, and the method that it names as the best one, if any."""

    sentence: str
    best: str | None = None


def verdict(tables: Tables) -> list[Answer]:
    """Answer each question by the best method, and those that cannot be distinguished from it.

    Only measured metrics count. On fewer than ten images no method is called better than another.

    >>> from vitflow.evaluation import evaluate
    >>> [answer] = verdict(evaluate("demo:12", model="demo", methods=["gae", "attention"], metrics=["roc_auc"]))
    >>> answer.sentence, answer.best
    ('On 12 images, GAE is most often on the object.', 'gae')
    """
    answers = []
    for does_best, names in _QUESTIONS.items():
        counts = {name: tables.count(name) for name in names if name in tables.values and tables.ranking(name)}
        if counts:
            metric = next((name for name, count in counts.items() if count >= MIN_CLEAR), next(iter(counts)))
            answers.append(_answer(tables, metric, counts[metric], does_best))
    return answers


def _answer(tables: Tables, metric: str, count: int, does_best: str) -> Answer:
    if count < MIN_CLEAR:
        return Answer(
            f"Too few images to say which map {does_best}: {METRICS[metric].title} has a value for {count}, and at "
            f"least {MIN_CLEAR} are required."
        )
    ranked, where = [method for method, _ in tables.ranking(metric)], f"On {counted(count, 'image')}, "
    best = ranked[0]
    if tables.state(metric, best, "random") != "better":
        return Answer(f"{where}no map {does_best}: none is clearly better than a random one.")
    sentence = f"{where}{method_title(best)} {does_best}"
    if ties := [method_title(other) for other in ranked[1:] if tables.state(metric, best, other) == "unclear"]:
        sentence += f"; {_listed(ties)} {'is' if len(ties) == 1 else 'are'} as good within the error"
    fast = [method for method in ranked if not is_slow(split_label(method)[0])]
    if fast and best not in fast:
        sentence += f"; {method_title(fast[0])} is the best of the fast methods"
    return Answer(f"{sentence}.", best)


def method_title(label: str) -> str:
    """Return the title of a method for display, with the options of its label."""
    name, options = split_label(label)
    return f"{get_method(name).title} ({options})" if options else get_method(name).title


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def notes_on(tables: Tables) -> list[str]:
    """Return notes on data, targets, replacement, controls, grids and sanity checks."""
    images, settings = tables.images, tables.settings
    count, failed, read = len(images), len(tables.failures), len(tables.records)
    kind = tables.kind if read > 1 else tables.kind.replace("images", "image", 1)
    measured = f"{count} measured, {failed} failed" if failed else "all measured"
    labelled = sum(image["target_source"] == "label" for image in images)
    target = "the labelled class" if labelled else "the predicted class"
    if 0 < labelled < count:
        target += (
            f" on {counted(labelled, 'image')}, and the predicted class on the other {count - labelled}, whose labels "
            "are not classes of the model"
        )
    elif not labelled and "class" in tables.kind:
        target += ", because no label is a class of the model: pass its class names"
    notes = [
        f"{read} {kind}, {measured}. Tables show means over images ± standard error.",
        f"Class-specific methods explain {target}.",
    ]
    if turned := sum(image.get("turned", False) for image in images):
        notes.append(f"{counted(turned, 'image')} turned by EXIF: annotations are read in the frame that is displayed.")
    if "replace_by" in settings:
        notes.append(f"{_REPLACED[settings['replace_by']]} Curves have {settings['points']} points.")
    if settings["blurred_control"]:
        notes.append(_BLUR_NOTE)
    if "grid" in settings["groups"]:
        grids = [tuple(image["grid"]) for image in images if image["grid"]]
        made = f"{counted(len(grids), 'target')} in {counted(len(set(grids)), 'grid')}" if grids else "no grid"
        notes.append(
            f"The grid pointing game has {made} of four images of different classes, drawn with the seed among images "
            "whose labelled class is predicted with a probability above 0.5."
        )
    checked = sum("sanity" in image["groups"] for image in images)
    if checked:
        notes.append(f"The sanity checks used {counted(checked, 'image')}.")
        if settings["unchecked"]:
            notes[-1] += (
                f" Methods without sanity checks, because they run the model again: "
                f"{', '.join(settings['unchecked'])}; select a method with --method to check it."
            )
    return notes


def counted(count: int, word: str) -> str:
    """Return a number with its word, such as "1 image"."""
    return f"{count:,} {word}{'' if count == 1 else 's'}".replace(",", " ")
