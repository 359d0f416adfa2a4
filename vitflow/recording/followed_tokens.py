"""Runs of a model in which its tokens are followed from block to block, with recorded attention as the identity.

`permuted_tokens.PermutedRun` moves the tokens of an image, and `coded_tokens.CodedRun` changes some of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.models.calls import tensors_in, tokens_of, with_tokens
from vitflow.recording.attention_kinds import arrangement, other_attention
from vitflow.recording.experiment import Call
from vitflow.recording.isolation import Hook
from vitflow.recording.layer_tokens import grid_axis
from vitflow.recording.layers import stack_of
from vitflow.recording.token_codes import (
    Reading,
    readings,
    window_reading,
)
from vitflow.recording.value_dependence import SAMPLED, ValueDependence, mark_of
from vitflow.recording.without_attention import WithoutAttention


@dataclass(frozen=True, slots=True)
class Fault:
    """Violation of the contract.

    Attributes:
        path: module path.
        what: what the module does, as a predicate.
        clause: number of the clause of the contract.
        moves: True if tokens above are not at their places, so that features above are refused, too.
        below: paths of the modules that had run before.
    """

    path: str
    what: str
    clause: int
    moves: bool
    below: frozenset[str]


@dataclass(slots=True)
class Block:
    """A running block: its path, the index of its call, and True once its input was read."""

    path: str
    index: int
    entered: bool = False


class FollowedRun(WithoutAttention):
    """Run of a model whose attention is the identity.

    Args:
        located: tokens of the layers of each recorded attention module, by its path.
        blocks: the block of each of these modules, by its path.
        rough: True for weights of 8 bits, whose rounding depends on all tokens.
    """

    images = 2

    def __init__(
        self, call: Call, located: Mapping[str, LayerTokens], blocks: Mapping[str, str], *, rough: bool = False
    ) -> None:
        super().__init__(call.model, located)
        self.call, self._rough = call, rough
        self.values = ValueDependence(self._choose)
        self.faults: list[Fault] = []
        self.unchecked: list[str] = []  # places whose tokens were not found
        self.calls: list[str] = []  # blocks in the order of their calls
        self._names = defaultdict[str, list[str]](list)
        for name, block in blocks.items():
            self._names[block].append(name)
        self._attended_blocks = set(self._names)
        plain = len({layout for tokens in located.values() for layout in (tokens.queries, tokens.keys)}) == 1
        attended = {type(call.model.get_submodule(path)): names for path, names in self._names.items()}
        for path in _siblings(call.model, list(self._names)):  # one of the same class has the same tokens
            self._names[path] = attended.get(type(call.model.get_submodule(path)), []) if plain else []
        self._weights = {each.data_ptr() for each in call.model.parameters()}
        self._running: list[str] = []
        self._finished: set[str] = set()
        self._blocks: list[Block] = []
        self._suspected: list[Fault] = []
        self._attended: list[tuple[str, int]] = []  # layers in the order of their runs, and the number of block calls

    # -- modules ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run the model on noise; its exceptions are raised."""
        noise = self.call.noise(1).expand(self.images, -1, -1, -1)
        with self.call.experiment(self._hooks()), self, self.values:
            pixels = noise.clone()
            self.values.mark([pixels], 1)
            self.call(pixels)

    def _hooks(self) -> Iterator[Hook]:
        chains = set(self._names) | {
            path
            for block, names in self._names.items()
            for name in names
            for path in (name[:i] for i, sign in enumerate(f"{name}.") if sign == ".")
            if f"{path}.".startswith(f"{block}.")
        }
        for path, module in self.call.state.modules.items():
            if path in self._names or path in chains or path in self.attending or other_attention(module) is not None:
                yield Hook(module, partial(self._enter, path, module, path in chains), before=True)
            yield Hook(module, partial(self._finish, path, module), before=False, always=True, first=True)

    def _enter(self, path: str, module: nn.Module, chain: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if path in self.attending or not path:
            self.path.append((path, module))
        self._running.append(path)
        with torch._C.DisableTorchFunction():
            if path in self._names:
                self._begin_block(path, [*tensors_in([args, kwargs])])
            if chain and self._blocks and not self._blocks[-1].entered:
                return self._read_input(self._blocks[-1], path, args, kwargs)
        return None

    def _finish(self, path: str, module: nn.Module, args: Any, output: Any) -> Any:
        self.leave(path, output)
        if self._running and self._running[-1] == path:
            self._running.pop()
        replacement = None
        with torch._C.DisableTorchFunction():
            if output is not None and self._blocks:
                if path == self._blocks[-1].path:
                    self._end_block(path, output)
                elif self._blocks[-1].entered and not type(module).__module__.startswith("torch.nn.modules."):
                    if other_attention(module) is not None:
                        replacement = self._passed_through(args, output)
                    else:
                        self.read_inside(path, output)
        if self._blocks and path == self._blocks[-1].path:
            self._blocks.pop()
        self._finished.add(path)
        return replacement

    def _begin_block(self, path: str, given: Sequence[Tensor]) -> None:
        self._confirm_suspected()
        index = len(self.calls)
        if not mark_of(given) & 1:
            self.fault(path, "gets an input that was computed by code that cannot be followed", 1, moves=True)
        self.calls.append(path)
        self._blocks.append(Block(path, index))

    def _end_block(self, path: str, output: Any) -> None:
        self._confirm_suspected()
        tensors = [each for each in tensors_in(output) if each.is_floating_point()]
        block = self._blocks[-1]
        if not mark_of(tensors) & 1:
            self.fault(path, "returns an output that was computed by code that cannot be followed", 1, moves=True)
        self.values.mark(tensors, 1)
        if block.entered:
            self.read_output(path, tensors)
        elif path in self._attended_blocks:
            self.unchecked.append(path)

    def _passed_through(self, args: Any, output: Any) -> Any:
        """Return the output of a module with known mixing, as if each token were computed from itself."""
        given, returned = tokens_of(args), tokens_of(output)
        if given is None or returned is None or given.shape != returned.shape or len(returned) % self.images:
            return None
        first = returned.unflatten(0, (self.images, -1))[:1].expand(self.images, *[-1] * returned.ndim).flatten(0, 1)
        before = given.unflatten(0, (self.images, -1))
        replaced = first + (before - before[:1]).flatten(0, 1)
        self.values.mark([replaced], mark_of([returned]))
        return with_tokens(output, replaced)

    # -- faults -------------------------------------------------------------------------------------------------------

    def fault(self, path: str, what: str, clause: int, *, moves: bool) -> None:
        """Note a fault."""
        self.faults.append(Fault(path, what, clause, moves, frozenset(self._finished)))

    def suspect(self, what: str, clause: int, *, moves: bool) -> None:
        """Note what is a fault of the running module if a block begins or ends later, and not a part of the head."""
        path = self._running[-1] if self._running else ""
        if all(each.what != what for each in self._suspected):
            self._suspected.append(Fault(path, what, clause, moves, frozenset(self._finished)))

    def _choose(self, how: str) -> None:
        self.suspect(f"chooses {how} that depends on the values of the image", 1, moves=how != SAMPLED)

    def _confirm_suspected(self) -> None:
        self.faults += self._suspected
        self._suspected.clear()

    # -- tokens -------------------------------------------------------------------------------------------------------

    def _layouts(self, block: str) -> list[TokenLayout]:
        """Return the layouts that the input of a block may have."""
        layers = [self._located[name] for name in self._names[block] if name in self._located]
        return list(dict.fromkeys(layout for each in layers for layout in (each.queries, each.keys)))

    def found(
        self, given: Any, block: str, more: Sequence[TokenLayout] = (), *, windowed: bool = True
    ) -> list[tuple[Tensor, Reading]]:
        """Return the readings of the first floating tensor that has tokens of a block.

        Inside a block, without `windowed`, tensors in windows or on other grids are not read: layers of different
        windows may have the same shape.
        """
        windows = [self._located[name] for name in self._names[block] if windowed and name in self._located]
        for tensor in tensors_in(given):
            if not tensor.is_floating_point():
                continue
            layouts = dict.fromkeys([*self._layouts(block), *more])
            fitting = [(tensor, each) for layout in layouts for each in readings(tensor, layout, self.images)]
            if not fitting:
                fitting = [
                    (tensor, each)
                    for tokens in windows
                    if (each := window_reading(tensor, tokens, self.images)) is not None
                ]
            axis = grid_axis(tensor.shape, self.call.size) if windowed and tensor.ndim == 4 else None
            if not fitting and axis is not None:
                layout = TokenLayout(0, *tensor.shape[axis : axis + 2])
                fitting = [(tensor, each) for each in readings(tensor, layout, self.images)]
            if fitting:
                return fitting
        return []

    def stack_of(self, block: str) -> str:
        """Return the name of the stack of a block."""
        return stack_of(self._names[block][0] if self._names[block] else block)

    def _read_input(self, block: Block, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = self.layouts_before(block.path)
        fitting = self.found([args, kwargs], block.path, before) if self._names[block.path] or before else []
        if not fitting:
            return None
        block.entered = True
        given = fitting[0][0]
        tokens = self.read_input(block, fitting)
        if tokens is None:
            return None
        if given.data_ptr() not in self._weights and not given.is_inference() and 0 not in given.stride():
            given.copy_(tokens)  # a residual outside of the block reads the same tensor
            return None
        self.values.mark([tokens], mark_of([given]))
        return tuple(tokens if each is given else each for each in args), {
            name: tokens if each is given else each for name, each in kwargs.items()
        }

    def layouts_before(self, block: str) -> Sequence[TokenLayout]:
        """Return the layouts of the block before, which this block may have, too; none before the first block."""
        raise NotImplementedError

    def read_input(self, block: Block, fitting: Sequence[tuple[Tensor, Reading]]) -> Tensor | None:
        """Read the input of a block, given as all its readings; return what replaces it."""
        raise NotImplementedError

    def read_output(self, path: str, tensors: Sequence[Tensor]) -> None:
        """Read the output of a block."""
        raise NotImplementedError

    def read_inside(self, path: str, output: Any) -> None:
        """Read the output of a module inside the running block."""
        raise NotImplementedError

    def read(self, name: str, module: nn.Module, value: Tensor, tokens: LayerTokens) -> None:
        """Read the values of a module."""
        self._follow_order(name, mark_of([value]) or self.values.bits)
        if self._blocks and self._blocks[-1].entered:
            with torch._C.DisableTorchFunction():
                arrange = arrangement(self.path, value, self.images)
                self.read_values(name, value if arrange is None else arrange(value), tokens)

    def _follow_order(self, name: str, bits: int) -> None:
        """Note a fault if the values of a layer, with these marks, are not computed from the layer before."""
        layer = next(path for path in self._located if f"{name}.".startswith(f"{path}.")), len(self.calls)
        numbers = [number for number, (other, _) in enumerate(self._attended, 1) if stack_of(other) == stack_of(name)]
        if not self._attended or self._attended[-1] != layer:
            if numbers and not bits >> numbers[-1] & 1:
                again = "runs several times, and " if any(layer[0] == other for other, _ in self._attended) else ""
                what = f"{again}does not read the result of {self._attended[numbers[-1] - 1][0]}"
                self.fault(layer[0], what, 2, moves=False)
            self._attended.append(layer)
        self.values.bits |= 1 << len(self._attended)

    def read_values(self, name: str, values: Tensor, tokens: LayerTokens) -> None:
        """Read the values that a module attends to, [images · windows, heads, keys, width]."""
        raise NotImplementedError


def _siblings(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield the other modules in the lists of blocks, whose attention may have been overlooked."""
    for parent in dict.fromkeys(block.rpartition(".")[0] for block in blocks):
        around = model.get_submodule(parent)
        if isinstance(around, nn.ModuleList | nn.Sequential):
            for name, module in around.named_children():
                path = f"{parent}.{name}" if parent else name
                if path not in blocks and not isinstance(module, nn.ModuleList | nn.ModuleDict):
                    yield path
