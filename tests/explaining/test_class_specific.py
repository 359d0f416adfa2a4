"""Explaining one class and then another: targets, batches, what is left behind, and which object lights up."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.class_specific import localise
from tests import literal_vit
from vitflow import Explainer, compare
from vitflow.errors import ModelError, OptionError
from vitflow.methods.cells import centre_prior, random_map
from vitflow.models.blocks import block_norms
from vitflow.recording.trace import Trace
from vitflow.registry.method_table import Method, get_method, register_method

DATA = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
IMAGES = list(np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8))
SPECIFIC = ["gradient_rollout", "gae", "gradcam", "input_gradient", "occlusion"]


def explainer(readout: str = "class token", **options) -> Explainer:
    return Explainer(literal_vit.timm_model(readout).float(), data_config=DATA, **options)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("method", ["gae", "gradcam", "occlusion", "rollout", "random"])
def test_two_classes_in_either_order_give_what_each_gives_alone(method):
    alone = {target: explainer().explain(IMAGES[0], method=method, target=target).grid for target in (1, 3)}
    for first, second in ((1, 3), (3, 1)):
        kept = explainer()
        for target in (first, second, first):
            np.testing.assert_array_equal(kept.explain(IMAGES[0], method=method, target=target).grid, alone[target])
        both = kept.explain_batch([IMAGES[0]], methods=[method], targets=[first, second])
        if get_method(method).class_specific:
            assert [saliency.target for saliency in both] == [first, second]
            for saliency in both:
                assert_close(saliency.grid, alone[saliency.target])
        else:
            assert len(both) == 1
    changed = not np.allclose(alone[1], alone[3], atol=1e-3 * np.abs(alone[1]).max())
    assert changed == get_method(method).class_specific


def test_the_most_probable_classes_each_have_their_map():
    kept = explainer()
    actual = kept.explain_batch(IMAGES[:2], methods=["gae", "rollout", "occlusion"], targets="top3")
    assert [saliency.method for saliency in actual] == (["gae"] * 3 + ["rollout"] + ["occlusion"] * 3) * 2
    for number, image in enumerate(IMAGES[:2]):
        entry = actual[7 * number : 7 * number + 7]
        assert entry[0].probability > entry[1].probability > entry[2].probability
        assert entry[0].target == entry[0].score.predicted
        for saliency in entry:
            alone = kept.explain(image, method=saliency.method, target=saliency.target)
            assert_close(saliency.grid, alone.grid)
            assert saliency.probability == pytest.approx(alone.probability)
    with pytest.raises(OptionError, match="gives 3 maps.*explain_batch\\(image, target='top3'\\)"):
        kept.explain(IMAGES[0], method="gae", target="top3")
    assert kept.explain(IMAGES[0], method="gae", target="top1").target == actual[0].target


def test_each_image_of_a_batch_has_its_target():
    model = literal_vit.timm_model(dynamic_img_size=True).float()
    kept, targets = Explainer(model, data_config=DATA, fit="native"), [3, 0, 1, 3]
    sizes = [IMAGES[0], np.repeat(IMAGES[1], 2, axis=1), IMAGES[2], IMAGES[3]]
    actual = kept.explain_batch(sizes, methods=SPECIFIC, targets=torch.tensor(targets))
    assert len({saliency.grid.shape for saliency in actual}) == 2  # two groups
    for (image, target), method in itertools.product(zip(sizes, targets, strict=True), SPECIFIC):
        saliency = actual.pop(0)
        assert (saliency.method, saliency.target) == (method, target)
        assert_close(saliency.grid, kept.explain(image, method=method, target=target).grid)


def test_a_list_as_target_has_the_class_of_each_image_and_targets_are_for_every_image():
    named = Explainer(literal_vit.timm_model().float(), data_config=DATA, class_names=list("abcde"))
    top = named.explain(IMAGES[1], method="gae").score.predicted
    for target in ([3, 1], ("d", "b"), np.array([3, 1]), [torch.tensor(3), "1"]):
        assert [each.target for each in named.explain_batch(IMAGES[:2], target=target)] == [3, 1]
        assert [each.target for each in compare(IMAGES[:2], named, methods=["GAE"], target=target).saliencies] == [3, 1]
    assert [each.target for each in named.explain_batch(IMAGES[:2], method="gae", target=["d", None])] == [3, top]
    assert [each.target for each in named.explain_batch(IMAGES[:2], targets=[3, 1])] == [3, 1, 3, 1]
    assert [each.method for each in named.explain_batch(IMAGES[:2], target=[None, None])] == ["rollout"] * 2
    assert len(named.explain_batch(IMAGES[:2], target="top3")) == 6
    assert len(compare(IMAGES[0], named, methods=["gae"], target="top3").saliencies) == 3
    for wrong, message in (([3], "each of 2 images, got 1"), ([3, "top2"], "got 'top2'"), ([3, [1]], "got")):
        for function in (named.explain_batch, partial(compare, model=named)):
            with pytest.raises(OptionError, match=message):
                function(IMAGES[:2], target=wrong)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (np.array([0, 1, 2]), "one class for each of 2 images, got 3"),
        (np.array([0, 9]), "class index from 0 to 4, got 9"),
        (np.array([0.5, 1.0]), "an array of 2 class indices, one for each image"),
        ([0, 7], "class index from 0 to 4, got 7"),
    ],
)
def test_wrong_targets_are_named(targets, message):
    with pytest.raises(OptionError, match=message):
        explainer().explain_batch(IMAGES[:2], methods=["gae"], targets=targets)


def test_numbers_of_any_kind_are_class_indices():
    kept = explainer()
    expected = kept.explain(IMAGES[0], method="gae", target=2)
    for target in (np.int64(2), "2", torch.tensor(2)):
        actual = kept.explain(IMAGES[0], method="gae", target=target)
        assert actual.target == 2
        np.testing.assert_array_equal(actual.grid, expected.grid)
    for dtype in ("int8", "uint8", "uint16", "uint32", "uint64"):
        maps = kept.explain_batch(IMAGES[:2], methods=["gradcam"], targets=np.array([2, 0], dtype))
        assert [saliency.target for saliency in maps] == [2, 0]


def test_probabilities_are_no_logits():
    model = nn.Sequential(literal_vit.timm_model().float(), nn.Softmax(dim=1)).eval()
    with pytest.raises(ModelError, match=r"Expected logits from Sequential, got probabilities.*softmax of the model"):
        Explainer(model, data_config=DATA).explain(IMAGES[0])
    kept = Explainer(model, data_config=DATA, outputs=lambda output: output.log(), activation="softmax")
    expected = explainer().explain(IMAGES[0], target=2)
    assert kept.explain(IMAGES[0], target=2).probability == pytest.approx(expected.probability)


def test_a_model_without_classes_has_no_class_specific_maps():
    for method in SPECIFIC:
        with pytest.raises(OptionError, match="require classes.*use rollout"):
            Explainer(literal_vit.timm_model(num_classes=0).float(), data_config=DATA).explain(IMAGES[0], method=method)


def test_a_head_replaced_later_has_other_classes():
    model = literal_vit.timm_model().float()
    kept = Explainer(model, data_config=DATA, class_names=list("abcde"))
    model.reset_classifier(3)
    with pytest.raises(ModelError, match="Expected 5 logits from .*, got 3"):
        kept.explain(IMAGES[0])


def test_one_forward_pass_and_one_backward_pass_per_class(monkeypatch):
    kept, passes = explainer(), {"forward": 0, "backward": 0}
    kept.model.register_forward_hook(lambda *_: passes.update(forward=passes["forward"] + 1))
    kept.explain_batch(IMAGES[:1], methods=["rollout", "gradcam"])  # which tests the model on noise, once
    passes["forward"] = 0
    differentiate = Trace.gradients_of
    counted = lambda *args, **deep: passes.update(backward=passes["backward"] + 1) or differentiate(*args, **deep)  # noqa: E731
    monkeypatch.setattr(Trace, "gradients_of", counted)
    methods = ["attention", "rollout", "gradient_rollout", "gae", "gradcam", "input_gradient", "random", "centre"]
    kept.explain_batch(IMAGES, methods=methods, targets=[0, 1, 2])
    assert passes == {"forward": 1, "backward": 3}
    kept.explain_batch(IMAGES, methods=["attention", "rollout", "centre"])
    assert passes == {"forward": 2, "backward": 3}


def state_of(model: nn.Module) -> list[object]:
    return [
        (name, p.requires_grad, None if p.grad is None else p.grad.clone(), p.detach().clone())
        for name, p in model.named_parameters()
    ] + [(module.training, len(module._forward_hooks), sorted(module.__dict__)) for module in model.modules()]


@pytest.mark.parametrize("state", ["as built", "with gradients", "frozen", "partly frozen", "training"])
def test_nothing_is_left_behind_and_the_models_state_does_not_matter(state):
    model = literal_vit.timm_model().float()
    expected = [
        saliency.grid
        for saliency in Explainer(model, data_config=DATA).explain_batch(IMAGES[:2], methods=SPECIFIC, targets=[1, 2])
    ]
    if state == "with gradients":
        for parameter in itertools.islice(model.parameters(), 0, None, 2):
            parameter.grad = torch.ones_like(parameter)
    elif state == "frozen":
        model.requires_grad_(False)
    elif state == "partly frozen":
        model.blocks[1].requires_grad_(False)
        model.patch_embed.requires_grad_(False)
    elif state == "training":
        model.train()
        model.blocks[0].eval()
    before = state_of(model)
    actual = Explainer(model, data_config=DATA).explain_batch(IMAGES[:2], methods=SPECIFIC, targets=[1, 2])
    after = state_of(model)
    for ours, theirs in zip(after, before, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    for saliency, grid in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(saliency.grid, grid)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_callers_autograd_mode_does_not_matter(context):
    kept = explainer()
    expected = [saliency.grid for saliency in kept.explain_batch(IMAGES[:2], methods=SPECIFIC)]
    with context():
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        actual = kept.explain_batch(IMAGES[:2], methods=SPECIFIC)
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == modes
    for saliency, grid in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(saliency.grid, grid)


def test_weights_made_in_inference_mode_are_named():
    with torch.inference_mode():
        model = literal_vit.timm_model().float()
    kept = Explainer(model, data_config=DATA)
    assert kept.explain(IMAGES[0], method="rollout").grid.std() > 0
    assert kept.explain(IMAGES[0], method="occlusion").grid.std() > 0
    with pytest.raises(ModelError, match=r"were made under torch\.inference_mode"):
        kept.explain(IMAGES[0], method="gae")


def test_a_method_is_given_gradients_and_features(monkeypatch):
    monkeypatch.setattr("vitflow.registry.method_table.METHODS", {})  # undone after the test

    def gradient_times_feature(trace, *, layer):
        path = block_norms(trace.model)[layer - 1]
        tokens = (trace.features[path] * trace.backward().features[path]).sum(-1)
        return trace.layout.to_grid(tokens)

    method = register_method(
        "mine", gradient_times_feature, defaults={"layer": 2}, needs=["gradients", "features"], class_specific=True
    )
    assert isinstance(method, Method)
    actual = explainer().explain_batch([IMAGES[0]], methods=["mine"], targets=[0, 1])
    assert [saliency.target for saliency in actual] == [0, 1]
    assert (actual[0].grid != actual[1].grid).any()


def test_random_maps_are_an_images_and_the_same_every_time():
    kept = explainer()
    together = [saliency.grid for saliency in kept.explain_batch(IMAGES, methods=["random"])]
    for image, grid in zip(IMAGES, together, strict=True):
        np.testing.assert_array_equal(kept.explain(image, method="random").grid, grid)
        assert ((grid >= 0) & (grid < 1)).all()
    assert len({grid.tobytes() for grid in together}) == 4
    other = kept.explain(IMAGES[0], method="random", random_seed=1).grid
    assert (other != together[0]).any()
    many = random_map(torch.arange(400.0).reshape(400, 1, 1, 1), rows=8, cols=8).numpy()
    assert many.mean() == pytest.approx(0.5, abs=0.01)
    assert abs(np.corrcoef(many[:200].ravel(), many[200:].ravel())[0, 1]) < 0.03
    with pytest.raises(OptionError, match="random_seed of at least 0"):
        kept.explain(IMAGES[0], method="random", random_seed=-1)


def test_the_centre_prior_is_its_formula():
    rows, cols, sigma = 3, 6, 0.3
    actual = centre_prior(rows, cols, sigma=sigma)
    for row, col in itertools.product(range(rows), range(cols)):
        x, y = (col + 0.5) / cols - 0.5, (row + 0.5) / rows - 0.5
        assert float(actual[row, col]) == pytest.approx(np.exp(-(x * x + y * y) / (2 * sigma * sigma)), rel=1e-6)


@pytest.fixture(scope="module")
def localised() -> dict[str, dict[str, np.ndarray]]:
    """30 drawn images with several objects, each explained for two of its classes."""
    # As the methods make them: refined, a map is spread over what is like the object, too.
    return localise(30, methods=["gae", "gradient_rollout", "gradcam"], refine=0)


@pytest.mark.parametrize(
    ("method", "least", "right"), [("gae", 0.65, 0.95), ("gradient_rollout", 0.6, 0.95), ("gradcam", 0.5, 0.75)]
)
def test_the_requested_class_has_more_than_half_of_the_energy(localised, method, least, right):
    """In the asked object's own pixels, not around it; for the first class of each image and for the second."""
    actual = localised[method]
    for which in (0, 1):
        entry, other = actual["own"][:, which], actual["other"][:, which]
        assert entry.mean() > least
        assert other.mean() < 0.1
        assert (entry > other).mean() > right
    assert actual["change"].min() > 0.0 and actual["change"].mean() > 0.75  # of the energy of two maps
