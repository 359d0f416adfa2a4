"""A simulated CUDA device: what a program does on a GPU, checked on a machine without one.

The weights of a model and what is moved to "cuda" count as tensors of the device. They are computed on the CPU, but a
function of tensors of both devices fails, `numpy` of a tensor on the device as well, and all that waits for the device
is counted: copies in either direction (not those from pinned memory that do not block), Python numbers, and functions
whose result has a shape that depends on values.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vitflow import Explainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
_WAITING = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__contains__", "is_nonzero"}
_WAITING |= {"equal", "allclose", "nonzero", "argwhere", "masked_select", "unique"}
# Functions that take tensors of both devices.
_MIXING = {"copy_", "__getitem__", "__setitem__"}


class OnDevice(Tensor):
    """A tensor of the simulated device."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Accelerator(TorchFunctionMode):
    """Function mode that simulates the device; `waits` counts what waits for it, by function and line of vitflow."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._weights = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        self._pinned: list[Tensor] = []
        self.waits: Counter[str] = Counter()

    def _is_here(self, value: Tensor) -> bool:
        return isinstance(value, OnDevice | nn.Parameter) or value.untyped_storage().data_ptr() in self._weights

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func in (Tensor.device.__get__, Tensor.is_cuda.__get__, Tensor.is_cpu.__get__):
            device = CUDA if self._is_here(args[0]) else CPU
            return device if func == Tensor.device.__get__ else func == getattr(Tensor, f"is_{device.type}").__get__
        if name == "pin_memory":
            self._pinned.append(args[0].clone())
            return self._pinned[-1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = any(map(self._is_here, tensors))
        if name in ("to", "cpu"):
            return self._moved(name, func, here, args, kwargs)
        if here:
            self._check(name, args, [each for each in tensors if each.ndim and not self._is_here(each)])
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs, here = kwargs | {"device": CPU}, True
        return _marked(func(*args, **kwargs), here)

    def _moved(self, name, func, here, args, kwargs):
        """Copy a tensor to the device of an argument."""
        tensor, kinds, there = args[0], [], here
        for value in (*args[1:], *kwargs.values(), *([CPU] if name == "cpu" else [])):
            if isinstance(value, str | torch.device):
                there = torch.device(value).type == "cuda"
            elif isinstance(value, Tensor):
                there, value = self._is_here(value), value.dtype
            kinds += [value] if isinstance(value, torch.dtype) else []
        overlaps = kwargs.get("non_blocking") and any(tensor is each for each in self._pinned)
        if there != here and not overlaps:
            self._wait("to the device" if there else "to the CPU")
        result = tensor.to(*kinds) if kinds else tensor
        return _marked(result, True) if there else result.as_subclass(Tensor)

    def _check(self, name, args, others):
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert a tensor of the device to numpy: use Tensor.cpu().")
        if others and name not in _MIXING:
            raise RuntimeError(f"Expected all tensors on one device in {name}, got shape {tuple(others[0].shape)}.")
        masks = name in _MIXING and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        if name in _WAITING or masks:
            self._wait(name)

    def _wait(self, name):
        frame = sys._getframe(1)
        while frame.f_back is not None and f"{os.sep}vitflow{os.sep}" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.waits[f"{name} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"] += 1


def _marked(result, here):
    if not here or isinstance(result, torch.Size):
        return result
    return tree_map_only(Tensor, lambda each: each.as_subclass(OnDevice) if type(each) is Tensor else each, result)


@contextmanager
def simulated(explainer: Explainer) -> Iterator[Accelerator]:
    """Run an explainer on the simulated device; what it tries on noise has to be known from a run on the CPU."""
    before, explainer.device = explainer.device, CUDA
    random = {"get_rng_state": lambda *_: torch.get_rng_state(), "set_rng_state": lambda *_: None}
    try:
        with patch.multiple(torch.cuda, **random), Accelerator(explainer.model) as accelerator:
            yield accelerator
    finally:
        explainer.device = before
