"""The head of a model in one forward pass: the outputs of blocks that it may read, in the autograd graph.

The output of each block becomes a leaf of the graph, so that gradients at it are along paths that pass no later block.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_paths
from vitflow.models.calls import tokens_of, with_tokens
from vitflow.recording.attention_kinds import is_pooling
from vitflow.recording.isolation import Hook

# Limit of the difference between gradients of tokens, relative to the largest, by bytes per element.
_SAME_TOKENS = {8: 1e-6, 4: 1e-3, 2: 5e-2}
# Blocks of the last pass of a model. A guess for its next pass, after which it is verified.
_blocks: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class BlockRun:
    """One run of a block whose output was cut from the autograd graph.

    Attributes:
        leaf: the tokens that the block returned, as a leaf of zeros without memory.
        source: the tokens in the graph of the block, if it ran with gradients.
    """

    path: str
    leaf: Tensor
    source: Tensor | None


class HeadWatch:
    """Hooks that cut the graph of a forward pass after each block, and keep what is computed above.

    Args:
        blocks: paths of the blocks.
        cut: make the outputs of these blocks leaves of the graph; otherwise their tokens are only counted.
        gradients: run the blocks with gradients, too, if the graph is cut.

    Attributes:
        image: the pixels in the graph, if it is cut.
        runs: the runs of the blocks.
        is_chain: True if the input of each block is computed from the output of the previous block alone.
        above: outputs of norms, of modules around the last block ("container"), and of pooling heads that ended after
            the last block, with their kinds.
        num_tokens: number of tokens that the latest block returned, if it was a sequence.
    """

    def __init__(self, blocks: Sequence[str] = (), *, cut: bool = False, gradients: bool = False) -> None:
        self.blocks, self.cut, self._gradients = tuple(dict.fromkeys(blocks)), cut, gradients
        self.reset()

    def reset(self) -> None:
        """Forget the previous forward pass."""
        self.image: Tensor | None = None
        self.runs: list[BlockRun] = []
        self.is_chain = True
        self.above: list[tuple[str, Tensor]] = []
        self.num_tokens: int | None = None

    def begin(self, pixels: Tensor) -> Tensor:
        """Begin a forward pass; return the pixels that the model gets, in the graph if it is cut."""
        self.reset()
        if self.cut and not pixels.requires_grad and pixels.is_floating_point():
            pixels = (pixels.clone() if pixels.is_inference() else pixels.detach()).requires_grad_()
        self.image = pixels if pixels.requires_grad else None
        return copied_on_write(pixels)

    def hooks(self, modules: Mapping[str, nn.Module]) -> Iterator[Hook]:
        """Yield the hooks of a forward pass, given the modules of the model by path."""
        inside = "."
        for path, module in modules.items():
            if not path or path.startswith(inside):
                continue
            if path in self.blocks:
                inside = f"{path}."
                yield Hook(module, partial(self._enter, path), before=True)
                # First, as other hooks may replace the tokens.
                yield Hook(module, partial(self._leave, path), before=False, always=self.cut, first=True)
            elif self.cut and (kind := self._kind(path, module)):
                yield Hook(module, partial(self._keep, kind), before=False, first=True)

    def is_cut_after(self, blocks: Sequence[str]) -> bool:
        """Return True if the graph of the pass was cut after these blocks, and no others."""
        return self.cut and bool(blocks) and {run.path for run in self.runs} == set(blocks) == set(self.blocks)

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        if self.runs:
            tokens, leaves = tokens_of(args or kwargs.get("hidden_states")), [run.leaf for run in self.runs]
            follows = tokens is not None and tokens.requires_grad and not is_bypassed(tokens, leaves[-1], leaves)
            self.is_chain = self.is_chain and follows
        if self.cut and not self._gradients:
            torch.set_grad_enabled(False)

    def _leave(self, path: str, args: Any, output: Any) -> Any:
        tokens = tokens_of(output)
        if self.cut and not self._gradients:
            torch.set_grad_enabled(True)
        self.num_tokens = tokens.shape[1] if tokens is not None and tokens.ndim == 3 else None
        if tokens is None or not self.cut or tokens.is_inference():
            return None
        leaf = tokens.new_zeros(()).expand(tokens.shape).requires_grad_()
        self.runs.append(BlockRun(path, leaf, tokens if tokens.requires_grad else None))
        self.above.clear()
        return with_tokens(output, tokens.detach() + leaf)  # a tensor that later modules may change in place

    def _kind(self, path: str, module: nn.Module) -> str:
        if is_pooling(path, module):
            return "pooling"
        if "norm" in type(module).__name__.lower() and not module._modules:
            return "norm"
        return "container" if self.blocks and self.blocks[-1].startswith(f"{path}.") else ""

    def _keep(self, kind: str, args: Any, output: Any) -> None:
        tokens = output if isinstance(output, Tensor) else tokens_of(output)
        known = tokens is None or any(tokens is each for _, each in self.above)
        if self.runs and tokens is not None and tokens.requires_grad and not known:
            self.above.append((kind, tokens))


def known_blocks(model: nn.Module) -> Sequence[str]:
    """Return the blocks of the last pass of a model, else those that it lists; a pass verifies them."""
    return _blocks.get(model) or block_paths(model)


def remember_blocks(model: nn.Module, blocks: Sequence[str]) -> None:
    """Keep the blocks of a pass for the next one."""
    _blocks[model] = tuple(dict.fromkeys(blocks))


def copied_on_write(pixels: Tensor) -> Tensor:
    """Return a copy of the pixels, as the model may change them in place; on the CPU, it takes memory only then."""
    try:
        return torch.ops.aten._lazy_clone(pixels) if pixels.is_cpu else pixels.clone()
    except RuntimeError:  # of memory that is not torch's
        return pixels.clone()


def as_tokens(value: Tensor, layout: TokenLayout, batch: int) -> Tensor | None:
    """Return a tensor with the tokens of a layout as [batch, tokens, channels]; None if its axes are unknown."""
    count, square = layout.num_tokens, layout.num_tokens == layout.num_patches
    if value.ndim == 3:
        if value.shape[:2] == (batch, count):  # usual, so preferred if both numbers are equal
            return value
        if value.shape[:2] == (count, batch):
            return value.transpose(0, 1)
        return value.mT if value.shape[::2] == (batch, count) else None
    if value.ndim != 4 or len(value) != batch or not square:
        return None
    last, first = (value.shape[axis : axis + 2] == (layout.rows, layout.cols) for axis in (1, 2))
    return None if last == first else value.flatten(1, 2) if last else value.flatten(2).mT


def layer_counts(blocks: Sequence[str], runs: Sequence[BlockRun]) -> list[int]:
    """Return the number of attention layers, given by their blocks, up to each run of a block."""
    counts, paths = [], [run.path for run in runs]
    for number, path in enumerate(paths):
        layers = [index for index, block in enumerate(blocks, start=1) if block == path]
        run = paths[:number].count(path)
        counts.append(layers[run] if len(layers) == paths.count(path) else layers[-1])
    return counts


def nodes_of(start: Tensor, stop: Iterable[Any] = (), cuts: Sequence[BlockRun] = ()) -> Iterator[Any]:
    """Yield the nodes of the graph from which a tensor is computed, except these and what only they are computed from.

    Of two nodes of which one is on every path to the other, it is the first. Paths continue from the leaf of a cut to
    what its block returned.
    """
    sources = {get_gradient_edge(cut.leaf).node: cut.source for cut in cuts if cut.source is not None}
    seen, waiting = {None, *stop}, list[Any]([get_gradient_edge(start).node])
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        yield node
        seen.add(node)
        waiting += [used for used, _ in node.next_functions]
        if (source := sources.get(node)) is not None:
            waiting.append(source.grad_fn)


def is_bypassed(start: Tensor, node: Any, sources: Sequence[Tensor], cuts: Sequence[BlockRun] = ()) -> bool:
    """Return True if a path of the graph from a tensor to a source may bypass a node or tensor between them."""
    passed = get_gradient_edge(node).node if isinstance(node, Tensor) else node
    ends = {get_gradient_edge(each).node for each in sources} - {passed}
    return any(each in ends for each in nodes_of(start, [passed], cuts))


def is_read_by_token(kind: str, norm: Tensor, leaf: Tensor, layout: TokenLayout) -> bool:
    """Return True for tokens of a norm above, or of a module around the last block, each computed from itself alone.

    Gradients of a random sum of all tokens are compared with those of a sum in which each token has another weight.
    Other tokens of a container may be internal to a head.
    """
    channels = channel_axis(norm.shape, layout) if norm.ndim > 2 else None
    before = channel_axis(leaf.shape, layout)
    if channels is None or kind not in ("norm", "container"):
        return False
    if before is None:  # as of class tokens alone
        return True
    if norm.shape[channels] != leaf.shape[before] or (kind == "container" and norm.numel() != leaf.numel()):
        return False
    random = torch.Generator().manual_seed(2)
    weights = 1 + torch.rand(layout.num_tokens, generator=random, dtype=torch.float64, device="cpu")
    chosen = torch.randn(norm.shape, generator=random, device="cpu").to(norm)
    weighted = chosen * _spread(weights, norm.shape, layout, channels).to(norm)
    sums: list[Tensor] = []
    for each in (chosen, weighted):
        [reached] = torch.autograd.grad(norm, [leaf], each, retain_graph=True, allow_unused=True)
        if reached is None or not reached.any():
            return True
        here = token_norms(reached, layout)
        if here is None:
            return False
        sums.append(here)
    here = token_norms(chosen, layout)
    if here is None or bool(((here > 0) & (sums[0] == 0)).any()):  # tokens that are not those of the block
        return False
    limit = _SAME_TOKENS[norm.dtype.itemsize] * sums[0].amax()
    return bool(((sums[1] - sums[0] * weights.to(sums[0])).abs() <= limit).all())


def _spread(weights: Tensor, shape: Sequence[int], layout: TokenLayout, channels: int) -> Tensor:
    """Return weights of the tokens of a layout as a factor of tensors of a shape."""
    if len(shape) == 3:
        axis = 3 - channels if channels == 1 or shape[1] in (layout.num_patches, layout.num_tokens) else 0
        here = weights if shape[axis] == layout.num_tokens else weights[layout.patches]
        return here.view([-1 if each == axis else 1 for each in range(3)])
    rows, cols = shape[1:3] if channels == 3 else shape[2:]
    grid = weights[layout.patches].view(layout.rows, layout.cols)
    grid = grid.repeat_interleave(rows // layout.rows, 0).repeat_interleave(cols // layout.cols, 1)
    return grid[None].unsqueeze(channels)


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
    """Return the channel axis of a tensor with the tokens of a layout, or with a finer grid; else None."""
    counts = (layout.num_patches, layout.num_tokens)
    if len(shape) == 3:
        return 2 if shape[1] in counts or shape[0] in counts else 1 if shape[2] in counts else None
    sides = {}
    for axis, (rows, cols) in ((1, shape[2:]), (3, shape[1:3])):
        cell = rows // layout.rows
        if cell and (rows, cols) == (cell * layout.rows, cell * layout.cols):
            sides[axis] = cell
    return min(sides, key=lambda axis: sides[axis]) if sides else None
