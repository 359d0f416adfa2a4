"""Models that return probabilities or one number per image, and notes on maps."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.small import DATA, Custom, custom_model, photo
from vitflow import Explainer
from vitflow.cli.output import images_bar
from vitflow.errors import ModelError
from vitflow.folder.work import RunProgress

IMAGE = photo(40, 60)


def model_of(compute, **options) -> nn.Module:
    torch.manual_seed(0)
    vit = custom_model(**options)
    nn.init.normal_(vit.head.weight, std=0.5)
    return Custom(lambda m, x: compute(m.vit(x)), vit=vit).eval()


SIGMOIDS = {
    "one output": (lambda z: z.sigmoid(), 1),
    "several": (torch.sigmoid, 5),
    "squeezed": (lambda z: F.sigmoid(z).squeeze(1), 1),
    "indexed": (lambda z: z.sigmoid()[:, 1:3], 5),
    "stacked": (lambda z: torch.stack([torch.sigmoid(each) for each in z.unbind(1)], 1), 5),
    "in a dict": (lambda z: {"logits": torch.special.expit(z)}, 5),
    "without gradients": (lambda z: z.detach().sigmoid(), 5),
}


@pytest.mark.parametrize("name", SIGMOIDS)
@pytest.mark.parametrize("activation", [None, "sigmoid"])
def test_a_model_that_ends_in_a_sigmoid_is_refused_with_the_remedy(name, activation):
    compute, count = SIGMOIDS[name]
    explainer = Explainer(model_of(compute, num_classes=count), data_config=DATA, activation=activation)
    with pytest.raises(ModelError, match="logit") as error:
        explainer.explain(IMAGE, method="occlusion")
    assert ("output.logits" in str(error.value)) == (name == "in a dict")


def test_the_remedy_gives_the_probabilities_of_the_model():
    model = model_of(torch.sigmoid)
    explainer = Explainer(model, data_config=DATA, outputs=lambda output: output.logit(eps=1e-6), activation="sigmoid")
    expected = model(explainer.pixels(IMAGE))[0, 2].item()
    assert explainer.explain(IMAGE, method="gae", target=2).probability == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("probability", [torch.sigmoid, lambda z: z.softmax(1)])
def test_probabilities_of_a_function_of_outputs_are_refused_as_logits(probability):
    outputs = {"outputs": probability, "activation": "sigmoid", "data_config": DATA}
    with pytest.raises(ModelError, match="probabilities"):
        Explainer(custom_model(), **outputs).explain(IMAGE)
    values = Explainer(custom_model(), **(outputs | {"activation": "value"})).explain(IMAGE)
    assert "note" not in values.facts


def test_outputs_that_only_may_be_probabilities_have_a_note():
    explainer = Explainer(model_of(lambda z: (z.sigmoid() + z.mul(2).sigmoid()) / 2), data_config=DATA)
    saliency = explainer.explain(IMAGE)
    assert "between 0 and 1" in saliency.facts["note"]
    assert any("between 0 and 1" in note for note in saliency._notes())


@pytest.mark.parametrize("shift", [0.1, 0.5])
def test_a_logit_between_0_and_1_is_a_logit(shift):
    model = model_of(lambda z: z * 0.1 + shift, num_classes=1)
    saliency = Explainer(model, data_config=DATA).explain(IMAGE, method="input_gradient")
    assert "note" not in saliency.facts


@pytest.mark.parametrize(
    "compute", [lambda z: z.squeeze(1), torch.squeeze, lambda z: z[:, 0], lambda z: {"logits": z.flatten()}]
)
def test_one_number_per_image_is_a_logit(compute):
    expected, actual = (Explainer(model_of(each, num_classes=1), data_config=DATA) for each in (lambda z: z, compute))
    for method in ("gae", "sampling", "occlusion", "gradcam"):
        options = {"method": method, "target": 0}
        one, other = (each.explain(IMAGE, **options) for each in (expected, actual))
        assert one.probability == other.probability
        torch.testing.assert_close(torch.from_numpy(one.grid), torch.from_numpy(other.grid))
    assert len(actual.explain_batch([IMAGE, photo(50, 40, 1)], methods=["gae"])) == 2


def test_classes_without_the_axis_of_images_are_refused_with_the_remedy():
    model = model_of(torch.squeeze)
    with pytest.raises(ModelError, match=r"reshape\(-1, 5\)"):
        Explainer(model, data_config=DATA).explain(IMAGE)
    explainer = Explainer(model, data_config=DATA, outputs=lambda z: z.reshape(-1, 5), activation="softmax")
    assert explainer.explain(IMAGE, method="gae", target=3).target == 3


def test_an_empty_map_has_a_note_in_terminal_figure_and_manifest(tmp_path, capsys):
    explainer = Explainer(custom_model(), data_config=DATA)
    saliency = replace(explainer.explain(IMAGE), grid=np.zeros((4, 4), np.float32))
    assert "0 everywhere" in saliency.facts["note"]
    assert saliency.facts["note"] == replace(saliency, seconds=1.0).facts["note"]
    assert any("0 everywhere" in note for note in saliency._notes())
    row = {"input": "a.png", "status": "explained", "facts": {"rollout": saliency.facts}}
    with images_bar() as show:
        for done in (1, 2):
            show(RunProgress(done, 2, row=row))
    assert "note: 2 maps: the map is 0 everywhere" in capsys.readouterr().err
