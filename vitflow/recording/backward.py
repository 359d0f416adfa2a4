"""Gradients with respect to the recorded tensors of a pass, whose graph may be cut after its blocks."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from vitflow.models.blocks import block_norms, block_of
from vitflow.models.calls import tensors_in
from vitflow.recording.head import BlockRun
from vitflow.recording.isolation import Hook, checkpointing_error

#: Beginning of the name of the input of a block; its output has the name of the block.
INPUT_OF = "input of "


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

    def zero_images(self, batch: int) -> list[int]:
        """Return the images whose gradient is zero at the pixels, or without these at all attention and features."""
        recorded = [*reversed(self.attentions), *self.features.values()] if self.pixels is None else [self.pixels]
        zero = torch.ones(batch, dtype=torch.bool)
        for each in recorded:
            if not zero.any():
                break
            zero &= ~each.reshape(batch, -1).any(dim=1).cpu()
        return zero.nonzero().flatten().tolist()


def differentiate(
    model: nn.Module,
    cuts: Sequence[BlockRun],
    roots: Sequence[Tensor],
    weights: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the total gradients of inputs, which continue below each cut of a pass; None if they do not exist."""
    count = len(inputs)
    totals: list[Tensor | None] = [None] * (count + len(cuts))
    for below in range(len(cuts), -1, -1):  # the number of lower cuts
        if below < len(cuts):
            total, source = totals[count + below], cuts[below].source
            if total is None or source is None:
                continue
            roots, weights = [source], [total]
        tensors = [*inputs, *(cut.leaf for cut in cuts[:below])]
        try:
            gradients = torch.autograd.grad(roots, tensors, weights, retain_graph=True, allow_unused=True)
        except RuntimeError as error:  # checkpointing does not support torch.autograd.grad, or hooks of one pass
            checkpointed = "use_reentrant" in str(error) or isinstance(error, CheckpointError)
            raise (checkpointing_error(model) if checkpointed else error) from None
        for index, gradient in enumerate(gradients):
            before = totals[index]
            totals[index] = gradient if before is None else before if gradient is None else before + gradient
    return totals[:count]


def stream_hooks(
    model: nn.Module, modules: Mapping[str, nn.Module], features: Collection[str], keep: Callable[..., None]
) -> Iterator[Hook]:
    """Yield hooks on the first block and on the blocks that contain features.

    `keep` is called with the name of an input or output, and what a hook gets.
    """
    blocks = modules.keys() & set(map(block_of, features))
    first = map(block_of, block_norms(model)[:1] if blocks else ())
    for path in sorted(blocks.union(first)):
        yield Hook(modules[path], partial(keep, path), before=False)
    for path in sorted(blocks):
        yield Hook(modules[path], partial(keep, INPUT_OF + path), before=True)


def tokens_of_images(values: Any, batch: int) -> Tensor | None:
    """Return the first tensor with an entry for each image; TNT folds tokens within patches into the batch."""
    every = [each for each in tensors_in(values) if each.ndim]
    tokens = next((each for each in every if len(each) == batch), None)
    if tokens is None:  # [tokens, batch, channels]
        tokens = next((each for each in every if each.ndim == 3 and each.shape[1] == batch), None)
    return tokens
