"""Sanity checks: which weights are drawn anew and how, classes, sameness; nothing touched."""

from dataclasses import replace as changed

import numpy as np
import pytest
import timm
import torch
import torchvision
from scipy.stats import spearmanr
from torch import Tensor, nn

import vitflow
from tests import literal_vit
from tests.small import Custom
from vitflow import Explainer
from vitflow.errors import OptionError, ShapeError
from vitflow.evaluation.measures.faithfulness import can_drop_tokens, faithfulness_curves
from vitflow.evaluation.measures.sanity import (
    class_sensitivity,
    randomisation,
    randomised_copy,
    sameness,
)
from vitflow.registry import method_table

DATA = {"input_size": (3, 32, 32), "mean": (0.5, 0.4, 0.3), "std": (0.25,) * 3, "crop_pct": 0.8}
IMAGE = np.random.default_rng(0).integers(0, 256, (45, 61, 3), dtype=np.uint8)


@pytest.fixture
def explainer() -> Explainer:
    return Explainer(literal_vit.timm_model("class token and registers").float(), data_config=DATA)


def maps_of(explainer: Explainer, *methods, image=IMAGE, **options):
    """One map per method."""
    return explainer.explain_batch([image], methods=methods, **options)


def flat(trace) -> Tensor:
    return torch.ones(len(trace.pixels), *trace.grid())


@pytest.fixture(autouse=True)
def methods(monkeypatch) -> None:
    monkeypatch.setattr(method_table, "METHODS", dict(method_table.METHODS))
    vitflow.register_method("flat", flat)


@pytest.mark.parametrize("readout", literal_vit.READOUTS)
def test_every_weight_is_drawn_anew_in_a_copy(readout):
    model = literal_vit.timm_model(readout)
    trained = {name: value.clone() for name, value in model.state_dict().items()}
    new = randomised_copy(Explainer(model, data_config=DATA), 0).model.state_dict()
    assert not any(torch.equal(value, trained[name]) for name, value in new.items())
    assert all(torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_each_module_is_drawn_by_its_initialiser_and_the_rest_from_a_normal():
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=50, init_values=0.3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(2.0 + 3.0 * torch.randn_like(parameter))
    new = randomised_copy(Explainer(model), 0).model.requires_grad_(False)
    bound = new.head.in_features**-0.5  # torch's own: uniform within ± 1 / √fan in
    assert 0.99 * bound < new.head.weight.max() <= bound and abs(new.head.weight.mean()) < 0.1 * bound
    assert torch.equal(new.norm.weight, torch.ones(192)) and torch.equal(new.norm.bias, torch.zeros(192))
    assert torch.equal(new.blocks[0].ls1.gamma, torch.full((192,), 0.3))
    assert new.pos_embed.mean() == pytest.approx(model.pos_embed.mean().item(), abs=0.1)
    assert new.pos_embed.std() == pytest.approx(model.pos_embed.std().item(), rel=0.05)
    assert not torch.equal(new.blocks[0].attn.qkv.weight, new.blocks[1].attn.qkv.weight)
    assert np.corrcoef(new.pos_embed.detach().ravel(), model.pos_embed.detach().ravel())[0, 1] < 0.05


def test_a_model_without_blocks_is_checked_too():
    model = timm.create_model("resnet10t", num_classes=5).eval()
    explainer = Explainer(model, data_config={**DATA, "input_size": (3, 64, 64)})
    assert abs(randomisation(explainer, maps_of(explainer, "input_gradient"))[0]) < 0.6


def test_models_of_torchvision_are_checked_too():
    model = torchvision.models.VisionTransformer(32, 8, 3, 3, 24, 48, num_classes=5).eval()
    nn.init.normal_(model.heads.head.weight)
    explainer = Explainer(model, data_config=DATA)
    assert abs(randomisation(explainer, maps_of(explainer, "rollout"))[0]) < 1
    assert class_sensitivity(explainer, maps_of(explainer, "input_gradient"))[0] > 0
    assert can_drop_tokens(explainer)
    (actual,) = faithfulness_curves(explainer, [explainer.explain(IMAGE)], replace="drop")
    assert actual.deletion.std() > 0


def test_each_value_is_spearman_of_the_map_of_the_randomised_model_for_the_trained_class(explainer):
    methods = ["rollout", ("gae", {"head_fusion": "mean"}), "random", "centre", "flat"]
    original = maps_of(explainer, *methods, discard_ratio=0.5)
    actual = randomisation(explainer, original, seed=3)
    target = np.array([original[0].target])
    others = maps_of(randomised_copy(explainer, 3), *methods, targets=target, discard_ratio=0.5)
    for value, before, after in zip(actual[:2], original, others, strict=False):
        assert value == pytest.approx(spearmanr(before.grid.ravel(), after.grid.ravel()).statistic, abs=1e-12)
    assert actual[2:] == [1.0, 1.0, None]  # what does not look at the model stays as it is
    assert min(map(abs, actual[:2])) < 0.9


def test_seeds_decide_and_global_random_numbers_stay(explainer):
    maps = maps_of(explainer, "gae")
    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    first = randomisation(explainer, maps)
    assert torch.equal(torch.randn(3), expected)
    assert randomisation(explainer, maps, seed=0) == first != randomisation(explainer, maps, seed=1)


def test_the_class_is_that_of_the_maps_which_are_not_made_again(explainer, monkeypatch):
    maps = maps_of(explainer, "gae", "rollout", targets=2)
    requested = []
    run = Explainer.explain_batch

    def watched(self, *args, **options):
        requested.append((self is explainer, options.get("targets")))
        return run(self, *args, **options)

    monkeypatch.setattr(Explainer, "explain_batch", watched)
    randomisation(explainer, maps)
    assert requested == [(False, 2)]
    another = changed(maps[1], score=changed(maps[1].score, index=1))
    with pytest.raises(OptionError, match="several targets"):
        randomisation(explainer, [maps[0], another])
    with pytest.raises(OptionError, match="maps of one image"):
        randomisation(explainer, [maps[0], changed(maps[1], image=IMAGE[::-1])])


@pytest.mark.parametrize("check", [randomisation, class_sensitivity])
def test_the_model_is_left_as_it_was(explainer, check):
    model = explainer.model.train()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    explain, spec, fit = explainer.model, explainer.spec, explainer.fit
    check(explainer, maps_of(explainer, "gae", "rollout"))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert (explainer.model, explainer.spec, explainer.fit) == (explain, spec, fit)
    with torch.inference_mode():
        check(explainer, maps_of(explainer, "gae"))


def test_maps_of_a_tensor_are_checked_on_that_tensor(explainer):
    pixels = 1.7 * explainer.pixels(IMAGE)[0]  # beyond what an image can be
    methods = ["gae", "input_gradient"]
    maps = maps_of(explainer, *methods, image=pixels)
    target = np.array([maps[0].target])
    again = maps_of(randomised_copy(explainer, 0), *methods, image=pixels, targets=target)
    assert randomisation(explainer, maps) == [
        pytest.approx(spearmanr(a.grid.ravel(), b.grid.ravel())[0]) for a, b in zip(maps, again, strict=True)
    ]


def test_class_sensitivity_is_one_minus_spearman_between_two_classes(explainer):
    with torch.no_grad():
        classes = explainer.model(explainer.pixels(IMAGE))[0].argsort(descending=True)[:2].tolist()
    actual = class_sensitivity(explainer, maps_of(explainer, "rollout", "gae", "random", "gradcam"))
    for method, value in zip(["gae", "gradcam"], [actual[1], actual[3]], strict=True):
        first, second = (explainer.explain(IMAGE, method=method, target=target).grid for target in classes)
        assert value == pytest.approx(1 - spearmanr(first.ravel(), second.ravel()).statistic, abs=1e-6)
    assert actual[0] == actual[2] == 0.0 and actual[1] > 0.01


def test_class_sensitivity_requires_two_classes_a_map_that_varies_and_a_class_specific_method(explainer, monkeypatch):
    single = Explainer(literal_vit.timm_model(num_classes=1), data_config=DATA)
    with pytest.raises(OptionError, match="at least two classes"):
        class_sensitivity(single, maps_of(single, "gae"))
    vitflow.register_method("flat_by_class", flat, class_specific=True)
    assert class_sensitivity(explainer, maps_of(explainer, "flat_by_class", "rollout")) == [None, 0.0]
    maps = maps_of(explainer, "rollout", "centre")
    monkeypatch.setattr(Explainer, "explain_batch", lambda *args, **options: pytest.fail("was run"))
    assert class_sensitivity(explainer, maps) == [0.0, 0.0]


def test_checks_on_images_or_classes_without_a_gradient_are_undefined(explainer):
    """The scores are 0 unless the left half is brighter than the right one, and only one class is above 0."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        left, right = (half.mean((1, 2, 3)) for half in x.chunk(2, -1))
        return self.inner(x)[:, :3].exp() * torch.tensor([1.0, 0.0, 0.0]) * (left > right)[:, None]

    one_sided = Explainer(Custom(forward, inner=explainer.model).eval(), data_config=DATA, fit="squash")
    image = np.concatenate([IMAGE[:, :30] // 2 + 120, IMAGE[:, :30] // 2], 1)
    maps = one_sided.explain_batch([image], methods=["input_gradient", "centre"], targets=0)
    assert class_sensitivity(one_sided, maps) == [None, 0.0]


def test_sameness_is_the_correlation_with_the_mean_of_the_others():
    maps = np.random.default_rng(3).normal(size=(8, 4, 5)) * np.arange(1, 9)[:, None, None]
    for index, actual in enumerate(sameness(maps)):
        others = [each / np.abs(each).sum() for number, each in enumerate(maps) if number != index]
        expected = spearmanr(maps[index].ravel(), np.mean(others, axis=0).ravel()).statistic
        assert actual == pytest.approx(expected, abs=1e-12)
    assert sameness([*maps, np.zeros((4, 5))])[-1] is None
    for wrong in (maps[:7], [*maps, np.ones((5, 4))], []):
        with pytest.raises(ShapeError, match="Sameness requires"):
            sameness(wrong)
