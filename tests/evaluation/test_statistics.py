"""Means, standard errors, bootstrap intervals and paired differences against literal loops, SciPy and known cases."""

import numpy as np
import pytest
from scipy import stats

from vitflow.errors import OptionError, ShapeError
from vitflow.evaluation.statistics import (
    Estimate,
    estimate_means,
    paired_differences,
)
from vitflow.evaluation.tables import Table


def test_mean_and_standard_error_leave_undefined_values_out():
    random = np.random.default_rng(0)
    values = random.normal(size=(50, 3))
    values[random.random((50, 3)) < 0.2] = np.nan
    for column, estimate in zip(values.T, estimate_means(values), strict=True):
        defined = column[~np.isnan(column)]
        assert estimate.mean == pytest.approx(defined.mean())
        assert estimate.standard_error == pytest.approx(stats.sem(defined))
        assert (estimate.count, estimate.undefined) == (len(defined), 50 - len(defined))


def test_the_interval_is_that_of_a_literal_bootstrap():
    values = np.random.default_rng(1).normal(size=(30, 2))
    random = np.random.default_rng((3, 30))
    drawn = [random.integers(30, size=30) for _ in range(500)]  # the same images for both columns
    literal = [[column[indices].mean() for indices in drawn] for column in values.T]
    for means, estimate in zip(literal, estimate_means(values, resamples=500, seed=3), strict=True):
        assert (estimate.low, estimate.high) == pytest.approx(tuple(np.percentile(means, (2.5, 97.5))))


def test_the_interval_is_scipys_within_the_resampling():
    values = np.random.default_rng(2).exponential(size=(80, 1))
    [estimate] = estimate_means(values, resamples=20_000)
    other = stats.bootstrap((values[:, 0],), np.mean, method="percentile", n_resamples=20_000, rng=5)
    assert estimate.low == pytest.approx(other.confidence_interval.low, abs=0.01)
    assert estimate.high == pytest.approx(other.confidence_interval.high, abs=0.01)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    random = np.random.default_rng(3)
    data = random.normal(0.5, 1.0, size=(60, 400))  # 400 studies of 60 images
    held = np.mean([estimate.low <= 0.5 <= estimate.high for estimate in estimate_means(data, resamples=1000)])
    assert 0.89 < held < 0.98


def test_the_same_seed_gives_the_same_interval_and_the_chunk_changes_nothing(monkeypatch):
    values = np.random.default_rng(4).random((40, 2))
    first = estimate_means(values, seed=1)
    assert first == estimate_means(values, seed=1)
    assert first != estimate_means(values, seed=2)
    monkeypatch.setattr("vitflow.evaluation.statistics._CHUNK", 7)
    assert [one.low for one in estimate_means(values, seed=1)] == pytest.approx([one.low for one in first])


def test_few_images_give_no_interval():
    nothing, one = estimate_means(np.array([[np.nan, 0.3], [np.nan, np.nan]]))
    assert nothing == Estimate(None, None, None, None, 0, 2)
    assert one == Estimate(0.3, None, None, None, 1, 1)
    assert (str(nothing), str(one)) == ("–", "0.300")


def test_estimates_are_reported_with_their_error():
    assert str(Estimate(-0.0001, 0.01234, -1.0, 1.0, 5, 0)) == "0.000 ± 0.012"
    assert str(Estimate(-0.25, 0.5, -1.0, 1.0, 5, 0)) == "−0.250 ± 0.500"


def test_pairing_finds_what_two_means_hide():
    random = np.random.default_rng(5)
    hardness = random.normal(size=200)  # images differ far more than methods do
    values = np.stack([hardness + 0.05, hardness + 0.02 * random.normal(size=200)], axis=1)
    first, second = estimate_means(values)
    assert first.low < second.high  # the intervals of the two means overlap …
    [difference] = paired_differences(["better", "worse"], values)
    assert difference.is_clear  # … and the difference is clear all the same
    assert difference.estimate.mean == pytest.approx((values[:, 0] - values[:, 1]).mean())
    assert difference.above == pytest.approx((values[:, 0] > values[:, 1]).mean())


def test_pairs_use_the_images_where_both_are_defined():
    values = np.array([[1.0, 0.0, np.nan], [np.nan, 5.0, 2.0], [3.0, 3.0, np.nan], [4.0, 1.0, np.nan]])
    ab, ac, bc = paired_differences(["a", "b", "c"], values)
    assert (ab.first, ab.second, ab.estimate.mean, ab.estimate.count) == ("a", "b", pytest.approx(4 / 3), 3)
    assert ab.above == pytest.approx(2.5 / 3)  # a tie counts half
    assert (ac.estimate.mean, ac.above, ac.is_clear) == (None, None, False)
    assert (bc.estimate.mean, bc.estimate.count, bc.is_clear) == (3.0, 1, False)


def test_a_difference_reversed_is_that_of_the_exchanged_methods():
    values = np.array([[0.9, 0.5], [0.4, 0.1], [0.7, 0.9], [0.3, 0.3]])
    [forward], [backward] = paired_differences(["a", "b"], values), paired_differences(["b", "a"], values[:, ::-1])
    actual = forward.reversed()
    assert (actual.first, actual.second, actual.above) == ("b", "a", pytest.approx(backward.above))
    for name in ("mean", "low", "high", "standard_error", "count"):
        assert getattr(actual.estimate, name) == pytest.approx(getattr(backward.estimate, name))


def test_a_table_has_a_dash_or_nothing_for_undefined_values():
    table = Table(("method", "mean"), [("gae", None), ("=1", 0.5)])
    assert table.to_dicts() == [{"method": "gae", "mean": None}, {"method": "=1", "mean": 0.5}]
    assert table.to_csv() == "method,mean\ngae,\n'=1,0.5\n"
    assert "| gae | – |" in table.to_markdown()


def test_equal_methods_differ_clearly_about_as_often_as_chance():
    random = np.random.default_rng(6)
    clear = [paired_differences(["a", "b"], random.random((40, 2)), resamples=400)[0].is_clear for _ in range(200)]
    assert np.mean(clear) < 0.13


def test_wrong_arguments_are_refused():
    with pytest.raises(ShapeError, match=r"\[images, columns\]"):
        estimate_means(np.zeros(3))
    with pytest.raises(ShapeError, match=r"\[images, 2 methods\]"):
        paired_differences(["a", "b"], np.zeros((3, 3)))
    with pytest.raises(OptionError, match="resamples of at least 1"):
        estimate_means(np.zeros((3, 1)), resamples=0)
