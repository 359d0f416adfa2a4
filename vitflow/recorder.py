"""Record the attention of a forward pass: the one place that touches a model.

Attention is seen where it is computed. While a model runs inside `record_attention`, a torch function mode intercepts
`F.scaled_dot_product_attention` and `softmax`, and module hooks tell which module called. Nothing depends on the names
of modules or on `attn_drop`, which fused attention never calls. Afterwards the model is exactly as it was.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitflow.anatomy import block_norms, output_projection, read_layout, read_readout, unwrap
from vitflow.errors import NoAttentionError, OptionError, UnsupportedModelError, ValueNormsError
from vitflow.methods.fusion import HeadFusion, check_head_fusion
from vitflow.methods.values import Values, ValueWeighting, check_value_weighting, fuse_weighted, join_values
from vitflow.tokens import TokenLayout
from vitflow.trace import AttentionLayer, FusionKey, Trace

_SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
# Blocks whose attention modules work side by side on the same tokens: together they are one layer with more heads.
_PARALLEL_BLOCKS = ("ParallelThingsBlock",)
# Where only fused matrices are kept, a processor works on about so many probabilities at a time, to stay in its cache.
_CACHED_PROBABILITIES = 2**18


class record_attention:
    """Record the attention of the forward passes that run inside the `with` block.

    The trace that it yields holds the last forward pass. Logits inside and outside agree to rounding; after the block,
    also after an exception, the model has its old forward methods, flags, hooks and gradients.

    Args:
        model: a Vision Transformer; compiled and data-parallel wrappers are looked through.
        head_fusion: keep only the matrix fused by "mean", "max" or "min", [batch, tokens, tokens] per layer, computed
            while the model runs; None keeps every head, [batch, heads, tokens, tokens].
        value_weighted: weight attention by what it passes on before the fusion: True by the norm of the transformed
            value vectors, "output" by their part along the attention's output.
        value_norms: keep the value vectors, from which `trace` makes the norms and the weighted heads.
        gradients: keep what `trace.backward()` needs. The forward pass must run with gradients enabled.
        fusions: several (head fusion, value weighted) pairs at once, instead of head_fusion and value_weighted.
        features: module paths whose outputs to keep, such as "blocks.11.norm1".
        attention: False records no attention, only pixels, features and their gradients; any model will do.
        layout: prefix tokens and patch grid, for a model that does not tell its own.

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
        value_norms: bool = False,
        gradients: bool = False,
        fusions: Iterable[FusionKey] = (),
        features: Iterable[str] = (),
        attention: bool = True,
        layout: TokenLayout | None = None,
    ) -> None:
        keys = set(fusions)
        if head_fusion is not None:
            keys.add((head_fusion, value_weighted))
        for name, weighting in keys:
            check_head_fusion(name)
            check_value_weighting(weighting)
        self._called, self._model = model, unwrap(model)
        self._fusions = keys
        self._keep_heads = gradients or not keys
        self._gradients = gradients
        self._values = value_norms or bool(value_weighted) or any(weighting for _, weighting in keys)
        self._features = {path: _submodule(self._model, path) for path in features}
        self._attention = attention
        self._layout = layout
        if gradients:
            _refuse_checkpointing(self._model)

    def __enter__(self) -> Trace:
        self.trace = Trace(model=self._model)
        self._path: list[tuple[str, nn.Module]] = []  # the modules that are running, outermost first
        self._open: dict[str, list[tuple[Tensor, Values | None]]] = {}  # layers that are running
        self._pooling: Tensor | None = None
        self._stack = ExitStack()
        with ExitStack() as stack:  # if anything fails on the way in, everything is undone
            self._enter_hooks(stack)
            self._enter_flags(stack)
            if self._called is not self._model and not isinstance(self._called, nn.DataParallel):
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code shows no calls
            if self._attention:
                stack.enter_context(_Intercept(self))
            self._stack = stack.pop_all()
        return self.trace

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if kind is None and self._attention and self.trace.pixels is not None and not self.trace.layers:
            raise _nothing_seen(self._model)

    # -- the model's modules ------------------------------------------------------------------------------------------

    def _enter_hooks(self, stack: ExitStack) -> None:
        for name, module in self._model.named_modules():
            if name and not any(True for _ in module.children()):
                continue  # a leaf computes no attention between tokens by itself
            stack.callback(module.register_forward_pre_hook(self._entering(name), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(self._leaving(name), always_call=True).remove)
        for path, module in self._features.items():
            stack.callback(module.register_forward_hook(self._keeping(path)).remove)

    def _enter_flags(self, stack: ExitStack) -> None:
        """Have un-fused modules call fused attention while recording, where the value vectors are needed."""
        if not self._values:
            return
        for module in self._model.modules():
            if getattr(module, "fused_attn", True) is False:
                stack.callback(setattr, module, "fused_attn", False)
                module.fused_attn = True  # type: ignore[assignment]

    def _entering(self, name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not name:
                args, kwargs = self._begin(args, kwargs)
            self._path.append((name, module))
            return (args, kwargs) if not name else None

        return hook

    def _leaving(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if self._path and self._path[-1][0] == name:
                self._path.pop()
            if name in self._open and output is not None:
                self._close(name)
            if not name and isinstance(output, Tensor):
                self._finish(output)

        return hook

    def _keeping(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            self.trace.features[path] = output

        return hook

    # -- one forward pass ---------------------------------------------------------------------------------------------

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        trace = self.trace
        trace.layers, trace.features, trace._backward = [], {}, {}
        trace.block_norms = block_norms(self._model) if self._features else ()
        trace.logits = trace._layout = trace._readout = None
        self._path, self._pooling, self._open = [], None, {}
        pixels = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
        if pixels is None or not self._gradients:
            trace.pixels = pixels
            return args, kwargs
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise OptionError(
                "record_attention(gradients=True) needs a forward pass with gradients enabled, got one under "
                "torch.no_grad() or torch.inference_mode(). Run it under torch.enable_grad()."
            )
        # A view of its own, so that the caller's tensor does not begin to require gradients.
        own = pixels.clone() if pixels.is_inference() else pixels.detach()
        own.requires_grad_()
        trace.pixels = own
        return (
            tuple(own if a is pixels else a for a in args),
            {name: own if a is pixels else a for name, a in kwargs.items()},
        )

    def _finish(self, logits: Tensor) -> None:
        trace = self.trace
        trace.logits = logits
        if trace.pixels is None:
            return
        if not trace.layers:
            trace._layout = self._layout_without_attention(trace.pixels)
            return
        first = trace.layers[0]
        example = first.heads if first.heads is not None else next(iter(first.fused.values()))
        batch, tokens = example.shape[0], example.shape[-1]
        height, width = trace.pixels.shape[-2:]
        trace._layout = self._layout or read_layout(self._model, (height, width), tokens)
        weights, trace.pooling = read_readout(self._model, trace._layout, self._pooling)
        trace._readout = weights.to(example.device, example.dtype).expand(batch, -1)

    def _layout_without_attention(self, pixels: Tensor) -> TokenLayout | None:
        """The layout by the model's own word, or None: what looks at pixels alone needs none."""
        tokens = next((found.shape[1] for found in self.trace.features.values() if found.ndim == 3), None)
        try:
            return self._layout or read_layout(self._model, (pixels.shape[-2], pixels.shape[-1]), tokens)
        except UnsupportedModelError:
            return None

    def saw(self, probabilities: Tensor, value: Tensor | None) -> None:
        """Take in one module's attention probabilities [batch, heads, queries, keys] and its value vectors."""
        name, module = self._path[-1]
        if _is_pooling(name, *probabilities.shape[-2:]):
            self._pooling = probabilities.detach()
            return
        layer = self._parallel_block() or name
        if layer == name and layer in self._open:
            raise UnsupportedModelError(
                f"{type(module).__name__} ({name}) computes attention more than once in a pass: the difference of two "
                "attention matrices has negative entries, and rollout and flow are not defined on it."
            )
        self._open.setdefault(layer, []).append((probabilities, self._values_of(value)))

    def streams(self, query: Tensor, key: Tensor) -> bool:
        """Whether this call's probabilities are only needed fused, so that they never have to exist all at once."""
        name = self._path[-1][0]
        return not (
            self._keep_heads
            or query.device.type != "cpu"
            or name in self._open
            or self._parallel_block()
            or _is_pooling(name, query.shape[-2], key.shape[-2])
        )

    def saw_part(self, fused: dict[FusionKey, list[Tensor]], probabilities: Tensor, value: Tensor) -> None:
        """Fuse the probabilities of some pictures of the batch."""
        values = self._values_of(value)
        for fusion, weighting in self._fusions:
            part = fuse_weighted(probabilities.detach(), fusion, weighting, values)  # type: ignore[arg-type]
            fused.setdefault((fusion, weighting), []).append(part)

    def saw_fused(self, fused: dict[FusionKey, list[Tensor]]) -> None:
        """Take in a layer that was fused part by part."""
        name = self._path[-1][0]
        self._open[name] = []
        joined = {key: parts[0] if len(parts) == 1 else torch.cat(parts) for key, parts in fused.items()}
        self.trace.layers.append(AttentionLayer(name, fused=joined))

    def _parallel_block(self) -> str | None:
        return next((path for path, module in self._path if type(module).__name__ in _PARALLEL_BLOCKS), None)

    def _values_of(self, value: Tensor | None) -> Values | None:
        if not self._values:
            return None
        name, module = self._path[-1]
        if value is None:
            raise ValueNormsError(
                f"{type(module).__name__} ({name}) applies its attention by itself, where the values that value "
                "weighting needs cannot be seen. Use value_weighted=False."
            )
        return _read_values(value, module, name)

    def _close(self, name: str) -> None:
        """A layer has run: fuse its heads at once, so that no more than one layer's heads are alive."""
        parts = self._open.pop(name)
        if not parts:
            return  # fused part by part
        seen = [part for _, part in parts if part is not None]
        values = seen[0] if len(seen) == 1 else join_values(seen) if seen else None
        layer = AttentionLayer(name)
        if self._keep_heads:
            layer.parts, layer.values = tuple(part for part, _ in parts), values
        else:
            heads = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts], dim=1)
            for fusion, weighting in self._fusions:
                layer.fused[fusion, weighting] = fuse_weighted(heads.detach(), fusion, weighting, values)  # type: ignore[arg-type]
        self.trace.layers.append(layer)


class _Intercept(TorchFunctionMode):
    """Sees every torch function of this thread, and takes attention probabilities where they are made."""

    def __init__(self, recorder: record_attention) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and self.recorder._path:
            return _attend(self.recorder, *args, **kwargs)
        output = func(*args, **kwargs)
        if func in _SOFTMAX and self.recorder._path and _is_attention(self.recorder._path, output, args, kwargs):
            # A copy in another precision would lie beside the path of the gradients.
            exact = output.dtype == torch.float64 or self.recorder._gradients
            self.recorder.saw(output if exact else output.float(), None)
        return output


def _attend(
    recorder: record_attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`scaled_dot_product_attention`, with the probabilities computed once: recorded, and used for the output."""
    exact = query.dtype in (torch.float32, torch.float64) and not enable_gqa
    if exact and dropout_p == 0.0 and attn_mask is None and recorder.streams(query, key):
        return _attend_in_parts(recorder, query, key, value, is_causal, scale)
    probabilities = _probabilities(query, key, attn_mask, is_causal, scale, enable_gqa)
    if recorder._gradients and not probabilities.requires_grad:
        probabilities = probabilities.detach().requires_grad_()  # a frozen model: the graph begins here
    recorder.saw(probabilities, value)
    if dropout_p == 0.0 and (exact or recorder._gradients):
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        return probabilities.to(value.dtype) @ value
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _attend_in_parts(
    recorder: record_attention, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> Tensor:
    """`_attend` for fused matrices alone, some pictures at a time: faster on a processor, and with less memory."""
    batch, heads, queries, _ = query.shape
    step = max(1, _CACHED_PROBABILITIES // (heads * queries * key.shape[-2]))
    fused: dict[FusionKey, list[Tensor]] = {}
    outputs = []
    for part in (slice(start, start + step) for start in range(0, batch, step)):
        probabilities = _probabilities(query[part], key[part], None, is_causal, scale, False)
        recorder.saw_part(fused, probabilities, value[part])
        outputs.append(probabilities @ value[part])
    recorder.saw_fused(fused)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    """Attention probabilities [batch, heads, queries, keys], in float32 at least."""
    if query.dtype not in (torch.float32, torch.float64):
        query, key = query.float(), key.float()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    with torch.autocast(query.device.type, enabled=False):
        scores = (query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)) @ key.transpose(-2, -1)
        if is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return scores.softmax(dim=-1)


def _is_pooling(name: str, queries: int, keys: int) -> bool:
    """Whether attention pools the tokens for the head, instead of mixing them in a layer."""
    return queries != keys or name.split(".")[-1] == "attn_pool"


def _is_attention(path: list[tuple[str, nn.Module]], output: Any, args: Any, kwargs: Any) -> bool:
    """Whether a softmax was attention between tokens: over the last of four axes, below the model's own level."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return isinstance(output, Tensor) and output.ndim == 4 and dim in (-1, 3) and bool(path[-1][0])


def _read_values(value: Tensor, module: nn.Module, name: str) -> Values:
    """The value vectors of an attention module, with the projection that its heads go through."""
    projection = output_projection(module)
    if projection is None or projection.shape[-1] != value.shape[1] * value.shape[-1]:
        raise ValueNormsError(
            f"{type(module).__name__} ({name}) does not join its heads by one linear output projection, which value "
            "weighting needs. Use value_weighted=False."
        )
    value = value.detach()
    value = value if value.dtype == torch.float64 else value.float()
    return Values(value, projection.detach().to(value.dtype))


def _submodule(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise OptionError(f"{type(model).__name__} has no module {path!r}: {error}.") from error


def _refuse_checkpointing(model: nn.Module) -> None:
    for module in model.modules():
        if getattr(module, "grad_checkpointing", False) is True:
            raise UnsupportedModelError(
                f"{type(module).__name__} uses gradient checkpointing, which computes the attention a second time "
                "during the backward pass. Call model.set_grad_checkpointing(False) first."
            )


def _nothing_seen(model: nn.Module) -> NoAttentionError:
    return NoAttentionError(
        f"No attention between tokens was seen in a forward pass of {type(model).__name__}: it called neither "
        "scaled_dot_product_attention nor a softmax over tokens. Attention rollout and flow need a model with "
        "self-attention, such as a timm vit_*, deit_* or dinov2 model."
    )
