"""Collection of intercepted attention by layer, fused immediately if possible."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS, NoAttentionError, UnsupportedModelError
from vitflow.methods.fusion import LargestValues, normalize_rows
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.attending import Attention, Part, PartFusion
from vitflow.recording.attention_kinds import (
    Arrange,
    arrangement,
    convolves_tokens,
    is_difference,
    is_head_by_head,
    is_packed,
    is_pooling,
)
from vitflow.recording.experiment import Call
from vitflow.recording.interception import ONE_IMAGE, Interception
from vitflow.recording.isolation import is_unrecorded, refuse_checkpointing
from vitflow.recording.layer_tokens import declared_layout
from vitflow.recording.layers import (
    MEAN_SCALE,
    SPARSE,
    AttentionLayer,
    FusionKey,
    ModuleAttention,
    close_layer,
)
from vitflow.recording.parallel import Layers, layers_of_image
from vitflow.recording.projections import Projection, ProjectionCheck, projection_of
from vitflow.recording.trace import Trace

# Measures the matrix and the values of a module with these arguments and heads that attends in chunks of a text.
Chunks = Callable[[nn.Module, Sequence[Any], int], tuple[Tensor, Tensor] | None]
# Difference of the sums of two rows, relative to their absolute sums, above which attention is not a product's factor.
_SUM_SPREAD = 1e-2


class Listening(Interception):
    """Collects the attention of a running model, and adds each finished layer to a trace.

    Attributes:
        fusions: (head fusion, value weighted) pairs to keep; every head if empty.
        pooling: attention of a pooling head, if there is one.
        attending: paths of the modules that may compute attention.
        modules: the attention modules of the model by layer.
        means, discard_ratio: True to keep means over heads; share of the smallest values that are not kept.
        within, layout: path of the submodule whose attention is recorded; the layout that the user gave.
        batch, tokens: the number of images or texts of the pass, and of the tokens of a text.
        call, observed: the recorded model call with images; the call that `observe` repeats with one input.
        projections: output projections by the path of the module that has them, if values are requested.
        chunks: measures attention that a module computes in chunks of a text, if given.
        left_out: layers that are not intercepted: the numbers of their queries and keys by path.
        recorded: paths of the finished layers of the pass.
    """

    def __init__(
        self,
        model: nn.Module,
        fusions: Collection[FusionKey],
        *,
        gradients: bool,
        values: bool,
        keys: bool,
        visible: bool,
        means: bool,
        discard_ratio: float,
    ) -> None:
        super().__init__()
        self.model, self.fusions, self.values = model, fusions, values
        self.gradients, self.wants_keys, self.wants_visible = gradients, keys, visible
        self.means, self.discard_ratio, self.within = means, discard_ratio, ""
        self.layout: TokenLayout | None = None
        self.chunks: Chunks | None = None
        self.attending: Collection[str] = ()
        self.modules = Layers()
        self._keep_heads = gradients or not (fusions or means)
        self.begin_pass(Trace())

    def begin_pass(self, trace: Trace) -> None:
        """Add the layers of a new forward pass to this trace."""
        self._trace = trace
        self.path = []
        self.pooling: Tensor | None = None
        self.left_out: Mapping[str, tuple[int, int]] = {}
        self.batch = 1
        self.tokens: int | None = None
        self.call: Call | None = None
        self.observed: Call | None = None
        self.projections: dict[str, Projection] = {}
        self._checks: dict[Projection, ProjectionCheck] = {}  # of projections that are used for the first time
        self.recorded: list[str] = []
        self._open: dict[str, list[ModuleAttention]] = {}  # running layers
        self._left: Counter[str] = Counter()  # modules of parallel layers that have run
        self.others = set()

    def end_pass(self) -> None:
        """Add no more layers to the trace: parts of the model may run by themselves after the pass."""
        self._trace = Trace()
        for check in self._checks.values():
            check.finish()
        self.release()
        self.refuse_projections()

    def release(self) -> None:
        """End the checks of projections."""
        while self._checks:
            self._checks.popitem()[1].release()

    def refuse_projections(self) -> None:
        """Raise ValueNormsError if an earlier pass has shown that values cannot be weighted."""
        for projection in self.projections.values() if self.values else ():
            if projection.matrix is None and f"{projection.path}.".startswith(self.within and f"{self.within}."):
                raise projection.error()

    def observe(self) -> None:
        """Read which modules are one layer, from a run with one input."""
        if self.observed is not None:
            self.modules = layers_of_image(self.observed)

    def attend_with_many_heads(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Compute attention of [tokens, batch, channels]; UnsupportedModelError if the first two are swapped."""
        given = [(each.shape[0], each.shape[1]) for each in (query, key) if each.ndim == 3]
        if (
            self.tokens is None
            and len(given) == 2
            and all(first == self.batch and (second > 1 if first == 1 else second % first) for first, second in given)
        ):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} attends over the images of its batch: the input of nn.MultiheadAttention "
                f"({self.path[-1][0]}) has not the order of axes that its batch_first says. This is a fault of the "
                "model: correct it, and train it again."
            )
        return super().attend_with_many_heads(query, key, *args, **kwargs)

    def enter(self, name: str, module: nn.Module, *given: Any) -> None:
        """Add a module that begins to run to the path; intercept the functions of an attention module."""
        if name in self.attending and name not in self.left_out:
            self.begin()
        super().enter(name, module)

    def _leave(self, name: str, args: Any, output: Any) -> None:
        if self.leave(name, output) and name in self.attending and name not in self.left_out:
            self.end()
        if output is not None:  # not after an exception
            self.close(name, args)

    def running(self) -> str | None:
        """Return the path of the running module; None outside of `within`, or without attention between tokens."""
        name = None if is_unrecorded() else super().running()
        if name is None or name in self.left_out or not f"{name}.".startswith(self.within and f"{self.within}."):
            return None
        return name

    def on_attention(self, attention: Attention) -> None:
        """Receive the attention of one module."""
        (name, module), probabilities, visible = self.path[-1], attention.probabilities, attention.visible
        if self.gradients:
            refuse_checkpointing(self.model)
        if self._pools():
            self.pooling = probabilities
            return
        if is_difference(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) applies the difference of two attention matrices, which has "
                "negative entries: rollout and flow do not support it."
            )
        if attention.mixed and _has_other_sums(probabilities.detach()):
            raise NoAttentionError(
                f"{type(module).__name__} ({name}) normalises its attention after the softmax, so that it has negative "
                f"entries, and rows of different sums: it is not an attention that can be multiplied. {OTHER_METHODS}"
            )
        arrange = arrangement(self.path, probabilities, self.batch)
        if visible is not None and visible.shape == probabilities.shape:  # heads are folded into the batch
            visible = (visible if arrange is None else arrange(visible)).any(dim=-3)
        if packed := is_packed(module, probabilities):  # values and keys are per group of heads
            visible = None if visible is None else visible.any(dim=-2, keepdim=True)
        vectors, keys = attention.value.detach(), self._keys_of(attention.key, None if packed else arrange)
        vectors = vectors if packed or arrange is None else arrange(vectors)
        projection = self._projection()
        if projection is not None and (check := self._checks.get(projection)):
            value, heads = attention.value.detach(), probabilities.shape[-3]
            if value.ndim > 3 and 1 < value.shape[-3] < heads:  # heads of one group share their values
                value = value.repeat_interleave(heads // value.shape[-3], dim=-3)
            result = probabilities.detach().to(value) @ value
            check.add(result if arrange is None else arrange(result))
        part = ModuleAttention(probabilities, arrange, vectors, projection, attention.mixed, keys, visible)
        self._open.setdefault(self.modules.layer(name)[0], []).append(part)

    def accepts_parts(self, query: Tensor) -> bool:
        """Return True if only fused probabilities are needed, so that they can be computed in parts."""
        name, module = self.path[-1]
        return not (
            self._keep_heads
            or query.device.type != "cpu"
            or query.ndim != 4
            or name in self._open
            or name in self.modules.joined
            or self._pools()
            or is_difference(module)
            or arrangement(self.path, query, self.batch) is not None
        )

    def on_attention_parts(self, parts: Iterator[Part], qkv: Sequence[Tensor], visible: Tensor | None) -> None:
        """Receive a layer part by part, and fuse each part."""
        (query, key, value), name = qkv, self.path[-1][0]
        self._open[name] = []
        projection = self._projection()
        values = None if projection is None else projection.values(value)
        (batch, _, queries, _), keys = query.shape, key.shape[-2]
        if values is not None and any(weighting == "output" for _, weighting in self.fusions):
            values = replace(values, gram=values.gram_for(batch * queries))
        fused: dict[FusionKey, Tensor | LargestValues] = {}
        matrices = {choice: query.new_empty(batch, queries, keys) for choice in self.fusions}
        mean = query.new_empty(batch, queries, keys, dtype=torch.float16) if self.means else None
        fuse, check = PartFusion(values), None if projection is None else self._checks.get(projection)
        for part in parts:
            if check is not None:
                check.add(part.mixed)
            for choice, matrix in matrices.items():
                fuse(part, choice, out=matrix[part.images, part.queries])
            if mean is not None:
                mean[part.images, part.queries] = fuse.mean(part, MEAN_SCALE)
        for choice, matrix in matrices.items():
            fused[choice] = normalize_rows(matrix, in_place=True) if choice[1] else matrix
        self._take(AttentionLayer(name, fused=fused, keys=self._keys_of(key, None), visible=visible, mean=mean))

    def _pools(self) -> bool:
        """Return True if the running module is an attention pooling head, or a direct part of one."""
        return is_pooling(*self.path[-1]) or (len(self.path) > 1 and is_pooling(*self.path[-2]))

    def _projection(self) -> Projection | None:
        """Return the output projection of the running module if values are requested."""
        if not self.values:
            return None
        assert self.observed is not None
        record, projection = projection_of(self.path, self.modules.joined, self.observed, self.projections)
        if not record.checked and record not in self._checks:
            self._checks[record] = ProjectionCheck(record, projection, self.path[-1][1])
        return record

    def _keys_of(self, key: Tensor | None, arrange: Arrange | None) -> Tensor | None:
        """Return the key vectors with concatenated heads, [batch · windows, keys, width], if requested."""
        if key is None or not self.wants_keys:
            return None
        key = (key if arrange is None else arrange(key)).detach()
        return key.to(torch.promote_types(key.dtype, torch.float32)).transpose(1, 2).flatten(2)

    def close(self, name: str, args: Sequence[Any]) -> None:
        """Finish a module with these arguments, which may be a layer or one of its modules."""
        if name in self.left_out and self.call is not None:
            zeros = torch.zeros((), device=self.call.pixels.device).expand(self.batch, *self.left_out[name])
            mean = torch.zeros((), dtype=torch.float16, device=zeros.device).expand_as(zeros) if self.means else None
            self._take(AttentionLayer(name, fused=dict.fromkeys(self.fusions, zeros), mean=mean))
            return
        layer, modules = self.modules.layer(name)
        self._left[layer] += 1
        if self._left[layer] % modules == 0 and (parts := self._open.pop(layer, ())):
            self._finish(layer, parts, args)

    def _finish(self, name: str, parts: Sequence[ModuleAttention], args: Sequence[Any]) -> None:
        module, fusions = self.model.get_submodule(name), None if self._keep_heads else self.fusions
        how, end = self._pieces(name, parts), self.tokens
        measured = None
        if how and self.chunks is not None and not self.gradients:
            measured = self.chunks(module, args, parts[0].heads.shape[1])
        if measured is not None:
            matrix, values = measured[0][..., :end, :end], measured[1][..., :end, :]  # without filled-up tokens
            visible = (matrix > 0).any(dim=1) if self.wants_visible else None
            if parts[0].projection in self._checks:  # its pieces are no results
                parts[0].projection.checked = True
                self._checks.pop(parts[0].projection).release()
            parts, how = [ModuleAttention(matrix, None, values, parts[0].projection, visible=visible)], ""
        if how:
            alone = "; one image at a time is supported" if how == "image by image" else ""
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) computes its attention {how}, in {len(parts)} pieces{alone}. "
                f"{OTHER_METHODS if self.tokens is None else 'Use a model with full attention.'}"
            )
        if self.tokens is not None and convolves_tokens(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) also mixes tokens by a convolution: rollout and flow do not support "
                "it. Use a model with full attention."
            )
        self._take(close_layer(name, parts, module, fusions, self.means))

    def _pieces(self, name: str, parts: Sequence[ModuleAttention]) -> str:
        """Return how attention was computed if it was in pieces, as "image by image"; otherwise an empty text."""
        if len(parts) < 2:
            return ""
        self.observe()
        if name in self.modules.serial:
            return "step by step"
        module = self.model.get_submodule(name)
        shapes = {(len(heads), *heads.shape[-2:]) for heads in (part.heads for part in parts)}
        side_by_side = len(parts) == self.batch > 1 and all(part.tensor.ndim == 3 for part in parts)
        by_head = is_head_by_head(module) or name in self.modules.by_head
        if any(count % self.batch for count, _, _ in shapes) or (side_by_side and not by_head):
            return "image by image"
        whole = len(shapes) == 1 and all(queries == keys for _, queries, keys in shapes)
        return "" if whole else "chunk by chunk"

    def _take(self, layer: AttentionLayer) -> None:
        self.recorded.append(layer.name)
        count, *_, queries, keys = layer.example.shape
        if layer.name not in self.left_out and self.discard_ratio >= SPARSE and count == self.batch and queries == keys:
            self._discard(layer, keys)
        self._trace.layers.append(layer)

    def _discard(self, layer: AttentionLayer, tokens: int) -> None:
        """Keep the largest values of a layer, if its prefix tokens are known."""
        [(key, fused)] = layer.fused.items()
        with suppress(UnsupportedModelError):  # of an unknown layout
            layout = None if self.call is None else self.layout or declared_layout(self.call, tokens)
            if layout is not None and not layout.num_suffix_tokens and isinstance(fused, Tensor) and fused.is_cpu:
                layer.prefix = layout.num_prefix_tokens
                layer.fused = {key: LargestValues.of(fused, self.discard_ratio, layer.prefix)}

    def no_attention_error(self) -> NoAttentionError:
        """Return the error for a forward pass without recorded attention."""
        instead = " and ".join(sorted(self.others)) or "convolution or mixing of another kind"
        unseen = "" if ONE_IMAGE in self.others else "No attention between tokens was seen in a forward pass: "
        remedy = "Use a model with full attention"
        if self.tokens is None:
            remedy += ", such as a timm vit_*, deit_* or dinov2 model; or use input_gradient, sampling or occlusion"
        return NoAttentionError(f"{unseen}{type(self.model).__name__} computes {instead}. {remedy}.")


def _has_other_sums(attention: Tensor) -> bool:
    """Return True if a matrix computed from a softmax has negative entries, and rows whose sums differ in a head.

    The sums of linear combinations of heads are the same for all rows.
    """
    sums = attention.sum(dim=-1)
    spread = (sums.amax(dim=-1) - sums.amin(dim=-1)).amax()
    return bool(attention.min() < 0 and spread > _SUM_SPREAD * attention.abs().sum(dim=-1).amax())
