"""Upsampling, scaling, colouring and blending: against literal float64 references and pixel by pixel."""

import matplotlib
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.references import seen_mask
from vitflow.errors import OptionError, ShapeError
from vitflow.images import INTERPOLATIONS, overlay
from vitflow.images.geometry import Placement, place
from vitflow.images.overlay import blend, has_two_sides, scale_range
from vitflow.images.preprocessing import upsample


def random_grid(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, cols), dtype=np.float32)


def photograph(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)


def colors_of(values: np.ndarray, *, cmap: str | None = None, vmin: float, vmax: float) -> np.ndarray:
    """The colour that each value is drawn in where nothing of the photograph shows: uint8 RGB [height, width, 3]."""
    black = np.zeros((*values.shape, 3), dtype=np.uint8)
    return blend(black, values, cmap=cmap, alpha=1.0, fade=False, vmin=vmin, vmax=vmax, mark_unseen=False)


def on_background(image: np.ndarray, background: str, alpha: float = 1.0) -> np.ndarray:
    """Return the background of the colours: the photograph, its luminance, or their mean, the latter two darkened."""
    grey = (image @ np.array([0.299, 0.587, 0.114]))[..., None]
    whole = {"photo": image, "grey": 0.75 * grey.repeat(3, axis=-1), "dim": 0.75 * (grey + image) / 2}[background]
    strength = min(alpha / 0.5, 1.0)
    return (1 - strength) * image + strength * whole


def bilinear(values: np.ndarray, y: float, x: float) -> float:
    """Read [rows, cols] at a point between the centres of its cells, the outermost values continued outwards."""
    y, x = y - 0.5, x - 0.5
    top, left = int(np.floor(y)), int(np.floor(x))

    def at(row: int, col: int) -> float:
        return float(values[min(max(row, 0), values.shape[0] - 1), min(max(col, 0), values.shape[1] - 1)])

    upper = at(top, left) * (left + 1 - x) + at(top, left + 1) * (x - left)
    lower = at(top + 1, left) * (left + 1 - x) + at(top + 1, left + 1) * (x - left)
    return upper * (top + 1 - y) + lower * (y - top)


def literal_upsample(grid: np.ndarray, placement: Placement) -> np.ndarray:
    """Grid → model input → original, each by bilinear reading at the centre of every pixel, in float64."""
    rows, cols = grid.shape
    height, width = placement.input_size
    on_input = np.array(
        [
            [bilinear(grid, (y + 0.5) * rows / height, (x + 0.5) * cols / width) for x in range(width)]
            for y in range(height)
        ]
    )
    heatmap = np.full(placement.image_size, np.nan)
    for y, x in np.argwhere(seen_mask(placement)):
        heatmap[y, x] = bilinear(on_input, *placement.to_input(y + 0.5, x + 0.5))
    return heatmap


def quadratic_spline(distance: float) -> float:
    """The B-spline of degree 2 at a distance from its centre."""
    away = abs(distance)
    return 0.75 - away**2 if away <= 0.5 else (1.5 - away) ** 2 / 2 if away <= 1.5 else 0.0


def literal_smooth(grid: np.ndarray, placement: Placement) -> np.ndarray:
    """At the centre of every pixel the sum of all patches, weighted by the spline, the outermost continued outwards."""
    rows, cols = grid.shape
    height, width = placement.input_size
    heatmap = np.full(placement.image_size, np.nan)
    for y, x in np.argwhere(seen_mask(placement)):
        on_input = placement.to_input(y + 0.5, x + 0.5)
        row, col = on_input[0] * rows / height - 0.5, on_input[1] * cols / width - 0.5
        heatmap[y, x] = sum(
            quadratic_spline(row - r)
            * quadratic_spline(col - c)
            * grid[min(max(r, 0), rows - 1), min(max(c, 0), cols - 1)]
            for r in range(-2, rows + 2)
            for c in range(-2, cols + 2)
        )
    return heatmap


PLACEMENTS = [
    place((51, 73), (32, 32), crop_pct=0.875),
    place((73, 51), (32, 32), crop_pct=0.9),
    place((20, 17), (32, 32), crop_pct=1.0),
    place((17, 20), (24, 32), crop_pct=1.15),
    place((45, 61), (32, 32), fit="squash"),
    place((61, 23), (32, 32), fit="pad"),
    place((61, 23), (32, 32), fit="native", patch_size=(8, 8)),
]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_linear_upsampling_equals_the_literal_reference(placement):
    grid = random_grid(4, 5)
    heatmap = upsample(grid, placement)
    expected = literal_upsample(grid, placement)
    assert heatmap.dtype == np.float32
    np.testing.assert_array_equal(np.isnan(heatmap), ~seen_mask(placement))
    np.testing.assert_allclose(heatmap, expected, atol=1e-6)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_smooth_upsampling_equals_the_literal_reference(placement):
    grid = random_grid(4, 5)
    np.testing.assert_allclose(
        upsample(grid, placement, interpolation="smooth"), literal_smooth(grid, placement), atol=1e-6
    )


def test_a_panorama_wider_than_16_bits():
    placement = place((3, 70_000), (32, 32), fit="squash")
    heatmap = upsample(np.array([[0.0, 1.0]]), placement)
    assert heatmap[1, 0] == 0
    assert heatmap[1, -1] == 1
    np.testing.assert_allclose(heatmap[1, 35_000], 0.5, atol=0.01)


def test_nothing_seen_is_all_nan():
    placement = place((1, 1000), (224, 224), crop_pct=0.875)
    assert placement.seen_box[0] == placement.seen_box[2]
    for interpolation in INTERPOLATIONS:
        assert np.isnan(upsample(random_grid(14, 14), placement, interpolation=interpolation)).all()
    image = photograph(1, 1000)
    heatmap = upsample(random_grid(14, 14), placement)
    np.testing.assert_array_equal(blend(image, heatmap, background="photo"), image)


def test_robust_limits_are_the_percentiles_of_what_was_seen():
    values = random_grid(20, 20)
    values[0] = np.nan
    finite = np.sort(values[1:].ravel().astype(np.float64))

    def percentile(share: float) -> float:
        position = share * (len(finite) - 1)
        below = int(position)
        return finite[below] + (position - below) * (finite[min(below + 1, len(finite) - 1)] - finite[below])

    np.testing.assert_allclose(scale_range(values), (percentile(0.02), percentile(0.98)), rtol=1e-6)
    assert scale_range(values, robust=False) == (finite[0], finite[-1])
    counted = np.arange(101.0)
    assert scale_range(counted, vmin=-1, vmax=7) == (-1, 7) and scale_range(counted, vmax=7) == (2, 7)
    assert scale_range(counted, vmin=200) == (200, 200) and scale_range(counted, vmax=-3) == (-3, -3)
    assert scale_range(np.full((3, 3), np.nan)) == (0, 0)


def test_one_hot_patch_is_not_lost_to_the_percentiles():
    grid = np.zeros((14, 14))
    grid[3, 5] = 0.7
    assert scale_range(grid) == (0, 0.7)


def test_constant_maps_draw_constant():
    placement = place((40, 60), (32, 32), crop_pct=0.9)
    image = photograph(40, 60)
    for value in [0.0, 1.0, -2.5, 1 / 196]:
        grid = np.full((4, 4), value, dtype=np.float32)
        grid[1, 2] += np.float32(value) * np.float32(2e-7)  # what rounding leaves of a constant
        low, high = scale_range(grid)
        assert low == high
        heatmap = upsample(grid, placement)
        colors = colors_of(heatmap, vmin=low, vmax=high)[seen_mask(placement)]
        assert (colors == colors_of(np.zeros((1, 1)), vmin=0, vmax=1)[0, 0]).all()
        np.testing.assert_array_equal(blend(image, heatmap, background="photo", mark_unseen=False), image)
        for background in overlay.KEPT:
            bare = on_background(image, background).round()
            drawn = blend(image, heatmap, background=background, mark_unseen=False)
            assert np.abs(drawn - bare)[seen_mask(placement)].max() <= 1


def signed_grid() -> np.ndarray:
    """Return a map like that of occlusion: a quarter of the patches below 0, one outlier, and four patches of 0."""
    grid = random_grid(14, 14) - 0.25
    grid[9, 9] = 5.0
    grid[:2, :2] = 0.0
    return grid


def test_limits_of_a_map_with_negative_values_lie_around_0():
    grid = signed_grid()
    limit = np.percentile(np.abs(grid), 98)
    assert scale_range(grid) == (-limit, limit)
    assert scale_range(grid, robust=False) == (-5, 5)
    assert scale_range(-np.abs(grid), robust=False) == (-5, 5)  # nothing above 0
    assert scale_range(grid, vmax=2) == scale_range(grid, vmin=-2) == (-2, 2)
    assert scale_range(grid, vmin=0)[0] == 0 < scale_range(grid, vmin=0)[1]
    assert scale_range(grid, vmin=-1, vmax=7) == (-1, 7)
    rare = np.zeros((14, 14))
    rare[3, 5] = -0.7
    assert scale_range(rare) == (-0.7, 0.7)


def test_a_map_that_is_not_signed_has_one_side():
    grid = signed_grid()
    assert scale_range(grid, signed=False) == (0, pytest.approx(np.percentile(grid, 98)))
    assert scale_range(grid + 2, signed=False) == scale_range(grid + 2) == tuple(np.percentile(grid + 2, [2, 98]))
    single = np.full((14, 14), -0.5)
    single[7, 7] = 1.0  # the 98th percentile is below 0
    assert scale_range(single, signed=False) == (0, 1)
    assert scale_range(-np.abs(grid), signed=False, robust=False) == (-5, 5)  # nothing above 0


def test_rounding_below_0_makes_no_two_sides():
    grid = random_grid(14, 14)
    grid[:3] = -1e-8
    low, high = scale_range(grid)
    assert low == 0 and not has_two_sides(low, high)
    assert has_two_sides(*scale_range(np.array([-0.001, 0.2, 1.0])))


def test_zero_of_a_map_with_negative_values_is_clear():
    image = photograph(56, 56)
    placement = place((56, 56), (56, 56))
    heatmap = upsample(signed_grid(), placement, interpolation="nearest")
    for background in ("photo", "grey", "dim"):
        clear = on_background(image, background)[:8, :8]
        assert np.abs(blend(image, heatmap, background=background)[:8, :8] - clear).max() <= 0.501
    overlay = blend(image, heatmap, background="photo")
    np.testing.assert_array_equal(overlay[:8, :8], image[:8, :8])
    assert (overlay[36:40, 36:40] != image[36:40, 36:40]).any(axis=-1).mean() > 0.9
    np.testing.assert_array_equal(blend(image, heatmap, alpha=0), image)
    white = np.full_like(image, 255)
    reddish, bluish = (
        blend(white, np.full((56, 56), value), vmin=-1, vmax=1, background="photo")[0, 0] for value in (0.7, -0.7)
    )
    assert reddish[0] == 255 > reddish[2] and bluish[2] == 255 > bluish[0]


@pytest.mark.parametrize("cmap", [None, "viridis"])
@pytest.mark.parametrize("fade", [True, False])
@pytest.mark.parametrize(("vmin", "vmax"), [(-0.3, 0.3), (-0.1, 0.4)])
def test_blend_around_0_equals_the_literal_formula(vmin, vmax, fade, cmap):
    image, heatmap = photograph(7, 9), random_grid(7, 9) - 0.5
    got = blend(image, heatmap, cmap=cmap, alpha=0.7, fade=fade, vmin=vmin, vmax=vmax)
    image = on_background(image, "grey")
    colormap = matplotlib.colormaps[cmap or "bwr"]
    for y in range(7):
        for x in range(9):
            value = float(heatmap[y, x])
            side = max(-1.0, value / -vmin) if value < 0 else min(1.0, value / vmax)
            step = min(int((side + 1) / 2 * 256), 255)
            distance = step - 128 if step >= 128 else 127 - step  # from the two steps that meet at 0
            opacity = 0.7 * (distance / 127 if fade else 1.0)
            color = np.array(colormap(step, bytes=True)[:3], dtype=np.float64)
            if fade and not cmap:
                color = np.array(overlay.TWO_HUES[step >= 128], dtype=float)
            assert np.abs(got[y, x] - (image[y, x] * (1 - opacity) + color * opacity).round()).max() <= 1


@pytest.mark.parametrize("cmap", ["viridis", "tab10", "inferno_r"])
def test_colors_equal_matplotlib(cmap):
    values = np.concatenate([np.linspace(-0.2, 1.2, 999), [0, 1, 0.5]])[None]
    expected = matplotlib.colormaps[cmap](np.clip(values, 0, 1), bytes=True)[..., :3]
    np.testing.assert_array_equal(colors_of(values, cmap=cmap, vmin=0, vmax=1), expected)
    scaled = colors_of(values * 4e-9 - 7e-9, cmap=cmap, vmin=-7e-9, vmax=-3e-9)
    assert (scaled == expected).all(axis=-1).mean() > 0.99  # rounding moves a few values over the edge of a colour


@given(hnp.arrays(np.float32, (3, 3), elements=st.floats(width=32)), st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
@example(np.full((3, 3), 5e-324), 0.0, 5e-324)
def test_any_value_has_a_color(values, vmin, vmax):
    low, high = sorted((vmin, vmax))
    assert colors_of(values, vmin=low, vmax=high).shape == (3, 3, 3)


@pytest.mark.parametrize("background", overlay.KEPT)
@pytest.mark.parametrize(("fade", "soft"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.75, 1.0])
def test_blend_equals_the_literal_formula(alpha, fade, soft, background):
    image, heatmap = photograph(7, 9), random_grid(7, 9)
    image[:2] //= 64
    image[2:4] |= 0xC0
    got = blend(image, heatmap, alpha=alpha, fade=fade, vmin=0.1, vmax=0.6, soft=soft, background=background)
    colormap, under = matplotlib.colormaps["plasma"], on_background(image, background, alpha)
    for y in range(7):
        for x in range(9):
            share = max((float(heatmap[y, x]) - 0.1) / 0.5, 0.0)
            if soft and share > 0.8:
                share = 0.8 + 0.2 * (1 - np.exp(-(share - 0.8) / 0.2))
            step = min(int(min(share, 1.0) * 256), 255)
            opacity = alpha * (step / 255 if fade else 1.0)
            color = np.rint(255 * np.array(colormap(step)[:3]))
            assert np.abs(got[y, x] - (under[y, x] * (1 - opacity) + color * opacity).round()).max() <= 1
    if alpha == 0:
        np.testing.assert_array_equal(got, image)


def test_beyond_a_soft_limit_colours_still_differ_and_never_fall_back():
    """As the highest patches of a map do, which a cut at the 98th percentile draws as one blob."""
    values = np.concatenate([np.linspace(0, 1, 980), np.linspace(1, 1.5, 20)])[None]
    black = np.zeros((*values.shape, 3), dtype=np.uint8)
    for one in (values, -values):
        soft, hard = (blend(black, one, cmap="gray", alpha=1, fade=False, soft=soft)[0, :, 0] for soft in (None, False))
        assert len(np.unique(soft[980:])) > 5 and len(np.unique(hard[980:])) == 1
        assert (np.diff(soft.astype(int) * (1 if one is values else -1)) >= 0).all()
    entry = blend(black, values, cmap="gray", alpha=1, fade=False, vmax=1)[0, :, 0]  # a limit of the caller's is kept
    assert (entry[980:] == 255).all() and entry[970] < 255


@pytest.mark.parametrize("size", [(90, 140), (140, 90), (1001, 40)])
@pytest.mark.parametrize("options", [{"background": name} for name in overlay.KEPT])
def test_unseen_pixels_are_quiet_or_untouched_and_their_border_is_marked(size, options):
    placement = place(size, (32, 32), crop_pct=0.7)
    image = photograph(*size)
    seen = seen_mask(placement)
    before = image.copy()
    heatmap = upsample(random_grid(4, 4), placement)
    overlay = blend(image, heatmap, **options, mark_unseen=True)
    plain = blend(image, heatmap, **options, mark_unseen=False)
    np.testing.assert_array_equal(image, before)
    outside = image[~seen].astype(float)
    if options.get("background", "grey") == "grey":  # grey and lighter
        outside = np.repeat(0.5 * outside @ [[0.299], [0.587], [0.114]] + 0.35 * 255, 3, axis=1)
        np.testing.assert_array_equal(blend(image, heatmap, **options), plain)
    else:
        np.testing.assert_array_equal(blend(image, heatmap, **options), overlay)
    np.testing.assert_allclose(overlay[~seen], outside, rtol=0, atol=0.51)
    np.testing.assert_array_equal(overlay[~seen], plain[~seen])

    # The frame is one white pixel and then a black one (the image is small), and nothing else changed.
    left, top, right, bottom = placement.seen_box
    for depth, color in enumerate([255, 0]):
        frame = [
            overlay[top + depth, left + depth : right - depth],
            overlay[bottom - 1 - depth, left + depth : right - depth],
            overlay[top + depth : bottom - depth, left + depth],
            overlay[top + depth : bottom - depth, right - 1 - depth],
        ]
        assert all((line == color).all() for line in frame)
    inside = np.s_[top + 2 : bottom - 2, left + 2 : right - 2]
    np.testing.assert_array_equal(overlay[inside], plain[inside])


def test_only_the_sides_with_something_unseen_are_marked():
    placement = place((100, 200), (32, 32), crop_pct=1.0)
    left, top, right, bottom = placement.seen_box
    assert (top, bottom) == (0, 100)
    heatmap = upsample(random_grid(4, 4), placement)
    image = photograph(100, 200)
    overlay, plain = (blend(image, heatmap, mark_unseen=marked) for marked in (True, False))
    changed = (overlay != plain).any(axis=(0, 2))
    assert np.flatnonzero(changed).tolist() == [left, left + 1, right - 2, right - 1]


def test_the_line_grows_with_the_image():
    image = np.full((2000, 3000, 3), 90, dtype=np.uint8)
    heatmap = upsample(np.zeros((4, 4)), place((2000, 3000), (32, 32)))
    overlay = blend(image, heatmap, background="photo")
    row = overlay[1000, 500:520, 0].tolist()
    assert row == [255] * 4 + [0] * 4 + [90] * 12


IMAGE, HEATMAP, SQUARE = photograph(10, 12), random_grid(10, 12), place((10, 10), (10, 10))


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: upsample(np.zeros((2, 2)), SQUARE, interpolation="liner"), OptionError, "'linear'"),
        (lambda: scale_range(np.arange(3.0), vmin=2, vmax=1), OptionError, "vmin"),
        (lambda: scale_range(np.arange(3.0), vmax=np.nan), OptionError, "vmax"),
        (lambda: blend(IMAGE, HEATMAP.T), ShapeError, r"\(12, 10\)"),
        (lambda: blend(IMAGE.astype(np.float32), HEATMAP), ShapeError, "float32"),
        (lambda: blend(IMAGE, HEATMAP, alpha=1.5), OptionError, "alpha"),
        (lambda: blend(IMAGE, HEATMAP, alpha=float("nan")), OptionError, "alpha"),
        (lambda: blend(IMAGE, HEATMAP, background="gray"), OptionError, "'grey'"),
        (lambda: blend(IMAGE, HEATMAP, cmap="vridis"), OptionError, "'viridis'"),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, word):
    with pytest.raises(error, match=word):
        call()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_arrays_of_any_order_are_drawn_the_same(dtype):
    """Turned, reversed, cut out of others, or not to be written to."""
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (9, 14, 3), dtype=np.uint8)
    heatmap = rng.random((9, 14)).astype(dtype)
    heatmap[:2] = np.nan
    expected = blend(image, heatmap)
    reversed_order = blend(image[::-1, ::-1].copy()[::-1, ::-1], np.asfortranarray(heatmap))
    locked = image.copy()
    locked.flags.writeable = False
    wide = np.repeat(heatmap, 2, axis=1)[:, ::2]
    np.testing.assert_array_equal(reversed_order, expected)
    np.testing.assert_array_equal(blend(locked, wide), expected)
