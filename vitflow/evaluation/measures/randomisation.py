"""Cascading weight randomisation: does a map still look the same when the model has forgotten what it learned?"""

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from vitflow.errors import OptionError, VitflowWarning, check_known
from vitflow.explaining.choices import MethodChoice, choose_methods
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.saliency import Saliency
from vitflow.explaining.targets import Target
from vitflow.images.reading import ImageSource
from vitflow.methods.ranks import spearman
from vitflow.models.anatomy import transformer_of
from vitflow.models.libraries import library_norms

# Stages where the caller chooses none: the head, all of the model, and what lies evenly between.
DEFAULT_STAGES = 5

Part = tuple[str, list[nn.Module]]


def cascading_randomisation(
    explainer: Explainer,
    image: ImageSource,
    methods: Sequence[MethodChoice],
    *,
    stages: int | Sequence[str] | None = None,
    seed: int = 0,
    target: Target = None,
    maps: Sequence[Saliency] | None = None,
    **options: Any,
) -> list[tuple[str, list[float | None]]]:
    """Correlate each method's map with the map that it makes of the same model with re-drawn weights.

    From the top of the network down, weights are drawn anew and stay so: stage "head" has a new head (all behind the
    blocks), stage "block 9" of twelve also new blocks 12 to 9, stage "embedding" nothing left of the training. Every
    map, also of a model that now answers otherwise, explains the class that the trained model was explained for.
    Compared are the patches of the two grids by Spearman's ρ, absolute values not taken. A map that still correlates
    with the original when the weights are gone cannot show what the model learned; a centre prior has ρ = 1 throughout.

    Weights are drawn by each module's own `reset_parameters`. Parameters that it leaves as they are, and those of
    modules without one (class token, position embedding), are drawn from a normal with their trained entries' mean and
    standard deviation. All happens in a copy; neither the model nor the global random numbers are touched.

    Args:
        explainer: holds the model.
        image: the image.
        methods: names, or (name, options) pairs.
        stages: names from `stage_names`, or how many, spread evenly with the first and the last among them; 5 if None.
        seed: of the weights. The same seed gives the same weights, whichever stages are chosen.
        target: class to explain; by default the predicted one.
        maps: the original maps, one per method, where they are already made; target is theirs then.
        options: options for every method that has them.

    Returns:
        For each stage, the top of the network first, its name and ρ for each method, in order; None where a map is
        constant.

    Raises:
        VitflowError: the image, a stage, a method or an option is wrong.

    Source: Adebayo et al., "Sanity Checks for Saliency Maps", NeurIPS 2018, §4.

    >>> from vitflow.demo import sample_images
    >>> correlations = cascading_randomisation(Explainer("demo"), sample_images()[0], ["gae", "centre"], stages=2)
    >>> [(stage, round(centre, 3)) for stage, (gae, centre) in correlations]
    [('head', 1.0), ('embedding', 1.0)]
    """
    chosen = _choose(stage_names(explainer.model), stages)
    original, targets = original_maps(explainer, image, methods, target, maps, options)
    correlations = []
    with warnings.catch_warnings():
        # That the flows of a random model are saturated is no news about the caller's.
        warnings.simplefilter("ignore", VitflowWarning)
        for stage, randomised in randomised_copies(explainer, chosen, seed=seed):
            others = randomised.explain_batch([image], methods=methods, targets=targets, **options)
            pairs = zip(original, others, strict=True)
            correlations.append((stage, [spearman(before.grid, after.grid) for before, after in pairs]))
    return correlations


def original_maps(
    explainer: Explainer,
    image: ImageSource,
    methods: Sequence[MethodChoice],
    target: Target,
    maps: Sequence[Saliency] | None,
    options: Mapping[str, Any],
) -> tuple[Sequence[Saliency], NDArray[np.intp] | None]:
    """One map per method, and the class that they explain, as what other maps of the image are asked for.

    Args:
        explainer: holds the model.
        image: the image.
        methods: names, or (name, options) pairs.
        target: one class, by default the predicted one.
        maps: the maps themselves, where they are already made.
        options: options for every method that has them.

    Raises:
        OptionError: the target stands for several classes, or the given maps are not one per method and of one class.
    """
    if maps is None:
        maps = explainer.explain_batch([image], methods=methods, targets=target, **options)
        if len(maps) != len(methods):
            raise OptionError(f"Expected one class to explain, got {target!r}, which stands for several.")
    names = [one.name for one in choose_methods(methods, options)]
    if [saliency.method for saliency in maps] != names or len({saliency.target for saliency in maps}) > 1:
        raise OptionError(
            f"Expected one map by each of {', '.join(names)}, all of one class, got "
            f"{', '.join(f'{saliency.method} of {saliency.target}' for saliency in maps) or 'none'}."
        )
    return maps, None if maps[0].target is None else np.array([maps[0].target])


def stage_names(model: nn.Module) -> list[str]:
    """Return the stages of a cascade over the model: head, blocks from the last to the first, embedding.

    A model without blocks is cut at its top-level modules.

    >>> stage_names(Explainer("demo").model)
    ['head', 'block 6', 'block 5', 'block 4', 'block 3', 'block 2', 'block 1', 'embedding']
    """
    return [name for name, _ in _parts(model)]


def randomised_copies(explainer: Explainer, stages: Sequence[str], *, seed: int = 0) -> Iterator[tuple[str, Explainer]]:
    """Yield the explainer with the weights re-drawn down to each stage in turn.

    One copy of the model serves all stages: each is done with before the next is asked for.
    """
    with torch.inference_mode(False):
        randomised = copy.copy(explainer)
        randomised.model = copy.deepcopy(explainer.model)
    parts = _parts(randomised.model)
    last = max((number for number, (name, _) in enumerate(parts) if name in stages), default=-1)
    for number, (name, modules) in enumerate(parts[: last + 1]):
        with _seeded(seed + 1_000_003 * number, explainer.device), torch.inference_mode(False), torch.no_grad():
            for module in modules:
                _redraw(module)
        if name in stages:
            yield name, randomised


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers from a seed, on the CPU and this device; afterwards theirs go on as if nothing had been drawn."""
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
    """Return the modules that own parameters, by stage, the top of the network first."""
    holder = _holder_of_blocks(model)
    if holder is None:
        rest: Part = ("embedding", [model])
        parts = [rest, *((name, list(child.modules())) for name, child in model.named_children())]
    else:
        blocks = list(holder.children())
        inside = {module for block in blocks for module in block.modules()}
        every = [module for module in model.modules() if module not in inside]
        # What is registered before the blocks feeds them; so do parameters of the modules that hold them.
        split = every.index(holder)
        parts = [
            ("embedding", every[:split]),
            *((f"block {number}", list(block.modules())) for number, block in enumerate(blocks, start=1)),
            ("head", every[split:]),
        ]
    owning = [(name, [module for module in modules if module._parameters]) for name, modules in parts]
    return [part for part in reversed(owning) if part[1]]


def _holder_of_blocks(model: nn.Module) -> nn.Module | None:
    """Return the module whose children are the transformer's blocks, first block first."""
    blocks = getattr(transformer_of(model), "blocks", None)
    if isinstance(blocks, nn.Sequential | nn.ModuleList) and len(blocks):
        return blocks
    norms = library_norms(model)  # "encoder.layers.encoder_layer_0.ln_1": norm, block, holder from right to left
    return model.get_submodule(norms[0].rsplit(".", 2)[0]) if norms else None


def _redraw(module: nn.Module) -> None:
    """Draw the parameters that the module itself owns."""
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
        # One stage alone is the whole model.
        return [names[round(index)] for index in np.linspace(0, len(names) - 1, stages)] if stages > 1 else [names[-1]]
    if isinstance(stages, str) or not stages:
        raise OptionError(f"Expected a list of stages, got {stages!r}.")
    for stage in stages:
        check_known("stage", stage, names)
    return list(stages)
