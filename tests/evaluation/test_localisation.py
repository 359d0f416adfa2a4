"""Localisation against scikit-learn, literal loops in float64, and maps whose scores are known beforehand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from vitflow.errors import ShapeError
from vitflow.evaluation import localise


def disc(height=40, width=50, centre=(18, 22), radius=9) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    return (y - centre[0]) ** 2 + (x - centre[1]) ** 2 <= radius**2


def literal(heatmap: np.ndarray, region: np.ndarray) -> dict[str, float]:
    """Every measure by the words of its definition, pixel by pixel."""
    pixels = [
        (float(heatmap[y, x]), bool(region[y, x]))
        for y in range(heatmap.shape[0])
        for x in range(heatmap.shape[1])
        if np.isfinite(heatmap[y, x])
    ]
    inside = [value for value, entry in pixels if entry]
    outside = [value for value, entry in pixels if not entry]
    wins = sum((a > b) + 0.5 * (a == b) for a in inside for b in outside)
    low, mean = min(v for v, _ in pixels), sum(v for v, _ in pixels) / len(pixels)
    mass = sum(v - low for v, _ in pixels)
    shares = []
    for side in (False, True):
        both = sum((v > mean) == side and entry == side for v, entry in pixels)
        any_ = sum((v > mean) == side or entry == side for v, entry in pixels)
        shares.append(both / any_)
    return {
        "roc_auc": wins / (len(inside) * len(outside)),
        "energy": sum(v - low for v in inside) / mass,
        "mean_iou": sum(shares) / 2,
    }


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), levels=st.sampled_from([2, 5, 1000]), holes=st.booleans())
def test_measures_equal_their_definitions_and_scikit_learn(seed, levels, holes):
    random = np.random.default_rng(seed)
    heatmap = random.integers(0, levels, (7, 9)).astype(np.float32) / levels  # with 2 or 5 levels nearly all tie
    region = random.random((7, 9)) < random.uniform(0.1, 0.9)
    region[0, :2] = True, False
    heatmap[1, 1], heatmap[1, 2] = 0.0, 1.0
    if holes:
        heatmap[4:, random.random(9) < 0.5] = np.nan
    actual = localise(heatmap, region)
    for name, value in literal(heatmap.astype(np.float64), region).items():
        assert getattr(actual, name) == pytest.approx(value, abs=1e-9), name
    seen = np.isfinite(heatmap)
    assert actual.roc_auc == pytest.approx(roc_auc_score(region[seen], heatmap[seen]), abs=1e-6)


def test_a_constant_map_scores_as_chance():
    region = disc()
    actual = localise(np.full(region.shape, 0.3, np.float32), region)
    assert actual.roc_auc == 0.5
    assert actual.energy == pytest.approx(region.mean())
    assert actual.mean_iou == pytest.approx((1 - region.mean()) / 2)  # nothing lies above the mean


def test_pixels_that_the_model_did_not_see_are_left_out():
    region = disc()
    heatmap = np.random.default_rng(2).random(region.shape)
    cropped = heatmap.copy()
    cropped[:, :15] = np.nan
    actual, alone = localise(cropped, region), localise(heatmap[:, 15:], region[:, 15:])
    assert actual == alone


@pytest.mark.parametrize("region", [np.zeros((4, 5), bool), np.ones((4, 5), bool)])
def test_nothing_is_measured_where_there_is_nothing_to_distinguish(region):
    assert localise(np.random.default_rng(0).random((4, 5)), region) is None


def test_a_plateau_is_requested_its_middle():
    heatmap = np.zeros((9, 9))
    heatmap[2:7, 2:7] = 1.0
    region = np.zeros((9, 9), bool)
    region[4, 4] = True
    assert localise(heatmap, region).pointing_game == 1.0
    region = np.zeros((9, 9), bool)
    region[2, 2] = True
    assert localise(heatmap, region).pointing_game == 0.0


def test_wrong_shapes_are_refused():
    with pytest.raises(ShapeError, match=r"Expected a heatmap .* got \(3, 4\)"):
        localise(np.zeros((3, 4)), np.zeros((4, 3), bool))
    with pytest.raises(ShapeError, match="uint8"):
        localise(np.zeros((3, 4)), np.zeros((3, 4), np.uint8))
