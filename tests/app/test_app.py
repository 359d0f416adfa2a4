"""The page of `vitflow app`: what it answers to programs and in Chromium, to two at once, and what it says is wrong."""

import gc
import html
import re
import runpy
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import transformers
from click.testing import CliRunner
from PIL import Image

import vitflow
from tests.app.served import serving
from tests.explaining.test_clips import video
from tests.explaining.test_regions import yolos
from tests.pairs import pair
from vitflow.app import serve
from vitflow.cli import cli
from vitflow.demo import draw_image, sample_images
from vitflow.demo.drawing import draw_ground
from vitflow.errors import OptionError

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = sample_images()[0]


@pytest.fixture(scope="module")
def siglip(tmp_path_factory) -> str:
    """A small SigLIP with random weights, in a folder with its tokenizer and processor."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("siglip")
    known = {word: number for number, word in enumerate(["?", "a", "dog", "cat", "red"])}
    words = Tokenizer(models.WordLevel(known, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    pair("siglip").save_pretrained(path)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?", unk_token="?").save_pretrained(path)
    transformers.SiglipImageProcessor(size={"height": 32, "width": 32}).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def detector(tmp_path_factory) -> str:
    """A small YOLOS with random weights, in a folder with its processor."""
    path = tmp_path_factory.mktemp("yolos")
    yolos().save_pretrained(path)
    transformers.YolosImageProcessor(size={"height": 64, "width": 64}).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def page(tmp_path_factory, siglip, detector):
    """The page as a process of its own serves it, with the bundled model, one with prompts and a detector."""
    pytest.importorskip("gradio", reason="Gradio is not installed (extra app)")
    with serving(tmp_path_factory.mktemp("gradio"), "demo", siglip, detector) as served:
        yield served


@pytest.fixture
def ask(page, tmp_path):
    """Ask one of its functions as a program would, each time as another visitor."""
    from gradio_client import Client, handle_file

    def call(function: str, image: object, *fields: object, first: tuple = ()) -> tuple:
        client = Client(page.local_url, verbose=False, analytics_enabled=False, download_files=str(tmp_path))
        given = None if image is None else handle_file(str(image))
        return client.predict(*first, given, *fields, api_name=f"/{function}")

    return call


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    """A video of drawn frames, of which some have a star."""
    path = tmp_path_factory.mktemp("clip") / "star.mp4"
    frames = [draw_ground(7)] * 6 + [draw_image(7).image] * 6
    video(path, np.stack(frames))
    return path


def reported(answer: tuple) -> str:
    """Return the text of an answer on the page."""
    return html.unescape(re.sub(r"<[^>]+>", "", answer[-1]))


def grid_of(files: list[str]) -> np.ndarray:
    """The map among files to take along."""
    with np.load(next(file for file in files if file.endswith(".npz"))) as saved:
        return saved["grid"]


# --- asked by a program ----------------------------------------------------------------------------------------------


def test_a_map_is_that_of_the_library_and_its_code_makes_it_again(ask, tmp_path, monkeypatch):
    figure, files, code, *_ = ask("explain", SAMPLE, "demo", "gae", "yellow star", "", "orange disc")
    entry = vitflow.Explainer("demo").explain(
        SAMPLE, method="gae", target=vitflow.Contrast("yellow star", against="orange disc")
    )
    np.testing.assert_array_equal(grid_of(files), entry.grid)
    assert sorted(Path(file).suffix for file in files) == [".npz", ".pdf", ".png"]
    with Image.open(figure) as drawn:
        np.testing.assert_array_equal(drawn.convert("RGB"), Image.open(save(entry, tmp_path)).convert("RGB"))
    shutil.copy(SAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(code, names)
    np.testing.assert_array_equal(names["saliency"].grid, entry.grid)
    assert (tmp_path / f"{SAMPLE.stem}-gae.png").is_file()


def save(saliency, folder: Path) -> Path:
    saliency.figure(folder / "own.png")
    return folder / "own.png"


def test_two_visitors_at_once_each_get_their_answer(ask):
    entry = vitflow.Explainer("demo")
    requested = ["yellow star", "orange disc"]
    right = {target: entry.explain(SAMPLE, method="gae", target=target).grid for target in requested}
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
        assert len(actual[target]) == 2
        for grid in actual[target]:
            np.testing.assert_array_equal(grid, right[target])
    assert not np.array_equal(*right.values())


def test_methods_stand_side_by_side_and_the_page_says_how_far_they_agree(ask):
    strip, files, code, *_, notes = ask("compare", SAMPLE)
    with Image.open(strip) as drawn:
        assert drawn.width > 1000
    assert "vitflow.compare" in code and "Agreement of the methods" in notes and len(files) == 2


def test_prompts_are_requested_of_a_model_of_images_and_texts(ask, siglip):
    *_, files, code, _, classes, _, notes = ask("explain", SAMPLE, siglip, "gae", "a dog", "a dog\n a cat \n\n")
    entry = vitflow.Explainer(siglip, outputs=vitflow.prompts(["a dog", "a cat"])).explain(
        SAMPLE, method="gae", target="a dog"
    )
    np.testing.assert_array_equal(grid_of(files), entry.grid)
    assert (
        "outputs=vitflow.prompts(['a dog', 'a cat'])" in code and ["a cat", "a cat"] in classes["choices"] and not notes
    )


def test_a_region_of_a_detector_is_explained_as_in_the_library(ask, detector, tmp_path, monkeypatch):
    from vitflow.app.images import _NAMES

    def given(model: str, region: str) -> list:
        values = dict.fromkeys(_NAMES, "") | {"model": model, "method": "gae", "fit": "crop", "background": "grey"}
        values |= {"interpolation": "smooth", "contours": False, "region": region}
        return [values[name] for name in _NAMES[1:]]

    *_, files, code, _, classes, _, notes = ask("explain", SAMPLE, *given(detector, "0,0,90,80"))
    explainer = vitflow.Explainer(detector, outputs=vitflow.boxes((0, 0, 90, 80)))
    np.testing.assert_array_equal(grid_of(files), explainer.explain(SAMPLE, method="gae").grid)
    assert "outputs=vitflow.boxes((0.0, 0.0, 90.0, 80.0))" in code and not notes
    assert ["no object", "no object"] in classes["choices"]
    shutil.copy(SAMPLE, tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    *_, code, _, _, view, _ = ask("explain", SAMPLE, detector, "gae", "top3")
    exec(code, names)
    assert len(names["comparison"].saliencies) > 1 and view == "map" and "outputs=vitflow.boxes()" in code
    for region, expected in {"10,5": "Expected box=", "1,2,3": "region: expected left", "a": "region: exp"}.items():
        assert reported(ask("explain", SAMPLE, *given(detector, region))).startswith(f"error: {expected}"), region
    assert "Expected the output of a detector" in reported(ask("explain", SAMPLE, *given("demo", "1,2,30,40")))
    assert "at most 'top10'" in reported(ask("explain", SAMPLE, "demo", "gae", "top500"))


def test_a_clip_is_explained_as_in_the_library(ask, clip):
    figure, files, code, classes, notes = ask("clip", clip, "demo", "gae", "yellow star", 4)
    expected = vitflow.explain_clip(clip, model="demo", target="yellow star", frames=4)
    with np.load(next(file for file in files if file.endswith(".npz"))) as saved:
        np.testing.assert_array_equal(saved["shares"], expected.shares)
    assert sorted(Path(file).suffix for file in files) == [".mp4", ".npz", ".pdf", ".png"]
    assert "explainer = vitflow.Explainer('demo')" in code
    assert "vitflow.explain_clip('star.mp4', model=explainer, method='gae', target='yellow star', frames=4)" in code
    assert ["yellow star", "yellow star"] in classes["choices"] and not notes
    with Image.open(figure) as drawn:
        assert drawn.width > drawn.height


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("demo", "gae", "orange dics"), "error: Unknown class 'orange dics'. Did you mean 'orange disc'?"),
        (("demo", "gae", "", "a dog"), "error: VisionTransformer has no text encoder"),
        (
            ("demo", "rollout", "", "", "", "crop", "grey", "smooth", False, "", "much"),
            "error: discard_ratio: expected",
        ),
        (("demo", "rollout", "", "", "", "crop", "grey", "smooth", False, "", "2"), "error: Expected "),
    ],
)
def test_what_is_wrong_stands_in_the_page(ask, fields, expected):
    assert reported(ask("explain", SAMPLE, *fields)).startswith(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("vit_tiny_patch16_224", "gae"), "Unknown model of this page 'vit_tiny_patch16_224'."),
        (("demo", "rolout"), "Unknown method of this page 'rolout'. Did you mean 'rollout'?"),
    ],
)
def test_a_value_that_no_field_offers_is_refused(ask, fields, expected):
    with pytest.raises(Exception, match="of this page") as refused:
        ask("explain", SAMPLE, *fields)
    assert html.unescape(str(refused.value)).startswith(expected)


def test_a_file_that_is_no_image_is_reported_as_the_command_line_reports_it(ask, tmp_path):
    wrong = tmp_path / "letter.png"
    wrong.write_text("Dear all,")
    by_command = CliRunner().invoke(cli, ["explain", str(wrong), "--model", "demo"])
    assert reported(ask("explain", wrong)) in by_command.stderr
    assert reported(ask("explain", None)).startswith("error: Expected a photograph, got none")


def test_an_image_of_too_many_pixels_is_refused(ask, tmp_path, monkeypatch):
    Image.fromarray(np.zeros((20_000, 10_000), np.uint8)).save(tmp_path / "large.png")
    assert "to have at most 178,956,970 pixels" in reported(ask("explain", tmp_path / "large.png"))


def test_a_file_of_too_many_bytes_is_not_taken(page, tmp_path):
    from gradio_client import Client

    from vitflow.images.reading import MAX_PIXELS

    config = Client(page.local_url, verbose=False, analytics_enabled=False).config
    assert config["max_file_size"] == MAX_PIXELS


QUESTIONS = {
    "What is in an image": (SAMPLE, "", ["yellow", "star"]),
    "What a word rests on": (None, "a red heart left of a yellow star", ["red", "star"]),
    "What is written next": (None, "here is", ["here", "is"]),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_words_are_read_written_and_said_of_an_image(ask, question):
    image, text, expected = QUESTIONS[question]
    words, figure, _, code, notes = ask("words", image, text, first=(question, "demo-caption"))
    assert set(expected) <= {word["token"].strip() for word in words} and not notes
    assert {word["class_or_confidence"] for word in words} <= {*map(str, range(9)), "selected"}
    assert "vitflow.text.explain_" in code
    with Image.open(figure) as drawn:
        assert drawn.width > 500


def test_a_text_that_cannot_be_read_is_reported(ask):
    assert reported(ask("words", None, "", first=("What is in an image", "demo-caption"))).startswith(
        "error: Expected a pho"
    )
    with pytest.raises(Exception, match="Unknown model of this page &#x27;demo&#x27;"):
        ask("words", None, "a heart", first=("What a word rests on", "demo"))


def test_captions_take_the_method_of_the_command_line_and_texts_theirs(ask):
    for question, (image, text, _) in QUESTIONS.items():
        code = ask("words", image, text, first=(question, "demo-caption"))[3]
        assert f"method='{'gae' if image else 'rollout'}'" in code, question


# --- what a click means ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tabs():
    """Return the actions of the buttons of both tabs."""
    pytest.importorskip("gradio", reason="Gradio is not installed (extra app)")
    from vitflow.app import images, words
    from vitflow.app.actions import Models

    models = Models(["demo"], ["demo-caption"])
    return SimpleNamespace(images=images._Answers(models), words=words._Answers(models), names=images._NAMES)


def fields(tabs, **given) -> list:
    usual = {"image": {"path": str(SAMPLE)}, "model": "demo", "method": "gradcam", "fit": "crop"}
    usual |= {"background": "grey", "interpolation": "smooth", "contours": False}
    return [(dict.fromkeys(tabs.names, "") | usual | given)[name] for name in tabs.names]


def test_a_click_on_each_patch_of_the_figure_is_that_patch(tabs, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    wide = tmp_path / "wide.png"
    Image.open(SAMPLE).convert("RGB").resize((300, 190)).save(wide)
    requested = fields(tabs, image={"path": str(wide)}, method="rollout")
    _, click, *_ = tabs.images.explain(*requested)
    (left, top, right, bottom), placement, (rows, cols) = click
    clicked: list[tuple[int, int]] = []
    monkeypatch.setattr(tabs.images, "_map", lambda requested, patch: clicked.append(patch))
    height, width = (side / count for side, count in zip(placement.input_size, (rows, cols), strict=True))
    for row in range(rows):
        for col in range(cols):
            y, x = placement.to_image((row + 0.5) * height, (col + 0.5) * width)
            at = left + x / 300 * (right - left), top + y / 190 * (bottom - top)
            tabs.images._patch(SimpleNamespace(index=at), click, *requested)
    assert clicked == [(row, col) for row in range(rows) for col in range(cols)]
    middle = (top + bottom) / 2
    for at, words in {(left - 5, middle): "inside the image", (left + 3, middle): "the model saw"}.items():
        with pytest.raises(OptionError, match=words):
            tabs.images._patch(SimpleNamespace(index=at), click, *requested)


def test_a_patch_is_answered_by_rollout_where_the_method_has_none(tabs, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    _, click, *_ = tabs.images.explain(*fields(tabs))
    (left, top, right, bottom), *_ = click
    event = SimpleNamespace(index=((left + right) / 2, (top + bottom) / 2))
    _, _, files, code, method, *_ = tabs.images._patch(event, click, *fields(tabs))
    entry = vitflow.Explainer("demo").explain(SAMPLE, method="rollout", patch=(6, 6))
    np.testing.assert_array_equal(grid_of(files), entry.grid)
    assert method == "rollout" and "patch=(6, 6)" in code


def test_a_page_computes_a_result_only_if_its_address_names_one(tabs, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    monkeypatch.setattr(tabs.images, "explain", lambda *_: "map")
    monkeypatch.setattr(tabs.images, "compare", lambda *_: "comparison")
    monkeypatch.setattr(tabs.images, "_of_patch", lambda patch, _: patch)
    results = {view: tabs.images._open(*fields(tabs), view) for view in ("map", "compare", "3,4", "3", "a,b")}
    assert results == {"map": "map", "compare": "comparison", "3,4": (3, 4), "3": "map", "a,b": "map"}
    for nothing in ([*fields(tabs), ""], [*fields(tabs, image=None), "map"]):
        assert "map" not in tabs.images._open(*nothing)


def test_a_clip_is_explained_with_a_video_model(clip, tmp_path, monkeypatch):
    from tests.explaining.test_videos import CONFIG, built
    from vitflow.app import images
    from vitflow.app.actions import Models

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    models = Models(["video"], [])
    explainer = vitflow.Explainer(built("VideoMAE", num_labels=5), data_config=CONFIG)
    monkeypatch.setattr(models, "explainer", lambda name, fit: (explainer, ""))
    *_, files, code, _, notes = images._Answers(models).clip({"path": str(clip)}, "video", "gae", "2", 4)
    with np.load(files[-1]) as saved:
        assert len(saved["shares"]) == 4 and saved["grid"].ndim == 3
    assert "frames=" not in code and "target='2'" in code and notes == []


def test_a_click_on_a_word_is_that_word(tabs, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))

    def clicked(requested: tuple, index: int) -> tuple:
        words, _, click, *_ = requested
        again = tabs.words._word(SimpleNamespace(index=index), click)
        assert [text for text, _ in again[0]] == [text for text, _ in words]
        return again

    read = tabs.words.words("What a word rests on", "demo-caption", None, "a red heart", "rollout", 8)
    words, *_, code, _ = clicked(read, 2)
    assert [number for number, (_, shade) in enumerate(words) if shade == "selected"] == [2] and "token=2" in code
    seen = tabs.words.words("What is in an image", "demo-caption", {"path": str(SAMPLE)}, "", "rollout", 30)
    star = [text for text, _ in seen[0]].index(" star")
    words, *_, code, _ = clicked(seen, star)
    assert words[star] == (" star", "selected") and "image((" in code
    with pytest.raises(OptionError, match="a word that has a map"):
        clicked(seen, 0)
    written = tabs.words.words("What is written next", "demo-caption", None, "here is", "rollout", 8)
    words, *_, code, _ = clicked(written, 4)
    assert ".shaded(1)" in code and [shade for _, shade in words].count("selected") == 2
    with pytest.raises(OptionError, match="a word that was written"):
        clicked(written, 0)


@pytest.mark.filterwarnings("ignore:own.safetensors has 3 classes")  # which is a note on the page
def test_the_first_model_has_the_weights_and_the_names_that_were_given(tmp_path, monkeypatch):
    pytest.importorskip("gradio", reason="Gradio is not installed (extra app)")
    import timm
    import torch
    from safetensors.torch import save_file

    from vitflow.app import images
    from vitflow.app.actions import Models

    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "gradio"))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), "own.safetensors")
    Path("names.txt").write_text("ash\nbirch\ncedar\n")
    shutil.copy(SAMPLE, tmp_path)
    models = Models(["test_vit", "demo"], [], checkpoint="own.safetensors", class_names=Path("names.txt"))
    tab = SimpleNamespace(names=images._NAMES)
    given = fields(tab, image={"path": SAMPLE.name}, model="test_vit", method="gae", target="birch")
    _, _, files, code, _, classes, *_ = images._Answers(models).explain(*given)
    names: dict = {}
    exec(code, names)
    np.testing.assert_array_equal(grid_of(files), names["saliency"].grid)
    assert names["explainer"].class_names == ["ash", "birch", "cedar"] and "birch" in classes["choices"]
    assert models.explainer("demo", "crop")[0].class_names[0] == "red heart"  # the others have their own


# --- in a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture
def visit(page, browser):
    """Open the page in a window of some width; what it asks of other hosts, and what it complains of, is kept."""
    contexts = []

    def open_page(width: int = 1280, height: int = 900, query: str = ""):
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(120_000)  # the machine may be busy
        tab.requested, tab.complaints = [], []
        tab.on("request", lambda request: tab.requested.append(request.url))
        tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.goto(f"{page.local_url}{query}")
        tab.get_by_role("button", name="Explain").first.wait_for()
        return tab

    yield open_page
    for context in contexts:
        context.close()


def other_hosts(tab, page) -> list[str]:
    entry = ("data:", "blob:", page.local_url)
    return [url for url in tab.requested if not url.startswith(entry)]


@pytest.mark.parametrize("width", [1280, 390])
def test_a_photograph_a_patch_and_a_comparison_in_a_browser(visit, page, width):
    tab = visit(width)
    with tab.expect_file_chooser() as chooser:
        tab.get_by_text("Click to Upload").first.click()
    chooser.value.set_files(str(SAMPLE))
    figure = tab.locator("img[src*='-gae.png']")
    figure.wait_for()
    before = figure.get_attribute("src")
    box = figure.bounding_box()
    figure.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.5})
    tab.locator(f"img[src*='-gae.png']:not([src='{before}'])").wait_for()
    tab.get_by_text("Download").first.click()
    tab.get_by_text("patch=(").wait_for()
    tab.get_by_role("button", name="Compare methods").click()
    strip = tab.locator("img[src*='-compare.png']")
    strip.wait_for()
    if width == 1280:  # the result is not below the fold
        assert strip.bounding_box()["y"] + strip.bounding_box()["height"] < 900
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.complaints == [] and other_hosts(tab, page) == []
    assert len(tab.requested) > 10


def test_a_class_and_a_wrong_file_in_a_browser(visit, page, tmp_path):
    tab = visit()
    tab.locator("button.gallery-item").first.click()  # a sample, which is explained at once
    tab.locator("img[src*='-gae.png']").wait_for()
    box = tab.get_by_label("Class")
    box.fill("yellow star")
    box.press("Enter")
    tab.get_by_text("Download").first.click()
    tab.get_by_role("button", name="Explain").first.click()
    tab.get_by_text("target='yellow star'").wait_for()
    (tmp_path / "letter.png").write_text("Dear all,")
    tab.get_by_label("Remove Image").first.click()
    with tab.expect_file_chooser() as chooser:
        tab.get_by_text("Click to Upload").first.click()
    chooser.value.set_files(str(tmp_path / "letter.png"))
    error = tab.get_by_text("error: Expected 'letter.png' to be an image")
    error.wait_for()
    tab.get_by_role("button", name="Compare methods").scroll_into_view_if_needed()
    assert 0 <= error.bounding_box()["y"] < 900  # it is seen wherever the page is scrolled to
    assert other_hosts(tab, page) == []


def test_a_sample_and_its_map_fit_one_screen(visit):
    tab = visit(1280, 800)
    tab.locator("button.gallery-item").first.click()
    tab.locator("img[src*='-gae.png']").wait_for()
    assert tab.evaluate("document.documentElement.scrollHeight") <= 800


def test_the_address_opens_the_same_map_and_the_same_comparison(visit, page):
    tab = visit()
    tab.locator("button.gallery-item").nth(1).click()
    tab.locator("img[src*='-gae.png']").wait_for()
    tab.goto(f"{page.local_url}?image={SAMPLE.name}&method=rollout&target=yellow+star&head_fusion=mean&contours=true")
    tab.locator("img[src*='-rollout.png']").wait_for()
    assert tab.get_by_label("Class").input_value() == "yellow star"
    tab.get_by_text("Download").first.click()
    tab.get_by_text("head_fusion='mean'").wait_for()
    figure = tab.locator("img[src*='-rollout.png']")
    before, box = figure.get_attribute("src"), figure.bounding_box()
    figure.click(position={"x": box["width"] * 0.3, "y": box["height"] * 0.5})
    tab.locator(f"img[src*='-rollout.png']:not([src='{before}'])").wait_for()
    tab.wait_for_url("**view=*")
    for part in ("method=rollout", "target=yellow", "head_fusion=mean", "contours=true", f"image={SAMPLE.name}"):
        assert part in tab.url
    code = tab.get_by_text("patch=(")
    code.wait_for()
    entry = re.search(r"patch=\(\d+, \d+\)", code.first.inner_text())[0]
    tab.goto(tab.url)
    tab.locator("img[src*='-rollout.png']").wait_for()
    tab.get_by_text("Download").first.click()
    tab.get_by_text(entry).wait_for()
    tab.get_by_role("button", name="Compare methods").click()
    tab.wait_for_url("**view=compare*")
    tab.goto(tab.url)
    tab.locator("img[src*='-compare.png']").wait_for()
    assert tab.complaints == [] and other_hosts(tab, page) == []


@pytest.mark.parametrize(
    "query", ["image=/etc/hostname", "image=no.png&view=compare", "method=rolout&model=other&view=9,9&fit=%00"]
)
def test_an_address_with_wrong_values_opens_the_page_as_it_is(visit, page, query):
    tab = visit(query=f"?{query}")
    tab.wait_for_timeout(500)
    assert tab.locator("img[src*='.png'][src*='/gradio_api/file']").count() == len(sample_images())
    assert tab.locator(".error").count() == 0 and tab.complaints == []


def test_two_clicks_make_a_region_in_a_browser(visit, page):
    tab = visit(1280, 800)
    tab.get_by_label("Model").first.click()
    tab.get_by_role("option", name="yolos").click()
    region = tab.get_by_label("Region")
    region.wait_for()
    with tab.expect_file_chooser() as chooser:
        tab.get_by_text("Click to Upload").first.click()
    chooser.value.set_files(str(SAMPLE))
    figure = tab.locator("img[src*='-gae.png']")
    figure.wait_for()
    photograph = tab.locator(".image-frame img").first
    box, before = photograph.bounding_box(), figure.get_attribute("src")
    photograph.click(position={"x": box["width"] * 0.8, "y": box["height"] * 0.25})
    tab.wait_for_function("document.querySelector('[placeholder^=left]').value.split(',').length === 2")
    photograph.click(position={"x": box["width"] * 0.25, "y": box["height"] * 0.9})
    tab.wait_for_function("document.querySelector('[placeholder^=left]').value.split(',').length === 4")
    with Image.open(SAMPLE) as image:
        expected = np.array([0.25, 0.25, 0.8, 0.9]) * [*image.size, *image.size]
    assert np.abs(np.array(region.input_value().split(","), float) - expected).max() <= 4
    tab.get_by_role("button", name="Explain").first.click()
    tab.locator(f"img[src*='-gae.png']:not([src='{before}'])").wait_for()
    assert tab.evaluate("document.documentElement.scrollHeight") <= 800
    tab.wait_for_url("**region=*")
    assert tab.complaints == [] and other_hosts(tab, page) == []


def test_a_clip_in_a_browser(visit, page, clip):
    tab = visit(1280, 800)
    tab.get_by_role("tab", name="Clips").click()
    with tab.expect_file_chooser() as chooser:
        tab.locator("button:visible", has_text="Click to Upload").click()
    chooser.value.set_files(str(clip))
    tab.locator("img[src*='-clip.png']").wait_for()
    assert tab.evaluate("document.documentElement.scrollHeight") <= 800
    tab.locator("button:visible", has_text="Download").click()
    tab.locator("a[href*='star-clip.mp4']").first.wait_for()
    assert tab.complaints == [] and other_hosts(tab, page) == []


def test_words_in_a_browser(visit, page):
    tab = visit()
    tab.get_by_role("tab", name="Texts and captions").click()
    tab.locator("button.gallery-item:visible").nth(2).click()  # a sample, which is explained at once
    word = tab.get_by_role("button", name="star", exact=True)
    word.wait_for()
    before = tab.locator("img[src*='words.png']").get_attribute("src")
    word.click()
    tab.locator(f"img[src*='words.png']:not([src='{before}'])").wait_for()
    tab.get_by_label("What a word rests on").click()
    tab.get_by_label("Text").locator("visible=true").first.fill("a red heart left of a star")
    tab.locator("button:visible", has_text="Explain").click()
    tab.get_by_role("button", name="left", exact=True).click()
    assert tab.complaints == [] and other_hosts(tab, page) == []


def test_this_machine_requested_no_other(page, ask):
    ask("explain", SAMPLE)
    assert set(page.heard.read_text().split()) == {"127.0.0.1"}


# --- how it is opened ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gradio leaves a socket open then
def test_a_port_that_is_taken_is_reported(page):
    with pytest.raises(OptionError, match=f"Expected a free port, got {page.server_port}"):
        serve(["demo"], port=page.server_port, wait=False)
    gc.collect()
    with pytest.raises(OptionError, match="at least one model"):
        serve([])


def test_without_gradio_it_says_what_to_install(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("vitflow.app.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "gradio", None)
    done = CliRunner().invoke(cli, ["app", "--model", "demo"])
    assert done.exit_code == 2 and "pip install 'vitflow[app]'" in done.stderr


def test_the_command_serves_what_it_was_reported(monkeypatch):
    from vitflow.cli.commands import pages

    reported: dict = {}

    def instead(**given):
        reported.update(given)
        return SimpleNamespace(local_url="http://127.0.0.1:7860/", block_thread=lambda: None)

    monkeypatch.setattr(pages, "serve", instead)
    line = ["app", str(SAMPLE), "--model", "demo", "--no-open", "--port", "8000", "--time-limit", "5"]
    line += ["--checkpoint", str(SAMPLE), "--class-names", str(SAMPLE), "--allowed-host", "a", "--allowed-host", "*.b"]
    line += ["--prompt", "a dog", "--prompt", "a cat"]
    done = CliRunner().invoke(cli, line)
    assert done.exit_code == 0 and "http://127.0.0.1:7860/" in done.stderr
    assert reported["samples"] == (SAMPLE,) and reported["models"] == ("demo",) and reported["host"] == "127.0.0.1"
    assert reported["checkpoint"] == reported["class_names"] == SAMPLE and reported["allowed_hosts"] == ("a", "*.b")
    assert reported["time_limit"] == 5 and reported["prompts"] == ("a dog", "a cat")
    assert not reported["browser"] and reported["port"] == 8000 and reported["language_models"] == ("demo-caption",)


def test_the_space_serves_the_same_page_by_the_gradio_that_the_package_asks_for(monkeypatch):
    space, reported = ROOT / "examples" / "space", {}
    monkeypatch.setattr("vitflow.app.serve", lambda *models, **given: reported.update(given, models=models))
    runpy.run_path(str(space / "app.py"), run_name="__main__")
    assert reported["models"] == (["vit_small_patch16_224.augreg_in21k_ft_in1k", "demo"], ["demo-caption"])
    assert reported["host"] == "0.0.0.0" and reported["allowed_hosts"] == ["*"]  # behind a proxy, and in a frame
    assert (space / "requirements.txt").read_text() == "vitflow[app]\n"
    front = dict(re.findall(r"^(\w+): (.*)$", (space / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert front["sdk"] == "gradio" and front["app_file"] == "app.py"
    [requested] = re.findall(r'"gradio>=([\d.]+)", "transformers', (ROOT / "pyproject.toml").read_text())
    assert front["sdk_version"].startswith(requested)
