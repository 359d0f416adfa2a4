"""The manifest has the same rows in every format."""

import csv
import json
import os

import pytest

from vitflow.folder.columns import kinds_in, write_manifest

ODD = os.fsdecode(b"caf\xe9\nnew.jpg")


def rows():
    yield {"input": "a.jpg", "status": "explained", "size": 3, "probability": 0.25, "outputs": {"r": "a-r.jpg"}}, {}
    yield {"input": ODD, "status": "failed", "error": "ImageError", "message": 'two\nlines, "quoted"', "stem": ""}, {}


COMMON = {"model": "m", "methods": ["r"], "options": {"r": {"residual": 0.5}}}


def test_json_lines_are_lossless(tmp_path):
    path = write_manifest(tmp_path, rows(), COMMON)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["outputs"] == {"r": "a-r.jpg"} and first["model"] == "m"
    assert os.fsencode(second["input"]) == b"caf\xe9\nnew.jpg"
    assert "stem" not in second and first.keys() == second.keys()


def test_csv_has_the_same_rows(tmp_path):
    with write_manifest(tmp_path, rows(), COMMON, format="csv").open(encoding="utf-8", newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == [*kinds_in("manifest")]
    assert first["input"] == "a.jpg" and float(first["probability"]) == 0.25
    assert json.loads(first["options"]) == {"r": {"residual": 0.5}}
    assert second["input"] == "caf\\xe9\\nnew.jpg"
    assert second["message"] == 'two\nlines, "quoted"'


def test_no_cell_of_a_csv_is_a_formula(tmp_path):
    names = ["=1+2.jpg", "+1.jpg", "@SUM(A1).jpg", "-1.jpg", "'=.jpg", "a=b.jpg"]
    inputs = (({"input": name, "probability": -0.5}, {}) for name in names)
    with write_manifest(tmp_path, inputs, {"value": -1}, format="csv").open(encoding="utf-8", newline="") as file:
        actual = list(csv.DictReader(file))
    assert [row["input"] for row in actual] == [f"'{name}" for name in names[:-1]] + ["a=b.jpg"]
    assert {(row["probability"], row["value"]) for row in actual} == {("-0.5", "-1")}


def test_parquet_has_the_same_rows_with_types(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(write_manifest(tmp_path, rows(), COMMON, format="parquet"))
    first, second = table.to_pylist()
    assert first["size"] == 3 and first["probability"] == 0.25 and first["error"] is None
    assert second["input"] == "caf\\xe9\\nnew.jpg"
    assert json.loads(first["outputs"]) == {"r": "a-r.jpg"}
    empty = write_manifest(tmp_path / "none", iter(()), COMMON, format="parquet")
    assert parquet.read_table(empty).schema == table.schema


def test_a_failed_manifest_leaves_the_old_one(tmp_path):
    path = tmp_path / "manifest.jsonl"
    path.write_text("old")

    def broken():
        yield {"input": "a"}, {}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_manifest(tmp_path, broken(), COMMON)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["manifest.jsonl"]
