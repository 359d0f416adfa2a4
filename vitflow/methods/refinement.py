"""Refinement: spread a map among patches that the model treats as similar.

Two patches are similar for a model if, layer by layer, they attend to the same patches (co-attention), or if their keys
are similar. Either affinity is a doubly stochastic matrix: refinement keeps the sum of a map, and a constant map stays
constant.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from typing import Literal, get_args

import torch
from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.gradients import at_least_float32

# Rows of a balanced matrix sum to 1 within this tolerance, in its precision, after at most this many rounds.
TOLERANCE, ROUNDS = {torch.float32: 1e-5, torch.float64: 1e-11}, 100
# Earlier rounds from which the next one is extrapolated.
_MEMORY = 8
# Layers are computed together while they have no more numbers than this (5 MiB in float32): most of the time for small
# models is that of calling torch's functions.
_TOGETHER = 5 * 2**18


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """Positive matrices with the factors that make them doubly stochastic: P = diag(rows) · W · diag(cols).

    Attributes:
        matrices: W of each layer, [batch, size, size], as given; products are taken at least in float32.
        rows, cols: the factors, [layers, batch, size]; 0 for an image of which some row or column sums to 0.
        rest: half of the difference of each row sum from 1 after the last round, [layers, batch, size]; columns sum to
            1. It is added to the diagonal of the symmetric matrix, which then keeps sums and constants.
        distance: ‖P − 1/size‖², the squared distance to the matrix that makes every map constant, [layers, batch].
    """

    matrices: tuple[Tensor, ...]
    rows: Tensor
    cols: Tensor
    rest: Tensor
    distance: Tensor

    @property
    def complete(self) -> Tensor:
        """Mask of the images that are balanced, bool [layers, batch]."""
        return self.rows.any(dim=-1)

    @property
    def matrix(self) -> Tensor:
        """P itself, float64 [layers, batch, size, size]."""
        return self.rows.double().unsqueeze(-1) * torch.stack(self.matrices) * self.cols.unsqueeze(-2)

    @property
    def symmetric(self) -> Tensor:
        """S = (P + Pᵀ)/2, with `rest` added to its diagonal, float64 [layers, batch, size, size]."""
        matrix = self.matrix
        return (matrix + matrix.mT) / 2 + torch.diag_embed(self.rest)

    def spread(self, values: Tensor, times: int = 1) -> Tensor:
        """Sᵏ times values [batch, size] for k = `times` and each layer, [layers, batch, size]; P is not formed."""
        matrices = _joined(self.matrices)
        rows, cols, rest = (each.flatten(0, 1) for each in (self.rows, self.cols, self.rest))
        values = values.to(rows).repeat(len(self.matrices), 1)
        for _ in range(times):
            forth = rows * _times(cols * values, matrices.mT)
            back = cols * _times(rows * values, matrices)
            values = (forth + back) / 2 + rest * values
        return values.view_as(self.rows)


def balance(layers: Sequence[Tensor]) -> list[Balanced]:
    """Scale rows and columns of positive matrices [batch, size, size] of layers, in turn, until both sum to 1.

    Images of which some row or column sums to 0 are left out: their factors are 0. The rounds are those of Sinkhorn and
    Knopp, extrapolated: real attention needs a quarter of the rounds for the same factors. Layers of equal size and
    type that follow each other are balanced together; factors do not depend on what else is in a batch or with which
    layers it is balanced.

    Sources: Sinkhorn & Knopp, "Concerning Nonnegative Matrices and Doubly Stochastic Matrices", 1967; Walker & Ni,
    "Anderson Acceleration for Fixed-Point Iterations", SIAM Journal on Numerical Analysis 2011.

    >>> balance([torch.tensor([[[0.25, 0.75], [0.25, 0.75]]])])[0].matrix[0]
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]], dtype=torch.float64)
    """
    balanced: list[Balanced] = []
    for _, equal in groupby(layers, key=lambda layer: (layer.shape, layer.dtype)):
        group = list(equal)
        count = max(1, _TOGETHER // max(1, group[0].numel()))
        balanced += [_balance_together(group[first : first + count]) for first in range(0, len(group), count)]
    return [each for each in balanced if each.rows.any()]


def _balance_together(layers: Sequence[Tensor]) -> Balanced:
    """Balance matrices of equal size and type, [batch, size, size] each."""
    inner = matrices = _joined(layers)  # those between the first and the last that have not converged
    (images, size, _), tolerance = matrices.shape, TOLERANCE[matrices.dtype]
    logs = matrices.new_zeros(images, size)  # logarithms of the factors of rows
    cols, sums = matrices.new_empty(2, images, size)
    factors, error = (logs, cols, sums), logs.new_full((images, 1), torch.inf)
    rounding = torch.finfo(matrices.dtype).eps ** 0.5
    # Directions in which the step of a round and its end have changed together; the steps are orthogonal.
    directions, before = matrices.new_zeros(images, _MEMORY, 2 * size), logs
    for number in range(ROUNDS + 1):
        torch.reciprocal(_times(logs.exp(), inner), out=cols)
        sums.copy_(_times(cols, inner.mT))
        if number == 0 and (empty := ~((sums > 0) & (sums < torch.inf)).all(dim=-1)).any():
            if matrices.dtype is torch.float32:  # sums may be 0 where those of float64 are not
                return _balance_together([layer.double() for layer in layers])
            matrices[empty], cols[empty], sums[empty] = 1.0, 1.0 / size, 1.0
        end = -sums.log()
        step, last = end - logs, error
        error = step.abs().amax(dim=-1, keepdim=True)
        # Factors that fit stay as they are: those of an image do not depend on the batch.
        open_ = error > tolerance
        remaining = [index for index, is_open in enumerate(open_.flatten().tolist()) if is_open]
        if number == ROUNDS or not remaining:
            break
        now = torch.cat([step, end], dim=-1)
        if number:
            # A round that made the sums worse is followed by a plain one, and a new start of the extrapolation.
            better = error <= last
            changes = now - before, _without(now - before, directions.mul_(better.unsqueeze(-1)))
            whole, length = (torch.linalg.vector_norm(each[:, :size], dim=-1, keepdim=True) for each in changes)
            # With few patches, or few that differ, only rounding is orthogonal to all directions.
            directions[:, number % _MEMORY] = torch.where(length > rounding * whole, changes[1] / length, 0.0)
            end = torch.where(better, _without(now, directions)[:, size:], end)
        logs.copy_(torch.where(open_, end, logs))
        first, stop = remaining[0], remaining[-1] + 1
        inner, logs, cols, sums, error, directions, before = (
            each[first:stop] for each in (inner, logs, cols, sums, error, directions, now)
        )
    logs, cols, sums = factors
    rows = logs.exp()
    rest = (1 - rows * sums) / 2
    distance = (_times(rows.square(), matrices.square_()) * cols.square()).sum(dim=-1) - 1
    results = (rows, cols, rest, distance)
    for each in results if empty.any() else ():
        each[empty] = 0.0
    return Balanced(tuple(layers), *(each.unflatten(0, (len(layers), -1)) for each in results))


def _without(values: Tensor, directions: Tensor) -> Tensor:
    """Subtract from steps and ends [batch, 2 · size] those combinations of directions that the steps contain."""
    size = values.shape[-1] // 2
    shares = torch.bmm(values[:, None, :size], directions[:, :, :size].mT)
    return torch.baddbmm(values.unsqueeze(1), shares, directions, alpha=-1).squeeze(1)


def _joined(layers: Sequence[Tensor]) -> Tensor:
    """Copy matrices [batch, size, size] to [layers · batch, size, size], at least in float32."""
    dtype = torch.promote_types(layers[0].dtype, torch.float32)
    joined = layers[0].new_empty((len(layers), *layers[0].shape), dtype=dtype)
    return torch.stack([layer.detach() for layer in layers], out=joined).flatten(0, 1)


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Return row vectors [batch, m] times matrices [batch, m, n], several times faster than matrices times columns."""
    return torch.bmm(rows.unsqueeze(1), matrices).squeeze(1)


AffinityName = Literal["attention", "keys", "both"]
AFFINITIES: tuple[AffinityName, ...] = get_args(AffinityName)

# Power that sharpens the cosine of keys.
_KEY_POWER = 4
# Matrices closer to the uniform one than this (mean squared distance over layers) make every map nearly constant. Those
# of random weights are ten times closer; those of all trained models measured are at least 0.03 away.
_NEARLY_UNIFORM = 0.01


@dataclass(frozen=True, slots=True, eq=False)
class Affinity:
    """Affinity of the patches of each image: symmetric and doubly stochastic, [batch, patches, patches].

    Attributes:
        attention: balanced attention of the layers; the co-attention is the mean over them of S², S = (P + Pᵀ)/2.
        keys: balanced similarity of the keys, if it is part of the affinity.
    """

    attention: tuple[Balanced, ...] = ()
    keys: Balanced | None = None

    @property
    def matrix(self) -> Tensor:
        """The affinity, float64 [batch, patches, patches]; requires memory for patches² numbers."""
        layers = (half @ half for group in self.attention for half in group.symmetric)
        return self._mean(layers, None if self.keys is None else self.keys.symmetric[0])

    def spread(self, values: Tensor) -> Tensor:
        """Multiply values [batch, patches] by the affinity."""
        layers = (layer for group in self.attention for layer in group.spread(values, times=2))
        return self._mean(layers, None if self.keys is None else self.keys.spread(values)[0])

    def _mean(self, layers: Iterable[Tensor], keys: Tensor | None) -> Tensor:
        """Return the mean over layers; with keys, half of it and half of theirs."""
        parts = [] if keys is None else [keys]
        if self.attention:
            total = reduce(torch.add, layers)
            parts.append(total / _count(self.attention).view(-1, *[1] * (total.ndim - 1)).to(total))
        return sum(parts[1:], parts[0]) / len(parts)

    @property
    def undefined(self) -> Tensor:
        """Mask of images without a balanced layer, or without balanced keys, bool [batch]."""
        parts = [self.attention, () if self.keys is None else (self.keys,)]
        return torch.stack([~torch.cat([each.complete for each in part]).any(dim=0) for part in parts if part]).any(0)

    @property
    def nearly_uniform(self) -> Tensor:
        """Mask of images whose affinity makes any map nearly constant, bool [batch]."""
        parts = [*self.attention, *([] if self.keys is None else [self.keys])]
        return torch.cat([part.distance for part in parts]).sum(dim=0) / _count(parts) < _NEARLY_UNIFORM


def _count(parts: Sequence[Balanced]) -> Tensor:
    """Return the number of balanced layers of each image, at least 1, [batch]."""
    return torch.cat([part.complete for part in parts]).sum(dim=0).clamp_min(1)


def co_attention(layers: Sequence[Tensor]) -> Affinity:
    """Co-attention M = mean over layers of S², where S = (P + Pᵀ)/2 and P is a layer's attention, doubly stochastic.

    M is symmetric, doubly stochastic and positive semidefinite: patches that attend to the same patches are similar,
    whether or not they attend to each other. (S alone is not enough: if objects attend to the background and the
    background to objects, one step of it inverts a map.)

    Each layer is the mean over its heads, [batch, patches, patches]; layers with an empty row or column are left out of
    an image's mean, and ShapeError is raised if no image has another.

    Source: affinity from attention, Lin et al., "CLIP is Also an Efficient Segmenter", CVPR 2023.

    >>> layer = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    >>> co_attention([layer]).matrix
    tensor([[[0.8200, 0.1800],
             [0.1800, 0.8200]]], dtype=torch.float64)
    """
    balanced = balance(layers)
    if not balanced:
        raise ShapeError(
            f"Expected at least one layer, got {len(layers)} layers in which some patch attends to none or gets none."
        )
    return Affinity(attention=tuple(balanced))


def key_affinity(layers: Sequence[Tensor]) -> Affinity:
    """Similarity of the patches' keys: K = Sinkhorn of ((mean over layers of cos(k_i, k_j))⁺)⁴.

    The keys of each layer are [batch, patches, width], heads side by side; cosines are taken in float32 at least.

    Source: keys as patch descriptors, Siméoni et al., "Localizing Objects with Self-Supervised Transformers and no
    Labels", BMVC 2021.

    >>> key_affinity([torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])]).matrix
    tensor([[[1., 0.],
             [0., 1.]]], dtype=torch.float64)
    """
    total: Tensor | None = None
    for layer in layers:
        units = torch.nn.functional.normalize(at_least_float32(layer), dim=-1)
        total = units @ units.mT if total is None else torch.baddbmm(total, units, units.mT)
    assert total is not None
    balanced = balance([(total / len(layers)).clamp_min(0.0) ** _KEY_POWER])
    if not balanced:
        raise ShapeError("Expected nonzero keys, got a patch with keys of 0.")
    return Affinity(keys=balanced[0])


def refine(grids: Tensor, affinity: Affinity, steps: int) -> Tensor:
    """Spread maps [batch, rows, cols] among similar patches: affinityᵏ g with k = steps; the sum of each map is kept.

    >>> refine(torch.tensor([[[1.0, 0.0]]]), co_attention([torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])]), 1)
    tensor([[[0.8200, 0.1800]]])
    """
    values = grids.detach().flatten(1)
    for _ in range(steps):
        values = affinity.spread(values)
    return values.reshape(grids.shape).to(grids.dtype)
