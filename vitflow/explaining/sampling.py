"""Sampling with random patches dropped, and its consensus with GAE."""

from typing import Any

import torch
from torch import Tensor

from vitflow.errors import UnsupportedModelError, check_known, whole_number
from vitflow.explaining.maps import Maps
from vitflow.explaining.method_table import get_method
from vitflow.explaining.options import OPTIONS
from vitflow.explaining.progress import tracking
from vitflow.explaining.refining import affinity_of, make_maps
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.methods.cells import cell_owners, draw_masks, halves, mean_differences
from vitflow.methods.ranks import spearman
from vitflow.methods.refinement import AffinityName
from vitflow.methods.regression import regress
from vitflow.methods.tokens import TokenLayout
from vitflow.models.outputs import log_odds
from vitflow.recording.token_dropping import droppable_tokens, run_on_patches


def sampling(trace: TargetedTrace, *, estimator: str, affinity: AffinityName, refine: int, **drawn: Any) -> Maps:
    """Weight of each patch in the log-odds of the target, from random masks of all patches.

    The difference of means is over masks with and without the patch. The regression has the affinity of refinement as
    the factor of its prior covariance.
    """
    check_known("estimator", estimator, OPTIONS["estimator"].choices)
    kept, outputs, grid, hidden = sample(trace, **drawn)
    priors = affinity_of(trace, affinity, grid).matrix if estimator == "regression" else None
    grids, facts = [], []
    for image, (scores, target) in enumerate(zip(outputs, trace.wanted.tolist(), strict=True)):
        scores_of_target = scores[:, target]
        if priors is None:
            weights = mean_differences(kept, scores_of_target)
        else:
            weights = regress(kept, scores_of_target, priors[image]).mean
        grids.append(weights.reshape(grid))
        reliability = spearman(*(half.numpy() for half in halves(kept, scores_of_target)))
        facts.append({"reliability": None if reliability is None else round(reliability, 3), "hidden": hidden})
    return Maps(torch.stack(grids), facts)


def sample(
    trace: TargetedTrace, *, masks: int, keep: float, cells: int, random_seed: int, occlusion_batch: int
) -> tuple[Tensor, list[Tensor], tuple[int, int], str]:
    """Run the model on masked images.

    Returns:
        Kept patches of each mask, bool [masks, patches]; the log-odds [masks, classes] of each image; rows and columns
        of the patches; a description of how patches were hidden.
    """
    batch = whole_number("occlusion_batch", occlusion_batch, 1)
    layout, grid, hidden = _hiding(trace)
    kept = draw_masks(*grid, masks=masks, keep=keep, cells=cells, seed=random_seed)
    return kept, _outputs(trace, kept, layout, grid, batch, ("sampling", keep, cells, random_seed)), grid, hidden


def _outputs(
    trace: TargetedTrace,
    kept: Tensor,
    layout: TokenLayout | None,
    grid: tuple[int, int],
    batch: int,
    key: tuple[Any, ...],
) -> list[Tensor]:
    """Compute the log-odds [masks, classes] of each masked image; results are cached in the trace.

    Args:
        trace: the trace of the images.
        kept: kept patches of each mask, bool [masks, patches].
        layout: token layout if hidden patches are dropped; None if they are blanked.
        grid: rows and columns of the patches.
        batch: masks per forward pass; with dropped tokens, the same number of tokens.
        key: cache key of the masks.
    """
    assert trace.pixels is not None
    masks, images = len(kept), trace.pixels.detach().split(1)
    known: list[Tensor] = trace.cached_outputs.get(key) or [torch.empty(0)] * len(images)
    before = min(len(known[0]), masks)  # fewer masks are the first of more masks
    with tracking("sampling", len(images) * masks) as progress:
        progress(len(images) * before)
        if before < masks:
            if layout is not None:
                batch = batch * layout.num_tokens // (layout.num_prefix_tokens + int(kept[0].sum()))
            outputs = []
            for image, cached in zip(images, known, strict=True):
                scores = [cached] if before else []
                for part in kept[before:].split(batch):
                    scores.append(_log_odds(trace, image, part, layout, grid))
                    progress(len(part))
                outputs.append(torch.cat(scores))
            known = trace.cached_outputs[key] = outputs
    return [scores[:masks] for scores in known]


def _hiding(trace: TargetedTrace) -> tuple[TokenLayout | None, tuple[int, int], str]:
    """Return the layout of tokens that can be dropped (or None), the patch grid, and a description."""
    assert trace.pixels is not None
    assert trace.facts is not None
    try:
        layout = droppable_tokens(trace.model, trace.pixels, trace.facts.layout, trace.followed.read)
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
        read = trace.followed.read
        with torch.no_grad():
            logits = run_on_patches(trace.model, image, indices, layout=layout, outputs=read)
        return log_odds(logits, trace.followed.activation)
    owners = cell_owners(image.shape[-2], image.shape[-1], *grid)
    visible = kept[:, owners].unsqueeze(1).to(image.device)  # [masks, 1, height, width]
    return trace.log_odds(torch.where(visible, image, image.mean(dim=(2, 3), keepdim=True)))


#: The methods of the consensus with their weights; each has its default options unless given.
PARTS = {"gae": 1, "sampling": 2}

# Minimum share of a patch, relative to a constant map, so that the other map still ranks patches that are 0 in one.
FLOOR = 1e-6


def consensus(trace: TargetedTrace, **options: Any) -> Maps:
    """Weighted geometric mean of GAE and sampling for the target, each refined and divided by its sum."""
    grids: list[Tensor] = []
    facts: list[dict[str, Any]] = [{"made_of": " and ".join(PARTS)} for _ in trace.wanted]
    for name in PARTS:
        method = get_method(name)
        accepted = {name: value for name, value in options.items() if method.accepts(name)}
        maps, _ = make_maps(method, method.complete(accepted), trace)
        grids.append(maps.grids)
        facts = [known | further for known, further in zip(facts, maps.facts or [{}] * len(facts), strict=True)]
    return Maps(geometric_mean(grids, list(PARTS.values())), facts)


def geometric_mean(grids: list[Tensor], weights: list[int]) -> Tensor:
    """Return the weighted geometric mean of non-negative maps [batch, rows, cols], each divided by its sum.

    Shares are at least a millionth of those of a constant map, so that a 0 in a single map is not decisive.

    >>> geometric_mean([torch.tensor([[[3.0, 1.0]]]), torch.tensor([[[1.0, 3.0]]])], [1, 1])
    tensor([[[0.4330, 0.4330]]], dtype=torch.float64)
    """
    logs = []
    for grid, weight in zip(grids, weights, strict=True):
        shares = grid.detach().double().clamp_min(0.0)
        shares = shares / shares.sum(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        logs.append(weight / sum(weights) * shares.clamp_min(FLOOR / grid[0].numel()).log())
    return torch.stack(logs).sum(dim=0).exp()
