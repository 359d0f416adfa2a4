"""Tokens between blocks: which tokens each block receives from the block before it, by gradients on the image.

If the recorded pass shows that the input of each block is the output of the block before it, nothing is to do. The
gradients are those of the recorded pass if the outputs of its blocks are leaves of the graph, else of another pass.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vitflow.errors import OTHER_METHODS
from vitflow.methods.tokens import TokenLayout
from vitflow.recording.block_watch import BlockWatch, Boundary, as_tokens, block_paths_of, is_nonzero, remember_blocks
from vitflow.recording.experiment import Call
from vitflow.recording.layers import AttentionLayer, stack_of

# Relative difference of gradients that is rounding, and in half precision.
_ROUNDING, _HALF_ROUNDING = 1e-3, 5e-2
# The number of mixed tokens whose origins are compared with their places.
_SAMPLES = 12
# Least ratio of a token's own squared gradient to others', or least share of a rectangle around it that is not 0.
_MOST, _FILLED = 2.0, 0.75


class _Lost(Exception):
    """Tokens cannot be followed between two blocks; the message says why."""


def find_passed(call: Call, layers: Sequence[AttentionLayer], names: Sequence[str], watch: BlockWatch) -> str | None:
    """Set the masks of the tokens that each layer receives from the layer below, where some are replaced or zeroed.

    `names` are the attention modules that ran; a layer may be a product of several. Return why a product of layers
    would not follow the tokens, or None.
    """
    blocks = block_paths_of(call.model, names)
    remember_blocks(call.model, blocks)
    if set(watch.blocks) != set(blocks):
        watch = _repeated(call, blocks)
    # What is between the attention modules of one block is verified once.
    inner = {block for block, name in zip(blocks, names, strict=True) if block == name}
    ends = {index: (each.below, each.above) for index, each in watch.changed.items()}
    key, once = (find_passed, tuple(ends.items())), all(inner.intersection(each) for each in ends.values())
    if not ends or (once and key in call.cache):
        return None
    if not all(each.leaves for each in watch.changed.values()):
        watch = _repeated(call, blocks)
    lowest = {name: layer for layer, name in _lowest_names(layers, names)}
    by_block = {blocks[name]: lowest[name] for name in reversed(lowest)}
    whole = next((layer for layer in layers if layer.multiplied), None)
    passed: dict[int, Tensor] = {}
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(call.pixels.device.type, enabled=False):
        for index, boundary in watch.changed.items():
            layer = by_block.get(boundary.above, whole)
            layouts = () if layer is None else (layer.tokens.keys, layer.tokens.queries)
            ran_before = boundary.above in watch.calls[:index]
            try:
                mask = _passed(boundary, layouts, len(call.pixels), ran_before)
            except _Lost as error:
                fact = f"{type(call.model).__name__} {error}"
                return f"{fact}, so a product of layers would not follow its tokens. {OTHER_METHODS}"
            if mask is not None:
                passed[_first_name(blocks, watch.calls, index)] = mask
    for name, mask in passed.items():
        lowest[name].passed = mask
    if once and not passed:
        call.cache[key] = True
    return None


def _lowest_names(layers: Sequence[AttentionLayer], names: Sequence[str]) -> Iterator[tuple[AttentionLayer, int]]:
    """Yield each layer with the index of its name, or of the lowest name in its product."""
    start = 0
    for layer in layers:
        count = max(layer.multiplied, 1)
        top = names.index(layer.name, start + count - 1)
        yield layer, top - count + 1
        start = top + 1


def _first_name(blocks: Sequence[str], calls: Sequence[str], index: int) -> int:
    """Return the index of the first layer of one call of a block, which may run several times.

    >>> _first_name(["a", "a", "b", "a", "a"], ["a", "b", "a"], 2)
    3
    """
    path = calls[index]
    names = [name for name, block in enumerate(blocks) if block == path]
    return names[calls[:index].count(path) * len(names) // calls.count(path)]


def _repeated(call: Call, blocks: Sequence[str]) -> BlockWatch:
    """Run the recorded call again on its images, cut at these blocks."""
    watch = BlockWatch(call.model, blocks, cut=True)
    with call.experiment(watch.hooks(), gradients=True):
        call(watch.begin(call.pixels), same_images=True)
    return watch


def _passed(boundary: Boundary, layouts: Sequence[TokenLayout], batch: int, ran_before: bool) -> Tensor | None:
    """Return the mask of the tokens that are computed from those of the block below, [batch, tokens]; None if all are.

    `ran_before` is True if the block above ran earlier in the pass, so that it may start anew.
    """
    given, leaf, between = boundary.given, boundary.leaves[-1], f"between {boundary.below} and {boundary.above}"
    layout = next((each for each in layouts if _fits(given, each, batch) and _fits(leaf, each, batch)), None)
    if layout is None:
        if not layouts:
            return None
        raise _Lost(f"rearranges its tokens {between} from {tuple(leaf.shape)} to {tuple(given.shape)}")
    tokens = as_tokens(given, layout, batch)
    assert tokens is not None
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(tokens.shape[-1], generator=random, device="cpu").to(tokens)
    weights = (torch.rand(tokens.shape[:2], generator=random, device="cpu") + 0.5).to(tokens)
    scores = tokens @ direction  # [batch, tokens]
    plain, weighted = (_gradient(each, leaf, layout, batch) for each in (scores, scores * weights))
    size = plain.norm(dim=-1)
    lost = (size == 0) & (weighted.norm(dim=-1) == 0)
    if lost.all():  # another run of the model, or another stack of blocks
        if stack_of(boundary.below) == stack_of(boundary.above) and not ran_before:
            raise _Lost(f"does not pass on the output of {boundary.below} to {boundary.above}")
        return None
    if lost.any() and scores.requires_grad:
        others = torch.autograd.grad(scores[lost].square().sum(), boundary.leaves, retain_graph=True, allow_unused=True)
        if any(map(is_nonzero, others)):
            raise _Lost(f"replaces tokens by others {between}")
    rounding = _ROUNDING if torch.finfo(tokens.dtype).bits >= 32 else _HALF_ROUNDING
    mixed = ((weighted - plain * weights.double()[..., None]).norm(dim=-1) > rounding * size).nonzero()
    samples = torch.linspace(0, len(mixed) - 1, min(_SAMPLES, len(mixed))).round().long()
    for image, token in mixed[samples.to(mixed.device)].tolist():
        origins = _gradient(scores[image, token], leaf, layout, batch)[image].square().sum(dim=-1)
        if not _is_at(origins, token, layout):
            raise _Lost(f"reorders or merges its tokens {between}")
    return ~lost if lost.any() else None


def _fits(value: Tensor, layout: TokenLayout, batch: int) -> bool:
    return as_tokens(value, layout, batch) is not None


def _gradient(scores: Tensor, leaf: Tensor, layout: TokenLayout, batch: int) -> Tensor:
    """Return the gradient of the sum of scores with respect to the leaf's tokens, [batch, tokens, channels]."""
    gradient = None
    if scores.requires_grad:
        [gradient] = torch.autograd.grad(scores.sum(), leaf, retain_graph=True, allow_unused=True)
    tokens = as_tokens(torch.zeros_like(leaf) if gradient is None else gradient, layout, batch)
    assert tokens is not None
    return tokens.double()


def _is_at(origins: Tensor, token: int, layout: TokenLayout) -> bool:
    """Return True if most of a token is its own, or its origins [tokens] fill a rectangle around it (a convolution)."""
    others = origins.clone()
    others[token] = 0
    if origins[token] >= _MOST * others.max():
        return True
    patch = token - layout.num_prefix_tokens
    if not 0 <= patch < layout.num_patches:
        return False
    grid = layout.to_grid(origins).cpu().numpy() > 0
    lines = [np.flatnonzero(grid.any(axis=1 - axis)) for axis in (0, 1)]
    if not grid.any() or grid[np.ix_(*(range(line[0], line[-1] + 1) for line in lines))].mean() < _FILLED:
        return False
    for place, line, count in zip(divmod(patch, layout.cols), lines, grid.shape, strict=True):
        cut = line[0] == 0 or line[-1] == count - 1
        inside = line[0] <= place <= line[-1]
        if not inside or (not cut and abs((line[0] + line[-1]) / 2 - place) > 0.5):
            return False
    return True
