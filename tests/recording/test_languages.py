"""Language models of transformers, small and with random weights: recorded as they come, in batches with padding."""

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from tests.models.test_libraries import of_transformers
from tests.recording.test_recorder import generators, state_of
from vitflow import attention_rollout, record_attention
from vitflow.errors import OptionError, UnsupportedModelError

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {**SIZES, "max_position_embeddings": 64}
GROUPED = {**WIDE, **SPECIAL, "num_key_value_heads": 2}
NARROW = {**GROUPED, "head_dim": 8, "sliding_window": 5}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
DEBERTA = {**WIDE, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}  # heads folded into the batch
MODERN = {**WIDE, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2}
MODERN |= {"local_attention": 6, "global_attn_every_n_layers": 2}
DISTIL = {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64}
GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **SPECIAL}
# Of YaRN nothing is wanted, whose defaults do not fit so short a text.
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
EXPERTS = {**NARROW, **MIXED, **ROPE, "num_local_experts": 2, "num_experts_per_tok": 1}

# Model, configuration, its options, where the heads are joined again, and what its tokens see.
FAMILIES = [
    ("BertForMaskedLM", "BertConfig", WIDE, "attention.output.dense", "all"),
    ("RobertaForMaskedLM", "RobertaConfig", WIDE, "attention.output.dense", "all"),
    ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL, "attention.out_lin", "all"),
    ("AlbertForMaskedLM", "AlbertConfig", {**WIDE, "embedding_size": 16}, "attention.dense", "all"),
    ("DebertaV2ForMaskedLM", "DebertaV2Config", DEBERTA, "attention.output.dense", "all"),
    ("ModernBertForMaskedLM", "ModernBertConfig", MODERN, "attn.Wo", "window on both sides"),
    ("GPT2LMHeadModel", "GPT2Config", GPT2, "attn.c_proj", "causal"),
    ("LlamaForCausalLM", "LlamaConfig", GROUPED, "self_attn.o_proj", "causal"),
    ("Qwen2ForCausalLM", "Qwen2Config", GROUPED, "self_attn.o_proj", "causal"),
    ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}, "self_attn.o_proj", "causal"),
    ("MistralForCausalLM", "MistralConfig", NARROW, "self_attn.o_proj", "sliding"),
    ("Gemma2ForCausalLM", "Gemma2Config", {**NARROW, **MIXED}, "self_attn.o_proj", "sliding"),
    ("Gemma3ForCausalLM", "Gemma3TextConfig", {**NARROW, **MIXED}, "self_attn.o_proj", "sliding"),
    ("GptOssForCausalLM", "GptOssConfig", EXPERTS, "self_attn.o_proj", "sliding, with a sink"),
]
NAMES = [family[0] for family in FAMILIES]


def cached(model: nn.Module, cache: object) -> dict[str, object]:
    """The cache as an argument of a forward pass, by its name in the installed version of transformers."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def built(name: str, attention: str | None = None, **changes: object) -> nn.Module:
    """A small model whose attention is far from uniform, by sdpa where it has that, else eager."""
    config, options = next((family[1], family[2]) for family in FAMILIES if family[0] == name)
    return of_transformers(name, config, {**options, **changes}, attention)


def texts(side: str, length: int = 12) -> dict[str, Tensor]:
    """Two texts, the second padded by three tokens."""
    ids = torch.randint(3, 50, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, slice(-3, None) if side == "right" else slice(3)] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize(("name", "where", "sees"), [(family[0], *family[3:]) for family in FAMILIES], ids=NAMES)
def test_every_family_is_recorded_as_it_comes(name, where, sees):
    model, given = built(name), texts("right" if "all" in sees or "both" in sees else "left")
    joined: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, args: joined.append(args[0]))
        for path, module in model.named_modules()
        if path.endswith(where)
    ]
    with torch.no_grad():
        plain = model(**given).logits
    for hook in hooks:
        hook.remove()
    before, random = state_of(model), generators()
    with record_attention(model, values=True, visible=True) as trace, torch.no_grad():
        answer = model(**given).logits
    assert state_of(model) == before and generators() == random
    real = given["attention_mask"].bool()
    assert (answer - plain)[real].abs().max() <= 1e-5 * plain.abs().max()
    assert len(trace.layers) == len(joined) == 2 and len(trace.layers.streams) == 1
    for layer, output in zip(trace.layers, joined, strict=True):
        heads, values = layer.heads, layer.values
        assert heads is not None and values is not None
        made = (heads @ values.vectors).transpose(1, 2).flatten(2)
        assert (made - output.flatten(2))[real].abs().max() <= 1e-5 * output.abs().max()
        sums = heads.sum(dim=-1).transpose(1, 2)[real]
        if "sink" in sees:
            assert sums.min() > 0 and sums.max() < 1 + 1e-6 and sums.mean() < 0.99
        else:
            assert (sums - 1).abs().max() < 1e-6
        check_visible(layer.visible, heads, given["attention_mask"], sees)
    widths = [int((layer.heads[0, 0] > 0).sum(dim=-1).max()) for layer in trace.layers]
    assert widths == {"all": [12, 12], "causal": [12, 12]}.get(sees, widths)
    assert min(widths) < 12 or sees in ("all", "causal")  # a window


def check_visible(visible: Tensor | None, heads: Tensor, mask: Tensor, sees: str) -> None:
    """Return the keys that some head of a query attends to, except for padding."""
    attended = (heads > 0).any(dim=1)
    reported = torch.ones_like(attended) if visible is None else visible.expand_as(attended)
    real = mask.bool()
    assert torch.equal(reported[real], attended[real])
    if "both" not in sees and sees != "all":
        assert not reported[real & (mask.sum(dim=1) == 12)[:, None]].reshape(-1, 12, 12).triu(1).any()


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "Qwen2ForCausalLM", "GptOssForCausalLM"])
def test_padding_changes_nothing(name):
    """The text alone and the same text beside padding: the same attention, rollout and fused matrices."""
    model = built(name)
    side = "right" if "Bert" in name else "left"
    given = texts(side)
    entry = slice(0, 9) if side == "right" else slice(3, 12)
    alone = {key: value[1:, entry] for key, value in given.items()}
    if side == "left":
        given["position_ids"] = (given["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
    for options in ({}, {"fusions": [("max", "output")]}):
        traces = []
        for texts_given in (given, alone):
            with record_attention(model, **options) as trace, torch.no_grad():
                model(**texts_given)
            traces.append(trace)
        for together, single in zip(traces[0].attentions, traces[1].attentions, strict=True):
            torch.testing.assert_close(together[1:, ..., entry, entry], single, atol=1e-6, rtol=1e-4)
        rows = [
            attention_rollout(trace.attentions, attention_mask=one["attention_mask"], causal="raw")
            for trace, one in zip(traces, (given, alone), strict=True)
        ]
        torch.testing.assert_close(rows[0][1:, entry, entry], rows[1], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM"])
def test_what_is_recorded_is_what_the_library_returns(name):
    given = texts("right" if "Bert" in name else "left")
    eager = built(name, "eager")
    with torch.no_grad():
        expected = eager(**given, output_attentions=True).attentions
    real = given["attention_mask"].bool()
    for model in (eager, built(name)):
        with record_attention(model) as trace, torch.no_grad():
            model(**given)
        for recorded, literal in zip(trace.attentions, expected, strict=True):
            torch.testing.assert_close(
                recorded.transpose(1, 2)[real], literal.transpose(1, 2)[real], atol=1e-6, rtol=1e-5
            )


@pytest.mark.parametrize("weighting", [False, "output"])
def test_masked_attention_is_fused_in_parts_as_whole(weighting, monkeypatch):
    """In parts of a few queries each, so that the probabilities of all never exist at once."""
    from vitflow.recording import attending

    model, given = built("GPT2LMHeadModel"), texts("left", 40)
    actual = []
    for size in (2**19, 2**6):
        monkeypatch.setattr(attending, "_CACHED_PROBABILITIES", size)
        for masked in (given, {"input_ids": given["input_ids"]}):
            with record_attention(model, fusions=[("mean", weighting)]) as trace, torch.no_grad():
                logits = model(**masked).logits
            actual.append([*trace.attentions, logits])
    with record_attention(model, values=True) as trace, torch.no_grad():
        model(**given)
    whole = trace.fused("mean", value_weighted=weighting)
    for one, other in zip(actual[0], actual[2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    for one, other in zip(actual[1], actual[3], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(actual[0][:2], whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_of_a_words_logit_reach_every_layer(name, frozen):
    model, given = built(name).double(), {"input_ids": texts("left")["input_ids"][:1]}
    model.requires_grad_(not frozen)
    embedding = next(path for path, module in model.named_modules() if module is model.get_input_embeddings())
    with record_attention(model, gradients=True, features=[embedding]) as trace:
        logits = model(**given).logits
    actual = trace.gradients_of(logits[0, -1, 7])
    assert all(torch.isfinite(one).all() and one.abs().max() > 0 for one in actual.attentions)
    assert actual.features[embedding].shape == (1, 12, 32) and actual.features[embedding].abs().max() > 0
    assert actual.pixels is None
    assert all(parameter.grad is None for parameter in model.parameters())
    first = trace.attentions[0].detach()
    nudged = first.clone()
    nudged[0, 0, -1, 0] += 1e-3  # what the gradient foretells, by a model that is given other probabilities

    class Given(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.scaled_dot_product_attention:
                self.calls += 1
                if self.calls == 1:
                    value = args[2]
                    return nudged @ value.repeat_interleave(4 // value.shape[1], dim=1)
            return func(*args, **(kwargs or {}))

    if name != "Gemma2ForCausalLM":  # eager
        with torch.no_grad(), Given():
            moved = model(**given).logits[0, -1, 7]
        expected = float(actual.attentions[0][0, 0, -1, 0]) * 1e-3
        assert float(moved - logits.detach()[0, -1, 7]) == pytest.approx(expected, rel=0.02)


def test_queries_that_see_nothing_give_nothing_and_no_gradient_of_theirs_is_lost_in_others():
    model, given = built("LlamaForCausalLM"), texts("left")
    with record_attention(model, gradients=True) as trace:
        logits = model(**given).logits
    assert all((one[1, :, :3] == 0).all() for one in trace.attentions)
    gradients = trace.gradients_of(logits[1, -1, 5]).attentions
    assert all(torch.isfinite(one).all() for one in gradients)


def test_the_streams_of_an_encoder_decoder_are_distinguished():
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    given = {**texts("right"), "decoder_input_ids": torch.randint(3, 50, (2, 5))}
    with torch.no_grad():
        plain = model(**given).logits
        with record_attention(model) as trace:
            answer = model(**given).logits
    torch.testing.assert_close(answer, plain, atol=1e-5, rtol=1e-5)
    shapes = {name: tuple(layers[0].heads.shape) for name, layers in trace.layers.streams.items()}
    assert shapes == {"encoder": (2, 4, 12, 12), "decoder": (2, 4, 5, 5), "decoder.cross_attention": (2, 4, 5, 12)}
    assert len(trace.layers.of_stream("decoder").attentions) == 2
    assert attention_rollout(trace.layers.of_stream("encoder").fused()).shape == (2, 12, 12)
    with pytest.raises(OptionError, match=r"Unknown stream of tokens 'decodr'.*decoder\.cross_attention"):
        trace.layers.of_stream("decodr")
    with pytest.raises(UnsupportedModelError, match=r"The input of T5ForConditionalGeneration is text.*explain_text"):
        assert trace.layout


def test_the_streams_of_a_model_that_sees_and_reads_are_distinguished():
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**GROUPED),
        image_token_index=49,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[1, 5, *[49] * 16, 6, 7]])
    given = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 32, 32)}
    with torch.no_grad():
        plain = model(**given).logits
        with record_attention(model) as trace:
            answer = model(**given).logits
    torch.testing.assert_close(answer, plain, atol=1e-5, rtol=1e-5)
    sizes = {name: tuple(layers[0].heads.shape[-2:]) for name, layers in trace.layers.streams.items()}
    assert list(sizes.values()) == [(17, 17), (20, 20)]
    assert ["vision" in name for name in sizes] == [True, False]
    row = attention_rollout(trace.layers.of_stream(list(sizes)[1]).fused(), causal="receptive_field")[0, -1]
    assert row.shape == (20,) and row.sum() == pytest.approx(1)


def test_flash_attention_is_switched_and_static_caches_are_refused_by_name():
    model = built("LlamaForCausalLM")
    flash = copy.deepcopy(model)
    flash.config._attn_implementation = "flash_attention_2"
    with record_attention(flash) as trace, torch.no_grad():
        flash(**texts("left"))
    assert trace.attentions and flash.config._attn_implementation == "flash_attention_2"
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(UnsupportedModelError, match="StaticCache.*DynamicCache"):
        with record_attention(model), torch.no_grad():
            model(**texts("left"), **cached(model, cache))
