"""Statistics over images: standard errors, bootstrap intervals, paired differences between methods."""

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ShapeError, whole_number
from vitflow.images.typesetting import decimal

#: Bootstrap resamples of each interval.
RESAMPLES = 2000

#: Confidence level of the intervals.
CONFIDENCE = 0.95

# Resamples per matrix product, to limit memory on large data sets.
_CHUNK = 100


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over images with standard error and bootstrap interval.

    Attributes:
        mean: mean over the images with a value; None without any.
        standard_error: sample standard deviation / √count; None for fewer than two images.
        low, high: bootstrap interval of the mean; None for fewer than two images.
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
        return decimal(self.mean) + ("" if self.standard_error is None else f" ± {self.standard_error:.3f}")


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference between two methods on the same images.

    Attributes:
        first, second: the methods.
        estimate: estimate of first − second, over the images where both have a value.
        above: share of these images on which the first is higher, ties counted half; None without any.
    """

    first: str
    second: str
    estimate: Estimate
    above: float | None

    @property
    def is_clear(self) -> bool:
        """True if the interval excludes 0."""
        low, high = self.estimate.low, self.estimate.high
        return low is not None and high is not None and (low > 0.0 or high < 0.0)

    def reversed(self) -> "Difference":
        """Return second − first."""
        mean, low, high = (
            None if value is None else -value for value in (self.estimate.mean, self.estimate.low, self.estimate.high)
        )
        estimate = replace(self.estimate, mean=mean, low=high, high=low)
        return Difference(self.second, self.first, estimate, None if self.above is None else 1.0 - self.above)


def estimate_means(values: NDArray[np.float64], *, resamples: int = RESAMPLES, seed: int = 0) -> list[Estimate]:
    """Estimate the mean of each column over images, with a percentile bootstrap interval.

    All columns use the same resamples of images. NaN marks an undefined value: it is excluded, also in
    each resample, and counted.

    Args:
        values: [images, columns].
        resamples: number of resamples.
        seed: seed of the resampling; the same seed gives the same interval.

    Raises:
        ShapeError: values is not two-dimensional.
        OptionError: resamples is below 1.

    Source: Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (the percentile interval).

    >>> [estimate] = estimate_means(np.array([[0.0], [1.0], [np.nan], [1.0], [0.0]]))
    >>> estimate.mean, estimate.count, estimate.undefined, (estimate.low, estimate.high)
    (0.5, 4, 1, (0.0, 1.0))
    """
    if values.ndim != 2:
        raise ShapeError(f"Expected values [images, columns], got shape {values.shape}.")
    whole_number("resamples", resamples, 1)
    images, columns = values.shape
    defined = np.ma.masked_invalid(values)
    counts = defined.count(axis=0)
    means = defined_means(values)
    errors = defined.std(axis=0, ddof=1).filled(np.nan) / np.sqrt(np.maximum(counts, 1))
    lows, highs = np.full((2, columns), np.nan)
    several = counts > 1
    if several.any():
        drawn = _resampled_means(values[:, several], resamples, seed)
        tails = 50.0 * (1.0 - CONFIDENCE)
        lows[several], highs[several] = np.nanpercentile(drawn, (tails, 100.0 - tails), axis=0)
    return [
        Estimate(optional(mean), optional(error), optional(low), optional(high), int(count), int(images - count))
        for mean, error, low, high, count in zip(means, errors, lows, highs, counts, strict=True)
    ]


def paired_differences(
    labels: list[str],
    values: NDArray[np.float64],
    pairs: list[tuple[int, int]] | None = None,
    *,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Difference]:
    """Estimate the differences between pairs of methods on the same images.

    Pairing removes the difficulty of each image, so these intervals are narrower than those of the two means, whose
    overlap is not a test. Intervals are not corrected for multiple comparisons: with many pairs, some exclude 0 by
    chance.

    Args:
        labels: labels of the methods.
        values: [images, methods]; NaN if undefined.
        pairs: indices of the methods to compare; by default all pairs.
        resamples, seed: as for `estimate_means`.

    Raises:
        ShapeError: values does not have one column per label.

    >>> [difference] = paired_differences(["a", "b"], np.array([[0.9, 0.5], [0.4, 0.1], [0.7, 0.2]]))
    >>> round(difference.estimate.mean, 3), difference.is_clear, difference.above
    (0.4, True, 1.0)
    """
    if values.ndim != 2 or values.shape[1] != len(labels):
        raise ShapeError(f"Expected values [images, {len(labels)} methods], got shape {values.shape}.")
    pairs = list(combinations(range(len(labels)), 2)) if pairs is None else pairs
    if not pairs:
        return []
    differences = np.stack([values[:, i] - values[:, j] for i, j in pairs], axis=1)
    estimates = estimate_means(differences, resamples=resamples, seed=seed)
    higher = np.where(np.isnan(differences), np.nan, (differences > 0) + 0.5 * (differences == 0))
    above = map(optional, defined_means(higher))
    return [
        Difference(labels[i], labels[j], estimate, share)
        for (i, j), estimate, share in zip(pairs, estimates, above, strict=True)
    ]


def defined_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over images (the first axis) without NaN; NaN if no value is left.

    >>> defined_means(np.array([[1.0, np.nan], [2.0, np.nan]])).tolist()
    [1.5, nan]
    """
    means: NDArray[np.float64] = np.ma.masked_invalid(values).mean(axis=0).filled(np.nan)
    return means


def _resampled_means(values: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Return the mean of each column in each resample, [resamples, columns]; NaN if a resample has no value.

    Each resample draws as many images as there are, with replacement.

    Source: Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics, 1979.
    """
    images, columns = values.shape
    defined = ~np.isnan(values)
    filled, present = np.where(defined, values, 0.0), defined.astype(np.float64)
    random = np.random.default_rng((seed, images))
    means = np.full((resamples, columns), np.nan)
    for start in range(0, resamples, _CHUNK):
        chunk = means[start : start + _CHUNK]
        # How often each image is in each resample, [resamples, images].
        counts = np.array([np.bincount(random.integers(images, size=images), minlength=images) for _ in chunk], float)
        total = counts @ present
        np.divide(counts @ filled, total, out=chunk, where=total > 0)
    return means


def optional(value: float) -> float | None:
    """Return None for NaN, and any other number as a float."""
    return None if np.isnan(value) else float(value)
