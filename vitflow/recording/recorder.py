"""Record the attention of a forward pass.

While a model runs inside `record_attention`, a torch function mode intercepts `F.scaled_dot_product_attention`,
`softmax` and the products that apply it, and module hooks identify the calling module. `attn_drop`, which fused
attention does not call, is not needed. Afterwards the model is restored exactly.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import OptionError, ShapeError, VitflowError
from vitflow.methods.fusion import HeadFusion, check_fraction, check_head_fusion, check_readout
from vitflow.methods.gradients import ValueWeighting, check_value_weighting
from vitflow.methods.tokens import TokenLayout, check_layout
from vitflow.models.calls import logits_of, reads_cache, reads_text, refuse_static, with_tokens
from vitflow.models.devices import autocast_state
from vitflow.models.parts import ModelState, check_recordable, modules_of, runs_compiled, unwrap, word_embedding
from vitflow.recording.attention_kinds import may_attend, refusal_of_text
from vitflow.recording.backward import INPUT_OF, stream_hooks, tokens_of_images
from vitflow.recording.experiment import Call
from vitflow.recording.head import HeadWatch, known_blocks
from vitflow.recording.isolation import (
    ContiguousNorms,
    Hook,
    has_running_norms,
    hooked,
    model_lock,
    recordable_attention,
    refuse_checkpointing,
    uncompiled,
)
from vitflow.recording.layers import LOWER_LAYERS, FusionKey
from vitflow.recording.listening import Chunks, Listening
from vitflow.recording.parallel import Layers, is_settled, known_layers, short_text
from vitflow.recording.places import locate
from vitflow.recording.projections import known_projections
from vitflow.recording.trace import Trace


class record_attention:
    """Record the attention of the forward passes that run inside the `with` block.

    It yields the trace of the last forward pass. Logits inside and outside agree to rounding; after the block, also
    after an exception, the model's forward methods, flags, hooks and gradients are restored. Only this thread is
    recorded; other threads may run the model meanwhile, but wait for the end of the block to record it.

    Args:
        model: a Vision Transformer; compiled and data-parallel wrappers are removed.
        head_fusion: keep only the matrix fused by "mean", "max" or "min", [batch, tokens, tokens] per layer, computed
            while the model runs; None keeps every head, [batch, heads, tokens, tokens]. A layer with windowed
            attention has [batch · windows, …, queries, keys], with token positions in `trace.layers[…].tokens`.
        value_weighted: weight attention before the fusion: True by the norm of the transformed value vectors,
            "output" by their projection on the attention's output.
        values: also keep the value vectors of each layer, so that `trace.heads` and `trace.fused` can weight heads.
        gradients: keep the autograd graph for `trace.backward()`. The forward pass must run with gradients enabled.
        fusions: several (head fusion, value weighted) pairs instead of head_fusion and value_weighted.
        features: paths of modules whose outputs are kept, such as "blocks.11.norm1".
        attention: False records only pixels, features and their gradients, which any model supports.
        layout: prefix tokens and patch grid, if the model's layout is unknown.
        keys: keep the key vectors of each layer if they can be observed.
        visible: keep the attention mask of each layer with masked keys in `trace.layers[…].visible`.
        means: keep the mean over heads of each layer, for the affinity of patches, in half precision in
            `trace.layers[…].mean`, if not every head is kept.
        discard_ratio: if at least 0.5, and on the CPU, discard this share of the smallest values of an image in layers
            with global attention during the pass, and store only the others. Requires one fusion.
        outputs: maps the return value of the model to the differentiated outputs, [batch, classes]; by default its
            logits.
        readout: weights instead of the model's readout: for the top layer's tokens, [tokens] or [batch, tokens], or for
            its patches, [rows, cols]; rows are divided by their sums.
        cut: paths of the blocks whose outputs become leaves of the autograd graph, so that `trace.readout` needs no
            further pass. Without `gradients`, blocks run without gradients. The forward pass must run with gradients
            enabled, and the model's output is detached from its input.
        lower_layers: False does not intercept the layers that `LOWER_LAYERS` names in the cache of the model, if an
            earlier pass has stored them: their matrices are zeros, without memory.
        within: path of the submodule whose attention is recorded, such as the language model of a vision-language
            model; by default the whole model.
        chunks: function that measures the attention which a language model computes in chunks; without it, this is
            refused, as with gradients.

    Raises:
        NoAttentionError: at the end of the block, if a forward pass had no attention between tokens.
        UnsupportedModelError: the model cannot be recorded; the message gives the reason.
        OptionError: unknown head fusion, or unknown module in `features`.

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
        means: bool = False,
        discard_ratio: float = 0.0,
        outputs: Callable[[Any], Tensor | None] = logits_of,
        readout: Tensor | None = None,
        cut: Sequence[str] = (),
        lower_layers: bool = True,
        within: str = "",
        chunks: Chunks | None = None,
    ) -> None:
        check_layout(layout)
        kept = _checked(fusions if head_fusion is None else [*fusions, (head_fusion, value_weighted)])
        self._called, self._model = model, unwrap(model)
        check_fraction("discard_ratio", discard_ratio)
        if discard_ratio and (gradients or keys or visible or len(kept) != 1):
            raise OptionError("discard_ratio > 0 requires one fusion, and neither gradients, keys nor visible.")
        self._gradients = gradients
        self._listening = Listening(
            self._model,
            kept,
            gradients=gradients,
            values=values or bool(value_weighted) or any(weighting for _, weighting in kept),
            keys=keys,
            visible=visible,
            means=means,
            discard_ratio=discard_ratio,
        )
        self._listening.within, self._listening.layout, self._listening.chunks = within, layout, chunks
        self._features = {path: _submodule(self._model, path) for path in features}
        self._attention, self._outputs = attention, outputs
        self._layout, self._readout, self._within = layout, readout, within
        self._cut, self._watch = tuple(cut), HeadWatch()
        self._is_open, self._lower_layers = False, lower_layers
        self._repeats = False  # a pass that showed that some of its modules are one layer

    def __enter__(self) -> Trace:
        with ExitStack() as stack:  # undo everything if entering fails
            stack.enter_context(model_lock(self._model))
            if self._is_open:
                raise VitflowError("This recording is open already: create another record_attention(model).")
            self.trace, self._ran, self._is_open = Trace(model=self._model), False, True
            self._listening.begin_pass(self.trace)
            self._short_text: Call | None = None  # of a language model
            stack.callback(self._close)
            self._state: ModelState | None = (state := ModelState(self._model))  # until the first pass
            self._modules = state.modules
            modules = state.every if self._called is self._model else modules_of(self._called)
            stack.enter_context(recordable_attention(modules))
            if self._attention:
                check_recordable(self._model, modules)
            stack.enter_context(hooked(self._hooks(state)))
            if (self._gradients or self._cut) and has_running_norms(modules):
                stack.enter_context(ContiguousNorms())
            if runs_compiled(modules):
                stack.enter_context(uncompiled())
            self._stack = stack.pop_all()
        return self.trace

    def _close(self) -> None:
        self._listening.end_all()
        self._listening.release()
        self._is_open = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        missing = kind is None and self._attention and self._ran and not self._listening.recorded
        refusal = self._listening.no_attention_error() if missing else None
        self._stack.close()  # another thread may use this recorder after the lock is released
        if refusal is not None:
            raise refusal

    # -- the model's modules ------------------------------------------------------------------------------------------

    def _hooks(self, state: ModelState) -> Iterator[Hook]:
        """Yield the hooks that stay while the recording is open."""
        yield Hook(self._model, self._begin, before=True)
        if self._gradients and (embedding := word_embedding(self._model)) is not None:
            yield Hook(embedding, _begin_graph, before=False)
        for path, module in self._features.items():
            yield Hook(module, partial(self._keep, path), before=False)
        if self._gradients:
            yield from stream_hooks(self._model, state.modules, self._features, self._keep_stream)
        if not self._within:  # blocks are known after a pass
            blocks = self._cut or known_blocks(self._model)
            self._watch = HeadWatch(blocks, cut=bool(self._cut), gradients=self._gradients)
        yield from self._watch.hooks(state.modules)
        if self._attention:
            paths = state.cached(may_attend, lambda: tuple(may_attend(self._model)))
            self._listening.attending = paths
            yield from self._listening.hooks({path: state.modules[path] for path in dict.fromkeys(["", *paths])})
        yield Hook(self._model, self._end, before=False)

    def _end(self, args: Any, output: Any) -> Any:
        """Finish a forward pass; return the output of another one if layers were recorded as several."""
        self.trace.output = output
        if (logits := self._outputs(output)) is not None:
            self._finish(logits)
            call = self._listening.call if self._attention and not self._within else None
            if call is not None and not (self._repeats or is_settled(call, self.trace.layers, self.trace.is_certified)):
                return self._repeat(call)
        return None

    def _repeat(self, call: Call) -> Any:
        self._repeats = True
        try:
            return self._model(*call.args, **call.kwargs)
        finally:
            self._repeats = False

    def _keep(self, path: str, args: Any, output: Any) -> Any:
        if self._gradients and not torch.is_grad_enabled():
            refuse_checkpointing(self._model)
        if path in self.trace.features:  # features of several runs have no common place on the image
            self.trace.feature_layouts[path] = None
        features = output if isinstance(output, Tensor) else output[0]
        batch, replacement = self._listening.batch, None
        if features.ndim == 3 and len(features) != batch == features.shape[1]:  # [tokens, batch, channels]
            features = features.transpose(0, 1)
            first = features.transpose(0, 1)  # computed from the features, so that they have gradients
            replacement = first if isinstance(output, Tensor) else with_tokens(output, first)
        self.trace.features[path] = features
        return replacement

    def _keep_stream(self, name: str, *given: Any) -> None:
        tokens = tokens_of_images(given if name.startswith(INPUT_OF) else given[-1], self._listening.batch)
        several = name in self.trace.passed or tokens is None or not tokens.requires_grad
        self.trace.passed[name] = None if several else tokens

    # -- one forward pass ---------------------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        trace = self.trace
        state, self._state = self._state or ModelState(self._model), None
        if state.modules != self._modules:
            raise VitflowError("Modules of the model have changed: create another record_attention(model).")
        self._listening.begin_pass(trace)
        trace.begin()
        text = reads_text(args, kwargs)
        given = _pixels_among(args, kwargs) if text is None else text
        self._ran = given is not None
        self._watch.reset()
        if given is None:
            return args, kwargs
        self._listening.batch = len(given)
        if self._gradients and (not torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            raise OptionError(
                "record_attention(gradients=True) requires a forward pass with gradients: run it under "
                "torch.enable_grad(), not torch.no_grad() or torch.inference_mode()."
            )
        if text is not None:
            self._listening.tokens = given.shape[1]
            refuse_static(reads_cache(kwargs))
            self._short_text = self._short_text or short_text(state, given.device)
            self._observe(self._short_text)
            return args, kwargs
        if 0 in given.shape:
            raise ShapeError(f"Expected at least one image, got an empty model input {tuple(given.shape)}.")
        pixels = given
        if self._gradients:  # a new tensor, so that the caller's tensor does not require gradients
            pixels = (given.clone() if given.is_inference() else given.detach()).requires_grad_()
        self._listening.call = Call(state, args, kwargs, given, autocast_state(given.device))
        self._observe(self._listening.call)
        if not self._lower_layers:
            self._listening.left_out = self._listening.call.known((LOWER_LAYERS, self._listening.call.size)) or {}
        trace.begin(pixels, self._outputs, self._listening.call)
        copied = self._watch.begin(pixels)
        return (
            tuple(copied if value is given else value for value in args),
            {name: copied if value is given else value for name, value in kwargs.items()},
        )

    def _observe(self, call: Call) -> None:
        """Use what an earlier pass has shown of the attention modules; of images only if there was a reason to look."""
        if not self._attention:
            return
        self._listening.observed = call
        self._listening.projections = known_projections(call)
        self._listening.refuse_projections()
        if call is self._short_text or self._within or self._repeats:
            self._listening.observe()
        else:
            self._listening.modules = known_layers(call) or Layers()

    def _finish(self, logits: Tensor) -> None:
        trace = self.trace
        self._listening.end_pass()
        trace.logits, trace.names, trace.watch = logits, list(self._listening.recorded), self._watch
        if self._listening.tokens is not None:
            trace.refusal = refusal_of_text(self._model)
        if trace.call is not None:
            locate(trace, self._layout, whole=not self._within)
        if trace.known_top is not None:
            trace.pooled = self._listening.pooling
            if self._readout is not None:
                readout = _normalized(self._readout, self._listening.batch, trace.known_top)
                example = trace.layers[-1].example
                trace.given_readout = readout.to(example.device, torch.promote_types(example.dtype, torch.float32))


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
    """Return the model input among the arguments of a forward pass."""
    named = kwargs.get("pixel_values")
    tensors = [value for value in (named, *args, *kwargs.values()) if isinstance(value, Tensor)]
    return tensors[0] if tensors else None


def _normalized(readout: Tensor, batch: int, top: TokenLayout) -> Tensor:
    """Return a given readout as [batch, tokens], with rows that sum to 1."""
    readout = torch.as_tensor(readout)
    if readout.shape == (top.rows, top.cols):
        readout = nn.functional.pad(readout.flatten(), (top.num_prefix_tokens, top.num_suffix_tokens))
    weights = check_readout(readout, batch, top.num_tokens).double()
    sums = weights.sum(dim=1, keepdim=True)
    if (weights < 0).any() or not (sums > 0).all():
        raise OptionError("Expected readout weights >= 0, with a sum above 0.")
    return weights / sums


def _begin_graph(args: Any, output: Any) -> None:
    """Start the autograd graph at the word embeddings of a model with frozen weights."""
    if isinstance(output, Tensor) and torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise OptionError(f"{type(model).__name__} has no module {path!r}: {error}.") from error
