"""Drawing of folder runs: as single overlays with the same options, which are checked before the run begins."""

import subprocess
import sys

import numpy as np
from PIL import Image

import vitflow
from vitflow.cli import main
from vitflow.demo import sample_images
from vitflow.folder.draw import report_run


def test_backgrounds_and_contours_reach_the_overlays_and_the_report(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    image = sample_images()[0]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / image.name).write_bytes(image.read_bytes())
    words = ["folder", "in", "-o", "out", "--model", "demo", "--format", "png", "--workers", "0", "--report"]
    drawing = ["--background", "dim", "--contours", "--interpolation", "nearest"]
    monkeypatch.setattr(sys, "argv", ["vitflow", *words, *drawing])
    main()
    saliency = vitflow.explain(image, model="demo")
    [path] = (tmp_path / "out").glob("*-rollout.png")
    with Image.open(path) as file:
        drawn = np.asarray(file.convert("RGB")).astype(int)
    expected = saliency.overlay(background="dim", contours=True, interpolation="nearest")
    assert np.abs(drawn - expected).mean() < 0.5
    assert np.abs(drawn - saliency.overlay()).mean() > 2
    report = tmp_path / "out" / "report.html"
    report.unlink()
    assert report_run(tmp_path / "out") == report  # of the record, which tells how it was drawn


def test_a_run_without_a_report_loads_no_matplotlib():
    code = "import sys, vitflow.folder.run\nprint('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
