"""Gradients with respect to the recorded tensors of a pass, whose graph may be cut after its blocks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from vitflow.recording.head import BlockRun
from vitflow.recording.isolation import checkpointing_error


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
