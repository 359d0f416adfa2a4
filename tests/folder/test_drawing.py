"""Drawing of folder runs: as single overlays with the same options, which are checked before the run begins."""

import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import vitflow
from vitflow.cli import main
from vitflow.demo import sample_images
from vitflow.errors import OptionError, VitflowWarning
from vitflow.folder.draw import read_grids, report_run


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


@pytest.mark.parametrize("drawing", [{"background": "gray"}, {"contours": [2.0]}, {"cmap": "vridis"}])
def test_wrong_drawing_stops_a_run_before_it_begins(drawing, tmp_path):
    with pytest.raises(OptionError):
        vitflow.explain_folder(sample_images()[0], tmp_path / "out", model="demo", drawing=drawing)
    assert not (tmp_path / "out").exists()


def test_a_class_that_no_image_has_is_reported_with_what_was_meant(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    vitflow.explain_folder(sample_images()[:2], run, model="demo", workers=0)
    for where, reported in (
        ("class_name = 'orang disc'", "No image has the class 'orang disc'. Did you mean 'orange disc'? Known: "),
        ("target IN ('orange disk')", "No image has the class 'orange disk'. Did you mean 'orange disc'? Known: "),
    ):
        monkeypatch.setattr(sys, "argv", ["vitflow", "draw", str(run), "-o", str(tmp_path / "drawn"), "--where", where])
        main()
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[-1]) == ("", "0 drawn") and f"note: {reported}" in err and "orange disc" in err
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "class_name == 'orange disc' and probability < 0.0001"])
    main()
    assert capsys.readouterr().err == "0 drawn\n"  # there are such images


def test_what_blank_out_costs_is_reported_before_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr("vitflow.folder.work.MIN_REPORTED_COST", 0.0)
    options = {"model": "demo", "methods": ["rollout", "occlusion"], "workers": 0}
    with pytest.warns(VitflowWarning, match=r"144 passes per image, 288 in all, about .* each"):
        vitflow.explain_folder(sample_images()[:2], tmp_path / "run", **options)
    vitflow.explain_folder(sample_images()[:2], tmp_path / "run", **options)  # nothing is left to do, and to tell
    with pytest.warns(VitflowWarning, match="about") as reported:
        vitflow.explain_folder(sample_images()[:1], tmp_path / "few", **options, patch_size=48, shifts=4)
    assert "20 passes per image, 20 in all" in str(reported[0].message)


def test_sampling_runs_over_a_folder_and_reports_what_it_costs(tmp_path, monkeypatch):
    monkeypatch.setattr("vitflow.folder.work.MIN_REPORTED_COST", 0.0)
    options = {"model": "demo", "methods": ["sampling", "consensus"], "masks": 20, "workers": 0, "overlays": False}
    with pytest.warns(VitflowWarning, match="mask patches 20 times: 6 passes .* image, 12 in all"):
        summary = vitflow.explain_folder(sample_images()[:2], tmp_path / "run", **options)
    assert summary.explained == 2
    for (row, maps), image in zip(read_grids(tmp_path / "run"), sample_images()[:2], strict=True):
        assert row["facts"]["sampling"]["hidden"] == "tokens dropped" and row["facts"]["sampling"]["reliability"]
        for method, grid in maps.items():
            alone = vitflow.explain(image, model="demo", method=method, masks=20).grid
            np.testing.assert_allclose(grid, alone, rtol=2e-3, atol=1e-3 * alone.max())


def test_a_run_without_a_report_loads_no_matplotlib():
    code = "import sys, vitflow.folder.run\nprint('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr
