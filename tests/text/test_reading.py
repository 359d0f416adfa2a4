"""Texts that a model reads: its tokens by their strings, and what one of them rests on by each method."""

import numpy as np
import pytest
import torch
from torch import nn

import vitflow
from tests import references
from tests.recording.test_languages import SIZES, built
from vitflow import record_attention
from vitflow.errors import ModelError
from vitflow.text import explain_text
from vitflow.text.words import words_of

transformers = pytest.importorskip("transformers")

TEXT = "The key to the cabinets is on the table."
PIECES = ["the", "key", "to", "cab", "##inets", "is", "on", "table", ".", "The"]


def wordpiece_tokenizer():
    """A tokenizer in the manner of BERT's, of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    names = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "[MASK]": 4}
    vocabulary = {**names, **{piece: 5 + number for number, piece in enumerate(PIECES)}}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    special = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "unk": "[UNK]", "mask": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{f"{name}_token": token for name, token in special.items()}
    )


@pytest.fixture(scope="module")
def wordpieces():
    return wordpiece_tokenizer()


def byte_tokenizer():
    """A tokenizer in the manner of GPT-2's, whose tokens begin with their space."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġkey", "Ġkeys", "The", "Ġis"]
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *alphabet, *words])}
    merges = []
    for word in words:
        for stop in range(1, len(word)):
            left, right = word[:stop], word[stop]
            vocabulary.setdefault(word[: stop + 1], len(vocabulary))
            if (left, right) not in merges:
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", bos_token="<|end|>")


@pytest.fixture(scope="module")
def bytes_tokenizer():
    return byte_tokenizer()


def reads(name: str = "BertForMaskedLM") -> nn.Module:
    return built(name, vocab_size=15)


def test_tokens_stand_as_in_the_text(wordpieces, bytes_tokenizer):
    actual = explain_text(TEXT, model=reads(), tokenizer=wordpieces)
    strings = ("[CLS]", "The", " key", " to", " the", " cab", "inets", " is", " on", " the", " table", ".", "[SEP]")
    assert actual.tokens.strings == strings
    assert [place for place, special in enumerate(actual.tokens.special) if special] == [0, 12]
    assert actual.selected == (0,) and not actual.causal and actual.options["causal"] == "raw"
    decoder = built("GPT2LMHeadModel", vocab_size=len(bytes_tokenizer))
    actual = explain_text("The keys é is", model=decoder, tokenizer=bytes_tokenizer)
    assert "".join(actual.tokens.strings) == "The keys é is"
    assert actual.tokens.strings[:2] == ("The", " keys") and actual.tokens.strings[-1] == " is"
    assert actual.selected == (len(actual.tokens.strings) - 1,) and actual.causal
    assert "".join(words_of(bytes_tokenizer, [0, *actual.tokens.ids, 0]).strings) == "<|end|>The keys é is<|end|>"
    assert actual.text == "The keys é is" and actual.model == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("method", "options"),
    [("rollout", {}), ("attention", {"layer": 1}), ("flow", {"layers": 2}), ("gae", {"target": "table"})],
)
@pytest.mark.parametrize("weighting", [False, "output"])
def test_each_method_gives_its_row_layer_by_layer(method, options, weighting, wordpieces):
    model = reads()
    actual = explain_text(
        TEXT, model=model, tokenizer=wordpieces, token="cabinets", method=method, value_weighted=weighting, **options
    )
    assert actual.selected == (5, 6)
    inputs = wordpieces(TEXT, return_tensors="pt")
    with record_attention(model, values=True, gradients=True) as trace:
        logits = model(input_ids=inputs["input_ids"]).logits
    fused = [layer[0].detach().double().numpy() for layer in trace.fused("mean", value_weighted=weighting)]
    row = np.zeros(13)
    row[[5, 6]] = 0.5
    low, high = (references.residual(layer, 0.5) for layer in fused)
    if method == "attention":
        expected = [row @ layer for layer in fused]
    elif method == "rollout":
        expected = [row @ low, row @ high @ low]
    elif method == "flow":
        # A super-source of two halves: by the two layers' own flow, which has tests of its own.
        flows = vitflow.attention_flow([torch.from_numpy(layer)[None] for layer in fused], source=row)
        first = np.minimum(row[:, None], low).sum(axis=0)
        expected = [first / first.sum(), flows.normalized[0].numpy()]
    else:
        target = wordpieces.convert_tokens_to_ids("table")
        gradients = trace.gradients_of(logits[0, 6, target]).attentions
        heads = trace.heads(value_weighted=weighting)
        low, high = (
            (head.detach() * gradient).clamp_min(0)[0].mean(dim=0).double().numpy()
            for head, gradient in zip(heads, gradients, strict=True)
        )
        eye = np.eye(13)
        expected = [row @ (eye + low), row @ (eye + high) @ (eye + low)]
        assert actual.target == "table"
        assert actual.probability == pytest.approx(float(logits[0, 6].detach().softmax(dim=-1)[target]), rel=1e-4)
    np.testing.assert_allclose(actual.layers, expected, atol=2e-5)
    np.testing.assert_array_equal(actual.weights, actual.layers[0 if method == "attention" else -1])
    assert actual.weights.dtype == np.float32 and actual.options["value_weighted"] == weighting


def test_rollout_and_flow_of_a_tiny_bert_equal_the_literal_references(wordpieces):
    """From the model's own output, with padding, in float64, to the numbers written out index by index."""
    model = built("BertForMaskedLM", "eager").double()
    texts = wordpieces(["the key is on the table", "the key"], return_tensors="pt", padding=True)
    with torch.no_grad():
        attentions = model(**{k: texts[k] for k in ("input_ids", "attention_mask")}, output_attentions=True).attentions
    mask, lengths = texts["attention_mask"], (8, 4)
    product = vitflow.attention_rollout(attentions, attention_mask=mask)
    flow = vitflow.attention_flow(attentions, source=0, attention_mask=mask)
    for index, length in enumerate(lengths):
        entry = [layer[index, :, :length, :length].numpy() for layer in attentions]
        np.testing.assert_allclose(product[index, :length, :length], references.rollout(entry), atol=1e-12)
        low, high = (references.residual(references.fuse(layer, "mean"), 0.5) for layer in entry)
        literal = np.minimum(high[0][:, None], low).sum(axis=0)
        np.testing.assert_allclose(flow.values[index, :length], literal, atol=1e-12)
        assert flow.values[index, length:].abs().sum() == 0


def test_relative_to_the_receptive_field_the_self_token_stands_next_to(bytes_tokenizer):
    model = built("GPT2LMHeadModel", vocab_size=len(bytes_tokenizer))
    options = {"model": model, "tokenizer": bytes_tokenizer, "value_weighted": False}
    for method, entry in (("rollout", {}), ("flow", {"layers": 2})):
        raw = explain_text("The keys is", method=method, causal="raw", **options, **entry)
        actual = explain_text("The keys is", method=method, **options, **entry)
        assert actual.options["causal"] == "receptive_field"  # the default of a decoder
        assert actual.weights[-1] == 0 and actual.weights.sum() == pytest.approx(1)
        assert actual.self_share == pytest.approx(raw.weights[-1]) and raw.self_share is None
        assert not np.allclose(actual.weights, raw.weights)


@pytest.mark.parametrize(
    ("problem", "labels", "probability"),
    [
        (None, 3, lambda logits: logits.softmax(0)[0]),
        ("multi_label_classification", 3, lambda logits: logits[0].sigmoid()),
        (None, 1, lambda logits: logits[0].sigmoid()),
        ("regression", 1, lambda logits: None),
    ],
)
def test_the_probability_of_a_class_is_that_of_the_models_kind(wordpieces, problem, labels, probability):
    config = transformers.BertConfig(**SIZES | {"vocab_size": 15}, num_labels=labels, problem_type=problem)
    model = transformers.BertForSequenceClassification(config).eval()
    with torch.no_grad():
        logits = model(**wordpieces(TEXT, return_tensors="pt")).logits[0].double()
    reading = explain_text(TEXT, model=model, tokenizer=wordpieces, method="gae", target=0)
    expected = probability(logits)
    assert reading.probability == (None if expected is None else pytest.approx(float(expected), rel=1e-5))


def test_the_masked_word_is_requested_where_there_is_one_and_its_word_named(wordpieces):
    actual = explain_text("The key is on the [MASK]", model=reads(), tokenizer=wordpieces, method="gae")
    assert actual.tokens.strings[actual.selected[0]] == "[MASK]"
    assert actual.target and 0 < actual.probability < 1


def test_a_saved_model_is_read_by_its_folder(tmp_path, wordpieces):
    reads().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Expected a tokenizer saved with the model .*pass tokenizer="):
        explain_text(TEXT, model=tmp_path)
    wordpieces.save_pretrained(tmp_path)
    by_name = explain_text(TEXT, model=str(tmp_path))
    given = explain_text(TEXT, model=reads(), tokenizer=wordpieces)
    np.testing.assert_allclose(by_name.weights, given.weights, atol=1e-6)
    assert by_name.model == str(tmp_path)
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    np.testing.assert_allclose(explain_text(TEXT, model=loaded).weights, given.weights, atol=1e-6)
