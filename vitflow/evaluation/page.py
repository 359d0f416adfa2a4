"""Write the report of an evaluation: tables, differences and charts in one self-contained HTML file."""

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitflow.evaluation.metrics import CORRELATION_SILENT, Metric
from vitflow.evaluation.statistics import CONFIDENCE, Difference
from vitflow.evaluation.tables import Tables
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
_DESCRIPTIONS = {
    "localisation": "Does the map highlight the object?",
    "faithfulness": "Does the prediction depend on the patches that the map ranks highest?",
    "sanity": "Does the map depend on the weights, follow the image and differ between classes?",
    "grid": "Among several objects, does the map highlight the target?",
    "correlation": "Do attention, rollout and flow of each layer rank patches as the references do?",
}
# CSS pixels per inch of every figure, so that their text has the same size.
_PIXELS = 116
# Additional charts of a group, after its bars.
_EXTRA = {"faithfulness": "curves", "sanity": "randomisation"}


def write_page(evaluation: Tables, path: Path, charts: Mapping[str, bytes], *, verdict: str = "") -> Path:
    """Write the page.

    Args:
        evaluation: the results to show.
        path: the HTML file.
        charts: SVG by name, as returned by `save_charts`.
        verdict: one sentence at the top of the page; see `vitflow.evaluation.verdict`.
    """
    return write_html(
        path,
        "evaluation",
        evaluation=evaluation,
        verdict=verdict,
        groups=_groups(evaluation, charts),
        confidence=round(100 * CONFIDENCE),
        baselines=sum(map(evaluation.is_baseline, evaluation.methods)),
    )


def _groups(evaluation: Tables, drawn: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """Return the template values of each group of metrics."""
    charts = {name: _chart(name, svg) for name, svg in drawn.items()}
    sections = []
    for group in evaluation.groups:
        metrics = [metric for metric in evaluation.metrics if metric.group == group]
        names = [group, _EXTRA.get(group, "")]
        sections.append(
            {
                "name": group,
                "title": _TITLES[group],
                "description": _DESCRIPTIONS[group],
                "metrics": metrics,
                "rows": _rows(evaluation, metrics),
                "charts": [charts[name] for name in names if name in charts],
                "images": [
                    {
                        "data": _data_uri(figure_bytes(grid, ".png"), "png"),
                        "width": round(_PIXELS * grid.get_figwidth()),
                    }
                    for grid in evaluation.grids
                ]
                if group == "grid"
                else [],
                "matrices": [_matrix(evaluation, metric) for metric in metrics],
                "accumulated": evaluation.accumulated_mean_iou() if group == "localisation" else {},
            }
        )
    if evaluation.correlation is not None:
        extra: dict[str, Any] = {
            "name": "correlation",
            "title": _TITLES["correlation"],
            "description": _DESCRIPTIONS["correlation"],
            "charts": [charts["correlation"]] if "correlation" in charts else [],
            "tables": evaluation.correlation.tables(),
            "images": evaluation.correlation.images,
            "silent": CORRELATION_SILENT,
        }
        sections.append(extra)
    return sections


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


def _rows(evaluation: Tables, metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """Return a row per method: its estimates, flagged if best or not clearly better than the random map."""
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
                    "estimate": tables[metric.name][index].estimate,
                    "best": method in best[metric.name],
                    "measured": evaluation.is_measured(method, metric),
                    "level": method in level[metric.name],
                }
                for metric in metrics
            ],
        }
        for index, method in enumerate(evaluation.methods)
    ]


def _best(evaluation: Tables, metric: Metric) -> list[str]:
    """Return the methods with the best mean as displayed, without baselines and blurred twins."""
    ranking = evaluation.ranking(metric.name)
    return [name for name, mean in ranking if decimal(mean) == decimal(ranking[0][1])]


def _level_with_random(evaluation: Tables, metric: Metric) -> set[str]:
    """Return the methods that are not clearly better than the random map on the same images."""
    sign = 1.0 if metric.better == "higher" else -1.0
    level = set()
    for difference in evaluation.differences(metric.name):
        first, second, mean = difference.first, difference.second, difference.estimate.mean
        if "random" not in (first, second):
            continue
        direction = sign if second == "random" else -sign
        if not (difference.is_clear and mean is not None and direction * mean > 0):
            level.add(first if second == "random" else second)
    return level


def _matrix(evaluation: Tables, metric: Metric) -> dict[str, Any]:
    """Return row minus column for all pairs; each cell is better, worse or unclear."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for difference in evaluation.differences(metric.name):
        first, second = difference.first, difference.second
        cells[first, second] = _cell(difference, metric, 1.0)
        cells[second, first] = _cell(difference, metric, -1.0)
    empty = {"text": "", "state": "self", "title": ""}
    return {
        "metric": metric,
        "rows": [
            {"method": row, "cells": [cells.get((row, column), empty) for column in evaluation.methods]}
            for row in evaluation.methods
        ],
    }


def _cell(difference: Difference, metric: Metric, sign: float) -> dict[str, str]:
    estimate = difference.estimate
    mean, low, high = estimate.mean, estimate.low, estimate.high
    if mean is None or low is None or high is None or difference.above is None:
        return {"text": "–", "state": "unclear", "title": "not defined"}
    better = (mean * sign > 0) == (metric.better == "higher")
    state = ("better" if better else "worse") if difference.is_clear else "unclear"
    ends = sorted((low * sign, high * sign))
    above = difference.above if sign > 0 else 1.0 - difference.above
    title = f"{decimal(ends[0])} … {decimal(ends[1])}; higher on {above:.0%} of {estimate.count} images"
    return {"text": decimal(mean * sign, signed=True), "state": state, "title": title}
