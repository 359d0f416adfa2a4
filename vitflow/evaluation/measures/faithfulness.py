"""Faithfulness: remove patches in the order of a map and follow the target's output; no labels are needed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import trapezoid
from torch import Tensor

from vitflow.analysis.removal import REPLACEMENTS, Kept, logits_without, patch_order, removed_counts
from vitflow.analysis.removal import can_drop_tokens as can_drop_tokens
from vitflow.errors import OptionError, check_known, whole_number
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import PlacedImage
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.token_dropping import run_on_patches as run_on_patches


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """Output of the model for the target while patches are removed in the order of a map.

    Attributes:
        fractions: share of the patches removed (or inserted), 0 … 1, [points].
        deletion: the target's probability with the most relevant patches removed first, [points].
        least_first: the target's probability with the least relevant patches removed first.
    """

    fractions: NDArray[np.float64]
    deletion: NDArray[np.float64]
    least_first: NDArray[np.float64]

    @property
    def insertion(self) -> NDArray[np.float64]:
        """The target's probability with the most relevant patches inserted first into the empty image, [points].

        It is the reverse of `least_first`: the image at share f is that with the least relevant 1 − f removed.
        """
        return self.least_first[::-1]

    @property
    def deletion_auc(self) -> float:
        """Area under `deletion`; lower is better: the prediction depends on the most relevant patches."""
        return float(trapezoid(self.deletion, self.fractions))

    @property
    def insertion_auc(self) -> float:
        """Area under `insertion`; higher is better: few relevant patches restore the prediction."""
        return float(trapezoid(self.insertion, self.fractions))

    @property
    def gap(self) -> float:
        """`insertion_auc` − `deletion_auc`; higher is better; an uninformative map has 0 on average."""
        return self.insertion_auc - self.deletion_auc


def faithfulness_curves(
    explainer: Explainer, maps: Sequence[Saliency], *, replace: str = "drop", points: int = 11, batch_size: int = 32
) -> list[Curves]:
    """Compute the deletion and insertion curves of several maps of one image.

    Patches are ranked by value, highest first, ties in raster order; the least relevant first is the reverse order. At
    share f of n patches, f · n are removed, rounded to an integer (half to even; at 1 − f the rest of them). The curves
    follow the target of each map. The whole and the empty image are evaluated once for all maps; in between, the model
    runs over all maps and points in batches.

    `replace` sets the replacement of removed patches:

    - "drop": none. Tokens are dropped from the sequence after the patch and position embedding. With all patches
      removed only prefix tokens remain; a model without them, or whose output then is NaN because it averages patches,
      gets the blank image there.
    - "blank": the mean colour of the model input, as in occlusion.

    Args:
        explainer: the explainer that made the maps.
        maps: maps of the same image or model input, each with a target; their grids may differ, except for "drop".
        replace: "drop" or "blank".
        points: number of points of each curve, both ends included.
        batch_size: images or shortened sequences per forward pass; affects speed only.

    Returns:
        The curves of each map, in order.

    Raises:
        OptionError: an option is out of range, the maps are of different images, a map has no target, or the whole
            image does not have the probability that the map reports.
        ShapeError: a map has NaN, or its grid does not match the tokens to drop.
        UnsupportedModelError: the model cannot drop tokens (see `can_drop_tokens`).

    Source: Samek et al., "Evaluating the Visualization of What a Deep Neural Network Has Learned", TNNLS 2017 (most
    and least relevant first); Petsiuk, Das & Saenko, "RISE", BMVC 2018 (deletion and insertion).

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> maps = explainer.explain_batch(sample_images()[:1], methods=["gae", "random"])
    >>> gae, random = faithfulness_curves(explainer, maps)
    >>> gae.fractions.shape, gae.gap > random.gap
    ((11,), True)
    """
    whole_number("points", points, 2)
    whole_number("batch_size", batch_size, 1)
    check_known("replacement", replace, REPLACEMENTS)
    placed = shared_input(maps)
    size = placed.placement.input_size
    if size != explainer.spec.size and not explainer.spec.dynamic:
        raise OptionError(
            f"Expected maps of a model input of {explainer.spec.size} pixels, as made by this explainer, got {size}. "
            "Use the explainer that made the maps."
        )
    for saliency in maps:
        if saliency.target is None:
            raise OptionError(f"The map of {saliency.method} has no target class: the model has no classes.")
    orders = [patch_order(saliency.grid) for saliency in maps]
    whole = Kept(np.arange(orders[0].size), maps[0].grid.shape, maps[0].placement.extent)
    choices = [whole, whole._replace(patches=whole.patches[:0])]
    for saliency, order in zip(maps, orders, strict=True):
        removed = removed_counts(order.size, points)[1:-1]
        kept = [order[count:] for count in removed] + [order[: order.size - count] for count in removed]
        choices += [Kept(patches, saliency.grid.shape, saliency.placement.extent) for patches in kept]
    logits = logits_without(explainer, placed, choices, replace, batch_size)
    _check_scores(explainer, maps, logits[:1])
    ends = logits[:2]
    # [maps, most or least relevant first, points, classes]
    between = logits[2:].reshape(len(maps), 2, points - 2, logits.shape[1])
    curves = []
    for saliency, (most, least) in zip(maps, between, strict=True):
        of_map = torch.stack([torch.cat([ends[:1], inner, ends[1:]]) for inner in (most, least)])
        probabilities = explainer.outputs.scores(of_map)[..., saliency.target].numpy()
        curves.append(Curves(np.linspace(0, 1, points), *probabilities))
    return curves


def shared_input(maps: Sequence[Saliency]) -> PlacedImage:
    """Return the input that all maps explain, the tensor or the placed image; OptionError for several or none."""

    def same(one: Any, other: Any) -> bool:
        return one is other or (type(one) is type(other) and one.shape == other.shape and bool((one == other).all()))

    if not maps:
        raise OptionError("Expected at least one map, got none.")
    first, placement = maps[0], replace(maps[0].placement, extent=None)  # grids may cover different pixels
    for saliency in maps:
        of_first = same(saliency.image, first.image) and same(saliency.model_input, first.model_input)
        if not of_first or replace(saliency.placement, extent=None) != placement:
            raise OptionError("Expected maps of one image or model input, got maps of several. Call once for each.")
    return PlacedImage(first.source, first.image, placement, first.model_input)


def _check_scores(explainer: Explainer, maps: Sequence[Saliency], logits: Tensor) -> None:
    """Raise OptionError if the logits [1, classes] of the whole image give another score than a map reports."""
    scores = explainer.outputs.scores(logits)[0].tolist()
    tolerance = 1e-4 if logits.dtype.itemsize >= 4 else 1e-2
    for saliency in maps:
        reported, index = saliency.score.value, saliency.target
        actual = scores[index] if index is not None and index < len(scores) else nan
        if reported is not None and not abs(actual - reported) <= tolerance * max(1.0, abs(reported)):
            raise OptionError(
                f"Expected {reported:.4g} for {saliency.label} and the whole image, as the map of {saliency.method} "
                f"reports, got {actual:.4g}. Use the explainer that made the map, with the same weights."
            )
