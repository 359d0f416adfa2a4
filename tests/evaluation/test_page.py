"""The page of an evaluation in a real browser: what it shows, in light and dark, and what it is safe from."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.viewer.waiting import watched
from vitflow import Explainer, register_method
from vitflow.demo import draw_image
from vitflow.evaluation import Evaluation, evaluate
from vitflow.evaluation.metrics import METRICS
from vitflow.evaluation.tables import Tables
from vitflow.registry.method_table import METHODS

HOSTILE = "<img src=x onerror=alert(1)>"
METHOD = "</style><script>alert(2)</script>"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Evaluation, Path]:
    place = tmp_path_factory.mktemp("page") / HOSTILE
    place.mkdir()
    for seed in range(3):
        name = f"{HOSTILE}{seed}.png"
        Image.fromarray(draw_image(seed).image).save(place / name)
        Image.fromarray(draw_image(seed).masks.any(axis=0).astype(np.uint8)).save(place / f"{HOSTILE}{seed}_mask.png")
    (place / f"{HOSTILE}bad.png").write_bytes(b"nothing")
    register_method(METHOD, lambda trace: torch.zeros(len(trace.pixels), *trace.grid()))
    try:
        actual = evaluate(
            place,
            model=Explainer("demo"),
            methods=["gae", METHOD],
            metrics=["localisation", "faithfulness", "sanity"],
            sanity_images=1,
            points=3,
            blurred_control=True,
            output=place.parent / "out",
        )
    finally:
        del METHODS[METHOD]
    return actual, place.parent / "out" / "report.html"


@pytest.fixture
def open_page(browser, saved):
    """Open the page; it fails the test where the page asks the network, logs an error or opens a dialog."""
    with ExitStack() as windows:

        def open_in(scheme: str):
            page = windows.enter_context(watched(browser, 1100, color_scheme=scheme))
            page.goto(saved[1].as_uri())
            page.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
            return page

        yield open_in


def test_names_do_no_harm_and_are_shown_as_they_are(open_page, saved):
    page = open_page("light")
    assert page.locator("script").count() == 0
    assert page.locator("img[src=x]").count() == 0
    failed = page.locator("#failed td").all_text_contents()
    assert failed[0] == f"{HOSTILE}bad.png"
    assert METHOD in page.locator("table.numbers tbody th").first.locator("xpath=../..").inner_text()
    assert saved[0].failures[0]["input"] == f"{HOSTILE}bad.png"


def test_every_number_of_the_tables_is_there(open_page, saved):
    actual, page = saved[0], open_page("light")
    for group in actual.groups:
        table = page.locator(f"#{group} table.numbers").first
        head = [text.replace("\xa0", " ") for text in table.locator("thead th").all_inner_texts()]
        metrics = [metric for metric in actual.metrics if metric.group == group]
        assert head == ["method", *(f"{metric.title} {metric.arrow}" for metric in metrics)]
        for line, method in enumerate(actual.methods):
            row = table.locator("tbody tr").nth(line)
            cells = row.locator("td .mean").all_inner_texts()
            table_rows = [actual.table(metric.name)[line] for metric in metrics]
            means = [row.estimate.mean for row in table_rows if row.measured]
            assert cells == ["–" if m is None else f"{round(m, 3) + 0.0:.3f}".replace("-", "−") for m in means], method


def test_what_is_not_defined_is_distinguished_from_what_was_not_measured(open_page, saved):
    actual, page = saved[0], open_page("light")
    row = page.locator("#sanity table.numbers tbody tr").nth(actual.methods.index(METHOD))
    assert "undefined on 1" in row.inner_text() and "not measured" not in row.inner_text()
    twin = next(one for one in actual.table("randomisation") if one.method == "gae (blurred)")
    assert (twin.estimate.count, twin.estimate.undefined) == (0, 0)


def test_the_best_are_all_methods_whose_means_are_equal_and_never_a_baseline():
    values = np.array([[0.5, 0.5001, 0.2, 0.9, 0.9]] * 4)
    methods = ("gae", "gradcam", "rollout", "random", "gae (blurred)")
    measured = [{method: {"roc_auc": value} for method, value in zip(methods, row, strict=True)} for row in values]
    rows = tuple({"status": "measured", "groups": ["localisation"], "values": values} for values in measured)
    tables = Tables("data", "model", methods, (METRICS["roc_auc"],), rows)
    assert tables.best("roc_auc") == ["gradcam", "gae"]


def test_the_page_shows_the_best_the_middle_and_the_worst_image(open_page, saved):
    actual, page = saved[0], open_page("light")
    auc = [entry["values"]["gae"]["roc_auc"] / 2 + 0.25 for entry in actual.images]  # a constant map has 0.5
    names = [entry["input"] for _, entry in sorted(zip(auc, actual.images, strict=True), key=lambda pair: -pair[0])]
    assert list(actual.extremes) == names and list(actual.extremes.values()) == pytest.approx(sorted(auc)[::-1])
    heads = page.locator("#examples h3").all_inner_texts()
    for (name, value), head in zip(actual.extremes.items(), heads, strict=True):
        assert head.startswith(f"{name}: ") and head.endswith(f" {value:.3f}")
    titles = page.locator("#examples figcaption").all_inner_texts()
    assert titles == ["photograph", "gae", METHOD] * 3
    assert (saved[1].parent / "figures" / "examples.png").exists()


def test_charts_are_loaded_in_light_and_in_dark(open_page):
    for scheme in ("light", "dark"):
        page = open_page(scheme)
        charts = page.locator(".chart img")
        assert charts.count() == 4
        assert all(charts.nth(k).evaluate("image => image.naturalWidth > 200 && image.complete") for k in range(4))
        inverted = charts.first.evaluate("image => getComputedStyle(image).filter !== 'none'")
        assert inverted == (scheme == "dark")
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(250, 249, 246)", "dark": "rgb(19, 20, 23)"}[scheme]
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_differences_open_and_report_their_interval(open_page, saved):
    page = open_page("light")
    details = page.locator("#localisation details")
    matrix = details.locator("table.matrix").nth(2)  # ROC-AUC
    cells = matrix.locator("tbody tr").first.locator("td")
    difference = next(d for d in saved[0].differences("roc_auc") if (d.first, d.second) == ("gae", "random"))
    text = f"+{difference.estimate.mean:.3f}"
    assert text in cells.all_inner_texts()
    place = cells.all_inner_texts().index(text)
    assert "; 3 images" in cells.nth(place).get_attribute("title")
    assert cells.nth(place).get_attribute("class") == ("better" if difference.is_clear else "unclear")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_reader_sees_the_verdict_five_numbers_and_three_images_first(browser, saved, width):
    with watched(browser, width) as page:
        page.goto(saved[1].as_uri())
        assert page.locator("details[open]").count() == 0 and page.locator("table:visible").count() == 1
        assert page.locator("table.main thead th").count() == 5
        table, window = page.locator("table.main").bounding_box(), page.evaluate("window.innerWidth")
        assert table["x"] + table["width"] <= window == width
        heights = page.evaluate("document.documentElement.scrollHeight"), page.locator("#examples").bounding_box()
        assert width < 1000 or heights[0] <= 2500
        assert page.locator(".verdict").first.bounding_box()["y"] < table["y"] < heights[1]["y"]
