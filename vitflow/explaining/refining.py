"""Refinement of maps by patch affinity."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from vitflow.errors import ShapeError, UnsupportedModelError, VitflowWarning, check_known
from vitflow.explaining.maps import Maps
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.methods.refinement import AFFINITIES, Affinity, AffinityName, co_attention, key_affinity, refine
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.trace import Trace
from vitflow.registry.method_table import Method

_UNIFORM = "the model treats all patches as nearly equal"


def make_maps(method: Method, options: Mapping[str, Any], trace: TargetedTrace) -> tuple[Maps, list[dict[str, Any]]]:
    """Run a method on a trace and refine its maps.

    Args:
        method: a method of the table.
        options: all of its options.
        trace: the trace, with the head means or keys that the affinity requires. If refinement was not requested and
            does not apply, or would make a map nearly constant, the map is not refined, and a fact reports it.

    Returns:
        The maps, and the effective options of each image's map.

    Raises:
        UnsupportedModelError: refinement was requested and does not apply.
    """
    steps, affinity = options.get("refine", 0), options.get("affinity", "attention")
    if steps and trace.refinement_requested and method.refine_stage == "inside":
        affinity_of(trace, affinity, (trace.layout.rows, trace.layout.cols))
    result = method.load()(trace, **method.function_options(options))
    maps = result if isinstance(result, Maps) else Maps(result)
    batch = len(trace.pixels)
    per_image = maps.grids.ndim == 3 and len(maps.grids) == batch
    if steps and per_image and method.refine_stage in ("after", "after_clamping"):
        least = 0.0 if method.refine_stage == "after_clamping" else None
        maps = _refined(maps, trace, steps, affinity, least=least)
    refined = [True] * batch if maps.refined is None else maps.refined
    return maps, [dict(options) if each else {**options, "refine": 0} for each in refined]


def _refined(maps: Maps, trace: TargetedTrace, steps: int, name: AffinityName, *, least: float | None) -> Maps:
    """Refine maps after clamping them at `least`, and add facts to maps that are not refined or nearly constant."""
    requested, (rows, cols) = trace.refinement_requested, maps.grids.shape[1:]
    facts = maps.facts or [{}] * len(maps.grids)
    try:
        affinity = affinity_of(trace, name, (rows, cols))
    except UnsupportedModelError as error:
        if requested:
            raise
        left_out = [fact | {"refinement": f"left out: {error}"} for fact in facts]
        return replace(maps, facts=left_out, refined=[False] * len(facts))
    uniform: list[bool] = affinity.nearly_uniform.tolist()
    if requested and any(uniform):
        warnings.warn(
            f"T{_UNIFORM[1:]}, so that a refined map is nearly constant: use refine=0.",
            VitflowWarning,
            stacklevel=2,
        )
    grids = refine(maps.grids if least is None else maps.grids.clamp_min(least), affinity, steps)
    if not requested:
        grids = torch.where(torch.tensor(uniform).to(grids.device).view(-1, 1, 1), maps.grids.detach(), grids)
    note = {"refinement": _UNIFORM if requested else f"left out: {_UNIFORM}"}
    facts = [fact | note if is_uniform else fact for fact, is_uniform in zip(facts, uniform, strict=True)]
    return replace(maps, grids=grids, facts=facts, refined=[requested or not each for each in uniform])


def affinity_of(trace: Trace, name: AffinityName, grid: tuple[int, int]) -> Affinity:
    """Compute the affinity of the patches of a grid from the layers in which all of them attend to each other.

    Args:
        trace: the trace; it caches the affinity for further methods and classes.
        name: "attention", "keys" or "both".
        grid: rows and columns of the map.

    Raises:
        UnsupportedModelError: there is no such layer.
    """
    check_known("affinity", name, AFFINITIES)
    if name == "both":
        attention, keys = (affinity_of(trace, each, grid) for each in ("attention", "keys"))
        return Affinity(attention.attention, keys.keys)
    if (name, grid) not in trace.affinities:
        layers = _layers(trace, name, grid)
        patches = grid[0] * grid[1]
        try:
            if name == "attention":
                means = trace.fused("mean")
                rows = [means[index][:, : layer.tokens.keys.patches.stop] for index, layer in layers]
                affinity = co_attention([matrix[:, :, : matrix.shape[1]] for matrix in rows], patches)
            else:
                affinity = key_affinity(
                    [layer.keys[:, layer.tokens.keys.patches] for _, layer in layers if layer.keys is not None]
                )
        except ShapeError as error:
            raise UnsupportedModelError(f"{error} Use refine=0.") from error
        trace.affinities[name, grid] = affinity
    return trace.affinities[name, grid]


def _layers(trace: Trace, name: str, grid: tuple[int, int]) -> list[tuple[int, AttentionLayer]]:
    """Return the layers that determine the affinity of a grid, with their indices."""
    dense = [
        (index, layer)
        for index, layer in enumerate(trace.layers)
        if (each := layer.located) is not None and each.dense and (each.keys.rows, each.keys.cols) == grid
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
