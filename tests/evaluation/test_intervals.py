"""Coverage of the intervals of sampling: a literal computation, and methods without intervals."""

import numpy as np
import pytest
import torch

from vitflow import Explainer
from vitflow.demo import draw_image
from vitflow.errors import OptionError
from vitflow.evaluation import coverage, evaluate, run_on_patches
from vitflow.explaining.applying import affinity_of
from vitflow.methods.sampling import NOISE, draw_masks

REGRESSION = {"estimator": "regression", "masks": 24}


def scores_of(demo: Explainer, pixels, kept, target: int) -> np.ndarray:
    """Log-odds of the target (logits of the demo model's sigmoid) with the other tokens dropped, a mask at a time."""
    logits = [run_on_patches(demo.model, pixels, mask.nonzero().reshape(1, -1)) for mask in kept]
    return torch.cat(logits)[:, target].detach().double().numpy()


def posterior(kept: np.ndarray, scores: np.ndarray, factor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each weight, by explicit inverses."""
    count = len(kept)
    centred, differences = kept - kept.mean(axis=0), scores - scores.mean()
    prior = factor @ factor.T
    prior = prior * count / np.trace(centred @ prior @ centred.T)
    inverse = np.linalg.inv(centred @ prior @ centred.T + NOISE * np.eye(count))
    mean = prior @ centred.T @ inverse @ differences
    variance = (differences @ inverse @ differences / count) * (prior - prior @ centred.T @ inverse @ centred @ prior)
    return mean, np.sqrt(np.diag(variance))


def test_coverage_is_that_of_a_literal_computation(demo):
    image, target = draw_image(1).image, draw_image(1).labels[1]
    saliency = demo.explain(image, method="sampling", target=target, random_seed=5, **REGRESSION)
    trace = demo.record(image, keys=True)
    rows, cols = saliency.grid.shape
    factor = affinity_of(trace, "both", (rows, cols)).matrix[0].double().numpy()
    pixels, results = demo.pixels(image), []
    for masks, seed in ((24, 5), (200, 6)):
        kept = draw_masks(rows, cols, masks=masks, keep=0.3, cells=7, seed=seed)
        scores = scores_of(demo, pixels, kept, target)
        results.append(posterior(kept.numpy().astype(float), scores, factor))
    (mean, std), (reference, _) = results
    expected = np.mean([abs(a - b) <= 1.96 * deviation for a, b, deviation in zip(mean, reference, std, strict=True)])
    assert 0.3 < expected < 1.0
    assert coverage(demo, saliency, masks=200) == pytest.approx(expected, abs=0.5 / len(mean))
    assert ((mean > 1.96 * std).reshape(rows, cols) == saliency.significant).all()


def test_coverage_requires_intervals(demo):
    for saliency in demo.explain_batch([draw_image(3).image], methods=["gae", ("sampling", {"masks": 8})]):
        with pytest.raises(OptionError, match="sampling or consensus with estimator=regression"):
            coverage(demo, saliency)


def test_evaluate_reports_coverage_for_methods_with_intervals_only(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(coverage, "__kwdefaults__", {"masks": 40})
    methods = ["gae", ("sampling", REGRESSION), ("consensus", {**REGRESSION, "masks": "auto"})]
    actual = evaluate("demo:3", model=demo, methods=methods, metrics=["coverage", "roc_auc"], sanity_images=2)
    measured = np.isfinite(actual.values["coverage"]).sum(axis=0)
    labels = [label.partition(" ")[0].partition(":")[0] for label in actual.methods if "blurred" not in label]
    assert labels == ["gae", "sampling", "consensus", "random", "centre"]
    assert measured.tolist() == [0, 0, 2, 0, 2, 0, 0, 0]
    assert [row[1] for row in actual.overview("intervals").rows].count("not measured") == 3
    assert "Intervals of sampling" in actual.save(tmp_path / "out").read_text(encoding="utf-8")
    with pytest.raises(OptionError, match="Skipped intervals: only sampling and consensus"):
        evaluate("demo:3", model=demo, methods=["gae", "sampling"], metrics=["coverage"])
