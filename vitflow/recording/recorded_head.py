"""The head of a recorded pass: from which tokens an output of each image is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import NoGradientError, UnsupportedModelError, VitflowError
from vitflow.methods.tokens import LAYOUT, TokenLayout
from vitflow.models.anatomy import ATTENTION_POOLING, declared_pooling, pooling_name
from vitflow.models.blocks import block_paths_of
from vitflow.models.calls import logits_of
from vitflow.models.names import class_count
from vitflow.recording.certificate import Certificate, blocks_of
from vitflow.recording.experiment import Call
from vitflow.recording.head import HeadGraph, HeadWatch, layer_counts
from vitflow.recording.layers import NOTHING_RECORDED, RecordedLayers
from vitflow.recording.readout import (
    Measured,
    Read,
    ReadBlock,
    Readouts,
    describe_readouts,
    measure,
    read_blocks,
    readout_words,
)

_ZERO = (
    "it is zero: a part of the model runs under torch.no_grad() or detach(), or the output is constant, saturated, "
    "behind an inactive ReLU, or from integer weights"
)
_NO_GRADIENT = "there is none: the model runs without gradients (torch.no_grad(), detach()), or has integer weights"
_REMEDY = "Pass readout= with weights for the tokens of the last block, or use sampling or occlusion."
# Relative difference of the outputs of two equal passes, by bytes per element.
_SAME_OUTPUT = {8: 1e-6, 4: 1e-3, 2: 5e-2}
# Limit of the sum of absolute differences between a readout and a known pooling, by bytes per element.
_SAME_POOLING = {8: 1e-9, 4: 1e-5, 2: 2e-3}


@dataclass(slots=True)
class RecordedHead(RecordedLayers):
    """The layers of a forward pass, and how its outputs are computed from their tokens.

    Attributes:
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
    """

    pixels: Tensor | None = None
    logits: Tensor | None = None
    pooled: Tensor | None = None
    model: Any = None
    refusal: str | None = None
    names: list[str] = field(default_factory=list)
    read: Read = logits_of
    call: Call | None = None
    watch: HeadWatch | None = None
    certificate: Certificate | None = None
    known_layout: TokenLayout | None = None
    known_top: TokenLayout | None = None
    given_readout: Tensor | None = None
    _readouts: dict[Any, Readouts] = field(default_factory=dict)
    _repeated: tuple[Any, HeadGraph | None, str] | None = None

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
    def head_graph(self) -> HeadGraph | None:
        """Graph of the head in the recorded pass, if it shows the blocks."""
        return None if self.watch is None else self.watch.graph(self.blocks)

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
        """Return the readout: weights of the top layer's tokens in each target output, [batch, tokens].

        Args:
            targets: as for `readouts_of`.

        Raises:
            UnsupportedModelError: as for `readouts_of`; or the head reads the tokens of several blocks.
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
        if self.known_top is None or self.pixels is None:
            raise VitflowError(NOTHING_RECORDED)
        key = None if targets is None else tuple(targets.tolist())
        if key not in self._readouts:
            self._readouts[key] = self._measure(targets)
        return self._readouts[key]

    def target_changes_readout(self, targets: Sequence[Tensor | None]) -> list[bool]:
        """Return for each image True if readouts depend on the target: not all are the same known pooling."""
        by_target = [self.readouts_of(target).names for target in targets]
        named = ((set(names), names[0]) for names in zip(*by_target, strict=True))
        return [len(names) > 1 or first in ("", ATTENTION_POOLING) for names, first in named]

    def _measure(self, targets: Tensor | None) -> Readouts:
        """Measure readouts, and replace those of images without a gradient by the declared pooling."""
        assert self.known_top is not None and self.pixels is not None
        example, batch, top = self.layers[-1].example, len(self.pixels), self.known_top
        kind, device = torch.promote_types(example.dtype, torch.float32), example.device
        pooled = torch.zeros(batch, dtype=torch.bool, device=device)
        every = torch.ones(batch, dtype=kind, device=device)
        if self.given_readout is not None:
            block = ReadBlock(len(self.layers), self.given_readout.to(kind), every)
            return Readouts([block], ["given as argument"] * batch, [True] * batch, pooled)
        outputs, graph, cause = self._graph()
        norms, rounding = [example.new_zeros(batch, top.num_tokens, dtype=torch.float64)], 0.0
        counts = [len(self.layers)]
        if graph is not None and outputs.requires_grad:
            counted = layer_counts(self.blocks, graph.blocks)
            runs = [min(max(count, 1), len(self.layers)) for count in counted]
            try:
                result = measure(self._scores(outputs, targets), graph, [self.layers[n - 1].tokens for n in runs])
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # from autograd, such as about checkpointing
                cause = f"{type(error).__name__}: {error}"
            else:
                norms, pooled, rounding = self._checked(result), result.pooled, _SAME_POOLING[outputs.dtype.itemsize]
                counts = runs
        sums = torch.stack([each.sum(dim=1) for each in norms]).sum(dim=0)
        measured = (torch.isfinite(sums) & (sums > 0)).tolist()
        name = ""
        if not all(measured):
            missing = ~torch.tensor(measured, device=device)
            name, weights = self._declared(cause, missing)
            norms = [torch.where(missing[:, None], 0.0, each) for each in norms]
            norms[-1][missing] = weights.to(norms[-1]).expand(batch, -1)[missing]
        blocks = read_blocks(norms, counts, kind)
        if len(blocks) > 1:
            return Readouts(blocks, [""] * batch, measured, pooled)
        rows = (norms[-1] / norms[-1].sum(dim=1, keepdim=True)).cpu()
        names = [
            name if not known else ATTENTION_POOLING if pools else pooling_name(row, top, rounding)
            for row, known, pools in zip(rows, measured, pooled.tolist(), strict=True)
        ]
        return Readouts(blocks, names, measured, pooled)

    def _checked(self, result: Measured) -> list[Tensor]:
        if result.refusal:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} computes its output {result.refusal}, so a map from its attention is "
                f"incomplete. {_REMEDY}"
            )
        norms = [each for each in result.norms if each is not None]
        if len(norms) < len(result.norms):
            raise UnsupportedModelError(
                f"The output is computed from tokens that do not fit the patch grid of their block. {_REMEDY}"
            )
        return norms

    def _scores(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return one output of each image, [batch]; of an embedding e, the product with its direction."""
        with torch.inference_mode(False), torch.enable_grad():
            assert self.call is not None
            classes = self.call.cached(class_count, lambda: class_count(self.model))
            if targets is None and self.read is logits_of and classes == 0:
                return (outputs * nn.functional.normalize(outputs.detach().float(), dim=1).to(outputs)).sum(dim=1)
            chosen = outputs.detach().argmax(dim=1) if targets is None else targets.to(outputs.device)
            return outputs.gather(1, chosen.view(-1, 1)).squeeze(1)

    def _graph(self) -> tuple[Any, HeadGraph | None, str]:
        """Return the outputs and the graph of the head: those of the pass, or of a repetition; or the cause of none."""
        logits, call = self.logits, self.call
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            return None, None, "the output of the model is no tensor [batch, outputs]"
        if call is None or call.pixels.is_meta:
            return None, None, "the model is on the meta device"
        if (graph := self.head_graph) is not None:
            return logits, graph, "" if logits.requires_grad else _NO_GRADIENT
        if self._repeated is None:
            self._repeated = self._repeat(call, logits)
        return self._repeated

    def _repeat(self, call: Call, logits: Tensor) -> tuple[Any, HeadGraph | None, str]:
        """Repeat the pass with gradients in the head alone; see `_graph`."""
        watch = HeadWatch(call.model, self.blocks, cut=True)
        try:
            with call.experiment(watch.hooks(), gradients=True, autocast=True):
                outputs: Any = self.read(call(watch.begin(call.pixels), same_images=True))
        except (VitflowError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model may refuse gradients in any way
            return None, None, f"a pass with gradients of the head failed with {type(error).__name__}: {error}"
        graph = watch.graph(self.blocks)
        before, after = logits.detach().double(), outputs.detach().double()
        limit = _SAME_OUTPUT[logits.dtype.itemsize] * before.abs().amax()
        if before.shape != after.shape or bool(((before - after).abs() > limit).any()):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has another output if it runs again, so that its readout cannot be "
                "measured: it may be random, or in training mode. Record it without torch.no_grad(), or pass readout=."
            )
        return outputs, graph, "" if graph is not None and outputs.requires_grad else _NO_GRADIENT

    def _declared(self, cause: str, missing: Tensor) -> tuple[str, Tensor]:
        """Return name and weights of the declared pooling; UnsupportedModelError without one.

        `cause` is why there are no gradients; if it is empty, those of some images are 0.
        """
        logits, zero = self.logits, _ZERO
        if isinstance(logits, Tensor) and not logits.is_meta and logits.numel() and not logits.any():
            zero = "all outputs are 0: is the head still all zeros?"
        assert self.known_top is not None
        declared = declared_pooling(self.model, self.known_top, self.pooled)
        if declared is None:
            message = (
                f"The readout of {type(self.model).__name__} requires the gradient of the output with respect to its "
                f"tokens: {cause or zero}. {_REMEDY}"
            )
            if cause:
                raise UnsupportedModelError(message)
            raise NoGradientError(message, missing.nonzero().flatten().tolist())
        return declared.name, declared.weights

    def readout_words(self, targets: Tensor | None) -> list[str]:
        """Describe the readout of each image, for captions."""
        if self.given_readout is not None:
            return [f"{readout_words(row, self.top)}, given as argument" for row in self.given_readout.cpu()]
        readouts = self.readouts_of(targets)
        layouts = [self.layers[block.layers - 1].tokens.queries for block in readouts.blocks]
        known = all(readouts.names)
        described = readouts.names if known else describe_readouts(readouts.blocks, layouts, len(self.layers))
        return [
            f"{name}, declared, not verified" if not measured else name or words
            for name, words, measured in zip(readouts.names, described, readouts.measured, strict=True)
        ]
