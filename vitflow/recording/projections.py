"""The output projection of a running attention module: the linear map that it computes, not only the weight it stores.

Adapters, hooks, quantisation and parametrizations change what a projection computes. Unless it is a plain layer of
torch, each call by the model is compared with the stored weight, by one product with a vector. Only if they differ is
the map measured, by running the projection on unit vectors.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from types import NoneType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from vitflow.errors import ValueNormsError
from vitflow.methods.gradients import Values, at_least_float32
from vitflow.models.anatomy import has_other_forward, output_projection, projection_weight
from vitflow.models.calls import tokens_of
from vitflow.models.parts import foreign_hooks, model_cache, modules_of
from vitflow.recording.experiment import undisturbed
from vitflow.recording.isolation import Hook, autocast_state, device_of, unrecorded

# Rounding of outputs, relative to these: in float32, with TF32 (10 bits, on a GPU), in multiples of a type's precision.
_ROUNDING, _TF32, _OF_TYPE = 1e-5, 2.0**-8, 4
# Deviation of a measured map from the model's outputs, relative to the product: 8-bit rounding of inputs is below it.
_LINEAR = 0.05
# Models of which a pass could not be weighted; `model_cache` tells if they are still the same.
_refused: WeakSet[nn.Module] = WeakSet()
# Types without functions of their own; forward methods that multiply by the stored weight.
_PLAIN = (Tensor, nn.Parameter, NoneType)
_PRODUCTS = (nn.Linear.forward, nn.Conv2d.forward)


def remember_refusal(model: nn.Module, error: ValueNormsError) -> None:
    """Keep the reason why a model cannot be weighted while its weights, modules and hooks are unchanged."""
    _refused.add(model)
    model_cache(model)[_refusal_key(model)] = error.args[0]


def check_weighting(model: nn.Module) -> None:
    """Raise the ValueNormsError of an earlier pass, so that the model does not run in vain."""
    if model in _refused and (reason := model_cache(model).get(_refusal_key(model))):
        raise ValueNormsError(reason)


def _refusal_key(model: nn.Module) -> Any:
    return ValueNormsError, autocast_state(device_of(model))


class Projection:
    """Output projection of one attention module while the model runs; ValueNormsError if there is none.

    `around` is the module that contains the attention module. `outside` is True if the projection is in it, and runs
    after the attention module. With `shared`, the module contains several attention modules, and projects their
    results together: concatenated, or their sum.
    """

    def __init__(self, module: nn.Module, name: str, around: nn.Module | None, *, shared: bool = False) -> None:
        self._error = ValueNormsError(
            f"Value weighting requires one linear output projection as the output of each attention module, which "
            f"{type(module).__name__} ({name}) does not have."
        )
        projection = output_projection(module, around)
        if projection is None:
            raise self._error
        self._module, self._groups = projection, getattr(module, "num_key_value_groups", 1)
        self.outside = all(part is not projection for part in module._modules.values())
        self._input: Tensor | None = None
        self._measured: Tensor | None = None
        self._rows: Tensor | None = None  # the latest input
        self._is_linear = True
        self._hooks: list[Hook] = []
        self._returned: Tensor | None = None
        self._reads_returned = has_other_forward(module) and not self.outside
        if shared or self._reads_returned or not self.is_product:  # otherwise there is nothing to compare
            self._hooks.append(Hook(projection, self._enter, before=True, first=True))
            self._hooks.append(Hook(projection, self._leave, before=False))
        self._projected: list[Tensor] = []
        self._is_sum, self.outside = False, self.outside or shared
        if any(not isinstance(hook, Hook) for hook in module._forward_hooks.values()):
            self._hooks.append(Hook(module, self._keep_returned, before=False, first=True))

    @cached_property
    def is_product(self) -> bool:
        """True if the projection can only multiply by its weight, so that its map is known before it runs."""
        attributes, forward = vars(self._module), type(self._module).forward
        return (
            forward in _PRODUCTS
            and "forward" not in attributes
            and type(attributes["_parameters"].get("weight")) is nn.Parameter
            and not foreign_hooks(modules_of(self._module))
        )

    def _keep_returned(self, args: Any, output: Any) -> None:
        tokens = tokens_of(output)
        self._returned = None if tokens is None else tokens.detach().clone()

    def check_returned(self, output: Any) -> None:
        """Notice hooks and methods of the attention module that have changed its output after the projection."""
        tokens = tokens_of(output)
        if self._returned is not None and (tokens is None or not torch.equal(self._returned, tokens)):
            self._is_linear = False
        if self._reads_returned and not self._module.training:  # tokens may have another order
            both = (each for each in (tokens, *self._projected) if each is not None)
            entries = [each.detach().flatten().sort().values.cpu() for each in both]
            self._is_linear &= len(entries) == 2 and torch.equal(*entries)

    def check_joined(self, mixed: Sequence[Tensor]) -> None:
        """Raise ValueNormsError if the input is not the results [batch, heads, tokens, width], joined or their sum."""
        if self._rows is not None:
            rows = at_least_float32(self._rows)
            results = [each.transpose(1, 2).flatten(2).to(rows) for each in mixed]
            same_width = {each.shape[-1] for each in results} == {rows.shape[-1]}
            expected = torch.stack(results).sum(dim=0) if same_width else torch.cat(results, dim=-1)
            rounding = _rounding(rows.device.type, self._rows.dtype)
            self._is_sum = same_width
            if expected.shape == rows.shape and (expected - rows).norm() <= rounding * rows.norm():
                return
        raise self._error

    def check_product(self) -> None:
        """Raise ValueNormsError if the outputs differ from the weight that `values` returned before."""
        if self._measured is not None or not self._is_linear:
            raise self._error

    def values(self, vectors: Tensor) -> Values:
        """Return value vectors [batch, heads, tokens, width] with W_O, at least in float32, or raise ValueNormsError.

        To be called after the projection has run, unless `is_product`. If it does not run, the attention module uses
        the weight itself, as `nn.MultiheadAttention` does.
        """
        matrix = self._weight() if self._measured is None else self._measured
        if matrix is None or not self._is_linear:
            raise self._error
        if self._groups > 1 and matrix.shape[-1] == self._groups * vectors.shape[1] * vectors.shape[-1]:
            vectors = vectors.repeat_interleave(self._groups, dim=1)  # heads of one group share their values
        if self._is_sum:
            matrix = matrix.repeat(1, vectors.shape[1] * vectors.shape[-1] // matrix.shape[-1])
        if matrix.shape[-1] != vectors.shape[1] * vectors.shape[-1]:
            raise self._error
        vectors = at_least_float32(vectors)
        return Values(vectors, matrix.detach().to(vectors.dtype))

    def release(self) -> None:
        """Remove the hooks."""
        while self._hooks:
            self._hooks.pop().remove()

    def _weight(self) -> Tensor | None:
        if "parametrizations" not in self._module._modules:
            return projection_weight(self._module)
        with undisturbed(self._module, device_of(self._module)):  # spectral norms update their buffers
            return projection_weight(self._module)

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._input = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)

    def _leave(self, args: Any, output: Any) -> None:
        given, self._input = self._input, None
        self._rows = None if given is None else given.detach()
        self._projected += [output] if self._reads_returned and isinstance(output, Tensor) else []
        if given is None or not isinstance(output, Tensor):
            self._is_linear = False
            return
        tensors = (given, output, *self._module._parameters.values(), *self._module._buffers.values())
        plain = not self._module._modules and all(type(each) in _PLAIN for each in tensors)
        # The function mode of a recording makes each function of plain tensors slower.
        with unrecorded(), torch._C.DisableTorchFunction() if plain else nullcontext():
            self._compare(given.detach(), output.detach())

    def _compare(self, given: Tensor, output: Tensor) -> None:
        """Compare an output of the projection with its stored weight; if they differ, measure its map."""
        if given.ndim < 2:
            self._is_linear = False
            return
        weight, bias = self._weight(), getattr(self._module, "bias", None)
        axis = 1 if given.ndim == 4 and any(isinstance(part, nn.Conv2d) for part in self._module.modules()) else -1
        rows, results = (given, output) if axis == -1 else (given.movedim(axis, -1), output.movedim(axis, -1))
        if rows.shape[:-1] != results.shape[:-1]:
            rows, results = rows.flatten(0, -2), results.flatten(0, -2)
        rounding = _rounding(output.device.type, given.dtype, output.dtype)
        if self._measured is None and weight is not None:
            offset = bias if isinstance(bias, Tensor) else None
            if _agree_along(_direction(len(weight)), rows, results, weight, offset, rounding=rounding):
                return
        try:
            self._measured, offset = self._measure(given, axis)
            self._is_linear &= _agree(rows, results, self._measured, offset, rounding=rounding)
        except Exception:  # a module may fail in any way on another number of tokens
            self._is_linear = False

    def _measure(self, given: Tensor, axis: int) -> tuple[Tensor, Tensor]:
        """Return matrix [out, in] and offset [out] of the projection, from its outputs for unit vectors and 0."""
        width = given.shape[axis]
        units = torch.cat([torch.eye(width), torch.zeros(1, width)]).to(given)
        shape = [width + 1] + [1] * (given.ndim - 1)
        shape[axis] = width
        with undisturbed(self._module, given.device):
            output = at_least_float32(self._module(units.view(shape)).flatten(1))
        return (output[:-1] - output[-1]).T, output[-1]


def _agree(rows: Tensor, results: Tensor, matrix: Tensor, offset: Tensor, *, rounding: float) -> bool:
    """Return True if results [..., out] are matrix · rows + offset, up to rounding and 8-bit inputs."""
    if rows.shape[-1] != matrix.shape[1] or results.shape != (*rows.shape[:-1], len(matrix)):
        return False
    rows, results, matrix, offset = map(at_least_float32, (rows, results, matrix, offset))
    with torch.autocast(rows.device.type, enabled=False):
        product = nn.functional.linear(rows, matrix.to(rows))
        return bool((results - product - offset).norm() <= rounding * results.norm() + _LINEAR * product.norm())


def _agree_along(
    direction: Tensor, rows: Tensor, results: Tensor, matrix: Tensor, offset: Tensor | None, *, rounding: float
) -> bool:
    """Return True if results [..., out] are matrix · rows + offset along a direction [out], up to rounding.

    This takes products with vectors only.
    """
    if rows.shape[-1] != matrix.shape[1] or results.shape != (*rows.shape[:-1], len(matrix)):
        return False
    kind = results.device.type
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        results = at_least_float32(results)
        direction, rows, matrix = (each.detach().to(results) for each in (direction, rows, matrix))
        along, norm = results @ direction, torch.linalg.vector_norm
        rest = along - rows @ (direction @ matrix)
        difference = norm(rest if offset is None else rest - direction @ offset.detach().to(results))
        # The norm along a random direction is usually similar to that of the results, which would be read once more.
        return bool(difference <= rounding * norm(along)) or bool(difference <= rounding * norm(results))


@lru_cache
def _rounding(device: str, *types: torch.dtype) -> float:
    """Return the relative difference of outputs by rounding, for the types of inputs and outputs."""
    rounding = max(_ROUNDING, *(_OF_TYPE * torch.finfo(each).eps for each in types))
    return rounding if device == "cpu" else max(rounding, _TF32)


@lru_cache(maxsize=16)
def _direction(width: int) -> Tensor:
    """Return a random vector, the same each time."""
    return torch.randn(width, generator=torch.Generator().manual_seed(0), device="cpu")
