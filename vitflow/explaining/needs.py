"""What methods need to see of a forward pass, so that no more than that is kept of it."""

from typing import Any

from torch import nn

from vitflow.explaining.choices import Chosen, ChosenMethod
from vitflow.explaining.method_table import ROLLOUT
from vitflow.models.blocks import block_norm, block_paths, layer_output


def needs_gradients(chosen: Chosen) -> bool:
    """Whether a backward pass is needed."""
    return any("gradients" in one.method.needs for one in chosen)


def starts_at_readout(one: ChosenMethod) -> bool:
    """Whether a map starts at the tokens that the output is computed from."""
    return bool(one.method.needs & {"attention", "heads"}) and one.options.get("patch") is None


def recorded_for(chosen: Chosen, model: nn.Module) -> dict[str, Any]:
    """What to tell `record_attention` so that it keeps what some methods need, taken together."""
    needs = frozenset[str]().union(*(one.method.needs for one in chosen))
    gradients = "gradients" in needs
    single = any(one.options.get("head") is not None for one in chosen)
    every_head = single or "heads" in needs or (gradients and "attention" in needs)
    fusions = {
        (str(one.options.get("head_fusion", "mean")), one.options.get("value_weighted", False))
        for one in chosen
        if "attention" in one.method.needs
    }
    affinities = {one.options["affinity"] for one in chosen if one.options.get("refine")}
    keys, means = bool(affinities - {"attention"}), bool(affinities - {"keys"})
    if means:
        fusions.add(("mean", False))
    features = {block_norm(model, one.options["layer"]) for one in chosen if "features" in one.method.needs}
    for one in chosen:
        if "tokens" in one.method.needs:
            layer = one.options.get("layer")  # without one, every layer's
            features |= set(block_paths(model) if layer is None else [layer_output(model, layer)[0]])
    return {
        "attention": bool(needs & {"attention", "heads"}) or means or keys,
        "fusions": () if every_head else fusions,
        "values": every_head and any(one.options.get("value_weighted") for one in chosen),
        "gradients": gradients,
        "features": sorted(features),
        "keys": keys,
        "residual": 0.0 if every_head or means or keys or gradients else _residual_of_one_product(chosen),
    }


def _residual_of_one_product(chosen: Chosen) -> float:
    """The share of the residual connection, where all that is seen of attention goes into one and the same rollout."""
    named = ("head_fusion", "value_weighted", "residual", "discard_ratio", "start_layer", "end_layer")
    products: list[list[Any]] = [
        [one.method.function, *(one.options.get(name) for name in named)]
        for one in chosen
        if "attention" in one.method.needs
    ]
    if not products or any(product != products[0] for product in products[1:]):
        return 0.0
    function, _, _, residual, *others = products[0]
    return residual if [function, *others] == [ROLLOUT, 0.0, 1, -1] else 0.0
