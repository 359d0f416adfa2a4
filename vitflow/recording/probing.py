"""Runs of a model besides the recorded one: on noise, on a few tokens, from given tokens."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitflow.errors import ShapeError
from vitflow.models.anatomy import forward_options
from vitflow.models.calls import tensors_in
from vitflow.models.parts import model_cache, plain_token_ids, runs_compiled
from vitflow.recording.heads import HeadGraph, HeadInputs, tokens_of, with_tokens
from vitflow.recording.isolation import Hook, device_of, evaluating, hooked, trial, uncompiled

# The number of tokens (unlikely to be a number of heads), and of those after the token that is changed.
_LENGTH, _LATER = 11, (0, 4)
# Relative changes below this are rounding: kernels may depend on later tokens.
_LEAST_DIFFERENCE = 1e-5


def is_causal(model: nn.Module, length: int = _LENGTH) -> bool:
    """Return True if no token sees a later one; determined once per model by three short forward passes.

    One token is replaced. The model is causal if no output of its modules changes for an earlier token, and if either
    those of later tokens change, or the model's own output has one row per token.

    Args:
        model: a model with `input_ids`.
        length: a number of tokens that the model accepts, if it does not run on any.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    >>> [is_causal(BertModel(BertConfig(is_decoder=writes, **sizes))) for writes in (False, True)]
    [False, True]
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
    with trial(model, text.device):
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

    with hooked(
        Hook(module, partial(keep, name), before=False, while_unrecorded=True) for name, module in model.named_modules()
    ):
        model(input_ids=text)
    return outputs


def _changed(before: Tensor, after: Tensor) -> Tensor:
    """Return which tokens of two outputs [tokens, values] differ by more than rounding, bool [tokens]."""
    if before.shape != after.shape or not before.numel():
        return before.new_zeros(len(before), dtype=torch.bool)
    least = max(_LEAST_DIFFERENCE, 4 * torch.finfo(before.dtype).eps) * float(before.abs().max())
    return (before - after).abs().amax(dim=1) > least


@dataclass(frozen=True, eq=False)
class Call:
    """A model call that can be repeated on other pixels.

    Attributes:
        model, args, kwargs: the called model and its arguments.
        pixels: the model input among these.
        autocast: state of autocast during the call: enabled, and its type.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pixels: Tensor
    autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)

    @cached_property
    def cache(self) -> dict[Any, Any]:
        """Results of experiments with the model and its weights as they are now; see `model_cache`."""
        return model_cache(self.model)

    def __call__(self, other: Tensor, *, same_images: bool = False) -> Any:
        """Return the model's output for other pixels, whose further inputs are those of the first image.

        With `same_images`, the pixels are those of the call, and further inputs remain.
        """

        def replaced(value: Any) -> Any:
            if value is self.pixels:
                return other.clone()  # the model may change it in place
            of_images = isinstance(value, Tensor) and value.ndim > 0 and len(value) == len(self.pixels)
            of_images = of_images and not same_images
            return value[:1].expand(len(other), *value.shape[1:]) if of_images else value

        args, kwargs = tuple(map(replaced, self.args)), {name: replaced(value) for name, value in self.kwargs.items()}
        weights = chain(self.model.named_parameters(), self.model.named_buffers())
        # Inference tensors do not support gradients, but their copies do.
        copies = {name: weight.clone() for name, weight in weights if weight.is_inference()}
        return functional_call(self.model, copies, args, kwargs) if copies else self.model(*args, **kwargs)

    def noise(self, images: int) -> Tensor:
        """Return different random pixels for some images, the same each time."""
        noise = torch.randn(images, *self.pixels.shape[1:], generator=torch.Generator().manual_seed(0), device="cpu")
        return noise.to(self.pixels.device, self.pixels.dtype)


def repeated(call: Call, blocks: Sequence[str], read: Callable[[Any], Tensor | None]) -> tuple[Any, HeadGraph | None]:
    """Repeat a recorded call, with gradients in the head alone.

    Args:
        call: the call of the unwrapped model.
        blocks: paths of its blocks, which run without gradients.
        read: maps the output of the model to its explained outputs.

    Returns:
        The explained outputs, and the graph of the head; None if it has no gradients.
    """
    inputs, device = HeadInputs(call.model, blocks, repeats=True), call.pixels.device
    enabled, dtype = call.autocast
    with (
        torch.inference_mode(False),
        trial(call.model, device),
        torch.autocast(device.type, dtype=dtype, enabled=enabled),
        torch.enable_grad(),
        uncompiled() if runs_compiled(call.model) else nullcontext(),
        hooked(inputs.hooks()),
    ):
        outputs = read(call(inputs.begin(call.pixels), same_images=True))
    return outputs, inputs.graph(blocks)


#: The number of tokens per block: a prime, to distinguish tokens from channels and heads.
FEW_TOKENS = 7


@contextmanager
def on_few_tokens(model: nn.Module, blocks: Sequence[str]) -> Iterator[None]:
    """Run each block on its first tokens only; the other tokens are returned unchanged."""
    inputs: dict[str, Tensor] = {}  # all tokens, by block path

    def shorten(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        every = next((value for value in (*args, *kwargs.values()) if _is_long(value)), None)
        if every is None:
            raise ShapeError(f"The input of {path} is not a sequence of tokens.")
        inputs[path], few = every, every[:, :FEW_TOKENS]
        kwargs = {name: few if value is every else value for name, value in kwargs.items()}
        return tuple(few if value is every else value for value in args), kwargs

    def extend(path: str, args: Any, output: Any) -> Any:
        tokens, every = tokens_of(output), inputs.pop(path)
        if tokens is None or tokens.shape != (len(every), FEW_TOKENS, every.shape[-1]):
            raise ShapeError(f"{path} changes the number of tokens.")
        return with_tokens(output, torch.cat([tokens, every[:, FEW_TOKENS:].to(tokens)], dim=1))

    with hooked(
        Hook(model.get_submodule(path), partial(act, path), before=act is shorten, while_unrecorded=True)
        for path in blocks
        for act in (shorten, extend)
    ):
        yield


def _is_long(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim == 3 and value.shape[1] > FEW_TOKENS


def output_from_tokens(model: nn.Module, pixels: Tensor, path: str, tokens: Tensor) -> Any:
    """Return a model's output with the output of one module replaced by these tokens.

    The model runs once more, without gradients up to that module; its output is differentiable by the tokens.

    Args:
        model: the model; its state is restored, also after an exception.
        pixels: the model inputs of the tokens, [batch, channels, height, width].
        path: path of the module, usually of the last block.
        tokens: replacement for its output, or for the first of its outputs.

    >>> import timm
    >>> model = timm.create_model("test_vit").eval()
    >>> tokens = torch.zeros(1, 101, 64)
    >>> expected = model.head(model.norm(tokens)[:, 0]).detach()
    >>> [float((output_from_tokens(model, pixels, "blocks.5", tokens).detach() - expected).abs().max())
    ...  for pixels in torch.randn(2, 1, 3, 160, 160)]
    [0.0, 0.0]
    """

    def give(args: Any, output: Any) -> Any:
        torch.set_grad_enabled(True)  # until torch.no_grad() below ends
        return with_tokens(output, tokens)

    hook = Hook(model.get_submodule(path), give, before=False)
    with hooked([hook]), torch.inference_mode(False), evaluating(model), torch.no_grad():
        return model(pixels.detach().clone(), **forward_options(model, (pixels.shape[-2], pixels.shape[-1])))
