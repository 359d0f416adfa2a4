"""What the tokens of a language model see: causality, and attention in blocks of a text; measured by short runs."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.models.calls import tensors_in
from vitflow.models.devices import device_of
from vitflow.models.parts import ModelState, plain_token_ids
from vitflow.recording.experiment import Call, undisturbed
from vitflow.recording.isolation import Hook, hooked

# The number of tokens of a text (unlikely to be a number of heads), and of those after the word that is changed.
_LENGTH, _LATER = 11, (0, 4)
# Relative changes below this are rounding: kernels may depend on later tokens.
_LEAST_DIFFERENCE = 1e-5


def is_causal(model: nn.Module) -> bool:
    """Return True if no token of a text sees a later one; determined once per model by three short forward passes.

    One word is replaced. The model is causal if no output of its modules changes for an earlier token, and if either
    those of later tokens change, or the model's own output has one row per token.
    """
    return ModelState(model).cached(is_causal, lambda: _test_causal(model))


def _test_causal(model: nn.Module) -> bool:
    *ids, other = plain_token_ids(model, _LENGTH + 1)
    text = torch.tensor([ids], device=device_of(model))
    seen = False  # something that a later token could have changed
    with Call(ModelState(model), (), {}, text).experiment():
        before = _token_outputs(model, text)
        for position in (_LENGTH - 1 - count for count in _LATER):
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


def whole_attention(module: nn.Module, args: Sequence[Any], heads: int) -> tuple[Tensor, Tensor] | None:
    """Measure the attention of a module that computes it in blocks of a text, such as BigBird, for the recorder.

    Its result is computed from unit vectors in place of the values. The matrix that BigBird returns omits keys that
    several blocks share.

    Returns:
        Matrix [batch, heads, tokens, tokens] and values [batch, heads, tokens, width], or None if their product is not
        the result, or weights are below 0.
    """
    child = module._modules.get("value")
    if child is None or not args:
        return None

    def run(change: Callable[[Tensor], Tensor | None]) -> Tensor:
        with hooked([Hook(child, lambda _, output: change(output), before=False)]):
            return next(tensors_in(module(*args)))

    with undisturbed(module, args[0].device):
        kept = list[Tensor]()
        result = run(kept.append)
        values = kept[0].unflatten(-1, (heads, -1)).transpose(1, 2)
        columns, (tokens, width) = list[Tensor](), values.shape[-2:]
        for first in range(0, tokens, width):
            units = torch.eye(tokens, width).to(values).roll(first, dims=0).repeat(1, heads)
            columns.append(run(units.expand_as).unflatten(-1, (heads, -1)))
        matrix = torch.cat(columns, dim=-1)[..., :tokens].transpose(1, 2)
        apart = ((matrix @ values).transpose(1, 2).flatten(2) - result).abs().max()
    rounding = 100 * torch.finfo(result.dtype).eps * result.abs().max()
    return None if apart > rounding or matrix.min() < 0 else (matrix, values)
