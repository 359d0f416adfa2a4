"""Names say what is shown: how each map departs from the publication whose name it has, in figures and in JSON."""

import pytest
from matplotlib.text import Text

from vitflow.analysis.strips import Strip, draw_comparison
from vitflow.demo import sample_images
from vitflow.explaining.captions import departures, departures_from_paper, method_in_words, method_label
from vitflow.images.pen import Pen
from vitflow.registry.method_table import Method, get_method, list_methods

IMAGE = sample_images()[0]


@pytest.mark.parametrize("method", [one for one in list_methods() if one.paper], ids=lambda one: one.name)
def test_what_is_as_published_departs_by_nothing_and_every_other_option_does(method):
    published = method.complete({"preset": "paper"}) if method.presets else method.published
    assert departures(method, published) == "" == departures_from_paper(method, published)
    others = {"head_fusion": "min", "discard_ratio": 0.25, "value_weighted": "output", "refine": 2, "layers": 3}
    others["below"] = "rollout"
    reported = [departures(method, {**published, name: other}) for name, other in others.items() if name in published]
    assert all(reported) and len(set(reported)) == len(reported)
    if "refine" in published:
        assert departures(method, {**published, "affinity": "keys"}) == ""  # by which nothing is refined


@pytest.mark.parametrize(
    ("name", "options", "reported"),
    [
        ("rollout", {}, "max over heads, 90% discarded, upper half of 12 or more layers, value-weighted, refined by"),
        (
            "rollout",
            {"end_layer": 9},
            "max over heads, 90% discarded, end layer 9, value-weighted, refined by attention",
        ),
        ("rollout", {"preset": "paper", "refine": 1, "affinity": "both"}, "refined by attention and keys"),
        ("flow", {"refine": 0}, "last 4 layers, rollout below, 90% discarded, value-weighted"),
        ("attention", {"layer": 2, "value_weighted": True}, "layer 2, weighted by value norms"),
        ("attention", {}, ""),
        ("occlusion", {}, "drop in log-odds"),
    ],
)
def test_departures_in_words(name, options, reported):
    method = get_method(name)
    assert departures(method, method.complete(options)).startswith(reported)
    assert (departures(method, method.complete(options)) == "") == (reported == "")


def test_a_method_of_no_publication_departs_from_none():
    for mine in (get_method("consensus"), Method("mine", max, defaults={"own": {}})):
        assert mine.published is None and departures_from_paper(mine, mine.defaults) is None
        assert departures(mine, mine.defaults) == ""
    assert departures(mine, {**mine.defaults, "own": {"a": 1}}) == "own {'a': 1}"


PUBLISHED = [one for one in list_methods() if one.published not in (None, one.defaults)]


@pytest.mark.parametrize("method", PUBLISHED, ids=lambda one: one.name)
def test_a_name_says_whether_options_are_those_of_the_paper(method):
    assert method_label(method.name, method.published) == f"{method.name} (as published)"
    assert method_in_words(method, method.published) == f"{method.title} (as published)"
    assert method_label(method.name, method.defaults) == method.name
    assert method_label(method.name, {**method.defaults, "patch": (1, 2)}) == f"{method.name} (patch (1, 2))"
    changed = method_label(method.name, {**method.defaults, "refine": 3, "score": "logit"})
    assert "(" in changed and "published" not in changed


def test_figures_strips_sheets_and_json_report_the_departure_under_the_name(demo, tmp_path):
    options = {"value_weighted": "output", "refine": 1, "affinity": "both"}
    reported = "value-weighted, refined by attention and keys"
    for method in ("attention", "gae"):
        for given, line in (({"preset": "paper", **options}, reported), ({"preset": "paper"}, "")):
            saliency = demo.explain(IMAGE, method=method, **given)
            assert saliency.to_dict()["departures_from_paper"] == line
            for figure in (saliency.figure(), draw_comparison([[saliency]], Strip(Pen(2.5)))):
                words = [text.get_text() for text in figure.findobj(Text) if text.get_text()]
                assert (line in words) == bool(line)
                if not line:
                    assert not any("weighted" in word or "refined" in word for word in words)
