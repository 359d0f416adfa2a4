"""Trace: the recorded attention, token layout and readout of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, VitflowError, check_known
from vitflow.methods.cells import cell_grid
from vitflow.methods.gradients import ValueWeighting, check_value_weighting
from vitflow.methods.refinement import Affinity
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import ClosedReadout, logits_of
from vitflow.models.blocks import block_norms
from vitflow.recording.heads import Call, observed_head
from vitflow.recording.layers import AttentionLayer, fuse_parts
from vitflow.recording.readout import HALF_SCALE, Head, Read, Tap, gradient_norms, readout_words

# Names of cross-attention modules, in lower case.
_CROSS = ".cross_attention"
_CROSSING = ("cross", "encdec", "encoder_attn")


@dataclass(slots=True)
class Backward:
    """Gradients of the target logit of each image, from one backward pass.

    Attributes:
        attentions: with respect to the attention probabilities, layers of [batch, heads, tokens, tokens].
        features: with respect to the recorded features, by module name.
        pixels: with respect to the model input, [batch, channels, height, width]; None for text.
        pooled: with respect to `Trace.pooled`, if there is one.
    """

    attentions: list[Tensor]
    features: dict[str, Tensor]
    pixels: Tensor | None
    pooled: Tensor | None = None


@dataclass(slots=True)
class Trace:
    """Recording of the last forward pass inside `record_attention`; filled while the model runs.

    Attributes:
        layers: attention of each layer, first layer first.
        layout: prefix tokens and patch grid of this pass.
        readout: the tokens of the top layer that the output is computed from, [batch, tokens]; rows sum to 1.
        pooling: source of the readout: "class token", "average over patches", …
        closed: closed-form readouts of known poolings, the declared one first; verified before use.
        pooled: attention of an attention-pooling head, [batch, heads, queries, tokens], if there is one.
        features: outputs of the requested modules, by module path, [batch, tokens, channels], or
            [batch, channels, rows, cols] or [batch, rows, cols, channels].
        feature_layouts: token layout of each feature and True if its channels are last; None without a layout.
        pixels: the model input, [batch, channels, height, width].
        output: what the model returned.
        logits: the explained outputs, [batch, classes].
        model: the model, for methods that run it again.
        refusal: reason why rollout and flow do not apply to this model, or None.
        affinities: patch affinities by kind and patch grid, filled on request.
        names: paths of the attention modules that ran, first layer first, without those of a decoder on top.
        read: maps the model's return value to the explained outputs.
        call: the recorded model call, repeatable on other pixels.
        candidates: differentiable tokens that the head may read, by the path of the module that returned them.
    """

    layers: list[AttentionLayer] = field(default_factory=list)
    features: dict[str, Tensor] = field(default_factory=dict)
    feature_layouts: dict[str, tuple[TokenLayout, bool] | None] = field(default_factory=dict)
    pixels: Tensor | None = None
    output: Any = None
    logits: Tensor | None = None
    closed: Sequence[ClosedReadout] = ()
    pooled: Tensor | None = None
    model: Any = None
    refusal: str | None = None
    affinities: dict[tuple[str, tuple[int, int]], Affinity] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    read: Read = logits_of
    call: Call | None = None
    candidates: dict[str, Tensor] = field(default_factory=dict)
    _layout: TokenLayout | None = None
    _top: TokenLayout | None = None
    _given: Tensor | None = None
    _taps: dict[tuple[int, ...], list[Tap]] = field(default_factory=dict)
    _heads: dict[Read, Head] = field(default_factory=dict)
    _backward: dict[tuple[int, ...], Backward] = field(default_factory=dict)

    def begin(self, pixels: Tensor | None = None, read: Read = logits_of, call: Call | None = None) -> None:
        """Reset the trace for a new forward pass on this model input."""
        Trace.__init__(self, model=self.model, pixels=pixels, read=read, call=call)

    def set_layers(
        self, layers: Sequence[AttentionLayer], layout: TokenLayout | None, *, refusal: str | None = None
    ) -> None:
        """Set the layers and the token layout, or the reason for a refusal."""
        self.layers, self._layout, self.refusal = list(layers), layout, refusal

    def set_readouts(self, closed: Sequence[ClosedReadout], pooled: Tensor | None, given: Tensor | None) -> None:
        """Set the closed-form readouts, the attention of a pooling head, and the readout given by the caller."""
        self.closed, self.pooled, self._given, self._top = closed, pooled, given, self.layers[-1].tokens.queries

    @property
    def layout(self) -> TokenLayout:
        """Prefix tokens and patch grid of the recorded pass; of the finest stage if stages differ."""
        if self.refusal is not None:
            raise UnsupportedModelError(self.refusal)
        if self._layout is None and self.logits is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not say how its tokens are arranged: pass "
                "layout=TokenLayout(num_prefix_tokens, rows, cols)."
            )
        if self._layout is None:
            raise VitflowError(_NOTHING_RECORDED)
        return self._layout

    @property
    def top(self) -> TokenLayout:
        """Prefix tokens and patch grid of the top layer, as in the readout."""
        return self.layout if self._top is None else self._top

    @property
    def block_norms(self) -> Sequence[str]:
        """Paths of the modules whose outputs are the features of Grad-CAM, first layer first."""
        return block_norms(self.model)

    @property
    def staged(self) -> bool:
        """True if layers attend within windows, or if stages have different tokens."""
        layout = self.layout
        return any(not layer.tokens.dense or layer.tokens.queries != layout for layer in self.layers)

    def windows(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Reshape the matrices [batch · windows, queries, keys] of each layer to [batch, windows, queries, keys]."""
        return [
            matrix.unflatten(0, (-1, layer.tokens.windows)) for layer, matrix in zip(self.layers, matrices, strict=True)
        ]

    def grid(self, patch_size: int | None = None) -> tuple[int, int]:
        """Return the rows and columns of a map: the model's patch grid, or cells of about `patch_size` pixels.

        If the model has no patches (a CNN), or patches smaller than 7 pixels (the first stage of a hierarchical model),
        the shorter side has 14 cells.
        """
        if self.pixels is None:
            raise VitflowError(_NOTHING_RECORDED)
        layout = self._layout
        patches = None if layout is None else (layout.rows, layout.cols)
        return cell_grid(self.pixels.shape[-2], self.pixels.shape[-1], patch_size, patches)

    @property
    def readout(self) -> Tensor:
        """Readout of the most probable class, [batch, tokens]; see `readout_of`.

        Raises:
            UnsupportedModelError: as for `readout_of`.
        """
        return self.readout_of(None)

    @property
    def taps(self) -> list[Tap]:
        """Readouts of the most probable class at each block that the head reads; see `taps_of`."""
        return self.taps_of(None)

    @property
    def pooling(self) -> str:
        """Source of the readout: "class token", "average over patches", …, "gradient of the output"."""
        if not self.closed:
            return ""
        if self._given is not None:
            return "given as argument"
        return "gradient of the output" if self.reads_target else self._pooling.name

    @property
    def reads_target(self) -> bool:
        """True if the readout depends on the target, because it is a gradient."""
        return self._given is None and self.head is not None and self.head.closed is None

    @property
    def head(self) -> Head | None:
        """Observed computation of the output from tokens, once per model and `read`; None if not needed.

        It is not needed if the model returns tokens instead of outputs [batch, outputs] (the declared pooling is used),
        or on the meta device.
        """
        logits, call = self.logits, self.call
        if not self.closed or call is None or self._given is not None or call.pixels.is_meta:
            return None
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            return None
        if self.read not in self._heads:
            self._heads[self.read] = observed_head(call, self.names, self.top, self.closed, self.read)
        return self._heads[self.read]

    @property
    def _pooling(self) -> ClosedReadout:
        """Readout of the verified pooling, or of the declared pooling if none can be verified."""
        name = None if self.head is None else self.head.closed
        return next((closed for closed in self.closed if closed.name == name), self.closed[0])

    def readout_of(self, targets: Tensor | None) -> Tensor:
        """Return the readout: weights of the top layer's tokens in each target output, [batch, tokens].

        Args:
            targets: index of the output of each image, [batch]; by default the largest.

        Raises:
            UnsupportedModelError: as for `taps_of`; or the head reads the tokens of several blocks.
        """
        taps = self.taps_of(targets)
        if len(taps) > 1 or taps[0].layers < len(self.layers):
            read = ", ".join(str(tap.layers) for tap in taps)
            raise UnsupportedModelError(
                f"{type(self.model).__name__} computes its output from the tokens after layers {read}. This requires a "
                "readout of the last layer: use rollout, attention, flow, gae or gradient_rollout, or pass readout=."
            )
        return taps[0].readout

    def taps_of(self, targets: Tensor | None) -> list[Tap]:
        """Return the tokens that the output is computed from: one tap for each block that the head reads, lowest first.

        The readout of a tap is the closed form of the model's pooling if verified, else `‖∂f/∂y_i‖` for its tokens y,
        along paths that pass no higher block.

        Args:
            targets: index of the output of each image, [batch]; by default the largest.

        Raises:
            UnsupportedModelError: the gradient is needed and was not recorded, or is zero.
        """
        if self.refusal is not None:
            raise UnsupportedModelError(self.refusal)
        if not self.closed:
            raise VitflowError(_NOTHING_RECORDED)
        example, batch = self.layers[-1].example, 1 if self.pixels is None else len(self.pixels)
        if self._given is not None:
            return [Tap(len(self.layers), self._given, example.new_ones(batch))]
        head = self.head
        if head is None or head.closed is not None:
            readout = self._pooling.weights.to(example).expand(batch, -1)
            return [Tap(len(self.layers), readout, example.new_ones(batch))]
        assert isinstance(self.logits, Tensor)
        chosen = self.logits.detach().argmax(dim=1) if targets is None else targets.to(self.logits.device)
        key = tuple(chosen.tolist())
        if key not in self._taps:
            tokens, counts = self._tokens_read_by(head), [head.layers_below(path) for path in head.taps]
            layouts = [self.layers[count - 1].tokens.queries for count in counts]
            norms = gradient_norms(self.logits, chosen, tokens, layouts, [self._order(count) for count in counts])
            sums = [each.sum(dim=1) for each in norms]
            every = torch.stack(sums).sum(dim=0)
            self._taps[key] = [
                Tap(count, (each / total.clamp(min=_TINY).unsqueeze(1)).to(example), (total / every).to(example))
                for count, each, total in zip(counts, norms, sums, strict=True)
            ]
        return self._taps[key]

    def at(self, tap: Tap) -> Self:
        """Return this trace up to a tap, with the readout there."""
        if tap.layers == len(self.layers) and self._given is not None:
            return self
        return replace(
            self,
            layers=self.layers[: tap.layers],
            pooled=None,
            _top=self.layers[tap.layers - 1].tokens.queries,
            _given=tap.readout,
            _backward={
                key: replace(each, attentions=each.attentions[: tap.layers]) for key, each in self._backward.items()
            },
        )

    def _tokens_read_by(self, head: Head) -> list[Tensor]:
        """Return the tokens y of each tap, in the autograd graph."""
        model = type(self.model).__name__
        if head.refusal:
            raise UnsupportedModelError(
                f"{model} computes its output {head.refusal}, so a map from its attention is incomplete. Pass readout= "
                "with weights for the tokens of its last block, or use sampling, gradcam, input_gradient or occlusion."
            )
        tokens = [self.candidates[path] for path in head.taps if path in self.candidates]
        if not tokens or len(tokens) < len(head.taps) or not all(each.requires_grad for each in tokens):
            cause, remedy = "this pass was recorded without gradients", "record with gradients=True"
            if not head.taps:
                cause, remedy = "it has no gradient at the tokens of any module", "use sampling or occlusion"
            raise UnsupportedModelError(
                f"This output of {model} has no known pooling, so its readout requires a gradient, but {cause}. Pass "
                f"readout= with a weight for each token of the top layer, or {remedy}."
            )
        return tokens

    def _order(self, count: int) -> Tensor | None:
        """Return the raster index of each token after `count` layers, if the model uses another order."""
        tokens = self.layers[count - 1].tokens
        index = None if tokens.query_index is None or tokens.windows > 1 else tokens.query_index[0]
        return index if index is not None and len(index) == tokens.queries.num_tokens else None

    def readout_words(self, targets: Tensor | None) -> list[str]:
        """Describe the readout of each image, for captions."""
        if self._given is None and not self.reads_target:
            return [self.pooling] * (0 if self.pixels is None else len(self.pixels))
        if self._given is not None:
            return [f"{readout_words(row, self.top)}, given as argument" for row in self._given]
        taps = self.taps_of(targets)
        words = []
        for index in range(len(taps[0].readout)):
            strongest = max(taps, key=lambda tap: float(tap.share[index]))
            layout = self.layers[strongest.layers - 1].tokens.queries
            text = f"{readout_words(strongest.readout[index], layout)}, from the gradient of the output"
            if len(taps) > 1 or strongest.layers < len(self.layers):
                shares = ", ".join(f"{tap.layers} ({float(tap.share[index]):.0%})" for tap in taps)
                text += f", after layers {shares}"
            words.append(text)
        return words

    @property
    def _recorded(self) -> list[AttentionLayer]:
        if not self.layers:
            raise VitflowError(_NOTHING_RECORDED)
        return self.layers

    @property
    def streams(self) -> dict[str, tuple[AttentionLayer, ...]]:
        """Layers of each token stream by its name, first layer first.

        A stream is a stack of blocks, named by its path ("encoder", "model.vision_tower.vision_model.encoder");
        cross-attention between streams has a separate name ("decoder.cross_attention").
        """
        streams: dict[str, tuple[AttentionLayer, ...]] = {}
        for layer in self.layers:
            name = stream_of(layer.name)
            streams[name] = (*streams.get(name, ()), layer)
        return streams

    def of_stream(self, name: str) -> "Trace":
        """Return the trace with only the layers of one stream.

        Raises:
            OptionError: unknown stream.
        """
        streams = self.streams
        check_known("stream of tokens", name, streams)
        return replace(self, layers=list(streams[name]))

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """Attention of each layer, first layer first.

        [batch, heads, tokens, tokens], or [batch, tokens, tokens] if recorded with a head fusion.
        """
        attentions = []
        for layer in self._recorded:
            if layer.heads is None and len(layer.fused) != 1:
                kept = ", ".join(f"{name}{_weighted_words(weighting)}" for name, weighting in layer.fused)
                raise OptionError(f"Several fused matrices were recorded ({kept}): choose one with trace.fused(…).")
            attentions.append(layer.heads if layer.heads is not None else next(iter(layer.fused.values())))
        return tuple(attentions)

    def heads(self, *, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """Return all heads of each layer, [batch, heads, tokens, tokens], value weighted if requested.

        Raises:
            OptionError: only fused matrices, or no value vectors, were recorded.
        """
        check_value_weighting(value_weighted)
        heads = [layer.heads for layer in self._recorded if layer.heads is not None]
        if len(heads) != len(self.layers):
            raise OptionError("Only fused attention was recorded: record without head_fusion to keep every head.")
        if value_weighted is False:
            return heads
        values = [layer.values for layer in self.layers if layer.values is not None]
        if len(values) != len(heads):
            raise OptionError("Value vectors were not recorded: record with values=True.")
        return [each.weigh(_detached(layer), value_weighted) for layer, each in zip(heads, values, strict=True)]

    def fused(self, head_fusion: str = "mean", *, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """Return the fused attention of each layer, [batch, tokens, tokens], first layer first.

        Raises:
            OptionError: neither this fusion nor all heads were recorded.
        """
        check_value_weighting(value_weighted)
        key = (head_fusion, value_weighted)
        matrices = []
        for layer in self._recorded:
            if key not in layer.fused:
                if layer.heads is None or (value_weighted and layer.values is None):
                    raise OptionError(
                        f"Attention fused by {head_fusion}{_weighted_words(value_weighted)} was not recorded: record "
                        "it, or record every head."
                    )
                layer.fused[key] = fuse_parts(_detached(layer.heads), key, layer.values, layer.parts)
            matrices.append(layer.fused[key])
        return matrices

    def forget_gradients(self) -> None:
        """Free the gradients that `backward` caches."""
        self._backward.clear()

    def backward(self, targets: Tensor) -> Backward:
        """Differentiate the target logit of each image with respect to all recorded tensors, in one backward pass.

        Parameters' `.grad` does not change. Gradients are cached by targets.

        Args:
            targets: class index of each image, [batch].

        Raises:
            OptionError: the pass was recorded without gradients.
            ShapeError: the logits are not [batch, classes].
            UnsupportedModelError: a gradient is zero everywhere, or does not reach the attention.
        """
        if self.logits is None or self.pixels is None:
            raise VitflowError(_NOTHING_RECORDED)
        if self.logits.ndim != 2 or len(targets) != len(self.logits):
            raise ShapeError(
                f"Expected logits [batch, classes] and one target per image, got logits {tuple(self.logits.shape)} "
                f"and {len(targets)} targets."
            )
        key = tuple(int(target) for target in targets)
        if key not in self._backward:
            # Images of a batch are independent, so the gradient of the sum has the gradient of each image.
            with torch.inference_mode(False), torch.enable_grad():
                chosen = self.logits.gather(1, targets.to(self.logits.device).view(-1, 1))
            gradients = self.gradients_of(chosen)
            if gradients.pixels is not None and not gradients.pixels.flatten(1).any(dim=1).all():
                raise UnsupportedModelError(
                    "The gradient of the output with respect to the image is zero everywhere: the output is detached, "
                    "constant, saturated, or behind a ReLU that is off. Explain another output, or use sampling or "
                    "occlusion, which need no gradient."
                )
            self._backward[key] = gradients
        return self._backward[key]

    def gradients_of(self, scores: Tensor) -> Backward:
        """Differentiate scores with respect to all recorded tensors.

        Parameters' `.grad` does not change.

        Args:
            scores: any tensor computed from `logits`, such as one word's logit of each text; its sum is differentiated.

        Raises:
            OptionError: the pass was recorded without gradients.
        """
        if not scores.requires_grad:
            raise OptionError("This pass was recorded without gradients: record with gradients=True.")
        parts = [(layer.name, part) for layer in self.layers for part in layer.parts]
        pixels = () if self.pixels is None else (self.pixels,)
        pooled = () if self.pooled is None or not self.pooled.requires_grad else (self.pooled,)
        inputs: list[Tensor] = [*(part.tensor for _, part in parts), *self.features.values(), *pixels, *pooled]
        # Scaled, because the smallest gradients underflow in half precision.
        scale = HALF_SCALE if scores.dtype == torch.float16 else 1.0
        with torch.inference_mode(False), torch.enable_grad():
            raw = torch.autograd.grad(scores.float().sum() * scale, inputs, retain_graph=True, allow_unused=True)
        head = self.head if any(gradient is None for gradient in raw[: len(parts)]) else None
        unread = set[str]()  # layers above the highest block that the head reads
        if head is not None and head.taps and len(head.blocks) == len(self.layers):
            unread = {layer.name for layer in self.layers[head.layers_below(head.taps[-1]) :]}
        for (name, _), gradient in zip(parts, raw, strict=False):
            if gradient is None and name not in unread:
                remedy = "gradcam, input_gradient, sampling or occlusion" if pixels else "method='attention'"
                raise UnsupportedModelError(
                    f"The logits of {type(self.model).__name__} do not depend on the recorded attention of {name} "
                    f"(unused or copied), so its gradient is None. Use {remedy}."
                )
        gradients = iter(
            torch.zeros_like(source) if gradient is None else gradient.to(_wider(gradient.dtype)) / scale
            for source, gradient in zip(inputs, raw, strict=True)
        )
        attentions = [
            torch.cat([part.arranged(next(gradients)) for part in layer.parts], dim=1) for layer in self.layers
        ]
        features = {name: next(gradients) for name in self.features}
        to_pixels = next(gradients) if pixels else None
        return Backward(attentions, features, to_pixels, next(gradients, None))


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


def _detached(heads: Tensor) -> Tensor:
    return heads.detach().to(_wider(heads.dtype))


def _weighted_words(value_weighted: ValueWeighting) -> str:
    if value_weighted == "output":
        return " and value weighted by output"
    return " and value weighted" if value_weighted else ""


def _wider(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


# Lower limit of a divisor.
_TINY = torch.finfo(torch.float64).tiny
_NOTHING_RECORDED = "Nothing has been recorded: run the model's forward pass inside `with record_attention(model)`."
