"""LeGrad against a loop of autograd over a Vision Transformer written out by hand, in float64; what it does not fit."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

from tests import literal_vit
from tests.models.test_libraries import NORMALISATION, built
from vitflow import Explainer
from vitflow.errors import OptionError, UnsupportedModelError
from vitflow.explaining.token_dropping import output_from_tokens
from vitflow.models.blocks import block_paths
from vitflow.recording.recorder import record_attention

CONFIG = {"input_size": (3, 32, 32), "crop_pct": 1.0, **NORMALISATION}


def photo(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)


def written_out(model: nn.Module, pixels: torch.Tensor, score, mean: bool, start: int = 1) -> np.ndarray:
    """The map [4, 4] of one image, layer by layer, head by head and query by query."""
    total, layers = torch.zeros(16, dtype=torch.float64), range(start, literal_vit.TINY["depth"] + 1)
    for depth in layers:
        seen = literal_vit.run(model, pixels.clone().requires_grad_(), depth=depth, mean=mean)
        for gradient in torch.autograd.grad(score(seen.logits), seen.attention[depth - 1]):
            for query in gradient:
                positive = torch.tensor([max(float(value), 0.0) for value in query], dtype=torch.float64)
                total += positive[-16:] / len(query)
    return (total / literal_vit.HEADS / len(layers)).reshape(4, 4).numpy()


@pytest.mark.parametrize("readout", literal_vit.READOUTS)
def test_legrad_is_the_positive_gradient_of_each_layers_answer(readout):
    model = literal_vit.timm_model(readout)
    explainer, images, targets = Explainer(model, data_config=CONFIG), [photo(1), photo(2)], np.array([3, 0])
    start = 2 if readout == "class token" else 1
    actual = explainer.explain_batch(images, methods=["legrad"], targets=targets, start_layer=start)
    for image, target, saliency in zip(images, targets, actual, strict=True):
        pixels = explainer.pixels(image)[0]
        wanted = written_out(model, pixels, lambda logits, entry=target: logits[entry], True, start)
        assert saliency.grid == pytest.approx(wanted, rel=1e-5, abs=1e-6 * wanted.max())
        assert saliency.class_specific and (saliency.grid >= 0).all() and saliency.grid.any()


def test_a_function_of_the_output_is_requested_of_every_layer():
    model = literal_vit.timm_model()
    explainer = Explainer(model, data_config=CONFIG, outputs=lambda output: (output[:, :2] - output[:, 2:4]) ** 2)
    actual = explainer.explain(photo(), method="legrad", target=1).grid
    wanted = written_out(model, explainer.pixels(photo())[0], lambda logits: (logits[1] - logits[3]) ** 2, True)
    assert actual == pytest.approx(wanted, rel=1e-5, abs=1e-6 * wanted.max())


FAMILIES = ("ViTForImageClassification", "Dinov2WithRegistersForImageClassification", "SiglipForImageClassification")


@pytest.mark.parametrize("name", [*FAMILIES, "CLIPForImageClassification", "BeitForImageClassification"])
def test_the_rest_of_a_model_of_transformers_runs_on_other_tokens(name):
    model = built(name)
    explainer = Explainer(model, data_config={"input_size": (3, 32, 32), **NORMALISATION})
    assert explainer.explain(photo(), method="legrad").grid.any()
    pixels, last = explainer.pixels(photo()), block_paths(model)[-1]
    with torch.no_grad(), record_attention(model, attention=False, features=[last]) as trace:
        wanted = model(pixels).logits
    tokens = trace.features[last].requires_grad_()
    actual = output_from_tokens(model, torch.randn_like(pixels), last, tokens).logits
    assert torch.allclose(actual, wanted, atol=1e-5) and actual.requires_grad
    assert not torch.allclose(output_from_tokens(model, pixels, last, tokens.square()).logits, wanted, atol=1e-3)


def test_the_model_is_left_as_it_was():
    model, pixels = literal_vit.timm_model().train(), torch.randn(1, 3, 32, 32, dtype=torch.float64)
    before = sum(len(module._forward_hooks) for module in model.modules())
    with pytest.raises(RuntimeError):  # tokens of another width
        output_from_tokens(model, pixels, "blocks.2", torch.zeros(1, 17, 5, dtype=torch.float64))
    output_from_tokens(model, pixels, "blocks.2", torch.zeros(1, 17, 24, dtype=torch.float64))
    assert torch.is_grad_enabled() and model.training
    with torch.no_grad():
        output_from_tokens(model, pixels, "blocks.2", torch.zeros(1, 17, 24, dtype=torch.float64))
        assert not torch.is_grad_enabled()
    assert sum(len(module._forward_hooks) for module in model.modules()) == before


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("swin_tiny_patch4_window7_224", {"img_size": 64, "window_size": 2, "depths": (1, 1, 1, 1)}),
        ("cait_xxs24_224", {"img_size": 64, "depth": 2}),
    ],
)
def test_models_whose_layers_have_no_answer_of_their_are_refused_by_name(name, options):
    model = timm.create_model(name, num_classes=3, **options).eval()
    with pytest.raises(UnsupportedModelError, match=f"LeGrad.*{type(model).__name__}.*gae"):
        Explainer(model).explain(photo(), method="legrad")


def test_what_legrad_cannot_be_requested_is_said():
    explainer = Explainer(literal_vit.timm_model(), data_config=CONFIG)
    with pytest.raises(OptionError, match="from 1 to 3"):
        explainer.explain(photo(), method="legrad", start_layer=4)
    with pytest.raises(OptionError, match="require classes"):
        Explainer(literal_vit.timm_model(num_classes=0), data_config=CONFIG).explain(photo(), method="legrad")
