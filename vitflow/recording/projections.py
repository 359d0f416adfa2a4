"""Output projections of attention modules: the matrices W_O by which values are weighted.

A projection that can only multiply by its stored weight must get the results of attention alone, in the first pass that
is weighted. Others are observed once per model and input size, in a run of one image twice. Results of attention are
noise, to which the second image has a constant added. The projection must get this constant, or a multiple, beside
anything that is added, and must be one linear map: its stored weight, or, with adapters, quantisation or
parametrizations, a matrix that is measured on unit vectors.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ValueNormsError
from vitflow.methods.gradients import Values, at_least_float32
from vitflow.models.anatomy import has_other_forward, output_projection, projection_weight
from vitflow.models.calls import tensors_in, tokens_of
from vitflow.models.parts import foreign_hooks, modules_of
from vitflow.recording.attention_kinds import is_pooling
from vitflow.recording.experiment import Call
from vitflow.recording.isolation import Hook
from vitflow.recording.without_attention import WithoutAttention

# Rounding of outputs, relative to these: also with TF32, on a GPU, and in multiples of a type's precision.
_ROUNDING, _OF_TYPE = 1e-3, 4
# Deviation of a measured map from the model's outputs, relative to the product: 8-bit rounding of inputs is below it.
_LINEAR = 0.05
# The constant that is added to results of attention in the second image, and the rounding of its multiple.
_STEP, _NEAR = 8.0, 0.02
# Rounding of sums over the results of attention, relative to their size.
_SAME = 3e-3
# Forward methods that only multiply by the stored weight.
_PRODUCTS = (nn.Linear.forward, nn.Conv2d.forward)


@dataclass(slots=True, eq=False)
class Projection:
    """Output projection of an attention module, or of several that are projected together.

    Attributes:
        name: path and class of the attention module.
        matrix: W_O, [out, heads · width]; None if there is no such matrix.
        groups: number of heads that share their values.
        reason: further words on why there is no matrix.
    """

    name: str
    matrix: Tensor | None
    groups: int = 1
    reason: str = ""

    def error(self) -> ValueNormsError:
        """Return the error of a module without a matrix."""
        return ValueNormsError(
            f"Value weighting requires one linear output projection as the output of each attention module, which "
            f"{self.name} does not have{self.reason}."
        )

    def values(self, vectors: Tensor) -> Values:
        """Return value vectors [batch, heads, tokens, width] with W_O, at least in float32; ValueNormsError without."""
        if self.matrix is None:
            raise self.error()
        if self.groups > 1 and self.matrix.shape[-1] == self.groups * vectors.shape[1] * vectors.shape[-1]:
            vectors = vectors.repeat_interleave(self.groups, dim=1)
        if self.matrix.shape[-1] != vectors.shape[1] * vectors.shape[-1]:
            raise self.error()
        vectors = at_least_float32(vectors)
        return Values(vectors, self.matrix.to(vectors.dtype))


def projections_of(call: Call, joined: Collection[str], within: str = "") -> dict[str, Projection]:
    """Return the projections of attention modules by path, from one run that is cached; none if the run fails.

    Args:
        joined: paths of the modules that are one layer with others.
        within: path of the submodule whose attention is recorded.

    Raises ValueNormsError if a module has no linear projection.
    """

    def observed() -> dict[str, Projection]:
        run = _ProjectionRun(call.model, joined)
        with suppress(Exception):  # a model may not run on one image
            with call.experiment(run.hooks()), run:
                try:
                    call(torch.cat([call.pixels[:1]] * 2))
                finally:
                    run.release()
            return run.found
        return {}

    found = {} if call.pixels.is_meta else call.cached((projections_of, *call.pixels.shape[1:]), observed)
    # A model may attend in other modules to a longer text, which are refused when they run.
    for name, projection in found.items() if call.pixels.is_floating_point() else ():
        if projection.matrix is None and f"{name}.".startswith(within and f"{within}."):
            raise projection.error()
    return dict(found)


def stored_projection(path: Sequence[tuple[str, nn.Module]]) -> tuple[nn.Module | None, Projection]:
    """Return the projection of a running module if it only multiplies by its weight, else None; and its record."""
    projection, record = _projection_of(path, ())
    module = path[-1][1]
    plain = (
        projection is not None
        and type(projection).forward in _PRODUCTS
        and "forward" not in vars(projection)
        and type(projection._parameters.get("weight")) is nn.Parameter
        and not foreign_hooks([module, *modules_of(projection)])
        and not (module.training or has_other_forward(module) or record.groups > 1)
    )
    return projection if plain else None, record


class ResultCheck:
    """Check that a projection gets the results of an attention module, which are only arranged.

    Args:
        ran: True if the projection does not run itself, as its module multiplies by the weight.
    """

    def __init__(self, projection: nn.Module, *, ran: bool) -> None:
        self.passed = ran
        self._sums = torch.zeros(2, dtype=torch.float64, device="cpu")
        self._hook = Hook(projection, self._compare, before=True)

    def add(self, result: Tensor) -> None:
        """Add results of the attention."""
        self._sums += _sums(result)

    def _compare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = next(tensors_in([args, kwargs]))
        expected, self._sums = self._sums, torch.zeros_like(self._sums)
        limit = _SAME * torch.stack([(given.numel() * expected[1]).sqrt(), expected[1]])
        self.passed = bool(((_sums(given) - expected).abs() <= limit).all())

    def remove(self) -> None:
        """Remove the hook."""
        self._hook.remove()


def _sums(tensor: Tensor) -> Tensor:
    """Return the sum of all entries, and that of their squares, which do not depend on their order."""
    flat = tensor.detach().double()
    return torch.stack([flat.sum(), flat.square().sum()]).cpu()


def _projection_of(
    path: Sequence[tuple[str, nn.Module]], joined: Collection[str]
) -> tuple[nn.Module | None, Projection]:
    """Return the projection of a running module, and its record with the stored weight."""
    (name, module), around = path[-1], path[-2][1] if len(path) > 1 else None
    projection = output_projection(module, around)
    if projection is None and around is not None and name in joined:
        projection = output_projection(around)
    weight = None if projection is None else projection_weight(projection)
    groups = getattr(module, "num_key_value_groups", 1)
    weight = None if weight is None else weight.detach()
    return projection, Projection(f"{type(module).__name__} ({name})", weight, groups)


class _ProjectionRun(WithoutAttention):
    """Run of two images whose results of attention are followed to the projections, and are equal after these."""

    def __init__(self, model: nn.Module, joined: Collection[str]) -> None:
        super().__init__(model)
        self.found: dict[str, Projection] = {}
        self._joined = joined
        self._records: dict[nn.Module, Projection] = {}
        self._projected: dict[str, list[Tensor]] = {}  # outputs of the projections of modules that may change them
        self._hooks: list[Hook] = []
        self._given: Tensor | None = None
        self._measures = False

    def release(self) -> None:
        """Remove the hooks of the projections."""
        for hook in self._hooks:
            hook.remove()

    def _identity(self, shape: Sequence[int], value: Tensor) -> Tensor:
        noise = torch.randn_like(super()._identity(shape, value)[: shape[0] // 2])
        result = torch.cat([noise, noise + _STEP])
        if any(is_pooling(*each) for each in self.path[-2:]):
            return result
        projection, record = _projection_of(self.path, self._joined)
        name, module = self.path[-1]
        if projection is None:
            self.found[name] = record
            return result
        if projection not in self._records:
            self._records[projection] = record
            self._hooks.append(Hook(projection, self._enter_projection, before=True, first=True))
            self._hooks.append(Hook(projection, partial(self._leave_projection, projection, name), before=False))
        self.found[name] = self._records[projection]
        if (foreign_hooks([module]) or has_other_forward(module)) and projection in module._modules.values():
            self._projected.setdefault(name, [])
        return result

    def _enter_projection(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._measures:
            self._given = next(tensors_in([args, kwargs]), None)

    def _leave_projection(self, projection: nn.Module, name: str, args: Any, output: Any) -> Any:
        if self._measures:
            return None
        record, given = self._records[projection], self._given
        if given is None or not isinstance(output, Tensor) or given.ndim < 2:
            record.matrix = None
            return None
        axis = next((axis for axis in (0, 1) if _is_shifted(given, axis)), None)
        if axis is None:
            record.matrix, record.reason = None, ": the result of its attention is gated, normed or activated before"
            return None
        self._measures = True
        record.matrix = _matrix(projection, given, output, record.matrix)
        self._measures = False
        first = output.chunk(2, dim=axis)[0]
        equal = torch.cat([first, first], dim=axis)
        if name in self._projected:
            self._projected[name].append(equal.clone())
        return equal

    def _unfollow(self, path: str, *given: Any) -> None:
        super()._unfollow(path)
        tokens = tokens_of(given[-1])
        if outputs := self._projected.pop(path, None):  # tokens may have another order
            entries = [each.flatten().sort().values for each in (torch.cat(outputs), tokens) if each is not None]
            if len(entries) < 2 or not torch.equal(*entries):
                self.found[path].matrix = None


def _is_shifted(given: Tensor, axis: int) -> bool:
    """Return True if two images along an axis differ by a multiple of the constant at each entry."""
    if given.shape[axis] % 2:
        return False
    first, second = at_least_float32(given).chunk(2, dim=axis)
    steps = (second - first) / _STEP
    return bool(((steps - steps.round()).abs() < _NEAR).all() and (steps > 0.5).all())


def _matrix(projection: nn.Module, given: Tensor, output: Tensor, stored: Tensor | None) -> Tensor | None:
    """Return the matrix [out, in] of a projection with this input and output; None if it is not linear."""
    convolves = given.ndim == 4 and any(isinstance(part, nn.Conv2d) for part in projection.modules())
    axis = 1 if convolves else -1
    rows, results = (at_least_float32(each.movedim(axis, -1)).flatten(0, -2) for each in (given, output))
    rounding = max(_ROUNDING, *(_OF_TYPE * torch.finfo(each.dtype).eps for each in (given, output)))
    bias = getattr(projection, "bias", None)
    offset = bias if isinstance(bias, Tensor) else results.new_zeros(())
    if stored is not None and _agree(rows, results, stored, offset, rounding):
        return stored.detach()
    with suppress(Exception):  # a module may fail in any way on another number of tokens
        matrix, offset = _measured(projection, given, axis)
        return matrix if _agree(rows, results, matrix, offset, rounding, _LINEAR) else None
    return None


def _measured(projection: nn.Module, given: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return matrix [out, in] and offset [out] of a projection, from its outputs for unit vectors and 0."""
    width = given.shape[axis]
    units = torch.cat([torch.eye(width), torch.zeros(1, width)]).to(given)
    shape = [width + 1] + [1] * (given.ndim - 1)
    shape[axis] = width
    output = at_least_float32(projection(units.view(shape)).flatten(1))
    return (output[:-1] - output[-1]).T, output[-1]


def _agree(rows: Tensor, results: Tensor, matrix: Tensor, offset: Tensor, rounding: float, linear: float = 0.0) -> bool:
    """Return True if results [tokens, out] are matrix · rows + offset, up to rounding and 8-bit inputs."""
    if rows.shape[-1] != matrix.shape[1] or results.shape != (len(rows), len(matrix)):
        return False
    product = nn.functional.linear(rows, matrix.to(rows))
    apart = (results - product - offset.to(rows)).norm()
    return bool(apart <= rounding * results.norm() + linear * product.norm())
