"""Sanity checks: stability under shifts and flips, and sensitivity to the class."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from vitflow.errors import OptionError, check_known
from vitflow.evaluation.measures.randomisation import explain_again
from vitflow.explaining.comparison import mean_of_defined
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.images.preprocessing import Preprocessing
from vitflow.methods.cells import cell_grid
from vitflow.methods.similarity import spearman

OTHERS = ("second", "least")

Grid = NDArray[np.float32]


def shift_stability(explainer: Explainer, maps: Sequence[Saliency], *, pixels: int | None = None) -> list[float | None]:
    """Return Spearman's ρ between each map and the map of the shifted image, shifted back.

    The model input is shifted by whole patches, once to the right and once down; ρ is the mean of both. Only patches
    with identical pixels before and after are compared. New pixels come from the image beyond the crop, or from its
    reflection at the border. Only the position embedding and the border change, so a map that depends on content is
    stable. A map that depends only on position can be stable, too: a centre prior loses little.

    Args:
        explainer, maps: as for `cascading_randomisation`.
        pixels: shift in pixels of the model input, a multiple of the patch size; by default one patch.

    Returns:
        For each map, in order; None if a map is constant or its grid does not shift by whole cells.

    Raises:
        OptionError: the shift is not by whole patches, or the maps are of several images or targets.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> maps = explainer.explain_batch(sample_images()[:1], methods=["rollout", "random"])
    >>> rollout, random = shift_stability(explainer, maps)
    >>> rollout > 0.5 > random
    True
    """
    image = maps[0].image
    (down, right), (height, width) = _steps(explainer, image, pixels)
    window = _wide_window(explainer, image, (down, right))  # the model input with a margin of one step
    moved = [window[down : down + height, :width], window[:height, right : right + width]]
    shifted = explain_again(as_it_is(explainer, (height, width)), moved, maps)
    values = []
    for before, to_right, to_down in zip(maps, shifted[: len(maps)], shifted[len(maps) :], strict=True):
        across = _moved_back(before.grid, to_right.grid, right, width)
        along = _moved_back(before.grid.T, to_down.grid.T, down, height)
        values.append(mean_of_defined([across, along]) if None not in (across, along) else None)
    return values


def flip_stability(explainer: Explainer, maps: Sequence[Saliency]) -> list[float | None]:
    """Flip stability: Spearman's ρ between the mirrored image's map, mirrored, and each map.

    The model input itself is mirrored left to right, so that every patch contains the mirror image of its counterpart.
    A centre prior has ρ = 1 up to rounding: stability alone is not evidence for a map.

    Args:
        explainer, maps: as for `cascading_randomisation`.

    Returns:
        For each map, in order; None if a map is constant.

    Raises:
        OptionError: the maps are of several images or targets.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> maps = explainer.explain_batch(sample_images()[:1], methods=["centre"])
    >>> [round(rho, 2) for rho in flip_stability(explainer, maps)]
    [1.0]
    """
    window = _wide_window(explainer, maps[0].image, (0, 0))
    mirrored = explain_again(as_it_is(explainer, window.shape[:2]), [np.ascontiguousarray(window[:, ::-1])], maps)
    return [
        spearman(before.grid, np.ascontiguousarray(after.grid[:, ::-1]))
        for before, after in zip(maps, mirrored, strict=True)
    ]


def class_sensitivity(explainer: Explainer, maps: Sequence[Saliency], *, other: str = "second") -> list[float | None]:
    """Return 1 − ρ between the maps for two classes of the image, by the method of each map.

    Maps for the most probable class and another class are compared by Spearman's ρ over patches. A method that is not
    class-specific has 0 and is not run. 1 means uncorrelated maps, 2 reversed ranks.

    Args:
        explainer, maps: as for `cascading_randomisation`.
        other: "second" for the second most probable class, "least" for the least probable class.

    Returns:
        For each map, in order; None if the map for one of the classes is constant.

    Raises:
        OptionError: other is unknown, or the model has fewer than two classes.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> maps = explainer.explain_batch(sample_images()[:1], methods=["gae", "rollout"])
    >>> gae, rollout = class_sensitivity(explainer, maps)
    >>> gae > rollout == 0.0
    True
    """
    check_known("other class", other, OTHERS)
    methods = [(m.method, m.options) for m in maps if m.class_specific]
    if not methods:
        return [0.0] * len(maps)
    image = maps[0].image
    by_class = explainer.explain_batch([image], methods=methods, targets=_two_classes(explainer, image, other))
    correlations = (spearman(a.grid, b.grid) for a, b in zip(by_class[::2], by_class[1::2], strict=True))
    changes = (None if rho is None else 1.0 - rho for rho in correlations)
    return [next(changes) if m.class_specific else 0.0 for m in maps]


def _two_classes(explainer: Explainer, image: NDArray[np.uint8], other: str) -> list[int]:
    """Return the most probable class of the image, and the other class."""
    with torch.no_grad():
        logits = explainer.logits(explainer.pixels(image))
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise OptionError(f"Expected a model with at least two classes, got {explainer.model_id} with fewer.")
    ranked = logits[0].argsort(descending=True).tolist()
    return [ranked[0], ranked[1 if other == "second" else -1]]


def _steps(
    explainer: Explainer, image: NDArray[np.uint8], pixels: int | None
) -> tuple[tuple[int, int], tuple[int, int]]:
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


def _wide_window(explainer: Explainer, image: NDArray[np.uint8], margin: tuple[int, int]) -> NDArray[np.uint8]:
    """Return the model input before normalisation with margins (vertical, horizontal), uint8 RGB.

    Margins show the image beyond the crop, and its reflection beyond the image border.
    """
    placement = explainer.preprocessing.place((image.shape[0], image.shape[1]))
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
    window = explainer.preprocessing.cut(image, extended)
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
