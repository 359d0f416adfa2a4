"""Attention of a module that computes it in chunks, measured by running the module on unit vectors as its values."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.recording.isolation import Hook, hooked, undisturbed


def measure_matrix(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], heads: int
) -> tuple[Tensor, Tensor] | None:
    """Return the attention that a module applies, and its values, from its results for other values.

    The values are the output of the child whose doubling doubles the module's result. Models may return a matrix of
    their own, but BigBird's omits keys that several chunks share.

    Args:
        module, args, kwargs: the module and its arguments.
        heads: the number of heads.

    Returns:
        [batch, heads, tokens, tokens] and [batch, heads, tokens, width]; None if their product is not the result.
    """

    def run(child: nn.Module, change: Callable[[Tensor], Tensor]) -> Tensor:
        with hooked([Hook(child, lambda _, output: change(output), before=False, while_unrecorded=True)]):
            output = module(*args, **kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    with undisturbed(module, args[0].device):
        for child in module.children():
            outputs: list[Tensor] = []
            result = run(child, lambda output, outputs=outputs: outputs.append(output))  # type: ignore[misc]
            same_shape = [each.shape for each in outputs] == [result.shape] and result.ndim == 3
            if not same_shape or not _agree(run(child, lambda output: 2 * output), 2 * result):
                continue
            values = outputs[0].unflatten(-1, (heads, -1)).transpose(1, 2)
            columns, (tokens, width) = [], values.shape[-2:]
            for first in range(0, tokens, width):
                units = torch.eye(tokens, width).to(values).roll(first, dims=0).repeat(1, heads)
                columns.append(run(child, lambda output, units=units: units.expand_as(output)))  # type: ignore[misc]
            matrix = torch.cat([each.unflatten(-1, (heads, -1)) for each in columns], dim=-1)[..., :tokens]
            matrix = matrix.transpose(1, 2)
            return (matrix, values) if _agree((matrix @ values).transpose(1, 2).flatten(2), result) else None
    return None


def has_wide_convolution(module: nn.Module) -> bool:
    """Return True if a module has a convolution over several tokens among its children."""
    kinds = (nn.Conv1d, nn.Conv2d)
    return any(isinstance(child, kinds) and max(child.kernel_size) > 1 for child in module.children())


def _agree(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two results are equal up to rounding, relative to the largest."""
    rounding = 100 * torch.finfo(expected.dtype).eps
    return bool((actual - expected).abs().max() <= rounding * expected.abs().max())
