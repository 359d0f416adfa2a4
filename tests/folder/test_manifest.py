"""The journal survives what can happen to it; the manifest holds the same rows in every format."""

import csv
import errno
import json
import os
from pathlib import Path

import pytest

from vitflow.errors import OptionError, VitflowError
from vitflow.folder.found.manifest import COLUMNS, write_manifest
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder

ODD = os.fsdecode(b"caf\xe9\nnew.jpg")


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / ".vitflow" / "journal.jsonl")
    made.start({"run": {"model": "m"}})
    return made


def test_rows_are_found_again_and_later_ones_replace_earlier_ones(journal):
    journal.append([{"input": "a", "n": 1}, {"input": ODD, "n": 2}])
    journal.append([{"input": "a", "n": 3}])
    again = Journal(journal.path)
    assert again.header["run"] == {"model": "m"}
    assert list(again.rows(["a", "missing", ODD])) == [{"input": "a", "n": 3}, {"input": ODD, "n": 2}]
    assert len(again) == 2 and ODD in again


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_line_that_was_cut_off_is_forgotten_and_written_over(journal, cut):
    journal.append([{"input": "a"}, {"input": "b", "text": "x" * 20}])
    content = journal.path.read_bytes()
    journal.path.write_bytes(content[:-cut])
    again = Journal(journal.path)
    assert [row["input"] for row in again.rows()] == ["a"]
    again.append([{"input": "c"}])
    assert [row["input"] for row in Journal(journal.path).rows()] == ["a", "c"]


def test_compacting_puts_rows_in_order_and_keeps_the_others(journal):
    journal.append([{"input": name, "n": 1} for name in "dcba"])
    journal.append([{"input": "c", "n": 2}])
    journal.compact(["b", "c", "missing"])
    assert [json.loads(line) for line in journal.path.read_text().splitlines()[1:]] == [
        {"input": "b", "n": 1},
        {"input": "c", "n": 2},
        {"input": "a", "n": 1, "beyond": True},
        {"input": "d", "n": 1, "beyond": True},
    ]
    assert list(journal.rows(["c"])) == list(Journal(journal.path).rows(["c"])) == [{"input": "c", "n": 2}]


def test_rows_wait_in_memory_while_the_disk_is_full(journal, monkeypatch):
    journal.append([{"input": "a"}])
    real = Path.open

    def full(self, mode="r", *args, **kwargs):
        if mode == "r+b":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    journal.append([{"input": "b"}])
    journal.append([{"input": "c"}])
    assert [row["input"] for row in journal.rows(["b", "c", "a"])] == ["b", "c", "a"]
    with pytest.raises(VitflowError, match="the disk is full"):
        journal.compact(["a", "b", "c"])
    assert [row["input"] for row in Journal(journal.path).rows()] == ["a"]
    monkeypatch.undo()
    journal.append([{"input": "d"}])
    assert [row["input"] for row in Journal(journal.path).rows()] == ["a", "b", "c", "d"]


def test_a_foreign_file_is_no_journal(tmp_path):
    (tmp_path / "journal.jsonl").write_text('{"input": "x"}\n')
    with pytest.raises(VitflowError, match="not a journal of vitflow"):
        Journal(tmp_path / "journal.jsonl")


def test_a_folder_is_locked_while_a_run_lives(tmp_path):
    folder = RunFolder(tmp_path)
    folder.journal.parent.mkdir()
    lock = folder.lock()
    with pytest.raises(OptionError, match="Another run is writing"):
        folder.lock()
    lock.close()
    folder.lock().close()


def rows():
    yield {"input": "a.jpg", "status": "explained", "size": 3, "probability": 0.25, "outputs": {"r": "a-r.jpg"}}
    yield {"input": ODD, "status": "failed", "error": "ImageError", "message": 'two\nlines, "quoted"', "grids": {}}


COMMON = {"model": "m", "methods": ["r"], "options": {"r": {"residual": 0.5}}, "residual": 0.5, "patch": None}


def test_jsonl_is_lossless(tmp_path):
    write_manifest(tmp_path / "m.jsonl", rows(), COMMON)
    first, second = (json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines())
    assert first["outputs"] == {"r": "a-r.jpg"} and first["residual"] == 0.5 and first["model"] == "m"
    assert os.fsencode(second["input"]) == b"caf\xe9\nnew.jpg"
    assert "grids" not in second and first.keys() == second.keys()


def test_csv_has_the_same_rows(tmp_path):
    write_manifest(tmp_path / "m.csv", rows(), COMMON)
    with (tmp_path / "m.csv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == [*COLUMNS, "residual", "patch"]
    assert first["input"] == "a.jpg" and first["input_hex"] == "" and float(first["probability"]) == 0.25
    assert json.loads(first["options"]) == {"r": {"residual": 0.5}}
    assert bytes.fromhex(second["input_hex"]) == b"caf\xe9\nnew.jpg" and second["input"] == "caf\\xe9\nnew.jpg"
    assert second["message"] == 'two\nlines, "quoted"'


def test_no_cell_of_a_csv_is_a_formula(tmp_path):
    names = ["=1+2.jpg", "+1.jpg", "@SUM(A1).jpg", "-1.jpg", "\tx.jpg", "'=.jpg", "a=b.jpg"]
    write_manifest(tmp_path / "m.csv", ({"input": name, "probability": -0.5} for name in names), {"layer": -1})
    with (tmp_path / "m.csv").open(encoding="utf-8", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["input"] for row in found] == [f"'{name}" for name in names[:-1]] + ["a=b.jpg"]
    assert {(row["probability"], row["layer"]) for row in found} == {("-0.5", "-1")}


def test_what_is_to_last_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    synced, replaced = [], []
    real = Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").resolve()))

    def replace(self, target):
        replaced.append((self, target))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    journal = Journal(tmp_path / "journal.jsonl")
    journal.start({"run": {}})
    journal.append([{"input": "a"}])
    journal.compact(["a"])
    write_manifest(tmp_path / "m.jsonl", rows(), COMMON)
    assert len(replaced) == 3
    assert all(unfinished in synced for unfinished, _ in replaced)


def test_parquet_has_the_same_rows_with_types(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    write_manifest(tmp_path / "m.parquet", rows(), COMMON)
    table = parquet.read_table(tmp_path / "m.parquet")
    first, second = table.to_pylist()
    assert first["size"] == 3 and first["probability"] == 0.25 and first["error"] is None
    assert bytes.fromhex(second["input_hex"]) == b"caf\xe9\nnew.jpg"
    assert json.loads(first["outputs"]) == {"r": "a-r.jpg"}
    write_manifest(tmp_path / "none.parquet", iter(()), COMMON)
    assert parquet.read_table(tmp_path / "none.parquet").schema == table.schema


def test_a_failed_manifest_leaves_the_old_one(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text("old")

    def broken():
        yield {"input": "a"}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_manifest(path, broken(), COMMON)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["m.jsonl"]
