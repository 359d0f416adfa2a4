"""The readout: weights of the tokens that an output is computed from, `readout_i ∝ ‖∂f/∂y_i‖₂`.

It is measured for each image and output f, at the tokens y that the head reads: those after the final norm if the head
reads nothing else, otherwise those after the last block, or after each of several blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.head import HeadGraph, HeadInput, is_bypassed, is_nonzero

# Maps the return value of a model to the explained outputs, [batch, outputs].
Read = Callable[[Any], Tensor | None]

# Tokens with less than this fraction of the largest weight are not counted.
_COUNTED = 1e-3
# Lower limit of a divisor.
_TINY = torch.finfo(torch.float64).tiny
#: Loss scale for half precision, in which the smallest gradients underflow.
HALF_SCALE = 1024.0


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


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """Gradient norms at the tokens that the head reads.

    Attributes:
        norms: of each run of a block, [batch, tokens]; None if the tokens do not fit the layout of their layer.
        pooled: as in `Readouts`.
        refusal: reason why no product of layers explains the output, or an empty string.
    """

    norms: Sequence[Tensor | None]
    pooled: Tensor
    refusal: str = ""


def measure(scores: Tensor, graph: HeadGraph, tokens: Sequence[LayerTokens]) -> Measured:
    """Measure the tokens from which the score of each image is computed, given those of each run of a block.

    They are the tokens after the latest token-wise norm or container that every path from the score passes, otherwise
    the outputs of blocks themselves.
    """
    batch, image, top = len(scores), [] if graph.image is None else [graph.image], tokens[-1]
    scale = HALF_SCALE if scores.dtype == torch.float16 else 1.0
    sources = [*image, *(each.tokens for each in graph.blocks)]
    through = [each for each in graph.later if not is_bypassed(scores, [each.tokens], sources)]
    tensors = [*sources, *(each.tokens for each in through)]
    gradients = graph.differentiate(scores, torch.full_like(scores, scale), tensors)
    to_image, to_blocks = gradients[: len(image)], gradients[len(image) : len(sources)]
    unread = torch.zeros(batch, dtype=torch.bool, device=scores.device)
    read = torch.stack([unread if each is None else _largest(each, batch) != 0 for each in to_blocks])
    pools = any(each.kind == "pooling" for each in through)
    pooled = read[-1] if pools else unread
    zeros = [scores.new_zeros(batch, each.queries.num_tokens, dtype=torch.float64) for each in tokens]
    norms = [
        token_norms(gradient, each.queries, each.order) if gradient is not None and is_read else nothing
        for gradient, each, nothing, is_read in zip(to_blocks, tokens, zeros, read.any(dim=1).tolist(), strict=True)
    ]
    last = graph.blocks[-1].tokens
    for later, gradient in reversed(list(zip(through, gradients[len(sources) :], strict=True))):
        if later.kind == "container":  # tokens of another width may be internal to a head
            usable = norms[-1] is None or later.tokens.numel() == last.numel()
        else:
            usable = later.kind == "norm" and _is_token_wise(later, graph, top.queries)
        after = token_norms(gradient, top.queries, top.order) if usable and gradient is not None else None
        if after is not None:
            return Measured([*zeros[:-1], after], pooled)
    refusal = _refusal(graph, to_image, read)
    if refusal and (after := graph.gradient_at_residual(scores, torch.full_like(scores, scale))) is not None:
        joined = token_norms(after, top.queries, top.order)
        return Measured([*zeros[:-1], joined], pooled)
    return Measured(norms, pooled, refusal)


def _refusal(graph: HeadGraph, to_image: Sequence[Tensor | None], read: Tensor) -> str:
    """Return the reason why the layers below the head do not explain the output, or an empty string.

    `read` is True if the output of an image depends on a block directly, bool [blocks, batch].
    """
    lower = zip(graph.blocks[:-1], read[:-1].any(dim=1).tolist(), strict=True)
    again = any(is_read and block.path == graph.blocks[-1].path for block, is_read in lower)
    if again or graph.is_restarted():
        return "by several runs of its blocks"
    if any(map(is_nonzero, to_image)):
        return "also directly from the image, bypassing its blocks"
    if bool(read[:-1].any()) and not graph.is_chain():
        return "from several blocks, with skip connections around some of them"
    return ""


def _largest(gradient: Tensor, batch: int) -> Tensor:
    """Return the largest absolute entry of each image, [batch]."""
    axis = 1 if len(gradient) % batch and gradient.shape[1] == batch else 0  # [tokens, batch, channels]
    images = gradient.abs().movedim(axis, 0)
    return images.reshape(batch, -1).amax(dim=1) if len(images) % batch == 0 else images.amax().expand(batch)


def _is_token_wise(norm: HeadInput, graph: HeadGraph, layout: TokenLayout) -> bool:
    """Return True if a token of a norm depends on at most one token of the last block or container before it.

    One token of each image is tested, in the same backward pass.
    """
    batch = len(norm.tokens) if graph.image is None else len(graph.image)
    channels, last = channel_axis(norm.tokens.shape, layout), graph.blocks[-1].tokens
    images = 1 if norm.tokens.shape[0] != batch == norm.tokens.shape[1] else 0  # [tokens, batch, channels]
    token = tuple(
        slice(None) if axis in (channels, images) else side // 3 for axis, side in enumerate(norm.tokens.shape)
    )
    chosen = torch.zeros_like(norm.tokens)
    chosen[token] = torch.randn(chosen[token].shape, generator=torch.Generator().manual_seed(2)).to(chosen)
    inside = [each.tokens for each in graph.later[: graph.later.index(norm)] if each.kind == "container"]
    before = [each for each in reversed(inside) if each.numel() == last.numel()]
    reached = graph.differentiate(norm.tokens, chosen, [*before, last])
    nearest = next((gradient for gradient in reached if gradient is not None and is_nonzero(gradient)), None)
    norms = None if nearest is None else token_norms(nearest, layout)
    return nearest is None or (norms is not None and int((norms > 0).sum(dim=1).max()) <= 1)


def token_norms(gradient: Tensor, layout: TokenLayout, order: Tensor | None = None) -> Tensor | None:
    """Return L2 norms of a gradient over channels, [batch, tokens]; None if its tokens do not fit the layout.

    The gradient may have batch and tokens in any order, or a finer grid: then it is the norm over the cells of a patch.
    `order` is the raster index of each token, if the model does not use raster order.
    """
    channels = channel_axis(gradient.shape, layout)
    if channels is None:
        return None
    sums: Tensor = torch.linalg.vector_norm(gradient, dim=channels, dtype=torch.float64).square()  # [batch, …]
    if sums.ndim == 2 and sums.shape[1] not in (layout.num_patches, layout.num_tokens):
        sums = sums.T  # [tokens, batch, channels]
    if sums.ndim == 3:
        cells = sums.shape[1] // layout.rows, sums.shape[2] // layout.cols
        sums = sums.reshape(-1, layout.rows, cells[0], layout.cols, cells[1]).sum(dim=(2, 4)).flatten(1)
    if sums.shape[1] != layout.num_tokens:
        sums = torch.nn.functional.pad(sums, (layout.num_prefix_tokens, layout.num_suffix_tokens))
    if order is not None:
        sums = torch.zeros_like(sums).index_copy_(1, order.to(sums.device), sums)
    return sums.sqrt()


def channel_axis(shape: Sequence[int], layout: TokenLayout) -> int | None:
    """Return the channel axis of a tensor with the tokens of a layout, or None."""
    counts = (layout.num_patches, layout.num_tokens)
    if len(shape) == 3:
        return 2 if shape[1] in counts or shape[0] in counts else None
    for axis, (rows, cols) in ((3, shape[1:3]), (1, shape[2:])):
        if rows and cols and rows % layout.rows == 0 and cols % layout.cols == 0:
            return axis
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
