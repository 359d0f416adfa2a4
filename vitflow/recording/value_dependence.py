"""Value dependence: indices, masks and branches of a model that depend on the values of its image.

A torch function mode follows what is computed from the pixels. If nothing is chosen by values, every image of one size
runs the same program, so that what holds for noise holds for every image. A *step* is what changes by jumps: a result
that is not a floating point number, a rounded one, or a gate per token that is closed for some token.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitflow.models.calls import tensors_in

# Functions whose result leaves torch.
_LEAVING = {"item", "tolist", "numpy", "__array__", "equal", "allclose", "is_nonzero"}
_LEAVING |= {f"__{name}__" for name in ("bool", "int", "float", "index", "contains")}
# Functions that read only the shape or type of their tensors, or find invalid numbers, and those whose further
# tensors give a shape.
_SHAPE_ONLY = {"isnan", "isinf", "isfinite", "shape", "size", "dim", "numel", "stride", "dtype", "device", "layout"}
BY_SHAPE = {"to", "broadcast_to", "type_as", "expand_as", "view_as", "reshape_as"}
_ROUNDING = {"round", "floor", "ceil", "trunc", "fix", "sign", "heaviside", "floor_divide"}
_CLIPS = {"relu", "relu6", "clamp", "clip", "clamp_min", "clamp_max", "threshold", "hardtanh", "hardsigmoid"}
_INDEXING = {"__getitem__", "__setitem__", "gather", "embedding", "take", "take_along_dim", "masked_select"}
#: Choice of positions that change continuously with the image, as in deformable attention: it mixes tokens.
SAMPLED = "positions (grid_sample)"
_SORTING = {"sort", "topk", "argsort", "msort", "kthvalue", "unique", "nonzero", "multinomial", "bincount"}


class ValueDependence(TorchFunctionMode):
    """Function mode that follows the pixels of a run and notes what is chosen by their values.

    Each followed tensor has a mark: bit 0 for the pixels, and a bit for each attention that it is computed from. It has
    to be the innermost mode of the run.

    Args:
        choose: called with a description of each use of values.

    Attributes:
        bits: mark of the operands of the running function, and of its result.
    """

    def __init__(self, choose: Callable[[str], None]) -> None:
        super().__init__()
        self._choose = choose
        self.bits = 0

    def mark(self, tensors: Iterable[Tensor], bits: int) -> None:
        """Add bits to the marks of tensors."""
        for tensor in tensors:
            tensor._followed = mark_of([tensor]) | bits  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # flex_attention compiles itself
            return func(*args, **kwargs)
        operands = list(tensors_in([args, kwargs]))
        bits = mark_of(operands)
        name = function_name(func)
        if not bits or name in _SHAPE_ONLY or name.startswith("new_") or name.endswith("_like"):
            return func(*args, **kwargs)
        marked = [each for each in operands if mark_of([each])]
        if name in _LEAVING:
            self._choose(f"by a Python number ({name.strip('_')})")
            return func(*args, **kwargs)
        if name in BY_SHAPE:
            bits, marked = mark_of(operands[:1]), [each for each in operands[:1] if mark_of([each])]
        if (how := _choice(name, args, kwargs, marked)) is not None:
            self._choose(how)
        self.bits = bits
        output = func(*args, **kwargs)
        changed = operands[:1] if name == "__setitem__" else []
        for result in (*tensors_in(output), *changed):
            step = _is_step(name, result, marked)
            result._followed = self.bits  # type: ignore[attr-defined]
            result._step = step  # type: ignore[attr-defined]
        return output


def function_name(func: Any) -> str:
    """Return the name of a torch function, or of a property; without the sign of functions that work in place."""
    name: str = getattr(func, "__name__", "")
    name = func.__self__.__name__ if name == "__get__" else name
    return name if name.endswith("__") else name.removesuffix("_")


def mark_of(tensors: Iterable[Tensor]) -> int:
    """Return the bits of the marks of tensors; 0 if none is computed from the pixels."""
    bits = 0
    for tensor in tensors:
        bits |= getattr(tensor, "_followed", 0)
    return bits


def _is_jump(tensor: Tensor) -> bool:
    return getattr(tensor, "_step", False)


def _choice(name: str, args: Sequence[Any], kwargs: Any, marked: Sequence[Tensor]) -> str | None:
    """Return how a function chooses by values, or None."""
    steps = [each for each in marked if _is_jump(each)]
    if steps and (name in _INDEXING or name.startswith(("index", "scatter"))):
        return f"tokens by an index ({name.strip('_')})"
    if name in _SORTING and marked:
        source = marked[0]
        dim = kwargs.get("dim", next((each for each in args[1 + (name in ("topk", "kthvalue")) :][:1]), -1))
        by_channel = source.ndim > 2 and isinstance(dim, int) and dim % source.ndim == source.ndim - 1
        return None if by_channel and name in ("sort", "topk", "kthvalue", "argsort") else f"tokens by {name}"
    if name == "grid_sample" and len(args) > 1 and mark_of([args[1]]):
        return SAMPLED
    if name in ("cat", "stack", "concat", "copy"):
        return None
    others = [each for each in marked if not _is_jump(each)]
    if any(step.shape != other.shape for step in steps for other in others):
        return f"tokens by a mask or gate ({name.strip('_')})"
    return None


def _is_step(name: str, result: Tensor, marked: Sequence[Tensor]) -> bool:
    """Return True if a result changes by jumps."""
    if not (result.is_floating_point() or result.is_complex()) or name in _ROUNDING:
        return True
    shape = result.shape
    per_token = (
        (result.ndim == 3 and shape[-1] == 1 < shape[1])
        or (result.ndim == 4 and shape[1] == 1 < shape[2:].numel())
        or (result.ndim == 4 and shape[-1] == 1 < min(shape[1:3]))
    )
    if name in _CLIPS and per_token:
        return bool((result == 0).any())
    steps = [each for each in marked if _is_jump(each)]
    return bool(steps) and (len(steps) == len(marked) or per_token or result.ndim <= 2)
