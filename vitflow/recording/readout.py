"""The readout: weights of the tokens that an output is computed from, `readout_i ∝ ‖∂f/∂y_i‖₂`.

It is measured for each image and output f, at the tokens y that the head reads: those after the final norm if the head
reads nothing else, otherwise those after the last block, or after each of several blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from vitflow.errors import NoGradientError, UnsupportedModelError, VitflowError
from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.models.anatomy import ATTENTION_POOLING, declared_pooling, pooling_name
from vitflow.models.calls import logits_of
from vitflow.models.names import class_count
from vitflow.recording.experiment import Call
from vitflow.recording.head import HeadWatch, is_bypassed, is_read_by_token, layer_counts, nodes_of, token_norms
from vitflow.recording.layers import AttentionLayer

# Maps the return value of a model to the explained outputs, [batch, outputs].
Read = Callable[[Any], Tensor | None]

# Tokens with less than this fraction of the largest weight are not counted.
_COUNTED = 1e-3
# Lower limit of a divisor.
_TINY = torch.finfo(torch.float64).tiny
#: Loss scale for half precision, in which the smallest gradients underflow.
HALF_SCALE = 1024.0
_NO_GRADIENT = (
    "it is zero or does not exist: a part of the model runs without gradients (torch.no_grad(), detach()) or has "
    "integer weights, or the output is constant, saturated, behind an inactive ReLU, or its head is still all zeros"
)
_NO_TOKENS = "there is none at the last block, whose output is no tensor [batch, tokens, channels] and no grid"
_REMEDY = "Pass readout= with weights for the tokens of the last block, or use sampling or occlusion."
# Nodes of the autograd graph that may add a residual.
_SUMS = ("AddBackward", "SubBackward", "LerpBackward", "AddcmulBackward", "SumBackward")
#: Relative difference of the outputs of two equal passes, by bytes per element.
SAME_OUTPUT = {8: 1e-6, 4: 1e-3, 2: 5e-2}
# Limit of the sum of absolute differences between a readout and a known pooling, by bytes per element.
_SAME_POOLING = {8: 1e-9, 4: 1e-5, 2: 2e-3}


@dataclass(frozen=True, slots=True, eq=False)
class ReadBlock:
    """A block whose tokens the head reads: the number of attention layers up to it, and its readout.

    The readout of its tokens is [batch, tokens], with rows that sum to 1, or 0 for images that do not read it; `share`
    is the share of this block in the readouts of all blocks, [batch].
    """

    layers: int
    readout: Tensor
    share: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Readouts:
    """The readouts of one output of each image at the blocks that the head reads, lowest first.

    Attributes:
        names: name of the known pooling that the readout of each image equals, or an empty string.
        measured: False for each image whose readout is declared by the model, as there is no gradient.
        pooled: True for each image whose output is computed by an attention-pooling head, bool [batch].
    """

    blocks: Sequence[ReadBlock]
    names: Sequence[str]
    measured: Sequence[bool]
    pooled: Tensor

    @classmethod
    def given(cls, readout: Tensor, layers: int) -> Self:
        """Return the readouts of a readout [batch, tokens] that was given for the top one of these layers."""
        batch, every = len(readout), torch.ones_like(readout[:, 0])
        return cls([ReadBlock(layers, readout, every)], ["given as argument"] * batch, [True] * batch, every == 0)


class Head:
    """The head of a recorded pass: from which tokens an output of each image is computed.

    Args:
        call: the recorded model call, repeatable on other pixels.
        watch: the watch of the pass, with the tokens that the head may read.
        layers, blocks: attention layers of the pass, and the path of the block of each.
        outputs: the explained outputs, [batch, outputs].
        read: maps the return value of the model to these.
        pooled: attention of an attention-pooling head, if there is one.
    """

    def __init__(
        self,
        call: Call,
        watch: HeadWatch | None,
        layers: Sequence[AttentionLayer],
        blocks: Sequence[str],
        outputs: Any,
        read: Read,
        pooled: Tensor | None,
    ) -> None:
        self._call, self._watch, self._layers, self._blocks = call, watch, layers, blocks
        self._outputs, self._read, self._pooled = outputs, read, pooled
        self._name, self._top = type(call.model).__name__, layers[-1].tokens.queries
        self._repeated: tuple[Any, HeadWatch | None, str] | None = None
        self._readouts: dict[Any, Readouts] = {}

    def readouts_of(self, targets: Tensor | None) -> Readouts:
        """Return the tokens that one output of each image is computed from; see `Trace.readouts_of`."""
        key = None if targets is None else tuple(targets.tolist())
        if key not in self._readouts:
            self._readouts[key] = self._measure(targets)
        return self._readouts[key]

    def _measure(self, targets: Tensor | None) -> Readouts:
        """Measure readouts, and replace those of images without a gradient by the declared pooling."""
        example, batch, count = self._layers[-1].example, len(self._call.pixels), len(self._layers)
        norms, counts = [example.new_zeros(batch, self._top.num_tokens, dtype=torch.float64)], [count]
        pooled, rounding = torch.zeros(batch, dtype=torch.bool, device=example.device), 0.0
        outputs, cut, cause = self._cut()
        if cut is not None and outputs.requires_grad:
            runs = [min(each, count) for each in layer_counts(self._blocks, cut.runs)]
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    scores = self._scores(outputs, targets)
                    norms, pooled = self._norms(scores, cut, [self._layers[n - 1].tokens for n in runs])
                rounding, counts = _SAME_POOLING[outputs.dtype.itemsize], runs
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # from autograd, such as about checkpointing
                cause = f"{type(error).__name__}: {error}"
        sums = torch.stack([each.sum(dim=1) for each in norms]).sum(dim=0)
        missing, name = ~(torch.isfinite(sums) & (sums > 0)), ""
        if missing.any():
            name, weights = self._declared(cause, missing)
            norms = [torch.where(missing[:, None], 0.0, each) for each in norms]
            norms[-1][missing] = weights.to(norms[-1]).expand(batch, -1)[missing]
        measured = (~missing).tolist()
        blocks = read_blocks(norms, counts, torch.promote_types(example.dtype, torch.float32))
        if len(blocks) > 1:
            return Readouts(blocks, [""] * batch, measured, pooled)
        rows = (norms[-1] / norms[-1].sum(dim=1, keepdim=True)).cpu()
        names = [
            name if not known else ATTENTION_POOLING if pools else pooling_name(row, self._top, rounding)
            for row, known, pools in zip(rows, measured, pooled.tolist(), strict=True)
        ]
        return Readouts(blocks, names, measured, pooled)

    def _scores(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """Return one output of each image, [batch]; of an embedding e, the product with its direction."""
        classes = self._call.cached(class_count, lambda: class_count(self._call.model))
        if targets is None and self._read is logits_of and classes == 0:
            return (outputs * nn.functional.normalize(outputs.detach().float(), dim=1).to(outputs)).sum(dim=1)
        chosen = outputs.detach().argmax(dim=1) if targets is None else targets.to(outputs.device)
        return outputs.gather(1, chosen.view(-1, 1)).squeeze(1)

    def _cut(self) -> tuple[Any, HeadWatch | None, str]:
        """Return the outputs and the watch of a pass cut after the blocks: the recorded one, or a repetition.

        If there is none, the watch is None, and the cause is given.
        """
        outputs = self._outputs
        if not isinstance(outputs, Tensor) or outputs.ndim != 2:
            return None, None, "the output of the model is no tensor [batch, outputs]"
        if self._call.pixels.is_meta:
            return None, None, "the model is on the meta device"
        if self._watch is not None and self._watch.is_cut_after(self._blocks):
            return outputs, self._watch, "" if outputs.requires_grad else _NO_GRADIENT
        if self._repeated is None:
            self._repeated = self._repeat(outputs)
        return self._repeated

    def _repeat(self, before: Tensor) -> tuple[Any, HeadWatch | None, str]:
        """Repeat the pass with gradients in the head alone; see `_cut`."""
        call, watch = self._call, HeadWatch(self._blocks, cut=True)
        try:
            with call.experiment(watch.hooks(call.state.modules), gradients=True, autocast=True):
                outputs: Any = self._read(call(watch.begin(call.pixels), same_images=True))
        except (VitflowError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model may refuse gradients in any way
            return None, None, f"a pass with gradients of the head failed with {type(error).__name__}: {error}"
        if not is_same_output(before, outputs):
            raise UnsupportedModelError(
                f"{self._name} has another output if it runs again, so that its readout cannot be measured: it may be "
                "random, or in training mode. Call model.eval(), explain it with vitflow.Explainer, or pass readout=."
            )
        cut = watch if watch.is_cut_after(self._blocks) else None
        return outputs, cut, _NO_GRADIENT if not outputs.requires_grad else _NO_TOKENS if cut is None else ""

    def _declared(self, cause: str, missing: Tensor) -> tuple[str, Tensor]:
        """Return name and weights of the declared pooling; UnsupportedModelError without one.

        `cause` is why there are no gradients; if it is empty, those of some images are 0.
        """
        declared = declared_pooling(self._call.model, self._top, self._pooled)
        if declared is not None:
            return declared
        message = (
            f"The readout of {self._name} requires the gradient of the output with respect to its tokens: "
            f"{cause or _NO_GRADIENT}. {_REMEDY}"
        )
        if cause:
            raise UnsupportedModelError(message)
        raise NoGradientError(message, missing.nonzero().flatten().tolist())

    def _norms(self, scores: Tensor, cut: HeadWatch, tokens: Sequence[LayerTokens]) -> tuple[list[Tensor], Tensor]:
        """Return gradient norms at the tokens of each run of a block, and True for images with a pooling head.

        If every path from the score passes a token-wise norm above the last block, or a module around it, the tokens
        are those after it.
        """
        batch, image, top = len(scores), [] if cut.image is None else [cut.image], tokens[-1]
        weights = torch.full_like(scores, HALF_SCALE if scores.dtype == torch.float16 else 1.0)
        leaves = [run.leaf for run in cut.runs]
        sources = [*image, *leaves]
        above = [(kind, each) for kind, each in cut.above if not is_bypassed(scores, each, sources)]
        fits = partial(is_read_by_token, leaf=leaves[-1], layout=top.queries)
        norm = next((each for kind, each in reversed(above) if fits(kind, each)), None)
        inputs = [*sources, *([] if norm is None else [norm])]
        gradients = torch.autograd.grad(scores, inputs, weights, retain_graph=True, allow_unused=True)
        to_blocks: Sequence[Tensor | None] = gradients[len(image) : len(sources)]
        read = [each is not None and bool(each.any()) for each in gradients[: len(sources)]]
        last, refusal = None if norm is None else gradients[-1], ""
        if last is None and any(read[: len(image)]):
            refusal = "also directly from the image, bypassing its blocks"
        elif last is None and any(read[:-1]) and not cut.is_chain:
            refusal = "from several blocks, with skip connections around some of them"
        if refusal and (last := _gradient_at_sum(scores, weights, leaves[-1], sources)) is None:
            raise UnsupportedModelError(
                f"{self._name} computes its output {refusal}, so a map from its attention is incomplete. {_REMEDY}"
            )
        if last is not None:
            to_blocks = (*(None for _ in leaves[1:]), last)
        norms = []
        for gradient, each in zip(to_blocks, tokens, strict=True):
            here: Tensor | None = scores.new_zeros(batch, each.queries.num_tokens, dtype=torch.float64)
            if gradient is not None and gradient.any():
                here = token_norms(gradient, each.queries, each.order)
            if here is None:
                raise UnsupportedModelError(
                    f"The output is computed from tokens that do not fit the patch grid of their block. {_REMEDY}"
                )
            norms.append(here)
        pools = any(kind == "pooling" for kind, _ in above)
        return norms, (norms[-1].sum(dim=1) > 0) & pools


def is_same_output(before: Tensor, after: Tensor) -> bool:
    """Return True if the outputs of two passes are equal to rounding."""
    first, second = before.detach().double(), after.detach().double()
    limit = SAME_OUTPUT[before.dtype.itemsize] * first.abs().amax()
    return first.shape == second.shape and not bool(((first - second).abs() > limit).any())


def _gradient_at_sum(scores: Tensor, weights: Tensor, leaf: Tensor, sources: Sequence[Tensor]) -> Tensor | None:
    """Return the gradient at the sum of the last block's tokens and a residual outside of the block.

    It is the last sum of this shape that every path from the scores passes; None if there is none.
    """
    for node in nodes_of(scores, [get_gradient_edge(leaf).node]):
        if node.name().startswith(_SUMS) and not is_bypassed(scores, node, sources):
            [gradient] = torch.autograd.grad(scores, [GradientEdge(node, 0)], weights, retain_graph=True)
            if gradient.shape == leaf.shape:
                return gradient
    return None


def read_blocks(norms: Sequence[Tensor], layers: Sequence[int], kind: torch.dtype) -> list[ReadBlock]:
    """Return the blocks that are read for any image, by the gradient norms [batch, tokens] at their tokens."""
    sums = [each.sum(dim=1) for each in norms]
    every = torch.stack(sums).sum(dim=0).clamp(min=_TINY)
    return [
        ReadBlock(count, (each / total.clamp(min=_TINY).unsqueeze(1)).to(kind), (total / every).to(kind))
        for count, each, total in zip(layers, norms, sums, strict=True)
        if total.any() or each is norms[-1]
    ]


def describe_readouts(blocks: Sequence[ReadBlock], layouts: Sequence[TokenLayout], layers: int) -> list[str]:
    """Describe the readout of each image in words: that of its strongest block, and the shares of all blocks."""
    words, blocks = [], [replace(each, readout=each.readout.cpu(), share=each.share.cpu()) for each in blocks]
    for index in range(len(blocks[0].readout)):
        strongest, layout = max(zip(blocks, layouts, strict=True), key=lambda pair: float(pair[0].share[index]))
        text = f"{readout_words(strongest.readout[index], layout)}, from the gradient of the output"
        read = [block for block in blocks if block.share[index] > 0]
        if len(read) > 1 or strongest.layers < layers:
            shares = ", ".join(f"{block.layers} ({float(block.share[index]):.0%})" for block in read)
            text += f", after layers {shares}"
        words.append(text)
    return words


def readout_words(readout: Tensor, layout: TokenLayout) -> str:
    """Describe the tokens of a readout [tokens] in words.

    >>> readout_words(torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0]), TokenLayout(1, 2, 2))
    '1 prefix token and 1 patch'
    """
    counted = readout > _COUNTED * readout.max()
    first, last = layout.num_prefix_tokens, layout.num_prefix_tokens + layout.num_patches
    patches, prefix, suffix = counted[first:last].sum(), counted[:first].sum(), counted[last:].sum()
    words = [f"{int(prefix)} prefix token{'s' * bool(prefix > 1)}"] if prefix else []
    words += [f"{int(patches)} patch{'es' * bool(patches > 1)}"] if patches else []
    words += [f"{int(suffix)} trailing token{'s' * bool(suffix > 1)}"] if suffix else []
    return " and ".join(words)
