"""Record the attention of a forward pass: the one place that touches a model.

Attention is seen where it is computed. While a model runs inside `record_attention`, a torch function mode intercepts
`F.scaled_dot_product_attention`, `softmax` and the products that apply one, and module hooks tell which module called.
Nothing depends on `attn_drop`, which fused attention never calls. Afterwards the model is exactly as it was.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import (
    NoAttentionError,
    OptionError,
    ShapeError,
    UnsupportedModelError,
    ValueNormsError,
    VitflowError,
)
from vitflow.methods.fusion import HeadFusion, check_fraction, check_head_fusion
from vitflow.methods.tokens import TokenLayout, check_layout
from vitflow.methods.values import Values, ValueWeighting, check_value_weighting, fuse_weighted, gram_matrix
from vitflow.models.anatomy import (
    block_norms,
    feature_layout,
    logits_of,
    module_paths,
    read_layout,
    read_readout,
    runs_compiled,
    unwrap,
)
from vitflow.models.languages import reads_text, refuse_static, word_embedding
from vitflow.models.libraries import refuse_unseen
from vitflow.recording.attention_kinds import (
    arrangement,
    is_difference,
    is_packed,
    is_pooling,
    other_attention,
    refusal_of,
)
from vitflow.recording.interception import Interception
from vitflow.recording.isolation import Hook, aside, is_aside, no_fast_path, refuse_compiled, turn, uncompiled
from vitflow.recording.layer_tokens import find_tokens
from vitflow.recording.layers import (
    Arrange,
    AttentionLayer,
    FusionKey,
    ModuleAttention,
    close_layer,
    join_pieces,
    pile_up,
    read_values,
)
from vitflow.recording.trace import Trace

# Blocks whose attention modules work side by side on the same tokens: together they are one layer with more heads.
_PARALLEL_BLOCKS = ("ParallelThingsBlock",)


class record_attention:
    """Record the attention of the forward passes that run inside the `with` block.

    The trace that it yields holds the last forward pass. Logits inside and outside agree to rounding; after the block,
    also after an exception, the model has its old forward methods, flags, hooks and gradients. Only what this thread
    runs is recorded; other threads may run the model meanwhile, and wait for the end of the block to record it.

    Args:
        model: a Vision Transformer; compiled and data-parallel wrappers are looked through.
        head_fusion: keep only the matrix fused by "mean", "max" or "min", [batch, tokens, tokens] per layer, computed
            while the model runs; None keeps every head, [batch, heads, tokens, tokens]. A layer that attends within
            windows gives [batch · windows, …, queries, keys], and `trace.layers[…].tokens` says where they lie.
        value_weighted: weight attention by what it passes on before the fusion: True by the norm of the transformed
            value vectors, "output" by their part along the attention's output.
        values: keep the value vectors of each layer, too, so that `trace.heads` and `trace.fused` can weight heads.
        gradients: keep what `trace.backward()` needs. The forward pass must run with gradients enabled.
        fusions: several (head fusion, value weighted) pairs at once, instead of head_fusion and value_weighted.
        features: module paths whose outputs to keep, such as "blocks.11.norm1".
        attention: False records no attention, only pixels, features and their gradients; any model will do.
        layout: prefix tokens and patch grid, for a model that does not tell its own.
        keys: keep the key vectors of each layer where they can be seen.
        visible: keep which keys each query may see, where these are not all, in `trace.layers[…].visible`.
        residual: above 0, keep no attention but what rollout makes of it: the layers that attend between all tokens, as
            the product of three each, with that share of the residual connection and nothing discarded. It takes one
            fusion, and a third of the memory.

    Raises:
        NoAttentionError: on leaving the block, when a forward pass ran and no attention between tokens was seen.
        UnsupportedModelError: the model cannot be recorded; the message says why.
        OptionError: unknown head fusion; no such module for `features`.

    >>> import timm, torch
    >>> model = timm.create_model("test_vit").eval()
    >>> with record_attention(model) as trace, torch.no_grad():
    ...     logits = model(torch.zeros(2, 3, 160, 160))
    >>> len(trace.attentions), trace.attentions[0].shape, trace.layout.rows
    (6, torch.Size([2, 2, 101, 101]), 10)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        head_fusion: HeadFusion | None = None,
        value_weighted: ValueWeighting = False,
        values: bool = False,
        gradients: bool = False,
        fusions: Iterable[FusionKey] = (),
        features: Iterable[str] = (),
        attention: bool = True,
        layout: TokenLayout | None = None,
        keys: bool = False,
        visible: bool = False,
        on_layer: Callable[[AttentionLayer], None] | None = None,
        residual: float = 0.0,
    ) -> None:
        check_layout(layout)
        check_fraction("residual", residual)
        kept = _checked(fusions if head_fusion is None else [*fusions, (head_fusion, value_weighted)])
        self._called, self._model = model, unwrap(model)
        self._fusions = kept
        self._keep_heads = gradients or not kept
        if residual and (self._keep_heads or keys or visible or on_layer or len(kept) > 1):
            raise OptionError("With residual > 0, expected one fusion, no gradients, no keys and nothing visible.")
        self._residual = residual
        self.gradients, self.wants_keys, self.wants_visible = gradients, keys, visible
        self._on_layer = on_layer
        self._values = values or bool(value_weighted) or any(weighting for _, weighting in kept)
        self._features = {path: _submodule(self._model, path) for path in features}
        self._attention = attention
        self._layout = layout
        if attention:
            refuse_unseen(self._model)
        if gradients:
            _refuse_checkpointing(self._model)

    def __enter__(self) -> Trace:
        with ExitStack() as stack:  # if anything fails on the way in, everything is undone
            stack.enter_context(turn(self._model))
            if hasattr(self, "_interception"):
                raise VitflowError("This recording is open already: make another record_attention(model).")
            self._begin_trace()
            stack.callback(self._forget)
            self._enter_hooks(stack)
            stack.enter_context(no_fast_path())
            if runs_compiled(self._called):
                refuse_compiled()
                stack.enter_context(uncompiled())
            if self._attention:
                stack.enter_context(self._interception)
            self._stack = stack.pop_all()
        return self.trace

    def _begin_trace(self) -> None:
        self.trace = Trace(model=self._model)
        self._path: list[tuple[str, nn.Module]] = []  # the modules that are running, outermost first
        self._open: dict[str, list[ModuleAttention]] = {}  # layers that are running
        self._streamed: dict[FusionKey, list[Tensor]] = {}  # the layer that is fused part by part
        self._shared: Values | None = None  # what its parts' values share, and those of the first
        self._other: set[str] = set()  # what runs that is no attention between tokens, in words
        self._batch = 1
        self._ran = self._seen = False  # the model, and any attention
        self._interception = Interception(self)
        self._pooling: Tensor | None = None

    def _forget(self) -> None:
        del self._interception  # it knows its listener: a circle that would keep the trace alive

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        other = self._other  # another thread may use this recorder as soon as its turn ends
        unseen = self._ran and not self._seen
        self._stack.close()
        if kind is None and self._attention and unseen:
            raise _nothing_seen(self._model, other)

    # -- the model's modules ------------------------------------------------------------------------------------------

    def _enter_hooks(self, stack: ExitStack) -> None:
        for name, module in module_paths(self._model):
            if name and not any(True for _ in module.children()):
                continue  # a leaf computes no attention between tokens by itself
            stack.callback(Hook(module, self._entering(name, module), before=True).remove)
            stack.callback(Hook(module, self._leaving(name), before=False).remove)
        if self.gradients and (embedding := word_embedding(self._model)) is not None:
            stack.callback(Hook(embedding, _begin_graph, before=False).remove)
        for path, module in self._features.items():
            stack.callback(Hook(module, self._keeping(path), before=False).remove)

    def _entering(self, name: str, module: nn.Module) -> Callable[..., Any]:
        def act(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not name:
                args, kwargs = self._begin(args, kwargs)
            self._path.append((name, module))
            return (args, kwargs) if not name else None

        return act

    def _leaving(self, name: str) -> Callable[..., None]:
        def act(args: Any, output: Any) -> None:
            if output is not None:  # no exception passes through
                self._interception.ended(name)
            if self._path and self._path[-1][0] == name:
                self._path.pop()
            if output is None:
                return
            if name in self._open:
                self._close(name)
            if not name and (logits := logits_of(output)) is not None:
                self._finish(logits)

        return act

    def _keeping(self, path: str) -> Callable[..., None]:
        def act(args: Any, output: Any) -> None:
            if output is not None:
                self.trace.features[path] = output if isinstance(output, Tensor) else output[0]

        return act

    # -- one forward pass ---------------------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        trace = self.trace
        self._path, self._pooling, self._open = [], None, {}
        self._streamed, self._shared = {}, None
        self._other = set()
        self._reads = reads_text(args, kwargs)
        trace.begin(None)
        if self._reads is not None:
            refuse_static(kwargs.get("past_key_values"))
            self._batch, self._ran = len(self._reads), True
            self._check_gradients()
            return args, kwargs
        pixels = _pixels_among(args, kwargs)
        self._ran = pixels is not None
        if pixels is not None and 0 in pixels.shape:
            raise ShapeError(f"Expected at least one picture, got an empty model input {tuple(pixels.shape)}.")
        self._batch = 1 if pixels is None else len(pixels)
        norms = block_norms(self._model) if self._features else ()
        if pixels is None or not self.gradients:
            trace.begin(pixels, norms)
            return args, kwargs
        self._check_gradients()
        # A view of its own, so that the caller's tensor does not begin to require gradients.
        own = pixels.clone() if pixels.is_inference() else pixels.detach()
        own.requires_grad_()
        trace.begin(own, norms)
        return (
            tuple(own if a is pixels else a for a in args),
            {name: own if a is pixels else a for name, a in kwargs.items()},
        )

    def _check_gradients(self) -> None:
        if self.gradients and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            raise OptionError(
                "record_attention(gradients=True) needs a forward pass with gradients enabled, got one under "
                "torch.no_grad() or torch.inference_mode(). Run it under torch.enable_grad()."
            )

    def _finish(self, logits: Tensor) -> None:
        trace = self.trace
        trace.logits = logits
        if self._reads is not None:
            trace.lay_out(trace.layers, None, refusal=_words_have_no_place(self._model))
            return
        if trace.pixels is None:
            return
        size = (trace.pixels.shape[-2], trace.pixels.shape[-1])
        layout = self._locate_tokens(trace.pixels, size)
        for path, features in trace.features.items():
            trace.feature_layouts[path] = feature_layout(self._model, size, features, layout)

    def _locate_tokens(self, pixels: Tensor, size: tuple[int, int]) -> TokenLayout | None:
        """Find where the tokens lie and what the answer is read from; returns the layout, where it is known."""
        trace = self.trace
        layers, refusal = trace.layers, refusal_of(self._model, trace.layers) if trace.layers else None
        if layers and refusal is None:
            with aside():
                layers, refusal = find_tokens(self._model, layers, pixels, self._layout)
        if not layers or refusal is not None:
            layout = self._layout_without_attention(size)
            trace.lay_out(layers, layout, refusal=refusal)
            return layout
        layouts = [layout for layer in layers for layout in (layer.tokens.keys, layer.tokens.queries)]
        layout = max(layouts, key=lambda layout: layout.num_patches)
        trace.lay_out(layers, layout)
        top = layers[-1].tokens.queries
        weights, pooling = read_readout(self._model, top, self._pooling)
        trace.read_out(weights.to(layers[-1].example).expand(len(pixels), -1), top, pooling)
        return layout

    def _layout_without_attention(self, size: tuple[int, int]) -> TokenLayout | None:
        """The layout by the model's own word, or None: what looks at pixels alone needs none."""
        tokens = next((found.shape[1] for found in self.trace.features.values() if found.ndim == 3), None)
        try:
            return self._layout or read_layout(self._model, size, tokens)
        except UnsupportedModelError:
            return None

    # -- what the interception tells ----------------------------------------------------------------------------------

    def running(self) -> str | None:
        """Name of the module that runs now; None if what it computes is no attention between tokens."""
        if not self._path or is_aside():
            return None
        name, module = self._path[-1]
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
        name, module = self._path[-1]
        if self._pools():
            self._pooling = probabilities.detach()
            return
        layer = self._parallel_block() or name
        if layer == name and layer in self._open and is_difference(module):
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) computes attention more than once in a pass: the difference of two "
                "attention matrices has negative entries, and rollout and flow are not defined on it."
            )
        arrange = arrangement(module, probabilities, self._batch)
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
        name, module = self._path[-1]
        return not (
            self._keep_heads
            or query.device.type != "cpu"
            or query.ndim != 4
            or name in self._open
            or self._parallel_block()
            or self._pools()
            or is_difference(module)
            or arrangement(module, query, self._batch) is not None
        )

    def saw_part(self, probabilities: Tensor, value: Tensor, output: Tensor) -> None:
        """Fuse the probabilities of some pictures of the batch."""
        if self._shared is None and (own := self._values_of(value, None)) is not None:
            along = any(weighting == "output" for _, weighting in self._fusions)
            self._shared = replace(own, gram=gram_matrix(own.projection, own.owner) if along else None)
        values = None if self._shared is None else replace(self._shared, vectors=value.detach())
        for fusion, weighting in self._fusions:
            part = fuse_weighted(probabilities.detach(), fusion, weighting, values, mixed=output.detach())  # type: ignore[arg-type]
            self._streamed.setdefault((fusion, weighting), []).append(part)

    def saw_parts(self, batch: int, key: Tensor, visible: Tensor | None = None) -> None:
        """Take in a layer that was fused part by part."""
        name = self._path[-1][0]
        self._open[name] = []
        joined = {key: join_pieces(pieces, batch, bool(key[1])) for key, pieces in self._streamed.items()}
        self._streamed, self._shared = {}, None
        self._take(AttentionLayer(name, fused=joined, keys=self._keys_of(key, None), visible=visible))

    def _pools(self) -> bool:
        """Whether what runs is the attention of a pooling head, or a part of one."""
        return any(is_pooling(name, module) for name, module in self._path[-2:])

    def _parallel_block(self) -> str | None:
        return next((path for path, module in self._path if type(module).__name__ in _PARALLEL_BLOCKS), None)

    def _values_of(self, value: Tensor | None, arrange: Arrange | None) -> Values | None:
        if not self._values:
            return None
        name, module = self._path[-1]
        if value is None:
            raise ValueNormsError(
                f"{type(module).__name__} ({name}) applies its attention by itself, where the values that value "
                "weighting needs cannot be seen."
            )
        around = self._path[-2][1] if len(self._path) > 1 else None
        return read_values(value if arrange is None else arrange(value), module, name, around)

    def _keys_of(self, key: Tensor | None, arrange: Arrange | None) -> Tensor | None:
        """The key vectors with the heads side by side, [batch · windows, keys, width], where they are asked for."""
        if key is None or not self.wants_keys:
            return None
        key = (key if arrange is None else arrange(key)).detach()
        return key.to(torch.promote_types(key.dtype, torch.float32)).transpose(1, 2).flatten(2)

    def _close(self, name: str) -> None:
        """A layer has run."""
        parts = self._open.pop(name)
        if parts:  # else it was fused part by part
            module, fusions = self._model.get_submodule(name), () if self._keep_heads else self._fusions
            self._take(close_layer(name, parts, module, fusions))

    def _take(self, layer: AttentionLayer) -> None:
        self._seen = True
        batch, queries, keys = len(layer.example), *layer.example.shape[-2:]
        if self._on_layer is not None:
            self._on_layer(layer)
        elif self._residual and batch == self._batch and queries == keys:
            pile_up(self.trace.layers, layer, self._residual)
        else:
            self.trace.layers.append(layer)


def _checked(fusions: Iterable[FusionKey]) -> set[FusionKey]:
    try:
        pairs = [(name, weighting) for name, weighting in fusions]
    except (TypeError, ValueError) as error:
        raise OptionError(f"Expected fusions as (head fusion, value weighted) pairs, got {fusions!r}.") from error
    for name, weighting in pairs:
        check_head_fusion(name)
        check_value_weighting(weighting)
    return set(pairs)


def _pixels_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The model input among the arguments of a forward pass."""
    named = kwargs.get("pixel_values")
    tensors = [given for given in (named, *args, *kwargs.values()) if isinstance(given, Tensor)]
    return tensors[0] if tensors else None


def _begin_graph(args: Any, output: Any) -> None:
    """Let gradients begin at the embedded words of a model whose weights are frozen."""
    if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _words_have_no_place(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} read a text, whose words have no place on a picture and no readout of their own: use "
        "vitflow.explain_text, or vitflow.attention_rollout(trace.fused()); trace.streams tells its layers apart."
    )


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise OptionError(f"{type(model).__name__} has no module {path!r}: {error}.") from error


def _refuse_checkpointing(model: nn.Module) -> None:
    for module in model.modules():
        of_timm = getattr(module, "grad_checkpointing", False) is True
        of_transformers = getattr(module, "gradient_checkpointing", False) is True and module.training
        if of_timm or of_transformers:
            newer = hasattr(model, "activation_checkpointing_disable")
            theirs = "activation_checkpointing_disable()" if newer else "gradient_checkpointing_disable()"
            off = "set_grad_checkpointing(False)" if of_timm else theirs
            raise UnsupportedModelError(
                f"{type(module).__name__} uses gradient checkpointing, which computes the attention a second time "
                f"during the backward pass. Call model.{off} first."
            )


def _nothing_seen(model: nn.Module, other: set[str]) -> NoAttentionError:
    instead = " and ".join(sorted(other)) or "convolution, or mixing of another kind"
    return NoAttentionError(
        f"No attention between tokens was seen in a forward pass of {type(model).__name__}: it computes {instead}. "
        "Attention rollout and flow need a model with self-attention, such as a timm vit_*, deit_* or dinov2 model; "
        "gradcam, input_gradient and occlusion work on this one."
    )
