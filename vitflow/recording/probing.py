"""What a model makes of two fixed images, by which it is recognized whatever it is made of.

Weights and settings do not tell all that a model computes: it may hold lists, functions, tensors that are no weights,
hooks, or code that was edited since. Whatever of these counts shows in its answer, or in what its parts hand on.
"""

import base64
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitflow.models.anatomy import tensors_in
from vitflow.models.languages import plain_token_ids
from vitflow.models.libraries import forward_options
from vitflow.recording.isolation import Hook, aside, device_of, evaluating, uncompiled

# How far two processors may be apart in what a part of a model hands on, as a share of its size: some twenty times what
# was seen (1e-5 in float32). A tenth more of one attention shows as more than that.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 5e-2, torch.bfloat16: 0.25}
# The same of float32 on a GPU, where convolutions may be rounded to 10 bits.
_ROUNDING_ON_GPU = 5e-3
# What is handed on is summed up in so many numbers.
_SUMS = 8


# Runs a model on its input.
Forward = Callable[[Tensor], Any]


def probe(model: nn.Module, forward: Forward, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """What a model makes of two fixed images, and how exactly that may be expected again; None if it fails on them.

    One forward pass, of which the answer and the output of every module that holds others are summed up in a few
    numbers each. The model is left as it was, random numbers and buffers included.

    Args:
        model: the model.
        forward: runs it.
        shape: of an image, (channels, height, width).

    Returns:
        "parts", the sums (float32 in base 64) by the module's path, that of the answer being ""; and "rounding", the
        share of its size by which a sum may differ on another processor. Ready for JSON.
    """
    pixels = torch.cat([fixed_pixels(model, shape, seed) for seed in (0, 1)])
    sums = dict[str, NDArray[np.float64]]()

    def note(path: str, output: Any) -> None:
        found = _sums(output)
        if found is not None:
            sums[path] = sums.get(path, 0.0) + found

    holders = [(path, module) for path, module in model.named_modules() if path and module._modules]
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = [pixels.device] if pixels.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), np.errstate(all="ignore"), ExitStack() as hooks:
            for path, module in holders:
                hooks.callback(Hook(module, lambda _, output, path=path: note(path, output), before=False).remove)
            note("", answer_to(model, forward, pixels))
    except Exception:  # the same is told of each image, with its reason
        return None
    finally:
        with torch.no_grad():
            for buffer, value in before:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
    rounding = max(_ROUNDING.get(weight.dtype, 0.0) for weight in (torch.empty(0), *model.parameters()))
    if pixels.device.type != "cpu":
        rounding = max(rounding, _ROUNDING_ON_GPU)
    with np.errstate(all="ignore"):
        parts = {path: base64.b64encode(own.astype("<f4").tobytes()).decode() for path, own in sums.items()}
    return {"parts": parts, "rounding": rounding}


def fixed_pixels(model: nn.Module, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Model input of one image of random numbers, the same in every version of NumPy, where the model lies."""
    parameter = next(model.parameters(), torch.empty(0))
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((1, *shape)) / 2).to(parameter)


def answer_to(model: nn.Module, forward: Forward, pixels: Tensor) -> list[Tensor]:
    """All tensors that a model in eval mode returns for a model input."""
    with torch.inference_mode(False), torch.no_grad(), evaluating(model), uncompiled():
        return list(tensors_in(forward(pixels)))


def _sums(output: Any) -> NDArray[np.float64] | None:
    """Sums of the numbers of an output, each number in one of them, with signs that tell their order; and their size.

    None where there are no numbers.
    """
    flat = [one.detach().cpu().double().flatten().numpy() for one in tensors_in(output)]
    values = np.concatenate(flat) if flat else np.empty(0)
    if not len(values):
        return None
    values = np.pad(values * _signs(len(values)), (0, -len(values) % _SUMS)).reshape(-1, _SUMS)
    return np.append(values.sum(axis=0), math.sqrt(np.square(values).sum() / _SUMS))


@lru_cache(maxsize=2)
def _signs(count: int) -> NDArray[np.float64]:
    return np.random.RandomState(1).choice([-1.0, 1.0], count)


def same_model(one: Any, other: Any) -> bool:
    """Whether two probes, which may have been read from a file, are of one model, whatever processors they are from."""
    try:
        first, second = (
            {path: np.frombuffer(base64.b64decode(sums), "<f4") for path, sums in own["parts"].items()}
            for own in (one, other)
        )
        rounding = max(float(own["rounding"]) for own in (one, other))
        both = first.keys() & second.keys()
        sizes = {path: np.nan_to_num([first[path][-1], second[path][-1]]).max() for path in both}
        # What is next to nothing beside the largest is made of rounding alone.
        least = 1e-4 * max(sizes.values(), default=0.0)
        return ("" in first) is ("" in second) and all(
            first[path].shape == second[path].shape
            and np.allclose(first[path], second[path], 0.0, rounding * max(sizes[path], least), equal_nan=True)
            for path in both
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return bool(one == other)


# As many tokens are read, a number that is unlikely to be one of heads; and these are changed, one at a time.
_LENGTH, _CHANGED = 11, (10, 6)
# What moves less, as a share of the largest number, is rounding: kernels may differ with what stands later.
_LEAST_DIFFERENCE = 1e-5
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
    *numbers, other = plain_token_ids(model, _LENGTH + 1)
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
    least = max(_LEAST_DIFFERENCE, 4 * torch.finfo(one.dtype).eps) * float(one.abs().max())
    return bool(((one - other)[:, :place].abs() > least).any())


def answer_from(model: nn.Module, pixels: Tensor, path: str, tokens: Tensor) -> Any:
    """What a model returns where one of its modules gives these tokens instead of its own output.

    The model runs once more, without gradients up to that module; what it returns is differentiable by the tokens.

    Args:
        model: it is left as it was, also after an exception.
        pixels: the model inputs that the tokens were made of, [batch, channels, height, width].
        path: of the module, as a rule of the last block.
        tokens: of the shape of its output, or of the first of its outputs.

    >>> import timm
    >>> model = timm.create_model("test_vit").eval()
    >>> tokens = torch.zeros(1, 101, 64)
    >>> wanted = model.head(model.norm(tokens)[:, 0]).detach()
    >>> [float((answer_from(model, pixels, "blocks.5", tokens).detach() - wanted).abs().max())
    ...  for pixels in torch.randn(2, 1, 3, 160, 160)]
    [0.0, 0.0]
    """

    def give(args: Any, output: Any) -> Any:
        if output is None:  # an exception passes through
            return None
        torch.set_grad_enabled(True)  # until torch.no_grad() below is left
        return tokens if isinstance(output, Tensor) else (tokens, *output[1:])

    with torch.inference_mode(False), evaluating(model), torch.no_grad():
        hook = Hook(model.get_submodule(path), give, before=False)
        try:
            return model(pixels.detach(), **forward_options(model, (pixels.shape[-2], pixels.shape[-1])))
        finally:
            hook.remove()
