"""Trace: the recorded attention, token layout and readout of one forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitflow.errors import NoGradientError, OptionError, ShapeError, UnsupportedModelError, VitflowError
from vitflow.images.geometry import Extent
from vitflow.methods.cells import cell_grid
from vitflow.methods.gradients import ValueWeighting, at_least_float32
from vitflow.methods.refinement import Affinity
from vitflow.methods.tokens import LAYOUT, TokenLayout
from vitflow.models.anatomy import ATTENTION_POOLING
from vitflow.models.blocks import block_paths_of
from vitflow.models.calls import logits_of
from vitflow.recording.backward import Backward, differentiate
from vitflow.recording.certificate import Certificate, blocks_of, certify_features
from vitflow.recording.experiment import Call
from vitflow.recording.head import HeadWatch, is_bypassed
from vitflow.recording.layers import NOTHING_RECORDED, RecordedLayers, join_parts
from vitflow.recording.readout import HALF_SCALE, Head, Read, Readouts, describe_readouts, readout_words


@dataclass(slots=True, repr=False)
class Trace:
    """Recording of the last forward pass inside `record_attention`; filled while the model runs.

    Attributes:
        layers: the recorded attention layers.
        pixels: the model input, [batch, channels, height, width].
        logits: the explained outputs, [batch, classes].
        pooled: attention of an attention-pooling head, [batch, heads, queries, tokens], if there is one.
        model: the model, for methods that run it again.
        refusal: reason why rollout and flow do not apply to this model, or None.
        names: paths of the attention modules that ran, first layer first, without those of a decoder on top.
        read: maps the model's return value to the explained outputs.
        call: the recorded model call, repeatable on other pixels.
        certificate: whether the model keeps the contract; None if that was not measured.
        watch: the watch of the pass, with the tokens that the head may read in the autograd graph.
        features: outputs of the requested modules, by module path, [batch, tokens, channels], or
            [batch, channels, rows, cols] or [batch, rows, cols, channels].
        feature_layouts: token layout of each feature and True if its channels are last; None without a layout.
        passed: with gradients, outputs of the first block and of those that contain the features, by module path, and
            inputs of the latter, as "input of …"; None for several runs.
        output: what the model returned.
        affinities: patch affinities by kind, patch grid and first layer, filled on request.
    """

    layers: RecordedLayers = field(default_factory=RecordedLayers)
    pixels: Tensor | None = None
    logits: Tensor | None = None
    pooled: Tensor | None = None
    model: Any = None
    refusal: str | None = None
    names: list[str] = field(default_factory=list)
    read: Read = logits_of
    call: Call | None = None
    watch: HeadWatch = field(default_factory=HeadWatch)
    certificate: Certificate | None = None
    known_layout: TokenLayout | None = None
    known_top: TokenLayout | None = None
    given_readout: Tensor | None = None
    features: dict[str, Tensor] = field(default_factory=dict)
    feature_layouts: dict[str, tuple[TokenLayout, bool] | None] = field(default_factory=dict)
    passed: dict[str, Tensor | None] = field(default_factory=dict)
    output: Any = None
    affinities: dict[tuple[str, tuple[int, int], int], Affinity] = field(default_factory=dict)
    _backward: dict[tuple[int, ...], Backward] = field(default_factory=dict)
    _head: Head | None = None

    def __repr__(self) -> str:
        return f"Trace({type(self.model).__name__}, {len(self.layers)} attention layers)"

    def begin(self, pixels: Tensor | None = None, read: Read = logits_of, call: Call | None = None) -> None:
        """Reset the trace for a new forward pass on this model input."""
        Trace.__init__(self, model=self.model, pixels=pixels, read=read, call=call)

    @property
    def attentions(self) -> tuple[Tensor, ...]:
        """Attention of each layer, first layer first.

        [batch, heads, tokens, tokens], or [batch, tokens, tokens] if recorded with a head fusion.
        """
        return self.layers.attentions

    def heads(self, *, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """Return all heads of each layer, [batch, heads, tokens, tokens], value weighted if requested."""
        return self.layers.heads(value_weighted)

    def fused(self, head_fusion: str = "mean", *, value_weighted: ValueWeighting = False) -> list[Tensor]:
        """Return the fused attention of each layer, [batch, tokens, tokens], first layer first."""
        return self.layers.fused(head_fusion, value_weighted=value_weighted)

    @property
    def layout(self) -> TokenLayout:
        """Prefix tokens and patch grid of the recorded pass; of the finest stage if stages differ."""
        if self.refusal is not None:
            raise UnsupportedModelError(self.refusal)
        if self.known_layout is None and self.logits is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} does not say how its tokens are arranged: pass {LAYOUT}."
            )
        if self.known_layout is None:
            raise VitflowError(NOTHING_RECORDED)
        return self.known_layout

    @property
    def top(self) -> TokenLayout:
        """Prefix tokens and patch grid of the top layer, as in the readout."""
        return self.layout if self.known_top is None else self.known_top

    @property
    def blocks(self) -> list[str]:
        """Path of the block of each attention layer that ran, first layer first."""
        return block_paths_of(self.model, self.names) if self.call is None else blocks_of(self.call, self.names)

    @property
    def readout(self) -> Tensor:
        """Readout of the most probable class, [batch, tokens]; see `readout_of`."""
        return self.readout_of(None)

    @property
    def readouts(self) -> Readouts:
        """Readouts of the most probable class at each block that the head reads; see `readouts_of`."""
        return self.readouts_of(None)

    @property
    def pooling(self) -> str:
        """Source of the readout of the most probable class: "class token", …, or "gradient of the output"."""
        names = set(self.readouts_of(None).names)
        return names.pop() if len(names) == 1 and "" not in names else "gradient of the output"

    def readout_of(self, targets: Tensor | None) -> Tensor:
        """Return the weights of the top layer's tokens in each target output, [batch, tokens]; see `readouts_of`.

        Raises UnsupportedModelError, too, if the head reads the tokens of several blocks.
        """
        blocks = self.readouts_of(targets).blocks
        if len(blocks) > 1 or blocks[0].layers < len(self.layers):
            read = ", ".join(str(block.layers) for block in blocks if block.share.any())
            raise UnsupportedModelError(
                f"{type(self.model).__name__} computes its output from the tokens after layers {read}. This requires a "
                "readout of the last layer: use rollout, gae or gradient_rollout, or pass readout=."
            )
        return blocks[0].readout

    def readouts_of(self, targets: Tensor | None) -> Readouts:
        """Return the tokens that one output of each image is computed from, at each block that the head reads.

        The readout at a block is `‖∂f/∂y_i‖` for its tokens y, along paths that pass no higher block; of images for
        which this gradient is zero or cannot exist, the pooling that the model declares.

        Args:
            targets: index of the output f of each image, [batch]; by default the largest, or ½‖e‖² of an embedding e.

        Raises:
            NoGradientError: the gradients of some images are 0, and no pooling is declared.
            UnsupportedModelError: the head reads other values than the outputs of the blocks, there is no gradient and
                no declared pooling, or a repetition of the pass has another output.
        """
        if self.refusal is not None:
            raise UnsupportedModelError(self.refusal)
        if self.known_top is None:
            raise VitflowError(NOTHING_RECORDED)
        if self.given_readout is not None:
            return Readouts.given(self.given_readout, len(self.layers))
        return self.head.readouts_of(targets)

    def target_changes_readout(self, targets: Sequence[Tensor | None]) -> list[bool]:
        """Return for each image True if readouts depend on the target: not all are the same known pooling."""
        by_target = [self.readouts_of(target).names for target in targets]
        named = ((set(names), names[0]) for names in zip(*by_target, strict=True))
        return [len(names) > 1 or first in ("", ATTENTION_POOLING) for names, first in named]

    def readout_words(self, targets: Tensor | None) -> list[str]:
        """Describe the readout of each image, for captions."""
        if self.given_readout is not None:
            return [f"{readout_words(row, self.top)}, given as argument" for row in self.given_readout.cpu()]
        readouts = self.readouts_of(targets)
        layouts = [self.layers[block.layers - 1].tokens.queries for block in readouts.blocks]
        words = describe_readouts(readouts.blocks, layouts, len(self.layers))
        return [
            f"{name}, declared, not verified" if not measured else name or each
            for name, each, measured in zip(readouts.names, words, readouts.measured, strict=True)
        ]

    @property
    def head(self) -> Head:
        """The head of the model in this pass."""
        assert self.call is not None
        self._head = self._head or Head(
            self.call, self.watch, self.layers, self.blocks, self.logits, self.read, self.pooled
        )
        return self._head

    @property
    def staged(self) -> bool:
        """True if layers attend within windows, or if stages have different tokens."""
        layout = self.layout
        return any(not layer.tokens.dense or layer.tokens.queries != layout for layer in self.layers)

    @property
    def is_certified(self) -> bool:
        """True if rollout applies, and the contract of the model was checked."""
        return self.refusal is None and self.certificate is not None and not self.certificate.error

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
        layout = self.known_layout
        patches = None if layout is None else (layout.rows, layout.cols)
        return cell_grid(self.pixels.shape[-2], self.pixels.shape[-1], patch_size, patches)

    def extent_of(self, grid: tuple[int, int]) -> Extent | None:
        """Return the measured pixels of a grid of (rows, columns) of tokens; None if it divides the input evenly."""
        located = [layer.located for layer in self.layers if layer.located is not None]
        layouts = [self.known_layout, *(layout for each in located for layout in (each.queries, each.keys))]
        layouts += [each[0] for each in self.feature_layouts.values() if each is not None]
        fitting = (each.extent for each in layouts if each is not None and (each.rows, each.cols) == grid)
        extent = next(filter(None, fitting), None)
        if extent is None or self.pixels is None:
            return None
        sides = zip(extent, grid, self.pixels.shape[-2:], strict=True)
        return None if all(span.is_even(count, length) for span, count, length in sides) else extent

    def check_places(self, path: str) -> None:
        """Raise UnsupportedModelError if the tokens of a module's output are not at their places."""
        if self.call is None:
            return
        certificate = self.certificate or certify_features(self.call, self.known_layout)
        reason = None if certificate is None else certificate.refusal_of_features(self.model, path)
        if reason is not None:
            raise UnsupportedModelError(reason)

    def forget_gradients(self) -> None:
        """Free the gradients that `backward` caches."""
        self._backward.clear()

    def backward(self, targets: Tensor, *, pixels: bool = True) -> Backward:
        """Differentiate the target logit of each image with respect to all recorded tensors, in one backward pass.

        Parameters' `.grad` does not change. Gradients are cached by targets.

        Args:
            targets: class index of each image, [batch].
            pixels: also differentiate with respect to the pixels, below the attention of the first layer.

        Raises:
            OptionError: the pass was recorded without gradients.
            ShapeError: the logits are not [batch, classes].
            NoGradientError: the gradient of an image is zero everywhere.
            UnsupportedModelError: the gradient does not reach the attention.
        """
        if self.logits is None or self.pixels is None:
            raise VitflowError(NOTHING_RECORDED)
        if self.logits.ndim != 2 or len(targets) != len(self.logits):
            raise ShapeError(
                f"Expected logits [batch, classes] and one target per image, got logits {tuple(self.logits.shape)} "
                f"and {len(targets)} targets."
            )
        key = tuple(int(target) for target in targets)
        known = self._backward.get(key)
        if known is None or (pixels and known.pixels is None):
            known = self.gradients_of(self._scores(targets), pixels=pixels)
            if (zero := known.zero_images(len(targets))) and not pixels:
                return self.backward(targets)  # the output may be computed without the attention
            if zero:
                raise NoGradientError(
                    "The gradient of the output with respect to the image is zero everywhere: a part of the model "
                    "runs under torch.no_grad() or detach(), or the output is constant, saturated, or behind a ReLU "
                    "that is off. Explain another output, or use sampling or occlusion, which need no gradient.",
                    zero,
                )
            self._backward[key] = known
        return known

    def _scores(self, targets: Tensor) -> Tensor:
        """Return the target logit of each image, [batch, 1]; images are independent, so that their sum is enough."""
        assert self.logits is not None
        with torch.inference_mode(False), torch.enable_grad():
            return self.logits.gather(1, targets.to(self.logits.device).view(-1, 1))

    def bypasses(self, name: str, targets: Tensor) -> bool:
        """Return True if targets may also be computed from the pixels without this entry of `passed`."""
        tokens = self.passed.get(name)
        assert self.pixels is not None
        return tokens is None or is_bypassed(self._scores(targets), tokens, [self.pixels], self.watch.runs)

    def gradients_of(self, scores: Tensor, *, pixels: bool = True) -> Backward:
        """Differentiate scores with respect to all recorded tensors; see `backward`.

        Args:
            scores: any tensor computed from `logits`, such as one word's logit of each text; its sum is differentiated.
            pixels: also with respect to the pixels of images.

        Raises:
            OptionError: the pass was recorded without gradients.
        """
        if not scores.requires_grad and (self.pixels is None or not self.pixels.requires_grad):
            raise OptionError("This pass was recorded without gradients: record with gradients=True.")
        parts = [(layer.name, part.tensor) for layer in self.layers for part in layer.parts]
        named = [*parts, *self.features.items()]
        frozen = next((name for name, each in [*named, ("its head", scores)] if not each.requires_grad), None)
        if frozen is not None:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} runs {frozen} without gradients, under torch.no_grad() or with detach(), "
                "or in integers. Set requires_grad_(False) of its weights instead, or use rollout, sampling or "
                "occlusion."
            )
        further = [self.pixels] if self.pixels is not None and (pixels or not named) else []
        to_pixels = bool(further)
        if self.pooled is not None and self.pooled.requires_grad:
            further.append(self.pooled)
        # Scaled, because the smallest gradients underflow in half precision.
        scale = HALF_SCALE if scores.dtype == torch.float16 else 1.0
        inputs = [*(each for _, each in named), *further]
        raw = differentiate(self.model, self.watch.runs, [scores], [torch.full_like(scores, scale)], inputs)
        reached = [number for number, gradient in enumerate(raw[: len(parts)]) if gradient is not None]
        for (name, _), gradient in zip(parts[: max(reached, default=len(parts))], raw, strict=False):
            if gradient is None:  # layers above the last one with a gradient are not read by the head
                remedy = "method='attention'" if self.pixels is None else "input_gradient, sampling or occlusion"
                raise UnsupportedModelError(
                    f"The logits of {type(self.model).__name__} do not depend on the recorded attention of {name} "
                    f"(unused or copied), so its gradient is None. Use {remedy}."
                )
        whole = [
            torch.zeros_like(source) if gradient is None else at_least_float32(gradient)
            for source, gradient in zip(inputs, raw, strict=True)
        ]
        gradients = iter(whole if scale == 1.0 else [each / scale for each in whole])
        attentions = [join_parts([part.arranged(next(gradients)) for part in layer.parts]) for layer in self.layers]
        features = {name: next(gradients) for name in self.features}
        return Backward(attentions, features, next(gradients) if to_pixels else None, next(gradients, None))
