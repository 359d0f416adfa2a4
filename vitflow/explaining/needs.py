"""What methods need to see of a forward pass, so that no more than that is kept of it."""

from dataclasses import dataclass

from torch import nn

from vitflow.explaining.method_choices import Chosen
from vitflow.explaining.refining import HEAD_MEANS, needs_head_means, needs_keys
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import block_norm
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
        keys: the key vectors of each layer.
    """

    attention: bool
    every_head: bool
    gradients: bool
    values: bool
    fusions: frozenset[FusionKey]
    feature_layers: frozenset[int]
    keys: bool

    @classmethod
    def of(cls, chosen: Chosen) -> "Needs":
        """What methods with these options need."""
        named = frozenset[str]().union(*(method.needs for method, _ in chosen))
        gradients, attention = "gradients" in named, bool(named & {"attention", "heads"})
        every_head = any(
            "heads" in method.needs or (gradients and attention) or options.get("head") is not None
            for method, options in chosen
        )
        fusions = frozenset(
            (str(options.get("head_fusion", "mean")), options.get("value_weighted", False))
            for method, options in chosen
            if "attention" in method.needs
        )
        if means := any(needs_head_means(options) for _, options in chosen):
            fusions |= {HEAD_MEANS}
        keys = any(needs_keys(options) for _, options in chosen)
        weighted = any(options.get("value_weighted") for _, options in chosen)
        layers = frozenset(options["layer"] for method, options in chosen if "features" in method.needs)
        attention = attention or means or keys
        return cls(attention, every_head, gradients, every_head and weighted, fusions, layers, keys)

    def record(self, model: nn.Module, layout: TokenLayout | None) -> record_attention:
        """A recording of the model that keeps it."""
        return record_attention(
            model,
            fusions=() if self.every_head else self.fusions,
            values=self.values,
            gradients=self.gradients,
            features=sorted({block_norm(model, layer) for layer in self.feature_layers}),
            attention=self.attention,
            layout=layout,
            keys=self.keys,
        )
