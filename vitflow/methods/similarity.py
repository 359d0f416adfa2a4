"""Similarity of patch features, their principal components, and similarity of the rankings of two maps."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from vitflow.errors import OutsideGridError, ShapeError

Values = NDArray[np.floating[Any]]
# A principal component with a smaller share of the variance is rounding.
_ROUNDING = 1e-12


def similarity(features: Tensor, reference: Tensor) -> Tensor:
    """Cosine of the features of each patch [batch, patches, width] and a reference [batch, width]; 0 if one is 0.

    >>> similarity(torch.tensor([[[2.0, 0.0], [1.0, 1.0], [0.0, -3.0]]]), torch.tensor([[0.0, 4.0]]))
    tensor([[ 0.0000,  0.7071, -1.0000]])
    """
    return (normalize(features, dim=-1) @ normalize(reference, dim=-1).unsqueeze(-1)).squeeze(-1)


def area_shares(box: tuple[float, float, float, float], rows: int, cols: int) -> Tensor:
    """Return the share of a box in each patch, float64 [rows · cols]; its edges are in patches from the top left.

    Raises:
        OutsideGridError: the box has no area on the patches.

    >>> area_shares((0.5, 0.0, 2.0, 1.0), 1, 3).tolist()
    [0.3333333333333333, 0.6666666666666666, 0.0]
    """
    left, top, right, bottom = box
    down, across = (
        (torch.arange(1.0, count + 1, dtype=torch.float64).clamp_max(last) - torch.arange(count).clamp_min(first))
        for count, first, last in ((rows, top, bottom), (cols, left, right))
    )
    areas = (down.clamp_min(0)[:, None] * across.clamp_min(0)).flatten()
    if not areas.sum() > 0:
        raise OutsideGridError(f"The box {box} is outside the grid of {rows} × {cols} patches.")
    return areas / areas.sum()


@dataclass(frozen=True, slots=True, eq=False)
class Components:
    """Principal components of features.

    Attributes:
        mean: of the features, float64 [width].
        directions: of length 1, float64 [width, components]; 0 without further variance.
        shares: share of the variance of each component, [components].
    """

    mean: Tensor
    directions: Tensor
    shares: Tensor

    def of(self, features: Tensor) -> Tensor:
        """Project features [..., width] onto the components: float64 [..., components]."""
        return (features.double() - self.mean) @ self.directions


def principal_components(features: Tensor, count: int = 3) -> Components:
    """Return the leading eigenvectors of the covariance of features [samples, width], computed in float64.

    The sign of an eigenvector is arbitrary. Here the entry with the largest absolute value is positive, so that the
    same features give the same signs with any solver.

    >>> found = principal_components(torch.tensor([[0.0, 0.0], [0.0, -2.0], [1.0, -1.0], [-1.0, -1.0]]), count=1)
    >>> found.shares.tolist(), principal_components(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1).directions.tolist()
    ([0.5], [[0.7071067811865475], [0.7071067811865475]])
    """
    if features.ndim != 2 or len(features) <= count or features.shape[1] < count:
        raise ShapeError(
            f"Expected more than {count} samples and at least {count} channels, got {tuple(features.shape)}."
        )
    rows = features.detach().double()
    mean = rows.mean(dim=0)
    centred = rows - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred)  # in rising order
    values, vectors = values.flip(0)[:count].clamp_min(0), vectors.flip(1)[:, :count]
    largest = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True))
    total = centred.square().sum()
    shares = values / total if total > 0 else torch.zeros_like(values)
    return Components(mean, vectors * largest.sign() * (shares > _ROUNDING), shares)


# -- rankings, with ties -----------------------------------------------------------------------------------------------


def spearman(first: Values, second: Values) -> float | None:
    """Spearman's rank correlation of two maps of one shape, with average ranks for ties.

    Returns:
        ρ from −1 to 1; None if a map is constant up to the rounding of float32.

    Raises:
        ShapeError: the shapes differ, there are fewer than two values, or some are NaN or infinite.

    Source: Spearman, "The Proof and Measurement of Association between Two Things", 1904.

    >>> spearman(np.array([0.1, 0.2, 0.4]), np.array([1.0, 2.0, 3.0]))
    1.0
    >>> spearman(np.array([0.1, 0.2]), np.array([5.0, 5.0])) is None
    True
    """
    _check(first, second)
    if is_constant(first) or is_constant(second):
        return None
    from scipy.stats import rankdata  # slow to import: the first map does not need it

    a, b = (rankdata(values.ravel()) - (values.size + 1) / 2 for values in (first, second))
    return float(np.clip(a @ b / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))


def is_constant(values: Values) -> bool:
    """Return True if all values are equal up to the rounding of float32."""
    low, high = float(values.min()), float(values.max())
    return high - low <= 1e-6 * max(abs(low), abs(high))


def _check(first: Values, second: Values) -> None:
    if first.shape != second.shape or first.size < 2:
        raise ShapeError(
            f"Expected two maps of one shape with at least 2 values, got {first.shape} and {second.shape}."
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ShapeError("Expected finite values, got NaN or infinite ones: leave out these patches in both maps.")
