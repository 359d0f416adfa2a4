"""The answer of an evaluation in one sentence: which map for which question, and which maps nothing separates."""

from collections.abc import Sequence

from vitflow.evaluation.tables import Tables
from vitflow.explaining.method_table import get_method, is_slow

# What a reader asks of a map, and the metrics that answer it: the first that was measured does.
_QUESTIONS = {
    "where the object is": ("roc_auc", "mean_iou", "average_precision", "energy", "pointing_game"),
    "what the answer rests on": ("gap", "deletion_auc", "insertion_auc"),
    "one class against another": ("grid_auc", "separation", "grid_energy", "class_sensitivity"),
}


def verdict(evaluation: Tables) -> str:
    """Summarise the best method for each question, the best fast method, and questions without a clear winner.

    Empty if no question was measured for any method.

    >>> from vitflow.evaluation import evaluate
    >>> verdict(evaluate("demo:8", model="demo", methods=["gae", "attention"], metrics=["roc_auc"]))
    'On your 8 images: GAE for where the object is.'
    """
    methods = evaluation.main_methods
    measured = {metric.name for metric in evaluation.metrics}
    by_question = {
        question: metric
        for question, metrics in _QUESTIONS.items()
        if (metric := next((name for name in metrics if name in measured), None)) is not None
    }
    winners: dict[str, list[str]] = {}
    nothing: list[str] = []
    for question, metric in by_question.items():
        if not (ranking := evaluation.ranking(metric, methods)):
            continue
        best = ranking[0][0]
        if _is_level(evaluation, metric, best, "random"):
            nothing.append(question)
        else:
            winners.setdefault(best, []).append(question)
    parts = [f"{_title(method)} for {_listed(questions)}" for method, questions in winners.items()]
    quick = [name for name in methods if not is_slow(name.partition(":")[0])]
    first = next(iter(by_question.values()), None)
    fast = None if first is None or nothing else next((name for name, _ in evaluation.ranking(first, quick)), None)
    if fast is not None and fast not in winners and any(name not in quick for name in winners):
        parts.append(f"{_title(fast)} if speed matters")
    if nothing:
        parts.append(f"no map is clearly better than a random one for {_listed(nothing)}")
    if not parts:
        return ""
    named = [*winners, *([fast] if fast is not None else [])]
    level = _level_pairs(evaluation, list(by_question.values()), named, methods)
    ties = [f"{_title(each)} and {_listed([_title(name) for name in others])} do not differ" for each, others in level]
    count = len(evaluation.images)
    return f"On your {count} image{'' if count == 1 else 's'}: {'; '.join([', '.join(parts), *ties])}."


def _is_level(evaluation: Tables, metric: str, first: str, second: str) -> bool:
    """Return True if neither of two methods is clearly better."""
    return not any(one.is_clear for one in evaluation.differences(metric) if {one.first, one.second} == {first, second})


def _level_pairs(
    evaluation: Tables, metrics: Sequence[str], named: Sequence[str], methods: Sequence[str]
) -> list[tuple[str, list[str]]]:
    """For each named method, return those that do not differ from it in any question, each pair once."""
    parts: list[tuple[str, list[str]]] = []
    for number, one in enumerate(dict.fromkeys(named)):
        before = list(dict.fromkeys(named))[:number]
        others = [
            name
            for name in methods
            if name != one
            and name not in before
            and all(_is_level(evaluation, metric, one, name) for metric in metrics)
        ]
        if others:
            parts.append((one, others))
    return parts


def _title(label: str) -> str:
    name, _, options = label.partition(":")
    return f"{get_method(name).title} ({options})" if options else get_method(name).title


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
