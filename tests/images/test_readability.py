"""The number that overlays were chosen by: the map's share of the variation of their colours."""

import numpy as np
import pytest

from benchmarks.overlay import PAIRED, WAYS, judge, share_of_map, to_lab
from vitflow.explaining.saliency import Saliency
from vitflow.images.geometry import place


def literal_share(lab: np.ndarray) -> float:
    """One number after the other: what a value does to the mean over pixels, beside all that happens."""
    pixels, values, channels = lab.shape
    of_map = whole = 0.0
    for k in range(channels):
        mean = sum(lab[p, q, k] for p in range(pixels) for q in range(values)) / (pixels * values)
        for q in range(values):
            at_q = sum(lab[p, q, k] for p in range(pixels)) / pixels
            of_map += (at_q - mean) ** 2 / values
            whole += sum((lab[p, q, k] - mean) ** 2 for p in range(pixels)) / (pixels * values)
    return of_map / whole


def test_the_share_equals_the_literal_reference():
    lab = np.random.default_rng(0).normal(size=(5, 7, 3)) + np.arange(7)[:, None]
    assert share_of_map(lab) == pytest.approx(literal_share(lab), rel=1e-12)
    assert share_of_map(np.tile(lab[:1], (5, 1, 1))) == pytest.approx(1)  # nothing of the photograph
    assert share_of_map(np.tile(lab[:, :1], (1, 7, 1))) == pytest.approx(0)  # nothing of the map
    assert share_of_map(np.zeros((2, 2, 3))) == 0


def test_colours_in_cielab():
    known = {(255, 255, 255): (100, 0, 0), (0, 0, 0): (0, 0, 0), (255, 0, 0): (53.24, 80.09, 67.20)}
    known |= {(0, 255, 0): (87.73, -86.18, 83.18), (0, 0, 255): (32.30, 79.19, -107.86), (10, 10, 10): (2.74, 0, 0)}
    for color, expected in known.items():
        np.testing.assert_allclose(to_lab(np.array(color)), expected, atol=0.02)
    grey = np.array([120, 120, 120])
    for sight in ("no red cones", "no green cones"):
        np.testing.assert_allclose(to_lab(grey, sight), to_lab(grey), atol=0.1)
        red, green = (to_lab(np.array(color), sight) for color in ((200, 60, 40), (110, 120, 20)))
        plain = to_lab(np.array([200, 60, 40])) - to_lab(np.array([110, 120, 20]))
        assert np.linalg.norm(red - green) < 0.6 * np.linalg.norm(plain)


def test_on_a_coloured_image_the_map_has_a_larger_share_than_before_and_the_photograph_stays():
    random = np.random.default_rng(0)
    image = np.kron(random.integers(0, 256, (14, 14, 3)), np.ones((8, 8, 1))).astype(np.uint8)
    for grid in (random.random((7, 7)) ** 3, random.normal(size=(7, 7))):
        one = Saliency(np.float32(grid), place((112, 112), (112, 112)), image, "", "", "", {})
        before, now = (judge(one, WAYS[way], PAIRED // 3) for way in ("before", "now"))
        for sight in ("normal", "no red cones", "no green cones"):
            assert now[sight] > 1.5 * before[sight]
        assert now["contrast kept"] > 0.45 and now["at the top"] > 0.25 and now["flat"] < 0.01
