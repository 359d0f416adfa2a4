"""Sanity checks: random weights, sensitivity to the class, and sameness over images.

Each takes the explainer that made some maps and the maps, which explain one target of one image by any methods, and
returns Spearman's ρ for each map, in order; None if a map is constant, as those without a gradient are. Maps of several
images or targets are an OptionError. Only sameness compares the maps of several images.
"""

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vitflow.errors import NoGradientError, OptionError, ShapeError, VitflowWarning, whole_number
from vitflow.evaluation.measures.faithfulness import shared_input
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import PlacedImage
from vitflow.explaining.saliency import Saliency
from vitflow.methods.similarity import Values, spearman

#: Minimum number of images of sameness.
MIN_IMAGES = 8


def randomisation(explainer: Explainer, maps: Sequence[Saliency], *, seed: int = 0) -> list[float | None]:
    """Correlate each map with the map by the same method of the same model with random weights.

    All maps explain the target of the original maps. Patches of the two grids are compared by signed Spearman's ρ. A
    map that still correlates with the original does not depend on the weights; a centre prior has ρ = 1.

    Weights are drawn by `reset_parameters` of each module. Parameters that it leaves unchanged, and those of modules
    without it (class token, position embedding), are drawn from a normal distribution with the mean and standard
    deviation of their trained entries. The model is copied; the global random state does not change.

    Args:
        explainer: the explainer that made the maps.
        maps: maps of one image for one target, by any methods.
        seed: seed of the weights.

    Source: the last stage of cascading randomisation, Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018,
    §4: no weight is a trained one.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> maps = explainer.explain_batch(sample_images()[:1], methods=["gae", "centre"])
    >>> gae, centre = randomisation(explainer, maps)
    >>> gae < 0.9, round(centre, 3)
    (True, 1.0)
    """
    placed = shared_input(maps)
    with warnings.catch_warnings():
        # Warnings about the random model, such as saturated flows, do not concern the caller's model.
        warnings.simplefilter("ignore", VitflowWarning)
        others = _explain_again(randomised_copy(explainer, seed), placed, maps)
    return [spearman(saliency.grid, other.grid) for saliency, other in zip(maps, others, strict=True)]


def _explain_again(explainer: Explainer, image: PlacedImage, maps: Sequence[Saliency]) -> list[Saliency]:
    """Return the maps of an image by the methods, with the options and for the target of some maps.

    They are 0 if the output has no gradient, as with random weights below a ReLU.
    """
    first = maps[0]
    if any(m.target != first.target for m in maps[1:]):
        raise OptionError("Expected maps of one image for one target, got several targets.")
    methods = [(m.method, m.options) for m in maps]
    try:
        return explainer.explain_batch([image], methods=methods, targets=first.target)
    except NoGradientError:
        if len(maps) == 1:
            return [replace(first, grid=np.zeros_like(first.grid))]
    return [again for saliency in maps for again in _explain_again(explainer, image, [saliency])]


def randomised_copy(explainer: Explainer, seed: int) -> Explainer:
    """Return the explainer with a copy of its model with random weights."""
    seed = whole_number("seed", seed, 0)
    with torch.random.fork_rng(range(torch.cuda.device_count())), torch.inference_mode(False), torch.no_grad():
        torch.manual_seed(seed)
        randomised = copy.deepcopy(explainer.model)
        for module in randomised.modules():
            if module._parameters:
                _redraw(module)
    return explainer.with_model(randomised)


def _redraw(module: nn.Module) -> None:
    """Randomise the direct parameters of a module."""
    reset = getattr(module, "reset_parameters", None)
    before = {name: parameter.clone() for name, parameter in module.named_parameters(recurse=False)}
    if callable(reset):
        reset()
    for name, parameter in module.named_parameters(recurse=False):
        if torch.equal(parameter, before[name]):
            trained = before[name].float()
            parameter.normal_(float(trained.mean()), float(trained.std(correction=0)))


def class_sensitivity(explainer: Explainer, maps: Sequence[Saliency]) -> list[float | None]:
    """Return 1 − ρ between the maps for two classes of the image, by the method of each map.

    Maps for the two most probable classes are compared by Spearman's ρ over patches. A method that is not
    class-specific has 0 and is not run. 1 means uncorrelated maps, 2 reversed ranks. A model must have two
    classes.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> maps = explainer.explain_batch(sample_images()[:1], methods=["gae", "rollout"])
    >>> gae, rollout = class_sensitivity(explainer, maps)
    >>> gae > rollout == 0.0
    True
    """
    methods = [(m.method, m.options) for m in maps if m.class_specific]
    if not methods:
        return [0.0] * len(maps)
    placed = shared_input(maps)
    with torch.no_grad():
        logits = explainer.logits(explainer.pixels(placed))
    if logits.ndim != 2 or logits.shape[1] < 2:
        raise OptionError(f"Expected a model with at least two classes, got {explainer.model_id} with fewer.")
    classes = logits[0].argsort(descending=True)[:2].tolist()
    try:
        by_class = explainer.explain_batch([placed], methods=methods, targets=classes)
    except NoGradientError:
        return [None if m.class_specific else 0.0 for m in maps]
    correlations = (spearman(a.grid, b.grid) for a, b in zip(by_class[::2], by_class[1::2], strict=True))
    changes = (None if rho is None else 1.0 - rho for rho in correlations)
    return [next(changes) if m.class_specific else 0.0 for m in maps]


def sameness(grids: Sequence[Values]) -> list[float | None]:
    """Correlate the map of each image with the mean of the maps of the other images by the same method.

    1 means that the method ranks the places alike in every image: its map is not about the image. A map that depends on
    the position only has exactly 1. Each map is divided by the sum of its absolute values, so that no image dominates.

    Raises:
        ShapeError: fewer than eight maps, or maps of several shapes.

    >>> maps = np.random.default_rng(0).random((9, 14, 14))
    >>> all(abs(value) < 0.3 for value in sameness(maps)), round(sameness([maps[0]] * 9)[0], 6)
    (True, 1.0)
    """
    shapes = {np.shape(grid) for grid in grids}
    if len(grids) < MIN_IMAGES or len(shapes) > 1:
        given = f"{len(grids)} images" if len(shapes) < 2 else f"maps of {len(shapes)} shapes"
        raise ShapeError(f"Sameness requires maps of one shape on at least {MIN_IMAGES} images, got {given}.")
    stacked = np.array(grids, dtype=np.float64)
    sums = np.abs(stacked).sum(axis=(1, 2), keepdims=True)
    stacked /= np.where(sums > 0.0, sums, 1.0)
    total = stacked.sum(axis=0)
    return [spearman(grid, total - grid) for grid in stacked]
