"""Forward passes with frozen nonlinearities, whose outputs are linear in the tokens of a block and the constants above.

Constants of the autograd graph are attention probabilities, the deviations of norms and the gates act(x)/x of
activations. Constants that are added to tensors of the graph (biases, class tokens, numbers) are multiplied by a scalar
1 of the graph. No list of functions can show that nothing was missed, so that each map is checked: output = Σ tokens ×
gradients + Σ constants × gradients.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vitflow.errors import OTHER_METHODS, ModelError, UnsupportedModelError
from vitflow.methods.frozen_gradient import contributions
from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_paths, block_paths_of
from vitflow.models.calls import tensors_in, tokens_of, with_tokens
from vitflow.recording.attention_kinds import refusal_of
from vitflow.recording.isolation import Hook, refuse_checkpointing
from vitflow.recording.parallel import layers_of_image
from vitflow.recording.places import place_features
from vitflow.recording.readout import HALF_SCALE, SAME_OUTPUT, is_same_output
from vitflow.recording.trace import Trace
from vitflow.recording.value_dependence import BY_SHAPE

# Names of functions as torch calls them, without underscores at their ends.
_CONSTANTS = {"softmax", "sigmoid", "hardsigmoid", "softplus", "exp", "rsqrt", "sqrt", "reciprocal", "std", "var"}
_CONSTANTS |= {"norm", "linalg_norm", "linalg_vector_norm", "rtruediv", "rdiv", "rpow"}
_ACTIVATIONS = {"relu", "leaky_relu", "relu6", "hardtanh", "gelu", "silu", "mish", "hardswish", "tanh", "erf", "elu"}
_ACTIVATIONS |= {"selu", "celu", "softsign", "square", "pow", "clamp", "clamp_min", "clamp_max", "clip"}
_PRODUCTS = {"mul", "multiply", "rmul", "imul", "matmul", "rmatmul", "bmm", "mm", "einsum"}
_QUOTIENTS = {"div", "divide", "true_divide", "truediv", "itruediv"}
# Of sums, positions of the arguments that are added, and their names among keyword arguments.
_SUMS: dict[str, tuple[int, ...]] = dict.fromkeys(("add", "iadd", "radd", "sub", "isub", "rsub", "subtract"), (0, 1))
_SUMS |= dict.fromkeys(("linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3))), (2,))
_SUMS |= dict.fromkeys(("addmm", "addbmm", "baddbmm", "cat", "concat", "concatenate", "stack"), (0,))
_SUMS |= {"where": (1, 2), "masked_fill": (2,)}
_ADDED = ("bias", "other", "tensors", "value")
# Functions that return numbers with which the model may go on outside of torch.
_LEAVING = {"numpy", "tolist", "item", "array"}
# torch's functional module, whose functions in Python call others when they are not overridden.
_FUNCTIONAL = vars(F) | {name: lambda *_: False for name in vars(F) if name.startswith("has_torch_function")}


@dataclass(frozen=True, slots=True, eq=False)
class FrozenPass:
    """A forward pass with frozen nonlinearities.

    Attributes:
        outputs: the explained outputs, [batch, outputs].
        blocks: paths of the chosen blocks, first block first.
        tokens: their outputs: [batch, tokens, channels], or with rows and columns instead of tokens.
        layouts: layout of these tokens, and True if their channels are last.
        ones: for each block, the factor of the constants that are added between it and the next one.
    """

    outputs: Tensor
    blocks: Sequence[str]
    tokens: Sequence[Tensor]
    layouts: Sequence[tuple[TokenLayout, bool]]
    ones: Sequence[Tensor]

    def contributions(self, weights: Tensor) -> list[Tensor]:
        """Return what each token of each block contributes to a sum of the outputs of its image, [batch, tokens].

        Args:
            weights: of the outputs in the sum, [batch, outputs].

        Raises:
            UnsupportedModelError: the contributions of tokens and constants do not add up to the sum.
        """
        # Another factor for each image, as errors of opposite targets would cancel.
        factors = torch.linspace(1.0, 2.0, len(weights)).to(weights).unsqueeze(1)
        factors *= HALF_SCALE if self.outputs.dtype == torch.float16 else 1.0
        weights = weights * factors
        gradients = torch.autograd.grad(
            self.outputs,
            [*self.tokens, *self.ones],
            weights.to(self.outputs),
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        total, count, parts = (self.outputs.detach().double() * weights).sum(), len(self.blocks), list[Tensor]()
        for n, (path, tokens, (_, last)) in enumerate(zip(self.blocks, self.tokens, self.layouts, strict=True)):
            part = contributions(tokens, gradients[n], axis=-1 if last else 1)
            constants = torch.stack(gradients[count + n :]).double().sum()
            missing = float((total - part.sum() - constants).abs() / part.abs().sum())
            if not missing <= SAME_OUTPUT[self.outputs.dtype.itemsize]:
                raise _refusal(
                    f"The tokens after {path} and the constants above do not add up to the output: {missing:.2g} of "
                    "the map is missing. There is a nonlinearity that cannot be frozen, or a path around this block"
                )
            parts.append(part / factors.to(part))
        return parts


def attending_blocks(trace: Trace) -> list[str]:
    """Return the paths of the blocks of the attention layers of a model, first block first.

    If the attention is not one between tokens, they are the blocks that the model declares.
    """
    model, names, call = trace.model, trace.names, trace.call
    if not names and call is not None:  # recorded without attention
        names = list(layers_of_image(call).shapes)
    declared = block_paths(model) if not names or refusal_of(model, names) is not None else []
    blocks = declared or list(dict.fromkeys(block_paths_of(model, names)))
    if not blocks:
        raise _refusal(f"{type(model).__name__} has no attention between tokens, and no list of blocks")
    return blocks


def frozen_pass(trace: Trace, blocks: Sequence[str]) -> FrozenPass:
    """Repeat a recorded pass with nonlinearities frozen from the first of some blocks on.

    Raises:
        UnsupportedModelError: the tokens of a block are not on a patch grid, or the outputs differ from those recorded.
    """
    call, expected = trace.call, trace.logits
    assert call is not None and expected is not None
    model, batch = type(call.model).__name__, len(call.pixels)
    tokens, ones, freezing = dict[str, Tensor](), list[Tensor](), Freezing()

    def freeze(path: str, args: Any, output: Any) -> Any:
        refuse_checkpointing(call.model)
        computed = tokens_of(output)
        if computed is None or path in tokens or len(computed) != batch or (tokens and not computed.requires_grad):
            raise _refusal(f"{path} of {model} runs several times, or not on tokens [batch, …] of the block before")
        torch.set_grad_enabled(True)  # until the experiment below ends
        tokens[path] = computed if tokens else freezing.mark(computed.detach().requires_grad_(), _Kind.LINEAR)
        kind = torch.promote_types(computed.dtype, torch.float32)
        freezing.one = torch.ones((), dtype=kind, device=computed.device, requires_grad=True)
        ones.append(freezing.one)
        # The model may change the copy in place.
        return with_tokens(output, freezing.mark(tokens[path].clone(), _Kind.LINEAR))

    # Created inside the experiment, in which they act.
    hooks = (Hook(call.model.get_submodule(path), partial(freeze, path), before=False, first=True) for path in blocks)
    with call.experiment(hooks, autocast=True), freezing:
        output = call(freezing.mark(call.pixels, _Kind.CONSTANT), same_images=True)
        try:
            outputs = trace.read(output)
        except ModelError as error:
            raise _refusal(f"The outputs of {model} cannot be computed with frozen nonlinearities ({error})") from error
    if list(tokens) != list(blocks) or outputs is None or not outputs.requires_grad:
        raise _refusal(f"The output of {model} is not computed from {' and then '.join(blocks)}, or by a softmax")
    if not is_same_output(expected, outputs):
        raise _refusal(f"{model} has another output if it runs again: it may be random, or change tensors in place")
    layouts = []
    for path, each in tokens.items():
        if each.shape[1] == batch > 1:  # the first axis may be that of tokens
            first = torch.zeros_like(outputs).index_fill_(0, torch.tensor(0, device=outputs.device), 1.0)
            [gradient] = torch.autograd.grad(outputs, [each], first, retain_graph=True)
            if gradient[1:].any():
                raise _refusal(f"The output of {model} for an image depends on all {batch} rows after {path}")
        if (placed := place_features(call, path, each, trace.known_layout)) is None:
            raise _refusal(f"The output of {path} in {model}, of shape {tuple(each.shape)}, has no patch grid")
        layouts.append(placed)
    return FrozenPass(outputs, list(blocks), list(tokens.values()), layouts, ones)


def _refusal(fact: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fact}, so frozen_gradient does not apply. {OTHER_METHODS}")


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
        self._kinds: Any = WeakIdKeyDictionary()

    def mark(self, tensor: Tensor, kind: _Kind) -> Tensor:
        """Return a tensor that is computed from the image, after marking it."""
        self._kinds[tensor] = kind
        return tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0].strip("_")
        inputs = [each for each in tensors_in(args[:1] if name in BY_SHAPE else (args, kwargs)) if each in self._kinds]
        if not inputs or name.endswith("_like"):
            return func(*args, **kwargs)
        if name in _LEAVING and inputs[0].is_floating_point():
            raise UnsupportedModelError(
                f"The model calls {name}() on what it computes from the image, which has no gradient. {OTHER_METHODS}"
            )
        kinds = {self._kinds[each] for each in inputs} - {_Kind.CONSTANT}
        active = bool(kinds) and torch.is_grad_enabled()
        written = _NORMS.get(name)
        if active and isinstance(func, FunctionType) and func.__code__.co_filename == F.__file__:
            written = FunctionType(func.__code__, _FUNCTIONAL, name, func.__defaults__, func.__closure__)
            written.__kwdefaults__ = func.__kwdefaults__
        if active and written is not None:
            with self:
                return written(*args, **kwargs)
        output = self._frozen(name, func, args, kwargs) if active else func(*args, **kwargs)
        kind = _Kind.GATE if name in _ACTIVATIONS or kinds == {_Kind.GATE} else _Kind.LINEAR
        for tensor in tensors_in(args[:1] if name == "setitem" else output):
            constant = not active or name in _CONSTANTS or not tensor.requires_grad
            self._kinds[tensor] = _Kind.CONSTANT if constant else kind
        return output

    def _frozen(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a function of tensors in the graph so that it is linear in these."""
        method, given = func.__name__, dict[int | str, Any](enumerate(args)) | kwargs
        in_place = method in ("__iadd__", "__isub__") or (method.endswith("_") and not method.endswith("__"))
        if name in _CONSTANTS or name in _ACTIVATIONS:
            x = next(tensors_in((args, kwargs)))
            with torch.no_grad():
                value = func(x.clone(), *args[1:], **kwargs) if in_place else func(*args, **kwargs)
                gate = value if name in _CONSTANTS else value / torch.where(x == 0, math.inf, x)
            return gate if name in _CONSTANTS else x * gate
        constants: set[int | str] = set()
        if name in _PRODUCTS:
            kinds = {key: self._kinds.get(each) for key, each in given.items() if isinstance(each, Tensor)}
            factors = [key for key, kind in kinds.items() if kind in (_Kind.LINEAR, _Kind.GATE)]
            gates = [key for key in factors if kinds[key] is _Kind.GATE]
            if len(factors) == 2 and given[factors[0]] is given[factors[1]]:
                constants = {factors[0]}  # of a square
            elif len(factors) == 2 and len(gates) == 1:
                constants = {gates[0]}
        elif name in _QUOTIENTS:
            constants = set(given) - {0}
        elif name == "scaled_dot_product_attention":
            constants = {0, 1, 3, "query", "key", "attn_mask"}
        added = {n for n in _SUMS.get(name, ()) if n or not in_place} | (set(_ADDED) if name in _SUMS else set())
        for key, value in given.items():
            if key in constants and isinstance(value, Tensor):
                given[key] = value.detach()
            elif key in added:
                given[key] = self._counted(value)
        return func(*map(given.__getitem__, range(len(args))), **{key: given[key] for key in kwargs})

    def _counted(self, value: Any) -> Any:
        """Return constants times the scalar in the graph."""
        if isinstance(value, list | tuple):
            return [self._counted(each) for each in value]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        constant = isinstance(value, Tensor) and value.is_floating_point() and value not in self._kinds
        return value * self.one if number or constant else value


# --- Norms by functions of torch that are frozen above ------------------------------------------------


def _divided(x: Tensor, axes: tuple[int, ...], eps: float) -> Tensor:
    """Return a tensor divided by its root mean square over some axes, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * (x.detach().square().mean(dim=axes, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, like: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(like.dtype)


def _layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    axes, wide = tuple(range(-len(shape), 0)), x.to(torch.promote_types(x.dtype, torch.float32))
    return _affine(_divided(wide - wide.mean(dim=axes, keepdim=True), axes, eps), x, weight, bias)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _affine(_divided(x, tuple(range(-len(shape), 0)), eps), x, weight, None)


def _group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_: Any,
) -> Tensor:
    cells = x.unflatten(1, (groups, -1)).flatten(2)
    normal = _layer_norm(cells, cells.shape[2:], eps=eps).reshape(x.shape)
    return _affine(normal, x, *(_per_channel(each, x) for each in (weight, bias)))


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, *settings: Any
) -> Tensor:
    training, _, eps, *_ = settings
    if training:
        raise UnsupportedModelError("Batch norm computes statistics of the batch, so its images mix: use model.eval().")
    scale = (variance + eps).rsqrt() * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - mean * scale
    return _affine(x, x, _per_channel(scale, x), _per_channel(shift, x))


def _per_channel(values: Tensor | None, x: Tensor) -> Any:
    return None if values is None else values.view(-1, *[1] * (x.ndim - 2))


_NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "batch_norm": _batch_norm,
}
