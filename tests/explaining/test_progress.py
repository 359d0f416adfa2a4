"""Progress of a run over many images: it moves soon, estimates the time left, and prints a note once."""

import io
import itertools
import re
import sys
import time
import warnings
from types import SimpleNamespace

import pytest

from tests.folder.test_run import fill, tiny_model
from tests.folder.test_run import run as run_folder
from vitflow import Explainer
from vitflow.cli.output import images_bar, reporting
from vitflow.errors import VitflowWarning
from vitflow.evaluation import evaluate
from vitflow.evaluation import run as evaluation_run
from vitflow.folder.work import RunProgress
from vitflow.progress import tracking, watched
from vitflow.registry.choices import is_slow
from vitflow.registry.method_table import list_methods


def test_the_share_grows_steadily_over_several_computations():
    seen = []
    with watched(seen.append, 2):
        for _ in range(2):
            with tracking("work", 4) as done:
                for _ in range(4):
                    done(1)
    assert seen == [0.125 * number for number in range(1, 9)]
    seen.clear()
    with watched(seen.append, 1):  # more than was expected
        for _ in range(2):
            with tracking("work", 2) as done:
                done(2)
    assert seen == [1.0]


def test_every_method_that_takes_long_says_so_and_no_other(tmp_path):
    explainer = Explainer(tiny_model())
    for method in list_methods():
        steps = []
        with watched(steps.append, 1):
            explainer.explain(fill(tmp_path, 1) / "0.jpg", method=method.name)
        assert bool(steps) == is_slow(method.name), method.name
        assert not steps or steps[-1] == 1.0


@pytest.mark.parametrize("methods", [["occlusion", "flow"], ["rollout"]])
def test_a_folder_run_moves_before_its_first_image_is_done(tmp_path, methods):
    states = []
    options = {"methods": methods, "progress": states.append, "batch_size": 4}
    if "occlusion" in methods:
        options["occlusion_batch"] = 4
    run_folder(fill(tmp_path / "in", 6), tmp_path / "out", **options)
    positions = [state.done + state.under_way for state in states]
    assert positions == sorted(positions) and positions[0] == 0 and positions[-1] == 6
    first = next(number for number, state in enumerate(states) if state.done)
    assert (first > 5) == ("occlusion" in methods)
    if "occlusion" in methods:
        assert max(after - before for before, after in itertools.pairwise(positions)) <= 1


def test_an_evaluation_moves_before_its_first_image_is_done():
    states = []
    options = {"methods": ["occlusion"], "metrics": ["faithfulness", "sanity"], "points": 3, "occlusion_batch": 4}
    evaluate("demo:2", model=Explainer(tiny_model()), sanity_images=1, progress=states.append, **options)
    assert next(number for number, state in enumerate(states) if state.done) > 4
    assert 0 < states[2].under_way < 1
    assert states[-1].done == 2


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_one_bar_with_an_estimate_and_a_file_none(monkeypatch):
    for shown in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", shown)
        with images_bar() as show:
            show(RunProgress(0, 60, None))
            for share in (0.1, 0.2, 0.6):
                time.sleep(0.12)
                show(RunProgress(0, 60, None, share))
            show(RunProgress(1, 60, {"input": "a.jpg", "status": "failed", "error": "E", "message": "of 'a.jpg'"}))
            show(RunProgress(2, 60, {"input": "b.jpg", "status": "failed", "error": "E", "message": "M"}))
        text, lines = shown.getvalue(), ("error: of 'a.jpg'\n", "error: b.jpg: E: M\n")
        assert all(line in text for line in lines)
        if shown.isatty():
            assert "0/60 images, 00:00 passed" in text and "1/60 images" in text
            assert "s/image" in text and "s/ " not in text and "? left" in text.split("\r")[1]
            estimates = re.findall(r"passed, ([^ ]+) left", text)
            assert estimates[0] == "?" and all(":" in one for one in estimates[1:]) and len(estimates) > 2
        else:
            assert text == "".join(lines)


def test_the_same_note_is_reported_once(capsys):
    with reporting():
        for number in range(5):
            warnings.warn(f"{90 + number}% of the flows are saturated.", VitflowWarning, stacklevel=1)
        warnings.warn("Something else.", VitflowWarning, stacklevel=1)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "note: 90% of the flows are saturated.",
        "note: Something else.",
    ]


# With sanity checks of one image, three times the work of another: 6 of 4 images, and 1 or 3 of the first.
@pytest.mark.parametrize(("metrics", "expected"), [(["roc_auc"], {400.0}), (["roc_auc", "sanity"], {600.0, 200.0})])
def test_an_evaluation_says_how_long_it_takes_after_its_first_image(metrics, expected, monkeypatch, capsys):
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr(evaluation_run, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    states = []
    with images_bar() as show:
        progress = lambda state: (states.append(state), show(state))  # noqa: E731
        options = {"methods": ["rollout"], "metrics": metrics, "batch_size": 2, "sanity_images": 1}
        evaluate("demo:4", model="demo", progress=progress, **options)
    assert {state.seconds for state in states if state.done < 1} == {None}
    [seconds] = {state.seconds for state in states if state.done > 1}
    assert seconds in expected
    assert capsys.readouterr().err.count(f"about {seconds / 60:.0f} min in all") == 1
