"""Balancing: positive matrices scaled until their rows and columns sum to 1, and their products with a map."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitflow.errors import ShapeError

# Rows of a balanced matrix sum to 1 within this tolerance, after at most this many rounds.
TOLERANCE, ROUNDS = 1e-9, 100


@dataclass(frozen=True, slots=True, eq=False)
class Balanced:
    """Positive matrices with the factors that make them doubly stochastic: P = diag(rows) · W · diag(cols).

    Attributes:
        matrices: W, [batch, size, size]; products with it are taken in float64.
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
        return self.rows.unsqueeze(-1) * self.matrices.double() * self.cols.unsqueeze(-2)

    @property
    def symmetric(self) -> Tensor:
        """S = (P + Pᵀ)/2, with `rest` added to its diagonal, float64 [batch, size, size]."""
        return (self.matrix + self.matrix.mT) / 2 + torch.diag_embed(self.rest)

    def spread(self, values: Tensor) -> Tensor:
        """S times values, float64 [batch, size]; P is not formed."""
        matrices = self.matrices.double()
        forth = self.rows * _times(self.cols * values, matrices.mT)
        back = self.cols * _times(self.rows * values, matrices)
        return (forth + back) / 2 + self.rest * values

    def distance_to_uniform(self) -> Tensor:
        """‖P − 1/size‖², the squared distance to the matrix that makes every map constant, float64 [batch]."""
        squares = _times(self.rows.square(), self.matrices.double().square())
        return (squares * self.cols.square()).sum(dim=-1) - 1


def balance(matrices: Tensor, size: int | None = None) -> Balanced | None:
    """Scale rows and columns of positive matrices, in turn, until both sum to 1.

    Args:
        matrices: [batch, tokens, tokens], no entry negative.
        size: use the last `size` rows and columns only; None for all.

    Returns:
        The matrices with their factors; None if some row or column sums to 0.

    Raises:
        ShapeError: the matrices are not square.

    Source: Sinkhorn & Knopp, "Concerning Nonnegative Matrices and Doubly Stochastic Matrices", 1967.

    >>> balance(torch.tensor([[[0.25, 0.75], [0.25, 0.75]]])).matrix
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]], dtype=torch.float64)
    """
    if matrices.ndim != 3 or matrices.shape[-1] != matrices.shape[-2]:
        raise ShapeError(f"Expected matrices [batch, tokens, tokens], got {tuple(matrices.shape)}.")
    first = 0 if size is None else matrices.shape[-1] - size
    inner = matrices[:, first:, first:].double()
    rows, cols = inner.new_ones(inner.shape[:2]), inner.new_ones(inner.shape[:2])
    open_ = inner.new_ones(len(inner), 1, dtype=torch.bool)  # the factors of a picture do not depend on its neighbours
    for number in range(ROUNDS + 1):
        sums = _times(cols, inner.mT)
        if number == 0 and ((sums <= 0).any() or (_times(1 / sums, inner) <= 0).any()):
            return None
        if number:
            open_ = open_ & ((rows * sums - 1).abs().amax(dim=-1, keepdim=True) > TOLERANCE)
        if number == ROUNDS or not open_.any():
            break
        rows = torch.where(open_, 1 / sums, rows)
        cols = torch.where(open_, 1 / _times(rows, inner), cols)
    return Balanced(matrices[:, first:, first:], rows, cols, (1 - rows * sums) / 2)


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Row vectors [batch, m] times matrices [batch, m, n], several times as fast as matrices times columns."""
    return (rows.unsqueeze(1) @ matrices).squeeze(1)
