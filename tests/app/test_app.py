"""The page of `vitflow app`: what it answers to programs and in Chromium."""

import gc
import html
import os
import re
import runpy
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import vitflow
from tests.app.conftest import UNKNOWN
from tests.app.served import serving
from tests.viewer.waiting import until
from vitflow.app import serve
from vitflow.cli import cli
from vitflow.demo import sample_images
from vitflow.errors import ModelError, OptionError

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = sample_images()[0]


@pytest.fixture
def ask(page, tmp_path):
    """Ask one of its functions as a program would, each time as another visitor."""
    from gradio_client import Client, handle_file

    def call(function: str, image: object, *fields: object, first: tuple = ()) -> tuple:
        client = Client(page.local_url, verbose=False, analytics_enabled=False, download_files=str(tmp_path))
        given = None if image is None else handle_file(str(image))
        return client.predict(*first, given, *fields, api_name=f"/{function}")

    return call


def reported(answer: tuple) -> str:
    """Return the text of an answer's messages."""
    return html.unescape(re.sub(r"<[^>]+>", "", answer[-1])).removeprefix("×")


def grid_of(files: list[str]) -> np.ndarray:
    with np.load(next(file for file in files if file.endswith(".npz"))) as saved:
        return saved["grid"]


def test_a_map_is_that_of_the_library_and_its_code_makes_it_again(ask, tmp_path, monkeypatch):
    figure, files, code, says, baseline_image, *_, notes = ask("explain", SAMPLE, "demo", "gae", "yellow star")
    expected = vitflow.Explainer("demo").explain(SAMPLE, method="gae", target="yellow star")
    np.testing.assert_array_equal(grid_of(files), expected.grid)
    assert f"yellow star, {expected.score.display}" in says and not notes
    assert sorted(Path(file).suffix for file in files) == [".npz", ".pdf", ".png"]
    expected.figure(tmp_path / "expected.png")
    with (
        Image.open(figure) as drawn,
        Image.open(tmp_path / "expected.png") as expected_image,
        Image.open(baseline_image) as baselines,
    ):
        np.testing.assert_array_equal(drawn.convert("RGB"), expected_image.convert("RGB"))
        assert baselines.width > 1.2 * baselines.height  # the random map next to the centre prior
    shutil.copy(SAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    np.testing.assert_array_equal(names["saliency"].grid, expected.grid)


def test_two_visitors_at_once_each_get_their_answer(ask):
    explainer, requested = vitflow.Explainer("demo"), ["yellow star", "orange disc"]
    actual: dict[str, list[np.ndarray]] = {target: [] for target in requested}

    def visit(target: str) -> None:
        for _ in range(2):
            actual[target].append(grid_of(ask("explain", SAMPLE, "demo", "gae", target)[1]))

    visitors = [threading.Thread(target=visit, args=(target,)) for target in requested]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    for target in requested:
        right = explainer.explain(SAMPLE, method="gae", target=target).grid
        assert [np.array_equal(grid, right) for grid in actual[target]] == [True, True]


def test_prompts_and_boxes_are_questions_of_the_models_that_take_them(ask, siglip, detector):
    _, files, code, *_, classes, notes = ask("explain", SAMPLE, siglip, "gae", "a dog", "a dog\n a cat \n\n")
    explainer = vitflow.Explainer(siglip, outputs=vitflow.prompts(["a dog", "a cat"]))
    np.testing.assert_array_equal(grid_of(files), explainer.explain(SAMPLE, method="gae", target="a dog").grid)
    assert "outputs=vitflow.prompts(['a dog', 'a cat'])" in code and ["a cat", "a cat"] in classes["choices"]
    assert not notes
    _, files, code, *_, notes = ask("explain", SAMPLE, detector, "gae", "", "", "0,0,90,80")
    explainer = vitflow.Explainer(detector, outputs=vitflow.boxes((0, 0, 90, 80)))
    np.testing.assert_array_equal(grid_of(files), explainer.explain(SAMPLE, method="gae").grid)
    assert "outputs=vitflow.boxes((0.0, 0.0, 90.0, 80.0))" in code and not notes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("demo", "gae", "orange dics"), "Did you mean 'orange disc'?"),
        (("demo", "gae", "", "a dog"), "text encoder"),
        (("demo", "gae", "", "", "1,2,3"), "expected LEFT,TOP"),
        (("demo", "gae", "", "", "1,2,30,40"), "require a segmentation model or a detector"),
        ((UNKNOWN, "gae"), "error: "),
    ],
)
def test_what_is_wrong_stands_in_place_of_the_last_map(ask, fields, expected):
    answer = ask("explain", SAMPLE, *fields)
    assert expected in reported(answer)
    assert not any(answer[:5]) and answer[5] in (None, {})  # figure, files, code, heading, baselines, and bars


def test_the_classes_are_bars_to_choose_from(answers):
    fields = [str(SAMPLE), "demo", "gae", "", "", ""]
    bars = answers.explain(*fields)[6]
    explainer = vitflow.Explainer("demo")
    scores = explainer.outputs.scores(explainer.logits(explainer.pixels(SAMPLE)))[0]
    best = [int(index) for index in scores.argsort(descending=True)[:5]]
    assert bars == {explainer.class_names[index]: pytest.approx(float(scores[index])) for index in best}
    second = list(bars)[1]
    _, _, files, _, says, *_, classes, _ = answers._class(SimpleNamespace(value=second), *fields)
    np.testing.assert_array_equal(grid_of(files), explainer.explain(SAMPLE, method="gae", target=second).grid)
    assert second in says and classes["value"] == second
    says = answers.explain(str(SAMPLE), "demo", "rollout", "", "", "")[4]
    assert "not class-specific); predicted: orange disc" in says


def test_a_file_that_is_no_image_is_reported_as_the_command_line_reports_it(ask, tmp_path):
    wrong = tmp_path / "letter.png"
    wrong.write_text("Dear all,")
    Image.fromarray(np.zeros((20_000, 10_000), np.uint8)).save(tmp_path / "large.png")
    by_command = CliRunner().invoke(cli, ["explain", str(wrong), "--model", "demo"])
    assert reported(ask("explain", wrong)) in by_command.stderr
    assert "pixels" in reported(ask("explain", tmp_path / "large.png"))
    assert "got none" in reported(ask("explain", None))


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the actions of the fields."""
    pytest.importorskip("gradio", reason="Gradio is not installed (extra app)")
    from vitflow.app.models import Models
    from vitflow.app.tabs import _Answers

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("clicks")))
        yield _Answers(Models(["demo"], {}))


def test_a_click_on_each_patch_of_the_figure_is_that_patch(answers, tmp_path, monkeypatch):
    wide = tmp_path / "wide.png"
    Image.open(SAMPLE).convert("RGB").resize((300, 190)).save(wide)
    fields = [str(wide), "demo", "rollout", "", "", ""]
    _, click, *_ = answers.explain(*fields)
    (left, top, right, bottom), (rows, cols), placement = click
    clicked: list[tuple[int, int]] = []
    monkeypatch.setattr(answers, "_map", lambda *_, patch: clicked.append(patch))
    height, width = (side / count for side, count in zip(placement.input_size, (rows, cols), strict=True))
    for row in range(rows):
        for col in range(cols):
            y, x = placement.to_image((row + 0.5) * height, (col + 0.5) * width)
            at = left + x / 300 * (right - left), top + y / 190 * (bottom - top)
            answers._patch(SimpleNamespace(index=at), click, *fields)
    assert clicked == [(row, col) for row in range(rows) for col in range(cols)]
    for at, words in {left - 5: "inside the image", left + 3: "the model saw"}.items():
        with pytest.raises(OptionError, match=words):
            answers._patch(SimpleNamespace(index=(at, (top + bottom) / 2)), click, *fields)


def test_a_patch_is_answered_by_rollout_where_the_method_has_none(answers):
    fields = [str(SAMPLE), "demo", "gradcam", "", "", ""]
    _, click, *_ = answers.explain(*fields)
    (left, top, right, bottom), *_ = click
    event = SimpleNamespace(index=((left + right) / 2, (top + bottom) / 2))
    _, _, files, code, says, *_, method, _, _ = answers._patch(event, click, *fields)
    entry = vitflow.Explainer("demo").explain(SAMPLE, method="rollout", patch=(6, 6))
    np.testing.assert_array_equal(grid_of(files), entry.grid)
    assert method == "rollout" and "patch=(6, 6)" in code and "<b>Explain</b> to return" in says


@pytest.mark.filterwarnings("ignore:own.safetensors. built .* with num_classes=3")  # which is a note on the page
def test_the_first_model_has_the_weights_and_the_names_that_were_given(answers, tmp_path, monkeypatch):
    import timm
    import torch
    from safetensors.torch import save_file

    from vitflow.app.models import Models
    from vitflow.app.tabs import _Answers

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), "own.safetensors")
    Path("names.txt").write_text("ash\nbirch\ncedar\n")
    shutil.copy(SAMPLE, tmp_path)
    given = {"checkpoint": "own.safetensors", "class_names": Path("names.txt")}
    models = Models(["test_vit", "demo"], given)
    _, _, files, code, *_, classes, _ = _Answers(models).explain(SAMPLE.name, "test_vit", "gae", "birch", "", "")
    names: dict = {}
    exec(code, names)
    np.testing.assert_array_equal(grid_of(files), names["saliency"].grid)
    assert names["explainer"].class_names == ["ash", "birch", "cedar"] and "birch" in classes["choices"]
    assert models.explainer("demo")[0].class_names[0] == "red heart"  # the others have their own


@pytest.fixture
def visit(page, browser):
    """Open a page in a window; what it asks of other hosts, and what it complains of, is kept and must be nothing."""
    tabs = []

    def open_page(width: int = 1280, height: int = 800, url: str = page.local_url):
        tab = browser.new_context(viewport={"width": width, "height": height}).new_page()
        tab.set_default_timeout(int(os.environ.get("APP_TIMEOUT", 120_000)))  # the machine may be busy
        tab.foreign, tab.complaints = [], []
        known = ("data:", "blob:", url)
        tab.on("request", lambda request: request.url.startswith(known) or tab.foreign.append(request.url))
        tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.goto(url)
        tab.get_by_role("button", name="Explain").first.wait_for()
        tabs.append(tab)
        return tab

    yield open_page
    for tab in tabs:
        assert tab.complaints == tab.foreign == []
        tab.context.close()


def uploaded(tab, path: Path) -> None:
    with tab.expect_file_chooser() as chooser:
        tab.locator("button:visible", has_text="Click to Upload").first.click()
    chooser.value.set_files(str(path))


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_a_photograph_a_patch_and_an_error_in_a_browser(visit, tmp_path, width, height):
    tab = visit(width, height)
    uploaded(tab, SAMPLE)
    figure = tab.locator("img[src*='-gae.png']")
    figure.wait_for()
    tab.locator(".says b", has_text="orange disc, 100.0%").wait_for()
    tab.locator("img[src*='baselines.png']").wait_for()
    before, box = figure.get_attribute("src"), figure.bounding_box()
    controls = tab.get_by_label("Method").first.bounding_box()
    if width == 1280:  # everything on one screen
        until(tab, "height => document.documentElement.scrollHeight <= height", height)
    else:  # the map comes first
        assert box["y"] < controls["y"] and tab.evaluate("document.documentElement.scrollWidth") <= width
    arrow = tab.get_by_label("Method").first.locator("xpath=../*[contains(@class, 'icon-wrap')]").bounding_box()
    assert controls["x"] + controls["width"] <= arrow["x"]  # long names end before the arrow
    figure.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.5})
    tab.locator(f"img[src*='-gae.png']:not([src='{before}'])").wait_for()
    tab.get_by_text("Download").first.click()
    tab.get_by_text("patch=(").wait_for()
    tab.get_by_text("to return to the map of the output").wait_for()
    tab.get_by_role("button", name="yellow star").click()  # a bar
    tab.locator(".says b", has_text="yellow star").wait_for()
    (tmp_path / "letter.png").write_text("Dear all,")
    tab.get_by_label("Remove Image").first.click()
    uploaded(tab, tmp_path / "letter.png")
    error = tab.get_by_text("error: Expected 'letter.png' to be an image")
    error.wait_for()
    in_sight = "error => { const { y } = error.getBoundingClientRect(); return -1 <= y && y < innerHeight; }"
    until(tab, in_sight, error.element_handle())
    until(tab, "!document.querySelector(\"img[src*='-gae.png'], .says b, .bars button\")")
    error.get_by_label("Close").click()
    error.wait_for(state="detached")


@pytest.mark.slow  # starts another server
def test_a_named_photograph_is_explained_at_once(visit, tmp_path):
    with serving(tmp_path, "demo", "--", str(SAMPLE)) as named:
        tab = visit(url=named.local_url)
        tab.locator(".says b", has_text="orange disc, 100.0%").wait_for()
        tab.close()


def test_this_machine_requested_no_other(page, ask):
    ask("explain", SAMPLE)
    assert set(page.heard.read_text().split()) == {"127.0.0.1"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gradio leaves a socket open then
def test_what_cannot_be_served_is_reported(page):
    for models, given, words in (
        (["demo"], {"port": page.server_port}, "free port"),
        ([], {}, "at least one model"),
        (["demo"], {"allowed_hosts": ["a*b"]}, "allowed host"),
    ):
        with pytest.raises(OptionError, match=words):
            serve(models, **given)
        gc.collect()
    for unknown in ("vit_tny_patch16_224", "nowhere/mine.pth"):
        with pytest.raises(ModelError, match="Unknown model|no such file"):
            serve(["demo", unknown])


def test_without_gradio_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("vitflow.app.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(cli, ["app", "--model", "demo"])
    assert done.exit_code == 2 and "pip install 'vitflow[app]'" in done.stderr


def test_the_command_serves_the_given_options(monkeypatch):
    from vitflow.cli import setup

    reported: dict = {}

    def instead(**given):
        reported.update(given)
        return SimpleNamespace(local_url="http://127.0.0.1:7860/", block_thread=lambda: None)

    monkeypatch.setattr(setup, "serve", instead)
    line = ["app", str(SAMPLE), "--model", "demo", "--no-open", "--port", "8000"]
    line += ["--checkpoint", str(SAMPLE), "--class-names", str(SAMPLE), "--allowed-host", "a", "--prompt", "a dog"]
    done = CliRunner().invoke(cli, line)
    assert done.exit_code == 0 and "http://127.0.0.1:7860/" in done.stderr
    expected = {"samples": (SAMPLE,), "models": ("demo",), "host": "127.0.0.1", "port": 8000}
    expected |= {"checkpoint": SAMPLE, "class_names": SAMPLE, "allowed_hosts": ("a",), "prompts": ("a dog",)}
    assert reported == expected


def test_the_space_serves_the_same_page_by_the_gradio_that_the_package_asks_for(monkeypatch):
    space, reported = ROOT / "examples" / "space", {}

    def instead(*models, **given):
        reported.update(given, models=models)
        return SimpleNamespace(block_thread=lambda: None)

    monkeypatch.setattr("vitflow.app.serve", instead)
    runpy.run_path(str(space / "app.py"), run_name="__main__")
    assert reported["models"] == ([UNKNOWN, "demo"],)
    assert reported["host"] == "0.0.0.0" and reported["allowed_hosts"] == ["*"]  # behind a proxy, and in a frame
    assert (space / "requirements.txt").read_text() == "vitflow[app]\n"
    front = dict(re.findall(r"^(\w+): (.*)$", (space / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert front["sdk"] == "gradio" and front["app_file"] == "app.py"
    [requested] = re.findall(r'"gradio>=([\d.]+)", "transformers', (ROOT / "pyproject.toml").read_text())
    assert front["sdk_version"].startswith(requested)
