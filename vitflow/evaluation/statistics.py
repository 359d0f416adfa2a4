"""Statistics of means over images: standard errors, bootstrap intervals, paired differences."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from vitflow.errors import OptionError, ShapeError
from vitflow.images.typesetting import decimal

#: Resamples of the images behind every interval.
RESAMPLES = 2000

#: Share of the resamples' means that an interval holds.
CONFIDENCE = 0.95

# Resamples are counted in blocks of at most this many numbers, so that a large data set needs little memory.
_BLOCK = 2**22


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over images, and how far it can be trusted.

    Attributes:
        mean: over the images with a value; None where there is none.
        standard_error: sample standard deviation / √count; None for fewer than two images.
        low, high: bootstrap interval of the mean; None for fewer than two images.
        count: images with a value.
        undefined: images without one, which are left out of all of the above; 0 where nothing was measured at all.
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
    """Mean difference between two methods on the same images.

    Attributes:
        first, second: the methods.
        estimate: of first − second, over the images where both have a value.
        above: share of these images on which the first is higher, ties counted half; None where there are none.
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


def resampled_counts(images: int, *, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[NDArray[np.float64]]:
    """Yield the number of times each image is in each bootstrap resample: blocks [resamples, images].

    Args:
        images: how many there are; each resample draws as many with replacement.
        resamples: how many resamples there are in all blocks together.
        seed: another seed draws others.

    Raises:
        OptionError: there are no images or no resamples.

    Source: Efron, "Bootstrap Methods: Another Look at the Jackknife", Annals of Statistics, 1979.

    >>> [block.sum(axis=1).tolist() for block in resampled_counts(5, resamples=3)]
    [[5.0, 5.0, 5.0]]
    """
    if images < 1 or resamples < 1:
        raise OptionError(f"Expected at least 1 image and 1 resample, got {images} and {resamples}.")
    random = np.random.default_rng((seed, images))
    block = max(_BLOCK // images, 1)
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        drawn = random.integers(images, size=(size, images))
        places = drawn + images * np.arange(size)[:, None]
        counts = np.bincount(places.ravel(), minlength=size * images)
        yield counts.reshape(size, images).astype(np.float64)


def estimate_means(
    values: NDArray[np.float64], *, resamples: int = RESAMPLES, seed: int = 0, confidence: float = CONFIDENCE
) -> list[Estimate]:
    """Estimate the mean of each column over images, with a percentile bootstrap interval.

    All columns use the same resamples of images. A NaN is a value that is not defined for its image: it is left
    out, in each resample, too, and counted.

    Args:
        values: [images, columns].
        resamples: resamples of the images.
        seed: of the resampling; the same seed gives the same interval.
        confidence: share of the resamples' means that lies between low and high.

    Raises:
        ShapeError: values have another number of axes.
        OptionError: confidence lies outside 0 … 1.

    Source: Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13 (the percentile interval).

    >>> [estimate] = estimate_means(np.array([[0.0], [1.0], [np.nan], [1.0], [0.0]]))
    >>> estimate.mean, estimate.count, estimate.undefined, (estimate.low, estimate.high)
    (0.5, 4, 1, (0.0, 1.0))
    """
    if values.ndim != 2:
        raise ShapeError(f"Expected values [images, columns], got shape {values.shape}.")
    if not 0.0 < confidence < 1.0:
        raise OptionError(f"Expected 0 < confidence < 1, got {confidence}.")
    images, columns = values.shape
    defined = ~np.isnan(values)
    counts = defined.sum(axis=0)
    means = defined_means(values)
    spread = np.where(defined, values - means, 0.0)
    errors = np.sqrt(_ratio((spread**2).sum(axis=0), counts - 1) / np.maximum(counts, 1))
    lows, highs = np.full((2, columns), np.nan)
    several = counts > 1
    if several.any():
        drawn = _resampled_means(values[:, several], resamples, seed)
        tails = 50.0 * (1.0 - confidence)
        lows[several], highs[several] = np.nanpercentile(drawn, (tails, 100.0 - tails), axis=0)
    return [
        Estimate(_number(mean), _number(error), _number(low), _number(high), int(count), int(images - count))
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

    Pairing takes out what makes an image easy or hard for every method, so that these intervals are narrower than
    the ones around two means; that those overlap says nothing. With many pairs some intervals leave out 0 by chance:
    they are not corrected for how many pairs there are.

    Args:
        labels: the methods.
        values: [images, methods]; NaN where a value is not defined.
        pairs: numbers of the methods to compare; by default all pairs.
        resamples, seed: as for `estimate_means`.

    Raises:
        ShapeError: there is not one column per label.

    >>> [difference] = paired_differences(["a", "b"], np.array([[0.9, 0.5], [0.4, 0.1], [0.7, 0.2]]))
    >>> round(difference.estimate.mean, 3), difference.is_clear, difference.above
    (0.4, True, 1.0)
    """
    if values.ndim != 2 or values.shape[1] != len(labels):
        raise ShapeError(f"Expected values [images, {len(labels)} methods], got shape {values.shape}.")
    pairs = list(combinations(range(len(labels)), 2)) if pairs is None else pairs
    if not pairs:
        return []
    apart = np.stack([values[:, i] - values[:, j] for i, j in pairs], axis=1)
    estimates = estimate_means(apart, resamples=resamples, seed=seed)
    higher = np.where(np.isnan(apart), np.nan, (apart > 0) + 0.5 * (apart == 0))
    above = map(_number, defined_means(higher))
    return [
        Difference(labels[i], labels[j], estimate, share)
        for (i, j), estimate, share in zip(pairs, estimates, above, strict=True)
    ]


def defined_means(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over images, the first axis, ignoring NaN; NaN if all are NaN.

    >>> defined_means(np.array([[1.0, np.nan], [2.0, np.nan]])).tolist()
    [1.5, nan]
    """
    defined = ~np.isnan(values)
    return _ratio(np.where(defined, values, 0.0).sum(axis=0), defined.sum(axis=0))


def _resampled_means(values: NDArray[np.float64], resamples: int, seed: int) -> NDArray[np.float64]:
    """Return the mean of each column in each resample, [resamples, columns]; NaN if a resample has no value."""
    defined = ~np.isnan(values)
    filled, present = np.where(defined, values, 0.0), defined.astype(np.float64)
    blocks = resampled_counts(len(values), resamples=resamples, seed=seed)
    return np.concatenate([_ratio(counts @ filled, counts @ present) for counts in blocks])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown; the first row is its head, the first column text.

    >>> print(markdown_table([["method", "energy"], ["rollout", "0.500"]]))
    | method | energy |
    | --- | ---: |
    | rollout | 0.500 |
    """
    ruled = [rows[0], ["---", *["---:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


def _ratio(above: NDArray[np.float64], below: NDArray[np.floating] | NDArray[np.integer]) -> NDArray[np.float64]:
    """above / below, NaN where below is 0 or less."""
    shares: NDArray[np.float64] = np.full(above.shape, np.nan)
    np.divide(above, below, out=shares, where=below > 0)
    return shares


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
