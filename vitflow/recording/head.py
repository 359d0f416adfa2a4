"""The head of a model in one forward pass: the outputs of blocks that it may read, in the autograd graph.

The output of each block becomes a leaf of the graph, so that gradients at it are along paths that pass no later block.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_norms, block_of, block_paths
from vitflow.models.calls import tokens_of, with_tokens
from vitflow.models.parts import module_paths
from vitflow.recording.attention_kinds import guessed_blocks, is_pooling
from vitflow.recording.isolation import Hook

# Blocks of the last pass of a model. A guess for its next pass, after which it is verified.
_blocks: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class HeadInput:
    """The output of a module in the autograd graph of the head.

    Attributes:
        kind: "block", "container", "norm" or "pooling".
        tokens: its tokens, or the output of a pooling head; of a block, a leaf of zeros without memory.
        passed_on: what later modules get: the tokens, or their sum with the leaf, freed after the next block.
        source: the tokens of a block in its own graph, if it ran with gradients.
        entered: the input tokens of a block; the leaf of the block before it, if it got what that passed on.
    """

    path: str
    kind: str
    tokens: Tensor
    passed_on: Tensor
    source: Tensor | None = None
    entered: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadGraph:
    """The image, each run of a block, and the norms, containers of the last block and pooling heads that ran later."""

    image: Tensor | None
    blocks: Sequence[HeadInput]
    later: Sequence[HeadInput]

    def differentiate(self, root: Tensor, weights: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Differentiate along paths from the inputs that pass no later block."""
        return torch.autograd.grad(root, inputs, weights, retain_graph=True, allow_unused=True)

    def gradient_at_residual(self, root: Tensor, weights: Tensor) -> Tensor | None:
        """Return the gradient at the sum of the output of the last block and its residual outside of the block.

        It is the first sum with this output through which everything else is read; None if there is none.
        """
        last, kept = self.blocks[-1].tokens, list[Tensor]()
        sources = [block.tokens for block in self.blocks[:-1]] + ([] if self.image is None else [self.image])
        for node in _nodes_above(root, last):
            if "AddBackward" in node.name() and not is_bypassed(root, [], sources, ends={node}):
                handle = node.register_prehook(lambda gradients: kept.extend(gradients[:1]))
                try:
                    torch.autograd.grad(root, last, weights, retain_graph=True, allow_unused=True)
                finally:
                    handle.remove()
                return kept[0] if kept and kept[0].shape == last.shape else None
        return None

    def is_chain(self) -> bool:
        """Return True if the input of each block is computed from the output of the previous block alone."""
        return all(self._reads_only(self.blocks[index], index - 1) for index in range(1, len(self.blocks)))

    def _reads_only(self, block: HeadInput, index: int) -> bool:
        tokens, sources = block.entered, [each.tokens for each in self.blocks[: index + 1]]
        if tokens is None or tokens is sources[index] or not tokens.requires_grad:
            return tokens is sources[index]
        gradients = self.differentiate(tokens, torch.ones_like(tokens), sources)
        return [is_nonzero(gradient) for gradient in gradients] == [False] * index + [True]


class HeadWatch:
    """Hooks that cut the graph of a forward pass after each block, and keep what the head may read.

    Args:
        blocks: paths of the blocks.
        cut: make the outputs of these blocks leaves of the graph; otherwise their tokens are only counted.
        gradients: run the blocks with gradients, too, if the graph is cut.

    Attributes:
        seen: the head inputs of the pass.
        num_tokens: number of tokens that the latest block returned, if it was a sequence.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[str] = (), *, cut: bool = False, gradients: bool = False
    ) -> None:
        self.blocks, self.cut = tuple(dict.fromkeys(blocks)), cut
        self._model, self._gradients = model, gradients
        self.reset()

    def reset(self) -> None:
        """Forget the previous forward pass."""
        self.image: Tensor | None = None
        self.seen: list[HeadInput] = []
        self.num_tokens: int | None = None
        self._entered: dict[str, Tensor | None] = {}

    def begin(self, pixels: Tensor) -> Tensor:
        """Begin a forward pass; return the pixels that the model gets, in the graph if it is cut."""
        self.reset()
        if self.cut and not pixels.requires_grad and pixels.is_floating_point():
            pixels = (pixels.clone() if pixels.is_inference() else pixels.detach()).requires_grad_()
        self.image = pixels if pixels.requires_grad else None
        return copied_on_write(pixels)

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks of a forward pass."""
        around = {path[:i] for path in self.blocks for i, sign in enumerate(path) if sign == "."}
        inside = "."
        for path, module in module_paths(self._model):
            if not path or path.startswith(inside):
                continue
            if path in self.blocks:
                inside = f"{path}."
                yield Hook(module, partial(self._enter, path), before=True)
                # First, as other hooks may replace the tokens.
                yield Hook(module, partial(self._leave, path), before=False, always=self.cut, first=True)
            elif self.cut:
                kind = "pooling" if is_pooling(path, module) else "norm" if is_norm(module) else "container"
                if path in around or kind != "container":
                    yield Hook(module, partial(self._keep, path, kind), before=False, first=True)

    def graph(self, blocks: Sequence[str]) -> HeadGraph | None:
        """Return the graph of the pass, if it was cut after these blocks."""
        if not blocks or not self.cut or set(self.blocks) != set(blocks):
            return None
        runs = [each for each in self.seen if each.kind == "block"]
        if {each.path for each in runs} != set(blocks):
            return None
        later: list[HeadInput] = []
        for each in self.seen[self.seen.index(runs[-1]) + 1 :]:
            usable = each.kind != "container" or blocks[-1].startswith(f"{each.path}.")
            if usable and all(each.tokens is not other.passed_on for other in (runs[-1], *later)):
                later.append(each)
        return HeadGraph(self.image, runs, later)

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        self._entered[path] = tokens_of(args or kwargs.get("hidden_states"))
        if self.cut and not self._gradients:
            torch.set_grad_enabled(False)

    def _leave(self, path: str, args: Any, output: Any) -> Any:
        entered, tokens = self._entered.pop(path, None), tokens_of(output)
        if self.cut and not self._gradients:
            torch.set_grad_enabled(True)
        self.num_tokens = tokens.shape[1] if tokens is not None and tokens.ndim == 3 else None
        if tokens is None or not self.cut or tokens.is_inference():
            return None
        leaf = tokens.new_zeros(()).expand(tokens.shape).requires_grad_()
        passed_on = tokens.detach() + leaf  # a tensor that later modules may change in place
        before = next((each for each in reversed(self.seen) if each.kind == "block"), None)
        if before is not None:  # its values are freed
            entered, before.passed_on = before.tokens if entered is before.passed_on else entered, before.tokens
        source = tokens if tokens.requires_grad else None
        self.seen.append(HeadInput(path, "block", leaf, passed_on, source, entered))
        return with_tokens(output, passed_on)

    def _keep(self, path: str, kind: str, args: Any, output: Any) -> None:
        tokens = output if kind == "pooling" and isinstance(output, Tensor) else tokens_of(output)
        if tokens is not None and tokens.requires_grad:
            self.seen.append(HeadInput(path, kind, tokens, tokens))


def known_blocks(model: nn.Module) -> Sequence[str]:
    """Return the blocks of the last pass of a model, else those that it lists, or a guess; a pass verifies them."""
    return _blocks.get(model) or block_paths(model) or guessed_blocks(model) or _blocks_of_norms(model)


def _blocks_of_norms(model: nn.Module) -> list[str]:
    """Return the modules that contain the norms of tokens that Grad-CAM uses; empty for models with batch norms."""
    kinds = ((path, type(model.get_submodule(path)).__name__.lower()) for path in block_norms(model))
    norms = [path for path, kind in kinds if "layernorm" in kind or "rmsnorm" in kind]
    blocks = (block_of(norm) if block_of(norm) != norm else norm.rpartition(".")[0] for norm in norms)
    return list(dict.fromkeys(filter(None, blocks)))


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


def is_norm(module: nn.Module) -> bool:
    """Return True if a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower() and not module._modules


def layer_counts(blocks: Sequence[str], runs: Sequence[HeadInput]) -> list[int]:
    """Return the number of attention layers, given by their blocks, up to each run of a block."""
    counts, paths = [], [run.path for run in runs]
    for number, path in enumerate(paths):
        layers = [index for index, block in enumerate(blocks, start=1) if block == path]
        run = paths[:number].count(path)
        counts.append(layers[run] if len(layers) == paths.count(path) else layers[-1])
    return counts


def is_nonzero(gradient: Tensor | None) -> bool:
    """Return True if any entry of a gradient is not 0."""
    return gradient is not None and bool(torch.count_nonzero(gradient))


def is_bypassed(
    start: Tensor,
    through: Sequence[Tensor],
    sources: Sequence[Tensor],
    cuts: Sequence[HeadInput] = (),
    ends: Collection[Any] = (),
) -> bool:
    """Return True if a path of the graph from a tensor to a source may bypass the tensors between them.

    Paths continue from the leaf after a block of `cuts` to what the block returned, and stop at the nodes `ends`.
    """
    ends = {(node, 0) for node in ends} | {(tensor.grad_fn, tensor.output_nr) for tensor in through}
    leaves = {id(tensor) for tensor in sources if tensor.grad_fn is None}
    reached = {(tensor.grad_fn, tensor.output_nr) for tensor in sources if tensor.grad_fn is not None} - ends
    returned = {id(cut.tokens): cut.source for cut in cuts if cut.source is not None}
    seen, waiting = set[Any](), [(start.grad_fn, start.output_nr)]
    while waiting:
        node, output = waiting.pop()
        if (node, output) in reached:
            return True
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


def _nodes_above(start: Tensor, tensor: Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph from a tensor towards the start, as long as each result has a single use."""
    users, seen, waiting = defaultdict[Any, list[Any]](list), set[Any](), [start.grad_fn]
    node = tensor.grad_fn
    while waiting:
        user = waiting.pop()
        if user is None or user in seen:
            continue
        seen.add(user)
        for used, _ in user.next_functions:
            node = used if getattr(used, "variable", None) is tensor else node
            users[used].append(user)
            waiting.append(used)
    while node is not None and len(users[node]) == 1:
        [node] = users[node]
        yield node
