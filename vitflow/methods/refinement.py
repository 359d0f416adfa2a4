"""Refinement: spread a map among patches that the model treats as similar.

Two patches are similar for a model if, layer by layer, they attend to the same patches (co-attention), or if their keys
are similar. Either affinity is a doubly stochastic matrix: refinement keeps the sum of a map, and a constant map stays
constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from vitflow.errors import ShapeError
from vitflow.methods.gradients import at_least_float32

# Rows of a balanced matrix sum to 1 within this tolerance, in its precision, after at most this many rounds.
TOLERANCE, ROUNDS = {torch.float32: 1e-5, torch.float64: 1e-11}, 100
# Earlier rounds from which the next one is extrapolated.
_MEMORY = 5


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """Positive matrices with the factors that make them doubly stochastic: P = diag(rows) · W · diag(cols).

    Attributes:
        matrices: W, [batch, size, size], as given; products are taken at least in float32.
        rows, cols: the factors, [batch, size].
        rest: half of the difference of each row sum from 1 after the last round, [batch, size]; columns sum to 1. It is
            added to the diagonal of the symmetric matrix, which then keeps sums and constants.
    """

    matrices: Tensor
    rows: Tensor
    cols: Tensor
    rest: Tensor

    @property
    def matrix(self) -> Tensor:
        """P itself, float64 [batch, size, size]."""
        return self.rows.double().unsqueeze(-1) * self.matrices * self.cols.unsqueeze(-2)

    @property
    def symmetric(self) -> Tensor:
        """S = (P + Pᵀ)/2, with `rest` added to its diagonal, float64 [batch, size, size]."""
        return (self.matrix + self.matrix.mT) / 2 + torch.diag_embed(self.rest)

    def spread(self, values: Tensor, times: int = 1) -> Tensor:
        """Sᵏ times values [batch, size] for k = `times`; P is not formed."""
        matrices, values = self.matrices.to(self.rows), values.to(self.rows)
        for _ in range(times):
            forth = self.rows * _times(self.cols * values, matrices.mT)
            back = self.cols * _times(self.rows * values, matrices)
            values = (forth + back) / 2 + self.rest * values
        return values

    def distance_to_uniform(self) -> Tensor:
        """‖P − 1/size‖², the squared distance to the matrix that makes every map constant, [batch]."""
        squares = _times(self.rows.square(), self.matrices.to(self.rows).square())
        return (squares * self.cols.square()).sum(dim=-1) - 1


def balance(matrices: Tensor, size: int | None = None) -> Balanced | None:
    """Scale rows and columns of positive matrices [batch, tokens, tokens], in turn, until both sum to 1.

    Only the last `size` rows and columns are used, if given. None if some row or column sums to 0. The rounds are
    those of Sinkhorn and Knopp, extrapolated: real attention needs a quarter of the rounds for the same factors.

    Source: Sinkhorn & Knopp, "Concerning Nonnegative Matrices and Doubly Stochastic Matrices", 1967.

    >>> balance(torch.tensor([[[0.25, 0.75], [0.25, 0.75]]])).matrix
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]], dtype=torch.float64)
    """
    first = 0 if size is None else matrices.shape[-1] - size
    inner = at_least_float32(matrices)[:, first:, first:]
    tolerance, (batch, count, _) = TOLERANCE[inner.dtype], inner.shape
    logs = inner.new_zeros(batch, count)  # logarithms of the factors of rows
    # Changes of the step of a round, and of its end, from one round to the next.
    changes, before = inner.new_zeros(2, batch, _MEMORY, count), logs
    error = logs.new_full((batch, 1), torch.inf)
    for number in range(ROUNDS + 1):
        cols = 1 / _times(logs.exp(), inner)
        sums = _times(cols, inner.mT)
        if number == 0 and not ((sums > 0) & (sums < torch.inf)).all():
            # Sums of float32 may be 0 where those of float64 are not.
            return balance(matrices.double(), size) if inner.dtype is torch.float32 else None
        end = -sums.log()
        step, last = end - logs, error
        error = step.abs().amax(dim=-1, keepdim=True)
        # Factors that fit stay as they are: those of an image do not depend on the batch.
        open_ = error > tolerance
        if number == ROUNDS or not open_.any():
            break
        now = torch.stack([step, end])
        if number:  # a round that made the sums worse is followed by a plain one
            changes[:, :, number % _MEMORY] = now - before
            end = torch.where(error <= last, end - _correction(changes[0], changes[1], step), end)
        logs, before = torch.where(open_, end, logs), now
    rows = logs.exp()
    return Balanced(matrices[:, first:, first:], rows, cols, (1 - rows * sums) / 2)


def _correction(steps: Tensor, ends: Tensor, step: Tensor) -> Tensor:
    """Return the combination of the changes of ends whose changes of steps, [batch, changes, size], best equal a step.

    Source: Walker & Ni, "Anderson Acceleration for Fixed-Point Iterations", SIAM Journal on Numerical Analysis 2011.
    """
    products = steps @ steps.mT
    # Changes may depend on each other, and are 0 at first and once an image has converged.
    diagonal = products.diagonal(dim1=-2, dim2=-1)
    diagonal.mul_(1 + 8 * torch.finfo(step.dtype).eps).add_(1e-30)
    return _times(torch.linalg.solve_ex(products, _times(step, steps.mT))[0], ends)


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Return row vectors [batch, m] times matrices [batch, m, n], several times faster than matrices times columns."""
    return (rows.unsqueeze(1) @ matrices).squeeze(1)


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
        attention: balanced attention of each layer; the co-attention is the mean over them of S², S = (P + Pᵀ)/2.
        keys: balanced similarity of the keys, if it is part of the affinity.
    """

    attention: tuple[Balanced, ...] = ()
    keys: Balanced | None = None

    @property
    def matrix(self) -> Tensor:
        """The affinity, float64 [batch, patches, patches]; requires memory for patches² numbers."""
        matrices = []
        if self.attention:
            halves = [layer.symmetric for layer in self.attention]
            matrices.append(sum((half @ half for half in halves[1:]), halves[0] @ halves[0]) / len(halves))
        if self.keys is not None:
            matrices.append(self.keys.symmetric)
        return matrices[0] if len(matrices) == 1 else (matrices[0] + matrices[1]) / 2

    def spread(self, values: Tensor) -> Tensor:
        """Multiply values [batch, patches] by the affinity."""
        products = []
        if self.attention:
            spread = [layer.spread(values, times=2) for layer in self.attention]
            products.append(sum(spread[1:], spread[0]) / len(spread))
        if self.keys is not None:
            products.append(self.keys.spread(values))
        return products[0] if len(products) == 1 else (products[0] + products[1]) / 2

    @property
    def nearly_uniform(self) -> Tensor:
        """Mask of images whose affinity makes any map nearly constant, bool [batch]."""
        parts = [*self.attention, *([] if self.keys is None else [self.keys])]
        return torch.stack([part.distance_to_uniform() for part in parts]).mean(dim=0) < _NEARLY_UNIFORM


def co_attention(layers: Sequence[Tensor], num_patches: int | None = None) -> Affinity:
    """Co-attention M = mean over layers of S², where S = (P + Pᵀ)/2 and P is a layer's attention, doubly stochastic.

    M is symmetric, doubly stochastic and positive semidefinite: patches that attend to the same patches are similar,
    whether or not they attend to each other. (S alone is not enough: if objects attend to the background and the
    background to objects, one step of it inverts a map.)

    Each layer is the mean over its heads, [batch, tokens, tokens], the patches last; layers with an empty row or column
    among the patches are left out, and ShapeError is raised if none remains.

    Source: affinity from attention, Lin et al., "CLIP is Also an Efficient Segmenter", CVPR 2023.

    >>> layer = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    >>> co_attention([layer]).matrix
    tensor([[[0.8200, 0.1800],
             [0.1800, 0.8200]]], dtype=torch.float64)
    """
    matrices = [balance(layer, num_patches) for layer in layers]
    balanced = tuple(layer for layer in matrices if layer is not None)
    if not balanced:
        raise ShapeError(
            f"Expected at least one layer, got {len(layers)} layers in which some patch attends to none or gets none."
        )
    return Affinity(attention=balanced)


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
    balanced = balance((total / len(layers)).clamp_min(0.0) ** _KEY_POWER)
    if balanced is None:
        raise ShapeError("Expected nonzero keys, got a patch with keys of 0.")
    return Affinity(keys=balanced)


def refine(grids: Tensor, affinity: Affinity, steps: int) -> Tensor:
    """Spread maps [batch, rows, cols] among similar patches: affinityᵏ g with k = steps; the sum of each map is kept.

    >>> refine(torch.tensor([[[1.0, 0.0]]]), co_attention([torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])]), 1)
    tensor([[[0.8200, 0.1800]]])
    """
    values = grids.detach().flatten(1)
    for _ in range(steps):
        values = affinity.spread(values)
    return values.reshape(grids.shape).to(grids.dtype)
