"""Consensus: a patch counts where several methods agree that it does."""

import torch
from torch import Tensor

from vitflow.explaining.asking.method_table import get_method
from vitflow.explaining.making.asked import AskedTrace
from vitflow.explaining.making.maps import Maps, Patch
from vitflow.explaining.making.refining import make_maps
from vitflow.methods.refinement import AffinityName
from vitflow.methods.values import ValueWeighting

#: The methods that agree, each with its own defaults.
PARTS = ("gae", "gradient_rollout", "rollout")

# A patch that one map leaves at 0 keeps so much of the share of a patch in a constant map, so that the other maps still
# rank it.
FLOOR = 1e-6


def consensus(
    trace: AskedTrace, *, refine: int, affinity: AffinityName, value_weighted: ValueWeighting, patch: Patch | None
) -> Maps:
    """The geometric mean of GAE, gradient rollout and rollout for the target, each refined and scaled by its sum."""
    grids, facts = [], []
    for name in PARTS:
        method = get_method(name)
        own = {"refine": refine, "affinity": affinity, "value_weighted": value_weighted, "patch": patch}
        maps, _ = make_maps(method, method.complete(own), trace)
        grids.append(maps.grids)
        facts.append(maps.facts)
    return Maps(geometric_mean(grids), facts[0])


def geometric_mean(grids: list[Tensor]) -> Tensor:
    """The geometric mean of maps without negative values, [batch, rows, cols] each, every one scaled by its own sum.

    A share below a millionth of a constant map's counts as that much: a 0 in one map alone decides nothing.

    >>> geometric_mean([torch.tensor([[[3.0, 1.0]]]), torch.tensor([[[1.0, 3.0]]])])
    tensor([[[0.4330, 0.4330]]], dtype=torch.float64)
    """
    logs = []
    for grid in grids:
        shares = grid.detach().double().clamp_min(0.0)
        shares = shares / shares.sum(dim=(-2, -1), keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        logs.append(shares.clamp_min(FLOOR / grid[0].numel()).log())
    return torch.stack(logs).mean(dim=0).exp()
