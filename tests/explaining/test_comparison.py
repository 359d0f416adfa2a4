"""Comparisons: positions of maps, colours, agreement of methods, and the command line."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from scipy.stats import spearmanr

import vitflow
from tests.small import DATA, custom_model, photo
from tests.typed import typed_here
from vitflow import Comparison, Explainer
from vitflow.analysis.comparison import DEFAULT_METHODS, compare, spearman
from vitflow.demo import sample_images
from vitflow.errors import ImageError, NoAttentionError, OptionError, ShapeError, VitflowWarning
from vitflow.images import figures, overlay
from vitflow.images.pen import Pen, panel_size
from vitflow.images.typesetting import readable
from vitflow.registry import method_table

NAMES = ["cat", "狗", "$x$ and $y", "goldfish, Carassius auratus", "a name so long that it can never fit " * 2]


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(custom_model(), data_config=DATA, class_names=NAMES)


IMAGES = [photo(40, 60), photo(80, 35, 1), photo(9, 70, 2)]


def words(compared: Comparison, tmp_path: Path, **options) -> list[str]:
    compared.save(tmp_path / "words.svg", **options)
    nodes = ET.parse(tmp_path / "words.svg").iter("{http://www.w3.org/2000/svg}text")
    return ["".join(node.itertext()) for node in nodes]


@pytest.fixture
def drawn(monkeypatch):
    """Return the arguments of the drawn figure."""
    calls = []
    original = figures.draw_bands

    def keep(bands, **options):
        calls.extend((columns, blocks, options) for columns, blocks in bands)
        return original(bands, **options)

    monkeypatch.setattr(figures, "draw_bands", keep)
    return calls


def test_the_maps_are_those_that_the_explainer_gives_alone(explainer):
    methods = ["rollout", ("rollout", {"head_fusion": "min"}), "gae", "random"]
    compared = compare(IMAGES, model=explainer, methods=methods, targets=[1, 3], discard_ratio=0.37)
    assert [len(maps) for maps in compared.images] == [5, 5, 5]
    for image, maps in zip(IMAGES, compared.images, strict=True):
        expected = [
            explainer.explain(image, method="rollout", discard_ratio=0.37),
            explainer.explain(image, method="rollout", discard_ratio=0.37, head_fusion="min"),
            explainer.explain(image, method="gae", target=1),
            explainer.explain(image, method="gae", target=3),
            explainer.explain(image, method="random"),
        ]
        for actual, alone in zip(maps, expected, strict=True):
            assert (actual.method, actual.options) == (alone.method, alone.options)
            np.testing.assert_allclose(actual.grid, alone.grid, rtol=1e-4, atol=1e-6)
    assert compared.labels[1:] == ("rollout (min over heads, 37% discarded)", "gae", "random")
    assert [maps[0].source for maps in compared.images] == ["image 1", "image 2", "image 3"]
    assert len(compared.saliencies) == 15


def test_by_default_there_are_all_quick_methods_and_both_baselines(explainer):
    compared = compare(IMAGES[0], model=explainer, layers=2)
    assert tuple(saliency.method for saliency in compared.saliencies) == DEFAULT_METHODS
    assert DEFAULT_METHODS[-2:] == ("random", "centre")
    without = Explainer(custom_model(num_classes=0), data_config=DATA)
    methods = [saliency.method for saliency in compare(IMAGES[0], model=without, layers=2).saliencies]
    assert methods == ["attention", "rollout", "flow", "random", "centre"]


def test_a_class_requested_twice_appears_once(explainer):
    top = explainer.explain(IMAGES[0], method="gae").target
    compared = compare(IMAGES[0], model=explainer, methods=["gae", "rollout"], targets=["top2", top, "狗", 1])
    targets = [saliency.target for saliency in compared.saliencies if saliency.method == "gae"]
    assert targets[0] == top
    assert len(targets) == len(set(targets)) == len({top, 1, targets[1]})
    assert [saliency.method for saliency in compared.saliencies].count("rollout") == 1


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (OptionError, "Did you mean 'rollout'", {"methods": ["rolout"]}),
        (OptionError, "at least one method", {"methods": []}),
        (OptionError, "Unknown .* option", {"nonsense": 3}),
        (OptionError, "at least one image", {"images": []}),
        (ImageError, "no such file", {"images": ["no-such-file.png"]}),
    ],
)
def test_faults_are_named(explainer, error, message, arguments):
    with pytest.raises(error, match=message):
        compare(**{"images": IMAGES[0], "model": explainer, **arguments})


def test_rows_are_classes_and_maps_without_a_class_stand_apart_so_that_nothing_is_blank(explainer, drawn):
    compared = compare(
        IMAGES[:2], model=explainer, methods=["attention", "gae", "gradcam", "random"], targets=[0, 1, 2]
    )
    compared.figure()
    (above, first, _), (below, second, _) = drawn
    assert [column.title for column in above] == ["Image", "Raw attention", "Random map"]
    assert [column.group for column in above] == ["", "not class-specific", "baselines, not class-specific"]
    assert [column.title for column in below] == ["Image", "GAE", "Grad-CAM"]
    assert [column.group for column in below] == ["", "class-specific", "class-specific"]
    assert [[len(cells) for cells in block] for block in first] == [[1, 1, 1]] * 2
    assert [[len(cells) for cells in block] for block in second] == [[3, 3, 3]] * 2
    for block, maps in zip(second, compared.images, strict=True):
        reported = [cell.caption[0].partition(",")[0] for cell in block[0]]
        assert reported == [saliency.label for saliency in maps if saliency.method == "gae"]


def test_a_saturated_flow_says_so(explainer, tmp_path):
    [saliency] = compare(IMAGES[0], model=explainer, methods=["flow"], layers=2).saliencies
    share = next(value for key, value in saliency.facts.items() if "saturated" in key)
    for reported, expected in ((max(share, 0.01), True), (0.009, False)):
        one = replace(saliency, facts={**saliency.facts, "saturated": reported})
        actual = words(Comparison(((one,),)), tmp_path)
        assert (f"{reported:.0%} saturated" in actual) == expected


def limits_of(cell) -> tuple[str, str]:
    low, _, high = cell.details[0].partition(" to ")
    return low, high.split(" ×")[0]


def test_each_map_has_its_colours_unless_a_method_has_one_scale_and_the_caption_states_them(explainer, drawn):
    compared = compare(IMAGES[:2], model=explainer, methods=["rollout", "gae"], targets=[0, 3])
    grids = [[s.grid for s in maps if s.method == "gae"] for maps in compared.images]
    for same_scale, shared in ((True, [[np.stack([*grids[0], *grids[1]])] * 2] * 2), (False, grids)):
        for robust in (True, False):
            drawn.clear()
            compared.figure(same_scale=same_scale, robust=robust)
            _, (_, blocks, options) = drawn  # those with a row for each class stand below
            assert ("common to all maps of a method" if same_scale else "for each map separately") in options["note"]
            for number, block in enumerate(blocks):
                for row, cell in enumerate(block[1]):
                    values = shared[number][row].astype(float)
                    low, high = np.percentile(values, [2, 98]) if robust else (values.min(), values.max())
                    if same_scale:
                        assert limits_of(cell) == readable(low, high)[0]
                    else:
                        assert cell.details == ()
                    one = [s for s in compared.images[number] if s.method == "gae"][row]
                    expected = Pen(1.5, robust=robust).overlay(one.grid, one.placement, one.image, (low, high))
                    assert np.abs(cell.image.astype(int) - expected).max() <= 1
    drawn.clear()
    compared.figure(vmin=0, vmax=0.5)
    assert all(limits_of(cell) == ("0", "0.5") for block in drawn[0][1] for cells in block[1:] for cell in cells)


def test_maps_with_negative_values_have_colours_on_both_sides_of_0_and_a_bar_of_their(explainer, drawn, tmp_path):
    compared = compare(IMAGES[0], model=explainer, methods=["rollout", "occlusion"])
    signed = compared.saliencies[1].grid
    assert signed.min() < 0 < signed.max()
    text = " ".join(words(compared, tmp_path))
    name = compared.saliencies[1].label
    ends = f"against {name}", f"for {name}"
    assert all(label in text for label in ("low", "high", *ends, "diverge from 0, which is transparent"))
    [(_, _, options)] = drawn
    one_side, two_sides = (bar.image for bar in options["bars"])
    assert (one_side[0, 0] == 96).all() and (two_sides[0, 109:111] == 96).all()  # mid-grey, darkened
    red, _, blue = two_sides[0, -1].astype(int) - two_sides[0, 0]
    assert red > 100 and blue < -100
    drawn.clear()
    compared.figure(vmin=0)
    [(_, _, options)] = drawn
    assert [bar.labels for bar in options["bars"]] == [("low", "high")]


@pytest.mark.parametrize(("fit", "size"), [("crop", (600, 900)), ("pad", (1100, 500)), ("squash", (40, 60))])
def test_a_map_lies_in_the_strip_where_it_lies_on_the_image(fit, size):
    explaining = Explainer(custom_model(), data_config=DATA, fit=fit)
    saliency = explaining.explain(cv2.GaussianBlur(photo(*size), (0, 0), 5), method="rollout")
    limits = overlay.scale_range(saliency.grid)
    pen = Pen(1.5, unseen="off")
    small = pen.overlay(saliency.grid, saliency.placement, saliency.image, limits)
    assert small.shape[:2] == panel_size(size)
    full = saliency.overlay(unseen="off")
    expected = cv2.resize(full, small.shape[1::-1], interpolation=cv2.INTER_AREA if size[0] > 100 else cv2.INTER_CUBIC)
    difference = np.abs(small.astype(float) - expected).mean(axis=-1)
    assert difference.mean() < 2.0
    # A shift by two patches would show: the same maps upside down differ by far more.
    assert difference.mean() < 0.35 * np.abs(small[::-1].astype(float) - expected).mean()


def test_a_constant_map_is_drawn_and_agrees_with_nothing(explainer, monkeypatch, tmp_path):
    monkeypatch.setattr(method_table, "METHODS", dict(method_table.METHODS))
    vitflow.register_method("flat", lambda trace: torch.full((len(trace.pixels), 4, 4), 0.25))
    compared = compare(IMAGES[0], model=explainer, methods=["rollout", "flat"])
    compared.save(tmp_path / "strip.png")
    actual = compared.agreement()
    assert actual == {"methods": ["rollout", "flat"], "spearman": [[1.0, None], [None, 1.0]], "maps": 1}
    text = compared.save(tmp_path / "strip.json").read_text(encoding="utf-8")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_json_holds_every_value(explainer, tmp_path):
    compared = compare(IMAGES[:2], model=explainer, methods=["rollout", "gae"], targets=[0, 1])
    falling = np.sort(compared.images[0][0].grid.ravel())[::-1]
    exact = np.interp(0.1 * falling.size, np.arange(falling.size + 1), [0, *np.cumsum(falling)]) / falling.sum()
    assert compared.records()[0]["maps"][0]["top_share"] == pytest.approx(exact, abs=1e-4)
    read = json.loads(compared.save(tmp_path / "strip.json").read_text(encoding="utf-8"))
    maps = [each for record in read for each in record["maps"]]
    assert [each["method"] for each in maps] == ["rollout", "gae", "gae"] * 2
    for actual, saliency in zip(maps, compared.saliencies, strict=True):
        np.testing.assert_array_equal(np.float32(actual["grid"]), saliency.grid)
        assert actual["class_index"] == saliency.target
    assert read[0]["agreement"]["methods"] == ["rollout", "gae"]
    assert all("grid" not in one for record in compared.records() for one in record["maps"])


def maps_of(seed: int, kind: str) -> np.ndarray:
    random = np.random.default_rng(seed)
    return {
        "distinct": lambda: random.normal(size=(5, 7)),
        "ties": lambda: random.integers(0, 4, (5, 7)).astype(float),
        "sparse": lambda: (random.random((5, 7)) > 0.9) * random.random((5, 7)),
        "tiny": lambda: 1e-30 * random.random((5, 7)),
        "float32": lambda: random.random((5, 7), dtype=np.float32),
        "offset": lambda: 1e6 + random.random((5, 7)) * 100,
    }[kind]()


KINDS = ["distinct", "ties", "sparse", "tiny", "float32", "offset"]


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_rank_correlation_equals_that_of_scipy(first, second):
    for seed in range(5):
        a, b = maps_of(seed, first), maps_of(seed + 100, second)
        assert spearman(a, b) == pytest.approx(spearmanr(a.ravel(), b.ravel()).statistic, abs=1e-12)
        assert spearman(a, a) == pytest.approx(1.0, abs=1e-12)
        assert spearman(a, -a) == pytest.approx(-1.0, abs=1e-12)


def test_values_that_differ_only_by_rounding_are_constant():
    flat = np.float32(0.3) + np.float32(3e-8) * (np.arange(16, dtype=np.float32).reshape(4, 4) % 5)
    ramp = np.arange(16.0).reshape(4, 4)
    assert spearman(flat, ramp) is None


@pytest.mark.parametrize("bad", [np.zeros((2, 3)), np.array([[np.nan, 1], [2, 3]]), np.array([[np.inf, 1], [2, 3]])])
def test_maps_that_cannot_be_compared_are_refused(bad):
    good = np.arange(4.0).reshape(2, 2)
    with pytest.raises(ShapeError):
        spearman(good, bad)
    with pytest.raises(ShapeError, match="at least 2"):
        spearman(np.ones((1, 1)), np.ones((1, 1)))


def test_agreement_is_the_mean_over_images_and_classes(explainer):
    compared = compare(IMAGES, model=explainer, methods=["attention", "gae", "centre"], targets=[0, 2])
    actual, rho = compared.agreement(), []
    for maps in compared.images:
        attention, first, second, _ = (one.grid.ravel() for one in maps)
        rho += [spearmanr(attention, first).statistic, spearmanr(attention, second).statistic]
    assert actual["maps"] == 6
    matrix = actual["spearman"]
    assert matrix[0][1] == matrix[1][0] == pytest.approx(np.mean(rho), abs=1e-12)


def test_maps_on_different_grids_are_not_compared(explainer):
    large = explainer.explain(IMAGES[0], method="rollout")
    small = replace(explainer.explain(IMAGES[0], method="attention"), grid=np.arange(4, dtype=np.float32).reshape(2, 2))
    assert Comparison(((large, small),)).agreement()["spearman"][0][1] is None


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """The command in this process: its exit code, stdout and stderr."""

    return partial(typed_here, monkeypatch, capsys, tmp_path, "compare", "--model", "demo")


def test_the_command_prints_an_object_per_image(run, tmp_path):
    images = sample_images()[:2]
    methods = ["--method", "gae:refine=1,affinity=keys", "--method", "random"]
    code, out, err = run(*images, *methods, "--class", "0", "--json", "-o", "out/a.svg", "--same-scale")
    assert code == 0, err
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["input"] for record in records] == [str(image) for image in images]
    for record in records:
        assert record["output"] == str(Path("out/a.svg"))
        assert [one["method"] for one in record["maps"]] == ["gae", "random"]
        assert (record["maps"][0]["options"]["refine"], record["maps"][0]["options"]["affinity"]) == (1, "keys")
        assert {"class_index", "class_name", "probability", "options"} <= record["maps"][0].keys()
        assert len(record["agreement"]["spearman"]) == 2
    assert (tmp_path / "out" / "a.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "rolout"], "Did you mean 'rollout'?"),
        (["--method", "rollout:head_fusion=mux"], "head_fusion: expected mean, max, min, signed_mean, got 'mux'"),
        (["--method", "rollout:residual"], "expected OPTION=VALUE after rollout:, got 'residual'"),
        (["-o", "strip.gif"], "ends in .png"),
        (["-o", "cat.png"], "would overwrite the image"),
    ],
)
def test_wrong_usage_says_so_and_writes_nothing(arguments, message, run, tmp_path):
    Image.fromarray(photo(20, 20)).save(tmp_path / "cat.png")
    code, out, err = run("cat.png", *arguments)
    assert code == 2, err
    assert message in err
    assert out == ""
    assert [file.name for file in tmp_path.iterdir()] == ["cat.png"]


def test_default_methods_that_do_not_apply_to_the_model_are_left_out_and_reported():
    torch.manual_seed(0)
    model = timm.create_model("convnext_atto", num_classes=4).eval()
    image = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    with pytest.warns(VitflowWarning, match="Left out: attention, rollout, flow, gradient_rollout, gae. No attention"):
        comparison = compare(image, model=model)
    assert [saliency.method for saliency in comparison.saliencies] == ["gradcam", "random", "centre"]
    with pytest.raises(NoAttentionError):
        compare(image, model=model, methods=["rollout"])


def test_classes_of_one_method_are_a_row_with_the_photograph_once(explainer, drawn):
    compare(IMAGES[:2], explainer, methods=["gae"], target="top3").figure()
    [(heads, [block], _), (_, [other], _)] = drawn
    assert [head.title for head in heads] == ["Image", "", "", ""] and heads[1].group.startswith("GAE")
    assert [len(cells) for cells in block] == [1] * 4 == [len(cells) for cells in other]
    assert len({cells[0].caption for cells in block[1:]}) == 3
