"""Run of a model with codes of tokens: which tokens each token of a block is computed from.

Tokens get new codes at the input of a block unless they still have exactly their codes. Statistics over all tokens, as
in squeeze-and-excitation and group norms, are those of the first image in every image: they may scale tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitflow.methods.staged_rollout import LayerTokens
from vitflow.methods.tokens import TokenLayout
from vitflow.models.calls import tensors_in
from vitflow.recording.experiment import Call
from vitflow.recording.followed_tokens import Block, FollowedRun
from vitflow.recording.receptive_reach import is_coarser, is_finer, reach_of
from vitflow.recording.token_codes import (
    Reading,
    Verdict,
    code_bits,
    code_numbers,
    coded,
    expected_codes,
    judge,
    seen_codes,
    striped_codes,
    window_reading,
)
from vitflow.recording.value_dependence import BY_SHAPE, function_name, mark_of

# Functions by which a statistic of all tokens may scale tokens.
_SCALING = {"mul", "multiply", "div", "true_divide", "matmul", "bmm", "einsum"}
_SCALING |= {f"__{name}__" for name in ("mul", "rmul", "imul", "truediv", "itruediv", "rtruediv", "matmul", "rmatmul")}
# Functions that may compute a statistic over tokens, and their argument with the axes.
_STATISTICS = {"mean": 1, "sum": 1, "amax": 1, "amin": 1, "std": 1, "std_mean": 1, "var": 1, "var_mean": 1}
_STATISTICS |= {"norm": 2, "linalg_vector_norm": 2}
_TO_ONE = {f"adaptive_{kind}_pool{axes}d" for kind in ("avg", "max") for axes in (1, 2)}


@dataclass(slots=True, eq=False)
class _Stack:
    """Tokens of a stack of blocks.

    Attributes:
        codes: [bits, tokens], in the order of the tokens.
        group: images with these codes.
        reach: of convolutions and pooling since the codes were given.
        merging: further reach of those that returned a coarser grid, such as the keys of some attention.
        order: place of each patch among the tokens of a sequence, if they are not in raster order.
        in_order: True if attention read them in raster order, so that no other order may follow.
        renewed: True if tokens get new codes at the next block, as their order was unknown.
    """

    layout: TokenLayout
    codes: Tensor
    group: slice
    reach: tuple[float, float] = (0.0, 0.0)
    merging: tuple[float, float] = (0.0, 0.0)
    order: Tensor | None = None
    in_order: bool = False
    renewed: bool = False

    def codes_of(self, reading: Reading) -> Tensor:
        """Return the codes in the order of a reading."""
        return self.codes if self.order is None or reading.sequence else self.codes[:, self.order]

    def widen(self, more: tuple[float, float], *, merged: bool, finer: bool) -> None:
        """Add the reach of a convolution or of pooling, which may return a coarser or finer grid."""
        if merged:
            self.merging = self.merging[0] + more[0], self.merging[1] + more[1]
            return
        self.reach = self.reach[0] + more[0], self.reach[1] + more[1]
        if finer:
            self.reach, self.merging = self.reach_to(None), (0.0, 0.0)

    def reach_to(self, layout: TokenLayout | None) -> tuple[float, float]:
        """Return the reach to the tokens of a layout."""
        if layout == self.layout:
            return self.reach
        return self.reach[0] + self.merging[0], self.reach[1] + self.merging[1]

    def is_unknown(self, reading: Reading) -> bool:
        """Return True if tokens in another order were merged, so that they cannot be followed."""
        return self.order is not None and reading.layout != self.layout


class CodedRun(FollowedRun):
    """Run of 1 + groups · bits images.

    Args:
        bits: number of bits of all codes.
        groups: groups of images that have new codes in turn, so that a residual around blocks whose tokens get new ones
            does not bring the codes before.
        reading: which reading of a tensor is preferred, if its axes are ambiguous.

    Attributes:
        lost: tokens that are constants at the input of a block call, bool [tokens], by its index.
        readings: the largest number of readings of a tensor.
        needed: number of bits of a code that differs for all tokens.
    """

    def __init__(
        self,
        call: Call,
        located: Mapping[str, LayerTokens],
        blocks: Mapping[str, str],
        *,
        bits: int,
        groups: int = 1,
        reading: int = 0,
        rough: bool = False,
    ) -> None:
        self.images = 1 + groups * bits
        super().__init__(call, located, blocks, rough=rough)
        self.lost: dict[int, Tensor] = {}
        self.readings, self.needed, self._bits, self._coded = 1, bits, bits, 0
        self._reading = reading
        self._random = torch.Generator().manual_seed(2)
        self._stacks: dict[str, _Stack] = {}
        self._returned: dict[str, tuple[str, int]] = {}  # constants among the tokens that a block returned, by stack

    def run(self) -> None:
        """Run the model on noise; its exceptions are raised."""
        super().run()
        for returned in self._returned.values():
            self._replaced(*returned)

    def _replaced(self, path: str, count: int) -> None:
        self.fault(path, f"replaces tokens by constants ({count})", 2, moves=True)

    # -- codes --------------------------------------------------------------------------------------------------------

    def layouts_before(self, block: str) -> Sequence[TokenLayout]:
        """Return the layouts of the block before, which this block may have, too."""
        stack = self._stacks.get(self.stack_of(block))
        return () if stack is None else (stack.layout,)

    def _judge(self, stack: _Stack, tensor: Tensor, reading: Reading) -> Verdict:
        codes = stack.codes_of(reading)
        expected = expected_codes(codes, stack.layout, reading.layout, stack.reach_to(reading.layout)).at(reading.index)
        return judge(self._seen(stack, tensor, reading), expected)

    def _seen(self, stack: _Stack, tensor: Tensor, reading: Reading) -> Tensor:
        tokens = reading.arrange(tensor)
        return seen_codes(torch.cat([tokens[:1], tokens[stack.group]]), rough=self._rough)

    def _best(self, stack: _Stack, fitting: Sequence[tuple[Tensor, Reading]]) -> tuple[Verdict, Tensor, Reading]:
        """Return the reading with the fewest wrong tokens, and with the most exact ones."""
        judged = [(self._judge(stack, *each), *each) for each in self._preferred(fitting)]
        return min(judged, key=lambda each: (each[0].wrong, int(each[0].lost.sum()), not each[0].exact))

    def _preferred(self, fitting: Sequence[tuple[Tensor, Reading]]) -> Sequence[tuple[Tensor, Reading]]:
        """Return the readings of a tensor, the preferred one first."""
        self.readings = max(self.readings, len(fitting))
        first = min(self._reading, len(fitting) - 1)
        return [*fitting[first:], *fitting[:first]]

    def _passed_on(self, fitting: Sequence[tuple[Tensor, Reading]]) -> _Stack | None:
        """Return the stack whose tokens are the input of the first block of another one, as with late class tokens."""
        for stack in reversed(self._stacks.values()):
            if not stack.is_unknown(fitting[0][1]) and self._best(stack, fitting)[0].exact:
                return stack
        return None

    def _refuse(self, path: str, verdict: Verdict, where: str = "", *, clause: int = 2, inside: bool = False) -> None:
        count = len(verdict.lost)
        if verdict.reordered.any():
            what = f"reorders its tokens{where} ({int(verdict.reordered.sum())} of {count})"
            self.fault(path, what, 3 if clause == 3 else 2, moves=True)
        if verdict.mixed.any():
            what = f"mixes its tokens{where} ({int(verdict.mixed.sum())} of {count})"
            self.fault(path, what, 2, moves=verdict.displaced and not inside)

    def read_input(self, block: Block, fitting: Sequence[tuple[Tensor, Reading]]) -> Tensor | None:
        """Judge the input of a block, and code it anew if its tokens do not have exactly their codes."""
        name = self.stack_of(block.path)
        stack, repeated = self._stacks.get(name) or self._passed_on(fitting), block.path in self.calls[:-1]
        returned, merged = self._returned.pop(name, None), None
        if stack is None or stack.is_unknown(fitting[0][1]):
            tensor, reading = self._preferred(fitting)[0]
            if stack is not None:
                merged = self._merged_order(stack, tensor, reading)
                self._refuse_merged(block.path, merged)
        else:
            verdict, tensor, reading = self._best(stack, fitting)
            if returned is not None and reading.layout != stack.layout:
                self._replaced(*returned)
            if verdict.wrong:
                before = self.calls[block.index - 1] if block.index else "its input"
                self._refuse(block.path, verdict, f" between {before} and its input")
            elif verdict.lost.all():
                if not repeated:  # otherwise it is another run; random weights may leave nothing but rounding
                    self.unchecked.append(block.path)
            elif verdict.lost.any():
                if reading.index is None and block.path in self._attended_blocks:
                    self.lost[block.index] = verdict.lost
                else:
                    self.fault(
                        block.path, f"gets constants instead of some tokens ({int(verdict.lost.sum())})", 2, moves=True
                    )
            elif verdict.exact and not stack.renewed:
                self._stacks[name] = stack
                return None
        self.needed = max(self.needed, code_bits(reading.layout))
        codes, group = striped_codes(reading.layout, self._random, self._bits), self._next_group()
        known = stack if stack is not None and stack.layout == reading.layout else None
        in_order = known is not None and known.in_order
        order = merged if known is None else known.order
        if order is not None:  # codes of merged patches differ if they are given to the grid
            codes = codes[:, order.argsort()]
        self._stacks[name] = stack = _Stack(reading.layout, codes, group, order=order, in_order=in_order)
        codes = stack.codes_of(reading)
        if reading.index is not None:
            codes = codes[:, reading.index.clamp_min(0)] & (reading.index >= 0)
        tokens = reading.arrange(tensor)
        replaced = tokens[:1].expand_as(tokens).clone()
        replaced[group] = coded(tokens[:1], codes, self._random)
        return reading.restore(replaced)

    def _merged_order(self, stack: _Stack, tensor: Tensor, reading: Reading) -> Tensor | None:
        """Return the place of each patch among tokens that were merged from those in another order; None if unclear."""
        cells = expected_codes(
            stack.codes[:, stack.order], stack.layout, reading.layout, stack.reach_to(reading.layout)
        )
        every = torch.arange(reading.layout.num_tokens, device="cpu")
        return _read_order(cells.allowed, self._seen(stack, tensor, reading), every)

    def _refuse_merged(self, path: str, order: Tensor | None) -> None:
        if order is None:
            self.fault(path, "does not merge its tokens to those of the next stage", 2, moves=True)

    def _next_group(self) -> slice:
        """Return the images that get the next codes."""
        first = 1 + self._coded % ((self.images - 1) // self._bits) * self._bits
        self._coded += 1
        return slice(first, first + self._bits)

    def read_output(self, path: str, tensors: Sequence[Tensor]) -> None:
        """Judge the output of a block."""
        name = self.stack_of(path)
        stack = self._stacks[name]
        fitting = self.found(tensors, path, (stack.layout,))
        if not fitting:
            self.unchecked.append(path)
            return
        if stack.is_unknown(fitting[0][1]):
            self._refuse_merged(path, self._merged_order(stack, *fitting[0]))
            return
        verdict, *_ = self._best(stack, fitting)
        self._refuse(path, verdict)
        if verdict.lost.any() and not verdict.lost.all():
            self._returned[name] = path, int(verdict.lost.sum())

    def read_inside(self, path: str, output: Any) -> None:
        """Judge the output of a module inside a block: its tokens may have no further bits."""
        block = self._blocks[-1].path
        stack = self._stacks[self.stack_of(block)]
        fitting = self.found(output, block, (stack.layout,), windowed=False)
        if fitting and not stack.is_unknown(fitting[0][1]):
            verdict, *_ = self._best(stack, fitting)
            if not verdict.reordered.any():
                self._refuse(path, verdict, inside=True)

    def read_values(self, name: str, values: Tensor, tokens: LayerTokens) -> None:
        """Judge the values that a module attends to."""
        stack = self._stacks[self.stack_of(self._blocks[-1].path)]
        reading = window_reading(values, tokens, self.images, heads=True)
        if reading is None or stack.is_unknown(reading):
            self.unchecked.append(name)
            return
        verdict = self._judge(stack, values, reading)
        index = reading.index if stack.order is None and reading.layout == stack.layout else None
        if verdict.reordered.any() and index is not None and not stack.in_order:
            stack.order, stack.renewed = _read_order(self._seen(stack, values, reading), stack.codes, index), True
            verdict = self._judge(stack, values, reading)
        elif index is not None:
            stack.in_order = True
        self._refuse(name, verdict, " before it attends to them", clause=3)
        if verdict.lost.any() and not verdict.wrong:
            what = f"attends to constants instead of its tokens ({int(verdict.lost.sum())} of {len(verdict.lost)})"
            self.fault(name, what, 3, moves=True)

    # -- statistics and convolutions ----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._stacks or torch.compiler.is_compiling():
            return super().__torch_function__(func, types, args, kwargs)
        name = function_name(func)
        if name == "group_norm" and len(args[0]) == self.images:
            return _frozen_group_norm(*args, **kwargs)
        output = super().__torch_function__(func, types, args, kwargs)
        operands = list(tensors_in([args, kwargs]))
        for stack in self._stacks.values():
            if (more := reach_of(name, args, kwargs, stack.layout)) is not None:
                stack.widen(more, merged=is_coarser(output, operands[0], stack.layout), finer=is_finer(name))
        operands = operands[:1] if name in BY_SHAPE else operands
        statistics = [each for each in operands if getattr(each, "_statistic", False)]
        if _is_statistic(name, args, kwargs):
            return self._frozen(output)
        if statistics:
            others = [each for each in operands if mark_of([each]) and not getattr(each, "_statistic", False)]
            if not others:
                for each in tensors_in(output):
                    each._statistic = True  # type: ignore[attr-defined]
            elif name not in _SCALING:
                self.suspect(f"adds a statistic of all tokens to its tokens ({name.strip('_')})", 2, moves=False)
        return output

    def _frozen(self, output: Any) -> Any:
        """Return statistics of all images as those of the first."""
        for each in tensors_in(output):
            if each.ndim and len(each) % self.images == 0:
                images = each.unflatten(0, (self.images, -1))
                images[1:] = images[:1].clone()
                each._statistic = True  # type: ignore[attr-defined]
        return output


def _read_order(seen: Tensor, codes: Tensor, index: Tensor) -> Tensor | None:
    """Return the place of each patch among the tokens with these codes [bits, tokens], if there is one for each.

    `seen` are the codes at some places [bits, places], and `index` the patch there, or −1.
    """
    numbers, tokens = code_numbers(codes).sort()
    wanted = code_numbers(seen[:, index >= 0])
    nearest = torch.searchsorted(numbers, wanted).clamp_max(len(numbers) - 1)
    place = torch.where(numbers[nearest] == wanted, tokens[nearest], -1)
    order = torch.full((codes.shape[1],), -1, device="cpu")
    order[index[index >= 0]] = place
    every = torch.arange(codes.shape[1], device="cpu")
    return order if torch.equal(order.sort().values, every) else None


def _is_statistic(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call of a torch function computes one value of all tokens for each channel."""
    if name in _TO_ONE:
        size = args[1] if len(args) > 1 else kwargs.get("output_size")
        return size in (1, (1, 1), [1, 1])
    if name not in _STATISTICS:
        return False
    source, place = args[0] if args else kwargs["input"], _STATISTICS[name]
    dims = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis"))
    if not isinstance(source, Tensor) or source.ndim not in (3, 4):
        return False
    axes = range(source.ndim) if dims is None else (dims,) if isinstance(dims, int) else dims
    over = {axis % source.ndim for axis in axes} - {0}
    return 1 in over if source.ndim == 3 else len(over) > 1


def _frozen_group_norm(
    given: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return `group_norm` with the mean and variance of the first image."""
    first = given[:1].reshape(1, num_groups, -1)
    mean, scale = first.mean(dim=2, keepdim=True), (first.var(dim=2, keepdim=True, unbiased=False) + eps).rsqrt()
    output = ((given.reshape(len(given), num_groups, -1) - mean) * scale).reshape(given.shape)
    shape = (1, -1, *[1] * (given.ndim - 2))
    output = output if weight is None else output * weight.reshape(shape)
    return output if bias is None else output + bias.reshape(shape)
