"""The report in a real browser: what a reader sees, does and is safe from."""

import csv
import json
import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.folder.test_run import fill, image_bytes, tiny_model
from tests.references import patch_box
from tests.viewer.waiting import until, watched
from vitflow import explain_folder
from vitflow.errors import OptionError
from vitflow.folder.draw import read_grids
from vitflow.folder.report import report_run
from vitflow.folder.saved import FILE
from vitflow.images.geometry import Placement, place
from vitflow.images.overlay import blend, scale_range
from vitflow.images.preprocessing import upsample

HOSTILE = "<img src=x onerror=alert(1)>.jpg"
CLASSES = ["cat", "dog", "</script><script>alert(2)</script>", "'\"&amp;", "bird"]


def make_run(place: Path, **options):
    source = fill(place / "in", 5)
    (source / HOSTILE).write_bytes(image_bytes(5))
    (source / "new\nline.jpg").write_bytes(image_bytes(6))
    (source / "<b>bad.jpg").write_bytes(b"nothing")
    model = tiny_model()
    model.pretrained_cfg["label_names"] = CLASSES
    options = {"methods": ["rollout", "centre", "occlusion"], "workers": 0, "report": True, **options}
    return explain_folder(source, place / "out & more", model=model, **options)


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("report"))


@pytest.fixture
def page(browser, summary):
    """The open report; it fails the test where the page asks the network, logs an error or opens a dialog."""
    with watched(browser) as page:
        page.goto(summary.report.as_uri())
        yield page


def names(page) -> list[str]:
    return page.locator(".card .name").all_text_contents()


def grid_of(summary, row, method: str) -> np.ndarray:
    [(_, maps)] = [one for one in read_grids(summary.output) if one[0]["input"] == row["input"]]
    return maps[method]


def test_every_image_has_a_card_and_every_failure_a_line(page, summary):
    rows = [row for row in summary if row["status"] == "explained"]
    assert names(page) == [row["input"] for row in rows]
    assert page.locator("#failed td").all_text_contents()[:2] == ["<b>bad.jpg", "UnidentifiedImageError"]
    assert "7 explained, 1 failed" in re.sub(r"\s+", " ", page.locator(".summary").text_content())
    assert page.locator(".card img:not(.ground)").count() == 7
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")


def test_hostile_names_are_text(page, summary):
    assert HOSTILE in names(page)
    page.locator(".card", has_text="<img").click()
    assert page.locator("#name").text_content() == HOSTILE
    assert page.locator("#name *").count() == 0
    assert page.locator("img[src=x]").count() == 0
    assert page.locator("script").count() == 2
    link = page.locator("#overlay").evaluate("(link) => link.href")
    assert link.startswith("file:") and "%3Cimg" in link
    text = summary.report.read_text()
    assert "<img src=x" not in text and "</script><script>alert" not in text


def test_tabs_change_the_map(page):
    draw = "() => document.getElementById('heat').toDataURL()"
    before = page.evaluate(draw)
    reported = page.locator("#departs")
    assert page.locator(".summary").text_content().count("rollout (not class-specific), centre") == 1
    words = "max over heads, 90% discarded, upper half of 12 or more layers, value-weighted, refined by attention"
    assert reported.text_content() == words
    page.get_by_role("tab", name="centre").click()
    assert reported.text_content() == ""
    assert page.get_by_role("tab", name="centre").get_attribute("aria-selected") == "true"
    assert page.get_by_role("tab", name="rollout").get_attribute("aria-selected") == "false"
    assert page.evaluate(draw) != before
    page.get_by_role("tab", name="rollout").click()
    assert page.evaluate(draw) == before


def test_pointing_at_a_patch_reports_its_value(page, summary):
    row = next(iter(summary))
    page.locator(".card", has_text=row["input"]).first.click()
    grid, box = grid_of(summary, row, "rollout"), page.locator("#frame").bounding_box()
    placement = place((40, 48), (32, 32))
    for line, column in ((0, 0), (1, 2), (3, 3)):
        left, top, right, bottom = patch_box(placement, line, column, 4, 4)
        scale = box["width"] / 48
        page.mouse.move(box["x"] + scale * (left + right) / 2, box["y"] + scale * (top + bottom) / 2)
        reading = page.locator("#reading").text_content()
        actual = re.fullmatch(r"row (\d), column (\d): (\S+) — number (\d+) of 16 patches", reading)
        assert (int(actual[1]), int(actual[2])) == (line, column)
        assert float(actual[3]) == pytest.approx(grid[line, column], rel=1e-3)
        assert int(actual[4]) == 1 + (grid > grid[line, column]).sum()
        patch = page.locator("#patch").bounding_box()
        assert patch["x"] - box["x"] == pytest.approx(left * scale, abs=1)
        assert patch["width"] == pytest.approx((right - left) * scale, abs=1)
    page.mouse.move(box["x"] + 1, box["y"] + box["height"] / 2)  # the crop left this edge out
    assert page.locator("#reading").text_content() == "the model did not see this part"
    assert page.locator("#patch").is_hidden()


DRAW_HEAT = """([number, own]) => {
    const canvas = document.createElement("canvas"), image = images[number];
    drawHeat(canvas, image.maps[own], image, tables, image.size[0], image.size[1]);
    return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
}"""


@pytest.mark.parametrize("method", ["rollout", "occlusion"])
def test_the_heat_is_the_overlay_of_vitflow(page, summary, method):
    for number, row in enumerate(row for row in summary if row["status"] == "explained"):
        drawn = np.array(page.evaluate(DRAW_HEAT, [number, method]), dtype=np.uint8).reshape(40, 48, 4)
        grid = grid_of(summary, row, method)
        low, high = scale_range(grid)
        heatmap = upsample(grid, Placement((40, 48), (32, 38), (0, 3), (32, 32)), interpolation="smooth")
        seen = ~np.isnan(heatmap)
        assert ((drawn[..., 3] == 0) | seen).all()
        black = np.zeros((40, 48, 3), np.uint8)
        expected = blend(black, heatmap, alpha=1.0, vmin=low, vmax=high, soft=True, mark_unseen=False)
        difference = np.abs(drawn[..., :3] * (drawn[..., 3:] / 255) - expected)[seen]
        assert difference.max() <= 4 and difference.mean() < 1  # a step of 256, and 8 bits
        assert (low < 0) == (method == "occlusion" and grid.min() < 0)


def test_the_address_names_the_image_and_the_method(page, summary):
    page.get_by_role("tab", name="centre").click()
    page.locator(".card", has_text="<img").click()
    address, heat = page.url, page.evaluate("$('heat').toDataURL()")
    page.locator(".card").first.click()
    page.get_by_role("tab", name="rollout").click()
    assert page.url != address
    page.goto(address)  # the same page: only what stands behind # changes
    until(page, "(old) => $('heat').toDataURL() === old", heat)
    page.reload()
    assert page.locator("#name").text_content() == HOSTILE
    assert page.get_by_role("tab", name="centre").get_attribute("aria-selected") == "true"
    page.goto(summary.report.as_uri() + "#image=nothing&method=<b>")
    page.reload()
    assert page.locator("#name").text_content() == names(page)[0]


def test_images_are_filtered_and_sorted(page, summary):
    rows = {row["input"]: row for row in summary if row["status"] == "explained"}
    page.locator("#file").fill("IMG SRC")
    assert names(page) == [HOSTILE] and page.locator("#name").text_content() == HOSTILE
    assert page.locator("#count").text_content() == "1 of 7 on this page"
    page.locator("#file").fill("no such")
    assert names(page) == [] and page.locator(".viewer").is_hidden()
    assert "No image on this page matches the filter" in page.locator(".nothing").text_content()
    page.get_by_role("button", name="Clear the filter").click()
    assert page.locator(".viewer").is_visible() and len(names(page)) == 7
    for sort, sign in (("-probability", -1), ("probability", 1)):
        page.locator("#sort").select_option(sort)
        assert names(page) == sorted(rows, key=lambda name: sign * rows[name]["probability"])
    page.locator("#sort").select_option("order")
    label = next(iter(rows.values()))["class_name"]
    page.locator("#class").select_option(label)
    assert names(page) == [name for name, row in rows.items() if row["class_name"] == label]
    page.locator("#class").select_option("")
    middle = sorted(round(100 * row["probability"]) for row in rows.values())[3]
    page.locator("#least").fill(str(middle))
    assert names(page) == [name for name, row in rows.items() if row["probability"] >= middle / 100]


def test_a_tap_on_a_phone_changes_what_is_in_sight(browser, summary):
    context = browser.new_context(viewport={"width": 390, "height": 700}, has_touch=True, color_scheme="dark")
    page = context.new_page()
    page.goto(summary.report.as_uri())
    name, card = names(page)[4], page.locator(".card").nth(4)
    card.evaluate("(card) => card.scrollIntoView({ block: 'end' })")
    heat, top = page.evaluate("$('heat').toDataURL()"), page.evaluate("scrollY")
    card.tap()
    assert page.locator("#name").text_content() == name and page.evaluate("$('heat').toDataURL()") != heat
    in_sight = """(id) => {
        const box = $(id).getBoundingClientRect(), under = document.elementFromPoint(box.x + 5, box.y + box.height / 2);
        return box.top >= 0 && box.bottom <= innerHeight && box.left >= 0 && $(id).contains(under);
    }"""
    assert top > 300 and page.evaluate("scrollY") == pytest.approx(top, abs=2)
    assert all(page.evaluate(in_sight, one) for one in ("frame", "name", "reading"))
    # What was tapped while it stood half under the image comes out from under it.
    under = "(card) => card.getBoundingClientRect().top - document.querySelector('.big').getBoundingClientRect().bottom"
    page.evaluate(f"(card) => scrollBy(0, 40 + ({under})(card))", card.element_handle())
    assert card.evaluate(under) < 0
    box = card.bounding_box()
    page.touchscreen.tap(box["x"] + 20, box["y"] + box["height"] - 15)
    until(page, f"(card) => ({under})(card) >= 0", card.element_handle())
    page.locator("#frame").tap()
    until(page, "$('reading').textContent.startsWith('row ')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    context.close()


def test_long_runs_get_several_pages(tmp_path):
    summary = make_run(tmp_path, report=False)
    first = report_run(summary.output, per_page=3)
    pages = sorted(path.name for path in summary.output.glob("report*.html"))
    assert first.name == "report.html" and pages == ["report-2.html", "report-3.html", "report.html"]
    shown = []
    for path in (first, *(summary.output / name for name in pages[:2])):
        text = path.read_text()
        data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
        assert len(data["images"]) <= 3
        assert text.count("report-2.html") == 1
        for image in data["images"]:
            assert image["image"].startswith("data:image/jpeg;base64,")
            shown.append(image["name"])
    assert shown == [row["input"] for row in summary if row["status"] == "explained"]


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A run with labels: one is right, one wrong, one of no class, one by an index, and the other images have none."""
    summary = make_run(tmp_path_factory.mktemp("labels"), report=False, methods=["rollout", "gae"])
    rows = [row for row in summary if row["status"] == "explained"]
    best = [row["predicted_index"] for row in rows]
    table = summary.output.parent / "labels.csv"
    given = [("", CLASSES[best[0]]), ("", CLASSES[best[1] - 1].upper()), ("", "zebra"), (best[3], "ignored")]
    with table.open("w", newline="") as file:
        lines = [(row["input"], *one) for row, one in zip(rows, given, strict=False)]
        csv.writer(file).writerows([("file", "label_index", "label"), *lines, ("elsewhere.jpg", "", "cat")])
    return report_run(summary.output, labels=table), rows


def test_labels_are_compared_with_the_predictions(browser, labelled):
    report, rows = labelled
    with watched(browser) as page:
        page.goto(report.as_uri())
        reported = page.locator(".summary").nth(1).text_content()
        assert reported == "Labels: 2 of 3 right (66.7%); 1 with a label that is no class: zebra; 3 without a label"
        page.locator("#sort").select_option("-wrong")
        first = page.locator(".card").first
        assert first.locator(".name").text_content() == rows[1]["input"]
        assert first.locator(".wrong").text_content() == f"true: {CLASSES[rows[1]['predicted_index'] - 1]}"
        assert page.locator(".card .wrong").count() == 1 and page.locator(".card .right").count() == 2
        others = [f"{CLASSES[index]} {value:.1%}".replace("%", " %") for index, value in rows[0]["top"][1:]]
        assert page.locator("#others").text_content().endswith(f"also {', '.join(others)}")


def test_the_strip_has_the_mean_map_of_each_class(browser, labelled):
    report, rows = labelled
    with watched(browser) as page:
        page.goto(report.as_uri())
        counts = Counter(CLASSES[row["predicted_index"]] for row in rows)
        wanted = [f"{name} · {count}" for name, count in counts.most_common() if count > 1]
        assert wanted and sorted(page.locator(".mean span").all_text_contents()) == sorted(wanted)
        draw = "document.querySelector('.mean canvas').toDataURL()"
        before = page.evaluate(draw)
        page.get_by_role("tab", name="gae").click()
        assert page.evaluate(draw) != before
        page.locator(".mean").first.click()
        assert page.locator(".card").count() == counts.most_common()[0][1]


def test_labels_are_folders_by_name_and_others_are_refused(tmp_path):
    source = fill(tmp_path / "in", 4)
    for number, name in enumerate(("dog", "CAT", "heffalump")):
        (source / name).mkdir()
        (source / f"{number}.jpg").rename(source / name / f"{number}.jpg")
    model = tiny_model()
    model.pretrained_cfg["label_names"] = CLASSES
    output = explain_folder(source, tmp_path / "out", model=model, recursive=True, workers=0).output
    assert "heffalump" in report_run(output, labels="folders").read_text()
    (tmp_path / "wrong.csv").write_text("name,class\n3.jpg,dog\n")
    (tmp_path / "none.csv").write_text("file,label\n3.jpg,heffalump\n")
    (tmp_path / "other.csv").write_text("file,label\n9.jpg,dog\n")
    refused = {"wrong": "column 'file'", "none": "'heffalump'", "other": "none for these", "no": "No such"}
    for name, words in refused.items():
        with pytest.raises(OptionError, match=words):
            report_run(output, labels=tmp_path / f"{name}.csv")


def test_a_run_that_was_stopped_has_a_report_too(tmp_path):
    summary = make_run(tmp_path, report=False)
    with closing(sqlite3.connect(summary.output / FILE)) as db:
        db.execute("DELETE FROM rows WHERE position > 2")
        db.commit()
    assert "0.jpg" in report_run(summary.output).read_text()


@pytest.mark.parametrize("width", [390, 1280])
def test_a_long_class_leaves_the_probability_in_sight(page, width):
    page.set_viewport_size({"width": width, "height": 800})
    page.evaluate(
        "for (const label of document.querySelectorAll('.shared > :first-child')) label.textContent = 'w '.repeat(99)"
    )
    for shared in page.locator(".shared").all():
        box, number = shared.bounding_box(), shared.locator("> :last-child")
        inner = number.bounding_box()
        assert number.text_content().endswith("%") and inner["x"] >= box["x"]
        assert inner["x"] + inner["width"] <= min(box["x"] + box["width"] + 1, width)
