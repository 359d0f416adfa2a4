"""From a recorded pass to results: what the model answered, and each method's maps beside that answer."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import ModelError, ShapeError
from vitflow.explaining.choices import Chosen, ChosenMethod
from vitflow.explaining.method import Method
from vitflow.explaining.method_table import ROLLOUT
from vitflow.explaining.refining import make_maps
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.explaining.targets import Score, doubt
from vitflow.models.blocks import block_norm, block_paths, layer_output
from vitflow.models.facts import ModelFacts
from vitflow.models.outputs import Outputs


def needs_gradients(chosen: Chosen) -> bool:
    """Whether a backward pass is needed."""
    return any("gradients" in one.method.needs for one in chosen)


def starts_at_readout(one: ChosenMethod) -> bool:
    """Whether a map starts at the tokens that the output is computed from."""
    return bool(one.method.needs & {"attention", "heads"}) and one.options.get("patch") is None


def recorded_for(chosen: Chosen, model: nn.Module) -> dict[str, Any]:
    """What to tell `record_attention` so that it keeps what some methods need, taken together."""
    needs = frozenset[str]().union(*(one.method.needs for one in chosen))
    gradients = "gradients" in needs
    single = any(one.options.get("head") is not None for one in chosen)
    every_head = single or "heads" in needs or (gradients and "attention" in needs)
    fusions = {
        (str(one.options.get("head_fusion", "mean")), one.options.get("value_weighted", False))
        for one in chosen
        if "attention" in one.method.needs
    }
    affinities = {one.options["affinity"] for one in chosen if one.options.get("refine")}
    keys, means = bool(affinities - {"attention"}), bool(affinities - {"keys"})
    if means:
        fusions.add(("mean", False))
    features = {block_norm(model, one.options["layer"]) for one in chosen if "features" in one.method.needs}
    for one in chosen:
        if "tokens" in one.method.needs:
            layer = one.options.get("layer")  # without one, every layer's
            features |= set(block_paths(model) if layer is None else [layer_output(model, layer)[0]])
    return {
        "attention": bool(needs & {"attention", "heads"}) or means or keys,
        "fusions": () if every_head else fusions,
        "values": every_head and any(one.options.get("value_weighted") for one in chosen),
        "gradients": gradients,
        "features": sorted(features),
        "keys": keys,
        "residual": 0.0 if every_head or means or keys or gradients else _residual_of_one_product(chosen),
    }


def _residual_of_one_product(chosen: Chosen) -> float:
    """The share of the residual connection, where all that is seen of attention goes into one and the same rollout."""
    named = ("head_fusion", "value_weighted", "residual", "discard_ratio", "start_layer", "end_layer")
    products: list[list[Any]] = [
        [one.method.function, *(one.options.get(name) for name in named)]
        for one in chosen
        if "attention" in one.method.needs
    ]
    if not products or any(product != products[0] for product in products[1:]):
        return 0.0
    function, _, _, residual, *others = products[0]
    return residual if [function, *others] == [ROLLOUT, 0.0, 1, -1] else 0.0


def probabilities_of(logits: object, facts: ModelFacts) -> Tensor | None:
    """What is told of a model's answers [batch, classes], as a rule probabilities; None where it has no classes.

    Raises:
        ModelError: it returned no tensor, or one with numbers that are not finite.
    """
    if not isinstance(logits, Tensor):
        raise ModelError(f"Expected {facts.id} to return one tensor of logits, got none.")
    if facts.outputs.count == 0 or logits.ndim != 2:
        return None
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"{facts.id} returned NaN or infinite logits for this image: its weights or its precision "
            f"({logits.dtype}) are at fault, and no map of it would mean anything."
        )
    return facts.outputs.scores(logits)


def apply_methods(trace: TargetedTrace, chosen: Chosen, wanted: Sequence[Tensor | None]) -> list[list[Saliency]]:
    """The maps of each image, method by method, and for class-specific methods target by target.

    Args:
        trace: the pass.
        chosen: methods and their options.
        wanted: class indices [batch] per target; None where the model has no classes.
    """
    gradients = needs_gradients(chosen)
    found: list[list[list[Saliency]]] = [[[] for _ in chosen] for _ in trace.images]
    for number, target in enumerate(wanted):
        trace.targets = target
        started = time.perf_counter()
        if gradients:
            trace.backward()  # once for all methods, and each method's seconds hold it
        backward = time.perf_counter() - started
        for position, one in enumerate(chosen):
            if number and not (one.method.class_specific or _reads_target(one, trace)):
                continue
            seconds = trace.seconds + (backward if "gradients" in one.method.needs else 0.0)
            for maps, saliency in zip(found, _apply(one, trace, seconds), strict=True):
                maps[position].append(saliency)
        trace.forget_gradients()
    return [[saliency for maps in of_image for saliency in maps] for of_image in found]


def _reads_target(one: ChosenMethod, trace: TargetedTrace) -> bool:
    """Whether a map starts at tokens that depend on the target, though its method does not."""
    return starts_at_readout(one) and trace.reads_target


def _apply(one: ChosenMethod, trace: TargetedTrace, seconds: float) -> list[Saliency]:
    """One method for the trace's targets: a map for each image. `seconds` is what the batch has taken before."""
    started = time.perf_counter()
    method, batch = one.method, len(trace.images)
    trace.refinement_requested = "refine" in one.given
    maps, used = make_maps(method, one.options, trace)
    grids = _check_grids(maps.grids, method, batch)
    seconds = (seconds + time.perf_counter() - started) / batch
    assert trace.facts is not None
    told, found = trace.facts.outputs, []
    readouts = trace.readout_words(trace.targets) if starts_at_readout(one) else []
    for index, image in enumerate(trace.images):
        answer = Score()
        if trace.probabilities is not None and trace.targets is not None:
            answer = Score.of(trace.probabilities[index], int(trace.targets[index]), told)
        facts: dict[str, Any] = {"readout": readouts[index]} if readouts else {}
        if trace.facts.note:
            facts["model_note"] = trace.facts.note
        by_attention = bool(method.needs & {"attention", "heads"})
        if (
            by_attention
            and used[index].get("patch") is not None
            and (trace.top.rows, trace.top.cols) != grids[index].shape
        ):
            facts["patch_grid"] = [trace.top.rows, trace.top.cols]  # among which one was asked for
        saliency = Saliency(
            grid=grids[index],
            placement=image.placement,
            image=image.image,
            source=image.name,
            model=trace.facts.id,
            method=method.name,
            options=used[index],
            class_specific=method.class_specific or _reads_target(one, trace),
            score=answer,
            facts=facts | (maps.facts[index] if maps.facts else {}) | _beside(answer, method, trace, told, index),
            seconds=seconds,
            reference=told.images[answer.index] if told.images and answer.index is not None else None,
        )
        found.append(saliency)
    return found


def _beside(answer: Score, method: Method, trace: TargetedTrace, told: Outputs, index: int) -> dict[str, Any]:
    """What else is to be known of an answer: that the model all but rules the class out, where it was asked for; the
    cosine behind a share of a softmax; and what the map's number is less.
    """
    facts: dict[str, Any] = {}
    if method.class_specific and trace.probabilities is not None and not answer.is_predicted:
        note = None if answer.probability is None else doubt(answer.probability, trace.probabilities.shape[1])
        facts |= {} if note is None else {"note": note}
    if told.activation == "softmax" and told.scale != 1.0 and trace.numbers is not None and answer.index is not None:
        facts["cosine"] = round(float(trace.numbers[index, answer.index]) / told.scale, 4)
    if method.class_specific and trace.outputs is not told:
        facts["against"] = told.against
    return facts


def _check_grids(grids: Tensor, method: Method, batch: int) -> NDArray[np.float32]:
    array: NDArray[np.float32] = grids.detach().float().cpu().numpy()
    if array.ndim != 3 or len(array) != batch:
        raise ShapeError(f"Expected maps [{batch}, rows, cols] from method {method.name}, got {array.shape}.")
    if not np.isfinite(array).all():
        raise ShapeError(f"Method {method.name} gave a map with NaN or infinite values.")
    return array
