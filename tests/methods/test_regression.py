"""Regression on masks against the posterior in weight space, and against scores with known weights."""

import numpy as np
import pytest
import torch

from vitflow.methods.sampling import draw_masks, regress

PATCHES, MASKS = 12, 40


def example(rank: int = PATCHES) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Masks, scores and a factor."""
    dice = np.random.default_rng(3)
    kept = draw_masks(3, 4, masks=MASKS, keep=0.4, cells=3)
    return kept, torch.from_numpy(dice.normal(size=MASKS)), torch.from_numpy(dice.normal(size=(PATCHES, rank)))


def reference(kept: np.ndarray, scores: np.ndarray, factor: np.ndarray, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """w = F z, z ~ N(0, σ² c I): the posterior of z by completing the square, and σ² from the N − 1 contrasts."""
    masks = kept.astype(np.float64) - kept.mean(axis=0)
    centred = scores - scores.mean()
    kernel = masks @ factor @ factor.T @ masks.T
    scale = len(kept) / np.trace(kernel)
    design = masks @ factor  # s = design z
    precision = design.T @ design / noise + np.eye(factor.shape[1]) / scale
    covariance = np.linalg.inv(precision)
    mean = factor @ covariance @ design.T @ centred / noise

    marginal = scale * kernel + noise * np.eye(len(kept))
    variance = centred @ np.linalg.inv(marginal) @ centred / (len(kept) - 1)
    return mean, np.sqrt(variance * np.diag(factor @ covariance @ factor.T))


@pytest.mark.parametrize("rank", [3, PATCHES, 30])
@pytest.mark.parametrize("noise", [0.5, 12.0])
def test_the_posterior_equals_the_one_in_weight_space(rank, noise):
    kept, scores, factor = example(rank)
    actual = regress(kept, scores, factor, noise=noise)
    mean, std = reference(kept.numpy(), scores.numpy(), factor.numpy(), noise)
    np.testing.assert_allclose(actual.mean, mean, rtol=0, atol=1e-10 * np.abs(mean).max())
    np.testing.assert_allclose(actual.std, std, rtol=1e-6)


def test_the_noise_has_the_largest_likelihood_of_the_contrasts_of_the_scores():
    kept, scores, factor = example(30)
    scores = kept.double() @ torch.linspace(-1.0, 2.0, PATCHES).double() + 3.0 * scores
    masks = kept.double().numpy() - kept.double().numpy().mean(axis=0)
    kernel = masks @ factor.numpy() @ factor.numpy().T @ masks.T
    contrasts = np.linalg.svd(np.ones((1, MASKS)))[2][1:]  # orthogonal to the mean
    seen = contrasts @ scores.numpy()

    def likelihood(noise: float) -> float:
        marginal = contrasts @ (kernel * MASKS / np.trace(kernel) + noise * np.eye(MASKS)) @ contrasts.T
        variance = seen @ np.linalg.solve(marginal, seen) / (MASKS - 1)  # the likeliest one
        return float(-0.5 * (MASKS - 1) * np.log(variance) - 0.5 * np.linalg.slogdet(marginal)[1])

    actual = regress(kept, scores, factor).noise
    assert actual == pytest.approx(max(10 ** np.linspace(-1, 2, 31), key=likelihood)) and 0.1 < actual < 100.0
    noisy = regress(kept, torch.from_numpy(np.random.default_rng(0).normal(size=MASKS)), factor)
    assert noisy.noise > actual  # scores that do not depend on the patches


def test_equal_patches_and_equal_scores_give_no_weight():
    kept, scores, _ = example()
    alone = regress(kept, scores, torch.rand(1, 5).expand(PATCHES, 5))
    constant = regress(kept, torch.full((MASKS,), 2.0), torch.eye(PATCHES))
    for each in (alone, constant):
        assert each.mean.abs().max() == 0.0 and each.std.abs().max() == 0.0
