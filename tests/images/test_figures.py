"""Strips and charts: images keep their pixels, words keep their place, files are the same each time."""

import re
import xml.etree.ElementTree as ET
from itertools import combinations

import matplotlib
import numpy as np
import pytest
from matplotlib.image import AxesImage
from matplotlib.text import Text
from PIL import Image

from vitflow.errors import OptionError
from vitflow.images import FIGURE_FORMATS, typesetting
from vitflow.images.figures import Cell, Column, draw_bands, save_figure
from vitflow.images.pen import Bar, panel_size

NAMES = [
    "tabby",
    "虎斑猫",
    "$5 bill and $10 bill",
    r"$\frac{$ \n & <b>&amp;</b> 100%_^",
    "broken \udcff name\x00 with\ttabs\nand lines",
    "🐱 👩\u200d👧 عربي ภาษาไทย हिन्दी \ue000 \uffff \U0001fffe",
    "Pneumonoultramicroscopicsilicovolcanoconiosis",
    "a class whose name goes on and on, far beyond what any column can hold in two lines of type",
    "",
]


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def strip(names: list[str], *, rows: int = 1, classes: int = 1, size: tuple[int, int] = (150, 200), **options):
    """A strip with names everywhere that words can stand; all columns but the first two have a cell for each class."""
    heads = [Column("Photograph"), *(Column(name, name, f"group {number // 2}") for number, name in enumerate(names))]
    blocks = []
    for _ in range(rows):
        cells = [[Cell(noise(*size, number), (name,), (name,))] * classes for number, name in enumerate(names)]
        blocks.append([cells[0][:1], cells[0][:1], *cells[1:]])
    return draw_bands([(heads, blocks)], bars=[Bar(noise(14, 200))], note=" ".join(names), **options)


def boxes(figure):
    """Return the position of each text: (text, box in pixels)."""
    with typesetting.without_glyph_warnings():
        figure.draw_without_rendering()
        shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
        return [(text.get_text(), text.get_window_extent()) for text in shown]


def check_apart(figure):
    """Fail if a word lies on another or leaves the page; the words with their boxes."""
    actual, (width, height) = boxes(figure), figure.get_size_inches() * figure.dpi
    for text, box in actual:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for (first, a), (second, b) in combinations(actual, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        # Boxes reach from ascender to descender: lines set close may share a few pixels of these.
        assert across <= 2 or down <= 3, (first, second, across, down)
    return actual


def places(figure):
    """The boxes of the images, in pixels from the lower left."""
    figure.draw_without_rendering()
    return [image.get_window_extent() for image in figure.findobj(AxesImage)]


@pytest.mark.parametrize("suffix", FIGURE_FORMATS)
def test_every_name_can_be_drawn_in_every_format_without_a_warning(suffix, tmp_path):
    figure = strip(NAMES, size=(20, 20))
    assert save_figure(figure, tmp_path / f"strip{suffix}").stat().st_size > 1000


@pytest.mark.parametrize("size", [(150, 200), (360, 90), (20, 300)])
def test_no_words_overlap_or_leave_the_page(size):
    figure = strip(NAMES, classes=2, size=size)
    actual = check_apart(figure)
    assert len(actual) > 25
    for image in places(figure):
        for text, box in actual:
            assert min(image.x1, box.x1) <= max(image.x0, box.x0) or min(image.y1, box.y1) <= max(image.y0, box.y0), (
                text
            )


def test_a_png_holds_each_image_pixel_by_pixel(tmp_path):
    images = [noise(150, 200), noise(97, 203, 1), noise(41, 230, 2)]
    figure = draw_bands([([Column("a"), Column("b"), Column("c")], [[[Cell(image)] for image in images]])])
    save_figure(figure, tmp_path / "strip.png")
    with Image.open(tmp_path / "strip.png") as file:
        page = np.asarray(file.convert("RGB"))
    for image in images:
        rows, cols = page.shape[0] - image.shape[0] + 1, page.shape[1] - image.shape[1] + 1
        corners = np.argwhere((page[:rows, :cols] == image[0, 0]).all(axis=-1))
        assert any((page[y : y + image.shape[0], x : x + image.shape[1]] == image).all() for y, x in corners)


def test_a_cell_for_all_rows_is_drawn_once_and_the_rows_stand_below_each_other():
    once, twice = noise(100, 200), [noise(100, 200, 1), noise(100, 200, 2)]
    figure = draw_bands([([Column("a"), Column("b")], [[[Cell(once)], [Cell(image) for image in twice]]])])
    first, upper, lower = sorted(places(figure), key=lambda box: (box.x0, -box.y0))
    assert first.y1 == pytest.approx(upper.y1) and lower.y1 < upper.y0
    assert (upper.x0, upper.x1) == (lower.x0, lower.x1)
    assert first.x1 < upper.x0


def test_a_group_is_named_once_over_the_columns_that_stand_together():
    heads = [Column("a", group="x"), Column("b", group="x"), Column("c"), Column("d", group="x")]
    figure = draw_bands([(heads, [[[Cell(noise(50, 200))] for _ in heads]])])
    first, second = sorted(box.x0 for text, box in boxes(figure) if text == "x")
    lefts = sorted(box.x0 for box in places(figure))
    assert lefts[0] < first < lefts[2] < lefts[3] < second


def test_wrapping_keeps_the_words_and_the_width():
    text = "Egyptian cat of many words that will not fit into a single line of this width"
    for lines in range(1, 12):
        actual = typesetting.wrap(text, 1.0, 7, lines=lines)
        assert len(actual) <= lines
        assert all(typesetting.measure(line, 7) <= 1.0 for line in actual)
        assert text.startswith(" ".join(actual).removesuffix("…").rstrip())
    assert " ".join(typesetting.wrap(text, 1.0, 7, lines=12)) == text
    assert typesetting.wrap("", 1.0, 7) == []
    [cut] = typesetting.wrap("Pneumonoultramicroscopicsilicovolcanoconiosis", 1.0, 7, lines=1)
    assert cut.endswith("…") and typesetting.measure(cut + "iii", 7) > 1.0


@pytest.mark.parametrize("suffix", FIGURE_FORMATS)
def test_the_same_strip_gives_the_same_bytes(suffix, tmp_path):
    first = save_figure(strip(["tabby", "$5"]), tmp_path / f"a{suffix}").read_bytes()  # of one font, which is quick
    again = save_figure(strip(["tabby", "$5"]), tmp_path / f"b{suffix}").read_bytes()
    assert first == again
    assert not re.search(rb"CreationDate|dc:date|20[2-9]\d-\d\d-\d\d", first)


def test_words_are_words_in_svg_and_pdf_and_images_stay_apart(tmp_path):
    figure = strip(["tabby", "虎斑猫", "$5 & <more>"])
    tree = ET.parse(save_figure(figure, tmp_path / "strip.svg"))
    words = {"".join(node.itertext()) for node in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {"Photograph", "tabby", "虎斑猫", "$5 & <more>", "low", "high"} <= words
    assert len(list(tree.iter("{http://www.w3.org/2000/svg}image"))) == 4 + 1
    pdf = save_figure(figure, tmp_path / "strip.pdf").read_bytes()
    assert pdf.startswith(b"%PDF") and b"/ToUnicode" in pdf and b"/Type3" not in pdf


def test_settings_of_the_caller_change_nothing(tmp_path):
    ours = save_figure(strip(["tabby"]), tmp_path / "a.png").read_bytes()
    theirs = {
        "image.origin": "lower",
        "image.interpolation": "bicubic",
        "savefig.bbox": "tight",
        "savefig.dpi": 30,
        "savefig.transparent": True,
        "figure.dpi": 50,
        "font.family": "serif",
        "font.style": "italic",
        "text.parse_math": True,
        "lines.linewidth": 9,
    }
    with matplotlib.rc_context(theirs):
        assert save_figure(strip(["tabby"]), tmp_path / "b.png").read_bytes() == ours


def test_an_unknown_file_type_is_refused(tmp_path):
    figure = strip(["tabby"])
    for name in ("strip.gif", "strip", "strip.png.tmp"):
        with pytest.raises(OptionError, match=r"\.png"):
            save_figure(figure, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [(480, 640), (640, 480), (1, 5000), (5000, 1), (96, 96), (3000, 2000)])
def test_images_keep_their_aspect_inside_the_box_of_a_column(size):
    height, width = panel_size(size, width=1.5, dpi=200)
    assert 1 <= height <= 360 and 1 <= width <= 300
    assert width == 300 or height == 360
    if min(height, width) > 10:
        assert height / width == pytest.approx(size[0] / size[1], rel=0.02)
