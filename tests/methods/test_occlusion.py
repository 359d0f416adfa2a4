"""Occlusion against a literal loop, and on models without attention."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

from tests import literal_vit, references
from vitflow import Explainer
from vitflow.errors import NoAttentionError
from vitflow.methods.cells import occlusion
from vitflow.models import outputs

DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)


def log_odds(logits: Tensor, target: int, activation: str) -> float:
    others = [math.exp(value) for number, value in enumerate(logits.tolist()) if number != target]
    return float(logits[target]) - (math.log(sum(others)) if activation == "softmax" else 0.0)


def probability(logits: Tensor, target: int, activation: str) -> float:
    return float((logits.softmax(-1) if activation == "softmax" else logits.sigmoid())[target])


SCORES = {"log-odds": log_odds, "probability": probability}


def literal(
    model: nn.Module, image: Tensor, target: int, size: int, activation: str = "softmax", of: str = "log-odds"
) -> np.ndarray:
    """One image [3, height, width], one patch after the other, one forward pass each."""

    def score(pixels: Tensor) -> float:
        with torch.no_grad():
            return SCORES[of](model(pixels[None])[0].double(), target, activation)

    whole = score(image)
    rows, cols = image.shape[1] // size, image.shape[2] // size
    drops = np.zeros((rows, cols))
    for row in range(rows):
        for col in range(cols):
            blanked = image.clone()
            for channel in range(3):
                mean = image[channel].mean()
                blanked[channel, row * size : (row + 1) * size, col * size : (col + 1) * size] = mean
            drops[row, col] = whole - score(blanked)
    return drops


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_blank_out_equals_a_loop_for_each_images_target(activation, score):
    model = literal_vit.timm_model("average")
    explainer = Explainer(model, data_config=DATA, activation=activation)
    targets = np.array([3, 0, 4])
    options = {"occlusion_batch": 7} | ({"score": score} if score == "probability" else {})
    actual = explainer.explain_batch(list(IMAGES), methods=["occlusion"], targets=targets, **options)
    for image, target, saliency in zip(IMAGES, targets, actual, strict=True):
        expected = literal(model, explainer.pixels(image)[0], int(target), 8, activation, score)
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(saliency.grid, expected, rtol=0, atol=1e-6 * np.abs(expected).max() + 1e-9)
        assert saliency.target == target
        assert saliency.options["score"] == score


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
def test_log_odds_are_exact_however_sure_the_answer_is(activation):
    rows = torch.tensor(
        [[0.3, -1.0, 2.0], [2.0, 2.0, 2.0], [700.0, 0.5, -3.0], [-50.0, -90.0, -90.0], [1e4, 1e4, -1e4]]
    )
    for given, actual in zip(rows, outputs.log_odds(rows, activation).tolist(), strict=True):
        with localcontext(prec=60):
            exact = [Decimal(value) for value in given.tolist()]
            for number, value in enumerate(exact):
                others = sum(other.exp() for index, other in enumerate(exact) if index != number)
                assert actual[number] == pytest.approx(float(value - (others.ln() if activation == "softmax" else 0)))
    assert outputs.log_odds(torch.tensor([[2.0]]), activation).tolist() == [[2.0]]  # one logit is that of a sigmoid


def test_an_answer_that_is_sure_loses_as_much_as_one_that_is_not():
    """A probability of 1 − 1e-12 hides what a patch takes from it: less than float32 logits round to."""
    model = literal_vit.timm_model().float()
    expected = literal(model.double(), Explainer(model, data_config=DATA).pixels(IMAGES[0])[0], 2, 8)
    with torch.no_grad():
        model.float().head.bias[2] += 30.0
    explainer = Explainer(model, data_config=DATA)
    rounding = references.logit_rounding(explainer, IMAGES[0])
    for size in (1, 5, 16):
        saliency = explainer.explain(IMAGES[0], method="occlusion", target=2, occlusion_batch=size)
        assert 1 - saliency.probability < 1e-9
        assert np.abs(expected).max() > 100 * rounding
        np.testing.assert_allclose(saliency.grid, expected, rtol=0, atol=rounding)


def test_the_batch_size_changes_no_map():
    model, pixels = literal_vit.timm_model(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    sizes = []

    def predict(batch: Tensor) -> Tensor:
        sizes.append(len(batch))
        with torch.no_grad():
            return model(batch).softmax(-1)

    whole = occlusion(predict, pixels, torch.tensor([1, 2]), rows=4, cols=4, batch_size=100)
    assert sizes == [32, 2]
    for size in (1, 5, 32):
        sizes.clear()
        actual = occlusion(predict, pixels, torch.tensor([1, 2]), rows=4, cols=4, batch_size=size)
        torch.testing.assert_close(actual, whole, rtol=0, atol=1e-12)
        assert max(sizes[:-1]) == size


def test_cells_of_another_size():
    model = literal_vit.timm_model()
    explainer = Explainer(model, data_config=DATA)
    saliency = explainer.explain(IMAGES[0], method="occlusion", target=1, patch_size=16)
    expected = literal(model, explainer.pixels(IMAGES[0])[0], 1, 16)
    np.testing.assert_allclose(saliency.grid, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    assert explainer.explain(IMAGES[0], method="input_gradient", patch_size=4).grid.shape == (8, 8)


@pytest.mark.parametrize("name", ["resnet10t"])
def test_models_without_attention_are_explained_too(name):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).eval()
    explainer = Explainer(model, data_config={"input_size": (3, 64, 96)})
    methods = ["input_gradient", "occlusion", "random", "centre"]
    actual = explainer.explain_batch([IMAGES[0]], methods=methods, targets=3)
    assert [saliency.method for saliency in actual] == methods
    for saliency in actual:
        assert saliency.grid.shape == (14, 21)
        assert saliency.grid.std() > 0
        assert saliency.heatmap.shape == (32, 32)
    expected = literal(model, explainer.pixels(IMAGES[0])[0], 3, 32)
    coarse = explainer.explain(IMAGES[0], method="occlusion", target=3, patch_size=32)
    rounding = references.logit_rounding(explainer, IMAGES[0])
    np.testing.assert_allclose(coarse.grid, expected, rtol=0, atol=rounding)
    assert explainer.explain(IMAGES[0], method="gradcam").grid.shape == (2, 3)  # the last stage's own grid
    for method in ("rollout", "gae"):
        with pytest.raises(NoAttentionError):
            explainer.explain(IMAGES[0], method=method)
