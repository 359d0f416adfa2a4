"""Which of several images a model uses."""

import importlib

import numpy as np
import pytest
import torch

from vitflow.errors import OptionError, ShapeError, VitflowError
from vitflow.evaluation import blank_inputs, paired_differences

torch.manual_seed(0)
IMAGES = {"before": torch.rand(12, 3, 6, 8), "after": torch.rand(12, 2, 3, 6, 8)}


def changes(images) -> torch.Tensor:
    """Return a score of pixels that do not stand at the mean, of both images in different shares."""
    before, after = (images[name].double().flatten(1) for name in ("before", "after"))
    return (before**2).mean(dim=1) + 3 * (after**2).mean(dim=1)


def test_each_image_is_replaced_by_its_mean_colour():
    result = blank_inputs(changes, IMAGES)
    before, after = (IMAGES[name].double().numpy() for name in ("before", "after"))
    # The mean square falls by the variance of the pixels of each channel.
    expected = {
        "before": before.var(axis=(-2, -1)).mean(axis=1),
        "after": 3 * after.var(axis=(-2, -1)).mean(axis=(1, 2)),
    }
    expected["all images"] = expected["before"] + expected["after"]
    assert list(result.blank) == list(expected)
    for name, drop in expected.items():
        np.testing.assert_allclose(result.score - result.blank[name], drop, rtol=1e-6)
        [difference] = paired_differences(["a", "b"], np.stack([drop, 0 * drop], axis=1))
        estimate = result.drops[name].estimate
        assert (estimate.mean, estimate.low) == pytest.approx((difference.estimate.mean, difference.estimate.low))
        assert result.drops[name].is_clear
    assert "without before" in str(result)


def test_random_models_draw_the_same_numbers_and_a_single_observation_has_no_interval():
    one = {name: image[:1] for name, image in IMAGES.items()}
    state = torch.get_rng_state()
    result = blank_inputs(lambda images: changes(images) + torch.randn(1), one)
    assert torch.equal(state, torch.get_rng_state())
    drawn = [blank_inputs(lambda images: torch.randn(1), one, random_seed=7).score for _ in range(2)]
    assert drawn[0] == drawn[1] != result.score
    exact = blank_inputs(changes, one)
    np.testing.assert_allclose(result.score - result.blank["after"], exact.score - exact.blank["after"], rtol=1e-5)
    assert result.drops["after"].estimate.low is None
    assert list(blank_inputs(lambda images: images["a"].amax(dim=(1, 2, 3)), {"a": one["before"]}).blank) == ["a"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16])
def test_images_of_other_types_keep_them(dtype):
    images = {name: (200 * image).to(dtype) for name, image in IMAGES.items()}
    seen = []
    blank_inputs(lambda given: seen.append(given["before"]) or changes(given), images)
    assert {image.dtype for image in seen} == {dtype}
    mean = images["before"].double().mean(dim=(-2, -1), keepdim=True).expand_as(seen[1]).numpy()
    np.testing.assert_allclose(seen[1].double().numpy(), mean, atol=0.5 if dtype == torch.uint8 else 0.1)


@pytest.mark.parametrize(
    ("score", "images", "error"),
    [
        (changes, {}, OptionError),
        (changes, {"before": IMAGES["before"], "after": IMAGES["after"][:3]}, ShapeError),
        (changes, {"before": IMAGES["before"][0], "after": IMAGES["after"][0]}, ShapeError),
        (lambda images: changes(images).mean(), IMAGES, ShapeError),
        (lambda images: changes(images).expand(4, -1).T, IMAGES, ShapeError),
        (lambda images: changes(images) / 0, IMAGES, ShapeError),
    ],
)
def test_images_and_scores_that_do_not_fit_are_refused(score, images, error):
    with pytest.raises(error, match="Expected"):
        blank_inputs(score, images)
    assert issubclass(error, VitflowError)


def test_a_policy_with_two_cameras(capsys):
    example = importlib.import_module("examples.two_cameras")
    result, saliency = example.main()
    assert set(result.drops) == {"front", "wrist", "all images"}
    assert result.drops["wrist"].is_clear
    # The map is of the policy itself: its value is the first number of the action.
    torch.manual_seed(0)
    policy = example.Policy().eval()
    images = {name: torch.rand(12, 3, 64, 64) * 2 - 1 for name in ("front", "wrist")}
    with torch.no_grad():
        action = policy(images, torch.randn(12, 7))
    assert saliency.score.value == pytest.approx(float(action[0, 0]), rel=1e-4)
    assert saliency.grid.shape == (8, 8)
    assert "lower by" in capsys.readouterr().out
