"""Refinement: a map spread among the patches that the model treats alike.

Two patches are alike for a model if, layer by layer, they attend to the same patches (co-attention), or if their keys
point the same way. Either affinity is a doubly stochastic matrix: a map that it spreads keeps its sum, and a constant
map stays constant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vitflow.compiled import compiled_loosely
from vitflow.errors import OptionError, ShapeError, unknown_name
from vitflow.methods.by_picture import as_array, each_picture

AffinityName = Literal["attention", "keys", "both"]
AFFINITIES: tuple[AffinityName, ...] = get_args(AffinityName)

# Rows of a balanced matrix sum to 1 within this; more rounds than these are not made.
TOLERANCE, ROUNDS = 1e-9, 100
# The power that tells near keys from far ones.
_KEY_POWER = 4
# Matrices nearer to the uniform one than this (squared distance, the mean over layers) make every map nearly constant:
# those of random weights lie ten times nearer, of the trained models measured none lies within 0.03.
_NEARLY_UNIFORM = 0.01


def check_affinity(name: object) -> None:
    """Raise OptionError unless the name is one of attention, keys, both."""
    if name not in AFFINITIES:
        raise OptionError(unknown_name("affinity", name, AFFINITIES))


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """Positive matrices with the factors that make them doubly stochastic: P = diag(rows) · W · diag(cols).

    P is never written down: what it does to a vector takes one reading of W.

    Attributes:
        matrices: W, [batch, tokens, tokens]; the last `size` rows and columns count.
        rows, cols: the factors, float64 [batch, size].
        rest: half of what each row lacks to sum to 1 when the rounds end, float64 [batch, size]; the columns lack
            nothing. It counts on the diagonal of the symmetric matrix, so that this one keeps sums and constants.
    """

    matrices: Tensor
    rows: Tensor
    cols: Tensor
    rest: Tensor

    @property
    def matrix(self) -> Tensor:
        """P itself, float64 [batch, size, size]."""
        return self.rows.unsqueeze(-1) * _inner(self.matrices, self.rows.shape[-1]).double() * self.cols.unsqueeze(-2)

    @property
    def symmetric(self) -> Tensor:
        """S = (P + Pᵀ)/2, what the rows lack on its diagonal, float64 [batch, size, size]."""
        return (self.matrix + self.matrix.mT) / 2 + torch.diag_embed(self.rest)

    def spread(self, values: Tensor) -> Tensor:
        """S times values, float64 [batch, size]."""
        return self._spread(values) + self.rest * values

    def _spread(self, values: Tensor) -> Tensor:
        if not _in_memory(self.matrices):
            inner = _inner(self.matrices, self.rows.shape[-1]).double()
            down = self.rows * (inner @ (self.cols * values).unsqueeze(-1)).squeeze(-1)
            return (down + self.cols * (inner.mT @ (self.rows * values).unsqueeze(-1)).squeeze(-1)) / 2
        out = np.empty(tuple(values.shape))
        arrays = (as_array(self.matrices), as_array(self.rows), as_array(self.cols), as_array(values), out)
        each_picture(len(out), lambda number: _spread(*(array[number] for array in arrays)))
        return torch.from_numpy(out)

    def beside_uniform(self) -> Tensor:
        """‖P − 1/size‖², the squared distance to what makes every map constant, float64 [batch]."""
        if not _in_memory(self.matrices):
            return self.matrix.square().sum(dim=(-2, -1)) - 1
        arrays = (as_array(self.matrices), as_array(self.rows), as_array(self.cols))
        squares = each_picture(len(self.rows), lambda number: _square(*(array[number] for array in arrays)))
        return torch.tensor(squares, dtype=torch.float64) - 1


def balance(matrices: Tensor, size: int | None = None) -> Balanced | None:
    """Scale rows and columns of positive matrices, in turn, until both sum to 1.

    Args:
        matrices: [batch, tokens, tokens], no entry negative.
        size: how many of the last tokens count; all where it is None.

    Returns:
        The matrices with their factors; None where a row or a column holds nothing.

    Raises:
        ShapeError: the matrices are not square.

    Source: Sinkhorn & Knopp, "Concerning Nonnegative Matrices and Doubly Stochastic Matrices", 1967.

    >>> balance(torch.tensor([[[0.25, 0.75], [0.25, 0.75]]])).matrix
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]], dtype=torch.float64)
    """
    if matrices.ndim != 3 or matrices.shape[-1] != matrices.shape[-2]:
        raise ShapeError(f"Expected matrices [batch, tokens, tokens], got {tuple(matrices.shape)}.")
    size = matrices.shape[-1] if size is None else size
    if not _in_memory(matrices):
        return _balance_on_device(matrices, size)
    rows, cols, sums = (np.ones((len(matrices), size)) for _ in range(3))
    array = as_array(matrices)

    def work(number: int) -> bool:
        return bool(_balance(array[number], rows[number], cols[number], sums[number], TOLERANCE, ROUNDS))

    if not all(each_picture(len(rows), work)):
        return None
    return Balanced(matrices, torch.from_numpy(rows), torch.from_numpy(cols), torch.from_numpy((1 - sums) / 2))


def _balance_on_device(matrices: Tensor, size: int) -> Balanced | None:
    inner = _inner(matrices, size).double()
    if (inner.sum(dim=-1) <= 0).any() or (inner.sum(dim=-2) <= 0).any():
        return None
    rows, cols = inner.new_ones(len(inner), size), inner.new_ones(len(inner), size)
    open_ = inner.new_ones(len(inner), 1, dtype=torch.bool)  # a picture's factors do not depend on its neighbours
    for number in range(ROUNDS + 1):
        sums = (inner @ cols.unsqueeze(-1)).squeeze(-1)
        if number:
            open_ = open_ & ((rows * sums - 1).abs().amax(dim=-1, keepdim=True) > TOLERANCE)
        if number == ROUNDS or not open_.any():
            break
        rows = torch.where(open_, 1 / sums, rows)
        cols = torch.where(open_, 1 / (inner.mT @ rows.unsqueeze(-1)).squeeze(-1), cols)
    return Balanced(matrices, rows, cols, (1 - rows * sums) / 2)


@dataclass(frozen=True, slots=True, eq=False)
class Affinity:
    """How alike a model treats the patches of each picture: symmetric and doubly stochastic, [batch, patches, patches].

    Attributes:
        attention: balanced attention of each layer; the co-attention is the mean over them of S², S = (P + Pᵀ)/2.
        keys: balanced likeness of the keys, where it has a part in the affinity.
    """

    attention: tuple[Balanced, ...] = ()
    keys: Balanced | None = None

    @property
    def matrix(self) -> Tensor:
        """The affinity itself, float64 [batch, patches, patches]: memory for patches² numbers."""
        found = []
        if self.attention:
            halves = [layer.symmetric for layer in self.attention]
            found.append(sum((half @ half for half in halves[1:]), halves[0] @ halves[0]) / len(halves))
        if self.keys is not None:
            found.append(self.keys.symmetric)
        return found[0] if len(found) == 1 else (found[0] + found[1]) / 2

    def spread(self, values: Tensor) -> Tensor:
        """The affinity times values, float64 [batch, patches]."""
        found = []
        if self.attention:
            spread = [layer.spread(layer.spread(values)) for layer in self.attention]
            found.append(sum(spread[1:], spread[0]) / len(spread))
        if self.keys is not None:
            found.append(self.keys.spread(values))
        return found[0] if len(found) == 1 else (found[0] + found[1]) / 2

    @property
    def nearly_uniform(self) -> Tensor:
        """Whether it makes any map of a picture nearly constant, bool [batch]."""
        parts = [*self.attention, *([] if self.keys is None else [self.keys])]
        return torch.stack([part.beside_uniform() for part in parts]).mean(dim=0) < _NEARLY_UNIFORM


def co_attention(layers: Sequence[Tensor], num_patches: int | None = None) -> Affinity:
    """Co-attention M = mean over layers of S², where S = (P + Pᵀ)/2 and P is a layer's attention, doubly stochastic.

    M is symmetric, doubly stochastic and has no negative eigenvalue: patches that attend to the same patches are alike,
    whether or not they attend to each other. (S itself is not enough: where objects attend to the background and the
    background to objects, one step of it turns a map inside out.)

    Args:
        layers: attention of each layer averaged over its heads, [batch, tokens, tokens], no value weighting, no
            residual, nothing discarded; layers in which a row or a column holds nothing are left out.
        num_patches: how many of the last tokens are patches; all where it is None.

    Raises:
        ShapeError: a layer is not square, or none is left.

    Source: affinity from attention, Lin et al., "CLIP is Also an Efficient Segmenter", CVPR 2023.

    >>> layer = torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])
    >>> co_attention([layer]).matrix
    tensor([[[0.8200, 0.1800],
             [0.1800, 0.8200]]], dtype=torch.float64)
    """
    found = [balance(layer, num_patches) for layer in layers]
    balanced = tuple(layer for layer in found if layer is not None)
    if not balanced:
        raise ShapeError(
            f"Expected attention among patches in at least one layer, got {len(layers)} layers in which some patch "
            "attends to no other, or is attended to by none."
        )
    return Affinity(attention=balanced)


def key_affinity(layers: Sequence[Tensor]) -> Affinity:
    """Likeness of the patches' keys: K = Sinkhorn of ((mean over layers of cos(k_i, k_j))⁺)⁴.

    Args:
        layers: key vectors of each layer, heads side by side, [batch, patches, width]; cosines are taken in their
            precision, float32 at least.

    Raises:
        ShapeError: no layer, or a layer of another shape.

    Source: keys as patch descriptors, Siméoni et al., "Localizing Objects with Self-Supervised Transformers and no
    Labels", BMVC 2021.

    >>> key_affinity([torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])]).matrix
    tensor([[[1., 0.],
             [0., 1.]]], dtype=torch.float64)
    """
    if not layers or any(layer.ndim != 3 or layer.shape[:2] != layers[0].shape[:2] for layer in layers):
        shapes = ", ".join(str(tuple(layer.shape)) for layer in layers) or "none"
        raise ShapeError(f"Expected keys [batch, patches, width] of each layer, got {shapes}.")
    total: Tensor | None = None
    for layer in layers:
        units = torch.nn.functional.normalize(layer.detach() if layer.dtype.itemsize >= 4 else layer.float(), dim=-1)
        total = units @ units.mT if total is None else torch.baddbmm(total, units, units.mT)
    assert total is not None
    balanced = balance((total / len(layers)).double().clamp_min(0.0) ** _KEY_POWER)
    if balanced is None:
        raise ShapeError("Expected keys that are not zero, got a patch whose keys are.")
    return Affinity(keys=balanced)


def refine(grids: Tensor, affinity: Affinity, steps: int) -> Tensor:
    """Spread maps among patches that are alike: affinityᵏ g, with k = steps.

    Args:
        grids: maps, [batch, rows, cols], of any sign.
        affinity: of the same patches, in raster order.
        steps: how many times; 0 leaves the maps as they are.

    Returns:
        [batch, rows, cols] in the precision of `grids`; each map's sum is kept.

    Raises:
        OptionError: steps is negative.

    >>> refine(torch.tensor([[[1.0, 0.0]]]), co_attention([torch.tensor([[[0.9, 0.1], [0.1, 0.9]]])]), 1)
    tensor([[[0.8200, 0.1800]]])
    """
    if steps < 0:
        raise OptionError(f"Expected refine of 0 steps or more, got {steps}.")
    values = grids.detach().double().flatten(1)
    for _ in range(steps):
        values = affinity.spread(values)
    return values.reshape(grids.shape).to(grids.dtype)


def _inner(matrices: Tensor, size: int) -> Tensor:
    return matrices[..., matrices.shape[-2] - size :, matrices.shape[-1] - size :]


def _in_memory(matrices: Tensor) -> bool:
    return matrices.device.type == "cpu" and matrices.dtype in (torch.float32, torch.float64)


@compiled_loosely
def _balance(matrix: Any, rows: Any, cols: Any, reached: Any, tolerance: float, rounds: int) -> bool:
    """`balance` of one picture into `rows` and `cols`, which begin as ones, and the sums that its rows have reached.

    False where it cannot be.
    """
    size = rows.size
    first = matrix.shape[0] - size
    before, sums = np.empty(size), np.empty(size)
    for number in range(rounds + 1):
        worst = 0.0
        for j in range(size):
            sums[j] = 0.0
        for i in range(size):
            before[i] = rows[i]
            row = matrix[first + i, first:]
            total = 0.0
            for j in range(size):
                total += row[j] * cols[j]
            if not total > 0.0:
                return False
            reached[i] = rows[i] * total
            worst = max(worst, abs(reached[i] - 1.0))
            rows[i] = 1.0 / total
            for j in range(size):
                sums[j] += rows[i] * row[j]
        if number == rounds or (number > 0 and worst <= tolerance):
            for i in range(size):
                rows[i] = before[i]  # the round that only measured changes nothing
            return True
        for j in range(size):
            if not sums[j] > 0.0:
                return False
            cols[j] = 1.0 / sums[j]
    return True


@compiled_loosely
def _spread(matrix: Any, rows: Any, cols: Any, values: Any, out: Any) -> None:
    """(P + Pᵀ)/2 · values of one picture into `out`."""
    size = rows.size
    first = matrix.shape[0] - size
    scaled, back = cols * values, np.zeros(size)
    for i in range(size):
        row = matrix[first + i, first:]
        total, weight = 0.0, rows[i] * values[i]
        for j in range(size):
            total += row[j] * scaled[j]
            back[j] += weight * row[j]
        out[i] = rows[i] * total
    for j in range(size):
        out[j] = (out[j] + cols[j] * back[j]) / 2.0


@compiled_loosely
def _square(matrix: Any, rows: Any, cols: Any) -> float:
    """‖P‖², the sum of the squares of one picture's balanced matrix."""
    size = rows.size
    first = matrix.shape[0] - size
    whole = 0.0
    for i in range(size):
        row = matrix[first + i, first:]
        total = 0.0
        for j in range(size):
            entry = row[j] * cols[j]
            total += entry * entry
        whole += rows[i] * rows[i] * total
    return whole
