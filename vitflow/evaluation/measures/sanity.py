"""Sanity checks: stability under shifts and flips, and sensitivity to the class."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.errors import OptionError, check_known
from vitflow.evaluation.measures.randomisation import cascading_randomisation, original_maps, stage_names
from vitflow.explaining.choices import MethodChoice, choose_methods
from vitflow.explaining.comparison import mean_of_defined
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Target
from vitflow.images.preprocessing import Preprocessing
from vitflow.images.reading import ImageSource, read_image
from vitflow.methods.cells import cell_grid
from vitflow.methods.ranks import spearman

__all__ = ["cascading_randomisation", "class_sensitivity", "flip_stability", "shift_stability", "stage_names"]

OTHERS = ("second", "least")

Grid = NDArray[np.float32]


def shift_stability(
    explainer: Explainer,
    image: ImageSource,
    methods: Sequence[MethodChoice],
    *,
    pixels: int | None = None,
    target: Target = None,
    maps: Sequence[Saliency] | None = None,
    **options: Any,
) -> list[float | None]:
    """Return Spearman's ρ between the map and the map of the shifted image, shifted back.

    The model input is shifted by whole patches, once to the right and once down; ρ is the mean of both. Only patches
    with identical pixels before and after are compared. New pixels come from the image beyond the crop, or from its
    reflection at the border. So only the position embedding and the border change, and a map of content is stable. A
    map that depends only on position can be stable, too: a centre prior loses little.

    Args:
        explainer, image, methods, target, maps, options: as for `cascading_randomisation`.
        pixels: shift in pixels of the model input, a multiple of the patch size; by default one patch.

    Returns:
        For each method, in order; None if a map is constant or its grid does not shift by whole cells.

    Raises:
        VitflowError: the image, a method or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> rollout, random = shift_stability(Explainer("demo"), sample_images()[0], ["rollout", "random"])
    >>> rollout > 0.5 > random
    True
    """
    (down, right), (height, width) = _steps(explainer, image, pixels)
    window = _wide_window(explainer, image, (down, right))  # the model input with a margin of one step
    moved = [window[down : down + height, :width], window[:height, right : right + width]]
    original, targets = original_maps(explainer, image, methods, target, maps, options)
    repeated = None if targets is None else np.repeat(targets, 2)
    shifted = as_it_is(explainer, (height, width)).explain_batch(moved, methods=methods, targets=repeated, **options)
    values = []
    for index, before in enumerate(original):
        to_right, to_down = shifted[index].grid, shifted[index + len(methods)].grid
        across = _moved_back(before.grid, to_right, right, width)
        along = _moved_back(before.grid.T, to_down.T, down, height)
        values.append(mean_of_defined([across, along]) if None not in (across, along) else None)
    return values


def flip_stability(
    explainer: Explainer,
    image: ImageSource,
    methods: Sequence[MethodChoice],
    *,
    target: Target = None,
    maps: Sequence[Saliency] | None = None,
    **options: Any,
) -> list[float | None]:
    """Flip stability: Spearman's ρ between the mirrored image's map, mirrored, and the map.

    The model input itself is mirrored left to right, so that every patch holds the mirror image of its counterpart.
    A centre prior has ρ = 1 up to rounding: stability alone is not evidence for a map.

    Args:
        explainer, image, methods, target, maps, options: as for `cascading_randomisation`.

    Returns:
        For each method, in order; None if a map is constant.

    Raises:
        VitflowError: the image, a method or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> [round(rho, 2) for rho in flip_stability(Explainer("demo"), sample_images()[0], ["centre"])]
    [1.0]
    """
    window = _wide_window(explainer, image, (0, 0))
    original, targets = original_maps(explainer, image, methods, target, maps, options)
    mirrored = as_it_is(explainer, window.shape[:2]).explain_batch(
        [np.ascontiguousarray(window[:, ::-1])], methods=methods, targets=targets, **options
    )
    return [
        spearman(before.grid, np.ascontiguousarray(after.grid[:, ::-1]))
        for before, after in zip(original, mirrored, strict=True)
    ]


def class_sensitivity(
    explainer: Explainer,
    image: ImageSource,
    methods: Sequence[MethodChoice],
    *,
    other: str = "second",
    **options: Any,
) -> list[float | None]:
    """Return 1 − ρ between the maps for two classes of the image.

    Maps for the most probable class and another class are compared by Spearman's ρ over patches. A method that is not
    class-specific has 0 and is not run. 1 means uncorrelated maps, 2 reversed ranks.

    Args:
        explainer, image, methods, options: as for `cascading_randomisation`.
        other: "second" for the second most probable class, "least" for the least probable class.

    Returns:
        For each method, in order; None if one of its maps is constant.

    Raises:
        OptionError: other is unknown, or the model has fewer than two classes.
        VitflowError: the image, a method or an option is invalid.

    >>> from vitflow.demo import sample_images
    >>> gae, rollout = class_sensitivity(Explainer("demo"), sample_images()[0], ["gae", "rollout"])
    >>> gae > rollout == 0.0
    True
    """
    check_known("other class", other, OTHERS)
    specific = [method.method.class_specific for method in choose_methods(methods, options)]
    compared = [choice for choice, is_specific in zip(methods, specific, strict=True) if is_specific]
    if not compared:
        return [0.0] * len(specific)
    maps = explainer.explain_batch([image], methods=compared, targets=_two_classes(explainer, image, other), **options)
    changes = []
    for first, second in zip(maps[::2], maps[1::2], strict=True):
        rho = spearman(first.grid, second.grid)
        changes.append(None if rho is None else 1.0 - rho)
    remaining = iter(changes)
    return [next(remaining) if is_specific else 0.0 for is_specific in specific]


def _two_classes(explainer: Explainer, image: ImageSource, other: str) -> list[int]:
    """Return the most probable class of the image, and the other class."""
    with torch.no_grad():
        logits = explainer.logits(explainer.pixels(image))
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise OptionError(f"Expected a model with at least two classes, got {explainer.model_id} with fewer.")
    ranked = logits[0].argsort(descending=True).tolist()
    return [ranked[0], ranked[1 if other == "second" else -1]]


def _steps(explainer: Explainer, image: ImageSource, pixels: int | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shift of the model input (down, right), and its (height, width), in pixels."""
    height, width = explainer.pixels(image).shape[-2:]
    rows, cols = cell_grid(height, width, None)
    patch = explainer.spec.patch_size or (height // rows, width // cols)
    steps = patch if pixels is None else (pixels, pixels)
    if min(steps) < 1 or steps[0] % patch[0] or steps[1] % patch[1] or steps[0] >= height or steps[1] >= width:
        raise OptionError(
            f"Expected a shift by whole patches of {patch[0]} × {patch[1]} pixels smaller than the model "
            f"input of {height} × {width} pixels, got {pixels}."
        )
    return steps, (height, width)


def _wide_window(explainer: Explainer, image: ImageSource, margin: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the model input before normalisation with margins (vertical, horizontal), uint8 RGB.

    Margins show the image beyond the crop, and its reflection beyond the image border.
    """
    pixels = read_image(image)
    placement = explainer.preprocessing.place((pixels.shape[0], pixels.shape[1]))
    sides = list(zip(placement.offset, placement.input_size, placement.resized_size, margin, strict=True))
    # Extent of each margin within the image; 0 if the model input is padded.
    before = [min(max(start, 0), wide) for start, _, _, wide in sides]
    behind = [min(max(resized - start - size, 0), wide) for start, size, resized, wide in sides]
    (top, left), (height, width) = placement.offset, placement.input_size
    extended = replace(
        placement,
        offset=(top - before[0], left - before[1]),
        input_size=(height + before[0] + behind[0], width + before[1] + behind[1]),
    )
    window = explainer.preprocessing.cut(pixels, extended)
    missing = [(wide - a, wide - b) for wide, a, b in zip(margin, before, behind, strict=True)]
    return np.pad(window, [*missing, (0, 0)], mode="symmetric")


def as_it_is(explainer: Explainer, size: tuple[int, ...]) -> Explainer:
    """Return a copy of the explainer for images that already are model inputs."""
    result = copy.copy(explainer)
    result.preprocessing = Preprocessing(replace(explainer.spec, size=(size[0], size[1])), "squash")
    return result


def _moved_back(before: Grid, after: Grid, step: int, length: int) -> float | None:
    """Return ρ over the columns that remain after a shift to the right; None if it is not by whole columns."""
    cells, rest = divmod(step * before.shape[1], length)
    if rest or before.shape != after.shape:
        return None
    return spearman(np.ascontiguousarray(before[:, :-cells]), np.ascontiguousarray(after[:, cells:]))
