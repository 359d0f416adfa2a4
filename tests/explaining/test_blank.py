"""The score of a blank image beside that of the image."""

import numpy as np
import pytest
import torch

import vitflow
from tools.scenes import draw_scene
from vitflow.demo import sample_images


def test_the_blank_score_is_that_of_the_mean_colour():
    explainer, image = vitflow.Explainer("demo"), sample_images()[0]
    maps = explainer.explain_batch([image], methods=["rollout", "gae"], targets=["top2"], blank=True)
    pixels = explainer.pixels(image)
    with torch.no_grad():
        logits = explainer.model(pixels.mean(dim=(2, 3), keepdim=True).expand_as(pixels))
    expected = logits.sigmoid()[0]
    assert len(maps) == 3
    for saliency in maps:
        assert saliency.facts["blank"]["value"] == pytest.approx(float(expected[saliency.target]), abs=1e-5)
    plain = explainer.explain(image, method="gae", target="top1")
    np.testing.assert_array_equal(maps[1].grid, plain.grid)
    assert "blank" not in plain.facts


def test_a_score_of_the_drawn_object_vanishes_on_a_blank_image():
    thing, image = draw_scene(3).things[0], draw_scene(3).image
    explainer = vitflow.Explainer(
        "demo-text", outputs=vitflow.prompts([f"a {thing.phrase.colour} {thing.phrase.shape}"])
    )
    saliency = explainer.explain(image, target=0, blank=True)
    assert saliency.facts["blank"]["value"] < 0.5 < saliency.score.value
    assert any("mean colour" in note for note in saliency._notes())


def test_outputs_without_a_single_score_are_refused():
    explainer, image = vitflow.Explainer("demo"), sample_images()[0]
    with pytest.raises(vitflow.VitflowError, match="blank=True requires a score"):
        explainer.explain(image, target=vitflow.Contrast(0, 1), blank=True)
