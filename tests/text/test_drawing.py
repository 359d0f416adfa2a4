"""Views of words: what is drawn is what was given, in every form, whatever the words are made of."""

import base64
import re
from itertools import combinations

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.offsetbox import DrawingArea
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from vitflow.errors import OptionError, ShapeError, printable
from vitflow.images.figures import figure_bytes
from vitflow.images.typesetting import GREY, without_glyph_warnings
from vitflow.text.sheet import GraphView, Panel, Sheet
from vitflow.text.view import POSITIVE, RowSummary, ShadedText
from vitflow.text.words import ENGLISH_STOP_WORDS, Words, hide, labels_of

STRINGS = ("[CLS]", "the", " key", " to", " the", " cab", "inet", "s", " is", " lost", ".", "[SEP]")
HOSTILE = (
    "<script>alert(1)</script>",
    '" onload="x',
    "a\nb",
    "\t",
    "",
    " ",
    "\u202eevil",
    "שלום",
    "日本",
    "\x1b[31m",
    "&amp;",
)


def words_of(strings=STRINGS):
    return Words(tuple(strings), tuple(range(len(strings))), tuple(s.startswith("[") and len(s) > 1 for s in strings))


WORDS = words_of()
WEIGHTS = np.array([0.3, 0.01, 0.25, 0.01, 0.01, 0.05, 0.1, 0.02, 0.15, 0.02, 0.03, 0.05])


def matrices(tokens: int, layers: int = 3) -> np.ndarray:
    return np.random.default_rng(0).dirichlet(np.ones(tokens), size=(layers, tokens))


def all_views(words: Words, hidden=None) -> list:
    tokens, hidden = words.length, hidden or {}
    rows = np.random.default_rng(1).dirichlet(np.ones(tokens), size=3)
    graph = matrices(tokens)
    return [
        ShadedText(words, rows[0], selected=(1,), hidden=hidden, title=words.strings[0], caption=words.strings[1]),
        Sheet(words, rows, [words.strings[0], "b", "c"], rest=[0.1, 0.2, 0.3], hidden=hidden, upwards=True),
        GraphView(
            words, [Panel("raw", graph, 0 * graph), Panel("flow", graph, graph * (np.arange(tokens) == 1)[:, None])]
        ),
    ]


# --- trust -----------------------------------------------------------------------------------------------------------


def test_the_trust_line_reports_shares_and_entropy():
    trust = RowSummary.of(WEIGHTS, WORDS, self_share=0.15, hidden=hide(WORDS, stop_words=ENGLISH_STOP_WORDS))
    assert trust.special == pytest.approx(0.35)
    assert trust.first == pytest.approx(0.3)
    assert trust.hidden == pytest.approx({"special tokens": 0.35, "stop words": 0.01 + 0.01 + 0.01 + 0.15})
    assert trust.entropy == pytest.approx(-(WEIGHTS * np.log2(WEIGHTS)).sum())
    assert trust.most == pytest.approx(np.log2(12))
    assert "special tokens 35 % · first token 30 % · query token 15 % · entropy" in str(trust)
    assert trust.left_out == "Not shown: special tokens (35 % of the weight), stop words (18 % of the weight)."


def test_uniform_weights_have_the_most_entropy_and_unseen_tokens_do_not_count():
    trust = RowSummary.of([0.25, 0.25, 0.25, 0.25, np.nan], words_of("abcde"))
    assert trust.entropy == pytest.approx(2.0) == trust.most
    assert trust.special is None and "special" not in str(trust)


# --- shaded text -----------------------------------------------------------------------------------------------------


def texts_of(figure) -> list[str]:
    """The texts of a figure."""
    return [text.get_text() for text in figure.findobj(Text) if text.get_text().strip()]


def shades_of(view: ShadedText) -> dict[str, float]:
    """The shade of each drawn token by its fill: the distance of red from white, as a share of the darkest."""
    shades = {}
    for line in view.figure().findobj(DrawingArea):
        boxes = [box for box in line.get_children() if isinstance(box, Rectangle) and box.get_height() == 10]
        labels = [text for text in line.get_children() if isinstance(text, Text) and text.get_position()[1] > 1]
        for box, text in zip(boxes, labels, strict=False):  # the legend has shades without texts
            shades[text.get_text()] = (1 - box.get_facecolor()[0]) / (1 - POSITIVE[0])
    return shades


def test_shades_are_shares_of_the_largest_that_is_shown():
    view = ShadedText(WORDS, WEIGHTS)
    assert shades_of(view)["[CLS]"] == 1.0
    assert view.shades[2] == pytest.approx(0.25 / 0.3)
    assert shades_of(view)["key"] == pytest.approx(0.25 / 0.3, abs=5e-3)  # of 256 levels
    hidden = ShadedText(WORDS, WEIGHTS, hidden=hide(WORDS))
    assert shades_of(hidden)["key"] == 1.0 and "[CLS]" not in texts_of(hidden.figure())  # a sink flattens nothing
    assert "Not shown: special tokens (35 % of the weight)." in hidden.text()


def test_stop_words_stay_readable_and_lose_their_shade():
    view = ShadedText(WORDS, WEIGHTS, hidden=hide(WORDS, special=False, stop_words=ENGLISH_STOP_WORDS))
    assert shades_of(view)["is"] == 0.0 and shades_of(view)["[CLS]"] == 1.0
    [plain] = [text for text in view.figure().findobj(Text) if text.get_text() == "is"]
    assert plain.get_color() == GREY


def test_a_part_of_a_word_is_no_stop_word():
    words = words_of(("th", "is", " a", "x", " a"))
    assert hide(words, stop_words=ENGLISH_STOP_WORDS) == {4: "stop words"}


def test_the_requested_token_is_outlined_and_sets_no_scale():
    view = ShadedText(WORDS, WEIGHTS, selected=(0,))
    assert shades_of(view)["key"] == 1.0
    figure = view.figure()
    outlined = [box for box in figure.findobj(Rectangle) if box.get_linewidth() == 0.8]
    assert len(outlined) == 1 and any("outlined" in text for text in texts_of(figure))
    assert view.trust.self_share == pytest.approx(0.3)
    assert ShadedText(WORDS, WEIGHTS, selected=(0,), self_share=0.9).trust.self_share == 0.9


def test_a_terminal_gets_a_plain_list_of_the_strongest_tokens():
    lines = ShadedText(WORDS, WEIGHTS, selected=(8,), title="A title").text().splitlines()
    assert lines[0] == "A title" and re.fullmatch(r" +30\.0 %  \[CLS\]  \(0\)", lines[1])
    shares = [float(re.search(r"([\d.]+) %  ", line)[1]) for line in lines[1 : lines.index("")]]
    assert shares == sorted(shares, reverse=True) and len(shares) > 2


def test_negative_weights_count_against():
    view = ShadedText(words_of(("no", " yes")), [-0.2, 0.4])
    assert any("hatched: negative" in text for text in texts_of(view.figure()))
    assert [line.split() for line in view.text().splitlines()[:2]] == [
        ["66.7", "%", "yes", "(1)"],
        ["-33.3", "%", "no", "(0)"],
    ]


def test_weights_that_fit_no_token_are_refused():
    for wrong in ([0.5], np.ones((2, 12)), [np.inf] * 12, ["a"] * 12):
        with pytest.raises(ShapeError, match="Expected"):
            ShadedText(WORDS, wrong)
    with pytest.raises(OptionError, match="from 0 to 11, got 12"):
        ShadedText(WORDS, WEIGHTS, selected=(12,))


def test_weights_of_nothing_draw_as_nothing():
    view = ShadedText(WORDS, np.zeros(12))
    assert set(shades_of(view).values()) == {0.0}
    assert "entropy 0.00" in view.text()
    view.figure()


# --- sheets ----------------------------------------------------------------------------------------------------------


def shades_of_cells(sheet: Sheet) -> np.ndarray:
    """The shades of a drawn sheet, from top to bottom; NaN for unseen tokens."""
    return np.ma.filled(sheet.figure().axes[0].images[0].get_array(), np.nan)


def test_a_sheet_has_a_row_for_each_layer_the_last_on_top():
    weights = [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]
    sheet = Sheet(words_of("abc"), weights, ["layer 1", "layer 2"], upwards=True)
    axes = sheet.figure().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["layer 2", "layer 1"]
    assert [text.get_text() for text in axes.texts] == ["10", "20", "70", "50", "50", "0"]
    assert shades_of_cells(sheet)[0, 2] == 1.0
    assert sheet.trust.first == pytest.approx(0.1)  # of the last layer


def test_a_sheet_of_generated_words_reports_the_rest_of_each_row():
    sheet = Sheet(words_of("abc"), [[0.5, 0.3, 0.2], [0.2, 0.2, 0.2]], ["x", "y"], rest=[0.0, 0.4])
    assert [text.get_text() for text in sheet.figure().axes[0].texts][-3:] == ["generated", "0", "40"]
    assert sheet.text().splitlines()[:2] == [
        "  x: a 50 %, b 30 %, c 20 %; generated 0 %",
        "  y: a 20 %, b 20 %, c 20 %; generated 40 %",
    ]


def test_rows_that_do_not_sum_to_1_are_reported_as_shares_and_their_token_sets_no_scale():
    sheet = Sheet(words_of("abc"), [[0.2, 0.1, 1.5], [0.2, 1.0, 0.4]], ["x", "y"], rest=[0.2, 0.0], self_tokens=[2, 1])
    texts = [text.get_text() for text in sheet.figure().axes[0].texts]
    assert texts == ["10", "5", "75", "12", "62", "25", "generated", "10", "0"]
    shades = shades_of_cells(sheet)
    assert shades[0, 2] == shades[1, 1] == 0.0 and shades[1, 2] == 1.0
    assert "x: a 10 %, b 5 %; generated 10 %" in sheet.text()


def test_a_large_sheet_has_no_numbers(monkeypatch):
    sheet = Sheet(WORDS, [WEIGHTS, WEIGHTS], ["a", "b"])
    assert len(sheet.figure().axes[0].texts) == 24
    monkeypatch.setattr("vitflow.text.sheet.MOST_NUMBERS", 20)
    assert not sheet.figure().axes[0].texts


def test_unseen_cells_are_no_zeros():
    sheet = Sheet(words_of("ab"), [[1.0, np.nan], [0.5, 0.5]], ["x", "y"])
    np.testing.assert_array_equal(np.isnan(shades_of_cells(sheet)), [[False, True], [False, False]])
    drawn = sheet.figure().axes[0].images[0]
    assert drawn.cmap(drawn.norm(drawn.get_array()))[0, 1, :3] == pytest.approx((236 / 255,) * 3)


# --- graphs ----------------------------------------------------------------------------------------------------------


def test_a_graph_draws_an_edge_for_each_weight_that_counts():
    layer = np.array([[[1.0, 0.0], [0.5, 0.5]]])
    figure = GraphView(words_of("ab"), [Panel("raw", layer, 0 * layer)]).figure()
    [edges] = figure.axes[0].collections[:1]
    assert len(edges.get_segments()) == 3
    widths = sorted(edges.get_linewidths())
    assert widths[0] == widths[1] < widths[2]


def test_a_graph_leaves_hidden_tokens_out_and_reports_its_strongest_edges():
    graph = np.zeros((1, 12, 12))
    graph[0, 8, 2], graph[0, 8, 0] = 0.7, 0.3
    view = GraphView(WORDS, [Panel("raw attention", graph, graph)], selected=(8,), hidden=hide(WORDS))
    assert "raw attention: key 70 %" in view.text() and "[CLS]" not in view.text()
    assert "Not shown: special tokens (30 % of the weight)." in view.text()


def test_what_cannot_be_distinguished_is_refused_with_a_remedy():
    with pytest.raises(OptionError, match="at most 40 tokens .* got 1 of 41 tokens .* draw a sheet"):
        GraphView(words_of(["x"] * 41), [Panel("raw", *np.zeros((2, 1, 41, 41)))])
    with pytest.raises(ShapeError, match=r"Expected weights \[layers, 12, 12\]"):
        GraphView(WORDS, [Panel("raw", *np.zeros((2, 2, 3, 3)))])


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(3), ids=["shaded", "sheet", "graph"])
def test_hostile_words_are_drawn_and_do_nothing(number, tmp_path):
    view = all_views(words_of(HOSTILE))[number]
    assert "\u202e" not in view.text() and "\x1b[31m" not in view.text() and "\x00" not in view.text()
    with Image.open(view.save(tmp_path / "view.png")) as image:
        assert image.size[0] > 100


@pytest.mark.parametrize("number", range(3), ids=["shaded", "sheet", "graph"])
def test_titles_and_captions_are_shown_as_text(number):
    evil, graph = "\x1b]0;owned\x07\x9b31m\u202e\u200b", matrices(WORDS.length)
    framed = {"title": evil, "caption": evil}
    view = [
        ShadedText(WORDS, WEIGHTS, **framed),
        Sheet(WORDS, [WEIGHTS], [evil], rest=[0.1], **framed),
        GraphView(WORDS, [Panel(evil, graph, graph, note=evil)], selected=(1,), **framed),
    ][number]
    for text in (view.text(), str(view)):
        assert printable(text, lines=True) == text and r"\x1b]0;owned\x07\x9b31m\u202e\u200b" in text
    assert view.figure() is not None


def test_every_token_leaves_a_mark():
    labels = labels_of(words_of(HOSTILE))
    assert all(label.text.strip() for label in labels)
    assert [label.text for label in labels][2:7] == ["a↵b", "⇥", "∅", "␣", "\\u202eevil"]
    assert labels[2].newline


@pytest.mark.parametrize("number", range(3), ids=["shaded", "sheet", "graph"])
def test_a_notebook_shows_the_figure_and_any_program_text(number):
    view = all_views(WORDS)[number]
    bundle = view._repr_mimebundle_()
    assert set(bundle) == {"image/png", "text/plain"} and bundle["text/plain"] == str(view)
    assert base64.b64decode(bundle["image/png"]) == figure_bytes(view.figure(), ".png")


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_figure_is_the_same_each_time(suffix, tmp_path):
    view = all_views(WORDS)[0]
    assert view.save(tmp_path / f"a{suffix}").read_bytes() == view.save(tmp_path / f"b{suffix}").read_bytes()
    with pytest.raises(OptionError, match="Unknown file type"):
        view.save(tmp_path / "a.bmp")


def test_tensors_are_as_good_as_arrays():
    assert ShadedText(WORDS, torch.tensor(WEIGHTS)).text() == ShadedText(WORDS, list(WEIGHTS)).text()


# --- figures ---------------------------------------------------------------------------------------------------------

LONG = "A caption that says what was computed, with which model and why, and costs $5_0$ or $6_0$. " * 5
WIDE = words_of([*HOSTILE, "$x_1$", " $y$", " WWWWWWWWWWWWWWWWWWWWWWWWWW", *(f" token{n}" for n in range(24))])


def drawn_texts(figure) -> list:
    """The texts that a figure draws, with their boxes in pixels."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    with without_glyph_warnings():
        figure.draw(renderer)
        return [
            (text, text.get_window_extent(renderer))
            for text in figure.findobj(Text)
            if text.get_visible() and text.get_text().strip()
        ]


@pytest.mark.parametrize("words", [words_of("ab"), WORDS, WIDE], ids=["short", "plain", "wide"])
def test_no_word_of_a_figure_is_cut_or_lies_on_another(words):
    tokens = words.length
    frame = {"title": f"Title {LONG}", "caption": LONG}
    graph = matrices(tokens)
    rows = [f"a row of a long name {number}" for number in range(3)]
    views = [
        ShadedText(words, graph[0, 0], selected=(1,), **frame),
        Sheet(words, graph[0][[0, 1, 0]], rows, rest=[0.1, 0.2, 0.3], **frame),
        Sheet(words, graph[0][[0, 1, 0]], rows, upwards=True),
        GraphView(
            words,
            [Panel("raw attention of all heads", graph, graph, note=LONG), Panel("b", graph, graph)],
            selected=(1,),
            **frame,
        ),
    ]
    for view in views:
        figure = view.figure()
        width, height = figure.get_size_inches() * figure.dpi
        actual = drawn_texts(figure)
        assert len(actual) >= tokens
        for text, box in actual:
            assert not text.get_parse_math(), text
            assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
        for (first, a), (second, b) in combinations(actual, 2):
            across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
            # Boxes reach from ascender to descender: lines set close may share a few pixels of these.
            assert across <= 2 or down <= 3, (first, second, across, down)
