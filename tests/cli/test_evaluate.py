"""`vitflow evaluate` as people type it: tables and JSON, exit codes, Ctrl-C, faults."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from tests.folder.test_run import count_rows
from tests.typed import Typed
from vitflow.cli import cli
from vitflow.demo import draw_image

SHORT = ["--method", "gae", "--metric", "localisation"]


def invoke(*arguments):
    return CliRunner().invoke(cli, ["evaluate", *map(str, arguments)], standalone_mode=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    place = tmp_path / "in"
    place.mkdir()
    for seed in range(3):
        Image.fromarray(draw_image(seed).image).save(place / f"{seed}.png")
        mask = draw_image(seed).masks.any(axis=0)
        Image.fromarray(mask.astype(np.uint8)).save(place / f"{seed}-mask.png")
    return place


def test_the_tables_have_a_row_for_each_method():
    first = invoke("demo:3", *SHORT, "--refine", "0")
    assert first.return_value is None
    lines = [line.split("  ") for line in first.stdout.splitlines()]
    assert lines[0][0].startswith("Too few images to say which map is most often on the object")
    assert [line[0] for line in lines if len(line) > 3] == ["method", "gae", "random", "centre"]
    assert "\ngae       1.000 ± 0.000 " in first.stdout and "-o FOLDER" in first.stderr
    assert len({len("  ".join(line)) for line in lines[2:]}) == 1  # aligned


def test_of_many_metrics_five_are_printed():
    lines = invoke("demo:4", "--method", "gae", "--sanity-images", 0, "--points", 3).stdout.splitlines()
    titles = ["ROC-AUC ↑", "pointing game ↑", "deletion AUC ↓", "insertion AUC ↑"]
    head = next(line for line in lines if line.startswith("method"))
    assert [title for title in head.split("  ") if title.strip()] == ["method", *titles]


def test_json_is_one_object():
    result = invoke("demo:1", *SHORT, "--metric", "gap", "--json")
    record = json.loads(result.stdout)
    assert (record["images"], record["methods"]) == (1, ["gae", "random", "centre"])
    assert set(record["metrics"]) == {*["pointing_game", "energy", "roc_auc", "mean_iou", "gap"]}


def test_a_failed_image_makes_the_exit_code_1(folder, tmp_path):
    (folder / "1.png").write_bytes(b"nothing")
    result = invoke(folder, "--model", "demo", *SHORT, "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "\ngae " in result.stdout
    assert "error: Expected '1.png' to be an image" in result.stderr
    assert "1 image failed" in result.stderr
    assert (tmp_path / "out" / "report.html").is_file() and "report: " in result.stderr
    assert "--overwrite" in invoke(folder, "--model", "demo", "--method", "centre", "-o", tmp_path / "out").stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", *SHORT], 2, "No data at 'nowhere'"),
        (["demo:2", "--method", "all", "--method", "gae"], 2, "--method all cannot be combined"),
        (["nowhere", "--card", "card.jpg"], 2, "ends in .png"),
        (["demo:9", *SHORT, "--card", "card.png"], 2, "at least 10 images"),
    ],
)
def test_faults_are_one_line(arguments, code, message):
    result = invoke(*arguments)
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_keeps_what_is_done(tmp_path):
    out = tmp_path / "out"
    process = Typed("evaluate", "demo:400", *SHORT, "--batch-size", 2, "-o", out)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and count_rows(out) < 2:
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    code, _, errors = process.ended(timeout=60)
    assert code == 130, errors
    assert "interrupted: finished images are saved; repeat the command to resume" in errors
    assert "Traceback" not in errors
    kept = count_rows(out)
    assert 2 <= kept < 400
    result = invoke("demo:5", *SHORT, "-o", out)
    assert "Too few images" in result.stdout and " has a value for 5, " in result.stdout
