"""The number that overlays were chosen by: the map's share of the variation of their colours."""

import numpy as np
import pytest

from benchmarks.overlay import share_of_map


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
