"""Rollout that grows while a model writes: the same as that of the finished text, whatever cache and batch."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests import references
from tests.recording.test_languages import built, texts
from tests.recording.test_recorder import generators, state_of
from tests.text.test_reading import byte_tokenizer
from vitflow import record_attention
from vitflow.errors import ModelError
from vitflow.text import Generation, explain_generation

transformers = pytest.importorskip("transformers")

NEW = 6
PAPER = {"preset": "paper"}
DECODERS = ["GPT2LMHeadModel", "Qwen2ForCausalLM", "MistralForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"]


def prompt(length: int = 9) -> Tensor:
    return torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(5))


def written(model: nn.Module, *, new: int = NEW, **options: object) -> Generation:
    options = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, **options}
    return explain_generation(model, prompt(), **options)


def literal(model: nn.Module, actual: Generation, **options: object) -> tuple[np.ndarray, np.ndarray]:
    """[n, tokens, layers] by one pass over the finished text, written out slowly in float64; and of even attention."""
    text = torch.tensor([(actual.prompt_tokens + actual.generated_tokens).ids[:-1]])
    with record_attention(model, visible=True) as trace, torch.no_grad():
        model(input_ids=text)
    m, products = actual.prompt_tokens.length, []
    for which in ("attention", "even"):
        product, rows = np.eye(text.shape[1]), []
        for layer in trace.layers:
            seen = layer.visible[0].numpy()
            even = seen / seen.sum(axis=1, keepdims=True)
            heads = layer.heads[0].double().numpy() if which == "attention" else even[None]
            given = options if which == "attention" else {"ratio": 0.0}
            product = references.among_visible([heads], seen, given.get("ratio", 0.0)) @ product
            rows.append(product)
        products.append(np.stack(rows, axis=-1))
    relative = np.stack([references.relative(*(one[..., k] for one in products)) for k in range(len(rows))], axis=-1)
    return products[0][m - 1 :], relative[m - 1 :]


def joined(actual: Generation) -> np.ndarray:
    """[n, prompt and read tokens, layers]."""
    return np.concatenate([actual.values, actual.among_generated[:, :-1]], axis=1)


@pytest.mark.parametrize("name", DECODERS)
def test_each_slice_is_that_of_the_finished_text_with_cache_and_without(name):
    model = built(name)
    cached = written(model, **PAPER)
    plain = written(model, **PAPER, use_cache=False)
    assert cached.values.shape == (NEW, 9, 2) and cached.values.dtype == np.float32
    assert cached.among_generated.shape == (NEW, NEW, 2)
    np.testing.assert_allclose(cached.values, plain.values, atol=1e-5)
    np.testing.assert_allclose(cached.among_generated, plain.among_generated, atol=1e-5)
    assert cached.generated_tokens.ids == plain.generated_tokens.ids
    expected, _ = literal(model, cached)
    for actual in (cached, plain):
        np.testing.assert_allclose(joined(actual), expected, atol=1e-5)
    np.testing.assert_allclose(joined(cached).sum(axis=1), 1, atol=1e-5)
    assert not np.triu(cached.among_generated[..., -1]).any()  # no token rests on itself or a later one


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Gemma3ForCausalLM"])
def test_relative_to_the_receptive_field_and_discarded_in_rows_it_is_that_too(name):
    model = built(name)
    options = {**PAPER, "discard_ratio": 0.4}
    _, expected = literal(model, actual := written(model, **options, causal="receptive_field"), ratio=0.4)
    np.testing.assert_allclose(joined(actual), expected, atol=1e-5)
    raw, _ = literal(model, written(model, **options), ratio=0.4)
    entry = raw[np.arange(NEW), 8 + np.arange(NEW)]
    np.testing.assert_allclose(actual.self_share, entry, atol=1e-5)
    assert (actual.values[0, 8] == 0).all()


@pytest.mark.parametrize("weighting", [True, "output"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "Qwen2ForCausalLM"])
def test_value_weighting_works_as_in_one_pass(name, weighting):
    model = built(name)
    options = {"value_weighted": weighting, "causal": "raw"}
    actual = written(model, **options)
    text = torch.tensor([(actual.prompt_tokens + actual.generated_tokens).ids[:-1]])
    with record_attention(model, fusions=[("mean", weighting)]) as trace, torch.no_grad():
        model(input_ids=text)
    product, rows = np.eye(text.shape[1]), []
    for layer in trace.attentions:
        product = references.residual(layer[0].double().numpy(), 0.5) @ product
        rows.append(product[8:])
    np.testing.assert_allclose(joined(actual), np.stack(rows, axis=-1), atol=1e-5)
    assert np.abs(actual.values - written(model, **PAPER).values).max() > 1e-3


def test_sampling_writes_the_same_and_leaves_the_model_as_it_was():
    model = built("GPT2LMHeadModel").train()
    given = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    torch.manual_seed(7)
    expected = model.eval().generate(prompt(), **given)
    model.train()
    before, state = state_of(model), generators()
    torch.manual_seed(7)
    actual = explain_generation(model, prompt(), **given)
    assert (actual.prompt_tokens + actual.generated_tokens).ids == tuple(expected[0].tolist())
    assert state_of(model) == before and generators() == state  # as many random numbers were drawn
    again = explain_generation(model, prompt(), use_cache=False, **given)
    assert again.generated_tokens.ids != actual.generated_tokens.ids  # other random numbers


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_prompt_is_as_without_its_padding(side):
    model, given = built("Qwen2ForCausalLM"), texts(side)
    padded = {name: value[1:] for name, value in given.items()}
    kept = padded["attention_mask"].bool()
    options = {"max_new_tokens": NEW, "do_sample": False, "causal": "receptive_field"}
    actual = explain_generation(model, padded, **options)
    alone = explain_generation(model, padded["input_ids"][kept].unsqueeze(0), **options)
    assert padded["input_ids"].numel() > kept.sum() and actual.prompt_tokens == alone.prompt_tokens
    assert actual.generated_tokens == alone.generated_tokens
    for name in ("values", "among_generated", "self_share"):
        np.testing.assert_array_equal(getattr(actual, name), getattr(alone, name))
    if side == "left":  # the side of `generate`
        with torch.no_grad():
            expected = model.generate(**padded, max_new_tokens=NEW, do_sample=False)[0, -NEW:]
        assert actual.generated_tokens.ids == tuple(expected.tolist())


def test_the_end_of_a_text_may_be_an_option():
    model = built("GPT2LMHeadModel")
    with torch.no_grad():
        sequences = model.generate(prompt(), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    end = int(sequences[0, 9 + 2])
    for method in ("rollout", "attention"):
        options = {"max_new_tokens": NEW, "do_sample": False, "method": method}
        reported = explain_generation(model, prompt(), generation_config=ending(model, end), **options)
        for ends in (end, [end, 49]):
            actual = explain_generation(model, prompt(), eos_token_id=ends, **options)
            assert actual.generated_tokens == reported.generated_tokens and actual.generated_tokens.length <= 3
            assert actual.generated_tokens.ids[-1] == end and len(actual.values) == actual.generated_tokens.length
            np.testing.assert_array_equal(actual.values, reported.values)


def test_strings_end_a_text_too():
    tokenizer = byte_tokenizer()
    model, text = built("GPT2LMHeadModel", vocab_size=len(tokenizer)), "The key is"
    silent = [number for number in range(len(tokenizer)) if not tokenizer.decode([number]).strip().isalpha()]
    options = {"tokenizer": tokenizer, "max_new_tokens": NEW, "do_sample": False, "suppress_tokens": silent}
    whole = explain_generation(model, text, **options, eos_token_id=None)
    strings = whole.generated_tokens.strings
    word = strings[2]
    actual = explain_generation(model, text, stop_strings=[word], **options)
    length = next(place + 1 for place, string in enumerate(strings) if word in string)
    assert actual.generated_tokens == whole.generated_tokens[:length]
    np.testing.assert_allclose(actual.values, whole.values[:length], atol=1e-6)
    with pytest.raises(ModelError, match="pass tokenizer="):
        written(model, stop_strings=[word])


def ending(model: nn.Module, end: int) -> object:
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = end
    return config


@pytest.mark.parametrize("method", ["attention", "flow", "gae"])
def test_other_methods_read_the_finished_text_once(method):
    model = built("GPT2LMHeadModel")
    options = {"value_weighted": False, **({"layers": 2, "causal": "raw"} if method == "flow" else {})}
    actual = written(model, method=method, **options, new=4)
    text = torch.tensor([(actual.prompt_tokens + actual.generated_tokens).ids[:-1]])
    with record_attention(model, gradients=method == "gae") as trace:
        logits = model(input_ids=text).logits
    heads = [layer[0].detach().double().numpy() for layer in trace.attentions]
    assert actual.values.shape == (4, 9, 2)
    for number, token in enumerate(actual.generated_tokens.ids):
        row = 8 + number
        if method == "attention":
            expected = [layer.mean(axis=0)[row] for layer in heads]
        elif method == "flow":
            bottom, top = (references.residual(layer.mean(axis=0), 0.5) for layer in heads)
            both = np.minimum(top[row][:, None], bottom).sum(axis=0)
            expected = [bottom[row], both / both.sum()]
        else:
            gradients = trace.gradients_of(logits[0, row, token]).attentions
            low, high = (
                np.maximum(layer * gradient[0].double().numpy(), 0).mean(axis=0)
                for layer, gradient in zip(heads, gradients, strict=True)
            )
            eye = np.eye(len(low))
            expected = [(eye + low)[row], ((eye + high) @ (eye + low))[row]]
        np.testing.assert_allclose(joined(actual)[number].T, expected, atol=2e-6, err_msg=method)


def test_arguments_of_tokens_are_those_of_the_prompt_without_its_padding():
    model = built("GPT2LMHeadModel")
    types = torch.full((1, 9), 7)  # GPT-2 adds the embeddings of these ids
    padded = {"input_ids": prompt(), "attention_mask": torch.ones_like(prompt()), "token_type_ids": types}
    padded = {name: torch.cat([torch.zeros(1, 3, dtype=torch.long), value], dim=1) for name, value in padded.items()}
    options = {"min_new_tokens": 2, "max_new_tokens": 2, "do_sample": False, "method": "attention"}
    actual = explain_generation(model, padded, **options)
    typed = explain_generation(model, {"input_ids": prompt(), "token_type_ids": types}, **options)
    np.testing.assert_array_equal(actual.values, typed.values)
    assert np.abs(actual.values - explain_generation(model, prompt(), **options).values).max() > 1e-4
