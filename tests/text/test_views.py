"""Views of what was read and written: the numbers of the result, in the right places."""

import numpy as np
import pytest

import vitflow
from vitflow.errors import OptionError
from vitflow.text import Generation, Reading, Words

STRINGS = ("<s>", "the", " key", " is", " here")


def words(strings=STRINGS) -> Words:
    return Words(tuple(strings), tuple(range(len(strings))), tuple(string == "<s>" for string in strings))


def reading(strings=STRINGS, layers: int = 3, *, selected=(3,), causal: bool = True, **changed) -> Reading:
    """Random causal attention, read as rollout reads it."""
    tokens = len(strings)
    rows = np.random.default_rng(1).dirichlet(np.ones(tokens), size=layers).astype(np.float32)
    if causal:
        rows[:, max(selected) + 1 :] = 0
    options = {"head_fusion": "mean", "residual": 0.5, "causal": "raw"}
    known = {"self_share": None, "causal": causal, "text": "the key is here", "model": "m", "method": "rollout"}
    return Reading(
        **{"tokens": words(strings), "weights": rows[-1], "layers": rows, "selected": selected}
        | known
        | {"options": options}
        | changed
    )


def generation(n: int = 3, m: int = 4, layers: int = 2) -> Generation:
    rows = np.zeros((n, m + n, layers), np.float32)
    for number in range(n):
        rows[number, : m + number] = np.random.default_rng(number).dirichlet(np.ones(m + number), size=layers).T
    written = words([f" w{number}" for number in range(n)])
    return Generation(rows[:, :m], rows[:, m:], words(STRINGS[:m]), written, "m", "rollout", {"residual": 0.5})


def test_what_comes_after_the_requested_token_is_unseen_by_a_decoder():
    actual = reading()
    view = actual.shaded()
    assert np.isnan(view.weights[4]) and not np.isnan(view.weights[:4]).any()
    assert not np.isnan(reading(causal=False).shaded().weights).any()
    np.testing.assert_allclose(view.weights[:4], actual.weights[:4])
    assert view.title == "Attribution of “is”" and view.caption == "Attention rollout · m"


def test_one_written_token_is_shaded_over_all_that_it_read():
    view = generation().shaded(1)
    assert view.title == "Attribution of “w1”" and view.selected == (4, 5)
    assert view.summary.self_share == pytest.approx(generation().among_generated[1, 0, -1])
    assert np.isnan(view.weights[5:]).all() and not np.isnan(view.weights[:5]).any()
    assert generation().shaded("w1").text() == view.text() != generation().shaded().text()
    with pytest.raises(OptionError, match="from 0 to 2"):
        generation().shaded(3)


def test_each_written_token_has_a_line_with_its_verdict():
    actual = generation()
    lines = actual.text().splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["w0", "w1", "w2"] and lines[
        -1
    ] == actual.shaded().caption
    row = np.concatenate([actual.values[1, :, -1], actual.among_generated[1, :1, -1]])
    names = ["<s>", "the", "key", "is", "w0"]
    best = [place for place in np.argsort(-row) if place != 4]  # not the query token itself
    assert lines[2].startswith(f"  w1: {names[best[0]]} {round(100 * row[best[0]])} %, {names[best[1]]}")
    assert lines[2].endswith(f" · {actual.shaded(1).summary.verdict}")


@pytest.mark.shared
def test_the_example_of_the_readme_stands_out_in_a_trained_bert(shared_data):
    sentence, options = "He bought a hot dog in New York", {"model": shared_data / "minilm", "token": "hot"}
    actual = vitflow.text.explain_text(sentence, start_layer=5, **options)
    assert actual.shaded().line.startswith("dog 39 %") and "· some words stand out (entropy" in actual.shaded().text()
    assert vitflow.text.explain_text(sentence, **options).shaded().summary.verdict == "nearly uniform: uninformative"
