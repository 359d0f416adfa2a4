"""Attention of the layers of a forward pass: that of their modules, concatenated or fused."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Self

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, VitflowError, check_known
from vitflow.methods.fusion import LargestValues, dense
from vitflow.methods.gradients import (
    Values,
    ValueWeighting,
    at_least_float32,
    check_value_weighting,
    fuse_weighted,
    join_values,
)
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import LAYOUT
from vitflow.recording.attention_kinds import Arrange
from vitflow.recording.projections import Projection

# Head fusion, and the value weighting before it.
FusionKey = tuple[str, ValueWeighting]


#: Factor of means over heads in half precision: probabilities down to 2e-9 keep 11 bits.
MEAN_SCALE = 2.0**15
#: The least share of discarded values for which storing the others with their positions saves memory.
SPARSE = 0.5

#: Key of the layers below the start of rollout in the cache of a model, with the input size: queries and keys by path.
LOWER_LAYERS = "lower layers"
#: Message for a trace without a forward pass.
NOTHING_RECORDED = "Nothing has been recorded: run the model's forward pass inside `with record_attention(model)`."
# Names of cross-attention modules, in lower case.
_CROSS = ".cross_attention"
_CROSSING = ("cross", "encdec", "encoder_attn")


@dataclass(frozen=True, slots=True, eq=False)
class ModuleAttention:
    """Attention as one module computed it.

    Attributes:
        tensor: the applied probabilities, in the autograd graph if gradients were requested.
        arrange: rearranges them to [batch · windows, heads, queries, keys]; None if they have this form.
        vectors: the requested value vectors, [batch · windows, heads, keys, width]; `projection` is the module's.
        mixed: True if the heads were mixed or re-weighted after the softmax (CaiT, ConViT, EfficientFormerV2). Rows may
            not sum to 1, and entries may be negative; fused matrices clamp these to 0.
        keys, visible: as for `AttentionLayer`.
    """

    tensor: Tensor
    arrange: Arrange | None = None
    vectors: Tensor | None = None
    projection: Projection | None = None
    mixed: bool = False
    keys: Tensor | None = None
    visible: Tensor | None = None

    @property
    def heads(self) -> Tensor:
        """The probabilities, [batch · windows, heads, queries, keys]."""
        return self.arranged(self.tensor)

    def arranged(self, like: Tensor) -> Tensor:
        """Rearrange a tensor such as the gradient to [batch · windows, heads, queries, keys]."""
        return like if self.arrange is None else self.arrange(like)


@dataclass(slots=True)
class AttentionLayer:
    """Attention of one layer in one forward pass.

    Attributes:
        name: module path of the layer, such as "blocks.3.attn".
        parts: attention of each module of the layer (several if modules run in parallel on the same tokens); empty if
            only fused matrices were kept.
        fused: fused matrices [batch · windows, queries, keys] or their largest values, by (fusion, value weighted).
        values: the value vectors of this attention, if requested.
        located: its query and key tokens and their positions; None if unknown.
        keys: the key vectors with concatenated heads, [batch · windows, keys, width], if requested and observed.
        mixed: True if its heads were mixed or re-weighted after the softmax.
        visible: attention mask, bool [batch or 1, queries, keys], if requested and not all True.
        passed: mask of the tokens that this layer receives from the layer below, bool [batch, tokens]; None for all.
            Others were replaced or zeroed between the blocks.
        mean: if requested, the mean over heads times `MEAN_SCALE`, float16 [batch · windows, queries, keys].
        prefix: number of prefix tokens whose columns were kept, if values were discarded.
    """

    name: str
    parts: tuple[ModuleAttention, ...] = ()
    fused: dict[FusionKey, Tensor | LargestValues] = field(default_factory=dict)
    values: Values | None = None
    located: LayerTokens | None = None
    keys: Tensor | None = None
    mixed: bool = False
    visible: Tensor | None = None
    passed: Tensor | None = None
    mean: Tensor | None = None
    prefix: int | None = None

    @property
    def heads(self) -> Tensor | None:
        """All heads of the layer, [batch · windows, heads, queries, keys]; None if only fused matrices were kept.

        A layer without windows has one window of all tokens.
        """
        return join_parts([part.heads for part in self.parts]) if self.parts else None

    @property
    def example(self) -> Tensor:
        """Any matrix of the layer, [batch · windows, …, queries, keys], or zeros of its shape."""
        if self.parts:
            return self.parts[0].heads
        fused = next(iter(self.fused.values()), self.mean)
        assert fused is not None
        if isinstance(fused, LargestValues):
            return fused.prefix.new_zeros(()).expand(*fused.prefix.shape[:2], fused.prefix.shape[1])
        return fused

    @property
    def tokens(self) -> LayerTokens:
        """Tokens of this layer and their positions; raises VitflowError if unknown."""
        if self.located is None:
            raise VitflowError(
                f"The token positions of {self.name} are unknown. Pass {LAYOUT}, or use sampling, input_gradient or "
                "occlusion."
            )
        return self.located


class RecordedLayers(list[AttentionLayer]):
    """The recorded attention layers of one forward pass, first layer first."""

    def windows(self, matrices: Sequence[Tensor | LargestValues]) -> list[Tensor | LargestValues]:
        """Reshape the matrices [batch · windows, queries, keys] of each layer to [batch, windows, queries, keys]."""
        return [
            matrix if isinstance(matrix, LargestValues) else matrix.unflatten(0, (-1, layer.tokens.windows))
            for layer, matrix in zip(self, matrices, strict=True)
        ]

    def discards_other_values(self) -> bool:
        """Return True if values were discarded as if the tokens of a layer were others than the located ones."""
        located = ((layer.prefix, layer.located) for layer in self if layer.located is not None)
        return any(
            prefix is not None and not (tokens.dense and prefix == tokens.keys.num_prefix_tokens)
            for prefix, tokens in located
        )

    def _recorded(self) -> Self:
        if not self:
            raise VitflowError(NOTHING_RECORDED)
        return self

    @property
    def streams(self) -> dict[str, tuple[AttentionLayer, ...]]:
        """Layers of each token stream by its name, first layer first.

        A stream is a stack of blocks, named by its path ("encoder", "model.vision_tower.vision_model.encoder");
        cross-attention between streams has a separate name ("decoder.cross_attention").
        """
        streams: dict[str, tuple[AttentionLayer, ...]] = {}
        for layer in self:
            name = stream_of(layer.name)
            streams[name] = (*streams.get(name, ()), layer)
        return streams

    def of_stream(self, name: str) -> Self:
        """Return only the layers of one stream; OptionError for an unknown one."""
        streams = self.streams
        check_known("stream of tokens", name, streams)
        return type(self)(streams[name])

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """Attention of each layer, first layer first.

        [batch, heads, tokens, tokens], or [batch, tokens, tokens] if recorded with a head fusion.
        """
        attentions = []
        for layer in self._recorded():
            if layer.heads is None and len(layer.fused) != 1:
                kept = ", ".join(f"{name}{_weighted_words(weighting)}" for name, weighting in layer.fused)
                raise OptionError(f"Several fused matrices were recorded ({kept}): choose one with trace.fused(…).")
            attentions.append(layer.heads if layer.heads is not None else dense(next(iter(layer.fused.values()))))
        return tuple(attentions)

    def heads(self, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """Return all heads of each layer, [batch, heads, tokens, tokens], value weighted if requested.

        Raises:
            OptionError: only fused matrices, or no value vectors, were recorded.
        """
        check_value_weighting(value_weighted)
        heads = [layer.heads for layer in self._recorded() if layer.heads is not None]
        if len(heads) != len(self):
            raise OptionError("Only fused attention was recorded: record without head_fusion to keep every head.")
        if value_weighted is False:
            return heads
        values = [layer.values for layer in self if layer.values is not None]
        if len(values) != len(heads):
            raise OptionError("Value vectors were not recorded: record with values=True.")
        return [each.weigh(at_least_float32(layer), value_weighted) for layer, each in zip(heads, values, strict=True)]

    def fused(self, head_fusion: str = "mean", *, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """Return the fused attention of each layer, [batch, tokens, tokens], first layer first.

        Raises:
            OptionError: neither this fusion nor all heads were recorded.
        """
        return list(map(dense, self.fused_values(head_fusion, value_weighted)))

    def fused_values(self, head_fusion: str, value_weighted: ValueWeighting) -> list[Tensor | LargestValues]:
        """Return `fused`, with layers of which only the largest values were kept as these."""
        check_value_weighting(value_weighted)
        key = (head_fusion, value_weighted)
        matrices = []
        for layer in self._recorded():
            if key not in layer.fused:
                if layer.heads is None or (value_weighted and layer.values is None):
                    raise OptionError(
                        f"Attention fused by {head_fusion}{_weighted_words(value_weighted)} was not recorded: record "
                        "it, or record every head."
                    )
                layer.fused[key] = fuse_parts(at_least_float32(layer.heads), key, layer.values, layer.parts)
            matrices.append(layer.fused[key])
        return matrices


def join_parts(parts: Sequence[Tensor]) -> Tensor:
    """Return the heads of modules in parallel, [batch · windows, heads, queries, keys], one after another."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim=1)


def close_layer(
    name: str, parts: Sequence[ModuleAttention], module: nn.Module, fusions: Collection[FusionKey] | None, means: bool
) -> AttentionLayer:
    """Return the layer of finished attention modules: fused, or with every head if `fusions` is None.

    Fusions are applied now, so that only one layer's heads are in memory.
    """
    values = _values_of(parts)
    vectors = [part.keys for part in parts if part.keys is not None]
    keys = torch.cat(vectors, dim=-1) if len(vectors) == len(parts) else None
    mixed = any(part.mixed for part in parts)
    layer = AttentionLayer(name, tuple(parts), values=values, keys=keys, mixed=mixed, visible=parts[0].visible)
    if fusions is not None and layer.heads is not None:
        heads = layer.heads.detach()
        layer.fused = {key: fuse_parts(heads, key, values, parts) for key in fusions}
        layer.mean = (heads.mean(dim=1, dtype=torch.float32) * MEAN_SCALE).half() if means else None
        layer.parts, layer.values = (), None
    return layer


def _values_of(parts: Sequence[ModuleAttention]) -> Values | None:
    """Return the values of a layer, whose modules have a projection each or one together; None if not requested."""
    recorded = []
    for projection in dict.fromkeys(part.projection for part in parts):
        those = [part for part in parts if part.projection is projection]
        vectors = [part.vectors for part in those if part.vectors is not None]
        if projection is None or len(vectors) < len(those):
            return None
        recorded.append(projection.values(torch.cat(vectors, dim=1)))
    return recorded[0] if len(recorded) == 1 else join_values(recorded)


def fuse_parts(heads: Tensor, key: FusionKey, values: Values | None, parts: Sequence[ModuleAttention]) -> Tensor:
    """Fuse the heads of these parts; if heads were mixed, clamp negative entries to 0."""
    fused = fuse_weighted(heads, *key, values)  # type: ignore[arg-type]
    return fused.clamp_min(0.0) if any(part.mixed for part in parts) else fused


@lru_cache(maxsize=1024)
def stream_of(path: str) -> str:
    """Return the name of the token stream of an attention module, from its path in the model.

    >>> stream_of("decoder.block.3.layer.0.SelfAttention"), stream_of("decoder.block.3.layer.1.EncDecAttention")
    ('decoder', 'decoder.cross_attention')
    >>> stream_of("h.0.attn"), stream_of("model.vision_tower.encoder.layers.1.self_attn")
    ('h', 'model.vision_tower.encoder')
    """
    parts = path.split(".")
    stack = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    name = ".".join(parts[: max(stack - 1, 1)])  # without the list of blocks, unless nothing else is left
    crosses = any(word in part.lower() for part in parts[stack:] for word in _CROSSING)
    return f"{name}{_CROSS}" if crosses else name


def stack_of(path: str) -> str:
    """Return the name of the stack of an attention module: its stream, together with that of its cross-attention."""
    return stream_of(path).removesuffix(_CROSS)


def _weighted_words(value_weighted: ValueWeighting) -> str:
    if value_weighted == "output":
        return " and value weighted by output"
    return " and value weighted" if value_weighted else ""
