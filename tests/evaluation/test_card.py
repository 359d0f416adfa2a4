"""The card of a method: what it shows, of which images and method, and when it is refused."""

import numpy as np
import pytest

from vitflow import Explainer
from vitflow.demo import draw_image
from vitflow.errors import OptionError, VitflowError
from vitflow.evaluation import evaluate
from vitflow.evaluation.card import card_method, draw_card, median_images
from vitflow.images.reading import write_image

OPTIONS = {"methods": ["rollout", "gae"], "metrics": ["roc_auc", "deletion_auc"], "points": 3}


@pytest.fixture(scope="module")
def measured(demo):
    return evaluate("demo:11", demo, **OPTIONS)


def texts(figure) -> str:
    drawn = [figure._suptitle, figure._supxlabel]
    for axes in figure.axes:
        drawn += [*axes.texts, axes._left_title, *axes.get_yticklabels()]
    return "\n".join(text.get_text() for text in drawn)


def test_a_card_shows_the_middle_images_of_the_method_of_the_verdict(measured, demo):
    assert card_method(measured) == "gae"
    middle = median_images(measured, "gae")
    values = dict(zip([image["input"] for image in measured.images], measured.values["roc_auc"][:, 1], strict=True))
    assert sorted(values.values())[4:7] == sorted(values[name] for name in middle)
    maps = [demo.explain(draw_image(int(name.partition("-")[2])).image, method="gae") for name in middle]
    figure = draw_card(measured, "gae", maps)
    assert len(figure.axes) == 5
    shown = texts(figure)
    estimate = measured.table("roc_auc")[1].estimate
    expected = [str(estimate), *(each.label for each in maps), "Random map", "Centre prior", "11 images", "Not shown"]
    assert [text for text in expected if text not in shown] == []
    curve = {line.get_ydata()[1] for line in figure.axes[3].lines}
    assert curve == {measured.mean_lines("deletion")[name][1] for name in ("gae", "random")}


def test_what_was_not_measured_is_said(demo, tmp_path, no_drawing):
    for seed in range(10):
        write_image(tmp_path / "in" / f"{seed}.png", draw_image(seed).image)
    options = {"methods": ["rollout"], "metrics": ["randomisation", "deletion_auc"], "points": 3, "sanity_images": 0}
    for suffix in ("png", "svg"):
        actual = evaluate(tmp_path / "in", demo, card=tmp_path / f"card.{suffix}", output=tmp_path / "out", **options)
        assert (tmp_path / f"card.{suffix}").stat().st_size > 5000
    assert "no boxes or masks" in (tmp_path / "card.svg").read_text()
    assert card_method(actual) == "rollout" and len(median_images(actual, "rollout")) == 3
    without = evaluate("demo:10", demo, methods=["gae"], metrics=["roc_auc"])
    assert "deletion was not measured" in texts(draw_card(without, "gae", []))


def test_a_card_is_refused_before_the_run_and_after_failures(demo, tmp_path):
    def never():
        raise AssertionError("loaded")

    for data, name, message in (("demo:9", "card.png", "at least 10 images, got 9"), ("demo:12", "card.jpg", "jpg")):
        with pytest.raises(OptionError, match=message):
            evaluate(data, never, card=tmp_path / name)
    images = [draw_image(seed).image for seed in range(9)] + [np.zeros(3, np.uint8)]
    with pytest.raises(VitflowError, match="at least 10 images, got 9"):
        evaluate(images, demo, metrics=["deletion_auc"], methods=["rollout"], points=3, card=tmp_path / "card.png")
    assert not list(tmp_path.iterdir()) and isinstance(demo, Explainer)
