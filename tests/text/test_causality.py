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
from vitflow.recording.experiment import undisturbed
from vitflow.recording.recorder import record_attention
from vitflow.text import explain_generation, explain_text
from vitflow.text.languages import reading
from vitflow.text.visibility import is_causal, whole_attention

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
    calls: list[object] = []
    model.register_forward_pre_hook(lambda *given: calls.append(given))
    before, random = state_of(model), generators()
    assert is_causal(model) is causal and calls
    assert state_of(model) == before and generators() == random
    calls.clear()
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


@pytest.mark.parametrize("name", ["GPT-2", "MPT", "causal RoFormer"])
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


class OtherAxes(nn.Module):
    """Encoder layers inside of which tokens are [tokens, batch, width] or [batch · tokens, width]."""

    def __init__(self, masked: bool, flat: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.masked, self.flat = nn.Embedding(50, 16), masked, flat
        self.layers = nn.ModuleList(nn.MultiheadAttention(16, 2) for _ in range(2))

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        tokens = self.embed(input_ids).transpose(0, 1)
        mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1) if self.masked else None
        for layer in self.layers:
            tokens = tokens + layer(tokens, tokens, tokens, attn_mask=mask, need_weights=False)[0]
        return {"tokens": tokens[:, 0] if self.flat else tokens}


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("flat", [True, False])
def test_tokens_are_compared_on_any_axis(masked, flat):
    assert is_causal(OtherAxes(masked, flat).eval()) is masked


def test_a_model_is_not_causal_if_no_token_was_compared():
    class Unseen(OtherAxes):  # of which only the embedding returns one row per token
        def forward(self, input_ids: Tensor) -> Tensor:
            doubled = torch.cat([self.embed(input_ids)] * 2, dim=1)
            return self.layers[0](doubled, doubled, doubled)[0].sum()

    assert is_causal(Unseen(False, False).eval()) is False


def test_the_row_of_a_model_with_tokens_first_is_the_attention_that_it_applies():
    torch.manual_seed(3)
    model = of_transformers("XLNetModel", *KINDS["XLNet"][1:3], None)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    tokenizer = wordpiece_tokenizer()
    reading = explain_text(TEXT, model=model, tokenizer=tokenizer, token=3, method="attention", layer=1)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    applied = model(input_ids=ids, output_attentions=True).attentions[0][0].mean(0)[3]
    assert not reading.causal
    np.testing.assert_allclose(reading.weights, applied.detach() / applied.sum().item(), atol=1e-5)


class Changing(nn.Module):
    """A model that changes its modules, buffers, caches and settings when it runs on a short text."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.named = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.ReLU()})
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("late", None)
        self.attention_type, self.cache, self.lengths = "sparse", {"keys": [torch.zeros(3)]}, [5]
        self.window = torch.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0], self.named["second"] = nn.ReLU(), nn.Tanh()
        self.named["third"] = nn.Tanh()
        self.attention_type, self.weight = "full", nn.Parameter(torch.zeros(1))
        self.cache["keys"][0] += 1
        self.cache["keys"].append(x)
        self.cache["values"] = x
        self.lengths.append(len(x))
        self.window.mul_(2)
        self.late = torch.ones(1)
        self.register_buffer("position", torch.arange(3))
        self.seen += 1
        return x


def test_a_trial_undoes_changes_of_modules_buffers_and_attributes():
    model = Changing()
    before, modules = copy.deepcopy(model), list(model.named_modules())
    with undisturbed(model, torch.device("cpu")):
        model(torch.zeros(2, 4))
    assert list(model.named_modules()) == modules
    assert vars(model).keys() == vars(before).keys()
    assert (model.attention_type, model.lengths, model.late) == ("sparse", [5], None)
    assert list(model.cache) == ["keys"] and [each.tolist() for each in model.cache["keys"]] == [[0.0] * 3]
    assert torch.equal(model.window, before.window)
    assert list(model.state_dict()) == list(before.state_dict())
    assert all(torch.equal(one, other) for one, other in zip(model.buffers(), before.buffers(), strict=True))


@pytest.mark.parametrize("words", [40, 43])
def test_sparse_attention_is_measured_with_the_keys_that_chunks_share(words):
    """In eval mode, the random blocks of BigBird are its first block, which its returned matrix holds only once."""
    sizes = {**SIZES, "block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 128}
    model = of_transformers("BigBirdForSequenceClassification", "BigBirdConfig", sizes, None).eval()
    ids = numbers(words)
    before = copy.deepcopy(model)(input_ids=ids, output_attentions=True)  # which leaves hooks
    with record_attention(model, chunks=whole_attention, value_weighted="output") as trace, torch.no_grad():
        logits = model(input_ids=ids).logits
    torch.testing.assert_close(logits, before.logits)
    for actual, returned in zip(trace.attentions, before.attentions, strict=True):
        expected = returned.clone()
        expected[:, :, 4:-4, :4] *= 3
        torch.testing.assert_close(actual, expected[..., :words, :words], atol=1e-6, rtol=1e-5)
    assert trace.layers[0].values.vectors.shape[-2] == words
    assert model.bert.attention_type == "block_sparse"
    for options in ({}, {"chunks": whole_attention, "gradients": True}):
        with pytest.raises(UnsupportedModelError, match="chunk by chunk"), record_attention(model, **options):
            model(input_ids=ids)


@pytest.mark.parametrize("landmarks", [4, 16])
@pytest.mark.parametrize("words", [12, 16])
def test_approximations_of_attention_are_refused(landmarks, words):
    sizes = {**SIZES, "num_landmarks": landmarks, "segment_means_seq_len": 16, "conv_kernel_size": 3}
    model = of_transformers("NystromformerModel", "NystromformerConfig", sizes, None).eval()
    fails = landmarks == 4 and words == 12
    with pytest.raises(UnsupportedModelError, match="fails on a text of 12" if fails else "by a convolution|pieces"):
        with reading(model, numbers(words)), record_attention(model):
            model(input_ids=numbers(words))


def test_attention_with_a_convolution_inside_is_refused():
    model = of_transformers("ConvBertModel", "ConvBertConfig", {**SIZES, "embedding_size": 32}, None).eval()
    with pytest.raises(UnsupportedModelError, match="by a convolution"):
        with reading(model, numbers(12)), record_attention(model):
            model(input_ids=numbers(12))


def test_what_does_not_write_from_left_to_right_is_refused():
    with pytest.raises(UnsupportedModelError, match="later tokens change earlier ones"):
        explain_generation(of_kind("XLM"), numbers(), max_new_tokens=2)
    for method in ("rollout", "gae"):
        with pytest.raises(UnsupportedModelError, match="reads 10 tokens, but the text has 9"):
            explain_generation(of_kind("causal XLM"), numbers(), max_new_tokens=2, method=method)
