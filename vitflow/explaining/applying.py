"""Apply methods to a recorded forward pass, and refine their maps by patch affinity."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.errors import ModelError, ShapeError, UnsupportedModelError, VitflowWarning
from vitflow.explaining.maps import Maps, TargetedTrace
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Score
from vitflow.methods.refinement import Affinity, AffinityName, co_attention, key_affinity, refine
from vitflow.models.blocks import block_norm, block_paths, layer_output
from vitflow.models.info import ModelInfo
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.trace import Trace
from vitflow.registry.choices import Chosen, ChosenMethod
from vitflow.registry.method_table import ROLLOUT, Method

# Probability below which a map of a class gets a note.
_IMPROBABLE = 0.0005
_UNIFORM = "the model treats all patches as nearly equal"
_UNDEFINED = "in each layer some patch attends to none or gets none, or has keys of 0"


def needs_gradients(chosen: Chosen) -> bool:
    """Return True if a method needs a backward pass."""
    return any("gradients" in each.method.needs for each in chosen)


def _reads_pixel_gradients(chosen: ChosenMethod) -> bool:
    """Return True if a method may read gradients with respect to the pixels, as neither attention nor features."""
    needs = chosen.method.needs
    return "gradients" in needs and not needs & {"attention", "heads", "features"}


def starts_at_readout(chosen: ChosenMethod) -> bool:
    """Return True if a map starts at the tokens from which the output is computed."""
    return bool(chosen.method.needs & {"attention", "heads"}) and chosen.options.get("patch") is None


def recording_options(chosen: Chosen, model: nn.Module, *, affinity: bool = True) -> dict[str, Any]:
    """Return the arguments of `record_attention` for all that these methods need, by default with their affinity."""
    needs = frozenset[str]().union(*(each.method.needs for each in chosen))
    gradients = "gradients" in needs
    single = any(each.options.get("head") is not None for each in chosen)
    every_head = single or "heads" in needs or (gradients and "attention" in needs)
    fusions = {
        (str(each.options.get("head_fusion", "mean")), each.options.get("value_weighted", False))
        for each in chosen
        if "attention" in each.method.needs
    }
    affinities = {
        each.options["affinity"]
        for each in chosen
        if affinity and (each.options.get("refine") or "masks" in each.options)
    }
    keys, means = bool(affinities - {"attention"}), bool(affinities - {"keys"})
    cams = [each for each in chosen if "features" in each.method.needs]
    features = {block_norm(model, each.options["layer"]) for each in cams}
    for each in chosen:
        if "tokens" in each.method.needs:
            layer = each.options.get("layer")  # None: every layer
            features |= set(block_paths(model) if layer is None else [layer_output(model, layer)[0]])
    return {
        "attention": bool(needs & {"attention", "heads"}) or means or keys,
        "fusions": () if every_head else fusions,
        "values": every_head and any(each.options.get("value_weighted") for each in chosen),
        "gradients": gradients,
        "features": sorted(features),
        "keys": keys,
        "means": means and not every_head,
        "discard_ratio": 0.0 if every_head or keys or gradients else _common_discard_ratio(chosen),
        "lower_layers": not all(map(_reads_upper_layers, chosen)),
    }


def _reads_upper_layers(chosen: ChosenMethod) -> bool:
    """Return True for rollout of the model's output from the middle layer on."""
    options = chosen.options
    whole = chosen.method.function == ROLLOUT and options["start_layer"] == "middle"
    return whole and options["patch"] is None and options["end_layer"] == -1


def _common_discard_ratio(chosen: Chosen) -> float:
    """Return the discard ratio if all methods use one rollout, so that the other values need not be kept, or 0."""
    names = ("head_fusion", "value_weighted", "residual", "discard_ratio", "start_layer", "end_layer")
    readers = [each for each in chosen if "attention" in each.method.needs]
    settings = {(each.method.function, *map(each.options.get, names)) for each in readers}
    whole = len(settings) == 1 and readers[0].method.function == ROLLOUT
    return float(readers[0].options["discard_ratio"]) if whole else 0.0


def probabilities_of(logits: Tensor, info: ModelInfo) -> Tensor | None:
    """Return the scores [batch, classes] of a model's logits, usually probabilities; None if it has no classes."""
    if info.outputs.count == 0 or logits.ndim != 2:
        return None
    if not torch.isfinite(logits).all():
        raise ModelError(f"{info.id} returned NaN or infinite {logits.dtype} logits: check its weights and precision.")
    outputs, count = info.outputs, logits.shape[1]
    if outputs.function is None and outputs.count not in (None, count):
        raise ModelError(f"Expected {outputs.count} logits from {info.id}, got {count}: create a new Explainer.")
    return info.outputs.scores(logits)


def apply_methods(trace: TargetedTrace, chosen: Chosen, targets: Sequence[Tensor | None]) -> list[list[Saliency]]:
    """Compute the maps of each image, in the order of methods and, for class-specific methods, targets [batch]."""
    gradients = needs_gradients(chosen)
    by_readout = trace.target_changes_readout(targets) if any(map(starts_at_readout, chosen)) else []
    by_image: list[list[list[Saliency]]] = [[[] for _ in chosen] for _ in trace.images]
    for index, target in enumerate(targets):
        trace.targets = target
        started = time.perf_counter()
        if gradients:
            # Shared by all methods; counted in the seconds of each.
            trace.backward(pixels=any(map(_reads_pixel_gradients, chosen)))
        backward = time.perf_counter() - started
        for position, each in enumerate(chosen):
            specific = [each.method.class_specific] * len(by_image)
            if starts_at_readout(each):  # a readout may depend on the target, even if the method does not
                specific = [one or other for one, other in zip(specific, by_readout, strict=True)]
            if index and not any(specific):
                continue
            seconds = trace.seconds + (backward if "gradients" in each.method.needs else 0.0)
            for maps, saliency in zip(by_image, _apply(each, trace, specific, seconds), strict=True):
                if not index or saliency.class_specific:
                    maps[position].append(saliency)
        trace.forget_gradients()
    return [[saliency for maps in by_method for saliency in maps] for by_method in by_image]


def _apply(chosen: ChosenMethod, trace: TargetedTrace, specific: Sequence[bool], seconds: float) -> list[Saliency]:
    """Compute one method's map for each image; `seconds` is the time that the batch has taken before."""
    started = time.perf_counter()
    method, batch = chosen.method, len(trace.images)
    trace.requested = frozenset(chosen.requested)
    maps, used = make_maps(method, chosen.options, trace)
    grids: NDArray[np.float32] = maps.grids.detach().float().cpu().numpy()
    if grids.ndim != 3 or len(grids) != batch:
        raise ShapeError(f"Expected maps [{batch}, rows, cols] from method {method.name}, got {grids.shape}.")
    if not np.isfinite(grids).all():
        raise ShapeError(f"Method {method.name} gave a map with NaN or infinite values.")
    seconds = (seconds + time.perf_counter() - started) / batch
    outputs, saliencies = trace.model_info.outputs, []
    pixels, significant = (None if each is None else each.cpu().numpy() for each in (maps.pixels, maps.significant))
    readouts = trace.readout_words(trace.targets) if starts_at_readout(chosen) else []
    rows, cols = grids.shape[1:]
    extent = trace.extent_of((rows, cols))
    for index, image in enumerate(trace.images):
        score, placement = Score(), image.placement
        if trace.probabilities is not None and trace.targets is not None:
            score = Score.of(trace.probabilities[index], int(trace.targets[index]), outputs)
        facts = {"readout": readouts[index]} if readouts else {}
        facts |= _facts(trace, chosen, index, score, (rows, cols)) | (maps.facts[index] if maps.facts else {})
        saliency = Saliency(
            grid=grids[index],
            placement=placement if extent is None else replace(placement, extent=extent),
            image=image.image,
            source=image.name,
            model=trace.model_info.id,
            method=method.name,
            options=used[index],
            class_specific=specific[index],
            score=score,
            facts=facts,
            seconds=seconds,
            pixels=None if pixels is None else pixels[index],
            significant=None if significant is None else significant[index],
            model_input=image.pixels,
            reference=outputs.images[score.index] if outputs.images and score.index is not None else None,
        )
        saliencies.append(saliency)
    return saliencies


def _facts(
    trace: TargetedTrace, chosen: ChosenMethod, index: int, score: Score, grid: tuple[int, int]
) -> dict[str, Any]:
    """Return facts about the map of one image, besides its readout and those that its method gives."""
    method, outputs, facts = chosen.method, trace.model_info.outputs, dict[str, Any]()
    if trace.is_random:
        facts["random"] = True
    if trace.model_info.note:
        facts["model_note"] = trace.model_info.note
    patch = chosen.options.get("patch")
    if patch is not None and method.needs & {"attention", "heads"} and (trace.top.rows, trace.top.cols) != grid:
        of_patch = trace.top.rows, trace.top.cols
        placement = replace(trace.images[index].placement, extent=trace.extent_of(of_patch))
        facts["patch_box"] = [round(edge, 3) for edge in placement.patch_box(patch, of_patch)]
    cosines = outputs.activation == "softmax" and outputs.scale != 1.0
    if cosines and trace.raw_scores is not None and score.index is not None:
        facts["cosine"] = round(float(trace.raw_scores[index, score.index]) / outputs.scale, 4)
    if method.class_specific and trace.outputs is not outputs:
        facts["against"] = outputs.against
    notes = [trace.range_note] if trace.range_note else []
    if method.class_specific and trace.probabilities is not None and not score.is_predicted:
        # Displayed as 0.0 %; or, with more than 1000 classes, half of chance.
        limit = min(_IMPROBABLE, 0.5 / trace.probabilities.shape[1])
        if (share := score.probability) is not None and share < limit:
            notes.append(
                f"the probability of this class is {100 * share:.2g} %: the map shows what would increase its score, "
                "not evidence for its presence"
            )
    return facts | ({"note": "; ".join(notes)} if notes else {})


def make_maps(method: Method, options: Mapping[str, Any], trace: TargetedTrace) -> tuple[Maps, list[dict[str, Any]]]:
    """Run a method on a trace and refine its maps; return them and the effective options of each image's map."""
    steps, affinity = options.get("refine", 0), options.get("affinity", "attention")
    if steps and "refine" in trace.requested and method.refine_stage == "inside":
        affinity_of(trace, affinity, (trace.layout.rows, trace.layout.cols))
    result = method.load()(trace, **method.function_options(options))
    maps = result if isinstance(result, Maps) else Maps(result)
    batch = len(trace.pixels)
    per_image = maps.grids.ndim == 3 and len(maps.grids) == batch
    if steps and per_image and method.refine_stage in ("after", "after_clamping"):
        least = 0.0 if method.refine_stage == "after_clamping" else None
        maps = _refined(maps, trace, steps, affinity, least=least)
    effective = [{}] * batch if maps.effective is None else maps.effective
    return maps, [{**options, **each} for each in effective]


def _refined(maps: Maps, trace: TargetedTrace, steps: int, name: AffinityName, *, least: float | None) -> Maps:
    """Refine maps after clamping them at `least`.

    Without an affinity of its patches a map stays as it is, and the fact `refinement` has the reason. If refinement was
    requested, that is an error for a model and a warning for an image.
    """
    requested, (rows, cols), grids = "refine" in trace.requested, maps.grids.shape[1:], maps.grids.detach()
    try:
        affinity = affinity_of(trace, name, (rows, cols), maps.first_layer)
    except UnsupportedModelError as error:
        if requested:
            raise
        reasons = [str(error)] * len(grids)
    else:
        undefined, skipped = affinity.undefined, affinity.undefined | affinity.nearly_uniform
        reasons = [_UNDEFINED if each else _UNIFORM for each in undefined.tolist()]
        reasons = [reason if each else "" for reason, each in zip(reasons, skipped.tolist(), strict=True)]
        for reason in dict.fromkeys(filter(None, reasons)) if requested else ():
            warnings.warn(f"A map is not refined: {reason}.", VitflowWarning, stacklevel=2)
        given = grids.to(skipped.device)  # some methods compute their maps on the CPU
        refined = refine(given if least is None else given.clamp_min(least), affinity, steps)
        grids = torch.where(skipped.view(-1, 1, 1), given, refined)
    facts, effective = (each or [{}] * len(grids) for each in (maps.facts, maps.effective))
    notes = [{"refinement": f"left out: {reason}"} if reason else {} for reason in reasons]
    facts = [fact | note for fact, note in zip(facts, notes, strict=True)]
    effective = [each | {"refine": 0} if note else each for each, note in zip(effective, notes, strict=True)]
    return replace(maps, grids=grids, facts=facts, effective=effective)


def affinity_of(trace: Trace, name: AffinityName, grid: tuple[int, int], first_layer: int = 1) -> Affinity:
    """Compute the affinity of the patches of a grid from the layers in which all of them attend to each other.

    Layers below `first_layer`, counted from 1, have no part in it. The trace caches it for further methods and classes.
    UnsupportedModelError if there is no such layer.
    """
    if name == "both":
        attention, keys = (affinity_of(trace, each, grid, first_layer) for each in ("attention", "keys"))
        return Affinity(attention.attention, keys.keys)
    if (key := (name, grid, first_layer)) not in trace.affinities:
        layers = _layers(trace, name, grid, first_layer)
        try:
            if name == "attention":
                means = [layer.mean for _, layer in layers if layer.mean is not None]
                if len(means) != len(layers):
                    fused = trace.fused("mean")
                    means = [fused[index] for index, _ in layers]
                patches = [layer.tokens.keys.patches for _, layer in layers]
                pairs = zip(patches, means, strict=True)
                affinity = co_attention([mean[:, among, among] for among, mean in pairs])
            else:
                affinity = key_affinity(
                    [layer.keys[:, layer.tokens.keys.patches] for _, layer in layers if layer.keys is not None]
                )
        except ShapeError as error:
            raise UnsupportedModelError(f"{error} Use refine=0.") from error
        trace.affinities[key] = affinity
    return trace.affinities[key]


def _layers(trace: Trace, name: str, grid: tuple[int, int], first_layer: int) -> list[tuple[int, AttentionLayer]]:
    """Return the layers that determine the affinity of a grid, with their indices."""
    if trace.refusal is not None:
        raise UnsupportedModelError(trace.refusal)
    dense = [
        (index, layer)
        for index, layer in enumerate(trace.layers)
        if index + 1 >= first_layer
        and (each := layer.located) is not None
        and each.dense
        and (each.keys.rows, each.keys.cols) == grid
    ]
    useful = [
        (index, layer) for index, layer in dense if (layer.keys is not None if name == "keys" else not layer.mixed)
    ]
    if useful:
        return useful
    model = type(trace.model).__name__
    if not dense:
        what = f"in no layer of {model} do all {grid[0]} × {grid[1]} patches of the map attend to each other"
        remedy = "Use refine=0."
    elif name == "keys":
        what, remedy = f"the keys of {model} are not recorded", "Use affinity='attention', or refine=0."
    else:
        what = f"{model} mixes its heads after the softmax, so that its attention need not be positive"
        remedy = "Use affinity='keys', or refine=0."
    raise UnsupportedModelError(f"Refinement does not apply: {what}. {remedy}")
