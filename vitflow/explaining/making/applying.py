"""From a recorded pass to results: what the model answered, and each method's maps beside that answer."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitflow.errors import ModelError, ShapeError
from vitflow.explaining.asking.answer import Answer
from vitflow.explaining.asking.choices import Chosen, ChosenMethod
from vitflow.explaining.asking.method import Method
from vitflow.explaining.asking.targets import doubt
from vitflow.explaining.making.asked import AskedTrace
from vitflow.explaining.making.refining import make_maps
from vitflow.explaining.saliency import Saliency
from vitflow.models.answers import Answers
from vitflow.models.facts import ModelFacts
from vitflow.pictures.geometry import Placement
from vitflow.recording.trace import Trace


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPicture:
    """A picture that was read and placed, ready for the model."""

    name: str
    image: NDArray[np.uint8]
    placement: Placement


@dataclass(frozen=True, slots=True, eq=False)
class Answered:
    """A forward pass that was recorded, and what it answered.

    Attributes:
        trace: the pass.
        pictures: those that it was for.
        facts: of the model.
        answers: what the maps are of.
        numbers: what the model answered, [batch, classes].
        probabilities: what is told beside them, [batch, classes]; None where the model has no classes.
        predict: maps model inputs to probabilities, by running the model again.
        log_odds: likewise, to log-odds.
        seconds: that the pass took.
    """

    trace: Trace
    pictures: Sequence[PlacedPicture]
    facts: ModelFacts
    answers: Answers
    numbers: Tensor | None
    probabilities: Tensor | None
    predict: Callable[[Tensor], Tensor]
    log_odds: Callable[[Tensor], Tensor]
    seconds: float


def probabilities_of(logits: object, facts: ModelFacts) -> Tensor | None:
    """What is told of a model's answers [batch, classes], as a rule probabilities; None where it has no classes.

    Raises:
        ModelError: it returned no tensor, or one with numbers that are not finite.
    """
    if not isinstance(logits, Tensor):
        raise ModelError(f"Expected {facts.id} to return one tensor of logits, got none.")
    if facts.answers.count == 0 or logits.ndim != 2:
        return None
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"{facts.id} returned NaN or infinite logits for this picture: its weights or its precision "
            f"({logits.dtype}) are at fault, and no map of it would mean anything."
        )
    return facts.answers.told(logits)


def apply_methods(answered: Answered, chosen: Chosen, wanted: Sequence[Tensor | None]) -> list[list[Saliency]]:
    """The maps of each picture, method by method, and for class-specific methods target by target.

    Args:
        answered: the pass.
        chosen: methods and their options.
        wanted: class indices [batch] per target; None where the model has no classes.
    """
    gradients = any("gradients" in one.method.needs for one in chosen)
    found: list[list[list[Saliency]]] = [[[] for _ in chosen] for _ in answered.pictures]
    # The same for all targets.
    placements = [picture.placement for picture in answered.pictures]
    kept: dict[str, Any] = {"facts": answered.facts, "placements": placements, "answered": {}}
    kept["answers"] = answered.answers
    for number, target in enumerate(wanted):
        trace = AskedTrace.of(answered.trace, target, answered.predict, answered.log_odds, **kept)
        started = time.perf_counter()
        if gradients:
            trace.backward()  # once for all methods, and each method's seconds hold it
        backward = time.perf_counter() - started
        for position, one in enumerate(chosen):
            if number and not one.method.class_specific:
                continue
            seconds = answered.seconds + (backward if "gradients" in one.method.needs else 0.0)
            for maps, saliency in zip(found, _apply(one, trace, answered, seconds), strict=True):
                maps[position].append(saliency)
        trace.forget_gradients()
    return [[saliency for maps in of_picture for saliency in maps] for of_picture in found]


def _apply(one: ChosenMethod, trace: AskedTrace, answered: Answered, seconds: float) -> list[Saliency]:
    """One method for the trace's targets: a map for each picture. `seconds` is what the batch has taken before."""
    started = time.perf_counter()
    method, pictures = one.method, answered.pictures
    trace.refinement_asked = "refine" in one.asked
    maps, used = make_maps(method, one.options, trace)
    grids = _check_grids(maps.grids, method, len(pictures))
    seconds = (seconds + time.perf_counter() - started) / len(pictures)
    readout = {"readout": trace.pooling} if method.needs & {"attention", "heads"} else {}
    answers = [_answer(answered, trace.targets, index) for index in range(len(pictures))]
    return [
        Saliency(
            grid=grids[index],
            placement=picture.placement,
            image=picture.image,
            source=picture.name,
            model=answered.facts.id,
            method=method.name,
            options=used[index],
            class_specific=method.class_specific,
            facts=readout
            | (_patch_grid(trace, used[index], grids[index].shape) if readout else {})
            | (maps.facts[index] if maps.facts else {})
            | _doubts(method, answers[index], answered)
            | _asked(method, answers[index], answered, index),
            seconds=seconds,
            answer=answers[index],
            reference=_reference(answers[index], answered),
        )
        for index, picture in enumerate(pictures)
    ]


def _patch_grid(trace: Trace, options: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, list[int]]:
    """The patches among which one was asked for, where the map has others."""
    if options.get("patch") is None or (trace.top.rows, trace.top.cols) == shape:
        return {}
    return {"patch_grid": [trace.top.rows, trace.top.cols]}


def _answer(answered: Answered, target: Tensor | None, index: int) -> Answer:
    if answered.probabilities is None or target is None:
        return Answer()
    return Answer.of(answered.probabilities[index], int(target[index]), answered.facts.answers)


def _doubts(method: Method, answer: Answer, answered: Answered) -> dict[str, str]:
    """The fact that a class which was asked for is one that the model all but rules out."""
    if not method.class_specific or answered.probabilities is None or answer.probability is None or answer.is_predicted:
        return {}
    note = doubt(answer.probability, answered.probabilities.shape[1])
    return {} if note is None else {"note": note}


def _reference(answer: Answer, answered: Answered) -> NDArray[np.uint8] | None:
    """The picture that an answer compares with, where it does."""
    pictures = answered.facts.answers.pictures
    return pictures[answer.index] if pictures and answer.index is not None else None


def _asked(method: Method, answer: Answer, answered: Answered, index: int) -> dict[str, Any]:
    """What else is told of an answer: the cosine behind a share of a softmax, and what the map's number is less."""
    own = answered.facts.answers
    told: dict[str, Any] = {}
    if own.reading == "softmax" and own.scale != 1.0 and answered.numbers is not None and answer.index is not None:
        told["cosine"] = round(float(answered.numbers[index, answer.index]) / own.scale, 4)
    if method.class_specific and answered.answers is not own:
        told["against"] = own.against
    return told


def _check_grids(grids: Tensor, method: Method, batch: int) -> NDArray[np.float32]:
    array: NDArray[np.float32] = grids.detach().float().cpu().numpy()
    if array.ndim != 3 or len(array) != batch:
        raise ShapeError(f"Expected maps [{batch}, rows, cols] from method {method.name}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ShapeError(f"Method {method.name} gave a map with NaN or infinite values.")
    return array
