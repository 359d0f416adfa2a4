"""Whether a model reads causally: found by changing a later token, and looking which earlier outputs move."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vitflow.models.languages import plain_numbers
from vitflow.recording.isolation import Hook, aside, device_of, evaluating

# As many tokens are read, a number that is unlikely to be one of heads; and these are changed, one at a time.
_LENGTH, _CHANGED = 11, (10, 6)
# What moves less, as a share of the largest number, is rounding: kernels may differ with what stands later.
_ROUNDING = 1e-5
_known: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def is_causal(model: nn.Module) -> bool:
    """Whether no token of a text sees a later one: the model is asked once, by three short passes.

    A token of a text is replaced by another. If what any module makes of an earlier token moves, the model looks ahead.

    Args:
        model: reads input_ids.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    >>> [is_causal(BertModel(BertConfig(is_decoder=writes, **sizes))) for writes in (False, True)]
    [False, True]
    """
    with evaluating(model):
        if model not in _known:
            _known[model] = _looks_back(model)
        return _known[model]


def _looks_back(model: nn.Module) -> bool:
    *numbers, other = plain_numbers(model, _LENGTH + 1)
    text = torch.tensor([numbers], device=device_of(model))
    with torch.no_grad(), aside():
        made = _made(model, text)
        for place in _CHANGED:
            changed = text.clone()
            changed[0, place] = other
            again = _made(model, changed)
            if any(_moves(made[name], again[name], place) for name in made.keys() & again.keys()):
                return False
    return True


def _made(model: nn.Module, text: Tensor) -> dict[tuple[str, int], Tensor]:
    """What each call of a module makes of each token, [1, tokens, width]."""
    made: dict[tuple[str, int], Tensor] = {}
    calls: Counter[str] = Counter()

    def keeping(name: str) -> Callable[..., None]:
        def keep(args: Any, output: Any) -> None:
            found = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else None
            if isinstance(found, Tensor) and found.ndim == 3 and found.shape[:2] == text.shape:
                calls[name] += 1
                made[name, calls[name]] = found.clone()  # as it is now: some are written to later

        return keep

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(Hook(module, keeping(name), before=False, in_aside=True).remove)
        model(input_ids=text)
    return made


def _moves(one: Tensor, other: Tensor, place: int) -> bool:
    """Whether outputs [1, tokens, width] differ before a place by more than rounding."""
    if one.shape != other.shape or not one.is_floating_point():
        return False
    least = max(_ROUNDING, 4 * torch.finfo(one.dtype).eps) * float(one.abs().max())
    return bool(((one - other)[:, :place].abs() > least).any())
