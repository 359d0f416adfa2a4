"""Likeness: what makes an image like another one, by the pooled features of any backbone."""

import numpy as np
import pytest
import torch
import torchvision
import transformers
from click.testing import CliRunner
from torch.nn.functional import cosine_similarity

from tests import literal_vit
from tests.pairs import DATA, VISION, pair, photo
from vitflow import Explainer, similarity_to
from vitflow.cli import cli
from vitflow.errors import ModelError, OptionError
from vitflow.images.reading import write_image
from vitflow.models.blocks import headless

OTHER, THIRD = photo(64, 48)[:, ::-1], np.full((40, 40, 3), 90, np.uint8)


def backbone(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = VISION | {"image_size": 32}
    return {
        "dinov2, classes": lambda: transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**sizes)),
        "dinov3": lambda: transformers.DINOv3ViTModel(transformers.DINOv3ViTConfig(**sizes, num_register_tokens=2)),
        "timm": lambda: literal_vit.timm_model(num_classes=0).float(),
        "timm, classes": lambda: literal_vit.timm_model().float(),
        "torchvision": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=3),
        "clip": lambda: pair("clip"),
    }[name]().eval()


NAMES = ["dinov2, classes", "dinov3", "timm, classes", "torchvision", "clip"]


def features(name: str, model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    """The pooled features, as each library gives them."""
    if name == "dinov2, classes":
        tokens = model.dinov2(pixels).last_hidden_state
        return torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], dim=1)
    if "din" in name:
        return model(pixels).pooler_output
    if "timm" in name:
        return model.forward_head(model.forward_features(pixels), pre_logits=True)
    if name == "clip":
        return model.get_image_features(pixels).pooler_output
    tokens = torch.cat([model.class_token.expand(len(pixels), -1, -1), model._process_input(pixels)], dim=1)
    return model.encoder(tokens)[:, 0]


@pytest.fixture(scope="module", params=NAMES)
def requested(request):
    model = backbone(request.param)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield request.param, model, Explainer(model, outputs=similarity_to([OTHER, THIRD]), data_config=DATA)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_answers_are_the_cosines_and_gradients_are_theirs(requested):
    name, model, entry = requested
    pixels = entry.pixels(photo()).requires_grad_()
    with torch.no_grad():
        others = [features(name, model, entry.pixels(one)) for one in (OTHER, THIRD)]
    cosines = torch.stack([cosine_similarity(features(name, model, pixels), one) for one in others], dim=1)
    torch.testing.assert_close(entry.logits(pixels), cosines, rtol=1e-5, atol=1e-5)
    (expected,) = torch.autograd.grad(cosines[0, 1], pixels)
    actual = entry.explain(photo(), method="input_gradient", target=1)
    rows, cols = actual.grid.shape
    sums = expected[0].abs().sum(0).unflatten(0, (rows, -1)).unflatten(2, (cols, -1)).sum((1, 3))
    np.testing.assert_allclose(actual.grid, sums, rtol=2e-3, atol=1e-6)
    assert actual.score.unit == "cosine" and actual.score.value == pytest.approx(
        float(cosines[0, 1].detach()), abs=1e-5
    )
    assert actual.label == "image 2" and np.array_equal(actual.reference, THIRD)


def test_a_head_is_left_out_of_a_copy_alone():
    model = backbone("timm, classes")
    body = headless(model)
    assert body is not model and model.num_classes == model.head.out_features and body.num_classes == 0
    assert body.blocks[0].attn.qkv.weight is model.blocks[0].attn.qkv.weight
    without = backbone("timm")
    assert headless(without) is without


def test_what_has_no_features_is_reported():
    with pytest.raises(OptionError, match="at least one image"):
        similarity_to([])
    with pytest.raises(ModelError, match="ends in features"):
        Explainer(torch.nn.Conv2d(3, 2, 3), outputs=similarity_to([OTHER]), data_config=DATA)


def test_the_command_line_shows_both_images(tmp_path):
    for name, image in (("one", photo()), ("two", OTHER)):
        write_image(tmp_path / f"{name}.png", image)
    for command, output in (("explain", "1.png"), ("explore", "3.html")):
        words = [command, f"{tmp_path}/one.png", "--model", "demo", "--like", f"{tmp_path}/two.png", "--method", "gae"]
        done = CliRunner().invoke(cli, [*words, "-o", f"{tmp_path}/{output}"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert "two.png" in (tmp_path / "3.html").read_text()
