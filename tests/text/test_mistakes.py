"""Mistakes in texts, prompts, images and options: an error with the remedy, before any text is generated."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from tokenizers import processors

from tests.models.vision_language import family
from tests.recording.test_languages import SIZES, built, cached, texts
from tests.text.test_encoder_decoder import SOURCE, WORDS, bart, prepares, seeing, source_of, t5
from tests.text.test_generation import prompt
from tests.text.test_images import photograph, plainly
from tests.text.test_reading import TEXT, reads, wordpiece_tokenizer
from tests.text.test_videos import FRAMES, explained, with_inputs
from vitflow.errors import ModelError, OptionError, ShapeError, UnsupportedModelError, VitflowError
from vitflow.text import ImageTokens, Words, explain_generation, explain_text

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")


def read(text: object = TEXT, name: str = "BertForMaskedLM", **options: object) -> object:
    return explain_text(text, **{"model": reads(name), "tokenizer": wordpiece_tokenizer(), **options})


def gpt(given: object = None, **options: object) -> object:
    return explain_generation(built("GPT2LMHeadModel"), prompt() if given is None else given, **options)


def seen(name: str = "llava", given: object = "what is on", **options: object) -> object:
    options = {"image": photograph(), "processor": family(name).processor, "max_new_tokens": 1, **options}
    return explain_generation(family(name).model, given, **options)


def encoded(given: object = None, *, model: object = None, **options: object) -> object:
    return explain_generation(seeing() if model is None else model, given, **{"max_new_tokens": 2, **options})


def longformer() -> object:
    config = {**SIZES, "vocab_size": 15, "max_position_embeddings": 64, "attention_window": 4, "pad_token_id": 0}
    return transformers.LongformerForMaskedLM(transformers.LongformerConfig(**config)).eval()


def funnel() -> object:
    """A model of two streams, whose values have no output projection either: that would be the wrong remedy."""
    sizes = {"block_sizes": [1, 1], "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 48}
    return transformers.FunnelForMaskedLM(transformers.FunnelConfig(vocab_size=15, **sizes)).eval()


def windowed() -> object:
    swin = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "image_size": 32, "patch_size": 4, "window_size": 4}
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        transformers.SwinConfig(**swin), transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4)
    )
    model = transformers.VisionEncoderDecoderModel(config).eval()
    model.generation_config.update(decoder_start_token_id=1, pad_token_id=0)
    return model


def with_filled_cache() -> object:
    model = built("GPT2LMHeadModel")
    cache = cached(model, transformers.DynamicCache(config=model.config))
    with torch.no_grad():
        model(prompt(), **cache)
    return explain_generation(model, prompt(), **cache)


def wordless() -> object:
    """A tokenizer that adds no special tokens."""
    tokenizer = wordpiece_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    return tokenizer


@lru_cache
def two_images() -> object:
    one = family("qwen2_vl")
    return seen("qwen2_vl", f"{one.prompt} {one.prompt} what", image=[photograph(), photograph(1)], method="rollout")


def alone() -> object:
    """A generation from inputs that the user's processor has made, so that the places of patches are unknown."""
    one = family("qwen2_vl")
    return explain_generation(one.model, with_inputs(one, FRAMES), tokenizer=one.processor.tokenizer, max_new_tokens=1)


def image_processor() -> object:
    return family("llava").processor.image_processor


AN_IMAGE = {"image": photograph(), "processor": prepares()}
ONE_PROMPT = "the prompt is one text"
MISTAKES = [
    # a text that is read
    (lambda: read(token="the"), OptionError, "more than once, at tokens 4, 9"),
    (lambda: read(token="lock"), OptionError, r"choose one of 0 '\[CLS\]', 1 'The', 2 'key'"),
    (lambda: read(token=13), OptionError, "from 0 to 12"),
    (lambda: read("The [MASK] is on [MASK]"), OptionError, r"2 mask tokens.*\[2, 5\]"),
    (lambda: read(method="gae", target="cabinets"), OptionError, "single token"),
    (lambda: read(method="gae", target=99999), OptionError, "from 0 to 14, got 99999"),
    (lambda: read(method="gae", model=transformers.BertModel(reads().config).eval()), OptionError, "ends in features"),
    (lambda: read(method="flow", layers=3), OptionError, "from 1 to 2, .* got 3"),
    (lambda: read(" "), OptionError, "at least one token"),
    (lambda: read("the key " * 40), OptionError, "at most 64 tokens, .* got 82"),
    (lambda: read(model=built("BertForMaskedLM", vocab_size=12)), OptionError, "below 12, got 14: the tokenizer"),
    (lambda: read(tokenizer=None), ModelError, "pass tokenizer="),
    (lambda: read(model="nobody/nothing-here"), ModelError, "hub id or a transformers folder"),
    (lambda: read(model=t5()), UnsupportedModelError, r"model\.get_encoder\(\)"),
    (lambda: read(model=longformer(), value_weighted=False), UnsupportedModelError, "No attention .* Longformer"),
    (lambda: read(model=funnel()), UnsupportedModelError, "several token streams"),
    (lambda: Words(("a",), (1, 2), (False,)), ShapeError, "same length"),
    # a text that is generated
    (lambda: gpt(texts("right")), OptionError, "one prompt, got 2"),
    (lambda: gpt("", tokenizer=wordless()), OptionError, "at least one token"),
    (lambda: gpt("caf\udce9", tokenizer=wordpiece_tokenizer()), OptionError, r"UTF-8.*caf.*xe9"),
    (lambda: gpt({"input_ids": prompt(), "attention_mask": torch.ones(1, 4)}), OptionError, r"\(1, 9\), got \(1, 4\)"),
    (lambda: gpt(torch.tensor([[5, 77]]), max_new_tokens=2), OptionError, "below 50, got 77"),
    (lambda: gpt(max_new_tokens=10**9), OptionError, "at most 56 new tokens after 9"),
    (lambda: gpt(num_beams=3), OptionError, "beam_search.*num_beams=1"),
    (lambda: gpt(cache_implementation="static"), OptionError, "cache_implementation='static'"),
    (lambda: gpt(num_return_sequences=2, do_sample=True), OptionError, "num_return_sequences"),
    (lambda: gpt(stop_strings=["a"]), ModelError, "pass tokenizer="),
    (with_filled_cache, OptionError, "cache with 9 tokens"),
    (lambda: explain_generation(reads(), prompt()), UnsupportedModelError, "BertForMaskedLM.*explain_text"),
    # images and videos in a prompt
    (lambda: seen(image=[]), OptionError, "empty list"),
    (lambda: seen(given=with_inputs(family("qwen2_vl"), FRAMES)), OptionError, ONE_PROMPT),
    (lambda: seen(image=None, through_tower=True), OptionError, "require image"),
    (lambda: seen(image=None, blank=True), OptionError, "requires an image"),
    (lambda: seen(processor=image_processor()), OptionError, "images and text .*LlavaImageProc"),
    (lambda: seen(processor=None), ModelError, "not loaded by name: pass processor="),
    (lambda: seen(max_new_tokens=2000), OptionError, "positions for 1024, got 2000"),
    (lambda: seen("qwen2_5_vl", through_tower=True), UnsupportedModelError, "window attention: omit through_tower"),
    (lambda: seen("llava_next", through_tower=True), UnsupportedModelError, "5 inputs for 2 token grids"),
    (lambda: alone().image(0), OptionError, "pass image="),
    (lambda: plainly("llava").image("square"), OptionError, "'square' is not a word"),
    (lambda: two_images().image(0), OptionError, "2 images: pass image=0"),
    (lambda: seen(video=FRAMES), OptionError, "not supported with video"),
    (lambda: seen(frames=4), OptionError, "frames requires video"),
    (lambda: seen(image=None, video=FRAMES), UnsupportedModelError, "Pass some frames as images"),
    (lambda: seen("internvl", image=None, video=FRAMES), UnsupportedModelError, "no video token"),
    (lambda: seen("qwen2_vl", image=None, video=torch.zeros(2, 3, 8, 8)), OptionError, "got a tensor"),
    (lambda: explained().image(0), OptionError, "use generation.clip"),
    (lambda: plainly("llava").clip(0), OptionError, "got images"),
    (lambda: alone().clip(0), OptionError, "got none: pass video="),
    (lambda: ImageTokens([1, 2, 3, 3], 2, 2), ShapeError, "2 × 2 distinct .* 3 of them distinct"),
    # an encoder and a decoder
    (lambda: encoded(SOURCE, model=t5(), start_layer=4), OptionError, "start_layer"),
    (lambda: encoded(SOURCE, model=bart(), max_new_tokens=41), OptionError, "at most 40 new tokens after 1"),
    (lambda: encoded(model=t5()), OptionError, "a text, or tokenizer output"),
    (lambda: encoded("the key", model=t5(), **AN_IMAGE), UnsupportedModelError, "T5.* no image token"),
    (lambda: encoded(source_of("captioner"), model=windowed()), UnsupportedModelError, "4 matrices of 16 × 16"),
    (lambda: encoded(video=[photograph()], processor=prepares()), OptionError, "omit video"),
    (lambda: encoded(through_tower=True, **AN_IMAGE), OptionError, "through_tower"),
    (lambda: encoded(**{**AN_IMAGE, "image": [photograph(), photograph()]}), OptionError, "one image .*, got 2"),
    (lambda: encoded(image=photograph()), ModelError, "not loaded"),
]


@pytest.mark.parametrize(("call", "error", "words"), MISTAKES)
def test_a_mistake_is_reported_with_its_remedy(call, error, words):
    with pytest.raises(error, match=words) as reported:
        call()
    assert isinstance(reported.value, VitflowError)
    assert not torch.overrides._get_current_function_mode_stack()  # what watched the pass watches no other one


def test_value_weighting_that_does_not_apply_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr("vitflow.recording.projections.output_projection", lambda *_: None)
    with pytest.raises(UnsupportedModelError, match="Use value_weighted=False"):
        read(value_weighted="output")


def test_the_number_of_images_and_the_family_must_fit():
    one = family("llava")
    from vitflow.text.image_tokens import image_tokens

    inputs = {**one.processor(images=photograph(), text=f"{one.prompt} what", return_tensors="pt")}
    sizes = [np.shape(photograph())[:2]]
    with pytest.raises(UnsupportedModelError, match="image tokens of gpt2 .*known families: llava"):
        image_tokens(transformers.GPT2Config(), one.processor, inputs, sizes)
    with pytest.raises(UnsupportedModelError, match="72 tokens of 2 images .* got 36"):
        image_tokens(one.model.config, one.processor, {**inputs, "pixel_values": torch.zeros(2, 3, 24, 24)}, sizes * 2)
