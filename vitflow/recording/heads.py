"""The input of a head: the outputs of the blocks of a model, and tokens computed from the last one, in one pass.

In vitflow's own passes the output of each block becomes a leaf of the autograd graph, so that gradients at it are
along paths that pass no later block. A user's own pass is only observed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.models.parts import module_paths
from vitflow.recording.attention_kinds import is_pooling, may_attend
from vitflow.recording.isolation import Hook


@dataclass(slots=True, eq=False)
class HeadInput:
    """The output of a module in the autograd graph of the head.

    Attributes:
        path: path of the module.
        kind: "block", "container" (of the last block), "norm" or "pooling"; "block" also for what may be a container.
        tokens: its tokens, or the output of a pooling head; a leaf if the graph is cut here.
        passed_on: what later modules get: the tokens, or a clone of the leaf, which they may change in place.
        source: the tokens in the graph of the module, if the graph is cut here.
        entered: its input tokens, if it is a block.
    """

    path: str
    kind: str
    tokens: Tensor
    passed_on: Tensor
    source: Tensor | None = None
    entered: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class HeadGraph:
    """The head inputs of one forward pass, in which the blocks are known.

    Attributes:
        image: the model input, a leaf; None if it does not require gradients.
        blocks: each run of a block, first run first.
        later: norms, containers and pooling heads that ran after the last block.
    """

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
        if tokens is None or tokens is before.passed_on or not tokens.requires_grad:
            return tokens is before.passed_on
        sources = [each.tokens for each in self.blocks[: self.blocks.index(block)]] if alone else [before.tokens]
        gradients = self.differentiate(tokens, torch.ones_like(tokens), sources)
        reached = [source for source, gradient in zip(sources, gradients, strict=True) if is_nonzero(gradient)]
        return len(reached) == 1 and reached[0] is before.tokens


class HeadInputs:
    """Hooks that keep the head inputs of a forward pass.

    Args:
        model: the unwrapped model.
        cut: paths of the blocks whose outputs become leaves; by default nothing is cut, and every module that may be
            a block is observed.
        gradients: run the blocks with gradients, too; only if the graph is cut.
        repeats: act inside `unrecorded` instead of outside of it.
    """

    def __init__(
        self, model: nn.Module, cut: Sequence[str] = (), *, gradients: bool = False, repeats: bool = False
    ) -> None:
        self.cut = tuple(dict.fromkeys(cut))
        self.image: Tensor | None = None
        self._model, self._gradients, self._repeats = model, gradients, repeats
        self._entered: dict[str, Tensor | None] = {}
        self.seen: list[HeadInput] = []

    def begin(self, pixels: Tensor) -> Tensor:
        """Begin a forward pass; return the pixels that the model gets, in the graph if it is cut."""
        self.seen, self._entered = [], {}
        if self.cut and not pixels.requires_grad and pixels.is_floating_point():
            pixels = (pixels.clone() if pixels.is_inference() else pixels.detach()).requires_grad_()
        self.image = pixels if pixels.requires_grad else None
        return pixels.clone()  # the model may change it in place

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks of a forward pass."""
        attending = self.cut or tuple(may_attend(self._model))
        around = {path[:i] for path in attending for i, sign in enumerate(path) if sign == "."}
        inside = "."
        for path, module in module_paths(self._model):
            if not path or path.startswith(inside):
                continue
            if path in self.cut:
                inside = f"{path}."
                yield Hook(module, partial(self._enter, path), before=True, while_unrecorded=self._repeats)
                yield Hook(
                    module,
                    partial(self._cut, path),
                    before=False,
                    always=True,
                    first=True,
                    while_unrecorded=self._repeats,
                )
                continue
            block = not self.cut and (path in around or path in attending)
            if block:
                yield Hook(module, partial(self._enter, path), before=True, while_unrecorded=self._repeats)
            kind = "pooling" if is_pooling(path, module) else "norm" if is_norm(module) else "block"
            if block or path in around or kind != "block":
                act = partial(self._keep, path, kind)
                yield Hook(module, act, before=False, first=True, while_unrecorded=self._repeats)

    def graph(self, blocks: Sequence[str]) -> HeadGraph | None:
        """Return the graph of the pass, if it shows the outputs of these blocks."""
        if not blocks or (self.cut and set(self.cut) != set(blocks)):
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
        if self.cut and not self._gradients:
            torch.set_grad_enabled(False)

    def _cut(self, path: str, args: Any, output: Any) -> Any:
        if not self._gradients:
            torch.set_grad_enabled(True)
        tokens = tokens_of(output)
        if tokens is None or tokens.is_inference():
            return None
        leaf = tokens.detach().requires_grad_()
        passed_on = leaf.clone()
        self.seen.append(HeadInput(path, "block", leaf, passed_on, tokens, self._entered.pop(path, None)))
        return with_tokens(output, passed_on)

    def _keep(self, path: str, kind: str, args: Any, output: Any) -> None:
        tokens = output if kind == "pooling" and isinstance(output, Tensor) else tokens_of(output)
        if tokens is None or not tokens.requires_grad:
            return
        self.seen.append(HeadInput(path, kind, tokens, tokens, entered=self._entered.pop(path, None)))


def tokens_of(output: Any) -> Tensor | None:
    """Return the token tensor of a module's output: itself, the first of a sequence, or `last_hidden_state`."""
    if isinstance(output, Mapping):
        output = output.get("last_hidden_state")
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.is_floating_point() and output.ndim in (3, 4) else None


def with_tokens(output: Any, tokens: Tensor) -> Any:
    """Return a module's output with its tokens replaced."""
    if isinstance(output, Mapping):
        output["last_hidden_state"] = tokens  # type: ignore[index]
        return output
    if isinstance(output, tuple | list):
        return [tokens, *output[1:]] if isinstance(output, list) else (tokens, *output[1:])
    return tokens


def is_norm(module: nn.Module) -> bool:
    """Return True if a module is a norm, by the name of its class."""
    return "norm" in type(module).__name__.lower() and not module._modules


def block_paths_of(model: nn.Module, layers: Sequence[str]) -> list[str]:
    """Return the block path of each attention layer: the outermost running module without another layer.

    >>> block_paths_of(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU())), ["0.0", "1.0"])
    ['0', '1']
    """
    prefixes = {name: [name[:i] for i, sign in enumerate(f"{name}.") if sign == "."] for name in layers}
    layers_in = Counter(chain.from_iterable(prefixes.values()))
    blocks = []
    for name in layers:
        alone = [
            path
            for path in prefixes[name]
            if layers_in[path] == 1 and (len(prefixes) > 1 or path.split(".")[-1].isdigit())
        ]
        running = (path for path in alone if not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict))
        blocks.append(next(running, name))
    return blocks


def layer_counts(blocks: Sequence[str], runs: Sequence[HeadInput]) -> list[int]:
    """Return the number of attention layers up to each run of a block.

    Args:
        blocks: path of the block of each attention layer, first layer first.
        runs: the runs of these blocks.
    """
    counts, paths = [], [run.path for run in runs]
    for number, path in enumerate(paths):
        layers = [index for index, block in enumerate(blocks, start=1) if block == path]
        run = paths[:number].count(path)
        counts.append(layers[run] if len(layers) == paths.count(path) else layers[-1])
    return counts


def guessed_blocks(model: nn.Module) -> list[str]:
    """Guess the blocks of a model, to be verified after a pass: those of the innermost modules called attention."""
    paths = module_paths(model)
    named = [path for path, module in paths if "att" in type(module).__name__.lower() and not is_pooling(path, module)]
    innermost = [path for path in named if not any(other.startswith(f"{path}.") for other in named)]
    return list(dict.fromkeys(block_paths_of(model, innermost)))


def is_nonzero(gradient: Tensor | None) -> bool:
    """Return True if any entry of a gradient is not 0."""
    return gradient is not None and bool(torch.count_nonzero(gradient))


def chained_gradients(
    roots: Sequence[Tensor], weights: Sequence[Tensor], inputs: Sequence[Tensor], cuts: Sequence[HeadInput]
) -> list[Tensor | None]:
    """Differentiate tensors in a graph that is cut after each block, from one leaf to the block below it.

    Args:
        roots, weights: the differentiated tensors, and weights of their entries.
        inputs: tensors in any part of the graph.
        cuts: the outputs of blocks where the graph is cut, first run first.

    Returns:
        The total gradients of the inputs; None if nothing depends on them.
    """
    count = len(inputs)
    totals: list[Tensor | None] = [None] * (count + len(cuts))

    def add(roots: Sequence[Tensor], weights: Sequence[Tensor], below: int) -> None:
        tensors = [*inputs, *(cut.tokens for cut in cuts[:below])]
        gradients = torch.autograd.grad(roots, tensors, weights, retain_graph=True, allow_unused=True)
        for index, gradient in enumerate(gradients):
            before = totals[index]
            totals[index] = gradient if before is None else before if gradient is None else before + gradient

    add(roots, weights, len(cuts))
    for index, cut in reversed(list(enumerate(cuts))):
        total = totals[count + index]
        if total is not None and cut.source is not None and cut.source.requires_grad:
            add([cut.source], [total], index)
    return totals[:count]
