"""The command line as a user meets it: what goes to stdout and stderr, exit codes, and files on disk."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

import vitflow
from vitflow.demo import sample_pictures


def run(*arguments: object, cwd=None) -> subprocess.CompletedProcess:
    """Run the command in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-c", "from vitflow.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
        timeout=300,
    )


@pytest.fixture(scope="module")
def pictures():
    return sample_pictures()[:2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["explain", "--help"],
        ["methods"],
        ["--version"],
        ["explain"],
        ["explain", "x.png", "--method", "rolout"],
        ["explain", "x.png", "--discard-ratio", "much"],
        ["explain", "x.png", "--fit", "stretch"],
        ["nonsense"],
    ],
)
def test_help_and_usage_errors_load_no_torch(arguments):
    code = (
        "import sys\nfrom vitflow.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip().endswith("False False"), done.stderr


def test_importing_vitflow_loads_no_torch():
    code = "import sys, vitflow; assert vitflow.__all__ == sorted(vitflow.__all__); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == "False\n"


def test_every_public_name_exists():
    for name in vitflow.__all__:
        assert getattr(vitflow, name) is not None
    with pytest.raises(AttributeError, match="vitflow attribute nonsense"):
        _ = vitflow.nonsense


def test_explaining_two_pictures(pictures, tmp_path):
    done = run("explain", *pictures, "-o", tmp_path / "out", "--save-map")
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()
    assert len(files) == 4
    for picture, overlay, saved in zip(pictures, files[::2], files[1::2], strict=True):
        with Image.open(overlay) as image, Image.open(picture) as original:
            assert image.size == original.size
        with np.load(saved) as arrays:
            assert arrays["grid"].shape == (12, 12)
            assert json.loads(str(arrays["metadata"]))["method"] == "rollout"
        assert f"{picture}: " in done.stderr
        assert "%" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(f.split("/")[-1] for f in files)


def test_json_is_data_on_stdout(pictures, tmp_path):
    output = tmp_path / "own name.jpg"
    done = run("explain", pictures[0], "--json", "-o", output, "--head-fusion", "max", "--patch", "3,4")
    assert done.returncode == 0, done.stderr
    [record] = [json.loads(line) for line in done.stdout.splitlines()]
    assert record["input"] == str(pictures[0])
    assert record["output"] == str(output)
    assert output.exists()
    assert record["options"]["head_fusion"] == "max"
    assert record["options"]["patch"] == [3, 4]
    assert {"class_index", "class_name", "probability", "method"} <= record.keys()


def test_a_class_that_was_asked_for_is_reported(pictures, tmp_path):
    done = run("explain", pictures[0], "--class", "0", "-o", tmp_path, "--json")
    assert json.loads(done.stdout)["class_index"] == 0
    wrong = run("explain", pictures[0], "--class", "zebra", "-o", tmp_path)
    assert wrong.returncode == 2
    assert "Unknown class 'zebra'" in wrong.stderr


def test_bad_pictures_fail_and_the_others_go_on(pictures, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    done = run("explain", tmp_path / "bad.png", pictures[0], tmp_path / "missing.png", "-o", tmp_path / "out")
    assert done.returncode == 1
    assert "1 explained, 2 failed" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == len(list((tmp_path / "out").iterdir())) == 1


def test_two_pictures_never_claim_one_output(pictures, tmp_path):
    twins = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        twins.append(tmp_path / folder / "same.png")
        twins[-1].write_bytes(pictures[0].read_bytes())
    done = run("explain", *twins, "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 2 == len(list((tmp_path / "out").iterdir()))


def test_a_picture_is_never_overwritten(pictures, tmp_path):
    mine = tmp_path / "mine.png"
    mine.write_bytes(pictures[0].read_bytes())
    done = run("explain", mine, "-o", mine)
    assert done.returncode == 2
    assert "would overwrite the picture" in done.stderr
    assert mine.read_bytes() == pictures[0].read_bytes()
    assert run("explain", mine, pictures[0], "-o", tmp_path / "one.png").returncode == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "vit_base_patch16_242"], "Did you mean vit_base_patch16_224"),
        (["--model", "vit_tiny_patch16_224.augreg_in21k_ft_in1k"], "Remedies: a weights file"),
        (["--discard-ratio", "1.5"], "0 <= discard_ratio < 1, got 1.5"),
        (["--layer", "3"], "Unknown option of method rollout 'layer'"),
        (["--patch", "3;4"], "expected ROW,COL"),
        (["--device", "warp"], "warp"),
        (["--cmap", "rainbows"], "Unknown colormap 'rainbows'. Did you mean 'rainbow'"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(pictures, tmp_path, arguments, message):
    done = run("explain", pictures[0], "-o", tmp_path / "out", *arguments)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_names_that_terminals_cannot_print(pictures, tmp_path):
    odd = os.fsencode(tmp_path) + b"/new\nline \xff.png"
    with open(odd, "wb") as file:  # noqa: PTH123 - a name that is not text
        file.write(pictures[0].read_bytes())
    done = subprocess.run(
        [sys.executable, "-c", "from vitflow.cli import main; main()", "explain", odd, "-o", str(tmp_path / "out")],
        capture_output=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_methods_are_listed():
    table = {row["name"]: row for row in json.loads(run("methods", "--json").stdout)}
    assert table["rollout"]["options"]["residual"] == 0.5
    assert "discard-ratio" in run("methods").stdout


def test_models_are_listed():
    done = run("models", "vit_tiny_patch16_*", "--json")
    assert "vit_tiny_patch16_224.augreg_in21k_ft_in1k" in [json.loads(row)["model"] for row in done.stdout.splitlines()]
    row = json.loads(run("models", "deit_tiny_distilled_patch16_224", "--json").stdout)
    assert (row["rollout"], row["num_prefix_tokens"], row["grid"]) == ("yes", 2, [14, 14])
    assert run("models", "nothing_like_this").returncode == 2


def test_models_are_listed_as_a_table_with_what_applies_to_each():
    done = run("models", "test_*vit*", "--all")
    table = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert "10×10" in table["test_vit.r160_in1k"]
    assert "windows  no       windows" in table["test_maxvit"]
    assert done.stderr.split()[:3] == ["model", "input", "grid"]


def test_the_demo_writes_overlays_and_a_strip(tmp_path):
    done = run("demo", "-o", tmp_path / "demo")
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()
    assert len(files) == len(sample_pictures()) + 1
    for file in files:
        with Image.open(file) as image:
            image.verify()


@pytest.mark.shared
def test_forty_photographs_with_the_trained_vit_tiny(shared_data, tmp_path):
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    files = sorted((shared_data / "photos").glob("*.png"))
    checkpoint = shared_data / f"{name}.safetensors"
    done = run(
        "explain", *files, "--model", name, "--checkpoint", checkpoint, "--method", "rollout", "-o", tmp_path, "--json"
    )
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    labels = dict(row.split(",")[:2] for row in (shared_data / "photos/labels.csv").read_text().splitlines()[1:])
    right = sum(int(labels[record["input"].split("/")[-1]]) == record["class_index"] for record in records)
    assert len(list(tmp_path.iterdir())) == 40
    assert right >= 30
