"""Tokens between the blocks of a pass: the input of each is compared with the output of the one before it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.models.calls import tensors_in, tokens_of
from vitflow.recording.head import HeadWatch

# Step between the entries of tokens that are compared: a prime below the width of tokens.
_STRIDE = 31


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """Two blocks between which the tokens change: the next input is another tensor with other values.

    `given` is that input, in the graph if it is cut; `leaves` are then the outputs of all blocks before, lowest first,
    and `returned` is the output of the block below, if it is known.
    """

    below: str
    above: str
    given: Tensor
    leaves: Sequence[Tensor]
    returned: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """Tokens that a block returned, with their version, some of their entries, and a copy if it is kept."""

    path: str
    tokens: Tensor
    version: int
    sample: Tensor
    copy: Tensor | None


class BlockWatch(HeadWatch):
    """Hooks that also compare the input of each block with the output of the block before it.

    Args:
        shifts: added to the output of the block of each call with this index; outputs are kept if it is not None.

    Attributes:
        changed: where tokens change, by the index of the call of the block above.
        sizes: how many numbers each block got and returned, with its path, in order.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[str] = (),
        *,
        cut: bool = False,
        gradients: bool = False,
        shifts: Mapping[int, Tensor] | None = None,
    ) -> None:
        self._shifts = shifts
        super().__init__(model, blocks, cut=cut, gradients=gradients)

    def reset(self) -> None:
        """Forget the previous forward pass."""
        super().reset()
        self.changed: dict[int, Boundary] = {}
        self.sizes: list[tuple[str, int]] = []
        self._last: _Output | None = None
        self._samples: list[tuple[str, str, Tensor, Tensor]] = []  # of tensors that should be the same

    def entered(self, path: str, args: Any, kwargs: Any) -> None:
        """Compare the arguments of a block with what the block before it returned."""
        entered = tokens_of(args or kwargs.get("hidden_states"))
        self.sizes += [] if entered is None else [(path, entered.numel())]
        last, self._last = self._last, None
        if last is not None and last.tokens.numel():
            self._compare([args, kwargs], last)

    def passed_on(self, tokens: Tensor) -> Tensor:
        """Return the output of a block with its shift."""
        shift = (self._shifts or {}).get(len(self.calls) - 1)
        return tokens if shift is None else tokens + shift

    def left(self, path: str) -> None:
        """Keep what a block returned."""
        if (tokens := self.tokens) is not None:
            self.sizes.append((path, tokens.numel()))
            kept = None if self._shifts is None else tokens.detach().clone()
            self._last = _Output(path, tokens, _version(tokens), _sample(tokens), kept)

    def _compare(self, arguments: Any, last: "_Output") -> None:
        """Compare the arguments of the running block with the tokens that the block below returned."""
        tokens, above = last.tokens, self.calls[-1]
        given = _like(arguments, tokens)
        same = next((value for value in given if _is_same(value, tokens, last.version)), None)
        if same is not None:
            self._samples.append((last.path, above, last.sample, _sample(same)))
        elif given:
            differs = not tokens.is_meta and not torch.equal(given[0], tokens)
            if differs or _version(tokens) != last.version:  # other values, or changed in place
                leaves = [each.tokens for each in self.seen if each.cut]
                copy = given[0].clone() if leaves else given[0]  # the block may change it in place
                unchanged = _version(tokens) == last.version and torch.equal(_sample(tokens), last.sample)
                returned = tokens.detach() if unchanged and last.copy is None else last.copy
                self.changed[len(self.calls) - 1] = Boundary(last.path, above, copy, leaves, returned)

    def written(self) -> tuple[str, str] | None:
        """Return the blocks between which tokens were changed in place without autograd, as by `.data`; or None."""
        samples = [each for each in self._samples if not each[2].is_meta]
        if not samples:
            return None
        device = samples[0][2].device
        before, after = (torch.cat([each.to(device) for each in side]) for side in list(zip(*samples, strict=True))[2:])
        if torch.equal(before, after) or not len(changed := ((before != after) & ~before.isnan()).nonzero()):
            return None
        ends = accumulate(each[2].numel() for each in samples)
        return next(each[:2] for each, end in zip(samples, ends, strict=True) if changed[0] < end)


def _like(given: Any, tokens: Tensor) -> list[Tensor]:
    """Return the tensors among arguments with the shape of tokens; if there is none, those with as many entries."""
    tensors = [value for value in tensors_in(given) if value.dtype == tokens.dtype and value.numel() == tokens.numel()]
    return [value for value in tensors if value.shape == tokens.shape] or tensors


def _sample(tokens: Tensor) -> Tensor:
    """Return a copy of some entries of each token."""
    return tokens.detach().reshape(-1)[::_STRIDE].clone()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_same(tensor: Tensor, other: Tensor, version: int) -> bool:
    """Return True if a tensor is the other one, or a view of it, unchanged since it had this version."""
    in_order = (tensor.is_contiguous() and other.is_contiguous()) or tensor.stride() == other.stride()
    same = tensor is other or (tensor.data_ptr() == other.data_ptr() and in_order)
    return same and tensor.dtype == other.dtype and _version(tensor) == version
