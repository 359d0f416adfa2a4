"""Figures of one map: its words, its colours, and the patch that was asked about."""

import contextlib
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from PIL import Image, ImageShow

import vitflow
from vitflow import Comparison, Contrast
from vitflow.cli import cli
from vitflow.demo import sample_images
from vitflow.errors import OptionError
from vitflow.explaining.saliency import Saliency
from vitflow.folder.draw import draw_run
from vitflow.images.geometry import place
from vitflow.images.pen import Pen
from vitflow.images.typesetting import readable


def map_of(grid: np.ndarray, size: tuple[int, int] = (96, 96), **fields) -> Saliency:
    """A map over a photograph of one grey, all of which was seen."""
    placement = place(size, (48, 48), fit="squash")
    given = {"source": "grey.png", "model": "own", "method": "rollout", "options": {}} | fields
    return Saliency(np.float32(grid), placement, np.full((*size, 3), 128, np.uint8), **given)


def words(saliency: Saliency, tmp_path, **options) -> list[str]:
    saliency.figure(tmp_path / "words.svg", **options)
    nodes = ET.parse(tmp_path / "words.svg").iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()) for node in nodes]


def test_a_figure_says_what_it_shows(demo, tmp_path):
    image = sample_images()[0]
    for method, options in (("gae", {}), ("rollout", {"discard_ratio": 0.3})):
        saliency = demo.explain(image, method=method, **options)
        actual = words(saliency, tmp_path)
        joined = " ".join(actual)
        predicted = "" if method == "gae" else "predicted: "
        assert f"{predicted}{saliency.label}, {saliency.probability:.1%}" in actual
        assert image.name in joined and saliency.model in joined and "98th percentile" in joined
        assert (f"{saliency.definition.title} (not class-specific)" in joined) == (method == "rollout")
        assert ("30% discarded" in joined) == (method == "rollout")
        (low, _), _ = readable(*np.percentile(saliency.grid.astype(float), [2, 98]))
        assert joined.count(low) == 1 and "2nd to 98th percentile of the patches" in joined


@pytest.mark.parametrize(
    ("signed", "background", "limits"),
    [(False, "grey", {}), (False, "photo", {"vmax": 0.5}), (True, "grey", {"robust": False}), (True, "photo", {})],
)
def test_the_colours_of_the_bar_are_those_of_the_overlay(signed, background, limits):
    grid = np.random.default_rng(0).random((6, 6)) - 0.4 * signed
    figure = map_of(grid).figure(background=background, **limits)
    photo, bar = (np.asarray(image.get_array()) for image in figure.findobj(AxesImage))
    known = np.unique(bar.reshape(-1, 3), axis=0).astype(int)
    # The bar has a colour for each pixel of its length: no colour of the overlay lies far from all of these.
    for color in np.unique(photo.reshape(-1, 3), axis=0).astype(int):
        assert np.abs(known - color).max(axis=1).min() <= 2
    assert len(known) > 40


def test_the_bar_of_a_contrast_says_which_colour_is_which_class(demo, tmp_path):
    saliency = demo.explain(sample_images()[1], method="gae", target=Contrast("orange disc", against="yellow star"))
    first, second = saliency.score.opposed
    actual = words(saliency, tmp_path)
    assert actual.index(f"for {second}") < actual.index(f"for {first}")
    strip = Comparison(((saliency,),)).figure(tmp_path / "strip.svg")
    texts = [text.get_text() for text in strip.findobj(Text)]
    assert texts.index(f"for {second}") < texts.index(f"for {first}")  # as its bar, blue on the left


@pytest.mark.parametrize(
    ("shift", "bar"), [(0.0, ["0.02", "≥ 0.98"]), (-0.5, ["below 0", "≤ −0.49", "above 0", "≥ 0.49"])]
)
def test_the_bar_has_the_limits_and_the_note_does_not_repeat_them(shift, bar, tmp_path):
    grid = np.linspace(0, 1, 400).reshape(20, 20) + shift
    for largest in (1.2, 9.0):
        grid[-1, -1] = largest
        actual = words(map_of(grid), tmp_path)
        assert set(bar) <= set(actual)
        notes = [text for text in actual if "percentile" in text]
        assert len(notes) == 1 and bar[-1].removeprefix("≥ ") not in notes[0]
    assert {"0", "1"} <= set(words(map_of(np.linspace(0, 1, 400).reshape(20, 20)), tmp_path, robust=False))


def test_the_requested_patch_is_framed(demo, tmp_path):
    image = sample_images()[3]
    saliency = demo.explain(image, method="attention", patch=(2, 7))
    left, top, right, bottom = saliency.patch_box
    middle = saliency.placement.to_input((top + bottom) / 2, (left + right) / 2)
    size = saliency.placement.input_size[0] / saliency.grid.shape[0]
    assert middle == pytest.approx((2.5 * size, 7.5 * size))
    height, width = saliency.image.shape[:2]
    pen = Pen(width / 100, dpi=100)  # the photograph's own size
    plain = replace(saliency, options={**saliency.options, "patch": None})
    limits = (0.0, float(saliency.grid.max()))
    framed, bare = (pen.overlay(one.grid, one.placement, one.image, limits, one.patch_box) for one in (saliency, plain))
    assert framed.shape == (height, width, 3)
    rows, cols = np.nonzero((framed != bare).any(axis=-1))
    for edges, ends in ((rows, (top, bottom)), (cols, (left, right))):
        assert edges.min() == pytest.approx(ends[0], abs=4) and edges.max() == pytest.approx(ends[1], abs=4)
        assert edges.min() < ends[0] and edges.max() > ends[1]
    inside = np.s_[round(top) : round(bottom), round(left) : round(right)]
    np.testing.assert_array_equal(framed[inside], bare[inside])
    assert plain.patch_box is None
    assert "The frame marks the query patch" in " ".join(words(saliency, tmp_path))
    coarse = map_of(np.zeros((12, 12)), options={"patch": (1, 2)}, facts={"patch_box": [64, 32, 96, 64]})
    assert coarse.patch_box == (64, 32, 96, 64)


@pytest.mark.parametrize(
    ("values", "reported"),
    [
        ((0.00203, 0.0072), ("0.002", "0.0072")),
        ((2.9e-5, 0.0352), ("0", "0.035")),
        ((-12.0, 12.0), ("−12", "12")),
        ((0.0, 0.0), ("0", "0")),
        ((3.1e-7, 4.2e-6), ("0.3", "4.2", "× 10⁻⁶")),
        ((0.0, 2.5e7), ("0", "25", "× 10⁶")),
    ],
)
def test_numbers_people_can_read(values, reported):
    numbers, unit = readable(*values)
    assert (*numbers, unit) == (*reported, "")[:3]


@pytest.fixture(scope="module")
def cropped() -> Saliency:
    """A signed map of a photograph of which the model saw the middle, with a query patch."""
    image = np.random.default_rng(0).integers(0, 256, (90, 140, 3), dtype=np.uint8)
    grid = np.random.default_rng(1).standard_normal((6, 6)).astype(np.float32)
    placement = place((90, 140), (48, 48), crop_pct=0.7)
    return Saliency(grid, placement, image, "noise.png", "own", "rollout", {"patch": (1, 2)})


@pytest.mark.parametrize("options", [{}, {"alpha": 0.4}, {"fade": False}, {"crop_to_seen": True}])
def test_a_heatmap_alone_over_any_ground_is_the_overlay_of_that_ground(cropped, options):
    alone = cropped.overlay(background="none", **options).astype(float)
    for level in (0, 90, 255):
        ground = replace(cropped, image=np.full_like(cropped.image, level)).overlay(
            background="photo", unseen="off", **options
        )
        opacity = alone[..., 3:] / 255
        np.testing.assert_allclose(
            opacity * alone[..., :3] + (1 - opacity) * level, ground, atol=3
        )  # lines are rounded twice


def test_the_unseen_part_can_be_left_without_a_line_or_left_out(cropped, tmp_path):
    left, top, right, bottom = cropped.placement.seen_box
    plain = cropped.overlay()
    unseen = np.isnan(cropped.heatmap)
    np.testing.assert_array_equal(plain, cropped.overlay(unseen="off"))
    assert (np.ptp(plain[unseen], axis=1) == 0).all() and plain[unseen].mean() > plain[~unseen].mean()
    assert (cropped.overlay(unseen="line")[~unseen] != plain[~unseen]).any()
    dim = cropped.overlay(background="dim")
    np.testing.assert_array_equal(dim[unseen], cropped.image[unseen])
    assert (dim != cropped.overlay(background="dim", unseen="off")).any()
    np.testing.assert_array_equal(cropped.overlay(crop_to_seen=True), plain[top:bottom, left:right])
    for options in ({"unseen": "off"}, {"crop_to_seen": True}):
        assert "saw" not in " ".join(words(cropped, tmp_path, **options))
        figures = [cropped.figure(**options), Comparison(((cropped,),)).figure(width=3.5, **options)]
        shapes = {axes.images[0].get_array().shape for figure in figures for axes in figure.axes[:-1]}
        [(height, width, _)] = shapes
        assert abs(height - (700 if "crop_to_seen" in options else 450)) <= 8 and abs(width - 700) <= 8
    assert "saw" in " ".join(words(cropped, tmp_path, unseen="line"))
    whole = map_of(np.eye(4))
    np.testing.assert_array_equal(whole.overlay(crop_to_seen=True), whole.overlay())


def test_the_command_saves_the_heatmap_alone_and_crops(demo, tmp_path):
    image = sample_images()[1]
    saliency = demo.explain(image)
    lines = ("--background none -o a.png", "-o a.npy", "--crop-to-seen --unseen off -o b.png", "--figure -o c.svg")
    with contextlib.chdir(tmp_path):
        run = lambda line: CliRunner().invoke(cli, ["explain", str(image), "--model", "demo", *line.split()])  # noqa: E731
        assert [run(line).exit_code for line in lines] == [0, 0, 0, 0] and Path("c.svg").stat().st_size > 5000
        refused = run("--background none -o a.jpg")
    assert "transparency" in refused.stderr and refused.exit_code == 2
    np.testing.assert_array_equal(Image.open(tmp_path / "a.png"), saliency.overlay(background="none"))
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), saliency.heatmap)
    np.testing.assert_array_equal(Image.open(tmp_path / "b.png"), saliency.overlay(crop_to_seen=True))
    with pytest.raises(OptionError, match="transparency"):
        vitflow.explain_folder(image, tmp_path / "run", model=demo, drawing={"background": "none"}, workers=0)
    vitflow.explain_folder(image, tmp_path / "run", model=demo, overlays=False, workers=0)
    with pytest.raises(OptionError, match="transparency"):
        draw_run(tmp_path / "run", tmp_path / "drawn", drawing={"background": "none"})


def test_an_unknown_drawing_option_and_the_wrong_kind_of_file_are_named(demo, tmp_path):
    saliency = demo.explain(sample_images()[0], target=1)
    for draw in (
        saliency.overlay,
        saliency.figure,
        vitflow.compare(saliency.image, model=demo, methods=["gae"]).figure,
    ):
        with pytest.raises(OptionError, match="drawing option 'colormap'. Did you mean 'cmap'"):
            draw(colormap="jet")
    with pytest.raises(OptionError, match=r"figure\('.*a\.pdf'\) writes PDF"):
        saliency.save(tmp_path / "a.pdf")


def test_a_figure_goes_into_axes_and_outlines_boxes_and_a_mask(cropped, tmp_path):
    page = Figure()
    axes = page.subplots(1, 2)
    mask = np.zeros(cropped.image.shape[:2])
    mask[5:20, 5:20] = 1
    assert cropped.figure(tmp_path / "axes.png", ax=axes[0], boxes=(2, 3, 9, 9), mask=mask) is page
    title, scale = axes[0].get_title(), axes[0].child_axes[0]
    assert "Attention rollout" in title and len(scale.get_xticklabels()) == 2 and (tmp_path / "axes.png").exists()
    assert axes[0].get_xlim() == (0, cropped.image.shape[1]) and not axes[1].images
    plain, marked = (axes_image(cropped, **marks) for marks in ({}, {"boxes": [(2, 3, 9, 9)], "mask": mask}))
    assert (plain != marked).any()
    for wrong in ({"boxes": [(1, 2, 3)]}, {"mask": mask[1:]}):
        with pytest.raises(OptionError, match="Expected"):
            cropped.figure(**wrong)


def axes_image(saliency: Saliency, **options) -> np.ndarray:
    return np.asarray(saliency.figure(**options).axes[0].images[0].get_array())


def test_show_opens_the_viewer_of_the_system(cropped):
    shown = []

    class Viewer(ImageShow.Viewer):
        def show_image(self, image, **options):
            shown.append(image.size)
            return True

    ImageShow.register(Viewer(), 0)
    try:
        cropped.show(width=2)
    finally:
        ImageShow._viewers.pop(0)
    assert shown and shown[0][0] > 400
