"""Report of an evaluation in one self-contained HTML file: verdict, tables, differences and charts."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitflow.evaluation.metrics import CORRELATION_LIMITATIONS, Metric
from vitflow.evaluation.statistics import CONFIDENCE, Difference
from vitflow.evaluation.tables import Tables
from vitflow.explaining.method_table import get_method, is_slow, split_label
from vitflow.images.figures import figure_bytes
from vitflow.images.typesetting import decimal
from vitflow.viewer.pages import write_html

# Title and question of each group, and its additional chart after the bars.
_GROUPS = {
    "localisation": ("Localisation", "Does the map highlight the object?", ""),
    "faithfulness": (
        "Faithfulness",
        "Does the prediction depend on the patches that the map ranks highest?",
        "curves",
    ),
    "sanity": (
        "Sanity",
        "Does the map depend on the weights, follow the image and differ between classes?",
        "randomisation",
    ),
    "grid": ("One class against another", "Among several objects, does the map highlight the target?", ""),
    "intervals": ("Intervals of sampling", "Do the intervals contain the values from many more masks?", ""),
    "correlation": (
        "Rank correlation by layer",
        "Do attention, rollout and flow of each layer rank patches as the references do?",
        "",
    ),
}
# CSS pixels per inch of every figure, so that their text has the same size.
_PIXELS = 108

# Questions of the verdict, and the metrics that answer them; the first measured metric counts.
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
    measured = {metric.name for metric in evaluation.metrics}
    answered = {question: [name for name in names if name in measured] for question, names in _QUESTIONS.items()}
    questions = {question: names[0] for question, names in answered.items() if names}
    winners: dict[str, list[str]] = {}
    unclear: list[str] = []
    for question, metric in questions.items():
        if not (ranking := evaluation.ranking(metric)):
            continue
        best = ranking[0][0]
        if _is_tie(evaluation, metric, best, "random"):
            unclear.append(question)
        else:
            winners.setdefault(best, []).append(question)
    parts = [f"{_title(method)} for {_listed(names)}" for method, names in winners.items()]
    named = list(winners)
    if named and not unclear and any(_is_slow(name) for name in named):
        ranking = evaluation.ranking(next(iter(questions.values())))
        fast = next((name for name, _ in ranking if not _is_slow(name)), None)
        if fast is not None and fast not in named:
            parts.append(f"{_title(fast)} if speed matters")
            named.append(fast)
    if unclear:
        parts.append(f"no map is clearly better than a random one for {_listed(unclear)}")
    if not parts:
        return ""
    sentences = [", ".join(parts)]
    for index, method in enumerate(named):
        ties = [
            _title(other)
            for other in evaluation.main_methods
            if other not in named[: index + 1]
            and all(_is_tie(evaluation, metric, method, other) for metric in questions.values())
        ]
        if ties:
            sentences.append(f"no clear difference between {_title(method)} and {_listed(ties)}")
    count = len(evaluation.images)
    return f"On your {count} image{'' if count == 1 else 's'}: {'; '.join(sentences)}."


def _is_tie(evaluation: Tables, metric: str, first: str, second: str) -> bool:
    pair = evaluation.difference(metric, first, second)
    return pair is None or not pair.is_clear


def _is_slow(label: str) -> bool:
    return is_slow(split_label(label)[0])


def _title(label: str) -> str:
    name, options = split_label(label)
    return f"{get_method(name).title} ({options})" if options else get_method(name).title


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def write_page(evaluation: Tables, path: Path, charts: Mapping[str, bytes]) -> Path:
    """Write the page.

    Args:
        evaluation: the results to show.
        path: the HTML file.
        charts: SVG by name, as returned by `save_charts`.
    """
    groups = [*evaluation.groups, *(["correlation"] if evaluation.correlation is not None else [])]
    return write_html(
        path,
        "evaluation",
        evaluation=evaluation,
        verdict=verdict(evaluation),
        groups=[_group(evaluation, group, charts) for group in groups],
        correlation_limitations=CORRELATION_LIMITATIONS,
        confidence=round(100 * CONFIDENCE),
        baselines=sum(map(evaluation.is_baseline, evaluation.methods)),
    )


def _group(evaluation: Tables, group: str, charts: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the template values of a group of metrics."""
    title, description, extra = _GROUPS[group]
    metrics = [metric for metric in evaluation.metrics if metric.group == group]
    columns = [_column(evaluation, metric) for metric in metrics]
    return {
        "name": group,
        "title": title,
        "description": description,
        "metrics": metrics,
        "rows": list(zip(evaluation.methods, zip(*columns, strict=True), strict=True)) if metrics else [],
        "charts": [_chart(name, charts[name]) for name in (group, extra) if name in charts],
        "images": [
            {"data": _data_uri(figure_bytes(grid, ".png"), "png"), "width": round(_PIXELS * grid.get_figwidth())}
            for grid in (evaluation.grids if group == "grid" else ())
        ],
        "matrices": [(metric, _matrix(evaluation, metric)) for metric in metrics],
        "accumulated": evaluation.accumulated_mean_iou() if group == "localisation" else {},
    }


def _chart(name: str, svg: bytes) -> dict[str, Any]:
    """Return a chart as a data URI, and its width on the page."""
    points = re.search(rb'<svg[^>]* width="([\d.]+)pt"', svg)
    assert points is not None
    return {
        "name": name,
        "image": _data_uri(svg),
        "width": round(_PIXELS * float(points[1]) / 72),
    }


def _data_uri(content: bytes, kind: str = "svg+xml") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _column(evaluation: Tables, metric: Metric) -> list[dict[str, Any]]:
    """Return a cell per method: its estimate, flagged if best or not clearly better than the random map."""
    ranking = evaluation.ranking(metric.name)
    best = [method for method, mean in ranking if decimal(mean) == decimal(ranking[0][1])]  # as displayed
    cells = []
    for row in evaluation.table(metric.name):
        pair = evaluation.difference(metric.name, row.method, "random")
        cells.append(
            {
                "estimate": row.estimate,
                "measured": evaluation.is_measured(row.method, metric),
                "best": row.method in best,
                "level": pair is not None and _state(pair, metric) != "better",
            }
        )
    return cells


def _matrix(evaluation: Tables, metric: Metric) -> list[tuple[str, list[dict[str, str]]]]:
    """Return row minus column for all pairs, by row."""
    return [
        (row, [_cell(evaluation.difference(metric.name, row, column), metric) for column in evaluation.methods])
        for row in evaluation.methods
    ]


def _cell(pair: Difference | None, metric: Metric) -> dict[str, str]:
    if pair is None:
        return {"text": "", "state": "self", "title": ""}
    mean, low, high, above = pair.estimate.mean, pair.estimate.low, pair.estimate.high, pair.above
    if mean is None or low is None or high is None or above is None:
        return {"text": "–", "state": "unclear", "title": "not defined"}
    title = f"{decimal(low)} … {decimal(high)}; higher on {above:.0%} of {pair.estimate.count} images"
    return {"text": decimal(mean, signed=True), "state": _state(pair, metric), "title": title}


def _state(pair: Difference, metric: Metric) -> str:
    """Return "better" or "worse" if the first method clearly is, otherwise "unclear"."""
    if not pair.is_clear or pair.estimate.mean is None:
        return "unclear"
    return "better" if (pair.estimate.mean > 0) == (metric.better == "higher") else "worse"
