"""Record the attention of a forward pass: the one place that touches a model.

Attention is seen where it is computed. While a model runs inside `record_attention`, a torch function mode intercepts
`F.scaled_dot_product_attention`, `softmax` and the products that apply one, and module hooks tell which module called.
Nothing depends on `attn_drop`, which fused attention never calls. Afterwards the model is exactly as it was.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, VitflowError
from vitflow.methods.fusion import HeadFusion, check_fraction, check_head_fusion, check_readout
from vitflow.methods.gradients import ValueWeighting, check_value_weighting
from vitflow.methods.tokens import TokenLayout, check_layout
from vitflow.models.anatomy import (
    ATTENTION_POOLING,
    closed_readouts,
    feature_layout,
    logits_of,
    read_layout,
    runs_compiled,
    unwrap,
)
from vitflow.models.blocks import block_norms
from vitflow.models.languages import reads_text, refuse_static, word_embedding
from vitflow.models.libraries import refuse_unseen
from vitflow.models.parts import unchanging, with_paths
from vitflow.recording.attention_kinds import may_attend, refusal_of, refusal_of_words
from vitflow.recording.heads import Call
from vitflow.recording.interception import Interception
from vitflow.recording.isolation import (
    Hook,
    aside,
    no_fast_path,
    refuse_checkpointing,
    refuse_compiled,
    refuse_meta_default,
    turn,
    uncompiled,
)
from vitflow.recording.layer_tokens import find_tokens
from vitflow.recording.layers import AttentionLayer, FusionKey
from vitflow.recording.listening import Listening
from vitflow.recording.readout import Head, tap_candidates, tokens_of, with_tokens
from vitflow.recording.trace import Trace
from vitflow.recording.unseen import unseen_mixing


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
        outputs: maps what the model returns to the numbers whose gradients are asked for, [batch, classes]; by default
            to its logits.
        readout: weights to use as `trace.readout` instead of the model's: of the top layer's tokens, [tokens] or
            [batch, tokens], or of its patches, [rows, cols]; rows are divided by their sums.
        head: how the output is computed from tokens, by `trace.head` of an earlier pass: blocks then run without
            gradients and the head with them, so that `trace.readout` is known. The forward pass must run with gradients
            enabled, and the model's output is cut off from its input.
        within: the path of the part whose attention is recorded, such as the part of a model that reads, where another
            sees; by default all of it.

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
        outputs: Callable[[Any], Tensor | None] = logits_of,
        readout: Tensor | None = None,
        head: Head | None = None,
        within: str = "",
    ) -> None:
        check_layout(layout)
        check_fraction("residual", residual)
        kept = _checked(fusions if head_fusion is None else [*fusions, (head_fusion, value_weighted)])
        self._called, self._model = model, unwrap(model)
        if residual and (gradients or keys or visible or on_layer or len(kept) != 1):
            raise OptionError("With residual > 0, expected one fusion, no gradients, no keys and nothing visible.")
        self._gradients = gradients
        values = values or bool(value_weighted) or any(weighting for _, weighting in kept)
        self._listening = Listening(self._model, kept, gradients, values, keys, visible, on_layer, residual, within)
        self._features = {path: _submodule(self._model, path) for path in features}
        self._attention, self._outputs = attention, outputs
        self._layout, self._readout, self._head, self._within = layout, readout, head, within
        if gradients:
            refuse_checkpointing(self._model)

    def __enter__(self) -> Trace:
        with ExitStack() as stack:  # if anything fails on the way in, everything is undone
            stack.enter_context(turn(self._model))
            refuse_meta_default(self._model)
            if hasattr(self, "_interception"):
                raise VitflowError("This recording is open already: make another record_attention(model).")
            self.trace, self._ran = Trace(model=self._model), False
            self._listening.open(self.trace)
            self._interception = Interception(self._listening)
            stack.callback(self._forget)
            self._watched: dict[str, nn.Module] = {}
            self._hooks: list[Hook] = []  # of the modules that are watched
            stack.callback(self._unhook)
            self._pass = stack.enter_context(ExitStack())
            with unchanging(self._model):
                if self._attention:
                    refuse_unseen(self._model)
                self._enter_hooks(stack)
                stack.enter_context(no_fast_path())
                if runs_compiled(self._called):
                    refuse_compiled()
                    stack.enter_context(uncompiled())
            self._stack = stack.pop_all()
        return self.trace

    def _forget(self) -> None:
        self._interception.end_all()
        del self._interception  # from now on it can be opened again

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        unseen = kind is None and self._attention and self._ran and not self._listening.seen
        refusal = self._listening.nothing_seen() if unseen else None
        self._stack.close()  # another thread may use this recorder as soon as its turn ends
        if refusal is not None:
            raise refusal

    # -- the model's modules ------------------------------------------------------------------------------------------

    def _enter_hooks(self, stack: ExitStack) -> None:
        for hook in self._hooks_of("", self._model):
            stack.callback(hook.remove)
        self._watch()
        if self._gradients and (embedding := word_embedding(self._model)) is not None:
            stack.callback(Hook(embedding, _begin_graph, before=False).remove)
        for path, module in self._features.items():
            stack.callback(Hook(module, self._keeping(path), before=False).remove)
        if self._head is not None and self._head.tap is not None:
            stack.callback(Hook(_submodule(self._model, self._head.first), _stop_graph, before=True).remove)
            tap = _submodule(self._model, self._head.tap)
            stack.callback(Hook(tap, self._cutting(self._head.tap), before=False).remove)
        elif self._attention and torch.is_grad_enabled():
            attending = [path for path, _ in with_paths(self._model, may_attend)]
            for path in tap_candidates(self._model, attending):
                stack.callback(Hook(self._model.get_submodule(path), self._noting(path), before=False).remove)

    def _watch(self) -> None:
        """Watch the modules that may attend: those that the model has now, which may be others than a pass before."""
        attending = dict(with_paths(self._model, may_attend)) if self._attention else {}
        if attending != self._watched:
            self._unhook()
            self._watched = attending
            for name, module in attending.items():
                if name:
                    self._hooks += self._hooks_of(name, module)

    def _unhook(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _hooks_of(self, name: str, module: nn.Module) -> Iterator[Hook]:
        yield Hook(module, self._entering(name, module), before=True)
        yield Hook(module, self._leaving(name), before=False)

    def _entering(self, name: str, module: nn.Module) -> Callable[..., Any]:
        listening, interception = self._listening, self._interception

        def act(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not name:
                args, kwargs = self._begin(args, kwargs)
            if name in self._watched:
                interception.begin()
            listening.path.append((name, module))
            return (args, kwargs) if not name else None

        return act

    def _leaving(self, name: str) -> Callable[..., None]:
        listening, interception = self._listening, self._interception

        def act(args: Any, output: Any) -> None:
            entered = bool(listening.path) and listening.path[-1][0] == name
            try:
                if output is not None:  # no exception passes through
                    interception.ended(name)
            finally:
                if entered:
                    listening.path.pop()
                    if name in self._watched:
                        interception.end()
            if output is not None:
                listening.ended(name)
            if not name:
                with self._pass:  # at its end the model may change
                    if output is not None and (logits := self._outputs(output)) is not None:
                        self.trace.output = output
                        self._finish(logits)

        return act

    def _keeping(self, path: str) -> Callable[..., None]:
        def act(args: Any, output: Any) -> None:
            if output is not None:
                self.trace.features[path] = output if isinstance(output, Tensor) else output[0]

        return act

    def _noting(self, path: str) -> Callable[..., None]:
        def act(args: Any, output: Any) -> None:
            if (tokens := tokens_of(output)) is not None and tokens.requires_grad:
                self.trace.candidates[path] = tokens

        return act

    def _cutting(self, path: str) -> Callable[..., Any]:
        def act(args: Any, output: Any) -> Any:
            torch.set_grad_enabled(True)  # as it was before the first block
            if (tokens := tokens_of(output)) is None:
                return None
            self.trace.candidates = {path: tokens.detach().requires_grad_()}
            return with_tokens(output, self.trace.candidates[path])

        return act

    # -- one forward pass ---------------------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        trace = self.trace
        self._pass.close()
        self._pass.enter_context(unchanging(self._model))
        self._watch()
        self._listening.begin()
        self._reads, self._given = reads_text(args, kwargs), (args, kwargs)
        trace.begin(None)
        if self._reads is not None:
            refuse_static(kwargs.get("past_key_values"))
            self._listening.batch, self._ran = len(self._reads), True
            self._check_gradients()
            return args, kwargs
        pixels = _pixels_among(args, kwargs)
        self._ran = pixels is not None
        read, again = self._outputs, None if pixels is None else Call(self._model, args, kwargs, pixels)
        if pixels is not None and 0 in pixels.shape:
            raise ShapeError(f"Expected at least one image, got an empty model input {tuple(pixels.shape)}.")
        self._listening.batch = 1 if pixels is None else len(pixels)
        norms = block_norms(self._model) if self._features else ()
        if pixels is None or not self._gradients:
            trace.begin(pixels, norms, read, again)
            return args, kwargs
        self._check_gradients()
        # A view of its own, so that the caller's tensor does not begin to require gradients.
        own = pixels.clone() if pixels.is_inference() else pixels.detach()
        own.requires_grad_()
        trace.begin(own, norms, read, again)
        return (
            tuple(own if a is pixels else a for a in args),
            {name: own if a is pixels else a for name, a in kwargs.items()},
        )

    def _check_gradients(self) -> None:
        if self._gradients and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            raise OptionError(
                "record_attention(gradients=True) needs a forward pass with gradients enabled, got one under "
                "torch.no_grad() or torch.inference_mode(). Run it under torch.enable_grad()."
            )

    def _finish(self, logits: Tensor) -> None:
        trace = self.trace
        trace.logits, trace.names = logits, self._listening.recorded
        if self._reads is not None:
            trace.lay_out(trace.layers, None, refusal=refusal_of_words(self._model))
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
                refusal = refusal or self._unseen(layers, pixels)
        if not layers or refusal is not None:
            layout = self._layout_without_attention(size)
            trace.lay_out(layers, layout, refusal=refusal)
            return layout
        layouts = [layout for layer in layers for layout in (layer.tokens.keys, layer.tokens.queries)]
        layout = max(layouts, key=lambda layout: layout.num_patches)
        trace.lay_out(layers, layout)
        top = layers[-1].tokens.queries
        closed = closed_readouts(self._model, top, self._listening.pooling)
        pooled = self._listening.pooling if closed[0].name == ATTENTION_POOLING else None
        given = None if self._readout is None else _normalized(self._readout, len(pixels), top).to(layers[-1].example)
        trace.read_out(closed, top, pooled, given)
        return layout

    def _unseen(self, layers: list[AttentionLayer], pixels: Tensor) -> str | None:
        """Why a product of these layers would leave something out, or None."""
        layouts = [layout for layer in layers for layout in (layer.tokens.keys, layer.tokens.queries)]
        seen = self._listening.recorded, self._listening.unapplied
        return None if self._within else unseen_mixing(self._model, pixels, self._given, layouts, seen)

    def _layout_without_attention(self, size: tuple[int, int]) -> TokenLayout | None:
        """The layout by the model's own word, or None: what looks at pixels alone needs none."""
        tokens = next((found.shape[1] for found in self.trace.features.values() if found.ndim == 3), None)
        try:
            return self._layout or read_layout(self._model, size, tokens)
        except UnsupportedModelError:
            return None


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


def _normalized(readout: Tensor, batch: int, top: TokenLayout) -> Tensor:
    """A readout that the caller gives, [batch, tokens], rows summing to 1."""
    readout = torch.as_tensor(readout)
    if readout.shape == (top.rows, top.cols):
        readout = nn.functional.pad(readout.flatten(), (top.num_prefix_tokens, top.num_suffix_tokens))
    weights = check_readout(readout, batch, top.num_tokens).double()
    sums = weights.sum(dim=1, keepdim=True)
    if (weights < 0).any() or not (sums > 0).all():
        raise OptionError("Expected readout weights of at least 0, not all of them 0.")
    return weights / sums


def _stop_graph(args: Any, kwargs: Any) -> None:
    torch.set_grad_enabled(False)


def _begin_graph(args: Any, output: Any) -> None:
    """Let gradients begin at the embedded words of a model whose weights are frozen."""
    if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise OptionError(f"{type(model).__name__} has no module {path!r}: {error}.") from error
