"""Functions of the model's output as outputs, through every method and every kind of run."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests import literal_vit
from tests.small import Custom
from vitflow import Contrast, Explainer
from vitflow.errors import ModelError
from vitflow.folder.saved import fingerprint_difference
from vitflow.models.outputs import Outputs, activate, log_odds
from vitflow.registry.method_table import list_methods

DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
OPTIONS = {"masks": 8, "occlusion_batch": 16}
METHODS = ["rollout", "gae", "gradcam", "input_gradient", "occlusion", "sampling"]
LABELS = ["road", "sky", "tree"]


def pooled(dense):
    """The same with the question as a part of the model."""
    return Custom(lambda self, pixels: corner(self.dense(pixels)), dense=dense)


def corner(output):
    return output["logits"][:, :, :2, 1:3].mean((2, 3))


@pytest.fixture(scope="module")
def dense():
    """A segmentation model: an output with fields, whose logits lie on the image."""

    def compute(self, pixels):
        tokens = self.body.forward_features(pixels)[:, self.body.num_prefix_tokens :]
        side = int(tokens.shape[1] ** 0.5)
        return {"logits": self.head(tokens).mT.unflatten(2, (side, side)), "size": SimpleNamespace(side=side)}

    body = literal_vit.timm_model(num_classes=0).float()
    return Custom(compute, body=body, head=nn.Linear(body.embed_dim, 3)).eval()


@pytest.fixture(scope="module")
def requested(dense):
    return Explainer(dense, outputs=corner, class_names=LABELS, data_config=DATA)


@pytest.fixture(scope="module")
def image():
    return np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)


@pytest.mark.parametrize("method", METHODS)
def test_a_function_is_requested_as_a_module_would_be(dense, requested, image, method):
    whole = Explainer(pooled(dense), class_names=LABELS, data_config=DATA, activation="value")
    options = {
        name: OPTIONS[name] for name in OPTIONS if any(m.name == method and m.accepts(name) for m in list_methods())
    }
    actual, expected = (one.explain(image, method=method, target="sky", **options) for one in (requested, whole))
    np.testing.assert_allclose(actual.grid, expected.grid, rtol=1e-5, atol=1e-7 * max(1.0, np.abs(expected.grid).max()))
    assert actual.score == expected.score and actual.score.name == "sky"
    assert actual.to_dict()["value"] == pytest.approx(float(whole.logits(whole.pixels(image))[0, 1].detach()), rel=1e-5)
    assert actual.probability is None


def test_its_gradient_is_that_of_the_function(dense, requested, image):
    pixels = requested.pixels(image).requires_grad_()
    (expected,) = torch.autograd.grad(corner(dense(pixels))[0, 2], pixels)
    actual = requested.explain(image, method="input_gradient", target=2).grid
    rows, cols = actual.shape
    sums = expected[0].abs().sum(0).reshape(rows, 32 // rows, cols, 32 // cols).sum((1, 3))
    np.testing.assert_allclose(actual, sums, rtol=1e-4)


def _share(output, part):
    return part * corner(output)


def _mean(output):
    return corner(output).mean(1, keepdim=True)


OTHER = np.full((8, 8, 3), 9, np.uint8)
BASE = {"minus_rest_by_default": True, "reference": partial(_share, part=0.5), "unit": "m"}
CHANGED = {
    "no rest": ({"reference": None}, r"outputs\.reference"),
    "another rest": ({"reference": _mean}, "the function subtracted from the outputs was changed"),
    "another value in rest": ({"reference": partial(_share, part=0.6)}, "was changed"),
    "not apart": ({"minus_rest_by_default": False}, r"outputs\.minus_rest_by_default"),
    "unit": ({"unit": "km"}, r"outputs\.unit"),
    "scale": ({"scale": 10.0}, r"outputs\.scale"),
    "activation": ({"activation": "sigmoid"}, "activation was"),
    "names": ({"names": ("sky", "road", "tree")}, "the classes have other names"),
    "against": ({"against": "half of it"}, r"outputs\.against"),
    "made of": ({"description": {"file": 2}}, r"outputs\.file"),
    "images": ({"images": (OTHER,) * 3}, r"outputs\.images"),
    "function": ({"function": partial(_share, part=2)}, "the function of the outputs was changed"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_other_answers_are_another_run(dense, what):
    entry = Outputs(corner, tuple(LABELS), 3, **BASE)
    changed, reported = CHANGED[what]
    first, same, other = (
        Explainer(dense, outputs=outputs, data_config=DATA).fingerprint()
        for outputs in (entry, replace(entry), replace(entry, **changed))
    )
    assert fingerprint_difference(same, first) == []
    assert re.search(reported, "; ".join(fingerprint_difference(other, first)))


def _whole(output):
    return output["logits"].mean((2, 3))


_renamed = _whole
_renamed.__qualname__ = corner.__qualname__


@pytest.mark.parametrize(
    ("function", "reported"),
    [
        (lambda output: output["logits"], r"\[images, 3, one for each name\].*logits.\] \(2, 3, 4, 4\)"),
        (lambda output: corner(output).mean(0, keepdim=True), "2 images"),
        (lambda output: corner(output)[0].tolist(), "got \\["),
        (lambda output: corner(output).topk(3).indices, "floating-point"),
        (lambda output: output.logits, "AttributeError.*logits"),
        (lambda output: corner(output)[:, : 3 if len(output["logits"]) > 1 else 2], r"\[images, 3, one"),
        (lambda output: corner(output) * torch.nan, "NaN"),
        (lambda output: torch.from_numpy(corner(output).detach().numpy()), "not differentiable"),
    ],
)
def test_what_is_wrong_with_a_function_is_reported(dense, image, function, reported):
    with pytest.raises(ModelError, match=reported):
        Explainer(dense, outputs=function, class_names=LABELS, data_config=DATA).explain(image, method="gae")


@pytest.mark.parametrize(
    ("rest", "reported"),
    [
        (
            lambda output: corner(output).mean(1),
            r"Expected reference to return a tensor \[2, 3\] or \[2, 1\], got shape \(2,\)",
        ),
        (lambda output: corner(output)[:, :2], r"got shape \(2, 2\)"),
        (lambda output: None, "got None"),
        (lambda output: output.missing, "AttributeError"),
    ],
)
def test_what_is_wrong_with_rest_is_reported(dense, rest, reported):
    with pytest.raises(ModelError, match=reported):
        Explainer(dense, outputs=Outputs(corner, reference=rest), data_config=DATA)


def test_without_a_function_construction_runs_no_model(dense):
    runs = []
    hook = dense.register_forward_hook(lambda module, args, output: runs.append(len(args[0])))
    try:
        Explainer(dense, data_config=DATA)
        assert runs == []
        Explainer(dense, outputs=corner, data_config=DATA)
        assert runs == [2]
    finally:
        hook.remove()


def test_numbers_are_read_as_they_are_said_to_be(dense, image):
    numbers = torch.tensor([[2.0, -1.0]])
    cosine = Outputs(activation="cosine", scale=10.0)
    assert cosine.scores(numbers).tolist() == [[0.2, -0.1]]
    assert torch.equal(activate(numbers, "value"), numbers.double())
    assert torch.equal(log_odds(numbers, "cosine"), numbers.double())
    sigmoid = Explainer(dense, outputs=corner, data_config=DATA, activation="sigmoid").explain(image)
    assert 0 < sigmoid.probability < 1
    entry = Outputs(corner, LABELS, unit="degrees")
    assert Explainer(dense, outputs=entry, data_config=DATA).explain(image).score.display.endswith(" degrees")


def test_two_of_them_are_set_against_each_other(requested, image):
    numbers = requested.logits(requested.pixels(image))[0].detach().double()
    actual = requested.explain(image, method="gae", target=Contrast("sky", against="road"))
    assert actual.score.value == pytest.approx(float(numbers[1] - numbers[0]), rel=1e-5)
