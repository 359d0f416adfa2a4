"""Means, standard errors, intervals and paired differences: literal formulas, SciPy, and coverage by simulation.

    python -m tests.evaluation.test_statistics

prints the coverage in docs/evaluation.md.
"""

import numpy as np
import pytest
from scipy import stats

from vitflow.errors import ShapeError
from vitflow.evaluation.statistics import Estimate, estimate_means, paired_differences

# Name → parameters of the beta distribution of values in [0, 1], skewed as those of ROC-AUC and of deletion.
BETAS = {"AUC 0.93": (11.4, 0.86), "AUC 0.95": (9.1, 0.48), "AUC 0.99": (20.0, 0.3), "deletion": (1.3, 5.0)}
SHARES = (0.02, 0.1, 0.5, 0.8, 0.95, 0.99)
# Shares of images on which only the first, and only the second of two methods hits.
DISCORDANT = ((0.05, 0.05), (0.1, 0.02), (0.3, 0.1), (0.02, 0.0))
FEW = (5, 8, 10, 20, 50)


def coverage(values: np.ndarray, truth: float, **options) -> float:
    """Share of the studies [images, studies] whose interval contains the true mean."""
    estimates = estimate_means(values, **options)
    return float(np.mean([one.low - 1e-9 <= truth <= one.high + 1e-9 for one in estimates]))


def coverage_of_differences(first: np.ndarray, second: np.ndarray, truth: float, **options) -> float:
    """The same for the paired differences of two methods, [images, studies] each."""
    studies = first.shape[1]
    values, pairs = np.concatenate([first, second], axis=1), [(study, study + studies) for study in range(studies)]
    estimates = [one.estimate for one in paired_differences(["method"] * 2 * studies, values, pairs, **options)]
    return float(np.mean([one.low - 1e-9 <= truth <= one.high + 1e-9 for one in estimates]))


def simulated(images: int, studies: int) -> dict[str, float]:
    """Coverage of each kind of value."""
    random, bounds = np.random.default_rng(images), {"limits": (0.0, 1.0)}
    hard = random.random((images, studies))  # the difficulty of each image, which pairing removes
    normal = hard + random.normal(0.02, 0.1, (images, studies))
    held = {"normal differences": coverage_of_differences(normal, hard, 0.02, limits=(-9.0, 9.0))}
    for name, (a, b) in BETAS.items():
        held[name] = coverage(random.beta(a, b, (images, studies)), a / (a + b), **bounds)
    for p in SHARES:
        held[f"share {p}"] = coverage((random.random((images, studies)) < p).astype(float), p, share=True, **bounds)
    for first, second in DISCORDANT:
        drawn = random.random((images, studies))
        hits = (drawn < first).astype(float), (drawn > 1.0 - second).astype(float)
        held[f"shares {first} − {second}"] = coverage_of_differences(*hits, first - second, share=True, **bounds)
    return held


@pytest.mark.parametrize("images", FEW)
def test_intervals_contain_the_truth_as_often_as_they_say(images):
    held = simulated(images, 1500)
    # Three standard errors of the simulation: 0.017 at 0.95, 0.023 at 0.90.
    assert held.pop("normal differences") > 0.94 - 0.018
    assert min(held.values()) > 0.90 - 0.023, held


def test_equal_methods_are_not_called_clear_on_few_images_and_rarely_on_more():
    random = np.random.default_rng(6)
    clear = {
        images: np.mean([paired_differences(["a", "b"], random.random((images, 2)))[0].is_clear for _ in range(400)])
        for images in (5, 9, 10, 40)
    }
    assert clear[5] == clear[9] == 0.0 and max(clear.values()) < 0.09


@pytest.mark.parametrize(("share", "weight", "quantile"), [(False, 0.03, stats.t(6).ppf(0.975)), (True, 2.0, 1.959964)])
def test_an_interval_is_that_of_its_formula(share, weight, quantile):
    values = np.array([1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0] if share else [0.9, 0.8, 0.95, 0.4, 0.99, 0.7, 0.85])
    points, weights = [*values, 0.0, 1.0], [1.0] * 7 + [weight] * 2
    total = sum(weights)
    middle = sum(w * x for w, x in zip(weights, points, strict=True)) / total
    variance = sum(w * (x - middle) ** 2 for w, x in zip(weights, points, strict=True)) / (total - 1)
    [actual] = estimate_means(values[:, None], limits=(0.0, 1.0), share=share)
    expected = middle - quantile * (variance / total) ** 0.5, middle + quantile * (variance / total) ** 0.5
    assert (actual.low, actual.high) == pytest.approx((expected[0], min(expected[1], 1.0)), abs=1e-6)
    assert actual.mean == pytest.approx(values.mean())


def test_means_and_differences_are_scipys_without_undefined_values():
    random = np.random.default_rng(0)
    values = random.normal(size=(50, 3))
    values[random.random((50, 3)) < 0.2] = np.nan
    for column, estimate in zip(values.T, estimate_means(values), strict=True):
        defined = column[~np.isnan(column)]
        interval = stats.ttest_1samp(defined, 0.0).confidence_interval()
        assert (estimate.mean, estimate.standard_error) == pytest.approx((defined.mean(), stats.sem(defined)))
        assert (estimate.low, estimate.high) == pytest.approx(tuple(interval))
        assert (estimate.count, estimate.undefined) == (len(defined), 50 - len(defined))
    [difference, *_] = paired_differences(["a", "b", "c"], values)
    both = values[~np.isnan(values[:, :2]).any(axis=1), :2]
    interval = stats.ttest_rel(*both.T).confidence_interval()
    assert (difference.estimate.low, difference.estimate.high) == pytest.approx(tuple(interval))


def test_equal_values_have_no_spread_and_few_no_interval():
    constant, nothing, one = estimate_means(
        np.array([[1.0, np.nan, 0.3], [1.0, np.nan, np.nan], [1.0, np.nan, np.nan]]), limits=(0.0, 1.0)
    )
    assert (constant.low, constant.high) == (1.0, 1.0)
    assert nothing == Estimate(None, None, None, None, 0, 3)
    assert one == Estimate(0.3, None, None, None, 1, 2)
    assert (str(nothing), str(one)) == ("– (undefined on 3)", "0.300 (undefined on 2)")
    assert str(Estimate(-0.0001, 0.01234, -1.0, 1.0, 5, 0)) == "0.000 ± 0.012"


def test_pairs_use_the_images_where_both_are_defined():
    values = np.array([[1.0, 0.0, np.nan], [np.nan, 5.0, 2.0], [3.0, 3.0, np.nan], [4.0, 1.0, np.nan]])
    ab, ac, bc = paired_differences(["a", "b", "c"], values)
    assert (ab.first, ab.second, ab.estimate.mean, ab.estimate.count) == ("a", "b", pytest.approx(4 / 3), 3)
    assert (ac.estimate.mean, ac.is_clear) == (None, False)
    assert (bc.estimate.mean, bc.estimate.count, bc.is_clear) == (3.0, 1, False)


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match="columns"):
        estimate_means(np.zeros(3))
    with pytest.raises(ShapeError, match="2 methods"):
        paired_differences(["a", "b"], np.zeros((3, 3)))


def main() -> None:
    for images in (3, *FEW):
        print(images, " ".join(f"{name}: {held:.3f}" for name, held in simulated(images, 10_000).items()))


if __name__ == "__main__":
    main()
