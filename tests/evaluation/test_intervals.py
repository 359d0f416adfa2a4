"""Coverage of the intervals of sampling: a literal computation, and methods without intervals."""

import numpy as np
import pytest
import torch

from vitflow import Explainer
from vitflow.demo import draw_image
from vitflow.errors import OptionError
from vitflow.evaluation import coverage, evaluate, run_on_patches
from vitflow.explaining.applying import affinity_of
from vitflow.methods.sampling import draw_masks, mean_differences, regress

REGRESSION = {"masks": 24}


def scores_of(demo: Explainer, pixels, kept, target: int) -> np.ndarray:
    """Log-odds of the target (logits of the demo model's sigmoid) with the other tokens dropped, a mask at a time."""
    logits = [run_on_patches(demo.model, pixels, mask.nonzero().reshape(1, -1)) for mask in kept]
    return torch.cat(logits)[:, target].detach().double().numpy()


def test_coverage_is_that_of_a_literal_computation(demo):
    image, target = draw_image(1).image, draw_image(1).labels[1]
    saliency = demo.explain(image, method="sampling", target=target, random_seed=5, **REGRESSION)
    trace = demo.record(image, keys=True)
    rows, cols = saliency.grid.shape
    factor = affinity_of(trace, "both", (rows, cols)).matrix[0].double()
    pixels = demo.pixels(image)
    kept = draw_masks(rows, cols, masks=24, seed=5, affinity=factor)
    scores = scores_of(demo, pixels, kept, target)
    noise = regress(kept, torch.from_numpy(scores), factor).noise

    centred, differences = kept.double().numpy() - kept.double().numpy().mean(axis=0), scores - scores.mean()
    prior = factor.numpy() @ factor.numpy().T
    prior = prior * 24 / np.trace(centred @ prior @ centred.T)
    inverse = np.linalg.inv(centred @ prior @ centred.T + noise * np.eye(24))
    mean = prior @ centred.T @ inverse @ differences
    variance = differences @ inverse @ differences / 23
    covariance = variance * (prior - prior @ centred.T @ inverse @ centred @ prior)
    std = np.sqrt(np.diag(covariance))
    assert ((mean > 1.96 * std).reshape(rows, cols) == saliency.significant).all()

    free = draw_masks(rows, cols, masks=200, seed=6, affinity=factor)
    reference = mean_differences(free, torch.from_numpy(scores_of(demo, pixels, free, target))).numpy()
    within = []
    for patch in range(rows * cols):  # the mean weight in masks with the patch minus that in masks without it
        chosen = free[:, patch].numpy()
        difference = free.double().numpy()[chosen].mean(axis=0) - free.double().numpy()[~chosen].mean(axis=0)
        within.append(abs(difference @ mean - reference[patch]) <= 1.96 * np.sqrt(difference @ covariance @ difference))
    assert 0.3 < np.mean(within) <= 1.0
    assert coverage(demo, saliency, masks=200) == pytest.approx(np.mean(within), abs=0.5 / len(within))


def test_coverage_requires_intervals(demo):
    with pytest.raises(OptionError, match="sampling or consensus"):
        coverage(demo, demo.explain(draw_image(3).image, method="gae"))


def test_evaluate_reports_coverage_for_methods_with_intervals_only(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(coverage, "__kwdefaults__", {"masks": 40})
    methods = ["gae", ("sampling", REGRESSION), ("consensus", REGRESSION)]
    actual = evaluate("demo:3", model=demo, methods=methods, metrics=["coverage", "roc_auc"], sanity_images=2)
    measured = np.isfinite(actual.values["coverage"]).sum(axis=0)
    labels = [label.partition(" ")[0].partition(":")[0] for label in actual.methods if "blurred" not in label]
    assert labels == ["gae", "sampling", "consensus", "random", "centre"]
    assert measured.tolist() == [0, 2, 2, 0, 0]
    assert [row[1] for row in actual.overview("intervals").rows].count("not measured") == 3
    assert "Intervals of sampling" in actual.save(tmp_path / "out").read_text(encoding="utf-8")
    with pytest.raises(OptionError, match="Skipped intervals: only sampling and consensus"):
        evaluate("demo:3", model=demo, methods=["gae"], metrics=["coverage"])
