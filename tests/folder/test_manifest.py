"""The manifest: a line of JSON for each row."""

import json
import os
from pathlib import Path

import pytest

from vitflow.runs.columns import write_manifest

ODD = os.fsdecode(b"caf\xe9\nnew.jpg")


def rows():
    yield {"input": "a.jpg", "status": "explained", "size": 3, "probability": 0.25, "outputs": {"r": "a-r.jpg"}}
    yield {"input": ODD, "status": "failed", "error": "ImageError", "message": 'two\nlines, "quoted"', "stem": ""}


COMMON = {"model": "m", "methods": ["r"], "options": {"r": {"residual": 0.5}}, "residual": 0.5, "patch": None}


def test_a_manifest_is_lossless(tmp_path):
    write_manifest(tmp_path / "m.jsonl", rows(), COMMON)
    first, second = (json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines())
    assert first["outputs"] == {"r": "a-r.jpg"} and first["residual"] == 0.5 and first["model"] == "m"
    assert os.fsencode(second["input"]) == b"caf\xe9\nnew.jpg"
    assert "stem" not in second and first.keys() == second.keys()


def test_what_is_to_last_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    synced, replaced = [], []
    real = Path.replace
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").resolve()))

    def replace(self, target):
        replaced.append((self, target))
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    write_manifest(tmp_path / "m.jsonl", rows(), COMMON)
    assert len(replaced) == 1
    assert all(unfinished in synced for unfinished, _ in replaced)


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
