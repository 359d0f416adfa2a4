"""Placement, place() and Preprocessing: against timm's own transform, and pixel by pixel against exact fractions."""

import io
import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from tests.references import patch_box, seen_mask
from vitflow.errors import OptionError, ShapeError
from vitflow.images import FITS, INTERPOLATIONS
from vitflow.images.geometry import CROP_MODES, FILTERS, Placement, place
from vitflow.images.preprocessing import InputSpec, Preprocessing, upsample
from vitflow.images.reading import read_image

HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}

sides = st.integers(1, 60)
sizes = st.tuples(sides, sides)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    patch = draw(st.integers(1, 8))
    input_size = (patch * draw(st.integers(1, 6)), patch * draw(st.integers(1, 6)))
    crop_pct = draw(st.sampled_from([0.5, 0.875, 0.9, 1.0, 1.15]))
    assume(min(input_size) >= crop_pct)
    return place(
        draw(sizes),
        input_size,
        fit=draw(st.sampled_from(FITS)),
        crop_pct=crop_pct,
        crop_mode=draw(st.sampled_from(CROP_MODES)),
        patch_size=(patch, patch),
    )


def noise(height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height * 1000 + width).integers(0, 256, (height, width, 3), dtype=np.uint8)


def prepare(image: np.ndarray, placement: Placement, **spec: Any) -> np.ndarray:
    return Preprocessing(InputSpec(placement.input_size, 3, **spec)).prepare(image, placement)


def exact_input_coordinate(placement: Placement, axis: int, pixel: int) -> Fraction:
    """Return the position of a pixel's centre in the model input, without rounding."""
    scale = Fraction(placement.resized_size[axis], placement.image_size[axis])
    return (pixel + Fraction(1, 2)) * scale - placement.offset[axis]


# Older releases of timm resize for oblong inputs bilinearly, whatever filter they are told.
OBLONG = timm.data.create_transform((3, 48, 80), interpolation="bicubic").transforms[0].interpolation.value


def same_as_timm(image: np.ndarray, config: dict) -> None:
    if config["crop_mode"] == "center" and config["input_size"][1] != config["input_size"][2] and OBLONG != "bicubic":
        config = config | {"interpolation": OBLONG}
    expected = timm.data.create_transform(**config)(Image.fromarray(image)).numpy()
    placement = place(
        image.shape[:2], config["input_size"][1:], crop_pct=config["crop_pct"], crop_mode=config["crop_mode"]
    )
    got = prepare(image, placement, mean=config["mean"], std=config["std"], interpolation=config["interpolation"])
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, expected, err_msg=f"{image.shape} {config}")


@pytest.mark.parametrize("size", [(120, 200), (97, 61), (31, 33), (1, 90), (7, 500)])
@pytest.mark.parametrize("crop_mode", CROP_MODES)
@pytest.mark.parametrize("crop_pct", [0.875, 0.9, 1.0, 1.15])
def test_prepare_equals_timm(size, crop_mode, crop_pct):
    for input_size in [(3, 64, 64), (3, 48, 80)]:
        if crop_mode == "border" and min(size) * input_size[2] < max(size):
            continue  # timm asks Pillow for a side of 0 pixels there
        for interpolation in ["bicubic", "bilinear"]:
            config = {"input_size": input_size, "crop_pct": crop_pct, "crop_mode": crop_mode, **IMAGENET}
            same_as_timm(noise(*size), {**config, "interpolation": interpolation})


@pytest.mark.parametrize("interpolation", FILTERS)
def test_prepare_equals_timm_for_every_filter(interpolation):
    config = {"input_size": (3, 48, 48), "crop_pct": 0.9, "crop_mode": "center", **HALF}
    same_as_timm(noise(75, 131), {**config, "interpolation": interpolation})


def test_an_image_of_one_pixel_line_does_not_fill_the_memory():
    placement = place((1, 60_000), (224, 224), crop_pct=0.875)
    assert placement.resized_size == (256, 15_360_000)
    with pytest.raises(ShapeError, match="long and narrow, got 60000 × 1 pixels.*fit='squash'"):
        prepare(noise(1, 60_000), placement, **HALF)


@given(sizes, sizes)
def test_squash_and_pad_see_everything(image_size, input_size):
    squashed = place(image_size, input_size, fit="squash")
    assert squashed.resized_size == squashed.input_size == input_size
    assert squashed.sees_everything
    padded = place(image_size, input_size, fit="pad")
    assert padded.input_size == input_size
    assert padded.sees_everything
    assert max(padded.resized_size[0] - input_size[0], padded.resized_size[1] - input_size[1]) == 0


def test_padding_is_the_mean_and_the_image_lies_between():
    image = np.full((20, 40, 3), 200, dtype=np.uint8)
    prepared = prepare(image, place((20, 40), (40, 40), fit="pad"), **IMAGENET)
    # The mean in 8 bits: at most half a level from 0.
    assert np.abs(prepared[:, :10]).max() <= 0.5 / 255 / 0.224
    assert np.abs(prepared[:, 30:]).max() <= 0.5 / 255 / 0.224
    assert prepared[:, 10:30].min() > 1


@given(sizes, st.integers(1, 20), st.integers(1, 20), st.integers(1, 16), st.integers(1, 16))
def test_native_has_whole_patches_in_the_aspect_of_the_image(image_size, rows, cols, patch_height, patch_width):
    wanted = rows * cols
    placement = place(
        image_size, (rows * patch_height, cols * patch_width), fit="native", patch_size=(patch_height, patch_width)
    )
    height, width = placement.input_size
    assert height % patch_height == 0
    assert width % patch_width == 0
    got_rows, got_cols = height // patch_height, width // patch_width
    assert got_rows >= 1
    assert got_cols >= 1
    assert placement.resized_size == placement.input_size
    assert placement.sees_everything
    # Each side is the exact one rounded, so it is off by half a patch, or limited by a single line of patches.
    exact = math.sqrt(wanted * image_size[0] / image_size[1] * patch_width / patch_height)
    assert abs(got_rows - min(max(exact, 1), wanted)) <= 0.5 + 1e-9
    assert abs(got_cols - min(max(wanted / exact, 1), wanted)) <= 0.5 + 1e-9


@given(placements(), st.floats(-100, 100), st.floats(-100, 100))
def test_to_image_undoes_to_input(placement, y, x):
    np.testing.assert_allclose(placement.to_image(*placement.to_input(y, x)), (y, x), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(placement.to_input(*placement.to_image(y, x)), (y, x), rtol=1e-9, atol=1e-9)


@given(placements())
def test_seen_box_holds_exactly_the_pixels_whose_centres_are_inside(placement):
    left, top, right, bottom = placement.seen_box
    for axis, (first, last) in enumerate([(top, bottom), (left, right)]):
        inside = [
            pixel
            for pixel in range(placement.image_size[axis])
            if 0 <= exact_input_coordinate(placement, axis, pixel) < placement.input_size[axis]
        ]
        assert inside == list(range(first, last))
    mask = seen_mask(placement)
    assert mask.shape == placement.image_size
    assert mask.sum() == (right - left) * (bottom - top)
    assert placement.sees_everything == mask.all()


@given(placements(), st.data())
def test_a_hot_patch_marks_exactly_the_pixels_whose_centres_lie_in_it(placement, data):
    rows, cols = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    row, col = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    grid = np.zeros((rows, cols))
    grid[row, col] = 1
    hot = upsample(grid, placement, interpolation="nearest") == 1

    def inside(axis: int, pixel: int, patch: int, count: int) -> bool:
        side = Fraction(placement.input_size[axis], count)
        return patch * side <= exact_input_coordinate(placement, axis, pixel) < (patch + 1) * side

    height, width = placement.image_size
    in_rows = np.array([inside(0, y, row, rows) for y in range(height)])
    in_cols = np.array([inside(1, x, col, cols) for x in range(width)])
    np.testing.assert_array_equal(hot, in_rows[:, None] & in_cols[None, :])

    left, top, right, bottom = patch_box(placement, row, col, rows, cols)
    for y, x in np.argwhere(hot):
        assert top - 1e-9 <= y + 0.5 <= bottom + 1e-9
        assert left - 1e-9 <= x + 0.5 <= right + 1e-9


# What a camera stores for each EXIF orientation, made from the upright image.
STORED = {
    1: lambda upright: upright,
    2: lambda upright: upright[:, ::-1],
    3: lambda upright: upright[::-1, ::-1],
    4: lambda upright: upright[::-1],
    5: lambda upright: upright.swapaxes(0, 1),
    6: lambda upright: np.rot90(upright, 1),
    7: lambda upright: np.rot90(upright, 2).swapaxes(0, 1),
    8: lambda upright: np.rot90(upright, -1),
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("size", [(211, 157), (157, 211), (60, 301), (33, 47)])
@pytest.mark.parametrize("fit", FITS)
def test_a_painted_patch_comes_back_inside_its_rectangle(fit, size, orientation):
    expected = place(size, (64, 64), fit=fit, crop_pct=0.9, patch_size=(8, 8))
    rows, cols = expected.input_size[0] // 8, expected.input_size[1] // 8
    for row, col in [(0, cols // 2), (rows - 1, cols - 1), (rows // 3, cols // 3)]:
        left, top, right, bottom = patch_box(expected, row, col, rows, cols)
        upright = np.zeros((*size, 3), dtype=np.uint8)
        first_y, first_x = max(math.floor(top), 0), max(math.floor(left), 0)
        upright[first_y : max(math.ceil(bottom), 0), first_x : max(math.ceil(right), 0)] = 255
        if not upright.any():
            continue  # the patch lies in the padding
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(STORED[orientation](upright))).save(file, "PNG", exif=exif)

        image = read_image(file.getvalue())
        placement = place(image.shape[:2], (64, 64), fit=fit, crop_pct=0.9, patch_size=(8, 8))
        assert placement == expected
        prepared = prepare(image, placement, **HALF)
        grid = prepared.mean(axis=0).reshape(rows, 8, cols, 8).mean(axis=(1, 3))
        assert np.unravel_index(grid.argmax(), grid.shape) == (row, col)
        for interpolation in INTERPOLATIONS:
            heatmap = upsample(grid, placement, interpolation=interpolation)
            assert heatmap.shape == size
            y, x = np.unravel_index(np.nanargmax(heatmap), heatmap.shape)
            assert top <= y + 0.5 <= bottom
            assert left <= x + 0.5 <= right
            np.testing.assert_array_equal(np.isnan(heatmap), ~seen_mask(placement))


@given(placements())
def test_a_placement_survives_json(placement):
    fields = json.loads(json.dumps(placement.to_dict()))
    values = {name: value if isinstance(value, str) else tuple(value) for name, value in fields.items()}
    assert Placement(**values) == placement


def with_spec(**changed):
    return prepare(noise(30, 40), place((30, 40), (16, 16)), **{**HALF, **changed})


@pytest.mark.parametrize(
    ("call", "error", "word"),
    [
        (lambda: place((480, 640), (224, 224), crop_mode="centre"), OptionError, "'center'"),
        (lambda: place((480, 640), (224, 224), crop_pct=float("nan")), OptionError, "crop_pct"),
        (lambda: place((480, 640), (224, 224), crop_pct=1000.0), OptionError, "crop_pct"),
        (lambda: Placement((0, 10), (10, 10), (0, 0), (5, 5)), ShapeError, "image_size"),
        (lambda: Placement((10, 10), (10, 10), (10, 0), (5, 5)), ShapeError, "overlaps"),
        (lambda: with_spec(interpolation="bicubik"), OptionError, "'bicubic'"),
        (lambda: with_spec(mean=(0.5,)), OptionError, "three values"),
        (lambda: with_spec(std=(0.5, 0.5, 0.0)), OptionError, "above 0"),
    ],
)
def test_what_makes_no_sense_is_refused(call, error, word):
    with pytest.raises(error, match=word):
        call()


def test_prepare_leaves_the_image_alone():
    image = noise(30, 40)
    before = image.copy()
    prepared = prepare(image, place((30, 40), (30, 40), fit="squash"), **HALF)
    torch.from_numpy(prepared).zero_()
    np.testing.assert_array_equal(image, before)


@pytest.mark.parametrize("fit", FITS)
def test_the_patch_at_a_point_is_the_one_whose_box_holds_it(fit):
    placed = place((90, 160), (64, 64), fit=fit, crop_pct=0.9, patch_size=(16, 16))
    grid = placed.input_size[0] // 16, placed.input_size[1] // 16
    actual = {}
    for y in range(90):
        for x in range(160):
            row, col = (math.floor(at / 16) for at in placed.to_input(y + 0.5, x + 0.5))
            if 0 <= row < grid[0] and 0 <= col < grid[1]:
                actual[row, col] = placed.patch_at(y + 0.5, x + 0.5, grid)
            else:
                with pytest.raises(OptionError, match="inside the region that the model saw"):
                    placed.patch_at(y + 0.5, x + 0.5, grid)
    assert len(actual) > grid[0] and all(requested == answered for requested, answered in actual.items())
    for y, x in [(-0.1, 5.0), (90.0, 5.0), (5.0, 160.0), (math.nan, 5.0)]:
        with pytest.raises(OptionError, match="inside the image of"):
            placed.patch_at(y, x, grid)
