"""Experiments: runs of a model besides the recorded one, on noise or on the same images, that leave it unchanged.

The docstring of the package lists the experiments. Results on noise are cached with the weights; see `ModelState`.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from vitflow.models.devices import autocast_kind
from vitflow.models.parts import ModelState, Result, modules_of, runs_compiled
from vitflow.recording.isolation import (
    ContiguousNorms,
    Hook,
    evaluating,
    hooked,
    recordable_attention,
    uncompiled,
    unrecorded,
)

# The largest number of entries of an argument by which calls are told apart.
_SMALL = 2**16
# Containers whose changes are undone, and part of the names of those that other threads may change.
_CONTAINERS, _HOOKS = (dict, OrderedDict, defaultdict, list, set), "_hooks"


class Finished(Exception):
    """Ends a run of a model when all that it should show is known."""


@dataclass(frozen=True, eq=False)
class Call:
    """A call that experiments repeat; `pixels` is the input among its arguments, `autocast` its state and type.

    `state` is the model as it was when the call began.
    """

    state: ModelState
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pixels: Tensor
    autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16)

    @property
    def model(self) -> nn.Module:
        """The model, without wrappers."""
        return self.state.model

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the model input."""
        return self.pixels.shape[-2], self.pixels.shape[-1]

    def cached(self, key: Any, experiment: Callable[[], Result]) -> Result:
        """Return the result of an experiment, cached with the state of the model; it runs if there is none."""
        return self.state.cached((key, self._further), experiment)

    def known(self, key: Any) -> Any:
        """Return the cached result of an experiment, or None."""
        return self.state.cache.get((key, self._further))

    @cached_property
    def _further(self) -> tuple[Any, ...]:
        """What identifies the arguments besides the pixels, as a mask may change what a model computes."""
        given = (*((None, value) for value in self.args), *sorted(self.kwargs.items()))
        return tuple((name, _identity(value)) for name, value in given if value is not self.pixels)

    @contextmanager
    def experiment(
        self, hooks: Iterable[Hook] = (), *, gradients: bool = False, autocast: bool = False
    ) -> Iterator[None]:
        """Run the model inside the block with these hooks, undisturbed, eagerly and unrecorded.

        Autocast is disabled, or with `autocast` that of the call.
        """
        (enabled, dtype), device, modules = self.autocast, self.pixels.device, modules_of(self.model)
        with (
            torch.inference_mode(False),
            torch.autocast(autocast_kind(device), dtype=dtype, enabled=autocast and enabled),
            undisturbed(self.model, device),
            recordable_attention(modules),
            torch.enable_grad() if gradients else nullcontext(),
            uncompiled() if runs_compiled(modules) else nullcontext(),
            hooked(hooks),
        ):
            yield

    def __call__(self, other: Tensor, *, same_images: bool = False) -> Any:
        """Return the output for other pixels, whose further inputs are those of the first image.

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
        noise = torch.randn(images, *self.pixels.shape[1:], generator=torch.Generator().manual_seed(61), device="cpu")
        return noise.to(self.pixels.device, self.pixels.dtype)


def _identity(value: Any) -> Any:
    """Return the shape and values of a tensor that is not large, a plain value, or the type of another object."""
    if isinstance(value, Tensor):
        small = not value.is_meta and value.numel() <= _SMALL
        entries = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if small else b""
        return tuple(value.shape), value.dtype, entries
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run a model without side effects and gradients: under its lock, in eval mode, and unrecorded.

    Its modules, buffers, attributes (also containers and plain tensors) and the random state are restored.
    """
    kind = autocast_kind(device)
    with (
        torch.no_grad(),
        torch.random.fork_rng([] if kind == "cpu" else [device], device_type="cuda" if kind == "cpu" else kind),
        evaluating(model),
        unrecorded(),
        ContiguousNorms(),
    ):
        kept = list(_contents(modules_of(model)))
        try:
            yield
        finally:
            for value, before in kept:
                _restore(value, before)


def _contents(modules: Iterable[nn.Module]) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes of modules, and the containers and tensors in them, with copies of their contents."""
    seen, waiting = set[int](), [vars(module) for module in modules]
    while waiting:
        value: Any = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if type(value) is Tensor and not value.is_meta and not value.is_quantized and value.layout == torch.strided:
            yield value, value.detach().clone()
        elif type(value) in _CONTAINERS:
            before = value.copy()
            if isinstance(value, dict):
                before = {name: each for name, each in before.items() if _HOOKS not in str(name)}
            yield value, before
            waiting += before.values() if isinstance(value, dict) else before


def _restore(value: Any, before: Any) -> None:
    """Undo the changes of a tensor, a dictionary, a set or a list."""
    if isinstance(value, Tensor):
        if not torch.equal(value, before):
            value.resize_(before.shape).copy_(before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, set):
        if value != before:  # otherwise its order would change, and with it the key of the model's cache
            value.clear()
            value.update(before)
    else:
        for name in [name for name in value if name not in before and _HOOKS not in str(name)]:
            del value[name]
        value.update(before)
