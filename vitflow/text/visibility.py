"""What a language model's tokens see: causality, and attention that is computed in chunks; measured by short runs."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import UnsupportedModelError
from vitflow.models.calls import tensors_in
from vitflow.models.parts import ModelState, model_cache, plain_token_ids
from vitflow.recording.experiment import Call, undisturbed
from vitflow.recording.isolation import Hook, device_of, hooked

# The number of tokens of a text (unlikely to be a number of heads), and of those after the word that is changed.
_LENGTH, _LATER = 11, (0, 4)
# Relative changes below this are rounding: kernels may depend on later tokens.
_LEAST_DIFFERENCE = 1e-5


def is_causal(model: nn.Module, length: int = _LENGTH) -> bool:
    """Return True if no token of a text sees a later one; determined once per model by three short forward passes.

    One word is replaced. The model is causal if no output of its modules changes for an earlier token, and if either
    those of later tokens change, or the model's own output has one row per token. Models that do not run on any number
    of tokens get `length`.
    """

    known = model_cache(model)
    if is_causal not in known:
        try:
            known[is_causal] = _test_causal(model, _LENGTH)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a model may require a multiple of some number of tokens
            known[is_causal] = _test_causal(model, length)
    causal: bool = known[is_causal]
    return causal


def _test_causal(model: nn.Module, length: int) -> bool:
    *ids, other = plain_token_ids(model, length + 1)
    text = torch.tensor([ids], device=device_of(model))
    seen = False  # something that a later token could have changed
    with Call(ModelState(model), (), {}, text).experiment():
        before = _token_outputs(model, text)
        for position in (length - 1 - count for count in _LATER if count < length):
            changed = text.clone()
            changed[0, position] = other
            after = _token_outputs(model, changed)
            moved = [_changed(before[name], after[name]) for name in before.keys() & after.keys()]
            if any(tokens[:position].any() for tokens in moved):
                return False
            seen |= ("", 1) in before or any(bool(tokens[position + 1 :].any()) for tokens in moved)
    return seen


def _token_outputs(model: nn.Module, text: Tensor) -> dict[tuple[str, int], Tensor]:
    """Return the outputs of each module call that have one token axis, [tokens, values]."""
    outputs: dict[tuple[str, int], Tensor] = {}
    calls: Counter[str] = Counter()

    def keep(name: str, args: Any, output: Any) -> None:
        tokens = next(tensors_in(output), None)
        if tokens is None or not tokens.is_floating_point():
            return
        axes = [axis for axis, size in enumerate(tokens.shape) if size == text.shape[1]]
        if len(axes) == 1 or (tokens.ndim == 3 and tokens.shape[:2] == text.shape):
            calls[name] += 1
            # Copied, as some are modified in place later.
            outputs[name, calls[name]] = tokens.movedim(min(axes), 0).flatten(1).clone()

    with hooked(Hook(module, partial(keep, name), before=False) for name, module in model.named_modules()):
        model(input_ids=text)
    return outputs


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Return which tokens of two outputs [tokens, values] differ by more than rounding, bool [tokens]."""
    if before.shape != after.shape or not before.numel():
        return before.new_zeros(len(before), dtype=torch.bool)
    least = max(_LEAST_DIFFERENCE, 4 * torch.finfo(before.dtype).eps) * float(before.abs().max())
    return (before - after).abs().amax(dim=1) > least


def whole_attention(
    name: str, module: nn.Module, call: Any, sizes: tuple[int, int], in_pieces: bool
) -> tuple[Tensor, Tensor] | None:
    """Measure the attention of a module that computes it in chunks of a text or with convolutions, for the recorder.

    Args:
        call: positional and keyword arguments of the module.
        sizes: the number of heads, and of tokens without those that fill the last chunk.
        in_pieces: True if attention was computed in several pieces.

    Returns:
        The matrix and the values, as `_measured_matrix`; None for other modules.
    """
    (args, kwargs), (heads, end), mixes = call, sizes, _has_wide_convolution(module)
    if not in_pieces and not mixes:
        return None
    measured = _measured_matrix(module, args, kwargs, heads)
    if measured is not None and (measured[0].shape[-1] < end or measured[0][..., :end, end:].any()):
        measured = None  # the tokens that fill the last chunk are seen
    if mixes if measured is None else (measured[0] < 0).any():
        raise UnsupportedModelError(
            f"{type(module).__name__} ({name}) also mixes tokens by a convolution, or by weights below 0 that "
            "approximate attention: rollout and flow do not support it. Use a model with full attention."
        )
    return measured


def _measured_matrix(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], heads: int
) -> tuple[Tensor, Tensor] | None:
    """Return the attention that a module applies, and its values, from its results for other values.

    The values are the output of the child whose doubling doubles the module's result. BigBird's own matrix is not used,
    as it omits keys that several chunks share.

    Returns:
        [batch, heads, tokens, tokens] and [batch, heads, tokens, width]; None if their product is not the result.
    """

    def run(child: nn.Module, change: Callable[[Tensor], Tensor]) -> Tensor:
        with hooked([Hook(child, lambda _, output: change(output), before=False)]):
            output = module(*args, **kwargs)
        result: Tensor = output[0] if isinstance(output, tuple) else output
        return result

    with undisturbed(module, args[0].device):
        for child in module.children():
            outputs: list[Tensor] = []
            result = run(child, lambda output, outputs=outputs: outputs.append(output))  # type: ignore[misc]
            same_shape = [each.shape for each in outputs] == [result.shape] and result.ndim == 3
            if not same_shape or not _equal(run(child, lambda output: 2 * output), 2 * result):
                continue
            values = outputs[0].unflatten(-1, (heads, -1)).transpose(1, 2)
            columns, (tokens, width) = [], values.shape[-2:]
            for first in range(0, tokens, width):
                units = torch.eye(tokens, width).to(values).roll(first, dims=0).repeat(1, heads)
                columns.append(run(child, lambda output, units=units: units.expand_as(output)))  # type: ignore[misc]
            matrix = torch.cat([each.unflatten(-1, (heads, -1)) for each in columns], dim=-1)[..., :tokens]
            matrix = matrix.transpose(1, 2)
            return (matrix, values) if _equal((matrix @ values).transpose(1, 2).flatten(2), result) else None
    return None


def _has_wide_convolution(module: nn.Module) -> bool:
    """Return True if a module has a convolution over several tokens among its children."""
    kinds = (nn.Conv1d, nn.Conv2d)
    return any(isinstance(child, kinds) and max(child.kernel_size) > 1 for child in module.children())


def _equal(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two results are equal up to rounding, relative to the largest."""
    rounding = 100 * torch.finfo(expected.dtype).eps
    return bool((actual - expected).abs().max() <= rounding * expected.abs().max())
