"""Views of words: what is drawn is what was given, in every form, whatever the words are made of."""

import re

import numpy as np
import pytest
import torch
from matplotlib.offsetbox import DrawingArea
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from tests.images.test_figures import check_apart
from vitflow.errors import OptionError, ShapeError, printable
from vitflow.text.view import ShadedText
from vitflow.text.words import ENGLISH_STOP_WORDS, PATCHES, RowSummary, Words, hide

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


def view_of(words: Words, **frame) -> ShadedText:
    """Return random weights of these words."""
    return ShadedText(words, np.random.default_rng(0).dirichlet(np.ones(words.length)), selected=(1,), **frame)


def test_the_summary_reports_shares_and_entropy():
    summary = RowSummary.of(WEIGHTS, WORDS, self_share=0.15, hidden=hide(WORDS, stop_words=ENGLISH_STOP_WORDS))
    assert summary.special == pytest.approx(0.35)
    assert summary.first == pytest.approx(0.3)
    assert summary.hidden == pytest.approx({"special tokens": 0.35, "stop words": 0.01 + 0.01 + 0.01 + 0.15})
    assert summary.entropy == pytest.approx(-(WEIGHTS * np.log2(WEIGHTS)).sum())
    assert summary.max_entropy == pytest.approx(np.log2(12))
    assert "special tokens 35 % · first token 30 % · query token 15 % · some words stand out (entropy" in str(summary)
    assert summary.hidden_shares == "Not shown: special tokens (35 % of the weight), stop words (18 % of the weight)."


@pytest.mark.parametrize(
    ("weights", "verdict"),
    [
        ([0.25, 0.25, 0.25, 0.25, np.nan], "nearly uniform: uninformative"),  # unseen tokens do not count
        ([0.4, 0.3, 0.2, 0.1], "spread over many words"),
        ([8.0, 1.0, 0.5, 0.5], "some words stand out"),  # of any scale
        ([97, 1, 1, 1], "concentrated on few words"),
        ([1.0, 0.0, 0.0, 0.0], "concentrated on few words"),
        ([0.0, 0.0, 0.0, 0.0], ""),
        ([1.0], ""),
    ],
)
def test_the_verdict_follows_from_the_entropy(weights, verdict):
    summary = RowSummary.of(weights, words_of("abcde"[: len(weights)]))
    assert summary.verdict == verdict and (verdict in str(summary)) and summary.special is None
    assert ("entropy" in str(summary)) == bool(verdict)


def test_tokens_that_are_reported_apart_do_not_count_for_the_entropy():
    weights, words = [0.0, 0.5, 0.5, 8.0, np.nan], words_of("abcde")
    view = ShadedText(words, weights, selected=(0,), self_share=0.4, hidden={3: PATCHES})
    assert view.summary.entropy == view.summary.max_entropy == 1.0 and view.summary.self_share == 0.4
    assert ShadedText(words, weights, selected=(0,)).summary.max_entropy == 2.0


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
            shades[text.get_text()] = (1 - box.get_facecolor()[0]) / (1 - 43 / 255)
    return shades


def test_shades_are_shares_of_the_largest_that_is_shown():
    view = ShadedText(WORDS, WEIGHTS)
    assert shades_of(view)["[CLS]"] == 1.0
    assert view.shades[2] == pytest.approx(0.25 / 0.3)
    assert shades_of(view)["key"] == pytest.approx(0.25 / 0.3, abs=5e-3)  # of 256 levels
    hidden = ShadedText(WORDS, WEIGHTS, hidden=hide(WORDS))
    assert shades_of(hidden)["key"] == 1.0 and "[CLS]" not in texts_of(hidden.figure())  # a sink flattens nothing
    assert "Not shown: special tokens (35 % of the weight)." in hidden.text()
    assert set(shades_of(ShadedText(WORDS, np.zeros(12))).values()) == {0.0}


def test_the_explained_token_is_outlined_and_sets_no_scale():
    view = ShadedText(WORDS, WEIGHTS, selected=(0,))
    assert shades_of(view)["key"] == 1.0
    figure = view.figure()
    outlined = [box for box in figure.findobj(Rectangle) if box.get_linewidth() == 0.8]
    assert len(outlined) == 1 and any("outlined" in text for text in texts_of(figure))
    assert view.summary.self_share == pytest.approx(0.3)


def test_a_terminal_gets_a_plain_list_of_the_strongest_tokens():
    view = ShadedText(WORDS, WEIGHTS, selected=(8,), title="A title")
    lines = view.text().splitlines()
    assert lines[0] == "A title" and re.fullmatch(r" +30\.0 %  \[CLS\]  \(0\)", lines[1])
    shares = [float(re.search(r"([\d.]+) %  ", line)[1]) for line in lines[1 : lines.index("")]]
    assert shares == sorted(shares, reverse=True) and len(shares) > 2
    assert view.line == "[CLS] 30 %, key 25 %, inet 10 %, cab 5 %, [SEP] 5 %"
    assert ShadedText(WORDS, torch.tensor(WEIGHTS)).text() == ShadedText(WORDS, list(WEIGHTS)).text()


def test_weights_that_fit_no_token_are_refused():
    for wrong in ([0.5], np.ones((2, 12)), [np.inf] * 12, [-0.1] * 12, ["a"] * 12):
        with pytest.raises(ShapeError, match="Expected"):
            ShadedText(WORDS, wrong)
    with pytest.raises(OptionError, match="got 12"):
        ShadedText(WORDS, WEIGHTS, selected=(12,))


def test_hostile_words_titles_and_captions_are_shown_as_text(tmp_path):
    evil = "\x1b]0;owned\x07\x9b31m\u202e\u200b"
    view = view_of(words_of(HOSTILE), title=evil, caption=evil)
    for text in (view.text(), str(view)):
        assert printable(text, lines=True) == text and r"\x1b]0;owned\x07\x9b31m\u202e\u200b" in text
    with Image.open(view.save(tmp_path / "view.png")) as image:
        assert image.size[0] > 100
    with pytest.raises(OptionError, match="Unknown file type"):
        view.save(tmp_path / "view.bmp")


LONG = "A caption that says what was computed, with which model and why, and costs $5_0$ or $6_0$. " * 5
WIDE = words_of([*HOSTILE, "$x_1$", " $y$", " WWWWWWWWWWWWWWWWWWWWWWWWWW", *(f" token{n}" for n in range(24))])


@pytest.mark.parametrize("words", [words_of("ab"), WIDE], ids=["short", "wide"])
def test_no_word_of_a_figure_is_cut_or_lies_on_another(words):
    figure = view_of(words, title=f"Title {LONG}", caption=LONG).figure()
    assert len(check_apart(figure)) >= words.length
    shown = (text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip())
    assert not any(text.get_parse_math() for text in shown)
