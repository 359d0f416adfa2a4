"""Prompts: what a model of images and texts answers to them, against its own words and against code by hand."""

import time

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from torch import nn
from torch.nn.functional import normalize

from tests.pairs import DATA, KINDS, PROMPTS, Words, pair, photo, save_siglip
from tests.small import Custom
from vitflow import Contrast, Explainer, compare, evaluate, explain_folder, explore, load_model, prompts
from vitflow.cli import cli
from vitflow.demo import draw_image
from vitflow.errors import ModelError, OptionError, UnsupportedModelError
from vitflow.images.geometry import place
from vitflow.images.reading import write_image
from vitflow.models.pairs import pair_of, prompt_outputs
from vitflow.recording.recorder import record_attention
from vitflow.registry.method_table import get_method

OPTIONS = {"masks": 8, "occlusion_batch": 16}


def explainer(kind: str, texts=PROMPTS, **options) -> Explainer:
    if kind == "open_clip":
        pytest.importorskip("open_clip", reason="open_clip is not installed (extra clip)")
    crop = {"crop_mode": "patches"} if kind == "siglip2" else {}
    return Explainer(pair(kind), outputs=prompts(texts, processor=Words(), **options), data_config=DATA | crop)


@pytest.fixture(scope="module", params=KINDS)
def requested(request) -> Explainer:
    return explainer(request.param)


def its_custom(kind: str, pixels: torch.Tensor) -> torch.Tensor:
    """Return the model's logits for an image and the prompts, [1, prompts]."""
    model, texts = pair(kind), PROMPTS
    with torch.no_grad():
        if kind == "open_clip":
            image, text, scale = model(pixels, Words()(texts))[:3]
            return scale * image @ text.T
        read = Words()(texts, padding="longest" if kind == "clip" else "max_length")
        if kind != "clip":
            del read["attention_mask"]
        if kind == "siglip2":
            patches, rows, cols = cut(pixels)
            padded = torch.nn.functional.pad(patches, (0, 0, 0, 20 - patches.shape[1]))
            mask = (torch.arange(20) < patches.shape[1]).long()[None]
            shapes = torch.tensor([[rows, cols]])
            return model(pixel_values=padded, pixel_attention_mask=mask, spatial_shapes=shapes, **read).logits_per_image
        return model(pixel_values=pixels, **read).logits_per_image


def cut(pixels: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """An image as patches of 8 × 8 pixels, row by row, by hand."""
    rows, cols = pixels.shape[2] // 8, pixels.shape[3] // 8
    actual = [
        pixels[0, :, 8 * row : 8 * row + 8, 8 * col : 8 * col + 8].permute(1, 2, 0).reshape(-1)
        for row in range(rows)
        for col in range(cols)
    ]
    return torch.stack(actual)[None], rows, cols


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_model(kind):
    entry = explainer(kind)
    pixels = entry.pixels(photo())
    torch.testing.assert_close(entry.logits(pixels).detach(), its_custom(kind, pixels), rtol=1e-5, atol=1e-5)
    with torch.no_grad(), record_attention(entry.model, outputs=entry.outputs.raw_scores) as trace:
        entry.forward(pixels)
    torch.testing.assert_close(trace.logits, its_custom(kind, pixels), rtol=1e-5, atol=1e-5)
    assert trace.pooling == ("class token" if "clip" in kind else "attention pooling")
    assert (trace.layout.rows, trace.layout.cols) == ((3, 5) if kind == "siglip2" else (4, 4))


@pytest.fixture(scope="module")
def both():
    """CLIP asked by prompts, and the same as a module."""
    entry = explainer("clip", raw=True)
    model = pair("clip")
    with torch.no_grad():
        texts = normalize(model.get_text_features(**Words()(PROMPTS, padding="longest")).pooler_output, dim=1)
    classify = lambda self, pixels: normalize(self.tower(pixels), dim=-1) @ texts.T * self.scale  # noqa: E731
    module = Custom(classify, tower=entry.model, scale=float(model.logit_scale.detach().exp())).eval()
    return entry, Explainer(module, class_names=PROMPTS, data_config=DATA)


@pytest.mark.parametrize("method", ["rollout", "gae", "gradcam", "input_gradient", "occlusion", "sampling"])
def test_prompts_are_what_a_module_with_their_vectors_is(both, method):
    options = {name: value for name, value in OPTIONS.items() if get_method(method).accepts(name)}
    actual, expected = (one.explain(photo(), method=method, target="red", **options) for one in both)
    scale = max(1e-6, float(np.abs(expected.grid).max()))
    np.testing.assert_allclose(actual.grid / scale, expected.grid / scale, atol=2e-4)
    assert actual.score.value == pytest.approx(expected.score.value, rel=1e-4)
    assert actual.score.name == expected.score.name == "red"


def test_a_map_is_of_the_number_less_the_others(requested):
    pixels = requested.pixels(photo())
    numbers = requested.logits(pixels).detach()
    less = requested.outputs.against_rest().raw_scores(requested.forward(pixels)).detach()
    for one in range(3):
        others = [other for other in range(3) if other != one]
        torch.testing.assert_close(less[:, one], numbers[:, one] - numbers[:, others].mean(1), rtol=1e-4, atol=1e-5)
    actual = requested.explain(photo(), method="gae", target="red")
    assert actual.facts["against"] == "the mean of the other prompts"
    assert any("minus the mean of the other prompts" in line for line in actual._notes())
    assert "against" not in requested.explain(photo(), method="rollout").facts
    plain = explainer("clip", raw=True).explain(photo(), method="gae")
    assert "against" not in plain.facts


def test_one_prompt_alone_is_set_against_an_empty_one():
    entry = explainer("clip", ["red"])
    actual = entry.explain(photo(), method="gae")
    assert actual.score.unit == "cosine" and actual.score.display.startswith("cosine ")
    assert actual.facts["against"] == "that of an empty prompt"
    two = explainer("clip", ["red", "nothing"], raw=True)
    assert two.explain(photo(), target="red").facts["cosine"] == pytest.approx(actual.score.value, abs=1e-4)
    sigmoid = explainer("siglip", ["red"]).explain(photo())
    assert sigmoid.score.unit == "probability" and 0 < sigmoid.probability < 1


def test_classes_are_set_against_the_rest():
    demo = Explainer("demo")
    image = draw_image(0).image
    actual = demo.explain(image, method="input_gradient", target=Contrast(1, against="rest"))
    pixels = demo.pixels(image).requires_grad_()
    numbers = demo.model(pixels)[0]
    others = [other for other in range(len(numbers)) if other != 1]
    (expected,) = torch.autograd.grad(numbers[1] - numbers[others].mean(), pixels)
    rows, cols = actual.grid.shape
    sums = expected[0].abs().sum(0).unflatten(0, (rows, -1)).unflatten(2, (cols, -1)).sum((1, 3))
    np.testing.assert_allclose(actual.grid, sums, rtol=1e-3, atol=1e-6)
    assert actual.facts["against"] == "the mean of the other classes" and actual.target == 1
    with pytest.raises(OptionError, match="against a class and against the rest"):
        demo.explain_batch([image], methods=["gae"], targets=[Contrast(1, against="rest"), Contrast(1, against=2)])
    with pytest.raises(OptionError, match="class-specific"):
        demo.explain(image, method="rollout", target=Contrast(1, against="rest"))


def test_every_kind_of_run_takes_prompts(tmp_path):
    requested = explainer("siglip")
    for number, size in enumerate([(40, 56), (56, 40)]):
        write_image(tmp_path / "in" / f"{number}.png", photo(*size))
    (tmp_path / "in" / "labels.csv").write_text("file,label\n0.png,a dog\n1.png,red\n")
    strip = compare(photo(), model=requested, methods=["rollout", "gae", "random"], targets=PROMPTS)
    assert [one.label for one in strip.saliencies if one.method == "gae"] == PROMPTS
    strip.figure(tmp_path / "strip.png")
    assert "a cat on a mat" in explore(photo(), model=requested, methods=["gae"], targets=PROMPTS).html
    for kept in (0, 2):
        summary = explain_folder(tmp_path / "in", tmp_path / "out", model=requested, methods=["gae"], target="a dog")
        assert (summary.explained, summary.kept) == (2, kept)
    options = {"methods": ["gae"], "points": 3, "sanity_images": 0}
    actual = evaluate(tmp_path / "in", model=requested, metrics=["faithfulness"], **options)
    assert not actual.failures


def test_texts_are_read_as_the_models_were_trained():
    words = Words()
    Explainer(pair("siglip"), outputs=prompts(["A Dog"], processor=words), data_config=DATA)
    [(texts, options)] = words.calls
    assert texts == ["a dog", ""] and (options["padding"], options["max_length"]) == ("max_length", 16)
    words = Words()
    Explainer(pair("clip"), outputs=prompts(["A Dog"], processor=words, templates=["a {}", "the {}"]), data_config=DATA)
    [(texts, options)] = words.calls
    assert texts == ["a A Dog", "the A Dog", "a ", "the "] and options["padding"] is True


def test_a_template_is_a_mean_of_unit_vectors():
    actual = pair_of(pair("clip"), Words())
    sentences = actual.embed(["a red", "the red"]).detach()
    mean = normalize(normalize(sentences, dim=1).mean(0, keepdim=True), dim=1)
    features = torch.randn(2, 24)
    expected = normalize(features, dim=1) @ mean.T * actual.scale
    reported = prompt_outputs(actual, prompts(["red"], templates=["a {}", "the {}"])).raw_scores(features)
    torch.testing.assert_close(reported, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(40, 56), (7, 900), (9, 9)])
def test_as_many_patches_as_the_processor_takes(size):
    processor = transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16)
    theirs = processor(photo(*size), return_tensors="pt")
    placed = place(size, (32, 32), crop_mode="patches", patch_size=(8, 8)).input_size
    assert [side // 8 for side in placed] == theirs["spatial_shapes"][0].tolist()
    both = type("Both", (Words,), {"image_processor": processor})()  # a processor of texts and images
    entry = Explainer(pair("siglip2"), outputs=prompts(PROMPTS, processor=both))
    patches, rows, cols = cut(entry.pixels(photo(*size)))
    ours, expected = patches[0], theirs["pixel_values"][0][: rows * cols]
    assert (ours - expected).abs().max() <= 2.1 / 127.5  # levels of 8 bits, rounded by two libraries


def of_clip(texts=PROMPTS, model=None, **options) -> Explainer:
    explaining = {name: options.pop(name) for name in ("class_names",) if name in options}
    requested = {"outputs": prompts(texts, **{"processor": Words(), **options})}
    return Explainer(pair("clip") if model is None else model, data_config=DATA, **requested, **explaining)


def without_head() -> nn.Module:
    vision = pair("siglip").config.vision_config.to_dict() | {"vision_use_head": False}
    text = pair("siglip").config.text_config.to_dict()
    return transformers.SiglipModel(transformers.SiglipConfig(vision_config=vision, text_config=text))


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda: Explainer(pair("clip"), data_config=DATA), UnsupportedModelError, r"outputs=vitflow.prompts\("),
        (lambda: of_clip(model=pair("clip").vision_model), UnsupportedModelError, r"load a CLIPModel"),
        (lambda: Explainer("demo", outputs=prompts(PROMPTS)), UnsupportedModelError, "no text encoder"),
        (lambda: of_clip(model=without_head()), UnsupportedModelError, "no pooling head"),
        (lambda: of_clip("a dog"), OptionError, "list of texts"),
        (lambda: of_clip(["a dog", " "]), OptionError, "list of texts"),
        (lambda: of_clip(["red", "red"]), OptionError, "every prompt once"),
        (lambda: of_clip(templates=["a photo"]), OptionError, "templates with one {}"),
        (lambda: of_clip(class_names=["a"]), OptionError, "class_names"),
        (lambda: of_clip(processor=None), ModelError, "processor=transformers"),
        (lambda: load_model("someone/clip-vit", num_classes=3), OptionError, "includes weights"),
    ],
)
def test_what_cannot_be_requested_is_refused_with_the_way_out(ask, error, words):
    with pytest.raises(error, match=words):
        ask()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_siglip(tmp_path_factory.mktemp("siglip"))


def test_a_folder_of_transformers_is_loaded(folder, tmp_path):
    entry = Explainer(str(folder), outputs=prompts(["a dog", "red"]))
    assert entry.model_id == str(folder) and entry.class_names == ["a dog", "red"] and entry.spec.mean == (0.5,) * 3
    write_image(tmp_path / "one.png", photo())
    path, model = str(tmp_path / "one.png"), ["--model", str(folder), "--prompt", "a dog", "--prompt", "red"]
    for command, options in {
        "explain": ["-o", f"{tmp_path}/1.png"],
        "folder": ["-o", f"{tmp_path}/4", "--template", "a {}"],
    }.items():
        done = CliRunner().invoke(cli, [command, path, *model, *options], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "4").rglob("*gae*"))) == 1  # a map that tells prompts apart, where no method is named
    done = CliRunner().invoke(cli, ["explain", path, "--model", str(folder)])
    assert done.exit_code and "--prompt" in done.output


def test_an_id_that_is_not_at_hand_says_what_to_do_in_seconds():
    started = time.perf_counter()
    with pytest.raises(ModelError, match="hf download someone/clip-vit --local-dir"):
        load_model("someone/clip-vit")
    assert time.perf_counter() - started < 60  # the machine may be busy
