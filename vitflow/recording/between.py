"""Tokens between blocks: the input of each block is compared with the output of the block before it, on the image.

In most models both are the same tensor, which is checked in the recorded pass. Otherwise gradients show which tokens
passed on: in the recorded pass if the outputs of its blocks are leaves of the autograd graph, else in another pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from vitflow.errors import OTHER_METHODS
from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_paths
from vitflow.models.calls import tensors_in
from vitflow.models.parts import module_paths, runs_compiled
from vitflow.recording.heads import HeadGraph, HeadInputs, block_paths_of, tokens_of, with_tokens
from vitflow.recording.isolation import Hook, hooked, trial, uncompiled, unrecorded
from vitflow.recording.layers import AttentionLayer, stack_of
from vitflow.recording.probing import Call

# Relative difference of gradients that is rounding, and in half precision.
_ROUNDING, _HALF_ROUNDING = 1e-3, 5e-2
# The number of mixed tokens whose origins are compared with their places.
_SAMPLES = 12
# Least ratio of a token's own squared gradient to others', or least share of a rectangle around it that is not 0.
_MOST, _FILLED = 2.0, 0.75

# Blocks of the last pass of a model. A guess for its next pass, after which it is verified.
_blocks: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()

# Index of a block among the calls of a pass → path of the block before it, and its own.
Boundaries = dict[int, tuple[str, str]]


class BetweenBlocks:
    """Compares the input of each block with the output of the block before it.

    Attributes:
        blocks: paths of the blocks.
        changed: the blocks whose input is another tensor with other values, by the index of their call.
        given: these inputs, and their versions.
        calls: paths of the blocks that ran, in order.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        self.blocks, self._model = tuple(dict.fromkeys(blocks)), model
        self.begin()

    @classmethod
    def of(cls, model: nn.Module, cut: Sequence[str] = ()) -> "BetweenBlocks":
        """Return the comparison of a model's blocks: where it is cut, of its last pass, or of its lists of blocks."""
        paths = {path for path, _ in module_paths(model)}
        blocks = tuple(cut) or _blocks.get(model, ())
        return cls(model, blocks if blocks and paths.issuperset(blocks) else block_paths(model))

    def begin(self) -> None:
        """Reset for a new forward pass."""
        self.changed: Boundaries = {}
        self.given: dict[int, tuple[Tensor, int]] = {}
        self.calls: list[str] = []
        self._last: tuple[str, Tensor, int] | None = None

    @property
    def is_changed(self) -> bool:
        """True if the input of the running block is not the output of the block before it."""
        return len(self.calls) - 1 in self.changed

    def contains(self, path: str) -> bool:
        """Return True if a module is in one of the blocks."""
        return any(f"{path}.".startswith(f"{block}.") for block in self.blocks)

    def hooks(self, while_unrecorded: bool = False) -> Iterator[Hook]:
        """Yield the hooks of a forward pass."""
        for path in self.blocks:
            module = self._model.get_submodule(path)
            yield Hook(module, partial(self._enter, path), before=True, while_unrecorded=while_unrecorded)
            # First, as other hooks may replace the tokens.
            yield Hook(module, partial(self._leave, path), before=False, while_unrecorded=while_unrecorded, first=True)

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        last, self._last = self._last, None
        self.calls.append(path)
        if last is None or not last[1].numel():
            return
        given = _like([args, kwargs], last[1])
        if not given or any(_is_same(value, *last[1:]) for value in given):
            return
        if _version(last[1]) != last[2] or not torch.equal(given[0], last[1]):  # changed in place, or other values
            self.changed[len(self.calls) - 1] = last[0], path
            self.given[len(self.calls) - 1] = given[0], _version(given[0])

    def _leave(self, path: str, args: Any, output: Any) -> Any:
        tokens = tokens_of(output)
        self._last = None if tokens is None else (path, tokens, _version(tokens))


def _like(given: Any, tokens: Tensor) -> list[Tensor]:
    """Return the tensors among arguments with the shape of tokens; if there is none, those with as many entries."""
    tensors = [value for value in tensors_in(given) if value.dtype == tokens.dtype and value.numel() == tokens.numel()]
    return [value for value in tensors if value.shape == tokens.shape] or tensors


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_same(tensor: Tensor, other: Tensor, version: int) -> bool:
    """Return True if a tensor is the other one, or a view of it, unchanged since it had this version."""
    in_order = (tensor.is_contiguous() and other.is_contiguous()) or tensor.stride() == other.stride()
    same = tensor is other or (tensor.data_ptr() == other.data_ptr() and in_order)
    return same and tensor.dtype == other.dtype and _version(tensor) == version


def find_passed(
    call: Call, layers: Sequence[AttentionLayer], names: Sequence[str], watched: BetweenBlocks, inputs: HeadInputs
) -> str | None:
    """Set the masks of the tokens that each layer receives from the layer below, where some are replaced or zeroed.

    Args:
        call: the recorded call of the model.
        layers: its layers, some of which may be products of several.
        names: paths of all attention modules that ran, first layer first.
        watched: the comparison during the recorded pass, perhaps of other blocks.
        inputs: the head inputs of this pass, with the leaves if it was cut.

    Returns:
        Why a product of layers would not follow the tokens: they are reordered or merged, or bypass a block; or None.
    """
    blocks = block_paths_of(call.model, names)
    _blocks[call.model] = tuple(dict.fromkeys(blocks))
    if set(watched.blocks) != set(blocks):
        watched = BetweenBlocks(call.model, blocks)
        _repeat(call, watched)
    # What is between the attention modules of one block is verified once.
    inner = {block for block, name in zip(blocks, names, strict=True) if block == name}
    key = (find_passed, tuple(watched.changed.items()))
    once = all(inner.intersection(paths) for paths in watched.changed.values())
    if not watched.changed or (once and key in call.cache):
        return None
    lowest = {name: layer for layer, name in _lowest_names(layers, names)}
    by_block: dict[str, AttentionLayer] = {}
    for name, layer in lowest.items():
        by_block.setdefault(blocks[name], layer)
    whole = next((layer for layer in layers if layer.multiplied), None)
    placed = {block: by_block.get(block, whole) for block in blocks}
    layouts = {
        block: () if layer is None else (layer.tokens.keys, layer.tokens.queries) for block, layer in placed.items()
    }
    examined = _Examined(call.model, blocks, watched.changed, layouts, len(call.pixels))
    if not examined.has_compared(watched, inputs.graph(blocks) if inputs.cut else None):
        _repeat(call, examined)
    if examined.refusal is not None:
        fact = f"{type(call.model).__name__} {examined.refusal}"
        return f"{fact}, so a product of layers would not follow its tokens. {OTHER_METHODS}"
    for index, mask in examined.passed.items():
        lowest[_first_name(blocks, examined.calls, index)].passed = mask
    if once and not examined.passed:
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


def _repeat(call: Call, watch: BetweenBlocks) -> None:
    """Run the recorded call again on its images."""
    compiled = uncompiled() if runs_compiled(call.model) else nullcontext()
    hooks = watch.hooks(while_unrecorded=True)
    with torch.inference_mode(False), trial(call.model, call.pixels.device), compiled, hooked(hooks):
        call(call.pixels, same_images=True)


class _Examined(BetweenBlocks):
    """Makes the output of each block a leaf, and differentiates the input of the next one by it."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str],
        changed: Boundaries,
        layouts: Mapping[str, Sequence[TokenLayout]],
        batch: int,
    ) -> None:
        super().__init__(model, blocks)
        self._examine, self._layouts, self._batch = changed, layouts, batch
        self._leaves: list[Tensor] = []
        self.passed: dict[int, Tensor] = {}  # by the index of the call
        self.refusal: str | None = None

    def has_compared(self, watched: BetweenBlocks, graph: HeadGraph | None) -> bool:
        """Compare the inputs of the recorded pass, and return True, if its graph shows them unchanged."""
        if graph is None or [run.path for run in graph.blocks] != watched.calls:
            return False
        given = [
            (tokens, graph.blocks[index - 1].tokens, version) for index, (tokens, version) in watched.given.items()
        ]
        if any(_version(tokens) != version or tokens.shape != leaf.shape for tokens, leaf, version in given):
            return False
        with unrecorded(), torch.enable_grad(), torch.autocast(given[0][0].device.type, enabled=False):
            for index, (tokens, leaf, _) in zip(watched.given, given, strict=True):
                self.calls, self._leaves = watched.calls[: index + 1], [run.tokens for run in graph.blocks[:index]]
                if self.refusal is None:
                    self._compare_readable(index, tokens, leaf)
        self.calls = watched.calls
        return True

    def _leave(self, path: str, args: Any, output: Any) -> Any:
        tokens = tokens_of(output)
        if tokens is None:
            return None
        self._leaves.append(tokens.detach().clone().requires_grad_())
        torch.set_grad_enabled(True)  # until the next block
        return with_tokens(output, self._leaves[-1].clone())

    def _enter(self, path: str, args: Any, kwargs: Any) -> None:
        index = len(self.calls)
        self.calls.append(path)
        if index in self._examine and self._leaves and self.refusal is None:
            leaf = self._leaves[-1]
            given = next(iter(_like([args, kwargs], leaf)), None)
            if given is not None:
                self._compare_readable(index, given, leaf)
        torch.set_grad_enabled(False)

    def _compare_readable(self, index: int, given: Tensor, leaf: Tensor) -> None:
        """Compare tokens in the first layout of the block that both have."""
        layouts = self._layouts.get(self.calls[-1], ())
        readable = (
            layout
            for layout in layouts
            if self._tokens(given, layout) is not None and self._tokens(leaf, layout) is not None
        )
        if (layout := next(readable, None)) is not None:
            self._compare(self._examine[index], given, leaf, layout)
        elif layouts:
            between = "between {} and {}".format(*self._examine[index])
            self.refusal = f"rearranges its tokens {between} from {tuple(leaf.shape)} to {tuple(given.shape)}"

    def _compare(self, between: tuple[str, str], given: Tensor, leaf: Tensor, layout: TokenLayout) -> None:
        tokens, path = self._tokens(given, layout), between[1]
        assert tokens is not None
        random = torch.Generator().manual_seed(0)
        direction = torch.randn(tokens.shape[-1], generator=random, device="cpu").to(tokens)
        weights = (torch.rand(tokens.shape[:2], generator=random, device="cpu") + 0.5).to(tokens)
        scores = tokens @ direction  # [batch, tokens]
        plain, weighted = (self._gradient(each, leaf, layout) for each in (scores, scores * weights))
        size = plain.norm(dim=-1)
        lost = (size == 0) & (weighted.norm(dim=-1) == 0)
        if lost.all():  # another run of the model, or another stack of blocks
            if stack_of(between[0]) == stack_of(path) and path not in self.calls[:-1]:
                self.refusal = f"does not pass on the output of {between[0]} to {path}"
            return
        rounding = _ROUNDING if torch.finfo(tokens.dtype).bits >= 32 else _HALF_ROUNDING
        mixed = (weighted - plain * weights.double()[..., None]).norm(dim=-1) > rounding * size
        self._check_origins(between, scores, leaf, layout, lost, mixed)
        if lost.any():
            self.passed[len(self.calls) - 1] = ~lost

    def _check_origins(
        self,
        between: tuple[str, str],
        scores: Tensor,
        leaf: Tensor,
        layout: TokenLayout,
        lost: Tensor,
        mixed: Tensor,
    ) -> None:
        """Set the refusal if tokens are not computed from the tokens at their own places."""
        words = f"between {between[0]} and {between[1]}"
        if lost.any():
            replaced = scores[lost]
            if replaced.requires_grad and any(
                gradient is not None and gradient.any()
                for gradient in torch.autograd.grad(
                    replaced.square().sum(), self._leaves, retain_graph=True, allow_unused=True
                )
            ):
                self.refusal = f"replaces tokens by others {words}"
                return
        places = mixed.nonzero()
        samples = torch.linspace(0, len(places) - 1, min(_SAMPLES, len(places))).round().long()
        for image, token in places[samples.to(places.device)].tolist():
            origins = self._gradient(scores[image, token], leaf, layout)[image].square().sum(dim=-1)
            if not _is_at(origins, token, layout):
                self.refusal = f"reorders or merges its tokens {words}"
                return

    def _gradient(self, scores: Tensor, leaf: Tensor, layout: TokenLayout) -> Tensor:
        """Return the gradient of the sum of scores with respect to the leaf's tokens, [batch, tokens, width]."""
        gradient = None
        if scores.requires_grad:
            [gradient] = torch.autograd.grad(scores.sum(), leaf, retain_graph=True, allow_unused=True)
        tokens = self._tokens(torch.zeros_like(leaf) if gradient is None else gradient, layout)
        assert tokens is not None
        return tokens.double()

    def _tokens(self, value: Tensor, layout: TokenLayout) -> Tensor | None:
        """Return tokens as [batch, tokens, channels]; None if their axes are unknown."""
        if value.ndim == 3:
            if value.shape[:2] == (self._batch, layout.num_tokens):  # usual, so preferred if both numbers are equal
                return value
            if value.shape[:2] == (layout.num_tokens, self._batch):
                return value.transpose(0, 1)
            return value.mT if value.shape[::2] == (self._batch, layout.num_tokens) else None
        if layout.num_tokens != layout.num_patches:
            return None
        last, first = (value.shape[axis : axis + 2] == (layout.rows, layout.cols) for axis in (1, 2))
        return None if last == first else value.flatten(1, 2) if last else value.flatten(2).mT


def _is_at(origins: Tensor, token: int, layout: TokenLayout) -> bool:
    """Return True if the tokens [tokens] that a token is computed from are around its own place.

    Either most of it is its own, or they fill a rectangle around it, as for a convolution.
    """
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
