"""Contrast: the map of one class less the map of another."""

from dataclasses import replace
from math import inf, isfinite, log

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import SameClassError
from vitflow.explaining.answer import Answer
from vitflow.explaining.saliency import Saliency


def contrasted(first: Saliency, second: Saliency, activation: str = "softmax") -> Saliency:
    """What speaks for one class less what speaks for another, each map scaled by the sum of its absolute values.

    Raises:
        SameClassError: both maps are of one class.
    """
    if first.target is None or second.target is None or first.target == second.target:
        raise SameClassError(
            f"Expected two classes to set against each other, got {first.label} twice: choose another one on one side."
        )
    value = _number(first.answer, activation) - _number(second.answer, activation)
    answer = Answer(
        f"{first.label} against {second.label}",
        value if isfinite(value) else None,  # a probability was rounded to 0 or 1
        {"probability": "logits", "cosine": "in cosine"}.get(first.answer.unit, first.answer.unit),
        predicted=first.predicted,
        sides=(first.target, second.target),
        opposed=(first.label, second.label),
    )
    return replace(
        first,
        grid=(_shares(first.grid) - _shares(second.grid)).astype(np.float32),
        answer=answer,
        facts={name: fact for name, fact in first.facts.items() if name != "note"},
        seconds=first.seconds + second.seconds,
    )


def _shares(grid: NDArray[np.float32]) -> NDArray[np.float64]:
    values = grid.astype(np.float64)
    total = np.abs(values).sum()
    return values / total if total > 0 else values


def _number(answer: Answer, activation: str) -> float:
    """A logit from its probability, that of a softmax up to what all classes have in common; others as they are."""
    probability = answer.number
    if probability is not None and answer.unit != "probability":
        return probability
    if not probability:
        return -inf
    if activation == "softmax":
        return log(probability)
    return inf if probability == 1.0 else log(probability) - log(1.0 - probability)
