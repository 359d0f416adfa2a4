"""The head of a model in one forward pass: the outputs of blocks that it may read, in the autograd graph.

In vitflow's own passes the output of each block becomes a leaf of the graph, so that gradients at it are along paths
that pass no later block. A user's own pass is only observed.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_norms, block_of, block_paths
from vitflow.models.calls import tokens_of, with_tokens
from vitflow.models.parts import module_paths
from vitflow.recording.attention_kinds import guessed_blocks, is_pooling, may_attend
from vitflow.recording.isolation import Hook

# Blocks of the last pass of a model. A guess for its next pass, after which it is verified.
_blocks: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class HeadInput:
    """The output of a module in the autograd graph of the head.

    Attributes:
        kind: "block", "container" (of the last block), "norm" or "pooling"; "block" also for what may be a container.
        tokens: its tokens, or the output of a pooling head; if the graph is cut here, a leaf of zeros without memory.
        passed_on: what later modules get: the tokens, or their sum with the leaf, freed after the next block.
        cut: True if the graph is cut here.
        source: the tokens in the graph of the module, if the graph is cut here and the module ran with gradients.
        entered: its input tokens, if it is a block; the leaf of the block before it, if it got what that passed on.
    """

    path: str
    kind: str
    tokens: Tensor
    passed_on: Tensor
    cut: bool = False
    source: Tensor | None = None
    entered: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadGraph:
    """The image (if it is a leaf), each run of a block, and the norms, containers and pooling heads that ran later."""

    image: Tensor | None
    blocks: Sequence[HeadInput]
    later: Sequence[HeadInput]

    def differentiate(self, root: Tensor, weights: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """Differentiate along paths from the inputs that pass no later block."""
        kept: dict[int, Tensor] = {}

        def keep(key: int, gradient: Tensor) -> Tensor:
            kept[key] = gradient
            return torch.zeros_like(gradient)  # nothing passes to earlier blocks

        uncut = [block.tokens for block in self.blocks if block.tokens.grad_fn is not None]
        handles = [tokens.register_hook(partial(keep, id(tokens))) for tokens in uncut]
        try:
            gradients = torch.autograd.grad(root, inputs, weights, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return [kept.get(id(tokens), gradient) for tokens, gradient in zip(inputs, gradients, strict=True)]

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

    def is_restarted(self) -> bool:
        """Return True if a block ran again on tokens that are not computed from the output of the previous block."""
        paths = set[str]()
        for number, block in enumerate(self.blocks):
            if block.path in paths and not self._follows(block, self.blocks[number - 1]):
                return True
            paths.add(block.path)
        return False

    def is_chain(self) -> bool:
        """Return True if the input of each block is computed from the output of the previous block alone."""
        return all(self._follows(block, before, alone=True) for before, block in pairwise(self.blocks))

    def _follows(self, block: HeadInput, before: HeadInput, *, alone: bool = False) -> bool:
        tokens = block.entered
        if tokens is None or tokens is before.tokens or not tokens.requires_grad:
            return tokens is before.tokens
        sources = [each.tokens for each in self.blocks[: self.blocks.index(block)]] if alone else [before.tokens]
        gradients = self.differentiate(tokens, torch.ones_like(tokens), sources)
        reached = [source for source, gradient in zip(sources, gradients, strict=True) if is_nonzero(gradient)]
        return len(reached) == 1 and reached[0] is before.tokens


class HeadWatch:
    """Hooks that keep the outputs of blocks, and the norms and pooling heads above them, in a forward pass.

    Args:
        blocks: paths of the blocks.
        cut: make the outputs of these blocks leaves of the graph; otherwise every module that may be a block is
            observed if the pass has gradients.
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
        graph, cut = torch.is_grad_enabled(), self.blocks if self.cut else ()
        attending = cut or (tuple(may_attend(self._model)) if graph else ())
        around = {path[:i] for path in attending for i, sign in enumerate(path) if sign == "."}
        inside = "."
        for path, module in module_paths(self._model):
            if not path or path.startswith(inside):
                continue
            inside = f"{path}." if path in cut else inside
            special = "pooling" if is_pooling(path, module) else "norm" if is_norm(module) else "block"
            kind = "block" if path in cut else special
            block = path in self.blocks or (not self.cut and (path in around or path in attending))
            if block:
                yield Hook(module, partial(self._enter, path), before=True)
            if block or (graph and (path in around or kind != "block")):
                # First, as other hooks may replace the tokens.
                yield Hook(module, partial(self._leave, path, kind), before=False, always=path in cut, first=True)

    def graph(self, blocks: Sequence[str]) -> HeadGraph | None:
        """Return the graph of the pass, if it shows the outputs of these blocks."""
        if not blocks or (self.cut and set(self.blocks) != set(blocks)):
            return None
        runs = [each for each in self.seen if each.path in blocks]
        if {each.path for each in runs} != set(blocks) or not all(each.tokens.requires_grad for each in runs):
            return None
        around = {blocks[-1][:i] for i, sign in enumerate(blocks[-1]) if sign == "."}
        later: list[HeadInput] = []
        for each in self.seen[self.seen.index(runs[-1]) + 1 :]:
            each.kind = "container" if each.path in around else each.kind
            if each.kind != "block" and all(each.tokens is not other.passed_on for other in (runs[-1], *later)):
                later.append(each)
        return HeadGraph(self.image, runs, later)

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        self._entered[path] = tokens_of(args or kwargs.get("hidden_states"))
        if path in self.blocks and self.cut and not self._gradients:
            torch.set_grad_enabled(False)

    def _leave(self, path: str, kind: str, args: Any, output: Any) -> Any:
        cut, entered = self.cut and path in self.blocks, self._entered.pop(path, None)
        if cut and not self._gradients:
            torch.set_grad_enabled(True)
        tokens = output if kind == "pooling" and isinstance(output, Tensor) else tokens_of(output)
        passed_on = tokens
        if tokens is not None and cut and not tokens.is_inference():
            leaf = tokens.new_zeros(()).expand(tokens.shape).requires_grad_()
            passed_on = tokens.detach() + leaf  # a tensor that later modules may change in place
            before = next((each for each in reversed(self.seen) if each.cut), None)
            if before is not None:  # its values are freed
                entered, before.passed_on = before.tokens if entered is before.passed_on else entered, before.tokens
            source = tokens if tokens.requires_grad else None
            self.seen.append(HeadInput(path, kind, leaf, passed_on, True, source, entered))
        elif tokens is not None and tokens.requires_grad:
            self.seen.append(HeadInput(path, kind, tokens, tokens, entered=entered))
        if path in self.blocks:
            self.num_tokens = tokens.shape[1] if tokens is not None and tokens.ndim == 3 else None
        return None if passed_on is tokens or passed_on is None else with_tokens(output, passed_on)


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
