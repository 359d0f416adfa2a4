"""What the interception tells of a running model, put together layer by layer: fused at once where that is enough."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from vitflow.errors import NoAttentionError, UnsupportedModelError, ValueNormsError
from vitflow.methods.gradients import Values, fuse_weighted
from vitflow.recording.attending import Part
from vitflow.recording.attention_kinds import (
    arrangement,
    is_difference,
    is_head_by_head,
    is_packed,
    is_pooling,
    other_attention,
)
from vitflow.recording.isolation import is_aside
from vitflow.recording.layers import (
    Arrange,
    AttentionLayer,
    FusionKey,
    ModuleAttention,
    close_layer,
    identity_rows,
    pile_up,
    read_values,
)
from vitflow.recording.trace import Trace

# Blocks whose attention modules work side by side on the same tokens: together they are one layer with more heads.
_PARALLEL_BLOCKS = ("ParallelThingsBlock",)


@dataclass(eq=False)
class Listening:
    """Takes in the attention of a running model, and adds each layer that has run to a trace.

    Attributes:
        model: the model without wrappers.
        fusions: the (head fusion, value weighted) pairs to keep each layer by; none keep every head.
        gradients, values, wants_keys, wants_visible, on_layer, residual, within: as for `record_attention`.
        path: the modules that are running, outermost first.
        pooling: what a pooling head attends to, where there is one.
        batch: how many images or texts the pass has.
        seen: whether any attention was seen.
        recorded: the paths of the layers that have run, in their order.
        unapplied: the paths of the modules that told their softmax alone, without the product that applies it.
    """

    model: nn.Module
    fusions: Collection[FusionKey]
    gradients: bool
    values: bool
    wants_keys: bool
    wants_visible: bool
    on_layer: Callable[[AttentionLayer], None] | None
    residual: float
    within: str = ""

    def open(self, trace: Trace) -> None:
        """Listen for this trace from now on."""
        self._trace, self.seen = trace, False
        self._keep_heads = self.gradients or not self.fusions
        self.begin()

    def begin(self) -> None:
        """Forget the pass before: another one begins."""
        self.path: list[tuple[str, nn.Module]] = []
        self.pooling: Tensor | None = None
        self.batch = 1
        self.recorded: list[str] = []
        self.unapplied: set[str] = set()
        self._open: dict[str, list[ModuleAttention]] = {}  # layers that are running
        self._other: set[str] = set()  # what runs that is no attention between tokens, in words

    def running(self) -> str | None:
        """Name of the module that runs now; None if what it computes is no attention between tokens."""
        if not self.path or is_aside():
            return None
        name, module = self.path[-1]
        if self.within and name != self.within and not name.startswith(f"{self.within}."):
            return None
        other = other_attention(module)
        if other is not None:
            self._other.add(other)
            return None
        return name

    def saw(
        self,
        probabilities: Tensor,
        value: Tensor | None,
        mixed: bool = False,
        key: Tensor | None = None,
        visible: Tensor | None = None,
    ) -> None:
        """Take in the attention of one module and the values that it is applied to."""
        name, module = self.path[-1]
        if self._pools():
            self.pooling = probabilities
            return
        layer = self._parallel_block() or name
        if is_difference(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) applies the difference of two attention matrices, which has "
                "negative entries: rollout and flow are not defined on it."
            )
        if value is None:
            self.unapplied.add(name)
        arrange = arrangement(module, probabilities, self.batch)
        if visible is not None and visible.shape == probabilities.shape:  # heads are folded into the batch
            visible = (visible if arrange is None else arrange(visible)).any(dim=-3)
        if packed := is_packed(module, probabilities):  # values and keys are those of each group of heads
            visible = None if visible is None else visible.any(dim=-2, keepdim=True)
        values = self._values_of(value, None if packed else arrange)
        keys = self._keys_of(key, None if packed else arrange)
        part = ModuleAttention(probabilities, arrange, values, mixed, keys, visible)
        self._open.setdefault(layer, []).append(part)

    def streams(self, query: Tensor, key: Tensor) -> bool:
        """Whether this call's probabilities are only needed fused, so that they never have to exist all at once."""
        name, module = self.path[-1]
        return not (
            self._keep_heads
            or query.device.type != "cpu"
            or query.ndim != 4
            or name in self._open
            or self._parallel_block()
            or self._pools()
            or is_difference(module)
            or arrangement(module, query, self.batch) is not None
        )

    def saw_in_parts(self, parts: Iterator[Part], qkv: Sequence[Tensor], normal: bool, visible: Tensor | None) -> None:
        """Take in a layer that is computed part by part, and fuse each part."""
        query, key, value = qkv
        name = self.path[-1][0]
        self._open[name] = []
        own = self._values_of(value, None)
        (batch, heads, queries, _), keys = query.shape, key.shape[-2]
        if own is not None and any(weighting == "output" for _, weighting in self.fusions):
            own = replace(own, gram=own.gram_for(batch * queries))
        fused = {one: query.new_empty(batch, queries, keys) for one in self.fusions}
        share = _share(heads, query.dtype)
        for part in parts:
            count = len(part.probabilities) // heads
            for (fusion, weighting), matrix in fused.items():
                whole = count == batch and part.probabilities.shape[1] == queries
                place = matrix if whole else matrix[part.images, part.queries]
                if fusion == "mean" and not weighting:  # as a product, which reads each probability once
                    every = part.probabilities.view(count, heads, -1)
                    torch.bmm(share.expand(count, 1, heads), every, out=place.view(count, 1, -1))
                    continue
                values = None if own is None else replace(own, vectors=own.vectors[part.images])
                every, mixed = (one.unflatten(0, (count, heads)) for one in (part.probabilities, part.mixed))
                place.copy_(fuse_weighted(every, fusion, weighting, values, mixed))  # type: ignore[arg-type]
                if weighting and queries == keys > place.shape[1]:
                    identity_rows(place, part.queries.start)
        self._take(AttentionLayer(name, fused=fused, keys=self._keys_of(key, None), visible=visible), normal)

    def _pools(self) -> bool:
        """Whether what runs is the attention of a pooling head, or a part of one."""
        return is_pooling(*self.path[-1]) or (len(self.path) > 1 and is_pooling(*self.path[-2]))

    def _parallel_block(self) -> str | None:
        for path, module in self.path:
            if type(module).__name__ in _PARALLEL_BLOCKS:
                return path
        return None

    def _values_of(self, value: Tensor | None, arrange: Arrange | None) -> Values | None:
        if not self.values:
            return None
        name, module = self.path[-1]
        if value is None:
            raise ValueNormsError(
                f"{type(module).__name__} ({name}) applies its attention by itself, where the values that value "
                "weighting needs cannot be seen."
            )
        around = self.path[-2][1] if len(self.path) > 1 else None
        return read_values(value if arrange is None else arrange(value), module, name, around)

    def _keys_of(self, key: Tensor | None, arrange: Arrange | None) -> Tensor | None:
        """The key vectors with the heads side by side, [batch · windows, keys, width], where they are asked for."""
        if key is None or not self.wants_keys:
            return None
        key = (key if arrange is None else arrange(key)).detach()
        return key.to(torch.promote_types(key.dtype, torch.float32)).transpose(1, 2).flatten(2)

    def ended(self, name: str) -> None:
        """A module has run; it may be a layer."""
        parts = self._open.pop(name, ())
        if parts:  # else it was fused part by part
            module, fusions = self.model.get_submodule(name), () if self._keep_heads else self.fusions
            self._refuse_pieces(name, module, parts)
            self._take(close_layer(name, parts, module, fusions))

    def _refuse_pieces(self, name: str, module: nn.Module, parts: Sequence[ModuleAttention]) -> None:
        """Refuse attention that was computed for some images, or for some queries, at a time.

        Raises:
            UnsupportedModelError: so it was.
        """
        if len(parts) < 2:
            return
        shapes = {(len(heads), *heads.shape[-2:]) for heads in (part.heads for part in parts)}
        side_by_side = len(parts) == self.batch > 1 and all(part.tensor.ndim == 3 for part in parts)
        by_image = any(count % self.batch for count, _, _ in shapes) or (side_by_side and not is_head_by_head(module))
        if by_image or len(shapes) > 1 or any(queries != keys for _, queries, keys in shapes):
            pieces, instead = (
                ("computes its attention image by image", "Explain one image at a time, or use")
                if by_image
                else ("computes its attention chunk by chunk", "Use")
            )
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) {pieces}, in {len(parts)} pieces, which "
                f"cannot be put together. {instead} sampling, occlusion, gradcam or input_gradient, which work on it."
            )

    def _take(self, layer: AttentionLayer, normal: bool = False) -> None:
        self.seen = True
        self.recorded.append(layer.name)
        if self.on_layer is not None:
            self.on_layer(layer)
        elif self.residual and self._is_whole(layer.example.shape):
            pile_up(self._trace.layers, layer, self.residual, normal)
        else:
            self._trace.layers.append(layer)

    def _is_whole(self, shape: Sequence[int]) -> bool:
        """Whether a layer attends from all tokens of each image to all of them."""
        return shape[0] == self.batch and shape[-2] == shape[-1]

    def nothing_seen(self) -> NoAttentionError:
        """What is raised where a model ran, and this saw no attention."""
        instead = " and ".join(sorted(self._other)) or "convolution, or mixing of another kind"
        return NoAttentionError(
            f"No attention between tokens was seen in a forward pass of {type(self.model).__name__}: it computes "
            f"{instead}. Attention rollout and flow need a model with self-attention, such as a timm vit_*, deit_* or "
            "dinov2 model; gradcam, input_gradient and occlusion work on this one."
        )


@lru_cache(maxsize=16)
def _share(heads: int, dtype: torch.dtype) -> Tensor:
    """What each head has of their mean, [1, 1, heads]."""
    with torch.inference_mode(False):
        return torch.full((1, 1, heads), 1.0 / heads, dtype=dtype)
