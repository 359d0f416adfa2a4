"""Attribution of generated words to an image: rows against one pass written out, maps at the right place."""

import copy
import json
import pickle
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests import references
from tests.models.vision_language import NAMES, Family, family
from tests.text.test_generation import joined
from tests.text.test_image_tokens import box_of
from vitflow.errors import ModelError, OptionError, ShapeError, UnsupportedModelError
from vitflow.images.geometry import Placement
from vitflow.images.preprocessing import merge_maps, upsample
from vitflow.registry.method_table import get_method
from vitflow.text import Generation, ImageTokens, Words, explain_generation
from vitflow.text.method_table import TEXT_METHODS
from vitflow.text.prompts import tower_rows

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

ANSWER = ["a", "red", "heart"]


def photograph(seed: int = 0, size: tuple[int, int] = (40, 64)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8))


def saying(one: Family, answer: list[str]) -> dict[str, object]:
    """Options of generate that make a model write these words."""
    numbers = one.processor.tokenizer.convert_tokens_to_ids(answer)
    given: dict[int, int] = {}

    def allowed(_batch: int, ids: Tensor) -> list[int]:
        start = given.setdefault(0, len(ids))
        return [numbers[len(ids) - start]]

    return {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": len(answer), "do_sample": False}


def written(name: str = "llava", image: object = None, text: str = "what is on", **options: object) -> Generation:
    one = family(name)
    options = {"image": photograph() if image is None else image, "method": "rollout", **saying(one, ANSWER), **options}
    return explain_generation(one.model, f"{one.prompt} {text}", processor=one.processor, **options)


@lru_cache
def plainly(name: str) -> Generation:
    """Return the default generation of a family, computed once."""
    return written(name)


def one_pass(one: Family, actual: Generation, **options: object) -> object:
    """The finished text in one pass by eager attention, with what stands beside it: kinds of tokens go on."""
    inputs = dict(one.processor(images=photograph(), text=f"{one.prompt} what is on", return_tensors="pt"))
    inputs.pop("labels", None)
    after = torch.tensor([actual.generated_tokens.ids[:-1]])
    for kind in ("token_type_ids", "mm_token_type_ids"):
        if kind in inputs:
            suffix = torch.full_like(after, int("PaliGemma" in type(one.model).__name__))
            inputs[kind] = torch.cat([inputs[kind], suffix], dim=1)
    ids = torch.cat([inputs["input_ids"], after], dim=1)
    model = copy.deepcopy(one.model)
    model.set_attn_implementation("eager")
    return model(**{**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, **options)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_finished_text_and_the_answer_is_the_models(name):
    one, actual = family(name), plainly(name)
    inputs = one.processor(images=photograph(), text=f"{one.prompt} what is on", return_tensors="pt")
    inputs.pop("labels", None)
    with torch.no_grad():
        plain = one.model.generate(**inputs, **saying(one, ANSWER))
        output = one_pass(one, actual, output_attentions=True)
    assert (actual.prompt_tokens + actual.generated_tokens).ids == tuple(plain[0].tolist())
    np.testing.assert_allclose(joined(actual).sum(axis=1), 1, atol=1e-6)
    m, raw, even, rows = actual.prompt_tokens.length, [], [], []
    for layer in output.attentions:
        heads = layer[0].double().numpy()
        seen = (heads > 0).any(axis=0)
        for product, given in ((raw, heads), (even, (seen / seen.sum(axis=1, keepdims=True))[None])):
            below = product[-1] if product else np.eye(len(seen))
            product.append(references.among_visible([given], seen, 0.0) @ below)
        rows.append(references.relative(raw[-1], even[-1]))
    both_ways = any(row[: m - 1].any() for row in np.triu(raw[-1], 1))
    assert both_ways == (name in ("paligemma", "gemma3"))
    np.testing.assert_allclose(joined(actual), np.stack(rows, axis=-1)[m - 1 :], atol=1e-5)
    last = written(name, method="attention")
    expected = np.stack([layer[0].mean(dim=0).numpy() for layer in output.attentions], axis=-1)[m - 1 :]
    np.testing.assert_allclose(joined(last), expected, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_weight_of_a_token_lies_where_its_patch_does(name):
    actual = plainly(name)
    for number in np.random.default_rng(0).choice(len(actual.images.parts), 3):
        part = actual.images.parts[number]
        place = int(np.random.default_rng(number).integers(len(part.positions)))
        left, top, right, bottom = box_of(part, *divmod(place, part.cols))
        values = np.zeros_like(actual.values)
        values[:, part.positions[place]] = 1
        lit = replace(actual, values=values).image("heart")
        heatmap = np.nan_to_num(upsample(lit.grid, lit.placement, interpolation="nearest"))
        if left < 0 or top < 0 or right > 64 or bottom > 40:
            continue  # partly padding
        y, x = np.argwhere(heatmap == heatmap.max()).mean(axis=0) + 0.5
        step = max(64 / lit.grid.shape[1], 40 / lit.grid.shape[0])
        assert abs(x - (left + right) / 2) < step and abs(y - (top + bottom) / 2) < step
        if lit.placement.sees_everything:
            assert lit.grid.sum() == pytest.approx(1, abs=1e-5)


def test_gae_and_the_logit_lens_are_those_of_the_finished_text():
    one, gae = family("llava"), written(method="gae", preset="paper")
    output = one_pass(one, gae, output_attentions=True, output_hidden_states=True)
    m, place = gae.prompt_tokens.length, 1
    scores = output.logits[0, m - 1 + place, gae.generated_tokens.ids[place]]
    gradients = torch.autograd.grad(scores, output.attentions, retain_graph=True)
    product = np.eye(output.logits.shape[1])
    for heads, gradient in zip(output.attentions, gradients, strict=True):
        product = product + (heads * gradient).clamp_min(0)[0].mean(dim=0).detach().double().numpy() @ product
    np.testing.assert_allclose(joined(gae)[place, :, -1], product[m - 1 + place], atol=1e-4, rtol=1e-4)
    lens = written(method="logit_lens")
    norm = one.model.model.language_model.norm
    for layer, state in ((0, norm(output.hidden_states[1])), (1, output.hidden_states[2])):
        words = one.model.lm_head.weight[list(lens.generated_tokens.ids)]
        expected = (words @ state[0].T).clamp_min(0).detach().double().numpy()
        seen = np.tril(np.ones_like(expected), m - 2)  # among the tokens before the one that writes
        expected = expected * seen / (expected * seen).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(joined(lens)[:, :, layer], expected, atol=1e-5)
    assert lens.image("heart").class_specific


def test_flow_is_that_of_the_layers():
    flow = written(method="flow", layers=1, below="none", causal="raw")
    attention = written(method="attention")
    mixed = attention.values[:, :, -1] / 2
    mixed[0, -1] += 0.5
    np.testing.assert_allclose(flow.values[:, :, -1], mixed, atol=1e-5)


def test_a_word_of_several_pieces_speaks_with_all_of_them():
    actual = plainly("llava")
    pieces = replace(actual, generated_tokens=Words((" a", " he", "art"), (9, 10, 11), (False,) * 3))
    expected = (actual.image(1).grid.astype(float) + actual.image(2).grid) / 2
    np.testing.assert_allclose(pieces.image("heart").grid, expected, rtol=1e-6)
    assert pieces.image("heart").label == "heart" and actual.image(-1).label == "heart"


def test_the_map_is_reported_with_its_share_and_its_sinks():
    actual = plainly("llava")
    saliency = actual.image("heart")
    row = joined(actual)[2, :, -1]
    inside = row[list(actual.images.parts[0].positions)]
    assert saliency.facts["on_image"] == pytest.approx(inside.sum())
    assert saliency.facts["on_first_patch"] == pytest.approx(inside[0] / inside.sum(), rel=1e-5)
    middle = inside.reshape(6, 6)[1:-1, 1:-1].sum()
    assert saliency.facts["on_edges"] == pytest.approx(1 - middle / inside.sum(), rel=1e-5)
    np.testing.assert_allclose(saliency.grid.flatten(), inside)
    assert saliency.image.shape == (40, 64, 3) and saliency.facts["layer"] == 2
    np.testing.assert_allclose(actual.image("heart", layer=1).grid.flatten(), actual.values[2, 1:37, 0])
    json.dumps([actual.to_dict(), saliency.to_dict()])
    placement = Placement(**actual.to_dict()["images"][0]["placement"])  # the middle 24 of 38 columns
    assert placement.window == pytest.approx((7 * 64 / 38, 0, 31 * 64 / 38, 40))
    hidden = actual.shaded().hidden
    assert actual.shaded().summary.special is None
    assert [place for place, why in hidden.items() if why == "image patches"] == list(range(1, 37))


def test_tiles_and_the_whole_are_added_by_area():
    actual = plainly("internvl")
    *tiles, small = (actual.values[2, list(part.positions), -1].reshape(3, 3) for part in actual.images.parts)
    joined = np.block([tiles[:3], tiles[3:]])
    expected = joined + np.kron(small, np.ones((2, 3))) / 6
    np.testing.assert_allclose(actual.image("heart").grid, expected, atol=1e-6)


def test_maps_laid_together_hold_what_falls_into_each_cell():
    generator = np.random.default_rng(0)
    size = (60, 84)
    placements = [
        Placement(size, (30, 42), (0, 0), (30, 42)),
        Placement(size, size, (12, 24), (36, 48)),
        Placement(size, size, (-10, 6), (40, 40)),  # padded above
    ]
    grids = [generator.random((5, 6)), generator.random((6, 8)), generator.random((4, 5))]
    actual, placement = merge_maps(grids, placements)
    assert actual.shape == (10, 14) and placement.sees_everything
    canvas = np.zeros(size)
    for grid, place in zip(grids, placements, strict=True):
        left, top, right, bottom = (round(edge) for edge in place.window)
        height, width = (bottom - top) // grid.shape[0], (right - left) // grid.shape[1]
        spread = np.kron(grid, np.ones((height, width))) / (height * width)
        canvas[max(top, 0) : bottom, left:right] += spread[max(-top, 0) :]
    np.testing.assert_allclose(actual, canvas.reshape(10, 6, 14, 6).sum(axis=(1, 3)), rtol=1e-6)


@pytest.mark.parametrize("method", ["rollout", "logit_lens"])
def test_the_map_of_a_word_is_described_by_the_method_for_texts(method):
    """Also after pickling; the published attention of a decoder is masked, which is no departure."""
    preset = {"preset": "paper"} if method == "rollout" else {}
    saliency = pickle.loads(pickle.dumps(written(method=method, **preset).image("heart")))
    assert saliency.definition is TEXT_METHODS[method]
    assert saliency.to_dict()["departures_from_paper"] == ""
    with pytest.raises(OptionError, match="logit_lens"):
        get_method("logit_lens")


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen3_vl", "idefics3", "internvl", "paligemma", "gemma3"])
def test_down_to_the_patches_of_the_tower(name):
    one, actual = family(name), written(name, through_tower=True)
    shares = [rows.sum(axis=1) for rows in actual.images.tower]
    assert all((part <= 1 + 1e-5).all() and (part > 0.5).all() for part in shares)
    coarse = replace(actual, images=replace(actual.images, tower=None)).image("heart")
    fine = actual.image("heart")
    assert fine.options["through_tower"] and fine.grid.sum() <= coarse.grid.sum() + 1e-6
    inputs = one.processor(images=photograph(), text=f"{one.prompt} what", return_tensors="pt")
    # Where the layers mix next to nothing, a token holds the patches that it was made of.
    kept = tower_rows(one.model, inputs, actual.images.parts, residual=1 - 1e-7)
    for part, rows in zip(actual.images.parts, kept, strict=True):
        finer = round((rows.shape[1] / len(part.positions)) ** 0.5)
        entry = np.kron(np.eye(part.rows), np.ones(finer)), np.kron(np.eye(part.cols), np.ones(finer))
        np.testing.assert_allclose(rows, np.kron(*entry) / finer**2, atol=1e-5)


def test_the_towers_rollout_ends_where_its_features_are_taken():
    one = family("llava")
    inputs = one.processor(images=photograph(), text=f"{one.prompt} what", return_tensors="pt")
    tower = copy.deepcopy(one.model.model.vision_tower)
    tower.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = tower(inputs["pixel_values"], output_attentions=True).attentions
    product = np.eye(37)
    for layer in attentions[:-1]:  # vision_feature_layer is -2
        product = references.residual(layer[0].mean(dim=0).double().numpy(), 0.5) @ product
    part = ImageTokens(range(36), 6, 6)
    np.testing.assert_allclose(tower_rows(one.model, inputs, [part])[0], product[1:, 1:], atol=1e-6)


def test_a_prompt_without_its_image_token_is_given_one():
    one = family("llava")
    options = {"image": photograph(), "processor": one.processor}
    plain, reported = (
        explain_generation(one.model, text, **options, **saying(one, ANSWER)) for text in ("what is", "<image> what is")
    )
    assert plain.prompt_tokens == reported.prompt_tokens
    template = copy.deepcopy(one.processor)
    parts = "{% for part in messages[0].content %}{{ part.text or '<image>' }} {% endfor %}"
    template.chat_template = f"user {parts}assistant"
    requested = explain_generation(one.model, "what is", **{**options, "processor": template}, **saying(one, ANSWER))
    words = one.processor.tokenizer.convert_ids_to_tokens(requested.prompt_tokens.ids)
    assert words == ["user", *["<image>"] * 36, "what", "is", "assistant"]


def test_an_image_is_explained_by_gae_and_a_text_by_rollout():
    one = family("llava")
    options = {"processor": one.processor, **saying(one, ANSWER)}
    actual = explain_generation(one.model, "user <image> what is on", image=photograph(), **options)
    assert actual.method == "gae" and actual.image("heart").class_specific
    np.testing.assert_array_equal(actual.values, written(method="gae").values)
    tokenizer = {"tokenizer": one.processor.tokenizer, **saying(one, ANSWER)}
    assert explain_generation(one.model, "what is on", **tokenizer).method == "rollout"


def test_what_the_processor_has_made_has_rows_and_no_maps():
    one = family("llava")
    inputs = one.processor(images=photograph(), text="user <image> what is on", return_tensors="pt")
    given = {"method": "rollout", **saying(one, ANSWER)}
    actual = explain_generation(one.model, inputs, tokenizer=one.processor.tokenizer, **given)
    np.testing.assert_array_equal(actual.values, plainly("llava").values)


def test_a_layout_takes_the_place_of_an_unknown_one(monkeypatch):
    one = family("llava")
    expected = plainly("llava").image("heart")
    monkeypatch.setattr(one.model.config, "model_type", "seer", raising=False)
    with pytest.raises(UnsupportedModelError, match=r"image tokens of seer .* pass layout=ImageTokens\(positions"):
        written()
    entry = ImageTokens(range(1, 37), 6, 6)
    actual = written(layout=entry).image("heart")
    np.testing.assert_array_equal(actual.grid, expected.grid)
    assert actual.placement.sees_everything
    with pytest.raises(OptionError, match="in a prompt of 40 tokens, got 1 with positions up to 40"):
        written(layout=replace(entry, positions=range(5, 41)))
    with pytest.raises(ShapeError):
        replace(entry, rows=5)


def test_a_model_by_its_folder_brings_its_processor(tmp_path):
    one = family("llava")
    one.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Expected a processor .*saved with the model"):
        explain_generation(tmp_path, "user <image> what is on", image=photograph())
    one.processor.save_pretrained(tmp_path)
    path = tmp_path / "photograph.png"
    photograph().save(path)
    actual = explain_generation(
        tmp_path, "user <image> what is on", image=path, method="rollout", **saying(one, ANSWER)
    )
    saliency = actual.image("heart")
    np.testing.assert_allclose(saliency.grid, plainly("llava").image("heart").grid, atol=1e-6)
    assert saliency.source == "photograph.png"


def test_a_processor_that_brings_code_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "seer", "auto_map": {"AutoConfig": "code.Settings"}}')
    (tmp_path / "processor_config.json").write_text('{"auto_map": {"AutoProcessor": "code.Seer"}}')
    (tmp_path / "code.py").write_text("raise RuntimeError('this ran')")
    with pytest.raises(ModelError, match="requires custom Python code"):
        explain_generation(tmp_path, "user <image> what is on", image=photograph())


def test_models_that_mix_tokens_otherwise_are_refused_by_name():
    config = transformers.Lfm2Config(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    model: nn.Module = transformers.Lfm2ForCausalLM(config).eval()
    options = {"max_new_tokens": 2, "do_sample": False}
    for method in ("rollout", "flow", "gae"):
        with pytest.raises(UnsupportedModelError, match=f"convolutions over the text, which {method}, a product"):
            explain_generation(model, torch.tensor([[5, 6, 7]]), method=method, **options)
    actual = explain_generation(model, torch.tensor([[5, 6, 7]]), method="attention", **options)
    assert actual.values.shape[2] == 1


def test_models_that_attend_to_an_image_next_to_their_text_are_refused():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    blip = transformers.BlipForConditionalGeneration(
        transformers.BlipConfig(
            text_config={**small, "vocab_size": 40, "encoder_hidden_size": 16},
            vision_config={**small, "image_size": 16, "patch_size": 8},
        )
    ).eval()
    with pytest.raises(
        UnsupportedModelError, match="BlipForConditionalGeneration .*cross-attend to an image are not supported"
    ):
        explain_generation(blip, "what", image=photograph())
