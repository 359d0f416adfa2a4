"""Statistics over images: standard errors, intervals, paired differences between methods."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from vitflow.errors import ShapeError
from vitflow.images.typesetting import decimal

#: Confidence level of the intervals.
CONFIDENCE = 0.95

#: Number of images below which no difference is called clear.
MIN_CLEAR = 10

# Weight of a pseudo-observation at each end of the range, for means of shares, their differences, and other means.
_SHARE, _SHARE_DIFFERENCE, _BOUNDED = 2.0, 1.0, 0.03

Limits = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over images with standard error and interval.

    Attributes:
        mean: mean over the images with a value; None without any.
        standard_error: sample standard deviation / √count; None for fewer than two images.
        low, high: 95 % interval of the mean; None for fewer than two images.
        count: number of images with a value.
        undefined: number of images without a value, excluded from all of the above; 0 if the metric was not measured.
    """

    mean: float | None
    standard_error: float | None
    low: float | None
    high: float | None
    count: int
    undefined: int

    def __str__(self) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:.3f}"
        return f"{decimal(self.mean)}{error}{f' (undefined on {self.undefined})' if self.undefined else ''}"


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two methods on the same images.

    Attributes:
        first, second: the methods.
        estimate: estimate of first − second, over the images where both have a value.
    """

    first: str
    second: str
    estimate: Estimate

    @property
    def is_clear(self) -> bool:
        """True if there are at least ten images and the interval excludes 0."""
        low, high = self.estimate.low, self.estimate.high
        return self.estimate.count >= MIN_CLEAR and low is not None and high is not None and (low > 0.0 or high < 0.0)


def estimate_means(values: NDArray[np.float64], *, limits: Limits | None = None, share: bool = False) -> list[Estimate]:
    """Estimate the mean of each column over images, with a 95 % interval.

    The interval is Student's t interval, for shares the normal one. A few values near an end of their range do not show
    how far away the rare ones are, so it includes a pseudo-observation at each end, of weight 2 for shares and 0.03 for
    other values, and does not exceed the range. NaN marks an undefined value: it is excluded and counted.

    Args:
        values: [images, columns].
        limits: smallest and largest possible value; without them, no pseudo-observations.
        share: the values are hits and misses, at the ends of the range.

    Source: Agresti & Coull, "Approximate Is Better than 'Exact' for Interval Estimation of Binomial Proportions", The
    American Statistician, 1998 (shares); simulations for the other weight.

    >>> [estimate] = estimate_means(np.array([[0.0], [1.0], [np.nan], [1.0], [1.0]]), limits=(0, 1), share=True)
    >>> estimate.mean, estimate.count, estimate.undefined, (round(estimate.low, 2), round(estimate.high, 2))
    (0.75, 4, 1, (0.27, 0.98))
    """
    return _estimates(values, limits, _SHARE if share else _BOUNDED, share)


def paired_differences(
    labels: list[str],
    values: NDArray[np.float64],
    pairs: list[tuple[int, int]] | None = None,
    *,
    limits: Limits | None = None,
    share: bool = False,
) -> list[Difference]:
    """Estimate the differences between pairs of methods on the same images.

    Pairing removes the difficulty of each image, so these intervals are narrower than those of the two means, whose
    overlap is not a test. They are Student's t intervals; for shares normal ones, with a pseudo-observation at each end
    of the range. Intervals are not corrected for multiple comparisons: with many pairs, some exclude 0 by chance.

    Args:
        labels: labels of the methods.
        values: [images, methods]; NaN if undefined.
        pairs: indices of the methods to compare; by default all pairs.
        limits, share: as for `estimate_means`.

    Source: Bonett & Price, "Adjusted Wald Confidence Interval for a Difference of Binomial Proportions Based on Paired
    Data", Journal of Educational and Behavioral Statistics, 2012 (shares).

    >>> [difference] = paired_differences(["a", "b"], np.array([[0.9, 0.5], [0.4, 0.1], [0.7, 0.2]] * 4))
    >>> round(difference.estimate.mean, 3), difference.is_clear
    (0.4, True)
    """
    if values.ndim != 2 or values.shape[1] != len(labels):
        raise ShapeError(f"Expected values [images, {len(labels)} methods], got shape {values.shape}.")
    pairs = list(combinations(range(len(labels)), 2)) if pairs is None else pairs
    if not pairs:
        return []
    differences = np.stack([values[:, i] - values[:, j] for i, j in pairs], axis=1)
    widest = None if limits is None else (limits[0] - limits[1], limits[1] - limits[0])
    estimates = _estimates(differences, widest, _SHARE_DIFFERENCE if share else 0.0, share)
    return [Difference(labels[i], labels[j], estimate) for (i, j), estimate in zip(pairs, estimates, strict=True)]


def _estimates(values: NDArray[np.float64], limits: Limits | None, weight: float, share: bool) -> list[Estimate]:
    """Estimate the mean of each column; the interval includes a pseudo-observation of this weight at each limit.

    Equal values other than shares have none: they show no spread.
    """
    if values.ndim != 2:
        raise ShapeError(f"Expected values [images, columns], got shape {values.shape}.")
    least, most = (-np.inf, np.inf) if limits is None else limits
    tail, estimates = (1.0 + CONFIDENCE) / 2.0, []
    for column in values.T:
        defined = column[np.isfinite(column)]
        count = len(defined)
        if count < 2:
            mean = float(defined[0]) if count else None
            estimates.append(Estimate(mean, None, None, None, count, len(column) - count))
            continue
        error = float(defined.std(ddof=1)) / count**0.5
        quantile = ndtri(tail) if share else stdtrit(count - 1, tail)
        ends = limits if limits is not None and (share or np.ptp(defined) > 0.0) else ()
        total = count + weight * len(ends)
        middle = (defined.sum() + weight * sum(ends)) / total
        squares = ((defined - middle) ** 2).sum() + weight * sum((end - middle) ** 2 for end in ends)
        half = quantile * (squares / (total - 1.0) / total) ** 0.5
        low, high = max(middle - half, least), min(middle + half, most)
        estimates.append(Estimate(float(defined.mean()), error, float(low), float(high), count, len(column) - count))
    return estimates


def defined_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over images (the first axis) without NaN; NaN if no value is left.

    >>> defined_means(np.array([[1.0, np.nan], [2.0, np.nan]])).tolist()
    [1.5, nan]
    """
    means: NDArray[np.float64] = np.ma.masked_invalid(values).mean(axis=0).filled(np.nan)
    return means


def optional(value: float) -> float | None:
    """Return None for NaN, and any other number as a float."""
    return None if np.isnan(value) else float(value)
