"""Trace: the recorded attention, token layout and readout of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from vitflow.errors import OptionError, ShapeError, UnsupportedModelError, VitflowError
from vitflow.images.extents import Extent
from vitflow.methods.cells import cell_grid
from vitflow.methods.gradients import at_least_float32
from vitflow.methods.refinement import Affinity
from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_norms
from vitflow.models.calls import logits_of
from vitflow.models.pooling import ClosedReadout
from vitflow.recording.heads import observed_head
from vitflow.recording.isolation import checkpointing_error
from vitflow.recording.layers import NOTHING_RECORDED, AttentionLayer, Backward, RecordedLayers
from vitflow.recording.probing import Call
from vitflow.recording.readout import HALF_SCALE, Head, Read, Tap, gradient_taps, readout_words, taps_words


@dataclass(slots=True)
class Trace(RecordedLayers):
    """Recording of the last forward pass inside `record_attention`; filled while the model runs.

    Attributes:
        layout: prefix tokens and patch grid of this pass.
        readout: the tokens of the top layer that the output is computed from, [batch, tokens]; rows sum to 1.
        pooling: source of the readout: "class token", "average over patches", …
        closed: closed-form readouts of known poolings, the declared one first; verified before use.
        pooled: attention of an attention-pooling head, [batch, heads, queries, tokens], if there is one.
        features: outputs of the requested modules, by module path, [batch, tokens, channels], or
            [batch, channels, rows, cols] or [batch, rows, cols, channels].
        feature_layouts: token layout of each feature and True if its channels are last; None without a layout.
        passed: with gradients, outputs of the blocks that contain the features and of the first blocks of their stacks,
            by module path; None for several runs.
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

    features: dict[str, Tensor] = field(default_factory=dict)
    feature_layouts: dict[str, tuple[TokenLayout, bool] | None] = field(default_factory=dict)
    passed: dict[str, Tensor | None] = field(default_factory=dict)
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

    def locate(
        self,
        layers: list[AttentionLayer],
        layout: TokenLayout | None,
        top: TokenLayout | None = None,
        given: Tensor | None = None,
    ) -> None:
        """Set the layers with their positions, the layouts of all tokens and of the top layer, and a given readout."""
        self.layers, self._layout, self._top, self._given = layers, layout, top, given

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
            raise VitflowError(NOTHING_RECORDED)
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

    @property
    def replaces_tokens(self) -> bool:
        """True if tokens are replaced or zeroed between blocks, so that their columns are 0 in a product of layers."""
        return any(layer.passed is not None for layer in self.layers)

    def grid(self, patch_size: int | None = None) -> tuple[int, int]:
        """Return the rows and columns of a map: the model's patch grid, or cells of about `patch_size` pixels.

        If the model has no patches (a CNN), or patches smaller than 7 pixels (the first stage of a hierarchical model),
        the shorter side has 14 cells.
        """
        if self.pixels is None:
            raise VitflowError(NOTHING_RECORDED)
        layout = self._layout
        patches = None if layout is None else (layout.rows, layout.cols)
        return cell_grid(self.pixels.shape[-2], self.pixels.shape[-1], patch_size, patches)

    def extent_of(self, grid: tuple[int, int]) -> Extent | None:
        """Return the measured pixels of a grid of (rows, columns) of tokens; None if it divides the input evenly."""
        located = [layer.located for layer in self.layers if layer.located is not None]
        layouts = [self._layout, *(layout for each in located for layout in (each.queries, each.keys))]
        layouts += [each[0] for each in self.feature_layouts.values() if each is not None]
        fitting = (each.extent for each in layouts if each is not None and (each.rows, each.cols) == grid)
        extent = next(filter(None, fitting), None)
        if extent is None or self.pixels is None:
            return None
        sides = zip(extent, grid, self.pixels.shape[-2:], strict=True)
        return None if all(span.is_even(count, length) for span, count, length in sides) else extent

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
            raise VitflowError(NOTHING_RECORDED)
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
            last = [self.layers[count - 1].tokens for count in counts]
            layouts, orders = [each.queries for each in last], [each.order for each in last]
            taps = gradient_taps(self.logits, chosen, tokens, counts, layouts, orders)
            self._taps[key] = [Tap(tap.layers, tap.readout.to(example), tap.share.to(example)) for tap in taps]
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
                "with weights for the tokens of its last block, or use sampling, input_gradient or occlusion."
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

    def readout_words(self, targets: Tensor | None) -> list[str]:
        """Describe the readout of each image, for captions."""
        if self._given is None and not self.reads_target:
            return [self.pooling] * (0 if self.pixels is None else len(self.pixels))
        if self._given is not None:
            return [f"{readout_words(row, self.top)}, given as argument" for row in self._given]
        taps = self.taps_of(targets)
        layouts = [self.layers[tap.layers - 1].tokens.queries for tap in taps]
        return taps_words(taps, layouts, len(self.layers))

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
            raise VitflowError(NOTHING_RECORDED)
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

    def share_passing(self, paths: Sequence[str], targets: Tensor) -> Tensor:
        """Return the share of the gradient of each image's target that passes some blocks on its way to the pixels.

        Args:
            paths: blocks in `passed`, none of which computes its output from another.
            targets: class index of each image, [batch].

        Returns:
            1 minus the norm of the rest relative to the whole gradient, at least 0, [batch].
        """
        whole, tokens = self.backward(targets).pixels, [self.passed.get(path) for path in paths]
        known = [each for each in tokens if each is not None]
        assert whole is not None and self.pixels is not None and self.logits is not None
        if len(known) < len(tokens):
            return whole.new_zeros(len(whole))
        scale = HALF_SCALE if self.logits.dtype == torch.float16 else 1.0
        with torch.inference_mode(False), torch.enable_grad():
            scores = self.logits.gather(1, targets.to(self.logits.device).view(-1, 1))
            if not _reaches(scores.grad_fn, self.pixels, known):
                return whole.new_ones(len(whole))
            above = torch.autograd.grad(scores.float().sum() * scale, known, retain_graph=True, allow_unused=True)
            reached = [(each, gradient) for each, gradient in zip(known, above, strict=True) if gradient is not None]
            if not reached:
                return whole.new_zeros(len(whole))
            outputs, gradients = zip(*reached, strict=True)
            [passing] = torch.autograd.grad(outputs, [self.pixels], gradients, retain_graph=True, allow_unused=True)
        rest = whole if passing is None else whole - at_least_float32(passing) / scale
        share: Tensor = 1 - rest.flatten(1).norm(dim=1) / whole.flatten(1).norm(dim=1)
        return share.clamp_min(0.0)

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
        try:
            with torch.inference_mode(False), torch.enable_grad():
                raw = torch.autograd.grad(scores.float().sum() * scale, inputs, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):  # torch's checkpointing does not support torch.autograd.grad
                raise
            raise checkpointing_error(self.model) from error
        head = self.head if any(gradient is None for gradient in raw[: len(parts)]) else None
        unread = set[str]()  # layers above the highest block that the head reads
        if head is not None and head.taps and len(head.blocks) == len(self.layers):
            unread = {layer.name for layer in self.layers[head.layers_below(head.taps[-1]) :]}
        for (name, _), gradient in zip(parts, raw, strict=False):
            if gradient is None and name not in unread:
                remedy = "input_gradient, sampling or occlusion" if pixels else "method='attention'"
                raise UnsupportedModelError(
                    f"The logits of {type(self.model).__name__} do not depend on the recorded attention of {name} "
                    f"(unused or copied), so its gradient is None. Use {remedy}."
                )
        gradients = iter(
            torch.zeros_like(source) if gradient is None else at_least_float32(gradient) / scale
            for source, gradient in zip(inputs, raw, strict=True)
        )
        attentions = [
            torch.cat([part.arranged(next(gradients)) for part in layer.parts], dim=1) for layer in self.layers
        ]
        features = {name: next(gradients) for name in self.features}
        to_pixels = next(gradients) if pixels else None
        return Backward(attentions, features, to_pixels, next(gradients, None))


def _reaches(start: Any, leaf: Tensor, cut: Sequence[Tensor]) -> bool:
    """Return True if a leaf is reached from a node of the autograd graph on a path around these tensors."""
    seen, waiting = {tensor.grad_fn for tensor in cut}, [start]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) is leaf:
            return True
        waiting.extend(following for following, _ in node.next_functions if following is not None)
    return False
