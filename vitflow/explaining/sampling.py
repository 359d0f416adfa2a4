"""Sampling with random patches dropped, and its consensus with GAE."""

from typing import Any

import torch
from torch import Tensor

from vitflow.errors import UnsupportedModelError, whole_number
from vitflow.explaining.applying import affinity_of, make_maps
from vitflow.explaining.maps import Maps, TargetedTrace
from vitflow.explaining.token_dropping import droppable_tokens, run_on_patches
from vitflow.methods.cells import cell_owners, mean_colour
from vitflow.methods.refinement import AffinityName
from vitflow.methods.sampling import NORMAL_95, SMOOTHING, draw_masks, mean_differences, regress
from vitflow.methods.similarity import spearman
from vitflow.methods.tokens import TokenLayout
from vitflow.models.outputs import log_odds
from vitflow.progress import tracking
from vitflow.registry.choices import without_affinity
from vitflow.registry.method_table import get_method


def sampling(trace: TargetedTrace, *, masks: int, affinity: AffinityName, refine: int, **drawn: Any) -> Maps:
    """Weight of each patch in the log-odds of the target, from random masks of all patches.

    A regression, from masks in which similar patches stay together, has the affinity of refinement as the factor of its
    prior covariance. The noise of the map is fixed, which shrinks the weights; that of the significant patches is
    estimated. Without an affinity, the weight is the mean score with a patch minus that without it, from 256 masks.
    """
    (_, grid, hidden), prior, effective = _hiding(trace), None, dict[str, Any]()
    try:
        prior = affinity_of(trace, affinity, grid).matrix.cpu()
    except UnsupportedModelError:
        if "affinity" in trace.requested:
            raise
        effective = without_affinity(trace.requested)
        masks = effective.get("masks", masks)
    sampled = sample(trace, masks=masks, affinity=None if prior is None else affinity, **drawn)
    grids, facts, significant = [], [], []
    for image, (kept, every) in enumerate(zip(*sampled, strict=True)):
        scores = every[:, trace.class_indices[image]]
        if prior is None:
            weights = mean_differences(kept, scores)
        else:
            weights = regress(kept, scores, prior[image], noise=SMOOTHING).mean
            posterior = regress(kept, scores, prior[image])
            significant.append((posterior.mean > NORMAL_95 * posterior.std).reshape(grid))
        grids.append(weights.reshape(grid))
        halves = (mean_differences(kept[first::2], scores[first::2]).numpy() for first in (0, 1))
        reliability = spearman(*halves)  # None with two or three masks
        facts.append({"reliability": None if reliability is None else round(reliability, 3), "hidden": hidden})
    outlined = torch.stack(significant) if significant else None
    return Maps(torch.stack(grids), facts, significant=outlined, effective=[effective] * len(grids))


def sample(
    trace: TargetedTrace,
    *,
    masks: int,
    random_seed: int,
    occlusion_batch: int,
    affinity: AffinityName | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the patches that masks keep, bool [images, masks, patches], and log-odds [images, masks, classes].

    `occlusion_batch` masks run in a pass; if tokens are dropped, more, with as many tokens in total. Patches with a
    high affinity tend to stay together; without one, only neighbours do.
    """
    batch, count = whole_number("occlusion_batch", occlusion_batch, 1), whole_number("masks", masks, 2)
    layout, grid, _ = _hiding(trace)
    images = trace.pixels.detach().split(1)
    # The outputs serve further classes and methods.
    known: list[Tensor] = trace.cached_outputs.setdefault(("sampling", count, random_seed, affinity), [])
    if affinity is None:  # the same masks for all images
        kept = draw_masks(*grid, masks=count, seed=random_seed).expand(len(images), -1, -1)
    else:
        matrices = affinity_of(trace, affinity, grid).matrix.cpu()
        kept = torch.stack([draw_masks(*grid, masks=count, seed=random_seed, affinity=each) for each in matrices])
    if layout is not None:
        tokens = layout.num_tokens - layout.num_patches + int(kept[0, 0].sum())
        batch = int(batch * layout.num_tokens / tokens)
    with tracking("sampling", len(images) * count) as progress:
        progress(count * len(known))
        for image, drawn in () if known else zip(images, kept, strict=True):
            parts = []
            for part in drawn.split(batch):
                parts.append(_log_odds(trace, image, part, layout, grid))
                progress(len(part))
            known.append(torch.cat(parts))
    return kept, torch.stack(known)


def _hiding(trace: TargetedTrace) -> tuple[TokenLayout | None, tuple[int, int], str]:
    """Return the layout of tokens that can be dropped (or None), the patch grid, and a description."""
    try:
        layout = droppable_tokens(trace.model, trace.pixels, trace.model_info.layout, trace.perturbed_outputs.read)
        return layout, (layout.rows, layout.cols), "tokens dropped"
    except UnsupportedModelError as error:
        hidden = f"patches blanked, because tokens cannot be dropped: {error}"
    try:
        return None, (trace.layout.rows, trace.layout.cols), hidden
    except UnsupportedModelError:  # the model has no patches
        return None, trace.grid(), hidden


def _log_odds(
    trace: TargetedTrace, image: Tensor, kept: Tensor, layout: TokenLayout | None, grid: tuple[int, int]
) -> Tensor:
    """Compute the log-odds [masks, classes] of one image with only the kept patches."""
    if layout is not None:
        indices = kept.nonzero()[:, 1].reshape(len(kept), -1)
        read = trace.perturbed_outputs.read
        with torch.no_grad():
            logits = run_on_patches(trace.model, image, indices, layout=layout, outputs=read)
        return log_odds(logits, trace.perturbed_outputs.activation)
    owners = cell_owners(image.shape[-2], image.shape[-1], *grid, trace.extent_of(grid))
    visible = kept[:, owners].unsqueeze(1).to(image.device)  # [masks, 1, height, width]
    return trace.log_odds(torch.where(visible, image, mean_colour(image)))


#: The methods of the consensus with their weights; each has its default options unless given.
PARTS = {"gae": 1, "sampling": 2}

# Minimum share of a patch, relative to a constant map, so that the other map still ranks patches that are 0 in one.
FLOOR = 1e-6


def consensus(trace: TargetedTrace, **options: Any) -> Maps:
    """Weighted geometric mean of GAE and sampling for the target, each refined and divided by its sum."""
    parts: list[Maps] = []
    for name in PARTS:
        method = get_method(name)
        accepted = {name: value for name, value in options.items() if method.accepts(name)}
        parts.append(make_maps(method, method.complete(accepted), trace)[0])
    maps = geometric_mean([each.grids for each in parts], list(PARTS.values()))
    gae, sampled = (each.facts or [{}] * len(maps) for each in parts)
    facts = [one | other for one, other in zip(gae, sampled, strict=True)]
    return Maps(maps, facts, significant=parts[-1].significant, effective=parts[-1].effective)


def geometric_mean(grids: list[Tensor], weights: list[int]) -> Tensor:
    """Return the weighted geometric mean of non-negative maps [batch, rows, cols], each divided by its sum.

    Shares are at least a millionth of those of a constant map, so that a 0 in a single map is not decisive. They are
    computed in float64 on the CPU.

    >>> geometric_mean([torch.tensor([[[3.0, 1.0]]]), torch.tensor([[[1.0, 3.0]]])], [1, 1])
    tensor([[[0.4330, 0.4330]]], dtype=torch.float64)
    """
    logs = []
    for grid, weight in zip(grids, weights, strict=True):
        shares = grid.detach().cpu().double().clamp_min(0.0)
        shares = shares / shares.sum(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        logs.append(weight / sum(weights) * shares.clamp_min(FLOOR / grid[0].numel()).log())
    return torch.stack(logs).sum(dim=0).exp()
