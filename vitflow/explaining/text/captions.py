"""What stands below a view of a text: the method with its options, what it explains, and the model."""

from collections.abc import Mapping
from typing import Any

from vitflow.explaining.asking.captions import in_words


def caption(
    method: str, options: Mapping[str, Any], model: str, *, target: str | None = None, probability: float | None = None
) -> str:
    """One line of words; a class-specific method is told with its target and the model's probability of that.

    >>> caption("gae", {"head_fusion": "mean", "value_weighted": False}, "bert", target="table", probability=0.25)
    'gae (head fusion mean, not value weighted) · for “table”, probability 25.0% · bert'
    """
    listed = in_words(options)
    likely = "" if probability is None else f", probability {probability:.1%}"
    explained = "" if target is None else f"for “{target}”{likely}"
    return " · ".join(filter(None, [f"{method} ({listed})" if listed else method, explained, model]))
