"""Sampling with random patches dropped, and its consensus with GAE."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import UnsupportedModelError, check_known, whole_number
from vitflow.explaining.applying import affinity_of, make_maps
from vitflow.explaining.maps import Maps, TargetedTrace
from vitflow.methods.cells import cell_owners
from vitflow.methods.refinement import AffinityName
from vitflow.methods.sampling import NORMAL_95, draw_masks, mean_differences, regress, split_half_maps
from vitflow.methods.similarity import spearman
from vitflow.methods.tokens import TokenLayout
from vitflow.models.outputs import log_odds
from vitflow.progress import tracking
from vitflow.recording.changed_tokens import droppable_tokens, run_on_patches
from vitflow.registry.method_table import get_method
from vitflow.registry.options import OPTIONS

#: Maximum number of masks with masks="auto", and the number of masks after which it compares maps.
MOST_MASKS, MASKS_PER_STEP = 256, 32
_BLANKED = "patches blanked, because tokens cannot be dropped:"
# A map has converged if this share of its strongest patches stays the same in two steps in a row.
_CONVERGED = 0.9


def sampling(
    trace: TargetedTrace, *, masks: int | str, estimator: str, affinity: AffinityName, refine: int, **drawn: Any
) -> Maps:
    """Weight of each patch in the log-odds of the target, from random masks of all patches.

    The difference of means is over masks with and without the patch. The regression has the affinity of refinement as
    the factor of its prior covariance. With masks="auto" each image gets masks until its map has converged.
    """
    check_known("estimator", estimator, OPTIONS["estimator"].choices)
    targets = trace.class_indices.tolist()

    @lru_cache
    def affinities(grid: tuple[int, int]) -> Tensor | None:
        """Return the affinity of the patches, [batch, patches, patches], if it is used."""
        if estimator != "regression" and not refine:
            return None
        try:
            return affinity_of(trace, affinity, grid).matrix
        except UnsupportedModelError:
            if estimator == "regression":
                raise
            return None

    def estimate(image: int, kept: Tensor, scores: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor | None]:
        """Return the weight of each patch, [patches], and its standard deviation, which the regression has."""
        scores = scores[:, targets[image]]
        prior = affinities(grid) if estimator == "regression" else None
        if prior is None:
            return mean_differences(kept, scores), None
        posterior = regress(kept, scores, prior[image])
        return posterior.mean, posterior.std

    strongest: dict[int, list[set[int]]] = {}

    def converged(image: int, kept: Tensor, scores: Tensor, grid: tuple[int, int]) -> bool:
        """Return True if the last two steps hardly changed the strongest tenth of the patches."""
        values, spread = estimate(image, kept, scores, grid)[0].clamp_min(0.0), affinities(grid)
        if spread is not None:
            for _ in range(refine):
                values = spread[image] @ values.to(spread)
        top = set(values.topk(max(1, round(0.1 * len(values)))).indices.tolist())
        tops = strongest.setdefault(image, [])
        tops.append(top)
        return len(tops) > 2 and all(len(top & before) >= _CONVERGED * len(top) for before, top in pairwise(tops[-3:]))

    kept, outputs, grid, hidden = sample(trace, masks=masks, converged=converged if masks == "auto" else None, **drawn)
    grids, facts, significant = [], [], []
    for image, scores in enumerate(outputs):
        used = kept[: len(scores)]
        weights, std = estimate(image, used, scores, grid)
        grids.append(weights.reshape(grid))
        if std is not None:
            significant.append((weights > NORMAL_95 * std).reshape(grid))
        reliability = spearman(*(half.numpy() for half in split_half_maps(used, scores[:, targets[image]])))
        facts.append({"reliability": None if reliability is None else round(reliability, 3), "hidden": hidden})
        if masks == "auto":
            facts[-1]["masks_used"] = len(scores)
    return Maps(torch.stack(grids), facts, significant=torch.stack(significant) if significant else None)


def sample(
    trace: TargetedTrace,
    *,
    masks: int | str,
    keep: float,
    cells: int,
    random_seed: int,
    occlusion_batch: int,
    converged: Callable[[int, Tensor, Tensor, tuple[int, int]], bool] | None = None,
) -> tuple[Tensor, list[Tensor], tuple[int, int], str]:
    """Run the model on masked images.

    Args:
        trace: the trace of the images.
        masks: number of masks, or "auto".
        keep, cells, random_seed: options of the masks.
        occlusion_batch: masks per forward pass; if tokens are dropped, scaled to the same total number of tokens.
        converged: for masks="auto", called after every 32 masks with the index of the image, the masks, their outputs
            and the grid, until it returns True.

    Returns:
        Kept patches of each mask, bool [masks, patches]; the log-odds [masks, classes] of each image, for its first
        masks; rows and columns of the patches; a description of how patches were hidden.
    """
    batch = whole_number("occlusion_batch", occlusion_batch, 1)
    layout, grid, hidden = _hiding(trace)
    most: Any = MOST_MASKS if masks == "auto" else masks
    kept = draw_masks(*grid, masks=most, keep=keep, cells=cells, seed=random_seed)
    failed = ("sampling fails", keep, cells)
    if failed in trace.cached_outputs:
        layout, hidden = None, trace.cached_outputs[failed]
    if layout is not None:
        batch = batch * layout.num_tokens // (layout.num_prefix_tokens + int(kept[0].sum()))
    images = trace.pixels.detach().split(1)
    # Fewer masks are the first of more masks: the outputs serve further classes, methods and numbers of masks.
    known: list[list[Tensor]] = trace.cached_outputs.setdefault(
        ("sampling", keep, cells, random_seed), [[] for _ in images]
    )
    outputs = []
    with tracking("sampling", len(images) * len(kept)) as progress:
        for number, (image, rows) in enumerate(zip(images, known, strict=True)):  # a row for each mask
            count = 0
            while count < len(kept):
                start, count = count, len(kept) if converged is None else count + MASKS_PER_STEP
                progress(max(min(len(rows), count) - start, 0))
                while len(rows) < count:
                    part = kept[len(rows) : min(len(rows) + batch, count)]
                    try:
                        rows.extend(_log_odds(trace, image, part, layout, grid))
                    except (RuntimeError, ValueError, AssertionError) as error:
                        if layout is None or any(known) or isinstance(error, torch.OutOfMemoryError):
                            raise
                        reason = f"It fails on {int(part[0].sum())} of its patches ({str(error).splitlines()[0]})."
                        layout, hidden = None, f"{_BLANKED} {reason}"  # a model may reshape its tokens
                        trace.cached_outputs[failed] = hidden
                        continue
                    progress(len(part))
                if converged is not None and converged(number, kept[:count], torch.stack(rows[:count]), grid):
                    break
            progress(len(kept) - count)
            outputs.append(torch.stack(rows[:count]))
    return kept, outputs, grid, hidden


def _hiding(trace: TargetedTrace) -> tuple[TokenLayout | None, tuple[int, int], str]:
    """Return the layout of tokens that can be dropped (or None), the patch grid, and a description."""
    try:
        layout = droppable_tokens(trace.model, trace.pixels, trace.model_info.layout, trace.perturbed_outputs.read)
        return layout, (layout.rows, layout.cols), "tokens dropped"
    except UnsupportedModelError as error:
        hidden = f"{_BLANKED} {error}"
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
    return trace.log_odds(torch.where(visible, image, image.mean(dim=(2, 3), keepdim=True)))


#: The methods of the consensus with their weights; each has its default options unless given.
PARTS = {"gae": 1, "sampling": 2}

# Minimum share of a patch, relative to a constant map, so that the other map still ranks patches that are 0 in one.
FLOOR = 1e-6


def consensus(trace: TargetedTrace, **options: Any) -> Maps:
    """Weighted geometric mean of GAE and sampling for the target, each refined and divided by its sum."""
    grids: list[Tensor] = []
    facts: list[dict[str, Any]] = [{"made_of": " and ".join(PARTS)} for _ in trace.class_indices]
    for name in PARTS:
        method = get_method(name)
        accepted = {name: value for name, value in options.items() if method.accepts(name)}
        maps, _ = make_maps(method, method.complete(accepted), trace)
        grids.append(maps.grids)
        facts = [known | further for known, further in zip(facts, maps.facts or [{}] * len(facts), strict=True)]
    return Maps(geometric_mean(grids, list(PARTS.values())), facts, significant=maps.significant, refined=maps.refined)


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
