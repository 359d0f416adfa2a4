"""Output projections of attention modules: the matrices W_O by which values are weighted.

The matrix of a projection that only multiplies by its weight is this weight; that of others (adapters, quantisation,
parametrizations) is measured on unit vectors. In the first pass that is weighted, a projection must get the results of
attention, which are only arranged, multiply them by this matrix, and return the output of the attention module.
"""

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitflow.errors import ValueNormsError
from vitflow.methods.gradients import Values, at_least_float32
from vitflow.models.anatomy import has_other_forward, is_of_library, output_projection, projection_weight
from vitflow.models.calls import tensors_in, tokens_of
from vitflow.models.parts import foreign_hooks, modules_of
from vitflow.recording.attention_kinds import adds_to_results
from vitflow.recording.experiment import Call
from vitflow.recording.isolation import Hook

# Rounding of outputs, relative to these: also with TF32, on a GPU, and in multiples of a type's precision.
_ROUNDING, _OF_TYPE = 1e-3, 4
# Deviation of a measured map from the model's outputs, relative to the product: 8-bit rounding of inputs is below it.
_LINEAR = 0.05
# Rounding of sums over the results of attention, relative to their size; also in half precision.
_SAME, _HALF_SAME = 3e-3, 3e-2
# Forward methods that only multiply by the stored weight.
_PRODUCTS = (nn.Linear.forward, nn.Conv2d.forward)


@dataclass(slots=True, eq=False)
class Projection:
    """Output projection of an attention module, or of several that are projected together.

    Attributes:
        path, kind: path and class of the attention module.
        matrix: W_O, [out, heads · width]; None if there is no such matrix.
        offset: what the projection adds, [out], if the matrix was measured.
        groups: number of heads that share their values.
        reason: further words on why there is no matrix.
        checked: True after the first pass.
    """

    path: str
    kind: str
    matrix: Tensor | None = None
    offset: Tensor | None = None
    groups: int = 1
    reason: str = ""
    checked: bool = False

    def error(self) -> ValueNormsError:
        """Return the error of a module without a matrix."""
        return ValueNormsError(
            f"Value weighting requires one linear output projection as the output of each attention module, which "
            f"{self.kind} ({self.path}) does not have{self.reason}."
        )

    def refuse(self, reason: str = "") -> None:
        """Note that the matrix is not what is applied to the results of attention."""
        self.matrix, self.reason = None, self.reason or reason

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


def known_projections(call: Call) -> dict[str, Projection]:
    """Return the projections of earlier passes by the path of the module that has them, for the state of the model."""
    return {} if call.model.training else call.cached(Projection, dict[str, Projection])


def projection_of(
    path: Sequence[tuple[str, nn.Module]], joined: Collection[str], call: Call, known: dict[str, Projection]
) -> tuple[Projection, nn.Module]:
    """Return the record of the projection of the running module, and the projection.

    Args:
        path: running modules, outermost first.
        joined: paths of the modules that are one layer with others.
        call: the recorded model call.
        known: projections by the path of the module that has them, to which this one is added.

    Raises ValueNormsError if the module has no linear projection.
    """
    (name, module), (owner, around) = path[-1], path[-2] if len(path) > 1 else ("", None)
    projection = output_projection(module, around)
    if projection is None and around is not None and name in joined:
        projection = output_projection(around)
    owner = name if projection in module._modules.values() else owner
    if owner not in known:
        record = Projection(name, type(module).__name__, groups=getattr(module, "num_key_value_groups", 1))
        by_weight = type(module) is nn.MultiheadAttention and not foreign_hooks([module])  # the projection does not run
        if projection is not None and (by_weight or _is_product(projection)):
            matrix = projection_weight(projection)
            record.matrix, record.checked = None if matrix is None else matrix.detach(), by_weight
        elif projection is not None:
            record.matrix, record.offset = _measured(projection, call)
        known[owner] = record
    if known[owner].matrix is None or projection is None:
        raise known[owner].error()
    return known[owner], projection


def _is_product(projection: nn.Module) -> bool:
    """Return True if a projection only multiplies by its stored weight, and adds its bias."""
    stored = type(projection._parameters.get("weight")) is nn.Parameter
    plain = type(projection).forward in _PRODUCTS and "forward" not in vars(projection)
    return stored and plain and not foreign_hooks(modules_of(projection))


class ProjectionCheck:
    """Check of a projection, a module, from the run of its attention module to the end of the pass."""

    def __init__(self, projection: Projection, module: nn.Module, attention: nn.Module) -> None:
        self._projection, self._adds, self._ran = projection, adds_to_results(attention), False
        self._results: list[Tensor] = []  # sums over tokens since the projection last ran
        self._given, self._outputs = torch.empty(0), list[Tensor]()
        self._hooks = [
            Hook(module, self._enter, before=True, first=True),
            Hook(module, self._leave, before=False),
        ]
        changes = bool(foreign_hooks([attention])) or has_other_forward(attention) or not is_of_library(attention)
        self._compares = changes and module in attention._modules.values()  # what the attention module returns
        if self._compares:
            self._hooks.append(Hook(attention, self._leave_attention, before=False))

    def add(self, result: Tensor) -> None:
        """Add results of the attention, [batch, heads, queries, width] or [batch, queries, heads · width]."""
        channels = result.transpose(1, 2).flatten(2) if result.ndim == 4 else result
        self._results.append(_sums(channels))

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = given = next(tensors_in([args, kwargs]))
        if not self._results or self._projection.matrix is None:  # of another layer
            return
        width, self._ran = self._projection.matrix.shape[1], True
        whole = self._results[0].shape[1] == width  # pieces are chunks of the queries, otherwise heads
        expected = torch.stack(self._results).sum(dim=0) if whole else torch.cat(self._results, dim=1)
        self._results = []
        axis = _channel_axis(given, width)
        actual, count = _sums(given.movedim(axis, -1)), given.numel() / given.shape[axis]
        rounding = _SAME if torch.finfo(given.dtype).bits >= 32 else _HALF_SAME
        limit = rounding * torch.stack([(count * expected[1]).sqrt(), expected[1]])
        limit += rounding * limit.mean(dim=1, keepdim=True)
        same = expected.shape == actual.shape and bool(((actual - expected).abs() <= limit).all())
        if not (same or self._adds):
            self._projection.refuse(": the result of its attention is gated, normed, activated or added to before")

    def _leave(self, args: Any, output: Any) -> None:
        projection = self._projection
        if projection.offset is not None and not _agree(self._given, output, projection.matrix, projection.offset):
            projection.refuse()
        if self._compares:
            self._outputs.append(output.clone())

    def _leave_attention(self, args: Any, output: Any) -> None:
        tokens, given = tokens_of(output), tokens_of(args)
        if self._outputs and tokens is not None:  # which may have another order, or a residual
            expected = torch.cat(self._outputs).flatten().sort().values
            limit = _OF_TYPE * torch.finfo(tokens.dtype).eps * expected.abs().max()
            residual = [tokens - given] if given is not None and given.shape == tokens.shape else []
            entries = [each.flatten().sort().values for each in (tokens, *residual)]
            if not any(
                each.shape == expected.shape and bool(((each - expected).abs() <= limit).all()) for each in entries
            ):
                self._projection.refuse()
        self._outputs = []

    def finish(self) -> None:
        """Store the result at the end of a pass."""
        self._projection.checked = True
        if not self._ran:
            self._projection.refuse(": it does not run")

    def release(self) -> None:
        """End the check."""
        for hook in self._hooks:
            hook.remove()


def _channel_axis(given: Tensor, width: int) -> int:
    """Return the axis of `width` channels: the last one, or that of a convolution."""
    return next((axis for axis in (-1, 1) if given.shape[axis] == width), -1)


def _sums(tensor: Tensor) -> Tensor:
    """Return the sums over tokens of each channel of [..., channels] and of its squares, [2, channels]."""
    flat = tensor.detach().double().flatten(0, -2)
    return torch.stack([flat.sum(dim=0), flat.square().sum(dim=0)]).cpu()


def _measured(projection: nn.Module, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """Return matrix [out, in] and offset [out] of a projection, from its outputs for unit vectors and 0; or None."""
    parts = modules_of(projection)
    widths = (getattr(part, name, None) for part in parts for name in ("in_features", "in_channels", "nx"))
    width = next((each for each in widths if isinstance(each, int)), 0)
    kinds = (weight.dtype for weight in projection.parameters() if weight.is_floating_point())
    units = torch.cat([torch.eye(width), torch.zeros(1, width)]).to(call.pixels.device, next(kinds, torch.float32))
    convolves = any(isinstance(part, nn.Conv2d) for part in parts)
    with suppress(Exception), call.experiment():  # a module may fail in any way on another number of tokens
        output = at_least_float32(projection(units[..., None, None] if convolves else units[:, None]).flatten(1))
        return (output[:-1] - output[-1]).T, output[-1]
    return None, None


def _agree(given: Tensor, output: Any, matrix: Tensor | None, offset: Tensor) -> bool:
    """Return True if outputs are matrix · inputs + offset, up to rounding and 8-bit inputs."""
    if matrix is None or not isinstance(output, Tensor):
        return False
    axis = _channel_axis(given, matrix.shape[1])
    rows, results = (at_least_float32(each.movedim(axis, -1)).flatten(0, -2) for each in (given, output))
    if rows.shape[-1] != matrix.shape[1] or results.shape != (len(rows), len(matrix)):
        return False
    rounding = max(_ROUNDING, *(_OF_TYPE * torch.finfo(each.dtype).eps for each in (given, output)))
    product = nn.functional.linear(rows, matrix.to(rows))
    apart = (results - product - offset.to(rows)).norm()
    return bool(apart <= rounding * results.norm() + _LINEAR * product.norm())
