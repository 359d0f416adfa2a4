"""Blocks that run on a few of their tokens: what is observed of a model on noise then costs little more than its head.

An observation asks which tokens a module reads or mixes, not for their values. So each block is given its first tokens
alone, and the others pass it unchanged. A block that needs all of its tokens fails or returns another shape; then the
observation runs on all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ShapeError
from vitflow.recording.isolation import Hook
from vitflow.recording.readout import tokens_of, with_tokens

#: How many tokens a block is given: a prime, so that no channels and no heads are taken for tokens.
FEW_TOKENS = 7


@contextmanager
def given_few(model: nn.Module, blocks: Sequence[str], whole: dict[str, Tensor]) -> Iterator[None]:
    """Give each block its first tokens alone; `whole` takes in all of them, by the path of the block."""

    def before(path: str) -> Callable[..., Any]:
        def act(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            every = [one for one in (*args, *kwargs.values()) if _is_long(one)]
            if not every:
                raise ShapeError(f"{path} is not given a sequence of tokens.")
            whole[path] = every[0]
            few = every[0][:, :FEW_TOKENS]
            kwargs = {name: few if one is every[0] else one for name, one in kwargs.items()}
            return tuple(few if one is every[0] else one for one in args), kwargs

        return act

    with ExitStack() as stack:
        for path in blocks:
            stack.callback(Hook(model.get_submodule(path), before(path), before=True, in_aside=True).remove)
        yield


@contextmanager
def returning_all(model: nn.Module, blocks: Sequence[str], whole: dict[str, Tensor]) -> Iterator[None]:
    """Let each block return all of its tokens: those that it was given, and the others as they were."""

    def after(path: str) -> Callable[..., Any]:
        def act(args: Any, output: Any) -> Any:
            if output is None:  # an exception passes through
                return None
            tokens, given = tokens_of(output), whole.pop(path)
            if tokens is None or tokens.shape != (len(given), FEW_TOKENS, given.shape[-1]):
                raise ShapeError(f"{path} returns another number of tokens than it was given.")
            return with_tokens(output, torch.cat([tokens, given[:, FEW_TOKENS:].to(tokens)], dim=1))

        return act

    with ExitStack() as stack:
        for path in blocks:
            stack.callback(Hook(model.get_submodule(path), after(path), before=False, in_aside=True).remove)
        yield


def _is_long(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_floating_point() and given.ndim == 3 and given.shape[1] > FEW_TOKENS
