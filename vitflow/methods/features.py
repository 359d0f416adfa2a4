"""Similarity of patch features, and their principal components."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from vitflow.errors import OutsideGridError, ShapeError


def similarity(features: Tensor, reference: Tensor) -> Tensor:
    """Cosine of the features of each patch and a reference: x · r / (|x| |r|), and 0 if one of them is 0.

    Args:
        features: x, [batch, patches, width].
        reference: r, one for each image, [batch, width].

    Returns:
        [batch, patches], from −1 to 1.

    Raises:
        ShapeError: other shapes.

    >>> similarity(torch.tensor([[[2.0, 0.0], [1.0, 1.0], [0.0, -3.0]]]), torch.tensor([[0.0, 4.0]]))
    tensor([[ 0.0000,  0.7071, -1.0000]])
    """
    if features.ndim != 3 or reference.shape != (len(features), features.shape[-1]):
        raise ShapeError(
            "Expected features [batch, patches, width] and a reference [batch, width], got "
            f"{tuple(features.shape)} and {tuple(reference.shape)}."
        )
    return (normalize(features, dim=-1) @ normalize(reference, dim=-1).unsqueeze(-1)).squeeze(-1)


def area_shares(box: tuple[float, float, float, float], rows: int, cols: int) -> Tensor:
    """Return the share of a box in each patch; the shares sum to 1.

    Args:
        box: its left, top, right and bottom edge, in patches from the top left corner.
        rows, cols: of the patches.

    Returns:
        float64 [rows · cols], in raster order.

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
        directions: one for each component, of length 1, float64 [width, components]; 0 without further
            variance.
        shares: share of the variance of each component, [components].
    """

    mean: Tensor
    directions: Tensor
    shares: Tensor

    def of(self, features: Tensor) -> Tensor:
        """Project features [..., width] onto the components: float64 [..., components]."""
        return (features.double() - self.mean) @ self.directions


def principal_components(features: Tensor, count: int = 3) -> Components:
    """Compute the first principal components, the leading eigenvectors of the covariance, in float64.

    The sign of an eigenvector is arbitrary. Here the entry with the largest absolute value is positive, so that the
    same features give the same signs with any solver.

    Args:
        features: [samples, width], at least one sample more than components.
        count: number of components.

    Raises:
        ShapeError: other shapes, or too few samples.

    >>> found = principal_components(torch.tensor([[0.0, 0.0], [0.0, -2.0], [1.0, -1.0], [-1.0, -1.0]]), count=1)
    >>> found.shares.tolist(), principal_components(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1).directions.tolist()
    ([0.5], [[0.7071067811865475], [0.7071067811865475]])
    """
    if features.ndim != 2 or len(features) <= count or features.shape[1] < count:
        raise ShapeError(
            f"Expected features [samples, width] with more than {count} samples and at least {count} channels, got "
            f"{tuple(features.shape)}."
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


# A component with a smaller share of the variance is rounding.
_ROUNDING = 1e-12
