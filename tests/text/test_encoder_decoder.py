"""Attribution of encoder–decoder models to their source, against sums written out slowly."""

from functools import lru_cache

import networkx
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests import references
from tests.text.test_generation import joined
from tests.text.test_image_tokens import box_of
from tests.text.test_reading import wordpiece_tokenizer
from vitflow.errors import ModelError, OptionError, UnsupportedModelError
from vitflow.text import Generation, ImageTokens, explain_generation

transformers = pytest.importorskip("transformers")

WORDS, NEW, SOURCE = 50, 4, torch.tensor([[7, 12, 31, 8, 44, 3]])
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
RAW = {"causal": "raw"}


def t5(**changed: object) -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
    config = transformers.T5Config(**sizes, num_decoder_layers=2, decoder_start_token_id=0, **changed)
    return attentive(transformers.T5ForConditionalGeneration(config))


def bart() -> nn.Module:
    halves = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in _HALF.items()}
    config = transformers.BartConfig(vocab_size=WORDS, d_model=32, max_position_embeddings=40, **halves)
    return attentive(transformers.BartForConditionalGeneration(config))


_HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}


def captioner() -> nn.Module:
    vit = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8)
    gpt = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=40)
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vit, gpt)
    model = transformers.VisionEncoderDecoderModel(config)
    model.generation_config.update(decoder_start_token_id=1, pad_token_id=0, eos_token_id=2)
    return attentive(model)


def attentive(model: nn.Module) -> nn.Module:
    """A model whose attention is far from even, and that shows it."""
    generator = torch.Generator().manual_seed(3)
    for name, weights in model.named_parameters():
        if weights.ndim == 2 and "embed" not in name and "shared" not in name:
            weights.data = torch.randn(weights.shape, generator=generator) / weights.shape[1] ** 0.5 * 1.5
    model.set_attn_implementation("eager")
    return model.eval()


MODELS = {"t5": t5, "bart": bart, "captioner": captioner}


def source_of(name: str) -> dict[str, torch.Tensor]:
    if name == "captioner":
        return {"pixel_values": torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    return {"input_ids": SOURCE}


def written(model: nn.Module, given: object, **options: object) -> Generation:
    options = {"min_new_tokens": NEW, "max_new_tokens": NEW, "do_sample": False, **options}
    return explain_generation(model, given, **options)


def attentions(model: nn.Module, given: dict[str, torch.Tensor], actual: Generation) -> tuple:
    """The model's own word on its attention, in one pass over the finished text, and its logits."""
    ids = torch.tensor([decoder_ids(model, actual)[:-1]])
    output = model(**given, decoder_input_ids=ids, output_attentions=True, use_cache=False)
    return output.encoder_attentions, output.decoder_attentions, output.cross_attentions, output.logits


def decoder_ids(model: nn.Module, actual: Generation) -> tuple[int, ...]:
    return (actual.prompt_tokens.ids[-1], *actual.generated_tokens.ids)


def heads_mean(layers: tuple) -> list[np.ndarray]:
    return [layer[0].detach().double().numpy().mean(axis=0) for layer in layers]


def literal(encoder: list, decoder: list, crossing: list, alpha: float = 0.5) -> np.ndarray:
    """Σ_l (α Â_L) ⋯ (α Â_{l+1}) · (1 − α) C_l · E, and what stays among the decoder's tokens: [n, m + n, layers]."""
    below = np.eye(len(encoder[0]))
    for layer in encoder:
        below = references.residual(layer, alpha) @ below
    entry = [references.residual(layer, alpha) for layer in decoder]
    actual = []
    for top in range(1, len(entry) + 1):
        source = np.zeros((len(entry[0]), len(below)))
        for layer in range(top):
            above = np.eye(len(entry[0]))
            for higher in range(layer + 1, top):
                above = alpha * entry[higher] @ above
            source += above @ ((1 - alpha) * crossing[layer]) @ below
        rest = np.eye(len(entry[0]))
        for layer in range(top):
            rest = alpha * entry[layer] @ rest
        actual.append(np.concatenate([source, rest], axis=1))
    return np.stack(actual, axis=-1)


@pytest.mark.parametrize("name", MODELS)
def test_rollout_is_the_sum_over_layers_with_cache_and_without(name):
    model, given = MODELS[name](), source_of(name)
    actual = written(model, given, preset="paper")
    plain = written(model, given, preset="paper", use_cache=False)
    encoder, decoder, crossing, _ = attentions(model, given, actual)
    expected = literal(heads_mean(encoder), heads_mean(decoder), heads_mean(crossing))
    m = encoder[0].shape[-1]
    assert actual.prompt_tokens.length == m + 1 and not actual.prompt_tokens.strings[0].isspace()
    assert actual.values.shape == (NEW, m + 1, 2) and actual.among_generated.shape == (NEW, NEW, 2)
    np.testing.assert_allclose(joined(actual), expected, atol=2e-6)
    np.testing.assert_allclose(joined(plain), expected, atol=2e-6)
    np.testing.assert_allclose(joined(actual).sum(axis=1), 1, atol=1e-5)
    assert np.ptp(actual.values[..., -1], axis=1).max() > 0.02  # it is not even


@pytest.mark.parametrize("name", MODELS)
def test_relative_to_the_receptive_field_it_is_divided_by_even_attention(name):
    model, given = MODELS[name](), source_of(name)
    actual = written(model, given)
    assert actual.options["causal"] == "receptive_field" and actual.options["value_weighted"] is False
    encoder, decoder, crossing, _ = attentions(model, given, actual)
    m, n = encoder[0].shape[-1], decoder[0].shape[-1]
    raw = literal(heads_mean(encoder), heads_mean(decoder), heads_mean(crossing))
    back = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    even = literal([np.full((m, m), 1 / m)] * len(encoder), [back] * 2, [np.full((n, m), 1 / m)] * 2)
    for row in range(n):
        for layer in range(2):
            quotient = [raw[row, k, layer] / even[row, k, layer] if even[row, k, layer] else 0 for k in range(m + n)]
            quotient[m + row] = 0.0
            np.testing.assert_allclose(joined(actual)[row, :, layer], np.array(quotient) / sum(quotient), atol=5e-6)
            assert actual.self_share[row, layer] == pytest.approx(raw[row, m + row, layer], abs=2e-6)


@pytest.mark.parametrize("name", MODELS)
def test_gae_follows_the_rules_of_the_publication(name):
    model, given = MODELS[name](), source_of(name)
    actual = written(model, given, method="gae", preset="paper")
    encoder, decoder, crossing, logits = attentions(model, given, actual)
    everything = [*encoder, *decoder, *crossing]

    def normalised(relevance: np.ndarray) -> np.ndarray:
        added = relevance - np.eye(len(relevance))
        sums = added.sum(axis=1, keepdims=True)
        return np.eye(len(relevance)) + np.divide(added, sums, out=np.zeros_like(added), where=sums > 0)

    for place, token in enumerate(actual.generated_tokens.ids):
        gradients = torch.autograd.grad(logits[0, place, token], everything, retain_graph=True)
        weights = [
            (layer * gradient).clamp_min(0)[0].mean(dim=0).detach().double().numpy()
            for layer, gradient in zip(everything, gradients, strict=True)
        ]
        source = np.eye(weights[0].shape[0])
        for layer in weights[: len(encoder)]:
            source = source + layer @ source
        entry, across, rows = np.eye(NEW), np.zeros((NEW, len(source))), []
        for among, over in zip(weights[len(encoder) : -2], weights[-2:], strict=True):
            entry, across = entry + among @ entry, across + among @ across
            across = across + normalised(entry).T @ over @ normalised(source)
            rows.append(np.concatenate([across[place], entry[place]]))
        np.testing.assert_allclose(joined(actual)[place].T, rows, rtol=2e-4, atol=2e-6)


def test_raw_attention_is_that_to_the_source_alone():
    model = t5()
    actual = written(model, SOURCE, method="attention", preset="paper")
    *_, crossing, _ = attentions(model, {"input_ids": SOURCE}, actual)
    np.testing.assert_allclose(actual.values[:, :6].transpose(2, 0, 1), heads_mean(crossing), atol=2e-6)
    assert not actual.values[:, 6:].any() and not actual.among_generated.any()


def test_flow_is_the_greatest_through_the_joint_graph():
    model = t5()
    encoder, decoder, crossing, _ = attentions(model, {"input_ids": SOURCE}, written(model, SOURCE))
    encoder, decoder, crossing = (heads_mean(one) for one in (encoder, decoder, crossing))
    m, n = len(encoder[0]), len(decoder[0])
    one = joined(written(model, SOURCE, method="flow", layers=1, below="none", value_weighted=False, **RAW))
    for row in range(n):  # one layer of the decoder: to the source nothing stands in the way
        entry = references.residual(decoder[1], 0.5)[row]
        flows = np.concatenate([0.5 * crossing[1][row], np.minimum(0.5, entry)])
        np.testing.assert_allclose(one[row, :, 1], flows / flows.sum(), atol=2e-6)
    below = joined(written(model, SOURCE, method="flow", layers=1, below="rollout", value_weighted=False, **RAW))
    lower = literal(encoder, decoder[:1], crossing[:1])[..., 0]
    rolled = np.eye(m)
    for layer in encoder:
        rolled = references.residual(layer, 0.5) @ rolled
    np.testing.assert_allclose(below[..., 1], one[..., 1] @ np.block([[rolled, np.zeros((m, n))], [lower]]), atol=2e-6)
    everything = joined(written(model, SOURCE, method="flow", preset="paper"))
    graph = networkx.DiGraph()

    def edges(step: int, matrix: np.ndarray, above: int, beneath: int) -> None:
        for i, j in zip(*matrix.nonzero(), strict=True):
            graph.add_edge((step + 1, above + i), (step, beneath + j), capacity=float(matrix[i, j]))

    for step, layer in enumerate(encoder):
        edges(step, references.residual(layer, 0.5), 0, 0)
        edges(step, np.eye(n), m, m)
    for number, (among, across) in enumerate(zip(decoder, crossing, strict=True)):
        step = len(encoder) + 2 * number
        for above in (step, step + 1):
            edges(above, np.eye(m), 0, 0)
        edges(step, references.residual(among, 0.5), m, m)
        edges(step + 1, 0.5 * across, m, 0)
        edges(step + 1, 0.5 * np.eye(n), m, m)
    top = len(encoder) + 4
    for row in (0, n - 1):
        solver = networkx.algorithms.flow.shortest_augmenting_path
        flows = [
            networkx.maximum_flow_value(graph, (top, m + row), (0, k), flow_func=solver) for k in range(m + row + 1)
        ]
        np.testing.assert_allclose(everything[row, : m + row + 1, 1], np.array(flows) / sum(flows), atol=5e-6)


def test_a_padded_source_is_as_without_its_padding():
    model, words = t5(), wordpiece_tokenizer()
    options = {"tokenizer": words, "max_new_tokens": 5, "do_sample": False}
    padded = words("the key", padding="max_length", max_length=9, return_tensors="pt")
    assert not padded["attention_mask"].all()
    for method in ("rollout", "gae"):
        actual = explain_generation(model, padded, method=method, **options)
        alone = explain_generation(model, "the key", method=method, **options)
        assert actual.prompt_tokens == alone.prompt_tokens and actual.generated_tokens == alone.generated_tokens
        np.testing.assert_array_equal(actual.values, alone.values)
    with torch.no_grad():
        ids = model.generate(**{k: padded[k] for k in ("input_ids", "attention_mask")}, max_new_tokens=5)[0].tolist()
    assert tuple(ids[1:]) == actual.generated_tokens.ids


def test_a_beginning_of_the_decoder_belongs_to_the_prompt():
    model = t5()
    actual = written(model, SOURCE, decoder_input_ids=torch.tensor([[0, 9, 11]]))
    assert actual.prompt_tokens.ids == (*SOURCE[0].tolist(), 0, 9, 11) and actual.values.shape == (NEW, 9, 2)
    assert actual.self_share.shape == (NEW, 2)
    assert not actual.values[0, 8].any()  # the first is written at the last of them


def photograph(size: tuple[int, int] = (48, 96)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8))


def prepares(crop: bool = False) -> object:
    if not crop:
        return transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    sides = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}}
    return transformers.CLIPImageProcessor(**sides, do_center_crop=True)


@lru_cache
def seeing() -> nn.Module:
    """One captioner for tests that compare what it wrote."""
    return captioner()


def adjacent(image: object = None, **options: object) -> Generation:
    options = {"image": photograph() if image is None else image, "processor": prepares(), **options}
    return written(seeing(), options.pop("inputs", None), **options)


@pytest.mark.parametrize("method", ["rollout", "attention", "flow", "gae"])
def test_a_word_has_its_map_on_the_image_that_the_encoder_reads(method):
    actual = adjacent(method=method)
    given = prepares()(images=[photograph()], return_tensors="pt")
    plain = written(seeing(), dict(given), method=method)
    np.testing.assert_array_equal(actual.values, plain.values)
    saliency = actual.image(2)
    row = joined(actual)[2, :, -1]
    np.testing.assert_allclose(saliency.grid.flatten(), row[1:17])  # behind the class token
    assert saliency.facts["on_image"] == pytest.approx(row[1:17].sum() / row.sum(), rel=1e-5)
    assert saliency.image.shape == (48, 96, 3)
    with pytest.raises(OptionError, match="Expected an image in the prompt, got none: pass image="):
        plain.image(2)
    again = written(seeing(), given["pixel_values"], method=method)
    np.testing.assert_array_equal(again.values, plain.values)


@pytest.mark.parametrize("crop", [False, True])
def test_each_patch_of_the_encoder_lies_where_its_token_sees(crop):
    processor, model = prepares(crop), seeing()
    part = adjacent(processor=processor).images.parts[0]
    assert (part.rows, part.cols, part.positions) == (4, 4, tuple(range(1, 17)))

    def tokens(image: np.ndarray) -> torch.Tensor:
        return model.encoder.embeddings(processor(images=[image], return_tensors="pt")["pixel_values"])[0]

    dark = np.zeros((48, 96, 3), np.uint8)
    for number in (0, 5, 10, 15):
        left, top, right, bottom = box_of(part, *divmod(number, 4))
        lit, (y, x) = dark.copy(), (int((top + bottom) / 2), int((left + right) / 2))
        lit[y - 1 : y + 2, x - 1 : x + 2] = 255
        moved = (tokens(lit) - tokens(dark)).abs().sum(dim=-1)
        assert int(moved.argmax()) == part.positions[number]


def test_a_layout_places_the_patches_of_an_unknown_encoder_and_must_fit(monkeypatch):
    expected = adjacent()

    def unknown(*_: object) -> None:
        raise UnsupportedModelError("unknown")

    monkeypatch.setattr("vitflow.text.prompts.read_layout", unknown)
    actual = adjacent(layout=ImageTokens(range(1, 17), 4, 4))
    assert actual.prompt_tokens == expected.prompt_tokens
    np.testing.assert_array_equal(actual.image(2).grid, expected.image(2).grid)
    for positions in (range(2, 18), range(-1, 15)):  # the first token of the decoder, and the last of the source
        with pytest.raises(OptionError, match="in a prompt of 17 tokens, got 1 with positions up to"):
            adjacent(layout=ImageTokens(positions, 4, 4))


def test_a_beginning_in_words_and_images_of_any_size():
    words = wordpiece_tokenizer()
    actual = adjacent(inputs="the key", tokenizer=words)
    begin = words("the key", add_special_tokens=False)["input_ids"]
    assert actual.prompt_tokens.ids[-len(begin) - 1 :] == (1, *begin)
    saliency = adjacent(Image.new("RGB", (1, 1))).image(0)
    assert saliency.image.shape == (1, 1, 3) and np.isfinite(saliency.heatmap).all()
    assert adjacent([photograph()]).image(0).grid.shape == (4, 4)


def test_an_encoder_by_its_folder_brings_what_prepares_its_images(tmp_path):
    seeing().save_pretrained(tmp_path)
    wordpiece_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="Expected a.*processor saved with the model .*save_pretrained.* pass processor="
    ):
        explain_generation(tmp_path, image=photograph(), max_new_tokens=2)
    prepares().save_pretrained(tmp_path)
    actual = explain_generation(tmp_path, image=photograph(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    np.testing.assert_allclose(actual.image(2).grid, adjacent().image(2).grid, atol=1e-6)
