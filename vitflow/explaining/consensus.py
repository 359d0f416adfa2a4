"""Consensus: a patch counts where a map of gradients and one of sampling agree that it does."""

from typing import Any

import torch
from torch import Tensor

from vitflow.explaining.asked import AskedTrace
from vitflow.explaining.maps import Maps
from vitflow.explaining.method_table import get_method
from vitflow.explaining.refining import make_maps

#: The methods that agree, each with its own defaults where it is not told otherwise, and what each weighs.
PARTS = {"gae": 1, "sampling": 2}

# A patch that one map leaves at 0 keeps so much of the share of a patch in a constant map, so that the other map still
# ranks it.
FLOOR = 1e-6


def consensus(trace: AskedTrace, **options: Any) -> Maps:
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
