"""How a folder run draws: as a single overlay is drawn with the same options, and refused before it begins."""

import sys

import numpy as np
import pytest
from PIL import Image

import vitflow
from vitflow.cli import main
from vitflow.demo import sample_pictures
from vitflow.errors import OptionError
from vitflow.folder.report import report_run


def test_backgrounds_and_contours_reach_the_overlays_and_the_report(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    picture = sample_pictures()[0]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / picture.name).write_bytes(picture.read_bytes())
    words = ["folder", "in", "-o", "out", "--model", "demo", "--format", "png", "--workers", "0", "--report"]
    drawing = ["--background", "dim", "--contours", "--interpolation", "nearest"]
    monkeypatch.setattr(sys, "argv", ["vitflow", *words, *drawing])
    main()
    saliency = vitflow.explain(picture, model="demo")
    [path] = (tmp_path / "out").glob("*-rollout.png")
    with Image.open(path) as file:
        drawn = np.asarray(file.convert("RGB")).astype(int)
    expected = saliency.overlay(background="dim", contours=True, interpolation="nearest")
    assert np.abs(drawn - expected).mean() < 0.5
    assert np.abs(drawn - saliency.overlay()).mean() > 2
    report = tmp_path / "out" / "report.html"
    report.unlink()
    assert report_run(tmp_path / "out") == report  # of the record, which tells how it was drawn


@pytest.mark.parametrize("drawing", [{"background": "gray"}, {"contours": [2.0]}, {"cmap": "vridis"}])
def test_wrong_drawing_stops_a_run_before_it_begins(drawing, tmp_path):
    with pytest.raises(OptionError):
        vitflow.explain_folder(sample_pictures()[0], tmp_path / "out", model="demo", drawing=drawing)
    assert not (tmp_path / "out").exists()
