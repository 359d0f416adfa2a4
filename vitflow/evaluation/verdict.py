"""Verdict of an evaluation in one sentence: the best method for each question, and ties."""

from collections.abc import Sequence

from vitflow.evaluation.tables import Tables
from vitflow.explaining.method_table import get_method, is_slow, split_label

# Questions, and the metrics that answer them; the first measured metric counts.
_QUESTIONS = {
    "where the object is": ("roc_auc", "mean_iou", "average_precision", "energy", "pointing_game"),
    "what the prediction depends on": ("gap", "deletion_auc", "insertion_auc"),
    "one class against another": ("grid_auc", "separation", "grid_energy", "class_sensitivity"),
}


def verdict(evaluation: Tables) -> str:
    """Return a sentence with the best method for each question, the best fast method, and ties.

    Only measured metrics count; the sentence is empty if none of them answers a question.

    >>> from vitflow.evaluation import evaluate
    >>> verdict(evaluate("demo:8", model="demo", methods=["gae", "attention"], metrics=["roc_auc"]))
    'On your 8 images: GAE for where the object is.'
    """
    methods = evaluation.main_methods
    measured = {metric.name for metric in evaluation.metrics}
    questions = {
        question: metric
        for question, metrics in _QUESTIONS.items()
        if (metric := next((name for name in metrics if name in measured), None)) is not None
    }
    winners: dict[str, list[str]] = {}
    unclear: list[str] = []
    for question, metric in questions.items():
        if not (ranking := evaluation.ranking(metric, methods)):
            continue
        best = ranking[0][0]
        if _is_level(evaluation, metric, best, "random"):
            unclear.append(question)
        else:
            winners.setdefault(best, []).append(question)
    parts = [f"{_title(method)} for {_listed(names)}" for method, names in winners.items()]
    quick = [name for name in methods if not is_slow(split_label(name)[0])]
    first = next(iter(questions.values()), None)
    fast = None if first is None or unclear else next((name for name, _ in evaluation.ranking(first, quick)), None)
    if fast is not None and fast not in winners and any(name not in quick for name in winners):
        parts.append(f"{_title(fast)} if speed matters")
    if unclear:
        parts.append(f"no map is clearly better than a random one for {_listed(unclear)}")
    if not parts:
        return ""
    named = [*winners, *([fast] if fast is not None else [])]
    level = _level_pairs(evaluation, list(questions.values()), named, methods)
    ties = [
        f"no clear difference between {_title(method)} and {_listed([_title(name) for name in others])}"
        for method, others in level
    ]
    count = len(evaluation.images)
    return f"On your {count} image{'' if count == 1 else 's'}: {'; '.join([', '.join(parts), *ties])}."


def _is_level(evaluation: Tables, metric: str, first: str, second: str) -> bool:
    """Return True if neither method is clearly better than the other."""
    return not any(d.is_clear for d in evaluation.differences(metric) if {d.first, d.second} == {first, second})


def _level_pairs(
    evaluation: Tables, metrics: Sequence[str], named: Sequence[str], methods: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """Return, for each named method, the methods without a clear difference on any metric, each pair once."""
    pairs: list[tuple[str, list[str]]] = []
    for index, method in enumerate(dict.fromkeys(named)):
        before = list(dict.fromkeys(named))[:index]
        others = [
            name
            for name in methods
            if name != method
            and name not in before
            and all(_is_level(evaluation, metric, method, name) for metric in metrics)
        ]
        if others:
            pairs.append((method, others))
    return pairs


def _title(label: str) -> str:
    name, options = split_label(label)
    return f"{get_method(name).title} ({options})" if options else get_method(name).title


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
