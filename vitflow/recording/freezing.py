"""A function mode in which a running model is linear: its nonlinearities are constants of the autograd graph.

Constant are attention probabilities, the deviations of norms and the gates act(x)/x of activations. Constants that are
added to tensors of the graph (biases, class tokens, numbers) are multiplied by a scalar 1 of the graph.
"""

import math
from collections.abc import Callable, Sequence
from enum import Enum
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vitflow.errors import OTHER_METHODS, UnsupportedModelError
from vitflow.models.calls import tensors_in

# Names of functions as torch calls them, without underscores at their ends.
_CONSTANTS = {"softmax", "sigmoid", "hardsigmoid", "softplus", "exp", "rsqrt", "sqrt", "reciprocal", "std", "var"}
_CONSTANTS |= {"norm", "linalg_norm", "linalg_vector_norm", "rtruediv", "rdiv", "rpow"}
_ACTIVATIONS = {"relu", "leaky_relu", "relu6", "hardtanh", "gelu", "silu", "mish", "hardswish", "tanh", "erf", "elu"}
_ACTIVATIONS |= {"selu", "celu", "softsign", "square", "pow", "clamp", "clamp_min", "clamp_max", "clip"}
_PRODUCTS = {"mul", "multiply", "rmul", "imul", "matmul", "rmatmul", "bmm", "mm", "einsum"}
_QUOTIENTS = {"div", "divide", "true_divide", "truediv", "itruediv"}
# Of sums, positions of the arguments that are added.
_SUMS: dict[str, tuple[int, ...]] = dict.fromkeys(("add", "iadd", "radd", "sub", "isub", "rsub", "subtract"), (0, 1))
_SUMS |= dict.fromkeys(("linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))), (2,))
_SUMS |= {"where": (1, 2), "masked_fill": (2,)}
_SUMS |= dict.fromkeys(("addmm", "addbmm", "baddbmm", "cat", "concat", "concatenate", "stack"), (0,))
# Their names among keyword arguments.
_ADDED = ("bias", "other", "tensors", "value")
# Queries, keys and mask of scaled_dot_product_attention.
_SCORED = (0, 1, 3)
# Functions whose result is of the image only if their first argument is, and such as never are.
_LIKE = {"to", "type_as", "expand_as", "view_as", "reshape_as"}
_NEW = {f"{kind}_like" for kind in ("zeros", "ones", "full", "empty", "rand", "randn")}
_NEW |= {f"new_{kind}" for kind in ("zeros", "ones", "full", "empty", "tensor")}
# Functions that return numbers with which the model may go on outside of torch.
_LEAVING = {"numpy", "tolist", "item", "array"}
# torch's functional module, whose functions in Python call others when they are not overridden.
_FUNCTIONAL = vars(F) | {name: lambda *_: False for name in vars(F) if name.startswith("has_torch_function")}


class _Kind(Enum):
    """Kind of a tensor that is computed from the image: constant in the graph, linear, or a gate, as act(x) is."""

    CONSTANT = 0
    LINEAR = 1
    GATE = 2


class Freezing(TorchFunctionMode):
    """Function mode in which a model is linear from some tokens on.

    Attributes:
        one: factor of the constants that are added; None until the tokens are known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one: Tensor | None = None
        self._of_image: Any = WeakIdKeyDictionary()

    def begin(self, pixels: Tensor) -> Tensor:
        """Return the pixels that the model gets, from which the tensors of the image are computed."""
        self._of_image[pixels] = _Kind.CONSTANT
        return pixels

    def linear(self, tokens: Tensor) -> Tensor:
        """Return tokens from which the outputs are linear."""
        self._of_image[tokens] = _Kind.LINEAR
        return tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        given = args[:1] if name in _LIKE else (args, kwargs)
        inputs = [each for each in tensors_in(given) if each in self._of_image]
        if not inputs or name in _NEW:
            return func(*args, **kwargs)
        kinds = {self._of_image[each] for each in inputs} - {_Kind.CONSTANT}
        active = bool(kinds) and torch.is_grad_enabled()
        if name in _LEAVING and inputs[0].is_floating_point():
            raise UnsupportedModelError(
                f"The model calls {name}() on what it computes from the image, which has no gradient. {OTHER_METHODS}"
            )
        if active and isinstance(func, FunctionType) and func.__code__.co_filename == F.__file__:
            unrolled = FunctionType(func.__code__, _FUNCTIONAL, name, func.__defaults__, func.__closure__)
            unrolled.__kwdefaults__ = func.__kwdefaults__
            with self:
                return unrolled(*args, **kwargs)
        output = self._frozen(name, func, args, kwargs) if active else func(*args, **kwargs)
        kind = _Kind.GATE if name in _ACTIVATIONS or kinds == {_Kind.GATE} else _Kind.LINEAR
        for tensor in tensors_in(args[:1] if name == "setitem" else output):
            constant = not active or name in _CONSTANTS or not tensor.requires_grad
            self._of_image[tensor] = _Kind.CONSTANT if constant else kind
        return output

    def _frozen(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a function of tensors in the graph so that it is linear in these."""
        if name in _CONSTANTS:
            return self._constant(func, args, kwargs)
        if name in _ACTIVATIONS:
            x = next(tensors_in((args, kwargs)))
            return x * (self._constant(func, args, kwargs) / torch.where(x == 0, math.inf, x)).detach()
        if name in _PRODUCTS:
            return self._product(func, args, kwargs)
        if name in _QUOTIENTS:
            return func(args[0], *map(_detached, args[1:]), **{n: _detached(each) for n, each in kwargs.items()})
        if name in _SUMS:
            added = _SUMS[name]
            if _is_in_place(func):
                added = tuple(n for n in added if n)
            args = tuple(self._counted(each) if n in added else each for n, each in enumerate(args))
            return func(*args, **{n: self._counted(each) if n in _ADDED else each for n, each in kwargs.items()})
        if name == "scaled_dot_product_attention":
            args = tuple(_detached(each) if n in _SCORED else each for n, each in enumerate(args))
            frozen = {n: _detached(each) if n in ("query", "key", "attn_mask") else each for n, each in kwargs.items()}
            return func(*args, **frozen)
        if name in _NORMS:
            return _NORMS[name](self._counted, *args, **kwargs)
        return func(*args, **kwargs)

    def _constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a function outside of the graph; in place on a copy."""
        if _is_in_place(func):
            args = (args[0].clone(), *args[1:])
        with torch.no_grad():
            return func(*args, **kwargs)

    def _product(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiply two tensors of the graph, of which a gate is constant; so is one factor of a square."""
        kinds = [(each, self._of_image.get(each)) for each in tensors_in((args, kwargs))]
        factors = [(each, kind) for each, kind in kinds if kind in (_Kind.LINEAR, _Kind.GATE)]
        if len(factors) != 2:
            return func(*args, **kwargs)
        (first, kind), (second, other) = factors
        if first is second:
            return func(first.detach(), *args[1:], **kwargs)
        if kind is other:
            return func(*args, **kwargs)  # not linear
        constant = first if kind is _Kind.GATE else second

        def frozen(value: Any) -> Any:
            return value.detach() if value is constant else value

        return func(*map(frozen, args), **{name: frozen(value) for name, value in kwargs.items()})

    def _counted(self, value: Any) -> Any:
        """Return constants times the scalar in the graph."""
        if isinstance(value, list | tuple):
            return [self._counted(each) for each in value]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        constant = isinstance(value, Tensor) and value.is_floating_point() and value not in self._of_image
        return value * self.one if number or constant else value


def _is_in_place(func: Any) -> bool:
    return func.__name__ in ("__iadd__", "__isub__") or (func.__name__.endswith("_") and func.__name__[-2:] != "__")


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


# --- Norms with constant deviations, and gated units ------------------------------------------------------------------

# Multiplies constants by the scalar in the graph.
Counted = Callable[[Any], Any]


def _divided(x: Tensor, axes: tuple[int, ...], eps: float, *, centre: bool = True) -> Tensor:
    """Return a tensor divided by its deviation (or root mean square) over some axes, at least in float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(dim=axes, keepdim=True) if centre else wide
    divided: Tensor = centred * (centred.detach().square().mean(dim=axes, keepdim=True) + eps).rsqrt()
    return divided


def _affine(counted: Counted, x: Tensor, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return (x if bias is None else x + counted(bias)).to(like.dtype)


def _layer_norm(
    counted: Counted,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    return _affine(counted, _divided(x, tuple(range(-len(shape), 0)), eps), x, weight, bias)


def _rms_norm(
    counted: Counted, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(counted, _divided(x, tuple(range(-len(shape), 0)), eps, centre=False), x, weight, None)


def _group_norm(
    counted: Counted,
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    divided = _divided(x.unflatten(1, (groups, -1)).flatten(2), (2,), eps).reshape(x.shape)
    return _affine(counted, divided, x, *(_per_channel(each, x) for each in (weight, bias)))


def _batch_norm(
    counted: Counted,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    *settings: Any,
) -> Tensor:
    training, _, eps, *_ = settings
    if training:
        raise UnsupportedModelError("Batch norm computes statistics of the batch, so its images mix: use model.eval().")
    scale = (variance + eps).rsqrt() * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - mean * scale
    return _affine(counted, x, x, _per_channel(scale, x), _per_channel(shift, x))


def _per_channel(values: Tensor | None, x: Tensor) -> Any:
    return None if values is None else values.view(-1, *[1] * (x.ndim - 2))


def _glu(counted: Counted, x: Tensor, dim: int = -1) -> Tensor:
    values, gate = x.chunk(2, dim=dim)
    return values * gate.detach().sigmoid()


_NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
    "glu": _glu,
}
