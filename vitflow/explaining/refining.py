"""Refinement of maps by patch affinity, and averaging over shifted crops."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, VitflowError, VitflowWarning, check_known
from vitflow.explaining.choices import Chosen
from vitflow.explaining.maps import Maps
from vitflow.explaining.method_table import Method
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targeted_trace import PlacedImage, TargetedTrace
from vitflow.images.geometry import Placement
from vitflow.images.preprocessing import InputSpec
from vitflow.methods.refinement import AFFINITIES, Affinity, AffinityName, co_attention, key_affinity, refine
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.trace import Trace

_LEFT_OUT = "left out"
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
    if steps and trace.refinement_requested and method.refined == "within":
        affinity_of(trace, affinity, (trace.layout.rows, trace.layout.cols))
    result = method.load()(trace, **method.function_options(options))
    maps = result if isinstance(result, Maps) else Maps(result)
    batch = 0 if trace.pixels is None else len(trace.pixels)
    if steps and method.refined in ("after", "positive") and maps.grids.ndim == 3 and len(maps.grids) == batch:
        maps = _refined(maps, trace, steps, affinity, least=0.0 if method.refined == "positive" else None)
    facts = maps.facts or [{}] * batch
    left = [str(fact.get("refinement", "")).startswith(_LEFT_OUT) for fact in facts]
    return maps, [{**options, "refine": 0} if out else dict(options) for out in left]


def _refined(maps: Maps, trace: TargetedTrace, steps: int, name: AffinityName, *, least: float | None) -> Maps:
    """Refine maps after clamping them at `least`, and add facts to maps that are not refined or nearly constant."""
    requested, (rows, cols) = trace.refinement_requested, maps.grids.shape[1:]
    facts = maps.facts or [{}] * len(maps.grids)
    try:
        affinity = affinity_of(trace, name, (rows, cols))
    except UnsupportedModelError as error:
        if requested:
            raise
        return replace(maps, facts=[fact | {"refinement": f"{_LEFT_OUT}: {error}"} for fact in facts])
    uniform = affinity.nearly_uniform
    if requested and uniform.any():
        warnings.warn(
            f"T{_UNIFORM[1:]}, so that a refined map is nearly constant: use refine=0.",
            VitflowWarning,
            stacklevel=2,
        )
    grids = refine(maps.grids if least is None else maps.grids.clamp_min(least), affinity, steps)
    if not requested:
        grids = torch.where(uniform.to(grids.device).view(-1, 1, 1), maps.grids.detach(), grids)
    text = _UNIFORM if requested else f"{_LEFT_OUT}: {_UNIFORM}"
    notes = [{"refinement": text} if is_uniform else {} for is_uniform in uniform.tolist()]
    return replace(maps, grids=grids, facts=[fact | note for fact, note in zip(facts, notes, strict=True)])


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
    dense = [(index, layer) for index, layer in enumerate(trace.layers) if _is_dense(layer, grid)]
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


def _is_dense(layer: AttentionLayer, grid: tuple[int, int]) -> bool:
    """Return True if all patches of the grid attend to each other in a layer."""
    try:
        tokens = layer.tokens
    except VitflowError:  # its token layout is unknown
        return False
    return tokens.dense and (tokens.keys.rows, tokens.keys.cols) == grid


def explain_shifted(
    explain: Callable[[Sequence[PlacedImage], Chosen, Any], list[list[Saliency]]],
    chosen: Chosen,
    image: PlacedImage,
    maps: Sequence[Saliency],
    spec: InputSpec,
) -> list[Saliency]:
    """Replace the maps of methods with shifts by their means over shifted crops.

    Args:
        explain: returns the maps of images by method and target: [images][methods and targets].
        chosen: the methods.
        image: the image, placed without a shift.
        maps: its maps without a shift.
        spec: input size and patch size of the model.

    Raises:
        UnsupportedModelError: as for `moves`.
    """
    if image.denormalised or spec.channels not in (1, 3):
        raise OptionError(
            "shifts require an image, got a tensor or an array of bands: pass the tensor's image as original=, or use "
            "shifts=0."
        )
    pixels = moves(spec)
    crops = [replace(image, placement=moved(image.placement, move), pixels=None) for move in pixels]
    means = []
    for saliency in maps:
        if saliency.options.get("shifts"):
            targets = None if saliency.target is None else np.full(len(crops), saliency.target)
            unshifted = next(each for each in chosen if each.name == saliency.method)
            method = unshifted.with_options(**{**saliency.options, "shifts": 0})
            shifted = [by_crop[0] for by_crop in explain(crops, [method], targets)]
            patch = np.divide(image.placement.input_size, saliency.grid.shape)  # height and width
            aligned = [realigned(each.grid, move / patch) for each, move in zip(shifted, pixels, strict=True)]
            grid = np.mean(aligned, axis=0).astype(np.float32)
            saliency = replace(saliency, grid=grid, seconds=saliency.seconds + sum(each.seconds for each in shifted))
        means.append(saliency)
    return means


def moves(spec: InputSpec) -> list[tuple[int, int]]:
    """Return the four shifts (down, right) by half a patch, in pixels of the model input.

    Raises:
        UnsupportedModelError: the patch size is unknown, or one pixel.
    """
    size: Any = spec.patch_size
    height, width = (size, size) if isinstance(size, int) else size or (0, 0)
    if min(height, width) < 2:
        raise UnsupportedModelError(f"shifts require a patch size of at least 2 pixels, got {size}: use shifts=0.")
    return [(down * (height // 2), right * (width // 2)) for down in (-1, 1) for right in (-1, 1)]


def moved(placement: Placement, move: tuple[int, int]) -> Placement:
    """Shift a crop by (down, right) pixels of the model input; outside of the image it is padded.

    >>> moved(Placement((100, 100), (64, 64), (8, 8), (48, 48)), (4, -4)).offset
    (12, 4)
    """
    return replace(placement, offset=(placement.offset[0] + move[0], placement.offset[1] + move[1]))


def realigned(
    grid: NDArray[np.floating[Any]], move: Sequence[float] | NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """Resample the map of a shifted crop to the patches of the unshifted crop, by overlapping area.

    Args:
        grid: the map of the shifted crop, [rows, cols].
        move: shift down and right, in patches, below 1 each.

    Returns:
        [rows, cols]: each patch is the mean of the shifted patches that cover it.

    >>> realigned(np.array([[1.0, 3.0]]), (0.0, 0.5))
    array([[1., 2.]])
    """
    from scipy import ndimage  # slow to import: only shifts need it

    # Area weights equal linear interpolation between two patches; at the border only one patch covers.
    return np.asarray(ndimage.shift(grid.astype(np.float64), move, order=1, mode="nearest"))
