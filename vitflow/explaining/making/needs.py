"""What methods need to see of a forward pass, so that no more than that is kept of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitflow.explaining.asking.choices import Chosen
from vitflow.explaining.asking.method_table import ROLLOUT
from vitflow.explaining.making.refining import HEAD_MEANS, needs_head_means, needs_keys
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import logits_of
from vitflow.models.blocks import block_norm, block_paths, layer_output
from vitflow.recording.layers import FusionKey
from vitflow.recording.recorder import record_attention


@dataclass(frozen=True, slots=True)
class Needs:
    """What some methods need, taken together.

    Attributes:
        attention: attention between tokens, of whatever kind.
        every_head: its heads one by one.
        gradients: what the backward pass needs.
        values: the value vectors that single heads are weighted by.
        fusions: the (head fusion, value weighted) pairs that suffice where the heads are not needed.
        feature_layers: the blocks whose first norm is looked at.
        token_layers: the blocks whose tokens are; None among them stands for all.
        keys: the key vectors of each layer.
        residual: where rollout's product of the layers suffices, the share of the residual connection in it; else 0.
    """

    attention: bool
    every_head: bool
    gradients: bool
    values: bool
    fusions: frozenset[FusionKey]
    feature_layers: frozenset[int]
    token_layers: frozenset[int | None]
    keys: bool
    residual: float

    @classmethod
    def of(cls, chosen: Chosen) -> "Needs":
        """What methods with these options need."""
        named = frozenset[str]().union(*(one.method.needs for one in chosen))
        gradients, attention = "gradients" in named, bool(named & {"attention", "heads"})
        every_head = any(
            "heads" in one.method.needs or (gradients and attention) or one.options.get("head") is not None
            for one in chosen
        )
        fusions = frozenset(
            (str(one.options.get("head_fusion", "mean")), one.options.get("value_weighted", False))
            for one in chosen
            if "attention" in one.method.needs
        )
        if means := any(needs_head_means(one.options) for one in chosen):
            fusions |= {HEAD_MEANS}
        keys = any(needs_keys(one.options) for one in chosen)
        weighted = any(one.options.get("value_weighted") for one in chosen)
        layers = frozenset(one.options["layer"] for one in chosen if "features" in one.method.needs)
        token_layers = frozenset(one.options.get("layer") for one in chosen if "tokens" in one.method.needs)
        attention = attention or means or keys
        residual = 0.0 if every_head or means or keys or gradients else _residual_of_one_product(chosen)
        weighted = every_head and weighted
        return cls(attention, every_head, gradients, weighted, fusions, layers, token_layers, keys, residual)

    def record(
        self, model: nn.Module, layout: TokenLayout | None, answers: Callable[[Any], Tensor | None] = logits_of
    ) -> record_attention:
        """A recording of the model that keeps it."""
        features = {block_norm(model, layer) for layer in self.feature_layers}
        for layer in self.token_layers:
            features |= set(block_paths(model) if layer is None else [layer_output(model, layer)[0]])
        return record_attention(
            model,
            fusions=() if self.every_head else self.fusions,
            values=self.values,
            gradients=self.gradients,
            features=sorted(features),
            attention=self.attention,
            layout=layout,
            keys=self.keys,
            residual=self.residual,
            answers=answers,
        )


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
