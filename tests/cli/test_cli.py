"""The command line as a user meets it: what goes to stdout and stderr, exit codes, and files on disk."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from PIL import Image

from tests.typed import typed_here
from vitflow.demo import sample_images


@pytest.fixture
def here(monkeypatch, capfd, tmp_path):
    """A command in this process and in an empty folder: its exit code, stdout and stderr."""
    monkeypatch.setenv("COLUMNS", "100")
    return partial(typed_here, monkeypatch, capfd, tmp_path)


@pytest.fixture(scope="module")
def images():
    return sample_images()[:2]


def test_explaining_two_images(here, images, tmp_path):
    odd = tmp_path / os.fsdecode(b"new\nline \xff.png")  # which terminals cannot print
    odd.write_bytes(images[0].read_bytes())
    code, out, err = here("explain", "--model", "demo", *images, odd, "-o", "out", "--save-map")
    assert code == 0, err
    files = out.splitlines()
    assert len(files) == 6 == len([*(tmp_path / "out").iterdir()])
    for photo, overlay, saved in zip(images, files[::2], files[1::2], strict=False):
        with Image.open(overlay) as image, Image.open(photo) as original:
            assert image.size == original.size
        with np.load(saved) as arrays:
            assert arrays["grid"].shape == (12, 12)
            assert json.loads(str(arrays["metadata"]))["method"] == "rollout"
        assert f"{photo}: " in err and "%" in err


def test_json_is_data_on_stdout(here, images, tmp_path):
    output = tmp_path / "own name.jpg"
    options = ["--head-fusion", "max", "--patch", "3,4", "--name", "my shapes"]
    code, out, err = here("explain", "--model", "demo", images[0], "--json", "-o", output, *options)
    assert code == 0, err
    [record] = [json.loads(line) for line in out.splitlines()]
    assert record["input"] == str(images[0])
    assert record["output"] == str(output)
    assert output.exists()
    assert record["options"]["head_fusion"] == "max"
    assert record["options"]["patch"] == [3, 4]
    assert {"class_index", "class_name", "probability", "method"} <= record.keys()
    assert "model: my shapes knows eight drawn shapes only" in err and "vitflow_demo" not in out


def test_blank_reports_the_score_of_the_mean_colour(here, images, tmp_path):
    arguments = ["explain", images[0], "--model", "demo", "--blank", "-o", tmp_path / "map.png"]
    _, out, err = here(*arguments, "--json")
    assert "for a blank image" in err and 0.0 <= json.loads(out)["facts"]["blank"]["value"] < 0.5
    code, _, err = here(*arguments, "--class", "0", "--class", "1")
    assert code == 2 and "--blank requires a single class" in err


def test_a_model_without_class_names_reports_indices(here, images, tmp_path):
    model = timm.create_model("vit_tiny_patch16_224", num_classes=3)
    torch.nn.init.constant_(model.head.bias[1], 20)
    torch.save(model.state_dict(), tmp_path / "mine.pth")
    mine = ("--model", "vit_tiny_patch16_224", "--checkpoint", tmp_path / "mine.pth")
    folder = tmp_path / "run"
    folder.mkdir()
    safetensors.torch.save_model(model, folder / "model.safetensors")
    for given in (mine, (*mine[:-1], folder)):
        code, _, err = here("explain", images[0], *given, "--class", 2, "-o", tmp_path / "map.png")
        assert code == 0 and ": class 2, <0.1%; predicted: class 1\n" in err


def test_several_classes_make_a_strip_of_one_map_each(here, images):
    given, classes = ["explain", images[0], "--model", "demo", "--method", "gae", "--class", "top3"], {1, 2, 7}
    code, out, err = here(*given, "--save-map", "-o", "maps/")
    strip, *maps = out.splitlines()
    assert code == 0 and strip == str(Path("maps") / f"{images[0].stem}-gae-top3.png"), err
    assert {int(Path(file).stem.rpartition("-")[2]) for file in maps} == classes
    assert all(f"({number}), " in err for number in classes)
    code, out, _ = here(*given, "--same-scale", "--json", "-o", "strip.svg")
    record = json.loads(out)
    assert {one["class_index"] for one in record["maps"]} == classes and record["output"] == "strip.svg"
    words = " ".join(ET.parse("strip.svg").getroot().itertext()).split()
    assert "common to all maps of a method" in " ".join(words)
    code, out, err = here(*given, "-o", "strip.webp")
    assert (code, out) == (2, "") and "ends in .png, .pdf, .svg" in err


def test_maps_of_different_classes_are_different_files(here, images):
    written = [
        here("explain", images[0], "--model", "demo", *requested)[1].strip()
        for requested in ((), ("--class", "yellow star"), ("--class", 2, "--against", "orange disc"))
    ]
    ends = ["rollout", "gae-yellow-star", "gae-2-against-orange-disc"]
    assert written == [f"{images[0].stem}-{end}.png" for end in ends]


@pytest.mark.parametrize(("requested", "method"), [([], "rollout"), (["--class", "0", "--against", "1"], "gae")])
def test_the_default_method_follows_what_is_requested_and_is_reported(here, images, requested, method):
    given = ["explain", images[0], "--model", "demo", *requested]
    code, out, err = here(*given, "--json")
    record = json.loads(out)
    assert code == 0 and {one["method"] for one in record.get("maps", [record])} == {method}
    assert f"-{method}" in record["output"] and f"method: {method} (change with --method" in err
    assert ("attention rollout (not class-specific); predicted: " in err) == (method == "rollout")
    assert ("--class NAME" in err) == (method == "rollout")
    _, _, err = here(*given, "--method", "gae")
    assert "method: " not in err


def test_bad_images_fail_and_the_others_go_on(here, images, tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    given = [tmp_path / "bad.png", images[0], tmp_path / "missing.png"]
    code, out, err = here("explain", "--model", "demo", *given, "-o", tmp_path / "out")
    assert code == 1
    assert "1 explained, 2 failed" in err
    assert "Traceback" not in err
    assert len(out.splitlines()) == len(list((tmp_path / "out").iterdir())) == 1


def test_two_images_never_claim_one_output(here, images, tmp_path):
    twins = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        twins.append(tmp_path / folder / "same.png")
        twins[-1].write_bytes(images[0].read_bytes())
    code, out, err = here("explain", "--model", "demo", *twins, "-o", tmp_path / "out")
    assert code == 0, err
    assert len(set(out.splitlines())) == 2 == len(list((tmp_path / "out").iterdir()))


def test_an_image_is_never_overwritten(here, images, tmp_path):
    mine = tmp_path / "mine.png"
    mine.write_bytes(images[0].read_bytes())
    code, _, err = here("explain", "--model", "demo", mine, "-o", mine)
    assert code == 2
    assert "would overwrite the image" in err
    assert mine.read_bytes() == images[0].read_bytes()
    assert here("explain", "--model", "demo", mine, images[0], "-o", tmp_path / "one.png")[0] == 2


#: Command lines with a wrong value, after "--model demo" and an image, and a word of the error.
WRONG = [
    ("explain --model vit_base_patch16_242", "Did you mean vit_base_patch16_224"),
    ("explain --model vit_tiny_patch16_224.augreg_in21k_ft_in1k", "Remedies: a weights file"),
    ("explain --class zebra", "Unknown class 'zebra'"),
    ("explain --discard-ratio 1.5", "got 1.5"),
    ("explain --method flow --layers 5:2", "FIRST:LAST from 1 to 6"),
    ("explain --patch 3;4", "expected ROW,COL"),
    ("explain --device warp", "warp"),
    ("explain --device meta", "'meta' cannot be used"),
    ("explain --class 0 --discard-ratio 0.5", "gae, the default with a target"),
    ("explain --method rollout --method gae", "vitflow compare takes several"),
    ("folder -o out --class 1 --class 2", "run vitflow folder once for each"),
    ("folder -o out --batch-size ²", "not a valid integer"),
    ("explain cats", "use vitflow folder cats -o OUTPUT"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_usage_errors_are_one_line_and_exit_2(here, images, tmp_path, line, words):
    (tmp_path / "cats").mkdir()
    command, *arguments = line.split()
    code, out, err = here(command, images[0], "--model", "demo", *arguments)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err
    assert {path.name for path in tmp_path.iterdir()} <= {"cats", "out"}


def test_an_output_into_a_folder_that_is_not_there_yet(here, images, tmp_path):
    for folder in ("new.folder/", "new.folder", "nowhere"):  # the second time it is there
        code, out, err = here("explain", "--model", "demo", images[0], "-o", folder)
        assert code == 0, err
        [file] = out.splitlines()
        assert (tmp_path / file).is_file() and file.startswith(folder.rstrip("/"))
    code, _, err = here("explain", "--model", "demo", images[0], "-o", "no.where")
    assert code == 2 and "or a folder (ending in / if its name has a dot), got 'no.where'" in err
    (tmp_path / "run.2").mkdir()
    assert here("explain", "--model", "demo", images[0], "-o", "run.2")[0] == 0
    assert [file.suffix for file in (tmp_path / "run.2").iterdir()] == [".png"]


def test_an_output_that_cannot_be_written_is_reported_in_one_line_with_its_name_and_size(here, tmp_path, monkeypatch):
    Image.fromarray(np.zeros((20, 50, 3), dtype=np.uint8)).save(tmp_path / "wide.png")
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "one.npz").mkdir()
    code, out, err = here("explain", "--model", "demo", "wide.png", "-o", "one.png", "--save-map")
    assert (code, out) == (1, "") and "error: Cannot write one.npz: " in err and ".part" not in err
    monkeypatch.setattr("pathlib.Path.replace", Mock(side_effect=PermissionError(13, "Permission denied")))
    for output in ("file/map.png", "taken.png"):
        code, out, err = here("explain", "--model", "demo", "wide.png", "--method", "rollout", "-o", output)
        [line] = [line for line in err.splitlines() if line.startswith("error")]
        assert (code, out) == (1, "") and ".part" not in err
        assert "Choose another place" in line and "(50 × 20 pixels)" in line


def test_a_class_that_the_model_all_but_rules_out_gets_a_note(here, images):
    code, _, err = here("explain", "--model", "demo", images[0], "--method", "gae", "--class", "purple ring")
    assert code == 0
    [note] = [line for line in err.splitlines() if line.startswith("note: ")]
    assert "purple ring: the probability of this class is 0.012 %" in note
    for arguments in (["--method", "gae"], ["--method", "rollout", "--class", "purple ring"]):
        assert "note: " not in here("explain", "--model", "demo", images[0], *arguments)[2]


def test_json_says_which_size_is_the_width(here, tmp_path):
    Image.fromarray(np.zeros((20, 50, 3), dtype=np.uint8)).save(tmp_path / "wide.png")
    code, out, _ = here("explain", "--model", "demo", "wide.png", "--json", "--fit", "native")
    record = json.loads(out)
    assert code == 0 and (record["image_width"], record["image_height"]) == (50, 20)
    assert record["grid_columns"] > record["grid_rows"]
    assert not {"grid_size", "seen_box"} & record.keys()  # each is told once
    assert (record["input_width"], record["input_height"]) == (8 * record["grid_columns"], 8 * record["grid_rows"])
    assert record["seen"] == {"left": 0, "top": 0, "right": 50, "bottom": 20}


def test_json_names_what_is_no_text_by_escapes(here, images, tmp_path):
    odd = os.fsdecode(b"caf\xe9 \xc2\x9b31m \xe2\x80\xae.png")
    (tmp_path / odd).write_bytes(images[0].read_bytes())
    for command in ("explain", "compare"):
        code, out, _ = here(command, odd, "--method", "rollout", "--model", "demo", "--json", "-o", "a.png")
        assert code == 0 and out.isascii() and json.loads(out)["input"] == odd


def test_the_demo_writes_overlays_and_a_strip(here, tmp_path):
    code, out, err = here("demo", "-o", tmp_path / "demo")
    assert code == 0, err
    files = out.splitlines()
    assert len(files) == len(sample_images()) + 1
    for file in files:
        with Image.open(file) as image:
            image.verify()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{image}x"], "does not exist. Did you mean"),
        (["{image}", "--model", "nowhere/mine.pth"], "nowhere/mine.pth does not exist"),
        (["{image}", "--cmap", "plasmaa"], "Did you mean 'plasma'"),
        (["{image}", "-o", "map.pmg"], "map.pmg"),
        (["{image}", "--class", "eagel"], "bald eagle"),
        (["{image}", "--class-names", "{names}", "--class", "dgo"], "Did you mean 'dog'"),
    ],
)
def test_what_can_be_checked_is_checked_before_torch_is_loaded(images, tmp_path, words, message):
    (tmp_path / "names.txt").write_text("cat\ndog\n")
    given = [word.format(image=images[0], names=tmp_path / "names.txt") for word in words]
    script = (
        f"import sys; sys.argv = ['vitflow', 'explain', *{given!r}]; from vitflow.cli import main\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and message in done.stderr and done.stdout == "False\n"
