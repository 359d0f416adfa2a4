"""Vision Transformers of transformers and torchvision: small ones with random weights, nothing is downloaded."""

import inspect
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

from tests.small import Custom, jitter
from vitflow import Explainer, record_attention
from vitflow.errors import ModelError, OptionError, UnsupportedModelError, VitflowWarning
from vitflow.methods.tokens import TokenLayout
from vitflow.models.blocks import block_norms
from vitflow.models.calls import logits_of
from vitflow.models.data_configs import from_processor, processor_settings
from vitflow.models.info import read_input_spec
from vitflow.models.names import model_id

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
WIDE = {**SIZES, "intermediate_size": 64}
DINO = {**SIZES, "num_labels": 5}
CLASSES = {**WIDE, "num_labels": 5}
BIASED = {**CLASSES, "use_relative_position_bias": True}
NORMALISATION = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
GRADIENT = "gradient of the output"


def _text_free(kind: str) -> dict[str, object]:
    """CLIP and SigLIP: a configuration for texts stands beside the vision model's."""
    text = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} if kind == "CLIP" else {}
    return {"vision_config": WIDE, "text_config": text, "num_labels": 5}


# Model class, its configuration, prefix tokens and readout.
FAMILIES = {
    "ViTForImageClassification": ("ViTConfig", CLASSES, 1, "class token"),
    "ViTModel": ("ViTConfig", WIDE, 1, "class token"),
    "DeiTForImageClassification": ("DeiTConfig", CLASSES, 2, "class token"),
    "DeiTForImageClassificationWithTeacher": ("DeiTConfig", CLASSES, 2, "class and distillation token"),
    "Dinov2ForImageClassification": ("Dinov2Config", DINO, 1, GRADIENT),
    "Dinov2WithRegistersForImageClassification": ("Dinov2WithRegistersConfig", DINO, 5, GRADIENT),
    "Dinov2WithRegistersModel": ("Dinov2WithRegistersConfig", SIZES, 5, "class token"),
    "CLIPForImageClassification": ("CLIPConfig", _text_free("CLIP"), 1, "average over patches"),
    "CLIPVisionModel": ("CLIPVisionConfig", WIDE, 1, "class token"),
    "CLIPVisionModelWithProjection": ("CLIPVisionConfig", {**WIDE, "projection_dim": 7}, 1, "class token"),
    "SiglipForImageClassification": ("SiglipConfig", _text_free("Siglip"), 0, "average over patches"),
    "SiglipVisionModel": ("SiglipVisionConfig", WIDE, 0, "attention pooling"),
    "BeitForImageClassification": ("BeitConfig", BIASED, 1, "average over patches"),
    "Data2VecVisionForImageClassification": ("Data2VecVisionConfig", CLASSES, 1, "average over patches"),
    "IJepaForImageClassification": ("IJepaConfig", CLASSES, 0, "average over patches"),
    "DINOv3ViTModel": ("DINOv3ViTConfig", {**WIDE, "num_register_tokens": 4}, 5, "class token"),
}
WITH_CLASSES = [name for name in FAMILIES if "Classification" in name]


def built(name: str, attention: str = "sdpa", **changes: object) -> nn.Module:
    """A small model whose attention is far from uniform."""
    config, options, *_ = FAMILIES[name]
    return of_transformers(name, config, {**options, **changes}, attention)


def of_transformers(name: str, config: str, options: dict[str, object], attention: str | None) -> nn.Module:
    """A model of this class, from the configuration that these options make."""
    torch.manual_seed(1)
    given = getattr(transformers, config)(**options)
    return jitter(getattr(transformers, name)._from_config(given, attn_implementation=attention), 0.2, by_width=False)


def torchvision_vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=6
    )
    return jitter(model, 0.2, by_width=False)


def pixels(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def photo(height: int = 40, width: int = 52) -> np.ndarray:
    """A smooth image, so that different resize filters agree."""
    rows, cols = np.mgrid[0:height, 0:width]
    waves = np.stack([np.sin(rows / 9), np.cos(cols / 11), np.sin((rows + cols) / 13)], axis=-1)
    return ((waves + 1) * 127).astype(np.uint8)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_recorded_attention_is_what_the_library_itself_returns(name):
    eager, fused = built(name, "eager"), built(name)
    with torch.no_grad():
        expected = eager(pixels(), output_attentions=True).attentions
        plain = logits_of(fused(pixels()))
    for model in (eager, fused):
        with record_attention(model) as trace, torch.no_grad():
            model(pixel_values=pixels())
        assert len(trace.attentions) == len(expected) == 3
        for recorded, literal in zip(trace.attentions, expected, strict=True):
            torch.testing.assert_close(recorded, literal, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(expected[0][:, :, 0], expected[0][:, :, 1], atol=1e-3)  # or any row would have done
    assert trace.logits is not None and plain is not None
    assert (trace.logits - plain).abs().max() <= 1e-5 * plain.abs().max()


@pytest.mark.parametrize("name", FAMILIES)
def test_layout_and_readout_are_those_that_the_answer_depends_on(name):
    *_, prefix, words = FAMILIES[name]
    model = built(name)
    last = model.get_submodule(block_norms(model)[-1].rpartition(".")[0])
    tokens: list[Tensor] = []
    handle = last.register_forward_hook(
        lambda module, args, output: tokens.append(output[0] if isinstance(output, tuple) else output)
    )
    with record_attention(model) as trace:
        answer = logits_of(model(pixels()))
    handle.remove()
    assert trace.layout == TokenLayout(prefix, 4, 4)
    assert trace.pooling == words
    torch.testing.assert_close(trace.readout.sum(dim=1), torch.ones(2))
    assert answer is not None
    differentiable = [each for each in tokens if each.requires_grad]  # the hook is also called on noise
    gradients = torch.autograd.grad(answer.square().sum(), differentiable, allow_unused=True)
    [reached] = [gradient.abs().amax(dim=-1) > 0 for gradient in gradients if gradient is not None]
    assert torch.equal(reached, trace.readout > 0)


@pytest.mark.parametrize("name", [*WITH_CLASSES, "torchvision"])
def test_value_weighting_uses_the_models_output_projection(name):
    """‖v W_O‖ from the difference that one token's value makes to the attention module's output."""
    model = torchvision_vit() if name == "torchvision" else built(name)
    with record_attention(model, values=True) as trace, torch.no_grad():
        model(pixels(1))
    values, last = trace.layers[-1].values, trace.layers[-1].name
    assert values is not None
    name_of_projection, projection = next(
        (path, module)
        for path, module in model.get_submodule(last.removesuffix(".attention.attention")).named_modules()
        if path.split(".")[-1] in ("o_proj", "out_proj", "dense") and isinstance(module, nn.Linear)
    )
    assert name_of_projection
    weight = projection.weight.detach().unflatten(1, (4, -1))  # [width, heads, width of a head]
    expected = torch.einsum("bhnd,whd->bhnw", values.vectors, weight).norm(dim=-1)
    torch.testing.assert_close(trace.layers[-1].values.norms(), expected, atol=1e-5, rtol=1e-4)


def test_other_image_sizes_are_requested_by_the_models_option():
    names = ["ViTForImageClassification", "Dinov2ForImageClassification"]
    if "kwargs" in inspect.signature(transformers.CLIPForImageClassification.forward).parameters:
        names.append("CLIPForImageClassification")  # before transformers 5 it cannot be told
    for name in names:
        explainer = Explainer(built(name), data_config=NORMALISATION, fit="native")
        for method in ("rollout", "occlusion"):
            assert explainer.explain(photo(30, 120), method=method).grid.shape == (2, 8)
    with pytest.raises(UnsupportedModelError, match="any size"):
        Explainer(torchvision_vit(), data_config=NORMALISATION, fit="native")


def test_outputs_without_names_are_read_as_well():
    model = built("ViTModel")
    with record_attention(model) as trace, torch.no_grad():
        model(pixels(), return_dict=False)
    with torch.no_grad():
        expected = logits_of(model(pixels()))
    assert trace.logits is not None and expected is not None
    torch.testing.assert_close(trace.logits, expected)
    assert trace.layout == TokenLayout(1, 4, 4)
    assert logits_of((torch.zeros(2, 5), torch.zeros(2, 5))) is None  # two heads: which of them?


def test_a_module_around_the_model_is_looked_into():
    inner = built("Dinov2ForImageClassification", id2label={0: "ant", 1: "bee", 2: "cow", 3: "dog", 4: "eel"})
    answering = Custom(lambda self, images: self.inner(pixel_values=images).logits, inner=inner)
    explainer = Explainer(answering, data_config=NORMALISATION)
    actual = explainer.explain(photo(), method="rollout", target="cow")
    assert actual.facts["readout"] == "1 prefix token and 16 patches, from the gradient of the output"
    assert actual.class_name == "cow"
    direct = Explainer(inner, data_config=NORMALISATION).explain(photo(), method="rollout", target="cow")
    np.testing.assert_allclose(actual.grid, direct.grid, rtol=1e-6)


@pytest.mark.parametrize("name", ["Swin", "Swinv2"])
def test_the_windows_of_transformers_swin_are_detected_where_they_are(name):
    config = getattr(transformers, f"{name}Config")(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=5
    )
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForImageClassification")(config).eval()
    source = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        plain = model(source).logits
        with record_attention(model) as trace:
            model(source)
    assert (trace.logits - plain).abs().max() <= 1e-5 * plain.abs().max()
    assert (trace.layout, trace.pooling) == (TokenLayout(0, 16, 16), "average over patches")
    for layer, side, shift in zip(trace.layers, (16, 16, 8, 8), (0, 2, 0, 2), strict=True):
        tokens = torch.arange(side * side).reshape(side, side).roll((-shift, -shift), (0, 1))
        windows = tokens.unfold(0, 4, 4).unfold(1, 4, 4).reshape(-1, 16)  # [windows, tokens of a window]
        assert layer.tokens.key_index is not None
        assert torch.equal(layer.tokens.key_index, windows)
    actual = Explainer(model, data_config=NORMALISATION).explain_batch(
        [photo()], methods=["rollout", "gae", "gradcam", "gradient_rollout"], targets=3
    )
    assert [one.grid.shape for one in actual] == [(16, 16), (16, 16), (8, 8), (16, 16)]
    assert all(np.ptp(one.grid) > 0 for one in actual if one.method != "gradcam")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in ("DeiT", "CLIP", "Siglip", "ConvNext", "Levit")),
        ("ConvNext", {"size": {"shortest_edge": 224}}),
        ("ViT", {"rescale_factor": 1 / 127.5}),
        ("Vivit", {}),
        ("CLIP", {"size": {"shortest_edge": 225}}),
    ],
)
def test_images_are_prepared_as_by_the_image_processor(name, settings):
    processor = getattr(transformers, f"{name}ImageProcessor")(**settings)
    model = built("ViTForImageClassification", image_size=224, patch_size=32)
    explainer = Explainer(model, data_config=processor.to_dict())
    source = photo(300, 401)
    images = [[source]] if name == "Vivit" else source
    expected = processor(images, return_tensors="pt")["pixel_values"].reshape(1, 3, *explainer.spec.size)
    prepared = explainer.pixels(source)
    rounding = 3 / 255 / min(explainer.spec.std)  # filters round to 8 bits, each in its own way
    assert (prepared - expected).abs().max() < rounding


@pytest.mark.parametrize("setting", ["do_flip_channel_order", "include_top"])
def test_a_processor_with_settings_that_are_not_supported_is_refused(setting):
    with pytest.raises(OptionError, match=f"{setting}=True, which vitflow does not support: explain tensors"):
        from_processor({"image_mean": [0.5] * 3, "image_std": [0.5] * 3, setting: True})


@pytest.mark.parametrize("text", ["{", "[" * 100_000])
def test_broken_processor_settings_are_named(tmp_path, text):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ModelError, match="as a JSON object in"):
        processor_settings(str(tmp_path))


def test_what_was_saved_next_to_the_weights_is_detected(tmp_path):
    names = {0: "ant", 1: "bee", 2: "cow, cattle", 3: "dog", 4: "eel"}
    built("ViTForImageClassification", id2label=names, problem_type="multi_label_classification").save_pretrained(
        tmp_path
    )
    saved = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**saved, "resample": 2}))
    explainer = Explainer(transformers.ViTForImageClassification.from_pretrained(tmp_path))
    spec = explainer.spec
    assert (spec.size, spec.patch_size, spec.crop_mode, spec.interpolation) == ((32, 32), (8, 8), "squash", "bilinear")
    assert (spec.mean, spec.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    assert explainer.class_names == list(names.values())
    assert explainer.outputs.activation == "sigmoid"
    assert explainer.model_id == str(tmp_path)
    actual = explainer.explain(photo(), method="rollout", target="cattle")
    assert actual.target == 2
    with torch.no_grad():
        expected = explainer.logits(explainer.pixels(photo()))[0, 2].double().sigmoid()
    assert actual.probability == pytest.approx(float(expected))


def test_a_processor_in_the_hubs_cache_is_detected(tmp_path, monkeypatch):
    from huggingface_hub import constants

    snapshot = tmp_path / "models--somebody--a-clip" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("abc")
    settings = transformers.CLIPImageProcessor(crop_size=32, size=32).to_dict()
    (snapshot / "processor_config.json").write_text(json.dumps({"image_processor": settings, "name": "both"}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = built("CLIPForImageClassification")
    model.name_or_path = "somebody/a-clip"
    spec = read_input_spec(model)
    assert (spec.mean[0], spec.size, spec.crop_mode) == (0.48145466, (32, 32), "floor")
    assert model_id(model) == "somebody/a-clip"
    model.name_or_path = str(tmp_path)  # a folder without one
    with pytest.warns(VitflowWarning, match=r"using the default of CLIPImageProcessor"):
        assert read_input_spec(model).mean[0] == 0.48145466
    model.name_or_path = ""
    with pytest.raises(ModelError, match="image processor"):
        read_input_spec(model)


def implementations(model: nn.Module) -> list[str]:
    return [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]


@pytest.mark.parametrize("name", ["CLIPForImageClassification", "ViTForImageClassification", "SiglipVisionModel"])
def test_hidden_attention_is_switched_while_it_is_recorded_and_restored(name):
    model, pixels = built(name), torch.randn(2, 3, 32, 32)
    with record_attention(model) as expected, torch.no_grad():
        output = model(pixels)[0]
    vision = getattr(model, "vision_model", model)
    vision.config._attn_implementation = "flash_attention_2"  # which requires a GPU
    before = implementations(model)
    assert "flash_attention_2" in before
    with record_attention(model) as trace, torch.no_grad():
        torch.testing.assert_close(model(pixels)[0], output)
    assert implementations(model) == before
    for one, other in zip(trace.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ZeroDivisionError), record_attention(model):
        assert "flash_attention_2" not in implementations(model)
        raise ZeroDivisionError
    assert implementations(model) == before


def test_methods_with_gradients_explain_flex_attention_which_has_none_on_the_cpu():
    model, methods = built("ViTForImageClassification"), ["rollout", "gae", "gradcam", "input_gradient"]

    def maps() -> list[np.ndarray]:
        explainer = Explainer(model, data_config=NORMALISATION)
        return [explainer.explain(photo(), method=method, target=1).grid for method in methods]

    expected = maps()
    model.set_attn_implementation("flex_attention")
    for one, other in zip(maps(), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)
    assert set(implementations(model)) == {"flex_attention"}


def test_attention_that_cannot_be_switched_is_refused_by_name():
    model = transformers.LevitModel(transformers.LevitConfig(image_size=64)).eval()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModelError, match=r"flash_attention_2.*attn_implementation='eager'"):
        record_attention(model).__enter__()
    assert model.config._attn_implementation == "flash_attention_2"
    with record_attention(model, attention=False):  # occlusion needs none
        pass


def test_gradient_checkpointing_is_refused_where_it_takes_effect():
    model = built("ViTForImageClassification")
    enable = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{enable}_checkpointing_enable")()
    with record_attention(model, gradients=True):  # in eval mode, transformers does not apply it
        model(pixels(1))
    model.train()
    remedy = r"model\.gradient_checkpointing_disable\(\)"
    with pytest.raises(UnsupportedModelError, match=remedy), record_attention(model, gradients=True):
        model(pixels(1))


def test_models_whose_tokens_have_no_place_are_refused_by_name():
    config = transformers.ViTMAEConfig(**WIDE)
    model = transformers.ViTMAEModel(config).eval()
    with pytest.raises(UnsupportedModelError, match="ViTMAEModel masks and shuffles"):
        with record_attention(model), torch.no_grad():
            model(pixels())


def test_a_model_of_texts_and_images_is_refused_with_its_part_that_sees():
    model = transformers.CLIPModel(transformers.CLIPConfig(**_text_free("CLIP")))
    with pytest.raises(UnsupportedModelError, match=r"model\.vision_model"):
        record_attention(model).__enter__()
    with record_attention(model.vision_model):
        pass


def test_a_processor_or_a_preset_reports_what_the_model_wants_to_see():
    model = nn.Sequential(nn.Linear(2, 2))
    halves = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 48}, resample=3, **halves)
    both = SimpleNamespace(image_processor=processor)  # as CLIP's, which makes texts ready, too
    for reported in (processor, both, processor.to_dict()):
        spec = read_input_spec(model, reported)
        assert (spec.size, spec.mean, spec.std, spec.interpolation) == ((32, 48), (0.5,) * 3, (0.25,) * 3, "bicubic")
    preset = torchvision.transforms._presets.ImageClassification(crop_size=224, resize_size=256)
    spec = read_input_spec(model, preset)
    assert (spec.size, spec.crop_pct, spec.crop_mode, spec.interpolation) == ((224, 224), 0.875, "center", "bilinear")
    assert spec.mean == pytest.approx((0.485, 0.456, 0.406))


def test_what_reports_nothing_of_the_images_is_refused_with_what_is_wanted():
    for reported in (object(), {"image_size": 224}, "in1k"):
        with pytest.raises(OptionError, match="data_config as a mapping"):
            read_input_spec(nn.Linear(2, 2), reported)
    transforms = torchvision.models.ViT_B_16_Weights.DEFAULT.transforms
    with pytest.raises(OptionError, match=r"torchvision's weights\.transforms\(\) or Compose, got functools\.partial"):
        read_input_spec(nn.Linear(2, 2), transforms)
