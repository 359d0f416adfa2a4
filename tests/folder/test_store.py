"""The store of a run: what it survives, who may write and read it, and files that were made by somebody else."""

import json
import os
import random
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.folder.test_run import count_rows, fill, run, tiny_model, tree
from tests.typed import forked
from vitflow import Explainer
from vitflow.errors import OptionError, VitflowError
from vitflow.folder import saved, store
from vitflow.folder.draw import draw_run, read_grids
from vitflow.folder.report import report_run
from vitflow.folder.saved import FILE, SavedRun, checksum
from vitflow.folder.store import Run

FINGERPRINT = {"kind": "folder", "methods": {"rollout": "rollout"}}
ODD = os.fsdecode(b"caf\xe9\nnew.jpg")


@pytest.fixture(scope="module")
def explainer() -> Explainer:
    return Explainer(tiny_model())


def made(name: str, number: int = 1, **values) -> tuple[dict, dict]:
    """A row of an image, and its map."""
    row = {"input": name, "stem": "s", "status": "explained", "width": 3, "height": 2, "value": float(number)}
    row |= {"facts": {}, "placement": {}, "outputs": {}, "written": {}}
    return row | values, {"rollout": np.full((2, 3), number, np.float32)}


def kept(place: Path) -> dict[str, float]:
    with SavedRun(place) as run:
        return {row["input"]: row["value"] for row in run.all_rows()}


def change(out: Path, statement: str, *values) -> None:
    """Edit a run as anybody could."""
    with closing(sqlite3.connect(out / FILE)) as db:
        db.execute(statement, values)
        db.commit()


def test_rows_are_detected_again_and_later_ones_replace_earlier_ones(tmp_path):
    with Run(tmp_path, FINGERPRINT) as run:
        run.missing(["a", ODD, "b"], lambda row: True)
        run.put([made("a", 1), made(ODD, 2)])
        run.put([made("a", 3)])
        assert run.finish() == {"total": 3, "explained": 2, "failed": 1}
    with SavedRun(tmp_path) as again:
        assert again.fingerprint == FINGERPRINT
        assert [(row["input"], row["value"]) for row in again.rows()] == [("a", 3.0), (ODD, 2.0)]
        assert [maps["rollout"].tolist() for _, maps in again.with_maps()] == [[[3.0] * 3] * 2, [[2.0] * 3] * 2]
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        assert db.execute("SELECT count(*) FROM maps").fetchone() == (2,)
        assert db.execute("SELECT input FROM rows WHERE value = 2").fetchone() == ("caf\\xe9\\nnew.jpg",)


def test_rows_that_arrive_within_a_second_are_written_together(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_INTERVAL", 60.0)
    with Run(tmp_path, FINGERPRINT) as run:
        run.missing(["a", "b"], lambda row: True)
        run.put([made("a")])
        run.put([made("b")])
        assert list(kept(tmp_path)) == ["a"]
    assert list(kept(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    "values",
    [
        {"value": float("nan")},
        {"width": np.int64(3)},
        {"class_name": "\ud800"},
        {"facts": {"rollout": object()}},
        {"maps": {"rollout": np.full((2, 3), np.inf, np.float32)}},
    ],
)
def test_a_row_that_cannot_be_stored_is_a_failed_row_and_the_others_are_kept(tmp_path, values):
    row, maps = made("a")
    maps, row = values.get("maps", maps), row | {name: each for name, each in values.items() if name != "maps"}
    with Run(tmp_path, FINGERPRINT) as run:
        run.missing(["a", "b"], lambda row: True)
        run.put([(row, maps), made("b")])
        assert run.finish() == {"total": 2, "explained": 1, "failed": 1}
        failed, other = run.with_maps()
    assert failed[0]["status"] == "failed" and failed[0]["message"] and failed[0]["stem"] == "s" and not failed[1]
    assert other[0]["status"] == "explained" and list(other[1]) == ["rollout"]


def test_inputs_of_the_latest_run_come_in_its_order_and_the_others_are_kept(tmp_path):
    for names, missing in ((["d", "c", "b"], ["d", "c", "b"]), (["b", "a", "d"], ["a"]), (["c"], [])):
        with Run(tmp_path, FINGERPRINT) as run:
            assert run.missing(names, lambda row: True) == missing
            run.put(made(name) for name in missing)
            assert [row["input"] for row in run.rows()] == names
    assert sorted(kept(tmp_path)) == ["a", "b", "c", "d"]


def write_many(place: Path, count: int) -> None:
    with Run(place, FINGERPRINT) as run:
        run.missing([f"{number}" for number in range(10 * count)], lambda row: True)
        for batch in range(count):
            run.put(made(f"{10 * batch + number}") for number in range(10))
            run.finish()


def test_a_run_killed_at_random_moments_has_whole_batches(tmp_path):
    chance = random.Random(1)
    for least in (1, 60, 300):  # rows: a moment told by a clock means little on a busy machine
        place = tmp_path / str(least)
        process = forked(write_many, place, 10_000)
        while count_rows(place) < least:
            time.sleep(0.001)
        process.join(chance.uniform(0.0, 0.05))
        process.kill()
        process.join()
        with Run(place, FINGERPRINT) as run:
            names = {row["input"] for row in run.all_rows()}
        assert names == {f"{one}" for one in range(len(names))} and len(names) % 10 == 0
        assert least <= len(names) < 100_000


def die_in_a_transaction(place: Path) -> None:
    run = Run(place, FINGERPRINT)
    run._db.execute("PRAGMA cache_size = 1")  # pages go to the file before the transaction ends
    with run._writing():
        for number in range(2000):
            run._db.execute("UPDATE rows SET record = ?", (json.dumps({"x": "y" * 9000, "n": number}),))
            run._db.execute("INSERT INTO maps VALUES (?, 0, 'x', ?, 1, 1, 1.0)", (number + 10**6, bytes(900)))
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_run_wrote_in_part_is_taken_back_by_the_next_one_and_not_read(tmp_path):
    with Run(tmp_path, FINGERPRINT) as run:
        run.missing(["a", "b"], lambda row: True)
        run.put([made("a", 1), made("b", 2)])
    process = forked(die_in_a_transaction, tmp_path)
    process.join()
    assert (tmp_path / f"{FILE}-journal").stat().st_size > 0
    with pytest.raises(OptionError, match="was stopped while writing"):
        kept(tmp_path)
    with Run(tmp_path, FINGERPRINT) as run:
        assert run.missing(["a", "b"], lambda row: True) == []
    assert kept(tmp_path) == {"a": 1.0, "b": 2.0}
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_second_run_is_refused_and_readers_are_not(tmp_path):
    with Run(tmp_path, FINGERPRINT) as run:
        run.missing([f"{number}" for number in range(100)], lambda row: True)
        run.put(made(f"{number}") for number in range(90))
        run.finish()
        with pytest.raises(OptionError, match="Another run is writing"):
            Run(tmp_path, FINGERPRINT, overwrite=True)
        with SavedRun(tmp_path) as reader:
            rows = reader.rows()
            first = next(rows)
            run.put([made("95")])
            assert run.finish()["explained"] == 91  # while somebody is in the middle of reading
            assert first["input"] == "0" and len(list(rows)) == 89
        assert "95" in kept(tmp_path)
    Run(tmp_path, FINGERPRINT).close()


def test_rows_wait_in_memory_while_another_program_reads(tmp_path, monkeypatch):
    monkeypatch.setattr(saved, "_PATIENCE", 0.1)
    with Run(tmp_path, FINGERPRINT) as run, closing(sqlite3.connect(tmp_path / FILE)) as other:
        run.missing(["a", "b"], lambda row: True)
        run.put([made("a")])
        run.finish()
        rows = other.execute("SELECT * FROM rows, (VALUES (1), (2), (3))")  # more than are fetched at once
        rows.fetchone()
        run.put([made("b")])
        with pytest.raises(VitflowError, match="another program is reading"):
            run.finish()
        rows.close()
        assert list(kept(tmp_path)) == ["a"]
        assert run.finish()["explained"] == 2
    assert list(kept(tmp_path)) == ["a", "b"]


def test_files_that_a_power_cut_left_empty_are_made_again(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 3), tmp_path / "out"
    run(source, out, model=explainer)
    expected = tree(out)
    (out / "0-rollout.jpg").write_bytes(b"")
    (out / "1-rollout.jpg").write_bytes((out / "1-rollout.jpg").read_bytes()[:-1])
    assert run(source, out, model=explainer).kept == 1
    assert tree(out) == expected


OTHERS = {
    "text": (lambda path: path.write_text("mine, and longer than a hundred bytes " * 9), "is not a vitflow run"),
    "database": (lambda path: sqlite3.connect(path).execute("CREATE TABLE notes (a)").close(), "is not a vitflow run"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_no_run_made_is_never_replaced(tmp_path, name, overwrite):
    make, message = OTHERS[name]
    make(tmp_path / FILE)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(OptionError, match=message):
        Run(tmp_path, FINGERPRINT, overwrite=overwrite)
    with pytest.raises(OptionError):
        SavedRun(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


@pytest.mark.parametrize("name", [FILE, f"{FILE}-journal"])
def test_the_file_may_not_be_a_link(tmp_path, name):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(precious)
    with pytest.raises(OptionError, match="must be a regular file"):
        Run(tmp_path / "out", FINGERPRINT, overwrite=True)
    with pytest.raises(OptionError):
        SavedRun(tmp_path / "out")
    assert precious.read_text() == "mine"


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER more AFTER INSERT ON rows BEGIN DELETE FROM rows; END",
        "CREATE TABLE more (a)",
        "DROP TABLE maps",
        "UPDATE run SET fingerprint = '{\"a\": NaN}'",
        "PRAGMA journal_mode = WAL",
    ],
)
def test_a_run_with_other_tables_is_refused_before_a_row_is_read(tmp_path, explainer, statement):
    source, out = fill(tmp_path / "in", 1), tmp_path / "out"
    run(source, out, model=explainer)
    change(out, statement)
    for read in (lambda: list(read_grids(out)), lambda: report_run(out), lambda: run(source, out, model=explainer)):
        with pytest.raises(OptionError, match="is damaged"):
            read()
    assert run(source, out, model=explainer, overwrite=True).explained == 1


def test_a_run_of_another_version_is_refused_in_one_sentence(tmp_path):
    Run(tmp_path, FINGERPRINT).close()
    change(tmp_path, "PRAGMA user_version = 99")
    for make in (SavedRun, lambda place: Run(place, FINGERPRINT)):
        with pytest.raises(OptionError, match=r"contains a run of another version of vitflow.*--overwrite"):
            make(tmp_path)
    Run(tmp_path, FINGERPRINT, overwrite=True).close()


def edit(out: Path, alter, *, forged: bool = False) -> None:
    """Change the record of the first row of a run; with `forged`, its checksum as well."""
    with closing(sqlite3.connect(out / FILE)) as db:
        one, name, record = db.execute("SELECT id, name, record FROM rows ORDER BY position").fetchone()
        row = json.loads(record)
        alter(row)
        text = json.dumps(row)
        db.execute("UPDATE rows SET record = ? WHERE id = ?", (text, one))
        if forged:
            db.execute("UPDATE rows SET checksum = ? WHERE id = ?", (checksum(name, text), one))
        db.commit()


DAMAGE = {
    "type": lambda out: edit(out, lambda row: row.update(width="48")),
    "no status": lambda out: edit(out, lambda row: row.pop("status"), forged=True),
    "no row": lambda out: change(out, "UPDATE rows SET record = '[1]' WHERE position = 0"),
    "no text": lambda out: change(out, "UPDATE rows SET record = x'ff00' WHERE position = 0"),
    "deep": lambda out: change(out, "UPDATE rows SET record = ? WHERE position = 0", "[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_row_is_a_failed_row_until_the_next_run(tmp_path, explainer, damage):
    source, out = fill(tmp_path / "in", 2), tmp_path / "out"
    summary = run(source, out, model=explainer)
    expected = tree(out)
    DAMAGE[damage](out)
    assert [(row["input"], row["error"]) for row in summary.failures()] == [("0.jpg", "DamagedRow")]
    assert [row["input"] for row, _ in read_grids(out)] == ["1.jpg"]
    assert "DamagedRow" in report_run(out).read_text()
    (out / "report.html").unlink()
    assert run(source, out, model=explainer).kept == 1
    assert tree(out) == expected


def test_a_run_without_its_settings_is_refused(tmp_path, explainer):
    source, out = fill(tmp_path / "in", 1), tmp_path / "out"
    run(source, out, model=explainer)
    change(out, "UPDATE run SET fingerprint = replace(fingerprint, 'root', 'r00t')")
    for read in (lambda: draw_run(out, tmp_path / "drawn"), lambda: report_run(out)):
        with pytest.raises(OptionError, match="No intact folder run"):
            read()


@pytest.mark.parametrize("column", ["grid = x'00'", "rows = -4", "scale = 1e999"])
def test_a_damaged_map_is_a_failed_row_of_the_report(tmp_path, explainer, column):
    source, out = fill(tmp_path / "in", 2), tmp_path / "out"
    run(source, out, model=explainer)
    change(out, f"UPDATE maps SET {column} WHERE row = (SELECT id FROM rows WHERE position = 0)")
    assert [row["input"] for row, _ in read_grids(out)] == ["1.jpg"]
    assert [one.input for one in draw_run(out, tmp_path / "drawn")] == ["1.jpg"]
    page = report_run(out).read_text()
    assert page.count("data:image/jpeg") == 1 and "DamagedRow" in page


@pytest.fixture
def precious(tmp_path) -> Path:
    """A file outside of every output folder."""
    (tmp_path / "outside").mkdir()
    path = tmp_path / "outside" / "precious-rollout.jpg"
    path.write_text("mine")
    return path


def leaving(precious: Path, out: Path) -> dict[str, str]:
    (out / "link").symlink_to(precious.parent)
    return {"above": "../outside/precious", "absolute": str(precious)[: -len("-rollout.jpg")], "link": "link/precious"}


@pytest.mark.parametrize("way", ["above", "absolute", "link"])
def test_no_path_of_a_run_leads_out_of_its_folder(tmp_path, precious, explainer, way):
    source, out = fill(tmp_path / "in", 2), tmp_path / "out"
    run(source, out, model=explainer)
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "link").symlink_to(precious.parent)
    stem = leaving(precious, out)[way]
    files = {"outputs": {"rollout": f"{stem}-rollout.jpg"}, "written": {f"{stem}-rollout.jpg": 4}}
    edit(out, lambda row: row.update(stem=stem, **files), forged=True)
    drawn = draw_run(out, tmp_path / "drawn")
    reported = [one.error for one in drawn if one.error]
    assert reported == (["a link leads out of the folder " + repr(str(tmp_path / "drawn"))] if way == "link" else [])
    assert precious.read_text() == "mine" and len(list(precious.parent.iterdir())) == 1
    run(source, out, model=explainer)
    assert precious.read_text() == "mine" and len(list(precious.parent.iterdir())) == 1
    edit(out, lambda row: row.update(stem=stem, **files), forged=True)
    assert run(source, out, model=explainer, overwrite=True).explained == 2
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["../secret/0.jpg", "{secret}/0.jpg"])
def test_no_image_outside_of_its_root_is_read(tmp_path, explainer, name):
    source, out, secret = fill(tmp_path / "in", 2), tmp_path / "out", fill(tmp_path / "secret", 1)
    run(source, out, model=explainer)
    key = os.fsencode(name.format(secret=secret))
    change(out, "UPDATE rows SET name = ? WHERE position = 0", key)
    edit(out, lambda row: None, forged=True)
    assert report_run(out).read_text().count("data:image/jpeg") == 1
    assert [one.input for one in draw_run(out, tmp_path / "drawn")] == ["1.jpg"]


def test_a_folder_that_links_out_is_a_row_and_not_written_through(tmp_path, precious, explainer):
    source, out = fill(tmp_path / "in" / "sub", 1).parent, tmp_path / "out"
    out.mkdir()
    (out / "sub").symlink_to(precious.parent)
    summary = run(source, out, model=explainer, recursive=True)
    assert "a link leads out of the folder" in next(summary.failures())["message"]
    assert len(list(precious.parent.iterdir())) == 1


@pytest.fixture(scope="module")
def requested(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("asked")
    answer = {"class_index": 3, "class_name": "cat", "probability": 0.25}
    with Run(place, FINGERPRINT) as run:
        run.missing(["a/1.jpg", "2.jpg"], lambda row: True)
        run.put([made("a/1.jpg", **answer | {"value": None}), made("2.jpg", **answer | {"class_name": "dog"})])
    return place


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("probability < 0.5 and class_name = 'cat'", ["a/1.jpg"]),
        ("not (class_index in (1, 2)) or probability > 1 -- a comment", ["a/1.jpg", "2.jpg"]),
        ("value IS NULL", ["a/1.jpg"]),
        ("input LIKE '%/1.jpg' OR instr(lower(class_name), 'DO')", ["a/1.jpg"]),
        ("round(probability, 1) BETWEEN 0.1 AND 0.3 AND abs(value) = 1", ["2.jpg"]),
    ],
)
def test_conditions_are_sql(requested, text, names):
    with SavedRun(requested) as run:
        assert [row["input"] for row, _ in run.with_maps(where=text)] == names


NO_CONDITIONS = ["", "probability <", "import os", "probability < 1)", "x'", "\0 < 1", "'\ud800' = ''"]
NO_CONDITIONS += ["path < 3", "1; DELETE FROM rows", "load_extension('x')", "writefile('x', 'y')"]
NO_CONDITIONS += ["(" * 2000 + "1" + ")" * 2000, "input LIKE '" + "%a" * 300 + "'", "1 OR " * 5000 + "1"]


@pytest.mark.parametrize("text", NO_CONDITIONS)
def test_what_is_no_condition_is_refused(requested, text):
    before = (requested / FILE).read_bytes()
    with SavedRun(requested) as run, pytest.raises(OptionError, match="SQL condition"):
        list(run.with_maps(where=text))
    assert (requested / FILE).read_bytes() == before
