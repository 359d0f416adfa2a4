"""Folder runs as users meet them: counts, names, faults caused one by one, kills, Ctrl-C, resume."""

import errno
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

import vitflow
from tests.conftest import ROOT
from tests.folder.small_models import tiny_model
from tests.mutations import mutated
from tests.typed import Typed, forked
from vitflow import Contrast, explain_folder
from vitflow.cli import cli
from vitflow.errors import ImageError, ModelError, OptionError, VitflowError, VitflowWarning
from vitflow.files import write_inside
from vitflow.folder.decoders import DecoderPool
from vitflow.folder.draw import draw_run
from vitflow.folder.plan import list_inputs
from vitflow.folder.report import report_run
from vitflow.folder.run import decoder_count
from vitflow.folder.saved import SavedRun


def image_bytes(seed: int, format: str = "JPEG", size=(48, 40)) -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).resize(size, Image.Resampling.BICUBIC).save(file, format)
    return file.getvalue()


def fill(place: Path, count: int) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (place / f"{number}.jpg").write_bytes(image_bytes(number))
    return place


def run(source, output, **options):
    options = {"model": tiny_model(), "workers": 0, "batch_size": 4, **options}
    return explain_folder(source, output, **options)


def stored(place: Path) -> list[tuple[dict, dict]]:
    """The rows of a run and the bytes of its maps, times left out."""
    with SavedRun(place) as saved:
        return [
            ({**row, "seconds": 0}, {label: grid.tobytes() for label, grid in maps.items()})
            for row, maps in saved.with_maps()
        ]


def tree(place: Path) -> dict[str, object]:
    """Every file below a folder with its content, times left out."""
    actual: dict[str, object] = {}
    for path in sorted(place.rglob("*")):
        name = path.relative_to(place).as_posix()
        if path.is_dir():
            continue
        if name == "run.sqlite":
            actual[name] = stored(path.parent)
        elif name == "run.json":
            actual[name] = {key: value for key, value in json.loads(path.read_text()).items() if key != "time"}
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            actual[name] = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
        else:
            actual[name] = path.read_bytes()
    return actual


def by_input(summary) -> dict[str, dict]:
    return {row["input"]: row for row in summary}


def report_data(output) -> list[dict]:
    """The images that the report of a run shows."""
    page = report_run(output).read_text()
    data = page.partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(data)["images"]


def test_a_run_mirrors_the_tree_and_leaves_a_row_per_input(tmp_path):
    source = fill(tmp_path / "in", 5)
    fill(source / "below", 2)
    seen = []
    summary = run(source, tmp_path / "out", recursive=True, workers=2, progress=seen.append)
    assert (summary.total, summary.explained, summary.failed, summary.kept) == (7, 7, 0, 0)
    assert [row["input"] for row in summary] == [*(f"{n}.jpg" for n in range(5)), "below/0.jpg", "below/1.jpg"]
    for row in summary:
        with Image.open(tmp_path / "out" / row["outputs"]["rollout"]) as overlay:
            assert overlay.size == (row["width"], row["height"]) == (48, 40)
    assert [state.done for state in seen] == list(range(8))
    assert {state.total for state in seen} == {7}
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["totals"] == {"total": 7, "explained": 7, "failed": 0}
    assert record["run"]["options"]["rollout"]["residual"] == 0.5


def test_the_results_are_those_of_the_explainer(tmp_path):
    source = fill(tmp_path / "in", 5)
    summary = run(source, tmp_path / "out", methods=["rollout", ("attention", {"layer": 1})], format="png")
    explainer = vitflow.Explainer(tiny_model())
    for row in summary:
        for method, options in (("rollout", {}), ("attention", {"layer": 1})):
            expected = explainer.explain(source / row["input"], method=method, **options)
            with Image.open(tmp_path / "out" / row["outputs"][method]) as overlay:
                difference = np.abs(np.asarray(overlay).astype(int) - expected.overlay())
            assert difference.max() <= 1  # an image alone and one of four may differ in the last bit
            assert row["class_index"] == expected.score.predicted
            assert row["probability"] == pytest.approx(expected.probability, abs=1e-5)


def test_no_two_inputs_claim_one_output(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a.jpg", "A.JPG", "a.png", "a-2.jpg", "\u00e4.jpg", "a\u0308.jpg"):
        (source / name).write_bytes(image_bytes(1, "PNG" if name.endswith("png") else "JPEG"))
    summary = run(source, tmp_path / "out")
    outputs = [row["outputs"]["rollout"].casefold() for row in summary]
    assert len(set(outputs)) == summary.explained == 6
    for done in range(64):  # whatever part of a run was done before, the others get the names they would have got
        rows = [row for index, row in enumerate(summary) if done >> index & 1]
        taken = {row["input"]: row["stem"] for row in rows}
        plan = list_inputs([source], tmp_path / "other").plan(["-rollout.jpg"], taken)
        assert [one.stem for one in plan] == [row["stem"] for row in summary]


def test_names_that_are_no_text_go_in_and_come_out_as_names_that_are(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    names = [
        b"new\nline.jpg",
        b"caf\xe9.jpg",
        b"<img src=x onerror=alert(1)>.jpg",
        b"x" * 250 + b".jpg",
        "日本.jpg".encode(),
    ]
    for name in names:
        (source / os.fsdecode(name)).write_bytes(image_bytes(1))
    summary = run(source, tmp_path / "out", workers=1)
    assert summary.explained == 5
    assert sorted(os.fsencode(row["input"]) for row in summary) == sorted(names)
    for row in summary:
        output = row["outputs"]["rollout"]
        assert output.isprintable() and output.encode() and (tmp_path / "out" / output).is_file()


def test_an_output_never_lands_on_an_input(tmp_path):
    source = tmp_path / "in"
    source.mkdir()
    for name in ("a.jpg", "a-rollout.jpg"):
        (source / name).write_bytes(image_bytes(1))
    with pytest.raises(OptionError, match="is also a source"):
        run(source, source)
    before = tree(source)
    summary = run([source / "a.jpg", source / "a-rollout.jpg"], tmp_path / "in", limit=1)
    assert summary.explained == 1
    assert {name: value for name, value in tree(source).items() if name in before} == before


def test_images_of_subfolders_that_are_left_out_are_mentioned(tmp_path):
    source = fill(tmp_path / "in", 2)
    for name, count in (("cats", 2), ("cats/deep", 1), ("dogs", 1), (".cache", 2), ("out", 4), ("masks", 2)):
        fill(source / name, count)
    with pytest.warns(VitflowWarning, match="^Images in subfolders .* --recursive"):
        assert run(source, source / "out", methods=["centre"], overlays=False).total == 2
    assert len(list_inputs(source, source / "out", recursive=True).files) == 8  # those of the output are not read
    with pytest.warns(VitflowWarning, match="^Images in subfolders"):
        list_inputs(source, source / "out", limit=1)
    with pytest.raises(ImageError, match="got none. Images in subfolders"):
        list_inputs(fill(tmp_path / "empty" / "in", 1).parent, tmp_path / "out")


def test_several_sources_keep_their_tree(tmp_path):
    fill(tmp_path / "one", 1), fill(tmp_path / "two", 1)
    summary = run([tmp_path / "one", tmp_path / "two" / "0.jpg", tmp_path / "two"], tmp_path / "out")
    assert [row["input"] for row in summary] == ["one/0.jpg", "two/0.jpg"]
    assert [row["outputs"]["rollout"] for row in summary] == ["one/0-rollout.jpg", "two/0-rollout.jpg"]


def test_patterns_and_limits_choose(tmp_path):
    source = fill(tmp_path / "in", 12)
    (source / "image.data").write_bytes(image_bytes(3))
    assert run(f"{source}/1*", tmp_path / "a").total == 3
    assert run(f"{source}/*.data", tmp_path / "b").explained == 1
    assert run(str(tmp_path / "i*" / "1?.jpg"), tmp_path / "c").total == 2
    assert [row["input"] for row in run(source, tmp_path / "d", limit=3)] == ["0.jpg", "1.jpg", "2.jpg"]
    assert list(list_inputs(f"file://{source}", tmp_path / "e").files) == [f"{number}.jpg" for number in range(12)]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImageError, match="got none"):
        run(tmp_path / "empty", tmp_path / "e")
    with pytest.raises(ImageError, match="there is nothing at"):
        run(tmp_path / "nowhere", tmp_path / "e")
    assert not (tmp_path / "e").exists()


def test_a_second_run_does_only_what_is_missing_or_changed(tmp_path):
    source = fill(tmp_path / "in", 10)
    out = tmp_path / "out"
    run(source, out)
    before = {path: path.stat().st_mtime_ns for path in out.glob("*.jpg")}
    same = run(source, out)
    assert (same.explained, same.kept) == (10, 10)
    (source / "3.jpg").write_bytes(image_bytes(99))
    (source / "new.jpg").write_bytes(image_bytes(98))
    (out / "7-rollout.jpg").unlink()
    (source / "9.jpg").unlink()
    with pytest.warns(VitflowWarning, match=r"no longer exist are removed \(9\.jpg\)"):
        again = run(source, out)
    assert not (out / "9-rollout.jpg").exists()
    assert (again.total, again.explained, again.kept) == (10, 10, 7)
    changed = {path.name for path in out.glob("*.jpg") if before.get(path) != path.stat().st_mtime_ns}
    assert changed == {"3-rollout.jpg", "7-rollout.jpg", "new-rollout.jpg"}
    fresh = run(source, tmp_path / "fresh")
    assert [{**row, "seconds": 0} for row in again] == [{**row, "seconds": 0} for row in fresh]
    for row in fresh:
        assert (out / row["outputs"]["rollout"]).read_bytes() == (fresh.output / row["outputs"]["rollout"]).read_bytes()
    run(source, out, limit=2)  # the other inputs exist, and their overlays stay
    assert len(list(out.glob("*-rollout.jpg"))) == 10


@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_are_not_read_and_values_that_look_wrong_are_mentioned_once(tmp_path, workers):
    source = fill(tmp_path / "in", 1)
    for name in ("IMG_2.NEF", "scan.dicom", "a.tga", "b.TGA", "labels.csv", ".hidden.cr2", "below/3.dng"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).touch()
    for number in range(3):
        values = np.random.default_rng(number).integers(0, 4096, (40, 48)).astype(np.uint16)
        Image.fromarray(values).save(source / f"x{number}.png")
    with pytest.warns(VitflowWarning) as notes:
        summary = run(source, tmp_path / "out", workers=workers)
    left_out, dark = (str(note.message) for note in notes)
    assert (summary.explained, summary.failed) == (4, 0)
    assert "(1 .dicom, 1 .nef, 2 .tga)" in left_out and left_out.endswith("Hidden image files are left out (1).")
    assert dark.startswith("3 images, such as x0.png: its values fill 1/16")
    record = json.loads((tmp_path / "out" / "run.json").read_text())
    assert record["run"]["left_out"] == {".dicom": 1, ".nef": 1, ".tga": 2, "hidden": 1}
    with pytest.raises(ImageError, match=r"got none.*1 \.dng"):
        run(source / "below", tmp_path / "other")


def test_overlays_of_inputs_that_are_gone_are_removed_unless_they_were_changed(tmp_path):
    source, out = fill(tmp_path / "in", 6), tmp_path / "out"
    first = run(source, out)
    (source / "below").mkdir()
    (source / "0.jpg").rename(source / "below" / "0.jpg")
    (source / "1.jpg").rename(source / "1.png")
    for name in ("2.jpg", "3.jpg"):
        (source / name).unlink()
    (out / "3-rollout.jpg").write_bytes(b"edited by hand")
    with pytest.warns(VitflowWarning, match=r"removed \(0\.jpg, 1\.jpg, 2\.jpg\)"):
        again = run(source, out, recursive=True)
    assert (again.total, again.kept) == (4, 2)
    overlays = {path.relative_to(out).as_posix() for path in out.rglob("*.jpg")}
    assert overlays == {row["outputs"]["rollout"] for row in again} | {"3-rollout.jpg"}
    (source / "2.jpg").write_bytes(image_bytes(2))
    assert run(source, out, recursive=True).kept == 4 and first.total == 6


def test_other_options_need_another_folder_or_overwrite(tmp_path):
    source = fill(tmp_path / "in", 2)
    run(source, tmp_path / "out", format="png")
    with pytest.raises(OptionError, match=r"options.rollout.residual was 0.5 and is 0.3.*overwrite=True"):
        run(source, tmp_path / "out", format="png", residual=0.3)
    other = tiny_model()
    torch.nn.init.ones_(other.head.bias)
    with pytest.raises(OptionError, match="the model has other weights"):
        run(source, tmp_path / "out", format="png", model=other)
    summary = run(source, tmp_path / "out", residual=0.3, overwrite=True)
    assert (summary.explained, summary.kept) == (2, 0)
    assert not list((tmp_path / "out").glob("*.png"))


def test_a_first_run_replaces_no_file_that_it_did_not_make(tmp_path):
    source = fill(tmp_path / "in", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "0-rollout.jpg").write_text("mine")
    with pytest.raises(OptionError, match="already has a file '0-rollout.jpg'"):
        run(source, tmp_path / "out")
    assert (tmp_path / "out" / "0-rollout.jpg").read_text() == "mine"


def forked_run(source: Path, output: Path) -> None:
    torch.set_num_threads(1)
    run(source, output, methods=["rollout", "centre"], workers=1)


def final_files(out: Path) -> list[Path]:
    return [path for path in out.rglob("*") if path.is_file() and path.suffix in (".jpg", ".json")]


@pytest.mark.slow
def test_killed_at_random_moments_it_completes_to_the_same_tree(tmp_path):
    source = fill(tmp_path / "in", 40)
    (source / "broken.jpg").write_bytes(image_bytes(7)[:300])
    (source / "17.png").write_bytes(image_bytes(8, "PNG"))  # claims the name of 17.jpg
    process = forked(forked_run, source, tmp_path / "reference")
    process.join()
    assert process.exitcode == 0
    expected = tree(tmp_path / "reference")
    files = 2 * 41 + 3
    assert len(expected) == files
    moments, torn = random.Random(0), 0
    out = tmp_path / "out"
    for _ in range(12):
        # The moment is told by what is written, not by a clock: how long a run takes to begin differs.
        written, later = moments.randrange(len(final_files(out)), files), moments.uniform(0.0, 0.02)
        process = forked(forked_run, source, out)
        while process.exitcode is None and len(final_files(out)) < written:
            time.sleep(0.001)
        process.join(later)
        if process.exitcode is None:
            process.kill()
            process.join()
            finals = final_files(out)
            torn += bool(finals) and not (out / "run.json").exists()
            for path in finals:  # nothing half-written under a final name
                name = path.relative_to(out).as_posix()
                assert name == "run.json" or path.read_bytes() == expected[name]
            if (out / "run.sqlite").exists() and not (out / "run.sqlite-journal").exists() and finals:
                assert all(row in expected["run.sqlite"] for row in stored(out))
        else:
            assert process.exitcode == 0
            assert tree(out) == expected
            shutil.rmtree(out)
    process = forked(forked_run, source, out)
    process.join()
    assert tree(out) == expected
    assert torn >= 3, "the kills came too early or too late to mean anything"


def test_leftovers_of_a_kill_are_removed(tmp_path):
    source = fill(tmp_path / "in", 1)
    run(source, tmp_path / "out")
    (tmp_path / "out" / ".vitflow-0123456789abcdef.part").write_text("half")
    run(source, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.part"))


def count_rows(out: Path) -> int:
    """The number of rows that a run has kept so far."""
    try:
        with SavedRun(out) as saved:
            return len(list(saved.all_rows()))
    except OptionError:  # not begun
        return 0


def test_ctrl_c_ends_soon_keeps_what_is_done_and_leaves_no_process(tmp_path):
    source = fill(tmp_path / "in", 400)
    process = Typed("folder", source, "--model", "demo", "-o", tmp_path / "out", "--batch-size", 4)
    deadline = time.monotonic() + 120
    while count_rows(tmp_path / "out") < 5:  # others may read while a run goes on
        assert time.monotonic() < deadline and process.poll() is None, process.talk()
        time.sleep(0.02)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to every process of the group
    code, _, errors = process.ended(timeout=30)
    assert code == 130, errors
    assert "Traceback" not in errors and "interrupted: finished images are saved; repeat the command" in errors
    assert time.monotonic() - began < 20  # a second or two, but the machine may be busy
    done = [row for row, _ in stored(tmp_path / "out")]
    assert 5 <= len(done) < 400
    assert all((tmp_path / "out" / row["outputs"]["rollout"]).is_file() for row in done)
    assert not list((tmp_path / "out").rglob("*.part"))


def test_the_command_reports_counts_and_exit_codes(tmp_path):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    (source / "bad.png").write_bytes(b"no image")
    command = ["folder", str(source), "--model", "demo", "-o", str(out), "--workers", "0", "--method"]
    first = CliRunner().invoke(cli, [*command, "centre"])
    assert (first.exit_code, first.stdout) == (1, f"{out / 'manifest.jsonl'}\n")
    assert "images/s" not in first.stderr and "%|" not in first.stderr  # no bar into a file
    assert (
        "error: Expected 'bad.png' to be an image" in first.stderr
        and "3 explained, 1 failed" in first.stderr.splitlines()[-1]
    )
    (source / "bad.png").unlink()
    again = CliRunner().invoke(cli, [*command, "centre", "--resume"])
    assert (again.exit_code, again.stderr.splitlines()[-1]) == (0, "3 explained (3 by an earlier run)")
    assert CliRunner().invoke(cli, [*command, "random"]).exit_code == 2


def listed(source):
    """The inputs below a folder, in order."""
    return list(list_inputs([source], source.parent / "elsewhere", recursive=True).files)


def test_inputs_are_detected_below_links_once_and_hidden_ones_not(tmp_path):
    source = tmp_path / "in"
    names = ("10/1.png", "9/8.gif", "7.tif", ".hidden.png", ".cache/1.png", "sub/.x.png", "sub/y.png")
    for name in (*names, "album.png/1.jpg", "../away/3.png"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    (source / "sub/loop").symlink_to(source, target_is_directory=True)
    (source / "self").symlink_to("self")
    (source / "link").symlink_to(tmp_path / "away", target_is_directory=True)
    (source / "file.png").symlink_to(tmp_path / "away/3.png")
    shown = ["7.tif", "9/8.gif", "10/1.png", "album.png", "album.png/1.jpg", "file.png", "link/3.png", "sub/y.png"]
    with pytest.warns(VitflowWarning, match=r"Hidden image files are left out \(2\)"):
        assert listed(source) == shown


def test_every_fault_is_a_row_and_the_others_go_on(tmp_path):
    source = fill(tmp_path / "in", 6)
    (source / "truncated.jpg").write_bytes(image_bytes(1)[:400])
    (source / "empty.jpg").write_bytes(b"")
    (source / "mislabelled.jpg").write_bytes(image_bytes(2, "PNG"))
    (source / "text.png").write_text("hello")
    (source / "x.jpg").mkdir()
    (source / "loop.jpg").symlink_to("loop.jpg")
    (source / "nowhere.jpg").symlink_to("missing")
    (source / "up").symlink_to("..")
    bomb = io.BytesIO()
    Image.new("1", (20_000, 9_000)).save(bomb, "PNG")
    (source / "bomb.png").write_bytes(bomb.getvalue())
    os.mkfifo(source / "pipe.png")
    summary = run(source, tmp_path / "out", recursive=True, workers=2)
    rows = by_input(summary)
    errors = {name: row["error"] for name, row in rows.items() if row["status"] == "failed"}
    assert errors == {
        "truncated.jpg": "OSError",
        "empty.jpg": "UnidentifiedImageError",
        "text.png": "UnidentifiedImageError",
        "x.jpg": "IsADirectoryError",
        "loop.jpg": "OSError",
        "nowhere.jpg": "FileNotFoundError",
        "bomb.png": "DecompressionBombError",
        "pipe.png": "ImageError",
    }
    assert rows["mislabelled.jpg"]["status"] == "explained"
    assert "pixels" in rows["bomb.png"]["message"]
    assert (summary.explained, summary.failed) == (7, 8)
    assert {row["input"] for row in summary.failures()} == set(errors)


def slow_image(path: Path) -> Path:
    """A small file that takes seconds to decode."""
    Image.new("1", (13_000, 13_000)).save(path, "PNG")
    return path


def test_a_decoder_that_crashes_or_hangs_costs_one_row(tmp_path):
    source = fill(tmp_path / "in", 3)
    slow = slow_image(tmp_path / "slow.png")
    with DecoderPool(1, timeout=1.0) as pool:
        assert pool.submit(str(source / "0.jpg")).result().image.shape == (40, 48, 3)
        hung = pool.submit(str(slow)).result().row
        assert hung["error"] == "TimeoutError"
        assert pool.submit(str(source / "2.jpg")).result().row["sha256"]
    with DecoderPool(1) as pool:
        [child] = pool._children
        crashing = pool.submit(str(slow))
        time.sleep(0.2)
        os.kill(child._process.pid, signal.SIGKILL)
        crash = crashing.result().row
        assert crash["error"] == "DecoderCrash" and "exit status -9" in crash["message"]
        assert pool.submit(str(source / "2.jpg")).result().image is not None
        process = child._process
        process.kill()
        process.wait()  # it dies between two images
        assert pool.submit(str(source / "2.jpg")).result().image is not None
        assert process.stdin.closed and process.stdout.closed


TIMED = """
import signal, sys, time
if sys.argv[1] == "without a timer":
    del signal.setitimer
from vitflow.folder.decoders import decode_file, limit_time
limit_time(0.5)  # enough for the next line on a busy machine
limit_time(0)
time.sleep(0.6)
print("lifted", flush=True)
limit_time(0.3)
decode_file(sys.argv[2])
print("too late")
"""


@pytest.mark.parametrize(("way", "code"), [("with a timer", -signal.SIGALRM), ("without a timer", 1)])
def test_the_time_of_decoding_is_limited_on_every_platform(tmp_path, way, code):
    command = [sys.executable, "-c", TIMED, way, slow_image(tmp_path / "slow.png")]
    actual = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (actual.stdout, actual.returncode) == ("lifted\n", code)


SCRIPT = """
import sys
print("begun")
from vitflow.folder.decoders import DecoderPool
with DecoderPool(1) as pool:
    print(pool.submit(sys.argv[1]).result().image.shape)
"""


def test_decoding_in_processes_does_not_run_the_caller_s_script_again(tmp_path):
    source = fill(tmp_path / "in", 1)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", source / "0.jpg"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    actual = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert actual.stdout.splitlines() == ["begun", "(40, 48, 3)"], actual.stderr


def test_a_full_disk_fails_what_does_not_fit(tmp_path, monkeypatch):
    source = fill(tmp_path / "in", 8)
    real, left = write_inside, 5

    def small_disk(folder, path):
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, path)

    monkeypatch.setattr("vitflow.folder.draw.write_inside", small_disk)
    summary = run(source, tmp_path / "out")
    assert (summary.explained, summary.failed) == (5, 3)
    assert {row["error"] for row in summary.failures()} == {"OSError"}
    assert all("No space left on device" in row["message"] for row in summary.failures())
    monkeypatch.undo()
    again = run(source, tmp_path / "out")
    assert (again.explained, again.kept) == (8, 5)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make a small disk")
def test_a_disk_that_is_really_full_ends_the_run_in_words_and_the_next_one_goes_on(tmp_path):
    source, disk = fill(tmp_path / "in", 60), tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a small disk cannot be mounted here")
    try:
        with pytest.raises(VitflowError, match="disk is full"):
            run(source, disk / "out")
        kept = {row["input"]: row["status"] for row, _ in stored(disk / "out")}  # the file is whole
        assert "explained" in kept.values()
        subprocess.run(["mount", "-o", "remount,size=4M", disk], check=True)
        summary = run(source, disk / "out")
        assert summary.explained == 60 and 0 < summary.kept < 60
        assert not list(disk.rglob("*.part"))
    finally:
        subprocess.run(["umount", disk], check=True)


class SmallMemory(VisionTransformer):
    """Runs out of memory with more than three images."""

    largest = 3
    seen: list[int] = []  # noqa: RUF012

    def forward(self, x, attn_mask=None):
        self.seen.append(len(x))
        if len(x) > self.largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate much")
        return super().forward(x)


@pytest.fixture
def one_lane(monkeypatch):
    """All of a batch in one forward pass, however many threads there are."""
    monkeypatch.setattr("vitflow.folder.pipeline._MOST_LANES", 1)


def test_out_of_memory_halves_the_batch_and_goes_on(tmp_path, one_lane):
    source = fill(tmp_path / "in", 20)
    SmallMemory.seen.clear()
    summary = run(source, tmp_path / "out", model=tiny_model(SmallMemory), batch_size=10)
    assert (summary.explained, summary.failed) == (20, 0)
    assert sum(size > 3 for size in SmallMemory.seen) == 2  # 10 and 5, and never again
    SmallMemory.largest = 0
    try:
        summary = run(source, tmp_path / "none", model=tiny_model(SmallMemory), batch_size=4, limit=5)
    finally:
        SmallMemory.largest = 3
    assert summary.failed == 5
    assert {row["error"] for row in summary} == {"OutOfMemoryError"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"methods": ["rolout"]}, OptionError, "Did you mean 'rollout'"),
        ({"drawing": {"cmap": "rainbows"}}, OptionError, "Unknown colormap"),
        ({"target": ["disc", "ring"]}, OptionError, "one class for all"),
        ({"target": 7}, OptionError, "from 0 to 4, got 7"),
        ({"format": "gif"}, OptionError, "jpg, png, webp"),
        ({"model": "no_such_model"}, ModelError, "Unknown model"),
    ],
)
def test_what_is_wrong_with_all_stops_the_run_and_writes_nothing(tmp_path, options, error, message):
    source = fill(tmp_path / "in", 1)
    with pytest.raises(error, match=message):
        run(source, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("cores", "images", "workers", "count"),
    [(8, 2, 1000, 2), (1, 9, 1000, 1), (4, 9, None, 2), (64, 99, None, 8), (8, 9, 0, 0)],
)
def test_no_more_decoders_start_than_there_are_cores_and_images(monkeypatch, cores, images, workers, count):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert decoder_count(images, workers) == count


def write_mutations(place: Path, count: int) -> None:
    """Damage real image files."""
    place.mkdir(parents=True)
    suffixes = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "TIFF": "tif"}
    for number in range(count):
        format = list(suffixes)[number % 4]
        damaged = mutated(image_bytes(number % 7, format), random.Random(number))
        (place / f"{number:05}.{suffixes[format]}").write_bytes(damaged)


def test_mutated_images_never_crash_or_hang_and_each_has_its_row(tmp_path):
    write_mutations(tmp_path / "in", 60)
    summary = run(tmp_path / "in", tmp_path / "out", workers=2, batch_size=16)
    assert summary.total == 60 == summary.explained + summary.failed == len(list(summary))
    assert min(summary.explained, summary.failed) > 5  # or the mutations prove nothing
    assert all(row["error"] and row["message"] for row in summary.failures())
    assert not {"DecoderCrash", "TimeoutError"} & {row["error"] for row in summary.failures()}


def native_explainer() -> vitflow.Explainer:
    """An explainer whose images have grids of their own."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=2, num_classes=5, dynamic_img_size=True
    )
    model.pretrained_cfg = tiny_model().pretrained_cfg
    return vitflow.Explainer(model, fit="native")


def test_an_image_of_the_class_that_its_answer_is_set_against_fails_alone(tmp_path):
    source, explainer = fill(tmp_path / "in", 6), vitflow.Explainer(tiny_model())
    outputs = {path.name: explainer.explain(path).score.predicted for path in source.iterdir()}
    entry = outputs["0.jpg"]
    same = sorted(name for name, answer in outputs.items() if answer == entry)
    (source / "white.png").write_bytes(b"no image")
    options = {"model": explainer, "methods": ["gae"], "target": Contrast(None, against=entry)}
    summary = run(source, tmp_path / "out", **options)
    failures = {row["input"]: row["error"] for row in summary.failures()}
    assert failures == {**dict.fromkeys(same, "SameClassError"), "white.png": "UnidentifiedImageError"}
    assert run(source, tmp_path / "out", **options).kept == 6 - len(same)
    target = Contrast((entry + 1) % 5, against=entry)
    row = next(iter(run(source, tmp_path / "other", **options | {"target": target})))
    direct = explainer.explain(source / row["input"], method="gae", target=target)
    assert (row["class_index"], row["probability"], row["target"]) == (None, None, direct.score.name)
    assert row["value"] == pytest.approx(direct.score.value, abs=1e-3)
    for target in (Contrast(3, against="3"), Contrast("top1", against=None)):
        with pytest.raises(OptionError, match="are the same class"):
            run(source, tmp_path / "never", **(options | {"target": target}))
    assert not (tmp_path / "never").exists()


def test_a_patch_that_an_image_does_not_have_is_that_image_s_row(tmp_path):
    source, explainer = fill(tmp_path / "in", 2), native_explainer()
    (source / "wide.jpg").write_bytes(image_bytes(5, size=(160, 40)))
    summary = run(source, tmp_path / "out", model=explainer, patch=(0, 6))
    assert [(row["input"], row["error"]) for row in summary.failures()] == [
        (name, "OutsideGridError") for name in ("0.jpg", "1.jpg")
    ]
    assert summary.explained == 1 and "outside the grid" in next(summary.failures())["message"]
    with pytest.raises(OptionError, match="outside the grid"):  # of every image where all have one grid
        run(source, tmp_path / "other", patch=(0, 6))


def test_the_classes_of_a_model_without_a_count_are_counted(tmp_path):
    data = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    explainer = vitflow.Explainer(torch.nn.Sequential(tiny_model()), data_config=data)
    options = {"model": explainer, "methods": ["centre"]}
    assert [row["class_index"] for row in run(fill(tmp_path / "in", 1), tmp_path / "out", target=3, **options)] == [3]
    with pytest.raises(OptionError, match="from 0 to 4"):
        run(tmp_path / "in", tmp_path / "wrong", target=5, **options)


def test_a_photograph_that_was_replaced_is_never_shown_under_the_old_map(tmp_path):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    run(source, out)

    def images():
        shown = report_data(out)
        return {one["name"]: (one["image"], one["maps"]["rollout"]["facts"].get("photograph")) for one in shown}

    assert all(image is not None and reported is None for image, reported in images().values())
    (source / "1.jpg").write_bytes(image_bytes(9))
    (source / "2.jpg").unlink()
    shown = images()
    assert shown["0.jpg"][0] is not None and shown["1.jpg"][0] is shown["2.jpg"][0] is None
    assert "has changed since the run" in shown["1.jpg"][1] and "Could not read" in shown["2.jpg"][1]
    drawn = {one.input: one.error for one in draw_run(out, tmp_path / "drawn")}
    assert drawn == {name: reported for name, (_, reported) in shown.items()}
