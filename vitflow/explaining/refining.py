"""The step after a method's own function: its map spread among the patches that the model treats alike."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, VitflowError, VitflowWarning, check_known
from vitflow.explaining.choices import Chosen
from vitflow.explaining.maps import Maps
from vitflow.explaining.method import Method
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targeted_trace import PlacedImage, TargetedTrace
from vitflow.images.geometry import Placement
from vitflow.images.preprocessing import InputSpec
from vitflow.methods.refinement import AFFINITIES, Affinity, AffinityName, co_attention, key_affinity, refine
from vitflow.recording.layers import AttentionLayer
from vitflow.recording.trace import Trace

_LEFT_OUT = "left out"
_UNIFORM = "the model treats all patches nearly alike"


def make_maps(method: Method, options: Mapping[str, Any], trace: TargetedTrace) -> tuple[Maps, list[dict[str, Any]]]:
    """Run a method on a trace, and refine its maps as its options say.

    Args:
        method: any of the table.
        options: all of its options.
        trace: what was recorded, with the head means or the keys that the affinity needs. Where refinement was not
            asked for and does not apply, or would make a map nearly constant, the map is left as it is, and a fact
            tells of it.

    Returns:
        The maps, and the options that hold for the map of each image.

    Raises:
        UnsupportedModelError: refinement was asked for and does not apply.
    """
    steps, affinity = options.get("refine", 0), options.get("affinity", "attention")
    if steps and trace.refinement_requested and method.refined == "within":
        affinity_of(trace, affinity, (trace.layout.rows, trace.layout.cols))
    found = method.load()(trace, **method.function_options(options))
    maps = found if isinstance(found, Maps) else Maps(found)
    batch = 0 if trace.pixels is None else len(trace.pixels)
    if steps and method.refined in ("after", "positive") and maps.grids.ndim == 3 and len(maps.grids) == batch:
        maps = _refined(maps, trace, steps, affinity, least=0.0 if method.refined == "positive" else None)
    facts = maps.facts or [{}] * batch
    left = [str(own.get("refinement", "")).startswith(_LEFT_OUT) for own in facts]
    return maps, [{**options, "refine": 0} if out else dict(options) for out in left]


def _refined(maps: Maps, trace: TargetedTrace, steps: int, name: AffinityName, *, least: float | None) -> Maps:
    """The maps refined, values below the least cut; and facts of those that are not, or that show little after it."""
    asked, (rows, cols) = trace.refinement_requested, maps.grids.shape[1:]
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


def explain_shifted(
    explain: Callable[[Sequence[PlacedImage], Chosen, Any], list[list[Saliency]]],
    chosen: Chosen,
    image: PlacedImage,
    maps: Sequence[Saliency],
    spec: InputSpec,
) -> list[Saliency]:
    """One image's maps, for those methods that ask for shifts their means over the moved crops, as one batch.

    Args:
        explain: gives the maps of some images, by method and target: [images][methods and targets].
        chosen: the methods.
        image: the image, placed without a shift.
        maps: its maps without a shift.
        spec: the input of the model.

    Raises:
        UnsupportedModelError: as for `moves`.
    """
    if image.denormalised:
        raise OptionError(
            "shifts require an image to crop again, got a tensor: pass its image as original=, or shifts=0."
        )
    pixels = moves(spec)
    crops = [replace(image, placement=moved(image.placement, move), pixels=None) for move in pixels]
    found = []
    for one in maps:
        if one.options.get("shifts"):
            targets = None if one.target is None else np.full(len(crops), one.target)
            method = next(own for own in chosen if own.name == one.method).but(**{**one.options, "shifts": 0})
            shifted = [of_crop[0] for of_crop in explain(crops, [method], targets)]
            patch = np.divide(image.placement.input_size, one.grid.shape)  # height and width
            aligned = [realigned(each.grid, move / patch) for each, move in zip(shifted, pixels, strict=True)]
            grid = np.mean(aligned, axis=0).astype(np.float32)
            one = replace(one, grid=grid, seconds=one.seconds + sum(each.seconds for each in shifted))
        found.append(one)
    return found


def moves(spec: InputSpec) -> list[tuple[int, int]]:
    """The moves down and right, in pixels of the model input: half a patch each way, in all four combinations.

    Raises:
        UnsupportedModelError: the model does not tell its patch size, or has patches of one pixel.
    """
    size: Any = spec.patch_size
    height, width = (size, size) if isinstance(size, int) else size or (0, 0)
    if min(height, width) < 2:
        raise UnsupportedModelError(
            f"Shifts move the crop by half a patch, and this model tells no patch size (got {size}): use shifts=0."
        )
    return [(down * (height // 2), right * (width // 2)) for down in (-1, 1) for right in (-1, 1)]


def moved(placement: Placement, move: tuple[int, int]) -> Placement:
    """The same crop moved by (down, right) pixels of the model input; what leaves the image is padded.

    >>> moved(Placement((100, 100), (64, 64), (8, 8), (48, 48)), (4, -4)).offset
    (12, 4)
    """
    return replace(placement, offset=(placement.offset[0] + move[0], placement.offset[1] + move[1]))


def realigned(
    grid: NDArray[np.floating[Any]], move: Sequence[float] | NDArray[np.floating[Any]]
) -> NDArray[np.float64]:
    """A moved crop's map on the patches of the crop that was not moved, by the area that they have in common.

    Args:
        grid: the map of the moved crop, [rows, cols].
        move: how far it was moved down and right, in patches, less than 1 each.

    Returns:
        [rows, cols]: each patch is the mean of what covers it, as far as it is covered.

    >>> realigned(np.array([[1.0, 3.0]]), (0.0, 0.5))
    array([[1., 2.]])
    """
    # The area in common grows with what a line between two patches does; at the border one patch covers all there is.
    return np.asarray(ndimage.shift(grid.astype(np.float64), move, order=1, mode="nearest"))
