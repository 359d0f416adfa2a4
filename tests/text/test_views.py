"""Views of what was read and written: the numbers of the result, in the right places."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import vitflow
from vitflow.errors import OptionError
from vitflow.methods.rollout import attention_rollout
from vitflow.text import Generation, Reading, Words
from vitflow.text.sheet import MOST_TOKENS
from vitflow.text.words import ENGLISH_STOP_WORDS

MINILM = Path(__file__).resolve().parents[3] / "shared" / "data" / "minilm"
STRINGS = ("<s>", "the", " key", " is", " here")


def words(strings=STRINGS) -> Words:
    return Words(tuple(strings), tuple(range(len(strings))), tuple(string == "<s>" for string in strings))


def reading(strings=STRINGS, layers: int = 3, *, selected=(3,), causal: bool = True, **changed) -> Reading:
    """Random causal attention, read as rollout reads it."""
    tokens = len(strings)
    matrices = np.random.default_rng(0).random((layers, tokens, tokens)).astype(np.float32)
    matrices = np.tril(matrices) if causal else matrices
    matrices /= matrices.sum(axis=-1, keepdims=True)
    rows = np.random.default_rng(1).dirichlet(np.ones(tokens), size=layers).astype(np.float32)
    if causal:
        rows[:, max(selected) + 1 :] = 0
    options = {"head_fusion": "mean", "residual": 0.5, "causal": "raw"}
    known = {"self_share": None, "causal": causal, "text": "the key is here", "model": "m", "method": "rollout"}
    return Reading(
        **{"tokens": words(strings), "weights": rows[-1], "layers": rows, "matrices": matrices, "selected": selected}
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
    assert np.isnan(actual.sheet().weights[:, 4]).all()
    assert not np.isnan(reading(causal=False).shaded().weights).any()
    np.testing.assert_allclose(view.weights[:4], actual.weights[:4])
    assert view.title == "Attribution of “is”" and view.caption == "Attention rollout · m"


def test_the_share_of_the_requested_token_is_reported_next_to_where_the_map_leaves_it_out():
    assert "query token 40 %" in str(reading(self_share=0.4).shaded().trust)


def test_the_writing_position_has_no_number_where_its_share_stands_apart():
    raw = generation()
    values, among = raw.values.copy(), raw.among_generated.copy()
    values[0, 3] = among[1, 0] = among[2, 1] = 0  # as the receptive field leaves it
    actual = replace(raw, values=values, among_generated=among, self_share=np.full((3, 2), 0.4, np.float32))
    view = actual.sheet()
    texts = [text.get_text() for text in view.figure().axes[0].texts]
    assert texts.count("·") == 1 and "query token 40 %" in view.text() and "· is the query token" in view.text()
    assert 4 not in actual.shaded(1)._largest and "query token, reported" not in raw.sheet().text()


def test_what_is_printed_of_a_result_is_one_short_line():
    reported = repr(reading(text="the key " * 40 + "\x1b"))
    assert reported == f"Reading({('the key ' * 40)[:60]!r}, rollout, token='is', 5 tokens, 3 layers, m)"
    assert (
        repr(generation())
        == "Generation('<s> the key is w0 w1 w2', 3 tokens after a prompt of 4, rollout, 2 layers, m)"
    )


def test_a_word_of_several_pieces_is_requested_about_as_one():
    assert reading(("<s>", "the", " cab", "inet"), selected=(2, 3)).shaded().title == "Attribution of “cabinet”"


def test_the_sheet_has_the_rows_of_the_layers():
    actual = reading()
    assert actual.sheet().rows == ["layer 1", "layer 2", "layer 3"]
    np.testing.assert_allclose(actual.sheet().weights[:, :4], actual.layers[:, :4])


def test_the_graph_shows_raw_attention_rollout_and_flow_of_each_layer():
    actual = reading()
    raw, rollout, flow = actual.graph().panels
    np.testing.assert_allclose(raw.matrices, actual.matrices, rtol=1e-6)
    expected = np.eye(5)
    for layer, drawn in zip(actual.matrices, rollout.matrices, strict=True):
        expected = (0.5 * layer + 0.5 * np.eye(5)) @ expected
        np.testing.assert_allclose(drawn, expected, atol=1e-6)
    # One layer's flow is its row; rows of later layers sum to 1, too.
    np.testing.assert_allclose(flow.matrices[0], rollout.matrices[0], atol=1e-6)
    np.testing.assert_allclose(flow.matrices.sum(axis=-1), 1, atol=1e-6)
    np.testing.assert_allclose(rollout.paths[:, 3], rollout.matrices[:, 3])
    assert rollout.paths.sum() == pytest.approx(3, abs=1e-5)  # the asked token's rows alone


def test_the_paths_of_raw_attention_carry_what_arrives():
    actual = reading()
    paths = actual.graph().panels[0].paths
    expected = np.eye(5)[3] @ actual.matrices[2] @ actual.matrices[1] @ actual.matrices[0]
    np.testing.assert_allclose(paths[0].sum(axis=0), expected, atol=1e-6)


def test_a_text_too_long_for_a_graph_is_refused_before_any_flow_is_solved():
    long = reading(["<s>", *([" the", " key"] * (MOST_TOKENS // 2))], layers=1)
    with pytest.raises(OptionError, match=f"at most {MOST_TOKENS} tokens for a graph, got {MOST_TOKENS + 1}"):
        long.graph()
    assert long.graph(stop_words=ENGLISH_STOP_WORDS).hidden
    with pytest.raises(OptionError, match="draw the sheet"):
        reading(matrices=None).graph()


def test_a_generation_is_a_row_for_each_written_token():
    actual = generation()
    sheet = actual.sheet()
    np.testing.assert_allclose(sheet.weights, actual.values[..., -1])
    np.testing.assert_allclose(sheet.weights.sum(axis=1) + sheet.rest, 1, atol=1e-6)
    assert sheet.rows == ["w0", "w1", "w2"] and sheet.rest[0] == 0
    np.testing.assert_allclose(actual.sheet(1).weights, actual.values[..., 0])


def test_one_written_token_is_shaded_over_all_that_it_read():
    view = generation().shaded(1)
    assert view.title == "Attribution of “w1”" and view.selected == (4, 5)
    assert view.self_share == pytest.approx(generation().among_generated[1, 0, -1])
    assert np.isnan(view.weights[5:]).all() and not np.isnan(view.weights[:5]).any()
    with pytest.raises(OptionError, match="the generated token from -3 to 2, got 3"):
        generation().shaded(3)


def test_results_are_json_and_show_themselves(tmp_path):
    actual, written = reading(), generation()
    assert json.loads(json.dumps(actual.to_dict(), allow_nan=False))["selected"] == [3]
    assert json.loads(json.dumps(written.to_dict(), allow_nan=False))["generated_tokens"] == [" w0", " w1", " w2"]
    assert actual._repr_mimebundle_()["text/plain"] == actual.shaded().text()
    assert written._repr_mimebundle_()["text/plain"] == written.sheet().text()
    for one in (actual, written):
        assert one.save(tmp_path / "view.png").stat().st_size > 1000


@pytest.mark.skipif(not MINILM.is_dir(), reason="needs the trained BERT that is kept outside the project")
def test_the_trained_bert_is_read():
    actual = vitflow.text.explain_text("The keys to the cabinet are here.", model=MINILM, token="are", preset="paper")
    assert "[CLS]" in actual.shaded().text()
    layers = [layer[None] for layer in torch.from_numpy(actual.matrices)]
    rolled = attention_rollout(layers, num_prefix_tokens=0)[0, actual.selected[0]]
    np.testing.assert_allclose(actual.weights, rolled.numpy(), atol=1e-5)
    assert "keys" in actual.graph(special=False).text()
