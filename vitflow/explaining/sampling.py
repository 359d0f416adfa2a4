"""Sampling: which patches raise this class, wherever the others are? Asked of the model with random patches dropped."""

from typing import Any

import torch
from torch import Tensor

from vitflow.errors import UnsupportedModelError, whole_number
from vitflow.explaining.maps import Maps
from vitflow.explaining.method_table import get_method
from vitflow.explaining.progress import tracking
from vitflow.explaining.refining import make_maps
from vitflow.explaining.targeted_trace import TargetedTrace
from vitflow.methods.cells import cell_owners, draw_masks, halves, mean_differences
from vitflow.methods.ranks import spearman
from vitflow.methods.tokens import TokenLayout
from vitflow.models.outputs import log_odds
from vitflow.recording.token_dropping import droppable_tokens, run_on_patches


def sampling(
    trace: TargetedTrace, *, masks: int, keep: float, cells: int, random_seed: int, occlusion_batch: int
) -> Maps:
    """How much higher the target's log-odds are with a patch than without it, over random choices of the others."""
    batch, targets = whole_number("occlusion_batch", occlusion_batch, 1), trace.wanted
    layout, grid, hidden = _ways(trace)
    kept = draw_masks(*grid, masks=masks, keep=keep, cells=cells, seed=random_seed)
    outputs = _outputs(trace, kept, layout, grid, batch, ("sampling", keep, cells, random_seed))
    grids, facts = [], []
    for scores, target in zip(outputs, targets.tolist(), strict=True):
        scores_of_target = scores[:, target]
        grids.append(mean_differences(kept, scores_of_target).reshape(grid))
        reliability = spearman(*(half.numpy() for half in halves(kept, scores_of_target)))
        facts.append({"reliability": None if reliability is None else round(reliability, 3), "hidden": hidden})
    return Maps(torch.stack(grids), facts)


def _outputs(
    trace: TargetedTrace,
    kept: Tensor,
    layout: TokenLayout | None,
    grid: tuple[int, int],
    batch: int,
    key: tuple[Any, ...],
) -> list[Tensor]:
    """The log-odds [masks, classes] of each image without some patches; what was answered before is not asked again.

    Args:
        trace: of the images.
        kept: which patches each mask keeps, bool [masks, patches].
        layout: of the tokens, where those of hidden patches are dropped.
        grid: rows and columns of the patches.
        batch: as many masks at once, or as many tokens as so many whole images have.
        key: what the masks were drawn by.
    """
    assert trace.pixels is not None
    masks, images = len(kept), trace.pixels.detach().split(1)
    known: list[Tensor] = trace.answered.get(key) or [torch.empty(0)] * len(images)
    before = min(len(known[0]), masks)  # the first of many masks are those of few
    with tracking("sampling", len(images) * masks) as progress:
        progress(len(images) * before)
        if before < masks:
            if layout is not None:
                batch = batch * layout.num_tokens // (layout.num_prefix_tokens + int(kept[0].sum()))
            outputs = []
            for image, own in zip(images, known, strict=True):
                found = [own] if before else []
                for part in kept[before:].split(batch):
                    found.append(_ask(trace, image, part, layout, grid))
                    progress(len(part))
                outputs.append(torch.cat(found))
            known = trace.answered[key] = outputs
    return [own[:masks] for own in known]


def _ways(trace: TargetedTrace) -> tuple[TokenLayout | None, tuple[int, int], str]:
    """The layout of the tokens that can be dropped; else None. And the patches' grid, and what is done with them."""
    assert trace.pixels is not None
    assert trace.facts is not None
    try:
        layout = droppable_tokens(trace.model, trace.pixels, trace.facts.layout, trace.outputs.read)
        return layout, (layout.rows, layout.cols), "tokens dropped"
    except UnsupportedModelError as error:
        hidden = f"patches blanked, for their tokens cannot be dropped: {error}"
    try:
        return None, (trace.layout.rows, trace.layout.cols), hidden
    except UnsupportedModelError:  # it has no patches of its own
        return None, trace.grid(), hidden


def _ask(
    trace: TargetedTrace, image: Tensor, kept: Tensor, layout: TokenLayout | None, grid: tuple[int, int]
) -> Tensor:
    """The log-odds [masks, classes] of one image with the kept patches alone."""
    if layout is not None:
        numbers = kept.nonzero()[:, 1].reshape(len(kept), -1)
        read = trace.outputs.read
        with torch.no_grad():
            logits = run_on_patches(trace.model, image, numbers, layout=layout, outputs=read)
        return log_odds(logits, trace.outputs.activation)
    owners = cell_owners(image.shape[-2], image.shape[-1], *grid)
    visible = kept[:, owners].unsqueeze(1).to(image.device)  # [masks, 1, height, width]
    return trace.log_odds(torch.where(visible, image, image.mean(dim=(2, 3), keepdim=True)))


#: The methods that agree, each with its own defaults where it is not told otherwise, and what each weighs.
PARTS = {"gae": 1, "sampling": 2}

# A patch that one map leaves at 0 keeps so much of the share of a patch in a constant map, so that the other map still
# ranks it.
FLOOR = 1e-6


def consensus(trace: TargetedTrace, **options: Any) -> Maps:
    """The weighted geometric mean of GAE and sampling for the target, each refined and scaled by its sum."""
    grids: list[Tensor] = []
    facts: list[dict[str, Any]] = [{"made_of": " and ".join(PARTS)} for _ in trace.wanted]
    for name in PARTS:
        method = get_method(name)
        own = {name: value for name, value in options.items() if method.accepts(name)}
        maps, _ = make_maps(method, method.complete(own), trace)
        grids.append(maps.grids)
        facts = [known | further for known, further in zip(facts, maps.facts or [{}] * len(facts), strict=True)]
    return Maps(geometric_mean(grids, list(PARTS.values())), facts)


def geometric_mean(grids: list[Tensor], weights: list[int]) -> Tensor:
    """The weighted geometric mean of maps without negative values, [batch, rows, cols], each scaled by its own sum.

    A share below a millionth of a constant map's counts as that much: a 0 in one map alone decides nothing.

    >>> geometric_mean([torch.tensor([[[3.0, 1.0]]]), torch.tensor([[[1.0, 3.0]]])], [1, 1])
    tensor([[[0.4330, 0.4330]]], dtype=torch.float64)
    """
    logs = []
    for grid, weight in zip(grids, weights, strict=True):
        shares = grid.detach().double().clamp_min(0.0)
        shares = shares / shares.sum(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        logs.append(weight / sum(weights) * shares.clamp_min(FLOOR / grid[0].numel()).log())
    return torch.stack(logs).sum(dim=0).exp()
