"""OWL-ViT and OWLv2: prompts as classes, selection, the padded input of OWLv2, place of the maps, errors."""

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import vitflow
from tests.pairs import TEXT, Words
from tests.small import jitter
from vitflow import Explainer
from vitflow.cli import cli
from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.images.reading import write_image

transformers = pytest.importorskip("transformers")

KINDS = ("OwlViT", "Owlv2")
PROMPTS = ["a cat", "a remote", "red"]
SIZE = 64
BOX = (30.0, 10.0, 70.0, 50.0)


def detector(kind):
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    vision |= {"image_size": SIZE, "patch_size": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(text_config=TEXT, vision_config=vision, projection_dim=32)
    model = jitter(getattr(transformers, f"{kind}ForObjectDetection")(config), 0.2, by_width=False)
    for weight in model.box_head.parameters():
        weight.data *= 0.05  # boxes of about a patch
    return model


def processor(kind):
    """The image processor of the family, for the small input."""
    return getattr(transformers, f"{kind}ImageProcessor")(size={"height": SIZE, "width": SIZE})


def photo(seed=0, height=48, width=96):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)


def requested(kind, box=None, prompts=PROMPTS, model=None, **options):
    named = vitflow.prompts(prompts, processor=Words(), **options)
    outputs = vitflow.boxes(box, prompts=named)
    return Explainer(model or detector(kind), outputs=outputs, data_config=processor(kind))


def direct(model, pixels):
    """Run the model as its documentation does, with texts and image together."""
    read = Words()(PROMPTS, padding="max_length", max_length=16)
    with torch.no_grad():
        return model(pixel_values=pixels, **read)


@pytest.mark.parametrize("kind", KINDS)
def test_detections_are_those_of_the_model(kind):
    model, image = detector(kind), photo()
    explainer = requested(kind, BOX, model=model)
    assert explainer.class_names == PROMPTS and explainer.outputs.activation == "sigmoid"
    output = direct(model, explainer.pixels(image))
    saliency = explainer.explain(image, target="a remote")
    result = saliency.facts["detection"]
    [boxes] = processor(kind).post_process_object_detection(output, threshold=-1.0, target_sizes=[image.shape[:2]])
    np.testing.assert_allclose(result["box"], boxes["boxes"][result["query"]].numpy(), atol=0.06)
    probabilities = output.logits[0].double().sigmoid()
    assert saliency.probability == pytest.approx(float(probabilities[result["query"], 1]), abs=1e-5)
    left, top, right, bottom = boxes["boxes"].double().numpy().T
    common = (np.minimum(right, BOX[2]) - np.maximum(left, BOX[0])).clip(0)
    common = common * (np.minimum(bottom, BOX[3]) - np.maximum(top, BOX[1])).clip(0)
    overlaps = common / ((right - left) * (bottom - top) + (BOX[2] - BOX[0]) * (BOX[3] - BOX[1]) - common)
    assert result["query"] == int((overlaps * probabilities[:, 1].numpy()).argmax())
    assert saliency.class_name == "a remote" and saliency.method == "gae"


@pytest.mark.parametrize("kind", KINDS)
def test_maps_start_at_the_patch_of_the_detection(kind):
    model = detector(kind)
    explainer = requested(kind, model=model)
    saliency = explainer.explain(photo(), target="red")
    query = saliency.facts["detection"]["query"]
    assert saliency.facts["readout"].startswith("1 prefix token and 1 patch")
    tokens = torch.randn(1, 17, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    vision = explainer.model.model.base_model.vision_model
    features = vision.post_layernorm(tokens)
    merged = model.layer_norm(features[:, 1:] * features[:, :1])
    logits, _ = model.class_predictor(merged, explainer.model.vectors[None])
    [gradient] = torch.autograd.grad(logits[0, query, 2], tokens)
    assert gradient[0].norm(dim=-1).nonzero().flatten().tolist() == [0, query + 1]
    by_hand = Explainer(explainer.model, data_config=processor(kind), outputs=lambda output: output["logits"][:, query])
    np.testing.assert_allclose(saliency.grid, by_hand.explain(photo(), target=2, method="gae").grid, rtol=1e-4)


def test_the_padded_input_of_owlv2_is_that_of_its_processor():
    image = np.zeros((48, 80, 3), np.uint8)
    image[:, :, 0] = np.linspace(40, 200, 80)[None]
    image[:, :, 1] = np.linspace(200, 40, 48)[:, None]
    for turned in (image, np.ascontiguousarray(image.transpose(1, 0, 2))):
        explainer = requested("Owlv2")
        actual = explainer.pixels(turned)[0]
        expected = torch.as_tensor(processor("Owlv2")(turned, return_tensors="np")["pixel_values"])[0]
        inside = (
            (slice(None), slice(1, 36), slice(1, 60)) if turned is image else (slice(None), slice(1, 60), slice(1, 36))
        )
        assert (actual[inside] - expected[inside]).abs().max() < 0.1  # another filter
        padding = (slice(None), slice(40, None)) if turned is image else (slice(None), slice(None), slice(40, None))
        torch.testing.assert_close(actual[padding], expected[padding], rtol=1e-4, atol=1e-4)
    placement = requested("Owlv2").explain(image, method="rollout").placement
    assert placement.offset == (0, 0) and placement.resized_size == (38, 64) and placement.sees_everything


def test_prompts_alone_are_detected_and_templates_averaged():
    named = vitflow.prompts(["a cat"], templates=["{}", "a {} on a mat"], processor=Words())
    explainer = Explainer(detector("OwlViT"), outputs=named, data_config=processor("OwlViT"))
    assert explainer.class_names == ["a cat"] and explainer.outputs.activation == "sigmoid"
    assert explainer.explain(photo()).facts["detection"]["query"] >= 0
    recorded = explainer.outputs.fingerprint()
    assert recorded["prompts"] == ["a cat"] and recorded["templates"] == ["{}", "a {} on a mat"]


def test_wrong_questions_are_refused():
    with pytest.raises(UnsupportedModelError, match="boxes\\(prompts=\\["):
        Explainer(detector("OwlViT"), data_config=processor("OwlViT"))
    with pytest.raises(UnsupportedModelError, match="requires OWL-ViT or OWLv2 of transformers"):
        Explainer("demo", outputs=vitflow.boxes(prompts=["a cat"]))
    with pytest.raises(OptionError, match="every prompt once"):
        vitflow.boxes(prompts=["a cat", "a cat"])


def test_the_command_line_names_classes_by_prompts(tmp_path, monkeypatch):
    model = detector("OwlViT")
    monkeypatch.setattr("vitflow.models.loading.load_model", lambda *args, **options: model)
    monkeypatch.setattr("vitflow.models.pairs._tokenizer_of", lambda model: Words())
    data = {"input_size": [3, SIZE, SIZE], "mean": [0.5] * 3, "std": [0.5] * 3}
    (tmp_path / "data.json").write_text(json.dumps(data))
    write_image(tmp_path / "photo.png", photo())
    words = ["explain", str(tmp_path / "photo.png"), "--model", "any", "--data-config", str(tmp_path / "data.json")]
    words += ["--prompt", "a cat", "--prompt", "a remote", "--json", "-o", str(tmp_path / "map.png")]
    done = CliRunner().invoke(cli, [*words, "--box", "30,10,70,50", "--class", "a remote"])
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["class_name"] == "a remote" and record["facts"]["detection"]["requested"] == [30, 10, 70, 50]
