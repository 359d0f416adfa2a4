"""The step after a method's own function: its map spread among the patches that the model treats alike."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from vitflow.errors import ShapeError, UnsupportedModelError, VitflowError, VitflowWarning, check_known
from vitflow.explaining.asked import AskedTrace
from vitflow.explaining.maps import Maps
from vitflow.explaining.method import Method
from vitflow.methods.refinement import AFFINITIES, Affinity, AffinityName, co_attention, key_affinity, refine
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.trace import Trace

_LEFT_OUT = "left out"
_UNIFORM = "the model treats all patches nearly alike"


def make_maps(method: Method, options: Mapping[str, Any], trace: AskedTrace) -> tuple[Maps, list[dict[str, Any]]]:
    """Run a method on a trace, and refine its maps as its options say.

    Args:
        method: any of the table.
        options: all of its options.
        trace: what was recorded, with the head means or the keys that the affinity needs. Where refinement was not
            asked for and does not apply, or would make a map nearly constant, the map is left as it is, and a fact
            tells of it.

    Returns:
        The maps, and the options that hold for the map of each picture.

    Raises:
        UnsupportedModelError: refinement was asked for and does not apply.
    """
    steps, affinity = options.get("refine", 0), options.get("affinity", "attention")
    if steps and trace.refinement_asked and method.refined == "within":
        affinity_of(trace, affinity, (trace.layout.rows, trace.layout.cols))
    found = method.load()(trace, **method.own(options))
    maps = found if isinstance(found, Maps) else Maps(found)
    batch = 0 if trace.pixels is None else len(trace.pixels)
    if steps and method.refined in ("after", "positive") and maps.grids.ndim == 3 and len(maps.grids) == batch:
        maps = _refined(maps, trace, steps, affinity, least=0.0 if method.refined == "positive" else None)
    facts = maps.facts or [{}] * batch
    left = [str(own.get("refinement", "")).startswith(_LEFT_OUT) for own in facts]
    return maps, [{**options, "refine": 0} if out else dict(options) for out in left]


def _refined(maps: Maps, trace: AskedTrace, steps: int, name: AffinityName, *, least: float | None) -> Maps:
    """The maps refined, values below the least cut; and facts of those that are not, or that show little after it."""
    asked, (rows, cols) = trace.refinement_asked, maps.grids.shape[1:]
    facts = maps.facts or [{}] * len(maps.grids)
    try:
        affinity = affinity_of(trace, name, (rows, cols))
    except UnsupportedModelError as error:
        if asked:
            raise
        return Maps(maps.grids, [own | {"refinement": f"{_LEFT_OUT}: {error}"} for own in facts])
    uniform = affinity.nearly_uniform
    if asked and uniform.any():
        warnings.warn(
            f"T{_UNIFORM[1:]}, and a map that is refined among them is nearly constant: use refine=0.",
            VitflowWarning,
            stacklevel=2,
        )
    grids = refine(maps.grids if least is None else maps.grids.clamp_min(least), affinity, steps)
    if not asked:
        grids = torch.where(uniform.to(grids.device).view(-1, 1, 1), maps.grids.detach(), grids)
    words = _UNIFORM if asked else f"{_LEFT_OUT}: {_UNIFORM}"
    told = [{"refinement": words} if one else {} for one in uniform.tolist()]
    return Maps(grids, [own | further for own, further in zip(facts, told, strict=True)])


def affinity_of(trace: Trace, name: AffinityName, grid: tuple[int, int]) -> Affinity:
    """How alike the model treats the patches of a grid, from the layers in which all of them attend to each other.

    Args:
        trace: what was recorded; it keeps the affinity, so that further methods and classes cost nothing.
        name: "attention", "keys" or "both".
        grid: rows and columns of the map.

    Raises:
        UnsupportedModelError: no such layer is left; the message says why, and what to do.
    """
    check_known("affinity", name, AFFINITIES)
    if name == "both":
        attention, keys = (affinity_of(trace, one, grid) for one in ("attention", "keys"))
        return Affinity(attention.attention, keys.keys)
    if (name, grid) not in trace.affinities:
        layers = _layers(trace, name, grid)
        patches = grid[0] * grid[1]
        try:
            if name == "attention":
                means = trace.fused("mean")
                among = [means[number][:, : each.tokens.keys.patches.stop] for number, each in layers]
                found = co_attention([one[:, :, : one.shape[1]] for one in among], patches)
            else:
                found = key_affinity(
                    [each.keys[:, each.tokens.keys.patches] for _, each in layers if each.keys is not None]
                )
        except ShapeError as error:
            raise UnsupportedModelError(f"{error} Use refine=0.") from error
        trace.affinities[name, grid] = found
    return trace.affinities[name, grid]


def _layers(trace: Trace, name: str, grid: tuple[int, int]) -> list[tuple[int, AttentionLayer]]:
    """The layers that tell which patches of a grid are alike, with their numbers from 0."""
    dense = [(number, layer) for number, layer in enumerate(trace.layers) if _holds(layer, grid)]
    useful = [
        (number, layer) for number, layer in dense if (layer.keys is not None if name == "keys" else not layer.mixed)
    ]
    if useful:
        return useful
    model = type(trace.model).__name__
    if not dense:
        what = f"in no layer of {model} do all {grid[0]} × {grid[1]} patches of the map attend to each other"
        remedy = "Use refine=0."
    elif name == "keys":
        what, remedy = f"the keys of {model} cannot be seen", "Use affinity='attention', or refine=0."
    else:
        what = f"{model} mixes its heads after the softmax, so that its attention need not be positive"
        remedy = "Use affinity='keys', or refine=0."
    raise UnsupportedModelError(f"Refinement does not apply: {what}. {remedy}")


def _holds(layer: AttentionLayer, grid: tuple[int, int]) -> bool:
    """Whether in a layer all patches of the grid attend to each other."""
    try:
        tokens = layer.tokens
    except VitflowError:  # it is not known where its tokens lie
        return False
    return tokens.dense and (tokens.keys.rows, tokens.keys.cols) == grid
