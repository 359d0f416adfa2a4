"""What stands below a view of a text: the method, how it departs from its publication, what it explains, the model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitflow.explaining.captions import method_in_words
from vitflow.text.method_table import TEXT_METHODS


def caption(
    method: str,
    options: Mapping[str, Any],
    model: str,
    *,
    what: str | None = None,
    target: str | None = None,
    probability: float | None = None,
) -> str:
    """One line of words; a class-specific method is told with its target and the model's probability of that.

    Args:
        method: a method for texts.
        options: its options.
        model: the model's id.
        what: what is shown, instead of the method's title.
        target: what a class-specific method explains.
        probability: the model's probability of it.

    >>> options = {"head_fusion": "max", "value_weighted": False}
    >>> caption("gae", options, "bert", target="table", probability=0.25)
    'GAE (max over heads) · for “table”, probability 25.0% · bert'
    """
    chosen = TEXT_METHODS[method]
    likely = "" if probability is None else f", probability {probability:.1%}"
    explained = "" if target is None else f"for “{target}”{likely}"
    shown = method_in_words(replace(chosen, title=what or chosen.title), options)
    return " · ".join(filter(None, [shown, explained, model]))
