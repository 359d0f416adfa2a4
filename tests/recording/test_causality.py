"""Causality is determined by changing later tokens, whatever the class of the model and its masks."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.models.test_libraries import of_transformers
from tests.recording.test_languages import GPT2, SIZES, WIDE
from tests.recording.test_recorder import generators, state_of
from tests.text.test_reading import TEXT, wordpiece_tokenizer
from vitflow.errors import UnsupportedModelError
from vitflow.recording.probing import is_causal
from vitflow.text import explain_generation, explain_text

transformers = pytest.importorskip("transformers")

ENDS = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
BLOOM = {"vocab_size": 50, "hidden_size": 32, "n_layer": 2, "n_head": 4, **ENDS}
MPT = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64, **ENDS}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "max_position_embeddings": 64, **ENDS}
XLM = {"vocab_size": 50, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64, "n_langs": 1}
XLM |= {"use_lang_emb": False, "pad_index": 0}

# Model, configuration, its options, and whether its tokens see only those before them.
KINDS = {
    "CodeGen": ("CodeGenForCausalLM", "CodeGenConfig", {**GPT2, **ENDS, "n_ctx": 64, "rotary_dim": 8}, True),
    "XGLM": ("XGLMForCausalLM", "XGLMConfig", {"vocab_size": 50, **XGLM}, True),
    "OpenAI-GPT": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", {**GPT2, **ENDS}, True),
    "MPT": ("MptForCausalLM", "MptConfig", MPT, True),
    "BLOOM": ("BloomForCausalLM", "BloomConfig", BLOOM, True),
    "causal XLM": ("XLMWithLMHeadModel", "XLMConfig", {**XLM, "causal": True}, True),
    "causal RoFormer": ("RoFormerForCausalLM", "RoFormerConfig", {**WIDE, **ENDS, "is_decoder": True}, True),
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, **ENDS}, True),
    "causal BERT": ("BertLMHeadModel", "BertConfig", {**WIDE, **ENDS, "is_decoder": True}, True),
    "GPT-2 that classifies": ("GPT2ForSequenceClassification", "GPT2Config", {**GPT2, **ENDS}, True),
    "BERT": ("BertForMaskedLM", "BertConfig", WIDE, False),
    "BERT that classifies": ("BertForSequenceClassification", "BertConfig", WIDE, False),
    "XLM": ("XLMWithLMHeadModel", "XLMConfig", XLM, False),
    "RoFormer": ("RoFormerForMaskedLM", "RoFormerConfig", WIDE, False),
    "XLNet": ("XLNetLMHeadModel", "XLNetConfig", {"vocab_size": 50, "d_model": 32, "n_layer": 2, "n_head": 4}, False),
    "ALBERT": ("AlbertForMaskedLM", "AlbertConfig", {**SIZES, "embedding_size": 16}, False),
}
WRITES = [name for name, kind in KINDS.items() if kind[3] and "that" not in name and "XLM" not in name]
# Where a model's queries and keys, and what else makes its attention, lie.
ASKS = ("query", "key", "q_proj", "k_proj", "q_lin", "k_lin", "qkv", "c_attn", "Wqkv")


def of_kind(name: str) -> nn.Module:
    return of_transformers(*KINDS[name][:3], None)


def uniform(name: str) -> nn.Module:
    """A model of a kind whose attention is the same for all keys that a query may see."""
    model = of_kind(name)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if any(word in path for word in ASKS):
                parameter.zero_()
    for module in model.modules():  # these two prefer what is near
        module.register_forward_pre_hook(without_bias, with_kwargs=True)
    return model


def without_bias(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, object]:
    biases = {word: kwargs[word] * 0 for word in ("alibi", "position_bias") if isinstance(kwargs.get(word), Tensor)}
    return args, {**kwargs, **biases}


def numbers(length: int = 9) -> Tensor:
    return torch.randint(5, 50, (1, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("name", KINDS)
def test_whether_a_token_sees_later_ones_is_detected_by_changing_these(name):
    model, causal = of_kind(name).train(), KINDS[name][3]
    before, random = state_of(model), generators()
    assert is_causal(model) is causal
    assert state_of(model) == before and generators() == random
    calls: list[object] = []
    model.register_forward_pre_hook(lambda *given: calls.append(given))
    assert is_causal(model) is causal and not calls  # asked once
    assert is_causal(copy.deepcopy(model).eval()) is causal and calls


@pytest.mark.parametrize("name", [name for name in KINDS if "that" not in name and KINDS[name][3]])
@pytest.mark.parametrize("options", [{}, {"discard_ratio": 0.5, "causal": "raw"}], ids=["relative", "discarded"])
def test_uniform_attention_is_uniform_relative_to_the_receptive_field(name, options):
    actual = explain_text(TEXT, model=uniform(name), tokenizer=wordpiece_tokenizer(), **options)
    assert actual.causal and actual.selected == (12,)
    if not options:
        assert actual.options["causal"] == "receptive_field" and actual.options["value_weighted"] is False
        np.testing.assert_allclose(actual.weights, [1 / 12] * 12 + [0], atol=1e-6)
        return
    rows = np.tril(np.ones((13, 13)))  # of row t, half of its t + 1 visible keys is discarded, the first ones first
    for length, row in enumerate(rows, start=1):
        row[: length // 2] = 0
    rows = np.eye(13) + rows / np.arange(1, 14)[:, None]
    rows /= rows.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(actual.weights, (rows @ rows)[-1], atol=1e-6)


@pytest.mark.parametrize("name", WRITES)
def test_uniform_attention_is_uniform_for_each_written_token(name):
    model = uniform(name)
    actual = explain_generation(model, numbers(), max_new_tokens=4, do_sample=False)
    joined = np.concatenate([actual.values, actual.among_generated], axis=1)[..., -1]
    expected = np.zeros((4, 13))
    for number in range(4):
        expected[number, : 8 + number] = 1 / (8 + number)
    np.testing.assert_allclose(joined, expected, atol=1e-6)


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("method", ["rollout", "gae"])
def test_a_prompt_padded_on_the_left_is_as_alone_with_a_mask_and_without(name, method):
    model, padded = of_kind(name), numbers(9).clone()
    padded[0, :4] = 0
    options = {"max_new_tokens": 3, "do_sample": False, "method": method}
    alone = explain_generation(model, padded[:, 4:], **options)
    masked = {"input_ids": padded, "attention_mask": padded.ne(0).long()}
    for given in (padded, masked):
        actual = explain_generation(model, given, **options)
        assert actual.prompt_tokens.ids == alone.prompt_tokens.ids
        assert actual.generated_tokens.ids == alone.generated_tokens.ids
        np.testing.assert_allclose(actual.values, alone.values, atol=1e-5)


def test_what_does_not_write_from_left_to_right_is_refused():
    with pytest.raises(UnsupportedModelError, match="later tokens change earlier ones"):
        explain_generation(of_kind("XLM"), numbers(), max_new_tokens=2)
    for method in ("rollout", "gae"):
        with pytest.raises(UnsupportedModelError, match="reads 10 tokens, but the text has 9"):
            explain_generation(of_kind("causal XLM"), numbers(), max_new_tokens=2, method=method)
