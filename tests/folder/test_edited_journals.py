"""A journal is a file that anybody may have edited: it is never believed, and nothing outside the folder is touched."""

import base64
import copy
import json
import random
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.folder.test_run import fill, tiny_model, tree
from tests.folder.test_run import run as run_folder
from vitflow import Explainer, explain_folder
from vitflow.errors import OptionError, VitflowError
from vitflow.evaluation import evaluate, results
from vitflow.folder.found.report import report_run
from vitflow.folder.rows import is_folder_row
from vitflow.runs.checks import is_inside, parse_row
from vitflow.runs.journal import Journal
from vitflow.runs.places import RunFolder


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(tiny_model())


def edit(out: Path, change) -> None:
    """Change the first row of a run's journal."""
    path = RunFolder(out).journal
    header, first, *others = path.read_text().splitlines()
    row = json.loads(first)
    change(row)
    path.write_text("\n".join([header, json.dumps(row), *others]) + "\n")


@pytest.fixture
def precious(tmp_path) -> Path:
    """A file outside of every output folder."""
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "precious-rollout.jpg"
    path.write_text("mine")
    return path


# -- the attacks, one by one


def leaving(precious: Path, out: Path) -> dict[str, str]:
    (out / "link").symlink_to(precious.parent)
    return {"above": "../outside/precious", "absolute": str(precious)[: -len("-rollout.jpg")], "link": "link/precious"}


@pytest.mark.parametrize("way", ["above", "absolute", "link"])
def test_overwriting_removes_nothing_outside(tmp_path, precious, explainer, way):
    source, out = fill(tmp_path / "in", 2), tmp_path / "out"
    run_folder(source, out, model=explainer)
    stem = leaving(precious, out)[way]

    def change(row):
        row |= {"stem": stem, "outputs": {"rollout": f"{stem}-rollout.jpg"}, "written": {f"{stem}-rollout.jpg": 4}}

    edit(out, change)
    summary = run_folder(source, out, model=explainer, overwrite=True)
    assert (summary.explained, precious.read_text()) == (2, "mine")


@pytest.mark.parametrize("way", ["above", "absolute", "link"])
def test_a_resume_writes_nothing_outside(tmp_path, precious, explainer, way):
    source, out = fill(tmp_path / "in", 2), tmp_path / "out"
    run_folder(source, out, model=explainer)
    stem = leaving(precious, out)[way]
    edit(out, lambda row: row.update(stem=stem, status="failed", error="", message=""))
    summary = run_folder(source, out, model=explainer)
    assert precious.read_text() == "mine" and len(list(precious.parent.iterdir())) == 1
    if way != "link":  # torn, and done anew in its own place
        assert [row["stem"] for row in summary] == ["0", "1"] and summary.explained == 2
    else:
        (failed,) = summary.failures()
        assert "a link leads out of the folder" in failed["message"]


def test_a_folder_that_links_out_is_a_row_and_not_written_through(tmp_path, precious, explainer):
    source, out = fill(tmp_path / "in" / "sub", 1).parent, tmp_path / "out"
    out.mkdir()
    (out / "sub").symlink_to(precious.parent)
    summary = run_folder(source, out, model=explainer, recursive=True)
    assert "a link leads out of the folder" in next(summary.failures())["message"]
    assert len(list(precious.parent.iterdir())) == 1


def test_a_file_that_no_run_has_made_is_not_removed(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 1), tmp_path / "out"
    run_folder(source, out, model=explainer)
    (out / "notes.jpg").write_text("mine")
    edit(out, lambda row: row.update(outputs={"rollout": "notes.jpg"}, written={"notes.jpg": 4}))
    run_folder(source, out, model=explainer, overwrite=True)
    assert (out / "notes.jpg").read_text() == "mine"


@pytest.mark.parametrize("name", [".", "lock", "journal.jsonl"])
def test_the_record_itself_may_not_be_a_link(tmp_path, precious, explainer, name):
    out = tmp_path / "out"
    place = out / ".vitflow"
    (place if name != "." else out).mkdir(parents=True)
    (place / name if name != "." else place).symlink_to(precious if name != "." else precious.parent)
    with pytest.raises(OptionError, match="got a link"):
        run_folder(fill(tmp_path / "in", 1), out, model=explainer)
    assert precious.read_text() == "mine" and len(list(precious.parent.iterdir())) == 1


def test_the_report_neither_reads_nor_writes_outside(tmp_path, precious, explainer):
    source, out = fill(tmp_path / "in", 2), tmp_path / "out"
    secret = fill(tmp_path / "secret", 1) / "0.jpg"
    run_folder(source, out, model=explainer)
    edit(out, lambda row: row.update(input="../secret/0.jpg"))
    assert "secret" not in report_run(out).read_text()
    edit(out, lambda row: row.update(input=str(secret)))
    assert "secret" not in report_run(out).read_text()
    (out / "report-files").symlink_to(precious.parent)
    with pytest.raises(OptionError, match="A link leads out"):
        report_run(out, embed_bytes=0)
    assert len(list(precious.parent.iterdir())) == 1


def test_two_pictures_never_share_an_output_whatever_the_journal_says(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    run_folder(source, tmp_path / "whole", model=explainer)
    run_folder(source, out, model=explainer)

    def change(row):
        name = "2-rollout.jpg"
        row |= {"stem": "2", "outputs": {"rollout": name}, "written": {name: (out / name).stat().st_size}}

    edit(out, change)
    summary = run_folder(source, out, model=explainer)
    assert len({row["stem"] for row in summary}) == 3
    for row, own in zip(summary, run_folder(source, tmp_path / "whole", model=explainer), strict=True):
        assert (out / row["outputs"]["rollout"]).read_bytes() == (
            tmp_path / "whole" / own["outputs"]["rollout"]
        ).read_bytes()


# -- torn lines


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"]" * 100_000,
        b'{"input": "x", "facts": ' + b'{"a":' * 500 + b"1" + b"}" * 501,
        b'{"input": NaN}',
        b'{"input": "x", "seconds": 1e999}',
        b'{"input": "x", "size": ' + b"9" * 10_000 + b"}",
        b'{"input": ["x"]}',
        b'{"input": "\\ud800"}',
        b'{"input": "a\\u0000b"}',
        b'{"status": "explained"}',
        b"[1, 2]",
        b"\x00" * 300,
        b"\xff\xfe",
        b"",
    ],
)
def test_a_torn_line_costs_its_own_row_alone(tmp_path, explainer, line):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    run_folder(source, out, model=explainer)
    expected = tree(out)
    path = RunFolder(out).journal
    header, first, _, third = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([header, first, line, third]) + b"\n")
    assert len(Journal(path, is_folder_row)) == 2
    summary = run_folder(source, out, model=explainer)
    assert (summary.kept, summary.explained) == (2, 3)
    assert tree(out) == expected


def test_a_line_without_end_takes_no_memory(tmp_path):
    path = tmp_path / "journal.jsonl"
    with path.open("wb") as file:
        file.write(b'{"vitflow_journal": 2, "run": {}}\n{"input": "')
        file.seek(2**28, 1)  # a hole: no disk is used
        file.write(b'"}\n{"input": "good"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [row["input"] for row in Journal(path).rows()] == ["good"]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"peak memory beyond the start: {grown:.0f} MiB for a line of 256 MiB")
    assert grown < 160


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.pop("window"),
        lambda row: row.update(window=[0, 0, 1]),
        lambda row: row.update(width="48"),
        lambda row: row.update(width=True),
        lambda row: row.update(size=2**70),
        lambda row: row.update(class_name="\ud800"),
        lambda row: row.update(stem="caf\udce9"),
        lambda row: row.update(outputs=["0-rollout.jpg"]),
        lambda row: row.update(facts={"rollout": 3}),
        lambda row: row.update(status="done"),
        lambda row: row["grids"]["rollout"].update(shape=[400_000, 400_000]),
        lambda row: row["grids"]["rollout"].update(values="!!"),
        lambda row: row["grids"]["rollout"].update(
            values=base64.b64encode(np.full(16, np.nan, "<f4").tobytes()).decode()
        ),
        lambda row: row["written"].update({"0-rollout.jpg": "many"}),
    ],
)
def test_an_incomplete_or_ill_typed_row_counts_as_torn(tmp_path, explainer, change):
    source, out = fill(tmp_path / "in", 2), tmp_path / "out"
    run_folder(source, out, model=explainer)
    expected = tree(out)
    edit(out, change)
    assert report_run(out).is_file()  # without the row
    (out / "report.html").unlink()
    assert run_folder(source, out, model=explainer, manifest="parquet").kept == 1
    (out / "manifest.parquet").unlink()
    run_folder(source, out, model=explainer)
    assert tree(out) == expected


def test_paths_that_stay_and_paths_that_leave():
    assert all(map(is_inside, ["a", "a/b", "..a/b..", "a.../b", ".hidden/a"]))
    assert not any(map(is_inside, ["", ".", "..", "a/..", "../a", "a/../b", "/a", "//a", "a\0b", "a\ud800", 3, None]))


# -- what a power cut leaves


def test_files_that_a_power_cut_left_empty_are_made_again(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    run_folder(source, out, model=explainer, save_map=True)
    expected = tree(out)
    (out / "0-rollout.jpg").write_bytes(b"")
    (out / "1-rollout.npz").write_bytes((out / "1-rollout.npz").read_bytes()[:-1])
    summary = run_folder(source, out, model=explainer, save_map=True)
    assert summary.kept == 1
    assert tree(out) == expected


# -- fuzz


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Damage a journal as a disk, a program or a person would."""
    kind = chance.choice(["bytes", "bytes", "cut", "lines", "value", "value", "value", "header"])
    lines = content.splitlines(keepends=True)
    if kind == "bytes":
        data = bytearray(content)
        for _ in range(chance.choice([1, 2, 8, 40])):
            data[chance.randrange(len(data))] = chance.choice([chance.randrange(256), *b'"{}[],:0/\\'])
        return bytes(data)
    if kind == "cut":
        start = chance.randrange(len(content))
        return content[:start] + content[start + chance.choice([1, 30, 10_000]) :]
    if kind == "lines":
        chance.shuffle(lines)
        return b"".join(lines[: chance.randrange(len(lines) + 1)] * chance.choice([1, 2]))
    number = 0 if kind == "header" else chance.randrange(1, len(lines))
    record = json.loads(lines[number])
    for _ in range(chance.choice([1, 1, 3])):
        replace_one(record, chance)
    lines[number] = json.dumps(record).encode() + b"\n"
    return b"".join(lines)


ODD_VALUES = [
    *(None, True, -1, 0, 2**80, 1e300, float("nan"), float("inf"), "", "x", "..", "/", "/etc/passwd", "\0", "\ud800"),
    *("../../outside/precious", "link/precious", "a" * 5000, [], {}, [[[]]], {"": {"": ""}}, ["x"]),
    {"rollout": "../x"},
]


def replace_one(record: dict, chance: random.Random) -> None:
    """Replace or remove one value, at any depth."""
    holder, key = record, None
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            break
        key = chance.choice(keys)
        if not isinstance(holder[key], dict | list) or not holder[key] or chance.random() < 0.3:
            break
        holder = holder[key]
    if key is None:
        return
    if chance.random() < 0.2:
        del holder[key]
    else:
        holder[key] = copy.deepcopy(chance.choice(ODD_VALUES))


def outside(place: Path, out: Path) -> dict[str, object]:
    """Everything below a place but the output folder."""
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in place.rglob("*")
        if path.is_file() and out not in path.parents
    }


@pytest.mark.slow
def test_mutated_journals_never_crash_and_touch_nothing_outside(tmp_path, precious, explainer, monkeypatch):
    """520 of a folder run, each through resume, overwrite or report, and 80 of an evaluation."""
    monkeypatch.setattr(results, "save_charts", lambda *_: {})
    monkeypatch.setattr(results, "write_page", lambda _, path, *__, **___: path)
    source, out, seen = fill(tmp_path / "in", 3), tmp_path / "out", tmp_path / "seen"
    (source / "bad.png").write_bytes(b"nothing")
    measuring = {"model": explainer, "methods": ["rollout"], "metrics": ["faithfulness", "sanity"], "points": 3}
    measuring |= {"sanity_pictures": 1, "resamples": 10}
    run_folder(source, out, model=explainer, methods=["rollout", "centre"], save_map=True)
    evaluate("demo:2", output=seen, **measuring)
    (out / "link").symlink_to(precious.parent)
    journals = {place: RunFolder(place).journal.read_bytes() for place in (out, seen)}
    before = outside(tmp_path, out)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused = 0
    for number in range(600):
        chance = random.Random(number)
        place = out if number < 520 else seen
        RunFolder(place).journal.write_bytes(mutated(journals[place], chance))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if place == seen:
                    assert len(evaluate("demo:2", output=seen, **measuring).pictures) == 2
                elif number % 3 == 2:
                    report_run(out)
                else:
                    overwrite = number % 3 == 1
                    options = {"model": explainer, "methods": ["rollout", "centre"], "save_map": True, "workers": 0}
                    explain_folder(source, out, overwrite=overwrite, manifest="csv", **options)
        except VitflowError:
            refused += 1
        if number % 50 == 0 or number > 595:
            now = outside(tmp_path, out)
            assert {k: v for k, v in now.items() if str(seen) not in k} == {
                k: v for k, v in before.items() if str(seen) not in k
            }
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    print(f"600 mutated journals: {refused} refused, peak memory {grown:.0f} MiB above the start")
    assert 20 < refused < 400 and grown < 500
    assert precious.read_text() == "mine"


def test_what_is_parsed_can_be_written_again():
    for depth in (5, 11, 12, 13, 500, 5000, 50_000):
        row = parse_row(b'{"input": "x", "a": ' + b"[" * depth + b"]" * depth + b"}\n")
        assert (row is None) == (depth > 11)
        assert row is None or json.dumps(row)
