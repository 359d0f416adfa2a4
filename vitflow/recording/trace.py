"""Trace: what the recorder saw in one forward pass, with its token layout and readout."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, VitflowError, check_known
from vitflow.methods.cells import cell_grid
from vitflow.methods.gradients import Values, ValueWeighting, check_value_weighting
from vitflow.methods.refinement import Affinity
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import ClosedReadout, logits_of
from vitflow.recording.heads import Call, observed_head
from vitflow.recording.layers import AttentionLayer, fuse_parts
from vitflow.recording.readout import HALF_SCALE, Head, Read, gradient_readout, readout_words

# What modules call attention from one stream of tokens to another, in small letters.
_CROSSING = ("cross", "encdec", "encoder_attn")


@dataclass(slots=True)
class Backward:
    """The gradients of one backward pass, each image's own target logit differentiated.

    Attributes:
        attentions: with respect to the attention probabilities, layers of [batch, heads, tokens, tokens].
        features: with respect to the recorded features, by module name.
        pixels: with respect to the model input, [batch, channels, height, width]; None of a text.
        pooled: with respect to `Trace.pooled`, where there is such.
    """

    attentions: list[Tensor]
    features: dict[str, Tensor]
    pixels: Tensor | None
    pooled: Tensor | None = None


@dataclass(slots=True)
class Trace:
    """What one forward pass showed. Filled while the model runs inside `record_attention`; holds the last pass.

    Attributes:
        layers: attention of each layer, first layer first.
        layout: prefix tokens and patch grid of this very pass.
        readout: the tokens of the top layer that the output is computed from, [batch, tokens]; rows sum to 1.
        pooling: where the readout comes from: "class token", "average over patches", …
        closed: the readouts of known poolings, first the one that the model declares; verified before one is used.
        pooled: attention of an attention-pooling head, [batch, heads, queries, tokens], if there is one.
        features: outputs of the modules that were asked for, by module path, [batch, tokens, channels], or
            [batch, channels, rows, cols] or [batch, rows, cols, channels].
        feature_layouts: how each of them lies on the image, and whether its channels come last; None if it does not.
        block_norms: where features were asked for, the paths of the modules that Grad-CAM can read, first layer first.
        pixels: the model input, [batch, channels, height, width].
        output: what the model returned.
        logits: its answers, [batch, classes].
        model: the model itself, for methods that run it again.
        refusal: why rollout and flow do not apply to this model, or None.
        affinities: how alike the patches are by kind, for each patch grid, as far as it was asked for.
        names: paths of the attention modules that ran, first layer first.
        read: maps what the model returned to the outputs that are explained.
        again: the call of the model, to be repeated on other pixels.
        candidates: outputs of modules after the last attention layer, through which gradients pass, by path.
    """

    layers: list[AttentionLayer] = field(default_factory=list)
    features: dict[str, Tensor] = field(default_factory=dict)
    feature_layouts: dict[str, tuple[TokenLayout, bool] | None] = field(default_factory=dict)
    block_norms: Sequence[str] = ()
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
    again: Call | None = None
    candidates: dict[str, Tensor] = field(default_factory=dict)
    _layout: TokenLayout | None = None
    _top: TokenLayout | None = None
    _given: Tensor | None = None
    _readouts: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    _heads: dict[Read, Head] = field(default_factory=dict)
    _backward: dict[tuple[int, ...], Backward] = field(default_factory=dict)

    def begin(
        self,
        pixels: Tensor | None,
        block_norms: Sequence[str] = (),
        read: Read = logits_of,
        again: Call | None = None,
    ) -> None:
        """Forget the pass before: another one begins, with this model input."""
        self.read, self.again = read, again
        self.layers, self.features, self.feature_layouts, self._backward = [], {}, {}, {}
        self.affinities, self.names, self.candidates, self._readouts = {}, [], {}, {}
        self.closed, self._heads = (), {}
        self.pixels, self.block_norms = pixels, block_norms
        self.output = self.logits = self.refusal = self.pooled = self._layout = self._top = None

    def lay_out(
        self, layers: Sequence[AttentionLayer], layout: TokenLayout | None, *, refusal: str | None = None
    ) -> None:
        """Take in where the tokens of the pass lie, or why that cannot be told."""
        self.layers, self._layout, self.refusal = list(layers), layout, refusal

    def read_out(
        self, closed: Sequence[ClosedReadout], top: TokenLayout, pooled: Tensor | None, given: Tensor | None
    ) -> None:
        """Take in the readouts of known poolings, the top layer's layout, and a readout that the caller gives."""
        self.closed, self._top, self.pooled, self._given = closed, top, pooled, given

    @property
    def layout(self) -> TokenLayout:
        """Prefix tokens and patch grid of the recorded pass; where stages differ, of the finest."""
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
        """Prefix tokens and patch grid of the top layer, over which the readout goes."""
        return self.layout if self._top is None else self._top

    @property
    def staged(self) -> bool:
        """Whether layers have windows of their own, or stages with different tokens between them."""
        layout = self.layout
        return any(not layer.tokens.dense or layer.tokens.queries != layout for layer in self.layers)

    def windows(self, matrices: Sequence[Tensor]) -> list[Tensor]:
        """Fused matrices [batch · windows, queries, keys] of each layer as [batch, windows, queries, keys]."""
        return [
            matrix.unflatten(0, (-1, layer.tokens.windows)) for layer, matrix in zip(self.layers, matrices, strict=True)
        ]

    def grid(self, patch_size: int | None = None) -> tuple[int, int]:
        """Rows and columns of a map of the model input: the model's own patches, or cells of about so many pixels.

        Without patches of its own (a convolutional network), or where they are smaller than 7 pixels (the first stage
        of a hierarchical model), 14 cells on the shorter side.
        """
        if self.pixels is None:
            raise VitflowError(_NOTHING_RECORDED)
        own = self._layout
        patches = None if own is None else (own.rows, own.cols)
        return cell_grid(self.pixels.shape[-2], self.pixels.shape[-1], patch_size, patches)

    @property
    def readout(self) -> Tensor:
        """The tokens of the top layer that the output is computed from, [batch, tokens]; of the most probable class.

        Raises:
            UnsupportedModelError: as for `readout_of`.
        """
        return self.readout_of(None)

    @property
    def pooling(self) -> str:
        """Where the readout comes from: "class token", "average over patches", …, "gradient of the output"."""
        if not self.closed:
            return ""
        if self._given is not None:
            return "given as argument"
        return "gradient of the output" if self.reads_target else self._pooling.name

    @property
    def reads_target(self) -> bool:
        """Whether the readout depends on which output is explained: whether it is a gradient."""
        return self._given is None and self.head is not None and self.head.closed is None

    @property
    def head(self) -> Head | None:
        """How the output is computed from tokens, observed once per model and question; None if that is not needed.

        It is not needed if the model returns tokens instead of outputs [batch, outputs], whose declared pooling is
        taken, nor for a pass over shapes without values.
        """
        numbers, again = self.logits, self.again
        if not self.closed or again is None or self._given is not None or again.pixels.is_meta:
            return None
        if not isinstance(numbers, Tensor) or numbers.ndim != 2:
            return None
        if self.read not in self._heads:
            self._heads[self.read] = observed_head(again, self.names, self.top, self.closed, self.read)
        return self._heads[self.read]

    @property
    def _pooling(self) -> ClosedReadout:
        """The readout of the known pooling that holds, or that the model declares if that cannot be verified."""
        name = None if self.head is None else self.head.closed
        return next((one for one in self.closed if one.name == name), self.closed[0])

    def readout_of(self, targets: Tensor | None) -> Tensor:
        """The tokens of the top layer that each image's target output is computed from, [batch, tokens].

        The closed form of the model's pooling if it holds, else `‖∂f/∂y_i‖` over the tokens y that the head reads,
        rows summing to 1.

        Args:
            targets: index of the output of each image, [batch]; by default the largest.

        Raises:
            UnsupportedModelError: the gradient is needed and was not recorded, or is zero; or the output is computed
                from the tokens of several blocks.
        """
        if self.refusal is not None:
            raise UnsupportedModelError(self.refusal)
        if not self.closed:
            raise VitflowError(_NOTHING_RECORDED)
        if self._given is not None:
            return self._given
        head, batch = self.head, 1 if self.pixels is None else len(self.pixels)
        if head is None or head.closed is not None:
            return self._pooling.weights.to(self.layers[-1].example).expand(batch, -1)
        assert isinstance(self.logits, Tensor)
        chosen = self.logits.detach().argmax(dim=1) if targets is None else targets.to(self.logits.device)
        key = tuple(chosen.tolist())
        if key not in self._readouts:
            found = gradient_readout(self.logits, chosen, self._tokens_read_by(head), self.top, self._order)
            self._readouts[key] = found.to(self.layers[-1].example)
        return self._readouts[key]

    def _tokens_read_by(self, head: Head) -> Tensor:
        """The tokens y that the head reads, on the path of the gradients."""
        model = type(self.model).__name__
        if head.blocks:
            raise UnsupportedModelError(
                f"The output of {model} is computed from the tokens of several blocks (not only the last, also "
                f"{', '.join(head.blocks)}), and a map that starts at the last one would be incomplete. Pass readout= "
                "to start at tokens of the last block, or use sampling, gradcam, input_gradient or occlusion."
            )
        tokens = None if head.tap is None else self.candidates.get(head.tap)
        if tokens is None or not tokens.requires_grad:
            why = (
                "no gradient of it reaches tokens that a module returns (a head of zeros or a detached output has none)"
                if head.tap is None
                else "this pass was recorded without gradients"
            )
            raise UnsupportedModelError(
                f"This output of {model} is not computed by a known pooling, so its readout is a gradient, and {why}. "
                "Record with gradients=True, or pass readout=, a weight for each token of the top layer."
            )
        return tokens

    @property
    def _order(self) -> Tensor | None:
        """Raster index of each token of the top layer, if the model keeps them in another order."""
        tokens = self.layers[-1].tokens
        index = None if tokens.query_index is None or tokens.windows > 1 else tokens.query_index[0]
        return index if index is not None and len(index) == self.top.num_tokens else None

    def readout_words(self, targets: Tensor | None) -> list[str]:
        """Where the readout of each image comes from, for captions."""
        if self._given is None and not self.reads_target:
            return [self.pooling] * (0 if self.pixels is None else len(self.pixels))
        source = "given as argument" if self._given is not None else "from the gradient of the output"
        return [f"{readout_words(row, self.top)}, {source}" for row in self.readout_of(targets)]

    @property
    def streams(self) -> dict[str, tuple[AttentionLayer, ...]]:
        """The layers by the stream of tokens that they work on, first layer first, by the name of that stream.

        A stream is a stack of blocks, by its path in the model ("encoder", "model.vision_tower.vision_model.encoder");
        attention from one stream to another has a name of its own ("decoder.cross_attention").
        """
        found: dict[str, tuple[AttentionLayer, ...]] = {}
        for layer in self.layers:
            name = stream_of(layer.name)
            found[name] = (*found.get(name, ()), layer)
        return found

    def of_stream(self, name: str) -> "Trace":
        """The same trace with the layers of one stream alone.

        Raises:
            OptionError: there is no such stream.
        """
        streams = self.streams
        check_known("stream of tokens", name, streams)
        return replace(self, layers=list(streams[name]))

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """The attention of each layer, first layer first.

        [batch, heads, tokens, tokens], or the fused [batch, tokens, tokens] where the recorder was given a head fusion.
        """
        if not self.layers:
            raise VitflowError(_NOTHING_RECORDED)
        found = []
        for layer in self.layers:
            if layer.heads is None and len(layer.fused) != 1:
                kept = ", ".join(f"{name}{_weighted_words(weighting)}" for name, weighting in layer.fused)
                raise OptionError(f"Several fused matrices were recorded ({kept}): choose one with trace.fused(…).")
            found.append(layer.heads if layer.heads is not None else next(iter(layer.fused.values())))
        return tuple(found)

    def heads(self, *, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """All heads of each layer, [batch, heads, tokens, tokens]; weighted by what they pass on, if asked for.

        Raises:
            OptionError: the recorder kept only fused matrices, or no value vectors.
        """
        check_value_weighting(value_weighted)
        if not self.layers:
            raise VitflowError(_NOTHING_RECORDED)
        found = [layer.heads for layer in self.layers if layer.heads is not None]
        if len(found) != len(self.layers):
            raise OptionError("Only fused attention was recorded: record without head_fusion to keep every head.")
        if value_weighted is False:
            return found
        return [
            values.weigh(_detached(heads), value_weighted) for heads, values in zip(found, self._values(), strict=True)
        ]

    def fused(self, head_fusion: str = "mean", *, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """Fused attention of each layer, [batch, tokens, tokens], first layer first.

        Raises:
            OptionError: neither this fusion nor the separate heads were recorded.
        """
        check_value_weighting(value_weighted)
        if not self.layers:
            raise VitflowError(_NOTHING_RECORDED)
        key = (head_fusion, value_weighted)
        matrices = []
        for layer in self.layers:
            if key not in layer.fused:
                if layer.heads is None or (value_weighted and layer.values is None):
                    raise OptionError(
                        f"Attention fused by {head_fusion}{_weighted_words(value_weighted)} was not recorded: name it "
                        "when recording, or record every head."
                    )
                layer.fused[key] = fuse_parts(_detached(layer.heads), key, layer.values, layer.parts)
            matrices.append(layer.fused[key])
        return matrices

    def _values(self) -> list[Values]:
        found = [layer.values for layer in self.layers if layer.values is not None]
        if len(found) != len(self.layers) or not found:
            raise OptionError("Value vectors were not recorded: record with values=True.")
        return found

    def forget_gradients(self) -> None:
        """Free the gradients that `backward` keeps."""
        self._backward.clear()

    def backward(self, targets: Tensor) -> Backward:
        """Differentiate each image's own target logit by all that was recorded, in one backward pass.

        No parameter's `.grad` is touched. A second call with the same targets costs nothing.

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
            # Images of a batch do not influence each other, so the sum's gradient holds each image's own.
            with torch.inference_mode(False), torch.enable_grad():
                chosen = self.logits.gather(1, targets.to(self.logits.device).view(-1, 1))
            found = self.gradients_of(chosen)
            if found.pixels is not None and not found.pixels.flatten(1).any(dim=1).all():
                raise UnsupportedModelError(
                    "The gradient of the output with respect to the image is zero everywhere: the output is detached, "
                    "constant, saturated, or behind a ReLU that is off. Explain another output, or use sampling or "
                    "occlusion, which need no gradient."
                )
            self._backward[key] = found
        return self._backward[key]

    def gradients_of(self, scores: Tensor) -> Backward:
        """Differentiate numbers that were computed from the model's output by all that was recorded.

        No parameter's `.grad` is touched.

        Args:
            scores: any tensor made of `logits`, such as one word's logit of each text; its sum is differentiated.

        Raises:
            OptionError: the pass was recorded without gradients.
        """
        if not scores.requires_grad:
            raise OptionError("This pass was recorded without gradients: record with gradients=True.")
        parts = [(layer.name, part) for layer in self.layers for part in layer.parts]
        pixels = () if self.pixels is None else (self.pixels,)
        pooled = () if self.pooled is None or not self.pooled.requires_grad else (self.pooled,)
        inputs: list[Tensor] = [*(part.tensor for _, part in parts), *self.features.values(), *pixels, *pooled]
        # Half precision cannot hold the smallest gradients, unless they are made larger on the way.
        scale = HALF_SCALE if scores.dtype == torch.float16 else 1.0
        with torch.inference_mode(False), torch.enable_grad():
            found = torch.autograd.grad(scores.float().sum() * scale, inputs, retain_graph=True, allow_unused=True)
        for (name, _), gradient in zip(parts, found, strict=False):
            if gradient is None:
                raise UnsupportedModelError(
                    f"The attention of {name} has no part in the logits of {type(self.model).__name__}, or was copied "
                    "on its way there: it has no gradient. Use a method that needs none, such as rollout or occlusion."
                )
        gradients = iter(
            torch.zeros_like(source) if gradient is None else gradient.to(_wider(gradient.dtype)) / scale
            for source, gradient in zip(inputs, found, strict=True)
        )
        attentions = [
            torch.cat([part.arranged(next(gradients)) for part in layer.parts], dim=1) for layer in self.layers
        ]
        features = {name: next(gradients) for name in self.features}
        to_pixels = next(gradients) if pixels else None
        return Backward(attentions, features, to_pixels, next(gradients, None))


def stream_of(path: str) -> str:
    """The name of the stream of tokens that an attention module works on, by its path in the model.

    >>> stream_of("decoder.block.3.layer.0.SelfAttention"), stream_of("decoder.block.3.layer.1.EncDecAttention")
    ('decoder', 'decoder.cross_attention')
    >>> stream_of("h.0.attn"), stream_of("model.vision_tower.encoder.layers.1.self_attn")
    ('h', 'model.vision_tower.encoder')
    """
    parts = path.split(".")
    stack = next((number for number, part in enumerate(parts) if part.isdigit()), len(parts))
    name = ".".join(parts[: max(stack - 1, 1)])  # without the list of blocks, where it is not all there is
    crosses = any(word in part.lower() for part in parts[stack:] for word in _CROSSING)
    return f"{name}.cross_attention" if crosses else name


def _detached(heads: Tensor) -> Tensor:
    return heads.detach().to(_wider(heads.dtype))


def _weighted_words(value_weighted: ValueWeighting) -> str:
    if value_weighted == "output":
        return " and value weighted by output"
    return " and value weighted" if value_weighted else ""


def _wider(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


_NOTHING_RECORDED = "Nothing has been recorded: run the model's forward pass inside `with record_attention(model)`."
