"""Grids first, pictures later: shards that survive what can happen, and overlays drawn from them on demand."""

import io
import json
import os
import random
import shutil
import signal
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from tests.folder.test_edited_journals import mutated
from tests.folder.test_run import fill, picture_bytes, run, tiny_model
from tests.typed import forked
from vitflow import Explainer, explain_folder
from vitflow.cli import cli
from vitflow.errors import OptionError, VitflowError
from vitflow.folder import shards
from vitflow.folder.found.conditions import parse_condition
from vitflow.folder.found.draw import draw_run, read_grids
from vitflow.folder.found.report import report_run
from vitflow.folder.rows import is_folder_row
from vitflow.runs import places
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder

parquet = pytest.importorskip("pyarrow.parquet")


def shard_files(out: Path) -> list[Path]:
    return sorted((out / "grids").iterdir()) if (out / "grids").is_dir() else []


def found(out: Path) -> dict[str, dict[str, np.ndarray]]:
    return {row["input"]: dict(maps) for row, maps in read_grids(out)}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        (one[key][name] == other[key][name]).all() for key in one for name in one[key]
    )


@pytest.fixture(scope="module")
def explainer():
    return Explainer(tiny_model())


@pytest.fixture(scope="module")
def both(tmp_path_factory, explainer):
    """The same pictures with overlays and with grids alone."""
    place = tmp_path_factory.mktemp("both")
    source = fill(place / "in", 7)
    (source / "bad.png").write_bytes(b"nothing")
    (source / "caf\udce9.jpg").write_bytes(picture_bytes(9))
    options = {"model": explainer, "methods": ["rollout", "gae"], "format": "png"}
    run(source, place / "overlays", **options)
    run(source, place / "grids", store="grids", **options)
    return place


# -- what a run leaves


def test_the_maps_are_those_of_a_run_with_overlays_and_no_overlay_is_there(both):
    drawn, kept = found(both / "overlays"), found(both / "grids")
    assert list(drawn) == list(kept) and len(kept) == 8
    for name, maps in kept.items():
        assert list(maps) == ["rollout", "gae"]
        for label, grid in maps.items():
            assert grid.dtype == np.float32
            assert np.abs(grid - drawn[name][label]).max() <= np.abs(grid).max() / 2**11
    assert [path.suffix for path in both.joinpath("grids").rglob("*") if path.suffix in (".png", ".jpg", ".npz")] == []
    rows = [
        [{key: row.get(key) for key in ("input", "status", "class_index", "probability", "sha256")} for row in rows]
        for rows in (Journal(RunFolder(both / name).journal).rows() for name in ("overlays", "grids"))
    ]
    assert rows[0] == rows[1]
    (shard,) = shard_files(both / "grids")
    table = parquet.read_table(shard)
    assert table.num_rows == 8 and {"id", "class_index", "value", "placement", "grid_gae"} <= set(table.column_names)
    assert table["id"].to_pylist()[-1] == "caf\\xe9.jpg" and len(table["grid_gae"][0].as_py()) == 2 * 16


def test_overlays_drawn_on_demand_are_those_of_the_run(both, tmp_path):
    for name in ("grids", "overlays"):
        drawn = draw_run(both / name, tmp_path / name)
        assert [one.error for one in drawn] == [None] * 8
        assert {path.name for one in drawn for path in one.paths} == {path.name for path in both.glob("overlays/*.png")}
        for path in both.glob("overlays/*.png"):
            expected, own = (np.asarray(Image.open(place)).astype(int) for place in (path, tmp_path / name / path.name))
            assert np.abs(expected - own).max() <= (2 if name == "grids" else 0)


def test_the_report_draws_from_the_grids(both):
    def pictures(out):
        text = report_run(out).read_text()
        block = text[text.index('{"alpha"') if '{"alpha"' in text else text.index('"pictures"') :]
        return block.count('"shape"'), text.count("png-rollout") + text.count("-rollout.png")

    assert pictures(both / "grids") == (16, 0)
    assert pictures(both / "overlays")[0] == 16


# -- conditions and the command


ROW = {"probability": 0.25, "class_name": "cat", "class_index": 3, "value": None, "input": "a/1.jpg"}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("probability < 0.5", True),
        ("0.1 < probability <= 0.25 and class_name == 'cat'", True),
        ("not (class_index in (1, 2)) or probability > 1", True),
        ("class_name not in ['cat']", False),
        ("value < 1", False),
        ("value > -1", False),
        ("value == None", True),
        ("'1.jpg' in input", True),
    ],
)
def test_conditions(text, holds):
    assert parse_condition(text)(ROW) is holds


@pytest.mark.parametrize(
    "text",
    [
        *("", "probability", "0.5", "probability = 0.5", "probability <", "import os", "a; b", "probability < 0.5)"),
        *("__import__('os').system('x') == 0", "(lambda: 1)() == 1", "input.upper() == 'A'", "input[0] == 'a'"),
        *("class_name is None", "[x for x in input] == 1", "f'{input}' == ''", "probability + 1 < 2", "path < 3"),
        *(
            "(" * 5000 + "probability < 1",
            "not " * 240 + "1",
            "9" * 900 + " < probability ** 9 ** 9",
            "\0 < 1",
            "é < 1",
            "{[1]: 2} == 1",
            "probability in {[]}",
        ),
    ],
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(OptionError, match="Expected a condition|Unknown field"):
        parse_condition(text)


def test_like_is_compared_with_like():
    with pytest.raises(OptionError, match="like with like"):
        parse_condition("class_name < 3")(ROW)


def test_the_command_draws_what_is_asked_for_and_tells_what_it_could_not(both, tmp_path):
    place = shutil.copytree(both, tmp_path / "both", ignore=shutil.ignore_patterns("overlays"))
    header, *lines = (place / "grids/.vitflow/journal.jsonl").read_text().splitlines()
    record = json.loads(header)
    record["run"]["root"] = str(place / "in")
    (place / "grids/.vitflow/journal.jsonl").write_text("\n".join([json.dumps(record), *lines]) + "\n")
    (place / "in/1.jpg").write_bytes(picture_bytes(50))
    (place / "in/2.jpg").unlink()
    command = ["draw", str(place / "grids"), "-o", str(tmp_path / "drawn"), "--method", "gae"]
    some = CliRunner().invoke(cli, [*command, "--where", "input in ('0.jpg', '3.jpg')", "--cmap", "viridis"])
    assert some.exit_code == 0, some.output
    assert some.stdout.splitlines() == [str(tmp_path / f"drawn/{n}-gae.png") for n in (0, 3)]
    every = CliRunner().invoke(cli, [*command, "--limit", "3", "--format", "webp"])
    assert every.exit_code == 1 and "1 drawn, 2 failed" in every.stderr
    assert "1.jpg: The photograph has changed" in every.stderr and "2.jpg: Could not read" in every.stderr
    assert CliRunner().invoke(cli, [*command, "--where", "oops"]).exit_code == 2
    unhashable = CliRunner().invoke(cli, [*command, "--where", "{[1]: 2} == 1"])
    assert unhashable.exit_code == 2 and "Expected a condition" in unhashable.stderr
    most = CliRunner().invoke(cli, [*command, "--limit", "9" * 20])
    assert most.exit_code == 1 and "6 drawn, 2 failed" in most.stderr
    with pytest.raises(OptionError, match="limit of at least 1, got -1"):
        draw_run(place / "grids", tmp_path / "drawn", limit=-1)
    assert CliRunner().invoke(cli, [*command, "--method", "rolout"]).exit_code == 2
    assert CliRunner().invoke(cli, ["draw", str(tmp_path), "-o", str(tmp_path)]).exit_code == 2


def test_drawing_replaces_no_photograph(tmp_path, explainer):
    source = fill(tmp_path / "in", 1)
    (source / "0-rollout.jpg").write_bytes(picture_bytes(4))
    run(source, tmp_path / "out", model=explainer, store="grids")
    first, second = sorted(draw_run(tmp_path / "out", source), key=lambda one: one.input)
    assert "would replace a photograph" in str(first.error) + str(second.error)
    assert (source / "0-rollout.jpg").read_bytes() == picture_bytes(4)


def test_grids_and_files_of_maps_do_not_go_together(tmp_path):
    with pytest.raises(OptionError, match="save_map=False"):
        run(fill(tmp_path / "in", 1), tmp_path / "out", store="grids", save_map=True)
    with pytest.raises(OptionError, match="Unknown store"):
        run(tmp_path / "in", tmp_path / "out", store="maps")


# -- resume and faults


def test_a_second_run_does_what_is_missing_and_each_picture_lies_in_one_shard(tmp_path, explainer, monkeypatch):
    monkeypatch.setattr(shards, "_ROWS", 4)
    monkeypatch.setattr(shards.ShardWriter.__init__, "__defaults__", (4, 30.0))
    source, out = fill(tmp_path / "in", 10), tmp_path / "out"
    first = run(source, out, model=explainer, store="grids")
    assert (first.explained, len(shard_files(out))) == (10, 3)
    before = {path.name for path in shard_files(out)}
    assert run(source, out, model=explainer, store="grids").kept == 10
    assert {path.name for path in shard_files(out)} == before
    (source / "1.jpg").write_bytes(picture_bytes(77))
    shard_files(out)[0].write_bytes(b"short")
    again = run(source, out, model=explainer, store="grids")
    assert again.explained == 10 and 10 - 4 - 1 <= again.kept <= 8
    run(source, tmp_path / "fresh", model=explainer, store="grids")
    assert same(found(out), found(tmp_path / "fresh"))
    ids = [id for path in shard_files(out) for id in parquet.read_table(path)["id"].to_pylist()]
    assert sorted(ids) == sorted(f"{n}.jpg" for n in range(10))
    summary = run(source, out, model=explainer, overwrite=True)
    assert summary.kept == 0 and shard_files(out) == []


def test_a_full_disk_fails_the_pictures_of_its_shard(tmp_path, explainer, monkeypatch):
    source, real = fill(tmp_path / "in", 3), places.write_atomically

    def full(path, **options):
        if path.suffix == ".parquet":
            raise OSError(28, "No space left on device")
        return real(path, **options)

    monkeypatch.setattr(places, "write_atomically", full)
    summary = run(source, tmp_path / "out", model=explainer, store="grids")
    assert summary.failed == 3 and "No space left on device" in next(summary.failures())["message"]
    assert shard_files(tmp_path / "out") == []
    monkeypatch.undo()
    assert run(source, tmp_path / "out", model=explainer, store="grids").explained == 3


def test_a_damaged_shard_is_told_and_never_drawn(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    run(source, out, model=explainer, store="grids")
    (shard,) = shard_files(out)
    whole = shard.read_bytes()
    middle = whole.index(parquet.read_table(io.BytesIO(whole))["grid_rollout"][1].as_py())
    shard.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    for read in (found, report_run, lambda place: draw_run(place, tmp_path / "drawn")):
        with pytest.raises(VitflowError, match="remove that file and run the same"):
            read(out)
    shard.unlink()
    assert run(source, out, model=explainer, store="grids").kept == 0
    assert len(found(out)) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"rows_rollout": [-4, -4], "cols_rollout": [-4, -4]},
        {"rows_rollout": ["4", "4"]},
        {"scale_rollout": ["1", "1"]},
        {"scale_rollout": [float("nan"), -1.0]},
        {"grid_rollout": ["a" * 32, "a" * 32]},
        {"grid_rollout": [b"\0\x7e" * 16] * 2},
        {"id": [1, 2]},
    ],
)
def test_a_shard_with_other_columns_is_told(tmp_path, explainer, change):
    out = tmp_path / "out"
    run(fill(tmp_path / "in", 2), out, model=explainer, store="grids")
    (shard,) = shard_files(out)
    table = parquet.read_table(shard)
    for name, values in change.items():
        table = table.set_column(table.schema.get_field_index(name), name, [values])
    parquet.write_table(table, shard)
    for read in (found, report_run, lambda place: draw_run(place, tmp_path / "drawn")):
        with pytest.raises(VitflowError, match="remove that file and run the same"):
            read(out)


def test_what_is_read_back_is_what_the_manifest_of_the_latest_run_has(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 5), tmp_path / "out"

    def names():
        page = report_run(out).read_text()
        listed = [json.loads(line)["input"] for line in (out / "manifest.jsonl").read_text().splitlines()]
        drawn = [one.input for one in draw_run(out, tmp_path / "drawn")]
        assert list(found(out)) == drawn == listed == [f"{n}.jpg" for n in range(5) if f'"{n}.jpg"' in page]
        return len(listed)

    for limit, kept in ((None, 0), (2, 2), (None, 5), (1, 1), (3, 3)):
        summary = run(source, out, model=explainer, store="grids", limit=limit)
        assert summary.kept == kept and names() == summary.explained == (limit or 5)


def test_ctrl_c_keeps_what_waits_for_its_shard(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 40), tmp_path / "out"

    stopped = []

    def stop(state):
        if state.under_way >= 8 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, out, model=explainer, store="grids", progress=stop)
    done = len(found(out))
    assert 0 < done < 40
    assert run(source, out, model=explainer, store="grids").kept == done


def run_until(source: Path, output: Path, moment: str, count: int) -> None:
    """A run that is killed at the count-th of such moments."""
    torch.set_num_threads(1)
    shards.ShardWriter.__init__.__defaults__ = (5, 30.0)
    left, real, append = count, places.write_atomically, Journal.append

    def reached(name: str) -> bool:
        nonlocal left
        left -= name == moment
        return name == moment and left == 0

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    @contextmanager
    def write(path, **options):
        with real(path, **options) as file:
            yield file
            if reached("in mid-shard"):
                file.truncate(file.tell() // 2)
                file.flush()
                die()
        if reached("shard written"):
            die()

    def told(self, rows):
        append(self, rows)
        if reached("told"):
            with self.path.open("r+b") as file:  # with half of a further line behind it
                file.seek(0, os.SEEK_END)
                file.write(b'{"input": "0.jp')
            die()

    places.write_atomically, Journal.append = write, told
    run(source, output, workers=0, store="grids")


@pytest.mark.slow
def test_killed_at_any_moment_nothing_that_was_told_is_lost(tmp_path):
    source, out = fill(tmp_path / "in", 40), tmp_path / "out"
    run(source, tmp_path / "reference", store="grids")
    expected, before = found(tmp_path / "reference"), 0
    moments = [("in mid-shard", 2), ("shard written", 2), ("told", 1)]
    for moment, count in moments:
        process = forked(run_until, source, out, moment, count)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        told = found(out)  # each one whole, and with the maps that it shall have
        assert all(np.allclose(told[key]["rollout"], expected[key]["rollout"], atol=1e-6) for key in told)
        assert len(told) >= before and len(told) % 5 == 0
        before = len(told)
        for path in shard_files(out):
            assert path.name.startswith(".vitflow-") or parquet.read_table(path).num_rows == 5
    assert 0 < before < 40
    last = run(source, out, store="grids")
    assert last.kept == before and last.explained == 40
    assert same(found(out), expected) and list(found(out)) == list(expected)
    ids = [id for path in shard_files(out) for id in parquet.read_table(path)["id"].to_pylist()]
    assert sorted(ids) == sorted(expected)
    assert not list(out.rglob("*.part"))


def test_mutated_journals_of_grids_never_crash_and_touch_nothing_outside(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").write_text("mine")
    run(source, out, model=explainer, store="grids")
    content = RunFolder(out).journal.read_bytes()
    refused = 0
    for number in range(60):
        RunFolder(out).journal.write_bytes(mutated(content, random.Random(number)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if number % 3 == 2:
                    draw_run(out, tmp_path / "drawn")
                elif number % 3 == 1:
                    report_run(out)
                else:
                    explain_folder(source, out, model=explainer, store="grids", workers=0)
        except VitflowError:
            refused += 1
    assert 0 < refused < 50
    assert [path.read_text() for path in (tmp_path / "outside").iterdir()] == ["mine"]
    assert len(list(source.iterdir())) == 3


NOUGHTS = "grids/" + "0" * 16 + ".parquet"


@pytest.mark.parametrize(
    "shard",
    ["x", ["../a.parquet", 0, 1], ["grids/0.parquet", 0, 1], [NOUGHTS, -1, 1], [1, 2, 3]],
)
def test_a_row_that_names_another_file_is_none(tmp_path, explainer, shard):
    run(fill(tmp_path / "in", 1), tmp_path / "out", model=explainer, store="grids")
    (row,) = Journal(RunFolder(tmp_path / "out").journal).rows()
    assert is_folder_row(row) and not is_folder_row(row | {"shard": shard})


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (8, {"compression": "zstd", "use_dictionary": False}),  # zeros, packed
        (8, {"compression": "none", "use_dictionary": True}),  # one value, told once
        (2**17, {"compression": "none", "use_dictionary": False}),
    ],
)
def test_a_shard_that_would_grow_in_memory_is_refused_before_it_is_read(both, tmp_path, monkeypatch, rows, options):
    out = tmp_path / "out"
    shutil.copytree(both / "grids", out)
    (shard,) = shard_files(out)
    table = parquet.read_table(shard).slice(0, 1)
    large = table.set_column(table.column_names.index("grid_gae"), "grid_gae", [[bytes(2**20 if rows == 8 else 32)]])
    parquet.write_table(large.take([0] * rows), shard, **options)
    read = []
    monkeypatch.setattr(parquet.ParquetFile, "read", lambda *_, **__: read.append(1))
    with pytest.raises(VitflowError, match="gone, damaged, or others"):
        found(out)
    assert not read


def test_a_file_too_large_for_a_shard_is_not_read_whole(both, tmp_path, monkeypatch):
    out = tmp_path / "out"
    shutil.copytree(both / "grids", out)
    monkeypatch.setattr("vitflow.runs.places.LARGEST", 100)
    with pytest.raises(VitflowError, match="gone, damaged, or others"):
        found(out)


def test_maps_that_fill_a_shard_are_written_before_it_has_all_its_rows(tmp_path, explainer, monkeypatch):
    monkeypatch.setattr(shards, "_HELD", 200)
    source = fill(tmp_path / "in", 5)
    out = run(source, tmp_path / "out", model=explainer, store="grids", progress=None).output
    assert len(found(out)) == 5 and len(shard_files(out)) > 1
