"""The explorer in a real browser: its maps are vitflow's own, and what a reader does with it works."""

import base64
import contextlib
import json
import re
import shlex
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from click.testing import CliRunner
from PIL import Image

import vitflow
from tests.viewer.waiting import until, watched
from vitflow import Explainer, attention_rollout, explore
from vitflow.analysis.removal import patch_order, removed_counts
from vitflow.cli import cli
from vitflow.demo import sample_images
from vitflow.errors import OptionError
from vitflow.evaluation import faithfulness_curves
from vitflow.explaining.captions import departures, variant
from vitflow.images.overlay import scale_range
from vitflow.methods.fusion import raw_attention
from vitflow.methods.refinement import balance
from vitflow.registry.method_table import get_method

HOSTILE = "<img src=x onerror=alert(1)>'\"&.png"
CLASS = "</script><script>alert(2)</script>"


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    entry = Explainer("demo")
    return Explainer(entry.model, class_names=[CLASS + name for name in entry.class_names])


@pytest.fixture(scope="module")
def place(tmp_path_factory, explainer) -> Path:
    """A folder with two photographs, one of them wide and with a hostile name, and the page of both."""
    folder = tmp_path_factory.mktemp("explorer")
    first, second = (Image.open(path).convert("RGB") for path in sample_images()[:2])
    first.save(folder / "first.png")
    wide = Image.new("RGB", (first.width * 3 // 2, first.height), "navy")
    wide.paste(second, (first.width // 4, 0))
    wide.save(folder / HOSTILE)
    methods = ["gae", *((method, {"masks": 16}) for method in ("sampling", "consensus"))]
    page = explore([folder / "first.png", folder / HOSTILE], model=explainer, methods=methods)
    page.save(folder / "page.html")
    return folder


@pytest.fixture(scope="module")
def opened(browser, place):
    """The open page, without a network."""
    with watched(browser, 1400) as page:
        page.context.set_offline(True)
        page.goto((place / "page.html").as_uri())
        yield page


@pytest.fixture
def page(opened):
    """The page as it begins; it fails the test where it asks the network, logs an error or opens a dialog."""
    opened.set_viewport_size({"width": 1400, "height": 900})
    opened.evaluate("async () => { document.activeElement.blur(); await begin({ map: 'rollout' }); }")
    yield opened
    assert opened.trouble == []


MAP = """async (asked) => {
    await begin(asked);
    const { shape, values, low, high } = panels.a.map;
    return { shape, values: [...values], low, high };
}"""


def map_of(page, **requested) -> tuple[np.ndarray, tuple[float, float]]:
    """The browser's map of the first photograph for a state, and the limits of its colours."""
    actual = page.evaluate(MAP, requested)
    return np.array(actual["values"]).reshape(actual["shape"]), (actual["low"], actual["high"])


def data_of(text: str) -> dict:
    """The data of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])


def unpacked(packed: dict) -> torch.Tensor:
    """The numbers of a page, decoded as its documentation says, float64; kept beside what is packed."""
    if "numbers" not in packed:
        packed["numbers"] = decoded(packed)
    return packed["numbers"]


def decoded(packed: dict) -> torch.Tensor:
    raw, shape = zlib.decompress(base64.b64decode(packed["data"])), packed["shape"]
    upper, lower = np.frombuffer(raw, np.uint8).reshape(2, -1)
    values = (upper.astype(np.uint16) << 8 | lower).view(np.float16)
    return torch.from_numpy(values.reshape(shape).astype(np.float64))


@pytest.fixture(scope="module")
def data(place) -> dict:
    return data_of((place / "page.html").read_text(encoding="utf-8"))


def expected(image: dict, requested: dict) -> np.ndarray:
    """The map of a state by vitflow's own functions, in float64, of the numbers that the page holds."""
    rows, cols = image["grid"]
    readout = torch.tensor(image["readout"], dtype=torch.float64)
    if requested.get("patch"):
        row, col = map(int, requested["patch"].split(","))
        readout = torch.eye(len(readout), dtype=torch.float64)[image["prefix"] + row * cols + col]
    if requested["map"] in ("gae", "sampling", "consensus"):
        grid = torch.tensor(next(entry for entry in image["maps"] if entry["method"] == requested["map"])["values"])
        if requested["map"] == "sampling" and requested["refine"]:
            grid = grid.clamp_min(0.0)
    else:
        options = {
            "discard_ratio": requested["discard_ratio"],
            "num_prefix_tokens": image["prefix"],
            "readout": readout,
        }
        name = f"{requested['head_fusion']} {'weighted' if requested['value_weighted'] else 'plain'}"
        layers = [layer.unsqueeze(0) for layer in unpacked(image["attention"][name])]
        if requested["map"] == "rollout":
            entry = {"residual": requested["residual"], "start_layer": requested["start"]}
            tokens = attention_rollout(layers[: requested["end"]], **entry, **options)
        else:
            if requested["head"]:
                heads = unpacked(image["heads"]).unflatten(0, (len(layers), -1))
                layers = [layer.unsqueeze(0) for layer in heads[:, int(requested["head"]) - 1]]
            tokens = raw_attention(layers[requested["layer"] - 1].float(), **options)
        grid = tokens[0, image["prefix"] :]
    grid = grid.double().reshape(1, rows, cols)
    if requested["refine"] and requested["map"] != "consensus":
        names = ["attention", "keys"] if requested["affinity"] == "both" else [requested["affinity"]]
        start = requested["start"] if requested["map"] == "rollout" else 1
        whole = [matrix_of(unpacked(image["affinities"][name][start - 1]), rows * cols) for name in names]
        for _ in range(requested["refine"]):
            [balanced] = balance([torch.stack(whole)])
            grid = balanced.spread(grid.flatten(1).repeat(len(whole), 1))[0].mean(dim=0).view_as(grid)
    return grid[0].numpy()


def matrix_of(triangle: torch.Tensor, size: int) -> torch.Tensor:
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows, cols = torch.triu_indices(size, size)
    matrix[rows, cols] = matrix[cols, rows] = triangle
    return matrix


def departure(image: dict, requested: dict) -> str:
    """Return the caption of a map's departures in Python, or "paper"; layers and patch have a separate line."""
    method = get_method(requested["map"])
    if requested["map"] not in ("rollout", "attention"):
        [options, *_] = [entry["options"] for entry in image["maps"] if entry["method"] == requested["map"]]
        options = {**options, **({"refine": requested["refine"]} if method.refine_stage != "inside" else {})}
        options |= {"affinity": requested["affinity"]} if method.refine_stage != "inside" else {}
        return departures(method, options) or variant(method, options)
    named = ("discard_ratio", "residual", "refine", "affinity")
    given = {name: requested[name] for name in named if method.accepts(name)}
    if requested["map"] == "rollout" or not requested["head"]:
        given |= {"head_fusion": requested["head_fusion"], "value_weighted": requested["value_weighted"] and "output"}
    options = {**method.published, **given}
    layers = {"start_layer": requested["start"], "end_layer": requested["end"] % 6 or -1}
    return departures(method, options) or variant(method, options | (layers if requested["map"] == "rollout" else {}))


def random_state(generator: np.random.Generator, layers: int, heads: int, number: int) -> dict:
    end = int(generator.integers(1, layers + 1))
    return {
        "map": ["rollout", "rollout", "attention", "gae", "sampling"][number % 5] if number else "consensus",
        "patch": "{},{}".format(*generator.integers(0, 12, 2)) if generator.random() < 0.7 else "",
        "start": int(generator.integers(1, end + 1)),
        "end": end,
        "layer": int(generator.integers(1, layers + 1)),
        "head": str(1 + generator.integers(0, heads)) if generator.random() < 0.5 else "",
        "head_fusion": str(generator.choice(["mean", "max", "min"])),
        "value_weighted": bool(generator.random() < 0.5),
        "discard_ratio": float(generator.choice([0.0, 0.3, 0.9, 0.99])),
        "residual": float(generator.choice([0.0, 0.5, 0.95])),
        "refine": int(generator.integers(0, 3)),
        "affinity": str(generator.choice(["attention", "keys", "both"])),
    }


def test_the_maps_of_the_browser_are_those_of_python(page, data):
    generator = np.random.default_rng(0)
    for number in range(10):
        requested = random_state(generator, data["layers"], data["heads"], number) | {"b": -1}
        actual, limits = map_of(page, **requested)
        wanted = expected(data["images"][0], requested)
        assert np.abs(actual - wanted).max() <= 1e-6 * np.abs(wanted).max(), requested
        assert limits == pytest.approx(scale_range(wanted), rel=1e-6), requested
        assert page.locator("#panel-a .departs").text_content() == departure(data["images"][0], requested), requested


def test_ties_are_discarded_by_position(page):
    values, prefix, ratio = np.array([[[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.25, 0.25, 0.5]]], np.float32), 1, 0.4
    wanted = attention_rollout([torch.from_numpy(values)], discard_ratio=ratio, residual=0.2, num_prefix_tokens=prefix)
    row = """([values, prefix, ratio, readout]) => {
        const layer = discardLow(Float32Array.from(values), 3, prefix, ratio);
        return [...rollout([layer], readout, { start: 1, end: 1, residual: 0.2 }).row];
    }"""
    for token in range(3):
        readout = [float(token == other) for other in range(3)]
        assert page.evaluate(row, [values.ravel().tolist(), prefix, ratio, readout]) == pytest.approx(
            wanted[0, token].tolist(), abs=1e-7
        )


def test_with_nothing_discarded_the_browser_is_within_a_thousandth_of_full_precision(page, place, explainer):
    for fusion, weighted, patch in (("mean", False, None), ("max", True, (3, 7)), ("min", False, (11, 0))):
        requested = {
            "map": "rollout",
            "head_fusion": fusion,
            "value_weighted": weighted,
            "discard_ratio": 0,
            "refine": 1,
        }
        actual, _ = map_of(page, **requested, patch="" if patch is None else "{},{}".format(*patch))
        options = {"head_fusion": fusion, "value_weighted": "output" if weighted else False, "patch": patch}
        wanted = explainer.explain(place / "first.png", method="rollout", discard_ratio=0, refine=1, **options).grid
        assert np.abs(actual - wanted).max() <= 1e-3 * wanted.max()


def test_similarity_is_the_cosine_of_what_the_patches_hold(page, data):
    page.evaluate("async () => { take({ map: 'similarity', patch: '2,3' }); await update(); }")
    actual = np.array(page.evaluate("[...panels.b.map.values]"))
    first, second = (torch.nn.functional.normalize(unpacked(one["features"]), dim=-1) for one in data["images"])
    assert actual == pytest.approx((second @ first[2 * 12 + 3]).numpy(), abs=1e-6)
    limits = page.evaluate("sides.map((side) => [panels[side].map.low, panels[side].map.high])")
    every = np.concatenate([first @ first[2 * 12 + 3], second @ first[2 * 12 + 3]])
    low, high = np.percentile(every, [2, 98])
    assert limits[0] == limits[1] == pytest.approx([max(low, 0), high], abs=1e-6)


def point_of(page, side: str, row: int, col: int) -> tuple[float, float]:
    """Return the position of a patch's centre on the screen."""
    box = page.locator(f"#panel-{side} .frame").bounding_box()
    left, top, right, bottom = page.evaluate(f"imageOf('{side}').window")
    rows, cols = page.evaluate(f"imageOf('{side}').grid")
    scale = box["width"] / page.evaluate(f"imageOf('{side}').size[0]")
    x, y = left + (col + 0.5) * (right - left) / cols, top + (row + 0.5) * (bottom - top) / rows
    return box["x"] + scale * x, box["y"] + scale * y


DEFAULTS = {"map": "rollout", "head_fusion": "max", "value_weighted": True, "discard_ratio": 0.9, "residual": 0.5}
DEFAULTS |= {"start": 1, "refine": 1, "affinity": "attention"}


def test_a_click_asks_a_patch_and_the_pointer_reads_values(page, data):
    for side, image in zip("ab", data["images"], strict=True):
        panel = page.locator(f"#panel-{side}")
        page.mouse.click(*point_of(page, side, 4, 9))
        page.evaluate("update()")  # a click does not wait for the map
        assert "from the patch in row 4, column 9" in panel.locator(".from").text_content()
        wanted = expected(image, DEFAULTS | {"end": data["layers"], "patch": "4,9"})
        page.mouse.move(*point_of(page, side, 5, 6))
        reading = panel.locator(".reading").text_content()
        actual = re.fullmatch(r"row 5, column 6: (\S+) — number (\d+) of 144 patches", reading)
        assert float(actual[1].replace("−", "-")) == pytest.approx(wanted[5, 6], rel=1e-3)
        assert int(actual[2]) == 1 + (wanted > wanted[5, 6]).sum()
    page.mouse.move(*(point_of(page, "b", 5, -2)))  # the crop left this out
    assert page.locator("#panel-b .reading").text_content() == "the model did not see this part"
    assert page.locator("#panel-b .seen").is_visible() and page.locator("#panel-a .seen").is_hidden()


def test_the_page_begins_with_the_map_of_the_output_to_which_escape_returns(page):
    page.evaluate("async () => { invited = true; await begin({}); }")
    assert page.get_by_role("tab", name="GAE").get_attribute("aria-selected") == "true"
    stage, message = (page.locator(f"#panel-a {part}").bounding_box() for part in (".stage", ".message"))
    assert message["y"] >= stage["y"] + stage["height"]
    page.mouse.click(*point_of(page, "b", 4, 9))
    until(page, "state.map === 'rollout' && state.patchb === '4,9' && panels.b.map.agreement !== undefined")
    assert "from the patch in row 4, column 9" in page.locator("#panel-b .from").text_content()
    page.keyboard.press("Escape")
    until(page, "state.map === 'gae' && state.patchb === '' && panels.b.map.own")
    page.keyboard.press("ArrowRight")
    until(page, "state.map === 'rollout' && state.patchb !== ''")


def test_does_it_matter_shows_the_deletion_curve_of_the_map(page, data, place, explainer):
    image, source = data["images"][1], place / HOSTILE
    assert [len(each["deletion"]) for each in data["images"]] == [3, 3]
    entry, saliency = image["deletion"][1], explainer.explain_batch([source], methods=["gae"], targets="top2")[1]
    others = [*(("random", {"random_seed": seed}) for seed in range(3)), "centre"]
    baselines = explainer.explain_batch([source], methods=others, targets=[saliency.target])
    first, *random, centre = (curve.deletion for curve in faithfulness_curves(explainer, [saliency, *baselines]))
    for name, curve in {"map": first, "random": np.mean(random, axis=0), "centre": centre}.items():
        assert entry["scores"][name] == pytest.approx(curve, rel=1e-3, abs=1e-5), name
    steps = np.array([int(digit, 16) for digit in entry["steps"]])
    assert (np.sort(steps) == steps[patch_order(saliency.grid)]).all()
    assert np.bincount(steps).cumsum().tolist() == removed_counts(144, 11) and entry["replace"] == "drop"
    page.get_by_role("tab", name="Does it matter?").click()
    page.locator("#panel-a .matters input").fill("3")
    until(page, "state.removed === 3")
    entry = data["images"][0]["deletion"][0]
    until(page, "panels.a.matters.querySelector('.map strong').textContent === percent(panels.a.map.own.scores.map[3])")
    assert "43 of 144 patches (30 %) are removed" in page.locator("#panel-a .from").text_content()
    page.mouse.click(*point_of(page, "a", 4, 9))
    assert "slider" in page.locator("#panel-a .message").text_content()
    page.locator("#call").click()
    names: dict = {"explainer": explainer}
    exec(page.locator("#python").text_content(), names)
    assert names["curves"].deletion[3] == pytest.approx(entry["scores"]["map"][3], rel=1e-3)
    page.locator("#close").click()


SWIN = {"num_classes": 3, "img_size": 56, "depths": (1, 1), "embed_dim": 24, "num_heads": (1, 2), "window_size": 7}


class Stretched(torch.nn.Module):
    """A model with windows, of images with two values: no token can be dropped, and a blank image gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
        return self.inner((pixels - low) / (high - low))


def test_deletion_is_small_can_be_left_out_and_says_why_it_is_missing(explainer):
    image = Image.open(sample_images()[0]).convert("RGB")
    whole, without = (explore(image, model=explainer, methods=["gae"], deletion=deletion) for deletion in (True, False))
    assert 0 < len(whole.html) - len(without.html) < 100_000
    assert not data_of(without.html)["images"][0]["deletion"]
    config = {"input_size": (3, 56, 56), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitflow.VitflowWarning)
        missing = explore(image, model=Explainer(Stretched().eval(), data_config=config), methods=["gae"])
    assert not data_of(missing.html)["images"][0]["deletion"]
    assert any("left out, as patches cannot be removed" in note and "NaN" in note for note in missing.notes)


@pytest.mark.parametrize("mode", ["rollout", "attention"])
def test_the_map_of_a_patch_is_reported_and_shown_next_to_that_of_the_whole_answer(page, data, mode):
    whole, _ = map_of(page, map=mode)
    assert page.locator("#panel-a .comparison").is_hidden()
    entry, _ = map_of(page, map=mode, patch="4,9")
    similar = np.corrcoef(entry.ravel(), whole.ravel())[0, 1]
    reported = page.locator("#panel-a .correlation").text_content()
    assert reported == f"Correlation with the map of the model output: {similar:.2f}. ".replace("-", "−")
    page.locator("#panel-a .less").click()
    until(page, "state.less && panels.a.map.ends")
    assert page.locator("#panel-a .less").text_content() == "Show the map itself"
    difference = np.array(page.evaluate("[...panels.a.map.values]")).reshape(entry.shape)
    np.testing.assert_allclose(difference, entry / entry.sum() - whole / whole.sum(), atol=1e-9)
    ends = page.locator("#panel-a .ends")
    assert ends.is_visible() and ends.inner_text().split("\n") == [
        "more in the model output's map",
        "more in the patch's map",
    ]
    assert "minus the map of the model output" in page.locator("#panel-a .from").text_content()
    page.locator("#panel-a .less").click()
    until(page, "!state.less && panels.a.map.low >= 0")
    assert ends.is_hidden()


def test_keys_move_the_patch_and_choose_the_map(page):
    page.locator("#panel-a .frame").focus()
    page.keyboard.press("ArrowRight")  # from the whole answer to the middle
    for key in ("ArrowRight", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    assert page.evaluate("state.patch") == "4,7" and page.locator("#source").text_content() == "row 4, column 7"
    page.keyboard.press("2")
    assert page.get_by_role("tab", name="Raw attention").get_attribute("aria-selected") == "true"
    page.get_by_role("tab", name="Raw attention").focus()
    page.keyboard.press("ArrowLeft")
    assert page.get_by_role("tab", name="Attention rollout").get_attribute("aria-selected") == "true"
    page.locator("#panel-a .frame").focus()
    page.keyboard.press("Escape")
    assert page.evaluate("state.patch") == "" and page.locator("#source").text_content() == "the model output"
    before = page.evaluate("state.discard_ratio")
    page.locator('[data-name="discard_ratio"]').focus()
    page.keyboard.press("ArrowLeft")  # the slider has the focus, and the key is its own
    assert page.evaluate("state.discard_ratio") == pytest.approx(before - 0.01)
    assert page.evaluate("state.patch") == ""


def test_the_address_holds_what_is_seen(page):
    page.locator('[data-name="residual"]').fill("0.3")
    page.locator('[data-name="start"]').fill("2")
    page.locator('[data-name="head_fusion"]').select_option("mean")
    page.mouse.click(*point_of(page, "b", 1, 2))
    page.evaluate("update()")
    address = page.evaluate("location.hash")
    shown = page.evaluate("[...panels.b.map.values]")
    drawing = page.evaluate("panels.b.heat.toDataURL()")
    page.evaluate("async () => { await begin({}); }")
    assert page.evaluate("location.hash") == ""
    page.evaluate("(address) => { location.hash = address; }", address)
    until(page, "state.patchb === '1,2' && panels.b.map")
    until(page, "(old) => panels.b.heat.toDataURL() === old", arg=drawing)
    assert page.evaluate("[...panels.b.map.values]") == shown
    assert page.locator('[data-name="residual"]').input_value() == "0.3"
    page.evaluate("(address) => { location.hash = address; }", "#layer=99&patch=<b>&opacity=nine&map=none&start=2.5")
    until(page, "location.hash === ''")  # nothing of it is possible


@pytest.mark.parametrize("drawing", [{"alpha": 0.3, "background": "dim"}, {}])
def test_the_png_is_the_overlay_of_vitflow(page, place, explainer, drawing):
    requested = {"map": "rollout", "discard_ratio": 0.0, **drawing}
    if "alpha" in requested:
        requested["opacity"] = requested.pop("alpha")
    page.evaluate("(asked) => begin(asked)", requested)
    with page.expect_download() as download:
        page.locator("#save").click()
    assert download.value.suggested_filename == "first-rollout.png"
    saved = np.asarray(Image.open(download.value.path()).convert("RGB")).astype(int)
    overlay = explainer.explain(place / "first.png", discard_ratio=0.0).overlay(**drawing).astype(int)
    assert saved.shape == overlay.shape
    assert np.abs(saved - overlay).mean() < 4  # the page has its photograph as JPEG


def test_no_name_does_harm(page, place, data):
    assert page.locator("#panel-b h2").text_content() == HOSTILE and page.locator("#panel-b h2 *").count() == 0
    assert page.locator("img[src=x]").count() == 0 and page.locator("script").count() == 2
    page.get_by_role("tab", name="GAE").click()
    options = page.locator('[data-name="class"] option').all_text_contents()
    assert len(options) == 3 and all(text.startswith(CLASS) for text in options)
    assert CLASS in page.locator("#panel-a .answers").text_content()
    page.evaluate("async () => { take({ a: 1, map: 'gae' }); await update(); }")
    with page.expect_download() as download:
        page.locator("#save").click()
    assert "/" not in download.value.suggested_filename and "<" not in download.value.suggested_filename
    text = (place / "page.html").read_text(encoding="utf-8")
    assert "<img src=x" not in text and CLASS not in text


def test_everything_has_a_name_and_fits_on_a_phone(page):
    nameless = """() => [...document.querySelectorAll("input, select, button, [role=application]")].filter(
        (one) => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map((one) => one.outerHTML)"""
    assert page.evaluate(nameless) == []
    page.set_viewport_size({"width": 390, "height": 800})
    page.evaluate("update()")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="light")
    assert sum(map(int, re.findall(r"\d+", dark))) < 120


def test_the_code_of_a_difference_makes_it(custom_page, place, monkeypatch):
    monkeypatch.chdir(place)
    requested = {"map": "rollout", "patch": "4,9", "less": True}
    call = custom_page.evaluate(CALLS, requested)
    assert call["command"].startswith("# the map of the patch; the difference is made in Python\nvitflow explain")
    names: dict = {}
    exec(call["python"], names)
    np.testing.assert_allclose(names["difference"], map_of(custom_page, **requested)[0], atol=2e-5)


CALLS = "async (asked) => { await begin(asked); return currentCall(); }"


@pytest.fixture(scope="module")
def custom_page(browser, place):
    """A page that the command line made in the folder of the photographs, with its model called demo."""
    arguments = ["explore", "first.png", HOSTILE, "--model", "demo", "--method", "gae", "-o", "own.html"]
    with contextlib.chdir(place):
        done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout == "own.html\n"
    page = browser.new_page()
    page.goto((place / "own.html").as_uri())
    yield page
    page.close()


def test_the_command_and_the_code_make_the_map_that_is_seen(custom_page, place, monkeypatch):
    monkeypatch.chdir(place)
    states = [
        {"map": "rollout", "patch": "3,4", "discard_ratio": 0, "start": 2, "end": 3, "head_fusion": "mean"},
        {
            "map": "rollout",
            "a": 1,
            "b": 0,
            "discard_ratio": 0,
            "value_weighted": False,
            "refine": 2,
            "affinity": "keys",
        },
        {"map": "attention", "layer": 2, "head": "1", "refine": 0},
        {"map": "gae", "refine": 1},
        {"map": "similarity", "patch": "2,3"},
    ]
    for requested in states:
        reported, (actual, _) = custom_page.evaluate(CALLS, requested), map_of(custom_page, **requested)
        names: dict = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(reported["python"], names)
        code = names["saliency"].grid
        assert np.abs(code - actual).max() <= 1e-3 * np.abs(actual).max(), reported["python"]
        words = shlex.split(reported["command"])
        done = CliRunner().invoke(cli, [*words[1:], "--save-map", "-o", "map.png"])
        assert done.exit_code == 0, done.output
        with np.load("map.npz") as saved:
            assert np.abs(saved["grid"] - code).max() <= 1e-6 * np.abs(code).max(), reported["command"]


def test_what_does_not_fit_is_left_out_and_said(browser, tmp_path, explainer):
    image = sample_images()[0]
    whole = explore(image, model=explainer, methods=["gae"])
    [held] = data_of(whole.html)["images"]
    assert len(held["attention"]) == 6 and held["heads"] is not None
    no_heads = explore(image, model=explainer, methods=["gae"], max_size=0.98 * len(whole.html) / 1e6)
    assert data_of(no_heads.html)["images"][0]["heads"] is None
    assert "Left out, for a smaller page: single heads." in no_heads.notes
    least = explore(image, model=explainer, methods=["gae"], max_size=0.01)
    [held] = data_of(least.html)["images"]
    assert list(held["attention"]) == ["max weighted"]
    reported = " ".join(least.notes)
    assert "cannot be made as small as 0.01 MB" in reported and "min weighted" in reported
    assert all(note in least.html.replace("&#39;", "'") for note in least.notes[:-1])
    page = browser.new_page()
    page.goto(least.save(tmp_path / "least.html").as_uri())
    requested = DEFAULTS | {"end": data_of(least.html)["layers"], "patch": "5,5"}
    actual, wanted = map_of(page, **requested)[0], expected(held, requested)
    assert np.abs(actual - wanted).max() <= 1e-6 * wanted.max()
    assert page.locator('[data-name="head_fusion"]').is_disabled()
    assert "had room for this one fusion only" in page.locator('fieldset[data-for="attention"] .why').text_content()
    page.close()


def test_a_model_with_windows_says_what_its_page_cannot_compute(browser, tmp_path):
    model = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vitflow.VitflowWarning)
        made = explore(Image.open(sample_images()[0]).convert("RGB"), model=model)
    page = browser.new_page()
    page.goto(made.save(tmp_path / "windows.html").as_uri())
    assert "SwinTransformer has windows" in page.locator("#refused").text_content()
    tabs = page.locator("#maps [role=tab]").all_text_contents()
    assert (
        page.locator("#maps [aria-selected=true]").text_content() == "GAE"
        and "Does it matter?" in tabs
        and {"GAE", "Grad-CAM", "Attention rollout", "Raw attention"} <= set(tabs)
    )
    for name in tabs:
        page.get_by_role("tab", name=name, exact=True).click()
        until(page, "panels.a.map && Number.isFinite(panels.a.map.high)")
    page.close()


def test_bad_options_are_refused_before_the_model_runs(tmp_path):
    for images, options, words in (([], {}, "at least one image"), ("a.png", {"max_size": 0}, "max_size")):
        with pytest.raises(OptionError, match=words):
            explore(images, model="demo", **options)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    done = CliRunner().invoke(cli, ["explore", str(tmp_path / "a.png"), "-o", str(tmp_path / "a.png")])
    assert done.exit_code == 2 and ".html" in done.stderr
