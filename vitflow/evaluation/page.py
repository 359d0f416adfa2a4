"""The page of an evaluation: tables, differences and charts in one self-contained HTML file that needs no network."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitflow.evaluation.metrics import CORRELATION_SILENT, Metric
from vitflow.evaluation.statistics import CONFIDENCE, Difference
from vitflow.evaluation.tables import Tables
from vitflow.images.charts import darkened
from vitflow.images.figures import figure_bytes
from vitflow.images.typesetting import decimal
from vitflow.viewer.pages import write_html

_TITLES = {
    "localisation": "Localisation",
    "faithfulness": "Faithfulness",
    "sanity": "Sanity",
    "grid": "One class against another",
    "correlation": "Rank correlation by layer",
}
_QUESTIONS = {
    "localisation": "Is the map on the object?",
    "faithfulness": "Does the score drop without the patches that the map ranks highest?",
    "sanity": "Does the map depend on the model, follow the image, and distinguish classes?",
    "grid": "With several objects, is the map on the target?",
    "correlation": "Do attention, rollout and flow of each layer rank patches as the references do?",
}
# Pixels of the page per inch of a figure, the same for all figures.
_PIXELS = 116
# Further charts of a group.
_FURTHER = {"faithfulness": "curves", "sanity": "randomisation"}


def write_page(evaluation: Tables, path: Path, charts: Mapping[str, bytes], *, answer: str = "") -> Path:
    """Write the page.

    Args:
        evaluation: the evaluation.
        path: the file to write.
        charts: SVG by name, from `save_charts`.
        answer: the verdict, as a sentence.
    """
    return write_html(
        path,
        "evaluation",
        evaluation=evaluation,
        answer=answer,
        groups=_groups(evaluation, charts),
        confidence=round(100 * CONFIDENCE),
        baselines=sum(map(evaluation.is_baseline, evaluation.methods)),
    )


def _groups(evaluation: Tables, drawn: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return the content of each group of metrics on the page."""
    charts = {name: _chart(name, svg) for name, svg in drawn.items()}
    groups = []
    for group in evaluation.groups:
        metrics = [metric for metric in evaluation.metrics if metric.group == group]
        names = [group, _FURTHER.get(group, "")]
        groups.append(
            {
                "name": group,
                "title": _TITLES[group],
                "question": _QUESTIONS[group],
                "metrics": metrics,
                "rows": _rows(evaluation, metrics),
                "charts": [charts[name] for name in names if name in charts],
                "images": [
                    {"data": _data_uri(figure_bytes(one, ".png"), "png"), "width": round(_PIXELS * one.get_figwidth())}
                    for one in evaluation.grids
                ]
                if group == "grid"
                else [],
                "matrices": [_matrix(evaluation, metric) for metric in metrics],
                "accumulated": evaluation.accumulated_mean_iou() if group == "localisation" else {},
            }
        )
    if evaluation.correlation is not None:
        further: dict[str, Any] = {
            "name": "correlation",
            "title": _TITLES["correlation"],
            "question": _QUESTIONS["correlation"],
            "charts": [charts["correlation"]] if "correlation" in charts else [],
            "tables": evaluation.correlation.tables(),
            "images": evaluation.correlation.images,
            "silent": CORRELATION_SILENT,
        }
        groups.append(further)
    return groups


def _chart(name: str, svg: bytes) -> dict[str, Any]:
    """Return a chart for light and for dark screens, as data URIs, with its width on the page."""
    points = re.search(rb'<svg[^>]* width="([\d.]+)pt"', svg)
    assert points is not None
    return {
        "name": name,
        "light": _data_uri(svg),
        "dark": _data_uri(darkened(svg)),
        "width": round(_PIXELS * float(points[1]) / 72),
    }


def _data_uri(content: bytes, kind: str = "svg+xml") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def _rows(evaluation: Tables, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return one line per method: its estimates, and whether they are the best or no better than random."""
    tables = {metric.name: evaluation.table(metric.name) for metric in metrics}
    best = {metric.name: _best(evaluation, metric) for metric in metrics}
    level = {metric.name: _level_with_random(evaluation, metric) for metric in metrics}
    return [
        {
            "method": method,
            "departures": evaluation.departures.get(method),
            "baseline": evaluation.is_baseline(method),
            "cells": [
                {
                    "estimate": tables[metric.name][number].estimate,
                    "best": method in best[metric.name],
                    "measured": evaluation.is_measured(method, metric),
                    "level": method in level[metric.name],
                }
                for metric in metrics
            ],
        }
        for number, method in enumerate(evaluation.methods)
    ]


def _best(evaluation: Tables, metric: Metric) -> list[str]:
    """Return the methods with the best displayed mean; baselines and blurred copies do not compete."""
    ranking = evaluation.ranking(metric.name)
    return [name for name, mean in ranking if decimal(mean) == decimal(ranking[0][1])]


def _level_with_random(evaluation: Tables, metric: Metric) -> set[str]:
    """Methods that are not clearly better than the random map on the same images."""
    sign = 1.0 if metric.better == "higher" else -1.0
    level = set()
    for one in evaluation.differences(metric.name):
        if "random" not in (one.first, one.second):
            continue
        way = sign if one.second == "random" else -sign
        ahead = one.is_clear and one.estimate.mean is not None and way * one.estimate.mean > 0
        if not ahead:
            level.add(one.first if one.second == "random" else one.second)
    return level


def _matrix(evaluation: Tables, metric: Metric) -> dict[str, Any]:
    """Row minus column for all pairs; a cell is better, worse or unclear."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for one in evaluation.differences(metric.name):
        cells[one.first, one.second] = _difference(one, metric, 1.0)
        cells[one.second, one.first] = _difference(one, metric, -1.0)
    empty = {"text": "", "state": "self", "title": ""}
    return {
        "metric": metric,
        "rows": [
            {"method": row, "cells": [cells.get((row, column), empty) for column in evaluation.methods]}
            for row in evaluation.methods
        ],
    }


def _difference(one: Difference, metric: Metric, sign: float) -> dict[str, str]:
    mean, low, high = one.estimate.mean, one.estimate.low, one.estimate.high
    if mean is None or low is None or high is None or one.above is None:
        return {"text": "–", "state": "unclear", "title": "not defined"}
    better = (mean * sign > 0) == (metric.better == "higher")
    state = ("better" if better else "worse") if one.is_clear else "unclear"
    ends = sorted((low * sign, high * sign))
    above = one.above if sign > 0 else 1.0 - one.above
    title = f"{decimal(ends[0])} … {decimal(ends[1])}; higher on {above:.0%} of {one.estimate.count} images"
    return {"text": decimal(mean * sign, signed=True), "state": state, "title": title}
