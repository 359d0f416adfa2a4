"""Causality of a language model: whether a token sees later ones, measured by short runs."""

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.models.calls import tensors_in
from vitflow.models.devices import device_of
from vitflow.models.parts import ModelState, model_cache, plain_token_ids
from vitflow.recording.experiment import Call
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
    known = model_cache(model)
    if is_causal not in known:
        known[is_causal] = _test_causal(model)
    causal: bool = known[is_causal]
    return causal


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
