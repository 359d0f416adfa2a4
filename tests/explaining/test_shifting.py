"""The mean over moved crops: areas, the fixed target, every fit, and where it is refused."""

import numpy as np
import pytest
import timm

from vitflow import Explainer
from vitflow.demo import draw_image
from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.explaining.refining import moved, realigned

IMAGE = draw_image(3).image


@pytest.fixture(scope="module")
def demo():
    return Explainer("demo")


def literal(grid, down, right):
    """By counting fine squares: 8 × 8 in a patch."""
    fine = np.full((8 * grid.shape[0] + 16, 8 * grid.shape[1] + 16), np.nan)
    top, left = 8 + round(8 * down), 8 + round(8 * right)
    fine[top : top + 8 * grid.shape[0], left : left + 8 * grid.shape[1]] = np.kron(grid, np.ones((8, 8)))
    squares = fine[8:-8, 8:-8].reshape(grid.shape[0], 8, grid.shape[1], 8)
    return np.nanmean(squares, axis=(1, 3))


@pytest.mark.parametrize("move", [(0.5, 0.5), (-0.5, 0.25), (0.0, -0.875), (0.0, 0.0)])
def test_a_moved_map_is_realigned_by_area(move):
    grid = np.random.default_rng(0).random((3, 5))
    np.testing.assert_allclose(realigned(grid, move), literal(grid, *move), rtol=0, atol=1e-12)
    np.testing.assert_allclose(realigned(np.full((3, 5), 0.3), move), 0.3, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_the_map_is_the_mean_over_crops_that_are_moved(fit, method):
    explainer = Explainer("demo", fit=fit)
    plain = explainer.explain(IMAGE, method=method)
    actual = explainer.explain(IMAGE, method=method, shifts=4)
    image = explainer.placed(IMAGE, "one")
    half, expected = explainer.spec.patch_size[0] // 2, []
    for down in (-1, 1):
        for right in (-1, 1):
            crop = Explainer("demo", fit=fit)
            place = moved(image.placement, (half * down, half * right))
            crop.placed = lambda source, name, place=place: type(image)(name, IMAGE, place)
            grid = crop.explain(IMAGE, method=method, target=plain.target).grid
            expected.append(literal(grid, down / 2, right / 2))
    np.testing.assert_allclose(actual.grid, np.mean(expected, axis=0), rtol=0, atol=1e-4 * actual.grid.max())
    assert (actual.target, actual.placement, actual.options["shifts"]) == (plain.target, plain.placement, 4)


def test_each_class_and_image_has_its_mean_and_baselines_have_none(demo):
    images = [IMAGE, draw_image(4).image]
    actual = demo.explain_batch(images, methods=["gae", "rollout", "random"], targets=[1, 2], shifts=4)
    assert [(one.method, one.target) for one in actual[:4]] == [("gae", 1), ("gae", 2), ("rollout", 1), ("random", 1)]
    alone = demo.explain(images[1], method="gae", target=2, shifts=4)
    np.testing.assert_allclose(actual[5].grid, alone.grid, rtol=0, atol=1e-5 * alone.grid.max())
    np.testing.assert_array_equal(actual[3].grid, demo.explain(IMAGE, method="random").grid)


@pytest.mark.parametrize("shifts", [1, 3, -4, True])
def test_other_numbers_are_refused(demo, shifts):
    with pytest.raises(OptionError, match="shifts of 0 or 4"):
        demo.explain(IMAGE, method="gae", shifts=shifts)


def test_a_model_without_patches_is_refused():
    explainer = Explainer(timm.create_model("resnet10t", num_classes=3).eval())
    with pytest.raises(UnsupportedModelError, match="require a patch size"):
        explainer.explain(IMAGE, method="gradcam", shifts=4)
