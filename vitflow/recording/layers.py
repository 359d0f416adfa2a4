"""The attention of one layer: what its modules computed, put together or fused."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitflow.errors import ValueNormsError, VitflowError
from vitflow.methods.gradients import Values, ValueWeighting, fuse_weighted, join_values
from vitflow.methods.rollout import rollout_step
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.models.anatomy import output_projection

# How heads were fused: the name of the fusion, and the value weighting that came before it.
FusionKey = tuple[str, ValueWeighting]


# So many layers make one product. With more, the products take more time, each a part of a small model's own layer, and
# what is left to save is little beside what the forward pass needs.
_MULTIPLIED = 3

# Brings probabilities, or values, into the form [batch · windows, heads, tokens, …].
Arrange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class ModuleAttention:
    """The attention of one module as it computed it.

    Attributes:
        tensor: the probabilities that it applied, on the path of the gradients where those were asked for.
        arrange: brings them into the form [batch · windows, heads, queries, keys]; None where they have it.
        values: the value vectors that they were applied to, where asked for.
        mixed: whether the heads were mixed or re-weighed after the softmax (CaiT, ConViT, EfficientFormerV2). Rows need
            not sum to 1 then, and entries may be negative; in fused matrices those count as 0.
        keys: the key vectors, heads side by side, [batch · windows, keys, width], where asked for and seen.
        visible: which keys each query may see, bool [batch or 1, queries, keys], where asked for and not all.
    """

    tensor: Tensor
    arrange: Arrange | None = None
    values: Values | None = None
    mixed: bool = False
    keys: Tensor | None = None
    visible: Tensor | None = None

    @property
    def heads(self) -> Tensor:
        """The probabilities, [batch · windows, heads, queries, keys]."""
        return self.arranged(self.tensor)

    def arranged(self, like: Tensor) -> Tensor:
        """A tensor of the same form, such as the gradient, [batch · windows, heads, queries, keys]."""
        return like if self.arrange is None else self.arrange(like)


@dataclass(slots=True)
class AttentionLayer:
    """The attention of one layer of one forward pass.

    Attributes:
        name: the layer's module path in the model, such as "blocks.3.attn".
        parts: what each attention module of the layer computed (more than one where modules work side by side on the
            same tokens); empty where only fused matrices were kept.
        fused: fused matrices [batch · windows, queries, keys] by (head fusion, value weighted).
        values: the value vectors that this attention passes on, where asked for.
        located: which tokens it attends between, and where they lie; None where that is not known.
        keys: the key vectors, heads side by side, [batch · windows, keys, width], where asked for and seen.
        mixed: whether its heads were mixed or re-weighed after the softmax.
        visible: which keys each query may see, bool [batch or 1, queries, keys], where asked for and not all.
        multiplied: of how many layers its fused matrix is rollout's product, each with its residual connection; it has
            the name of the top one. 0 where it is the attention itself.
    """

    name: str
    parts: tuple[ModuleAttention, ...] = ()
    fused: dict[FusionKey, Tensor] = field(default_factory=dict)
    values: Values | None = None
    located: LayerTokens | None = None
    keys: Tensor | None = None
    mixed: bool = False
    visible: Tensor | None = None
    multiplied: int = 0

    @property
    def heads(self) -> Tensor | None:
        """All heads of the layer, [batch · windows, heads, queries, keys], or None where only fused matrices were kept.

        A layer without windows has one window, which holds all tokens.
        """
        if len(self.parts) > 1:
            return torch.cat([part.heads for part in self.parts], dim=1)
        return self.parts[0].heads if self.parts else None

    @property
    def example(self) -> Tensor:
        """Any of the layer's matrices, [batch · windows, …, queries, keys]."""
        return self.parts[0].heads if self.parts else next(iter(self.fused.values()))

    @property
    def tokens(self) -> LayerTokens:
        """Where the tokens of this layer lie; VitflowError before that is known."""
        if self.located is None:
            raise VitflowError(f"It is not known where the tokens of {self.name} lie.")
        return self.located


def close_layer(
    name: str, parts: Sequence[ModuleAttention], module: nn.Module, fusions: Collection[FusionKey]
) -> AttentionLayer:
    """A layer that has run, of what its modules computed: fused, or with every head where no fusion is asked for.

    Args:
        name: its path in the model.
        parts: the attention of its modules, in their order.
        module: the module at that path.
        fusions: what to fuse, at once, so that no more than one layer's heads are alive.
    """
    seen = [part.values for part in parts if part.values is not None]
    values = seen[0] if len(seen) == 1 else join_values(seen) if seen else None
    vectors = [part.keys for part in parts if part.keys is not None]
    keys = torch.cat(vectors, dim=-1) if len(vectors) == len(parts) else None
    mixed = any(part.mixed for part in parts)
    layer = AttentionLayer(name, tuple(parts), values=values, keys=keys, mixed=mixed, visible=parts[0].visible)
    if not fusions:
        return layer
    heads = layer.heads
    assert heads is not None
    fused = {key: fuse_parts(heads.detach(), key, values, parts) for key in fusions}
    return AttentionLayer(name, fused=fused, keys=keys, mixed=mixed, visible=layer.visible)


def pile_up(layers: list[AttentionLayer], layer: AttentionLayer, residual: float, normal: bool) -> None:
    """Put a layer on those that ran before it, multiplied with the ones below: three take the memory of one.

    It is normal where the rows of each head sum to 1.
    """
    [((fusion, weighting), fused)] = layer.fused.items()
    normal = not layer.mixed and (bool(weighting) or (normal and fusion == "mean"))
    below = layers[-1] if layers else None
    if below is None or below.multiplied % _MULTIPLIED == 0 or below.example.shape != fused.shape:
        layer.multiplied, product = 1, rollout_step(fused, None, residual, normal=normal)
        layers.append(layer)
    else:
        layer.multiplied = below.multiplied + 1
        product = rollout_step(fused, below.example, residual, normal=normal)
        layers[-1] = layer
    layer.fused = {(fusion, weighting): product}


def fuse_parts(heads: Tensor, key: FusionKey, values: Values | None, parts: Sequence[ModuleAttention]) -> Tensor:
    """Fuse the heads of these parts; where heads were mixed, what is negative afterwards counts as 0."""
    fused = fuse_weighted(heads, *key, values)  # type: ignore[arg-type]
    return fused.clamp_min(0.0) if any(part.mixed for part in parts) else fused


def identity_rows(rows: Tensor, first: int) -> None:
    """Make rows [images, queries, keys] with nothing above 0, the first of them that of a token, the identity's."""
    empty = (rows.amax(dim=-1) <= 0).nonzero()
    rows[empty[:, 0], empty[:, 1], first + empty[:, 1]] = 1.0


def read_values(value: Tensor, module: nn.Module, name: str, around: nn.Module | None) -> Values:
    """The value vectors of an attention module, with the projection that its heads go through."""
    projection = output_projection(module, around)
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and projection is not None and projection.shape[-1] == groups * value.shape[1] * value.shape[-1]:
        value = value.repeat_interleave(groups, dim=1)  # heads of one group share their values
    if projection is None or projection.shape[-1] != value.shape[1] * value.shape[-1]:
        raise ValueNormsError(
            f"{type(module).__name__} ({name}) does not join its heads by one linear output projection, which value "
            "weighting needs."
        )
    value = value.detach()
    value = value if value.dtype == torch.float64 else value.float()
    return Values(value, projection.detach().to(value.dtype))
