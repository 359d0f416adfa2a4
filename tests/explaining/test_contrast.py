"""One class against another: the map, its number, and where it is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from vitflow import Contrast
from vitflow.demo import draw_image
from vitflow.errors import OptionError
from vitflow.explaining.saliency import contrasted
from vitflow.folder.work import explained_row

IMAGE = draw_image(0)
FIRST, SECOND = IMAGE.labels[:2]
SPECIFIC = ["gae", "input_gradient", "occlusion", "consensus"]
#: What makes the methods that ask the model hundreds of times ask it less often.
FEWER = {"occlusion": {"patch_size": 24}, "sampling": {"masks": 64}, "consensus": {"masks": 64}}


@pytest.mark.parametrize("method", SPECIFIC)
def test_a_contrast_is_the_difference_of_the_two_maps_scaled(demo, method):
    requested = {"method": method, **FEWER.get(method, {})}
    actual = demo.explain(IMAGE.image, target=Contrast(FIRST, against=SECOND), **requested)
    shares = []
    for target in (FIRST, SECOND):
        grid = demo.explain(IMAGE.image, target=target, **requested).grid.astype(np.float64)
        shares.append(grid / np.abs(grid).sum())
    np.testing.assert_allclose(actual.grid, shares[0] - shares[1], rtol=0, atol=1e-6)
    turned = demo.explain(IMAGE.image, target=Contrast(SECOND, against=FIRST), **requested)
    np.testing.assert_allclose(turned.grid, -actual.grid, rtol=0, atol=1e-6)


def test_it_lies_on_the_first_object_and_off_the_second(demo):
    grid = demo.explain(IMAGE.image, method="gae", target=Contrast(FIRST, against=SECOND)).heatmap
    first, second = (np.nanmean(grid[IMAGE.mask_of(label)]) for label in (FIRST, SECOND))
    assert first > 0 > second


def test_its_number_is_the_difference_of_the_logits_and_it_has_a_name(demo):
    actual = demo.explain(IMAGE.image, method="gae", target=Contrast(FIRST, against=SECOND))
    with torch.no_grad():
        logits = demo.logits(demo.pixels(IMAGE.image))[0]
    assert actual.score.value == pytest.approx(float(logits[FIRST] - logits[SECOND]), abs=1e-4)
    names = demo.class_names
    assert actual.label == actual.score.name == f"{names[FIRST]} against {names[SECOND]}"
    assert actual.score.sides == (FIRST, SECOND)
    record = json.loads(json.dumps(actual.to_dict()))
    assert (record["class_index"], record["class_name"], record["probability"]) == (None, None, None)
    assert (record["target"], record["value"]) == (actual.score.name, actual.score.value)
    plain = demo.explain(IMAGE.image, method="gae", target=FIRST)
    assert (plain.to_dict()["target"], plain.to_dict()["value"]) == (names[FIRST], plain.probability)
    assert plain.score.display == f"{plain.probability:.1%}"


def test_names_several_contrasts_and_the_predicted_class(demo):
    predicted = demo.explain(IMAGE.image).score.predicted
    other = next(index for index in range(demo.num_classes) if index != predicted)
    contrasts = [Contrast(None, against=other), Contrast(demo.class_names[other].upper(), against="top1")]
    actual = demo.explain_batch([IMAGE.image] * 2, methods=["gae", "gradcam"], targets=contrasts)
    assert [one.method for one in actual] == ["gae", "gae", "gradcam", "gradcam"] * 2
    assert [one.score.sides for one in actual] == [(predicted, other), (other, predicted)] * 4


@pytest.mark.parametrize(
    ("method", "targets", "words"),
    [
        ("rollout", Contrast(1, 2), "class-specific methods, .* got rollout"),
        ("gae", Contrast(1, 1), "two different classes .* twice"),
        ("gae", [Contrast(1, 2), 3], "Classes and contrasts cannot be mixed"),
        ("gae", Contrast("top2", 1), "one class on each side"),
        ("gae", Contrast(1, "no such class"), "Unknown class"),
    ],
)
def test_what_makes_no_sense_is_refused(demo, method, targets, words):
    with pytest.raises(OptionError, match=words):
        demo.explain_batch([IMAGE.image], methods=[method], targets=targets)


def test_a_probability_that_was_rounded_to_0_gives_no_number(demo):
    first, second = demo.explain_batch([IMAGE.image], methods=["gae"], targets=[0, 1])
    reported = contrasted(first, replace(second, score=replace(second.score, value=0.0)))
    assert reported.score.value is None and reported.score.display == ""
    assert json.loads(json.dumps(reported.to_dict(), allow_nan=False))["value"] is None
    row = explained_row({"gae": reported})
    assert row["target"] == reported.score.name and row["value"] is None
    equal = replace(reported, score=replace(reported.score, value=0.0))
    assert explained_row({"gae": equal})["value"] == 0.0
