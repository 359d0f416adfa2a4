"""Display of results in a notebook: an image, text, and tables with escaped content."""

import base64
import io
import re
from types import SimpleNamespace

import numpy as np
import pytest
import timm
from IPython.core.formatters import DisplayFormatter
from IPython.core.pylabtools import select_figure_formats
from PIL import Image

import vitflow
from vitflow.demo import sample_images
from vitflow.evaluation.metrics import METRICS
from vitflow.text.view import ShadedText
from vitflow.text.words import Words

HOSTILE = "<script>alert('1')</script>&"


@pytest.fixture(scope="module")
def explainer() -> vitflow.Explainer:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=64, depth=2).eval()
    return vitflow.Explainer(model, device="cpu", class_names=[HOSTILE, "b", "c"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> object:
    """A folder with a hostile name, two images, one of them large, and a file that is no image."""
    folder = tmp_path_factory.mktemp("in")
    Image.open(sample_images()[0]).resize((1500, 900)).save(folder / "large <b>&.png")
    Image.open(sample_images()[1]).save(folder / "one.png")
    (folder / "three.png").write_bytes(b"no image")
    return folder


def shown(result: object) -> tuple[dict[str, str], tuple[int, int] | None]:
    """Return the display of a result, and the size of its image."""
    bundle, metadata = result._repr_mimebundle_(include=None, exclude=None)
    assert bundle["text/plain"] == repr(result) or bundle["text/plain"].startswith(repr(result))
    assert set(bundle) <= {"text/plain", "text/html", "image/png"}
    html = bundle.get("text/html", "")
    assert set(re.findall(r"<(\w+)", html)) <= {"p", "table", "tr", "th", "td", "img"}
    if "image/png" not in bundle:
        return bundle, None
    with Image.open(io.BytesIO(base64.b64decode(bundle["image/png"]))) as image:
        assert image.format == "PNG" and (not html or bundle["image/png"] in html)
        size = metadata.get("image/png")  # half the pixels, so that it is sharp
        assert size is None or max(abs(image.width - 2 * size["width"]), abs(image.height - 2 * size["height"])) <= 1
        return bundle, image.size if size is None else (size["width"], size["height"])


def test_a_saliency_and_its_layers_show_their_figures_in_the_size_of_a_cell(explainer, folder):
    sheet = vitflow.layer_maps(folder / "one.png", model=explainer)
    for result in (explainer.explain(folder / "large <b>&.png"), sheet):
        bundle, (width, height) = shown(result)
        assert 200 < max(width, height) <= 1000
        assert "text/html" not in bundle  # a front end would show it instead of the image


def test_a_comparison_shows_the_strip_of_its_first_images(explainer, folder):
    comparison = vitflow.compare([folder / "one.png"] * 6, model=explainer, methods=["rollout", "centre"])
    bundle, (width, _) = shown(comparison)
    assert "2 more images are not shown" in bundle["text/plain"] and width < 700
    few = vitflow.compare(folder / "one.png", model=explainer, methods=["rollout", "centre"])
    assert shown(few)[0]["text/plain"] == repr(few)


def test_a_folder_run_shows_its_first_overlays_and_counts(explainer, folder, tmp_path):
    summary = vitflow.explain_folder(folder, tmp_path / "out", model=explainer, workers=0)
    bundle, size = shown(summary)
    assert "2 explained, 1 failed" in bundle["text/plain"]
    assert size is not None and size[0] < 700
    for file in (tmp_path / "out").glob("*.jpg"):
        file.unlink()
    assert shown(summary)[1] is None  # without its files there is a text alone


def test_an_evaluation_shows_its_tables_and_bars(explainer):
    images = [np.asarray(Image.open(path).convert("RGB")) for path in sample_images()[:2]]
    actual = vitflow.evaluate(images, model=explainer, methods=["rollout"], metrics=["deletion_auc"])
    bundle, size = shown(actual)
    assert size is not None
    assert bundle["text/html"].count("<table>") == 1 and "<th>rollout</th>" in bundle["text/html"]
    assert METRICS["deletion_auc"].title in bundle["text/html"]


@pytest.fixture(scope="module")
def figures(explainer, folder) -> list:
    """One whose title and place somebody has changed, and one of each kind."""
    image = folder / "one.png"
    relabelled = explainer.explain(image).figure()
    relabelled.axes[0].set_title("mine")
    relabelled.axes[0].set_position((0.3, 0.3, 0.4, 0.4))
    strip = vitflow.compare(image, model=explainer, methods=["rollout", "gae"])
    text = ShadedText(Words(("the", " key"), (0, 1), (False,) * 2), [0.6, 0.4])
    sheet = vitflow.layer_maps(image, model=explainer)
    return [relabelled, *(result.figure() for result in (explainer.explain(image), strip, sheet, text))]


@pytest.mark.parametrize("pyplot", [False, True])
def test_a_figure_as_the_last_expression_of_a_cell_is_displayed(figures, pyplot):
    """With and without pyplot, whose display leaves out figures without axes."""
    formatter = DisplayFormatter()
    if pyplot:  # as its inline backend does
        select_figure_formats(SimpleNamespace(display_formatter=formatter), {"png"})
    for figure in figures:
        png = formatter.format(figure)[0]["image/png"]
        with Image.open(io.BytesIO(base64.b64decode(png) if isinstance(png, str) else png)) as shown:
            assert shown.convert("RGB").getcolors(50) is None  # more than so many
