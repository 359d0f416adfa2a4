"""Guided upsampling against a literal reference: edges of the image, means of the map."""

import numpy as np
import pytest

import vitflow
from tests.images.test_overlay import place, random_grid
from vitflow.demo import sample_images
from vitflow.errors import OptionError
from vitflow.images.pen import GUIDED
from vitflow.images.upsampling import EDGE, _filter, upsample


def two_halves(height: int, width: int, edge: int, seed: int = 0) -> np.ndarray:
    """A dark and a bright half with a little noise, uint8 RGB; the bright half begins at the column `edge`."""
    noise = np.random.default_rng(seed).integers(0, 8, (height, width))
    noise[:, edge:] += 200
    return np.repeat(noise[..., None], 3, axis=2).astype(np.uint8)


def literal_filter(guide: np.ndarray, values: np.ndarray, radius: tuple[int, int]) -> np.ndarray:
    """The guided filter as in He et al., equations (5), (6) and (8), pixel by pixel in float64."""
    height, width = guide.shape

    def window(y: int, x: int) -> tuple[slice, slice]:
        return (
            slice(max(y - radius[0], 0), min(y + radius[0] + 1, height)),
            slice(max(x - radius[1], 0), min(x + radius[1] + 1, width)),
        )

    a, b = np.empty((2, height, width))
    for y in range(height):
        for x in range(width):
            inputs, given = guide[window(y, x)], values[window(y, x)]
            covariance = (inputs * given).mean() - inputs.mean() * given.mean()
            a[y, x] = covariance / (inputs.var() + EDGE)
            b[y, x] = given.mean() - a[y, x] * inputs.mean()
    return np.array(
        [[a[window(y, x)].mean() * guide[y, x] + b[window(y, x)].mean() for x in range(width)] for y in range(height)]
    )


def test_the_filter_equals_the_literal_reference():
    generator = np.random.default_rng(1)
    guide, values = generator.random((2, 17, 23))
    actual = _filter(guide.astype(np.float32), (3, 2))(values.astype(np.float32))
    np.testing.assert_allclose(actual, literal_filter(guide, values, (3, 2)), atol=2e-5)


@pytest.mark.parametrize(
    ("placement", "shape"),
    [
        (place((60, 80), (60, 80), fit="squash"), (6, 8)),
        (place((61, 83), (32, 48), crop_pct=0.9), (4, 6)),
        (place((90, 50), (32, 32), fit="pad"), (4, 4)),
    ],
)
def test_each_patch_keeps_its_mean(placement, shape):
    grid, image = random_grid(*shape), two_halves(*placement.image_size, edge=placement.image_size[1] // 2)
    heatmap = upsample(grid, placement, interpolation="guided", image=image)
    patches = upsample(np.arange(grid.size, dtype=np.float32).reshape(shape), placement, interpolation="nearest")
    np.testing.assert_array_equal(np.isnan(heatmap), np.isnan(patches))
    for patch in np.unique(patches[~np.isnan(patches)]).astype(int):
        assert heatmap[patches == patch].astype(np.float64).mean() == pytest.approx(grid.flat[patch], abs=1e-5)


def test_the_edge_of_the_image_becomes_the_edge_of_the_map():
    grid = np.zeros((4, 8), dtype=np.float32)
    grid[:, 3], grid[:, 4:] = 0.4, 1.0  # the object begins in the fourth column of patches
    image, placement = two_halves(64, 128, edge=58), place((64, 128), (64, 128), fit="squash")
    step = {
        name: np.diff(upsample(grid, placement, interpolation=name, image=image)[32])[57]
        for name in ("smooth", "guided")
    }
    assert step["guided"] > 0.4 > 10 * step["smooth"]


def test_the_image_is_required():
    placement = place((10, 10), (10, 10))
    for image in (None, np.zeros((9, 10, 3), np.uint8)):
        with pytest.raises(OptionError, match="requires the image"):
            upsample(np.zeros((2, 2)), placement, interpolation="guided", image=image)


def test_the_caption_says_it_and_other_drawings_do_not_change(tmp_path):
    saliency = vitflow.explain(sample_images()[0], model="demo", method="gae")
    for name in ("smooth", "guided"):
        text = saliency.figure(tmp_path / f"{name}.svg", interpolation=name) and (tmp_path / f"{name}.svg").read_text()
        assert ("guided upsampling" in text) == (name == "guided")
    assert GUIDED.startswith("Edges are those of the image")
    assert not np.array_equal(saliency.overlay(interpolation="guided"), saliency.overlay())
