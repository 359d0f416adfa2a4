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
from vitflow.recording.block_watch import HeadGraph, HeadInput, is_nonzero

# Maps the return value of a model to the explained outputs, [batch, outputs].
Read = Callable[[Any], Tensor | None]

# Tokens with less than this fraction of the largest weight are not counted.
_COUNTED = 1e-3
# Lower limit of a divisor.
_TINY = torch.finfo(torch.float64).tiny
# Relative difference of two gradients by rounding, by bytes per element.
_ROUNDING = {8: 1e-9, 4: 1e-5, 2: 2e-2}
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

    If the head reads only the last block, its tokens are those after the latest norm or container that all of an
    image's gradient passes.
    """
    batch, image = len(scores), [] if graph.image is None else [graph.image]
    scale = HALF_SCALE if scores.dtype == torch.float16 else 1.0
    tensors = [*image, *(each.tokens for each in (*graph.blocks, *graph.later))]
    gradients = graph.differentiate(scores, torch.full_like(scores, scale), tensors)
    split = len(image) + len(graph.blocks)
    to_image, to_blocks, to_later = gradients[: len(image)], gradients[len(image) : split], gradients[split:]
    unread = torch.zeros(batch, dtype=torch.bool, device=scores.device)
    read = torch.stack([unread if each is None else _largest(each, batch) != 0 for each in to_blocks])
    zeros = [scores.new_zeros(batch, each.queries.num_tokens, dtype=torch.float64) for each in tokens]
    norms = [
        token_norms(gradient, each.queries, each.order) if gradient is not None and is_read else nothing
        for gradient, each, nothing, is_read in zip(to_blocks, tokens, zeros, read.any(dim=1).tolist(), strict=True)
    ]
    waiting, pooled, top = read.any(dim=0), torch.zeros_like(read[0]), tokens[-1]
    fits = norms[-1] is not None
    for later, gradient in reversed(list(zip(graph.later, to_later, strict=True))):
        if gradient is None or not (waiting.any() or later.kind == "pooling"):
            continue
        if later.kind == "container" and fits and later.tokens.numel() != graph.blocks[-1].tokens.numel():
            continue  # tokens of another width may be internal to a head
        passes = read[-1].clone()
        if is_bypassed(scores, [later.tokens], tensors[:split]):
            passes &= _passes(later, gradient, graph, gradients[:split], batch)
        if later.kind == "pooling":
            pooled |= passes
            continue
        at_later, passes = token_norms(gradient, top.queries, top.order), waiting & passes
        if at_later is None or not passes.any() or (later.kind == "norm" and not _is_token_wise(later, graph, tokens)):
            continue
        every = passes.equal(waiting)  # then the tokens of blocks need not fit their layouts
        norms = [nothing if every and each is None else each for each, nothing in zip(norms, zeros, strict=True)]
        norms = [
            each if each is None or each is nothing else each.masked_fill(passes[:, None], 0.0)
            for each, nothing in zip(norms, zeros, strict=True)
        ]
        norms[-1] = None if norms[-1] is None else torch.where(passes[:, None], at_later, norms[-1])
        waiting &= ~passes
    return Measured(norms, pooled, _refusal(graph, to_image, read, waiting))


def _refusal(graph: HeadGraph, to_image: Sequence[Tensor | None], read: Tensor, direct: Tensor) -> str:
    """Return the reason why the layers below the head do not explain the output, or an empty string.

    `read` is True if the output of an image depends on a block directly, bool [blocks, batch], and `direct` for each
    image of which the head reads the outputs of blocks themselves, bool [batch].
    """
    lower = zip(graph.blocks[:-1], read[:-1].any(dim=1).tolist(), strict=True)
    again = any(is_read and block.path == graph.blocks[-1].path for block, is_read in lower)
    if again or graph.is_restarted():
        return "by several runs of its blocks"
    if any(bool(((_largest(each, len(direct)) != 0) & direct).any()) for each in to_image if each is not None):
        return "also directly from the image, bypassing its blocks"
    if bool((read[:-1] & direct).any()) and not graph.is_chain():
        return "from several blocks, with skip connections around some of them"
    return ""


def is_bypassed(
    start: Tensor, through: Sequence[Tensor], sources: Sequence[Tensor], cuts: Sequence[HeadInput] = ()
) -> bool:
    """Return True if a path of the graph from a tensor to a source may bypass the tensors between them.

    Paths continue from the leaf after a block of `cuts` to what the block returned.
    """
    if not all(source.is_leaf for source in sources):
        return True
    leaves, ends = set(map(id, sources)), {(tensor.grad_fn, tensor.output_nr) for tensor in through}
    returned = {id(cut.tokens): cut.source for cut in cuts if cut.source is not None}
    seen, waiting = set[Any](), [(start.grad_fn, start.output_nr)]
    while waiting:
        node, output = waiting.pop()
        if node is None or node in seen or (node, output) in ends:
            continue
        variable = id(getattr(node, "variable", None))
        if variable in leaves:
            return True
        seen.add(node)
        waiting += node.next_functions
        if (source := returned.get(variable)) is not None:
            waiting.append((source.grad_fn, source.output_nr))
    return False


def _passes(
    later: HeadInput, gradient: Tensor, graph: HeadGraph, totals: Sequence[Tensor | None], batch: int
) -> Tensor:
    """Return True for each image of which all gradients at the image and at blocks pass later tokens, bool [batch]."""
    passes = torch.ones(batch, dtype=torch.bool, device=gradient.device)
    image = [] if graph.image is None else [graph.image]
    tensors = [*image, *(block.tokens for block in graph.blocks)]
    known = [(tensor, total) for tensor, total in zip(tensors, totals, strict=True) if total is not None]
    passed = graph.differentiate(later.tokens, gradient, [tensor for tensor, _ in known])
    for through, (_, total) in zip(passed, known, strict=True):
        rest = total if through is None else total - through
        passes &= _largest(rest, batch) <= _ROUNDING[total.dtype.itemsize] * _largest(total, batch)
    return passes


def _largest(gradient: Tensor, batch: int) -> Tensor:
    """Return the largest absolute entry of each image, [batch]."""
    axis = 1 if len(gradient) % batch and gradient.shape[1] == batch else 0  # [tokens, batch, channels]
    images = gradient.abs().movedim(axis, 0)
    return images.reshape(batch, -1).amax(dim=1) if len(images) % batch == 0 else images.amax().expand(batch)


def _is_token_wise(norm: HeadInput, graph: HeadGraph, tokens: Sequence[LayerTokens]) -> bool:
    """Return True if a token of a norm depends on only one token of the last block or container before it.

    One token of each image is tested, in the same backward pass.
    """
    top, (batch, *_) = tokens[-1].queries, norm.tokens.shape if graph.image is None else graph.image.shape
    channels = channel_axis(norm.tokens.shape, top)
    images = 1 if norm.tokens.shape[0] != batch == norm.tokens.shape[1] else 0  # [tokens, batch, channels]
    token = tuple(
        slice(None) if axis in (channels, images) else side // 3 for axis, side in enumerate(norm.tokens.shape)
    )
    chosen = torch.zeros_like(norm.tokens)
    chosen[token] = torch.randn(chosen[token].shape, generator=torch.Generator().manual_seed(2)).to(chosen)
    last = graph.blocks[-1]
    inside = [each for each in graph.later[: graph.later.index(norm)] if each.kind == "container"]
    before = [each.tokens for each in inside if each.tokens.numel() == last.tokens.numel()]
    reached = graph.differentiate(norm.tokens, chosen, [*reversed(before), last.tokens])
    nearest = next((gradient for gradient in reached if gradient is not None and is_nonzero(gradient)), None)
    if nearest is None:
        return True
    norms = token_norms(nearest, top)
    return norms is not None and int((norms > 0).sum(dim=1).max()) <= 1


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
