"""Balancing: positive matrices scaled until their rows and columns sum to 1, and what they then do to a map.

What is done to one picture's matrix on a processor is compiled. Elsewhere, and for the first pictures of a process,
before numba would be loaded, torch does the same in float64.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitflow.compiled import compiled_loosely, worth_compiling
from vitflow.errors import ShapeError
from vitflow.methods.onepass import as_array, each_picture

# Rows of a balanced matrix sum to 1 within this; more rounds than these are not made.
TOLERANCE, ROUNDS = 1e-9, 100


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
        if not _is_compiled_for(self.matrices):
            inner = _inner(self.matrices, self.rows.shape[-1]).double()
            down = self.rows * (inner @ (self.cols * values).unsqueeze(-1)).squeeze(-1)
            return (down + self.cols * (inner.mT @ (self.rows * values).unsqueeze(-1)).squeeze(-1)) / 2
        out = np.empty(tuple(values.shape))
        arrays = (as_array(self.matrices), as_array(self.rows), as_array(self.cols), as_array(values), out)
        each_picture(len(out), lambda number: _spread(*(array[number] for array in arrays)))
        return torch.from_numpy(out)

    def beside_uniform(self) -> Tensor:
        """‖P − 1/size‖², the squared distance to what makes every map constant, float64 [batch]."""
        if not _is_compiled_for(self.matrices):
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
    if not _is_compiled_for(matrices):
        return _balance_by_torch(matrices, size)
    rows, cols, sums = (np.ones((len(matrices), size)) for _ in range(3))
    array = as_array(matrices)

    def work(number: int) -> bool:
        return bool(_balance(array[number], rows[number], cols[number], sums[number], TOLERANCE, ROUNDS))

    if not all(each_picture(len(rows), work)):
        return None
    return Balanced(matrices, torch.from_numpy(rows), torch.from_numpy(cols), torch.from_numpy((1 - sums) / 2))


def _balance_by_torch(matrices: Tensor, size: int) -> Balanced | None:
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


def _inner(matrices: Tensor, size: int) -> Tensor:
    return matrices[..., matrices.shape[-2] - size :, matrices.shape[-1] - size :]


def _is_compiled_for(matrices: Tensor) -> bool:
    """Whether compiled code takes these matrices, and they are worth it; all others are left to torch."""
    in_memory = matrices.device.type == "cpu" and matrices.dtype in (torch.float32, torch.float64)
    return in_memory and worth_compiling(matrices.numel())


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
