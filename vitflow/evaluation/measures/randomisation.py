"""Cascading weight randomisation: compare maps with those of models with random weights."""

import copy
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitflow.errors import OptionError, VitflowWarning, check_known
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.methods.similarity import spearman
from vitflow.models.anatomy import transformer_of
from vitflow.models.blocks import library_blocks

# Default number of stages, evenly spaced from the head to the whole model.
DEFAULT_STAGES = 5

Part = tuple[str, list[nn.Module]]


def cascading_randomisation(
    explainer: Explainer, maps: Sequence[Saliency], *, stages: int | Sequence[str] | None = None, seed: int = 0
) -> list[tuple[str, list[float | None]]]:
    """Correlate each map with the map by the same method of the same model with randomised weights.

    Weights are randomised cumulatively from the top of the network down: stage "head" has a new head (everything after
    the blocks), stage "block 9" of twelve also new blocks 12 to 9, and stage "embedding" no trained weights. All maps
    explain the target of the original maps. Patches of the two grids are compared by signed Spearman's ρ. A map that
    still correlates with the original after the last stage does not depend on the weights; a centre prior has ρ = 1
    throughout.

    Weights are drawn by `reset_parameters` of each module. Parameters that it leaves unchanged, and those of modules
    without it (class token, position embedding), are drawn from a normal distribution with the mean and standard
    deviation of their trained entries. The model is copied; the global random state does not change.

    Args:
        explainer: the explainer that made the maps.
        maps: maps of one image for one target, by any methods.
        stages: names from `stage_names`, or the number of evenly spaced stages including both ends; 5 if None.
        seed: seed of the weights, which do not depend on the chosen stages.

    Returns:
        For each stage, from the top of the network, its name and ρ for each map, in order; None if a map is constant.

    Raises:
        OptionError: a stage is unknown, or the maps are of several images or targets.

    Source: Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, §4.

    >>> from vitflow.demo import sample_images
    >>> explainer = Explainer("demo")
    >>> maps = explainer.explain_batch(sample_images()[:1], methods=["gae", "centre"])
    >>> [(stage, round(centre, 3)) for stage, (gae, centre) in cascading_randomisation(explainer, maps, stages=2)]
    [('head', 1.0), ('embedding', 1.0)]
    """
    chosen = _choose(stage_names(explainer.model), stages)
    results = []
    with warnings.catch_warnings():
        # Warnings about the random model, such as saturated flows, do not concern the caller's model.
        warnings.simplefilter("ignore", VitflowWarning)
        for stage, randomised in randomised_copies(explainer, chosen, seed=seed):
            others = explain_again(randomised, [maps[0].image], maps)
            results.append((stage, [spearman(a.grid, b.grid) for a, b in zip(maps, others, strict=True)]))
    return results


def explain_again(
    explainer: Explainer, images: Sequence[NDArray[np.uint8]], maps: Sequence[Saliency]
) -> list[Saliency]:
    """Explain images by the methods, with the options and for the target of some maps; by image, then by map.

    Raises:
        OptionError: the maps are of several images or targets.
    """
    first = maps[0]
    if any(m.target != first.target or not np.array_equal(m.image, first.image) for m in maps[1:]):
        raise OptionError("Expected maps of one image for one target, got several images or targets.")
    targets = None if first.target is None else np.full(len(images), first.target)
    return explainer.explain_batch(images, methods=[(m.method, m.options) for m in maps], targets=targets)


def stage_names(model: nn.Module) -> list[str]:
    """Return the stages of a cascade over the model: head, blocks from last to first, embedding.

    A model without blocks is split at its top-level modules.

    >>> stage_names(Explainer("demo").model)
    ['head', 'block 6', 'block 5', 'block 4', 'block 3', 'block 2', 'block 1', 'embedding']
    """
    return [name for name, _ in _parts(model)]


def randomised_copies(explainer: Explainer, stages: Sequence[str], *, seed: int = 0) -> Iterator[tuple[str, Explainer]]:
    """Yield the explainer with a model randomised down to each stage in turn.

    All stages share one copy of the model: use each before the next is requested.
    """
    with torch.inference_mode(False):
        randomised = copy.copy(explainer)
        randomised.model = copy.deepcopy(explainer.model)
    parts = _parts(randomised.model)
    last = max((index for index, (name, _) in enumerate(parts) if name in stages), default=-1)
    for index, (name, modules) in enumerate(parts[: last + 1]):
        with _seeded(seed + 1_000_003 * index, explainer.device), torch.inference_mode(False), torch.no_grad():
            for module in modules:
                _redraw(module)
        if name in stages:
            yield name, randomised


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed random numbers on the CPU and this device, and restore their state afterwards."""
    if device.type == "cpu":
        with torch.random.fork_rng([]):
            torch.default_generator.manual_seed(seed)
            yield
        return
    with torch.random.fork_rng([device], device_type=device.type):
        torch.default_generator.manual_seed(seed)
        getattr(torch, device.type).manual_seed(seed)
        yield


def _parts(model: nn.Module) -> list[Part]:
    """Return the modules with direct parameters by stage, from the top of the network."""
    holder = _holder_of_blocks(model)
    if holder is None:
        root: Part = ("embedding", [model])
        parts = [root, *((name, list(child.modules())) for name, child in model.named_children())]
    else:
        blocks = list(holder.children())
        inside = {module for block in blocks for module in block.modules()}
        every = [module for module in model.modules() if module not in inside]
        # Modules registered before the blocks feed them, as do parameters of the modules that contain them.
        split = every.index(holder)
        parts = [
            ("embedding", every[:split]),
            *((f"block {number}", list(block.modules())) for number, block in enumerate(blocks, start=1)),
            ("head", every[split:]),
        ]
    with_parameters = [(name, [module for module in modules if module._parameters]) for name, modules in parts]
    return [part for part in reversed(with_parameters) if part[1]]


def _holder_of_blocks(model: nn.Module) -> nn.Module | None:
    """Return the module whose children are the transformer's blocks, in order."""
    blocks = getattr(transformer_of(model), "blocks", None)
    if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks):
        return blocks
    return next(iter(library_blocks(model).values()), None)


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


def _choose(names: Sequence[str], stages: int | Sequence[str] | None) -> list[str]:
    if stages is None:
        stages = min(DEFAULT_STAGES, len(names))
    if isinstance(stages, int):
        if not 1 <= stages <= len(names):
            raise OptionError(f"Expected 1 to {len(names)} stages for this model, got {stages}.")
        # A single stage is the whole model.
        return [names[round(index)] for index in np.linspace(0, len(names) - 1, stages)] if stages > 1 else [names[-1]]
    if isinstance(stages, str) or not stages:
        raise OptionError(f"Expected a list of stages, got {stages!r}.")
    for stage in stages:
        check_known("stage", stage, names)
    return list(stages)
