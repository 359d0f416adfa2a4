"""The page of a text in a real browser: its shares are those of Python, and each word answers a click."""

import itertools
import re
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("transformers")

from tests.text.test_images import ANSWER, written
from tests.text.test_reading import TEXT, reads, wordpiece_tokenizer
from tests.viewer.waiting import until, watched
from vitflow.text import Generation, Reading, Words, explain_generation, explain_text
from vitflow.text.page import TextRow

NEW = 6
HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture(scope="module")
def generation() -> Generation:
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    model, tokenizer = reads("GPT2LMHeadModel"), wordpiece_tokenizer()
    return explain_generation(model, "The key to the cabinets is", tokenizer=tokenizer, name=HOSTILE, **options)


@pytest.fixture(scope="module")
def reading() -> Reading:
    return explain_text(TEXT, model=reads("BertForMaskedLM"), tokenizer=wordpiece_tokenizer(), token="cabinets")


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Opens a page without a network; what went wrong on it fails the test."""
    folder, numbers = tmp_path_factory.mktemp("texts"), itertools.count()
    with ExitStack() as windows:

        def show(page, *, address: str = ""):
            shown = windows.enter_context(watched(browser))
            shown.context.set_offline(True)
            shown.goto(page.save(folder / f"{next(numbers)}.html").as_uri() + address)
            until(shown, "shares !== null && document.querySelectorAll('.token').length > 0")
            return shown

        yield show


MAP = "word => { const { shape, values } = mapOf(0, word); return [shape, [...values]]; }"
SHARES = """([word, layer]) => { Object.assign(state, { word, on: -1, layer }); draw(); return sharesOf(word); }"""


def shares_of(rows: np.ndarray) -> np.ndarray:
    sums = rows.sum(axis=-1, keepdims=True)
    return np.divide(rows, sums, out=np.zeros_like(rows), where=sums > 0)


def test_the_shares_of_a_written_text_are_those_of_python(generation, opened):
    page, m = opened(generation.page()), generation.prompt_tokens.length
    whole = np.concatenate([generation.values, generation.among_generated], axis=1).transpose(0, 2, 1)
    for word in range(NEW):
        for layer in range(2):
            actual = page.evaluate(SHARES, [word, str(layer + 1)])
            np.testing.assert_allclose(actual, shares_of(whole[word])[layer], rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(page.evaluate(SHARES, [word, "all"]), page.evaluate(SHARES, [word, "2"]))
        mean = shares_of(whole[word]).mean(axis=0)
        np.testing.assert_allclose(page.evaluate(SHARES, [word, "mean"]), mean, rtol=1e-3, atol=1e-6)
        entry = page.evaluate("word => selfShareOf(word)", word)
        assert entry == pytest.approx(generation.self_share[word].mean(), abs=1e-5)
    page.evaluate("() => { Object.assign(state, { on: 2, layer: 'all' }); draw(); }")
    back = page.evaluate("shown().map(one => one.value ?? null)")
    assert back[:m] == [None] * m
    np.testing.assert_allclose(back[m:], shares_of(whole)[:, -1, 2], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("method", "causal"), [("rollout", True), ("attention", False)])
def test_each_word_of_a_text_that_was_read_has_its_row(method, causal, opened):
    model = reads("GPT2LMHeadModel" if causal else "BertForMaskedLM")
    given = {"model": model, "tokenizer": wordpiece_tokenizer(), "method": method}
    actual = explain_text(TEXT, token="cabinets", **given)
    page = opened(actual.page())
    words = page.evaluate("rows.map(({ positions }) => positions)")
    assert list(actual.selected) in words and sorted(itertools.chain(*words)) == list(range(actual.tokens.length))
    for number, positions in enumerate(words):
        if len(positions) == 1:
            one = explain_text(TEXT, token=positions[0], **given)
        elif positions == list(actual.selected):
            one = actual
        for layer, row in enumerate(one.layers):
            shares = page.evaluate(SHARES, [number, str(layer + 1)])
            np.testing.assert_allclose(shares, shares_of(row.astype(float)), rtol=2e-3, atol=1e-5)


def test_a_reader_clicks_through_a_written_text(generation, opened):
    page, m = opened(generation.page()), generation.prompt_tokens.length
    texts = page.evaluate("tokens.map(({ text }) => text)")
    page.click(f".token >> nth={m + 3}")
    assert page.inner_text("h1") == f"Attribution of “{texts[m + 3]}”"
    marked = page.locator(".token.selected, .token.at").evaluate_all("all => all.map(one => one.dataset.position)")
    assert marked == [str(m + 2), str(m + 3)]
    summary, row = page.inner_text("#summary"), generation.values[3, :, -1]
    share = row.sum() / (row.sum() + generation.among_generated[3, :, -1].sum())
    assert f"{round(100 * share)} % on the prompt" in summary and "earlier generated words" in summary
    assert "query token left out" in summary and re.search(r"entropy \d\.\d\d of \d\.\d\d bits", summary)
    assert page.get_attribute(f".token >> nth={m + 2}", "title").endswith(f"{100 * generation.self_share[3, -1]:.1f} %")
    # Its prompt, layer by layer: layers go up, the sum of earlier words stands apart.
    assert page.inner_text("#sheet-title") == f"Attribution of “{texts[m + 3]}” to the prompt by layer, in %"
    cells = "all => all.map(line => [...line.cells].map(one => one.textContent))"
    lines = page.locator("#sheet tr").evaluate_all(cells)
    assert lines[0] == ["", *texts[:m], "earlier generated words"]
    assert [line[0] for line in lines[1:]] == ["layer 2", "layer 1"]
    whole = np.concatenate([generation.values, generation.among_generated], axis=1)[3].T
    for line, entry in zip(lines[1:], shares_of(whole)[::-1], strict=True):
        shown = [float(text.replace("<1", "0.5")) for text in line[1:]]
        np.testing.assert_allclose(shown, [*(100 * entry[:m]), 100 * entry[m:].sum()], rtol=0, atol=0.6)
    page.click(".token >> nth=2")
    assert page.inner_text("h1") == "Attribution to “key”"
    assert page.inner_text("#sheet-title").startswith("Attribution to “key” by layer")
    assert page.is_disabled("#reverse")
    # The writing position of a word is left out there, and said so.
    page.click(f".token >> nth={m - 1}")
    assert "left out" in page.get_attribute(f".token >> nth={m}", "title")


def test_keys_and_the_address_lead_everywhere(generation, opened):
    page, m = opened(generation.page()), generation.prompt_tokens.length
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert page.evaluate("location.hash") == "#word=2&layer=1" and page.input_value("#layer") == "1"
    assert page.inner_text("#summary").startswith("up to layer 1")
    page.keyboard.press("t")
    assert page.evaluate("state.on") == m + 2
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("m")
    assert page.evaluate("location.hash") == f"#on={m + 1}&layer=mean"
    page.keyboard.press("t")
    page.keyboard.press("a")
    page.check("#hide input[value=special]")
    address = page.evaluate("location.hash")
    assert address == "#word=1&layer=all&hide=special"
    again = opened(generation.page(), address=address)
    drawn = "all => all.map(one => [one.className, one.title, one.style.cssText, one.hidden])"
    assert again.locator(".token").evaluate_all(drawn) == page.locator(".token").evaluate_all(drawn)
    assert again.inner_text("#summary") == page.inner_text("#summary")
    broken = opened(generation.page(), address="#word=99&on=-4&layer=77&hide=what")
    assert broken.evaluate("[state.word, state.on, state.layer, state.hide.size]") == [0, -1, "all", 0]


def test_what_is_hidden_is_said_with_its_share(reading, opened):
    page = opened(reading.page(special=False, stop_words=["the", "to"]))
    shares = reading.weights / reading.weights.sum()
    stopped = [place for place, text in enumerate(reading.tokens.strings) if text.strip().lower() in ("the", "to")]
    sums = [round(100 * part.sum()) for part in (shares[np.array(reading.tokens.special)], shares[stopped])]
    expected = "Not shown: special tokens ({} % of the weight), stop words ({} % of the weight).".format(*sums)
    assert page.inner_text("#left-out") == expected
    assert "the" not in page.locator("#sheet thead bdi").all_text_contents()
    for kind in ("special", "stop"):
        page.uncheck(f"#hide input[value={kind}]")
    assert page.inner_text("#left-out") == "" and page.is_visible(".token >> nth=0")
    page.check("#hide input[value=punctuation]")
    assert "punctuation" in page.inner_text("#left-out")


def test_the_page_and_the_terminal_give_the_same_verdict(reading, generation, opened):
    decoder, tokenizer = reads("GPT2LMHeadModel"), {"tokenizer": wordpiece_tokenizer()}
    causal = explain_text(TEXT, model=decoder, **tokenizer)
    raw = explain_generation(decoder, TEXT, method="gae", max_new_tokens=2, do_sample=False, **tokenizer)
    results = [(one, None) for one in (reading, causal)] + [(one, 1) for one in (generation, raw, written())]
    for actual, word in results:
        page, summary = opened(actual.page()), actual.shaded(*[word] * (word is not None)).summary
        if word is not None:
            page.evaluate(SHARES, [word, "all"])
        shown = page.inner_text("#summary")
        bits = [float(number) for number in re.search(r"entropy ([\d.]+) of ([\d.]+) bits", shown).groups()]
        assert summary.verdict and summary.verdict in shown
        assert bits == pytest.approx([summary.entropy, summary.max_entropy], abs=0.0051)
    assert page.evaluate("evenness([1, 1, 1, 1])") == "nearly uniform: uninformative (entropy 2.00 of 2.00 bits)"
    assert page.evaluate("evenness([0, 0])") == ""


def test_a_hostile_text_is_shown_as_it_is(opened):
    hostile = Words(("<script>alert(1)</script>", ' " onload="alert(2)', " \u202eevil"), (1, 2, 3), (False,) * 3)
    matrices = np.full((2, 3, 3), 1 / 3, np.float32)
    actual = Reading(hostile, matrices[0, 0], matrices[0], (2,), None, False, "", HOSTILE, "rollout", {})
    page = opened(replace(actual, rows=[TextRow("evil", (2,), 3, matrices[0])]).page())
    assert page.evaluate("tokens.map(({ text }) => text)")[0] == "<script>alert(1)</script>"
    assert page.evaluate("document.querySelectorAll('[onload]').length") == 0


def test_a_words_custom_place_is_no_earlier_word(opened):
    options = {"method": "gae", "max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    options["tokenizer"] = wordpiece_tokenizer()
    actual = explain_generation(reads("GPT2LMHeadModel"), "The key to the cabinets is", **options)
    page, m = opened(actual.page()), actual.prompt_tokens.length
    for word in range(NEW):
        row = np.concatenate([actual.values, actual.among_generated], axis=1)[word, :, -1].astype(float)
        row /= row.sum()
        entry = row[m + word - 1]
        prompt, earlier = row[: m + word - 1][:m].sum(), row[m : m + word - 1].sum() if word else 0.0
        page.evaluate(SHARES, [word, "all"])
        percents = [int(one) for one in re.findall(r"(\d+) % on", page.inner_text("#summary"))]
        assert percents[:3] == pytest.approx([100 * prompt, 100 * earlier, 100 * entry], abs=1)
        if word:
            last = page.locator("#sheet tbody tr:first-child td").all_text_contents()
            sums = [0 if one == "<1" else int(one) for one in last[-2:]]
            assert sums == pytest.approx([100 * earlier, 100 * entry], abs=1)
            assert page.locator("#sheet thead th").last.text_content() == "query token"


@pytest.mark.parametrize("name", ["llava", "internvl"])
def test_a_word_shows_its_map_on_the_image(name, opened):
    actual = written(name, through_tower=name == "llava")
    page = opened(actual.page())
    for word in range(len(ANSWER)):
        shares = []
        for layer in (1, 2):
            saliency = actual.image(word, layer=layer)
            share = saliency.grid / saliency.grid.sum() * saliency.facts["on_image"]
            page.evaluate(SHARES, [word, str(layer)])
            shown = page.evaluate(MAP, word)
            assert shown[0] == list(saliency.grid.shape)
            np.testing.assert_allclose(shown[1], share.flatten(), rtol=1e-3, atol=1e-6)
            shares.append(share)
        page.evaluate(SHARES, [word, "mean"])
        _, mean = page.evaluate(MAP, word)
        np.testing.assert_allclose(mean, np.mean(shares, axis=0).flatten(), rtol=1e-3, atol=1e-6)
    assert page.evaluate("data.images[0].window") == pytest.approx(saliency.placement.window)


def test_a_reader_clicks_from_word_to_word_on_the_image(opened):
    actual = written()
    page, drawn = opened(actual.page()), "document.querySelector('.stage canvas').toDataURL()"
    assert page.inner_text("h1") == "Attribution of “red”"  # the first word that says something
    first = page.evaluate(drawn)
    page.click(".token >> text=heart")
    assert page.evaluate(drawn) != first
    on_image = actual.image("heart").facts["on_image"]
    assert page.inner_text(".image .share") == f"{100 * on_image:.1f} % of “heart” on this image"
    assert f"({round(100 * on_image)} % on the image)" in page.inner_text("#summary")
    assert [one.inner_text() for one in page.query_selector_all(".small")] == ["red", "heart"]
    assert page.locator("#sheet thead th").all_text_contents()[-2:] == ["the image", "earlier generated words"]
    page.click(".small >> nth=0")
    assert page.inner_text("h1") == "Attribution of “red”" and page.evaluate(drawn) == first
    page.hover(".stage .frame")
    assert re.fullmatch(r"row \d, column \d: .* — number \d+ of 36 patches", page.inner_text(".image .reading"))
    page.click(".token >> text=what")  # no map for words attributed to a prompt token
    assert page.is_hidden("#images")
    page.keyboard.press("ArrowRight")
    page.click(".token >> text=heart")
    assert page.is_visible("#images")
