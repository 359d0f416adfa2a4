"""Pictures and outputs behind fsspec: the rows of a local run, resumed, with faults as rows."""

import numpy as np
import pytest
from click.testing import CliRunner

from tests.folder.test_run import fill, picture_bytes, run, tiny_model
from vitflow import Explainer
from vitflow.cli import cli
from vitflow.errors import ImageError, OptionError
from vitflow.folder.draw import draw_run, read_grids
from vitflow.folder.keeper import open_folder
from vitflow.folder.remote import RemoteFolder, find_remote
from vitflow.folder.rows import is_folder_row

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def explainer():
    return Explainer(tiny_model())


@pytest.fixture(params=["memory", "file"])
def store(request, tmp_path):
    """The URL of an empty folder, on a store that has whole files at once, and on one that has not."""
    if request.param == "file":
        yield f"file://{tmp_path}/store"
        return
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://store"
    system.store.clear()


def put(store: str, count: int) -> None:
    place = RemoteFolder(f"{store}/in")
    for number in range(count):
        place.put(f"{number}.jpg", picture_bytes(number))
    place.put("below/0.jpg", picture_bytes(50))
    place.put("bad.png", b"nothing")
    place.put("notes.txt", b"no picture")


def facts(rows) -> list[dict]:
    # When a file was changed is each store's own to tell.
    return [
        {key: row.get(key) for key in ("input", "status", "error", "class_index", "sha256", "size")} for row in rows
    ]


@pytest.mark.parametrize("kind", ["overlays", "grids"])
def test_a_run_on_a_store_is_that_of_a_folder_and_goes_on_where_it_was(tmp_path, explainer, store, kind):
    put(store, 6)
    source = fill(tmp_path / "in", 6)
    fill(source / "below", 1)
    (source / "below/0.jpg").write_bytes(picture_bytes(50))
    (source / "bad.png").write_bytes(b"nothing")
    options = {"model": explainer, "store": kind, "recursive": True}
    local, remote = run(source, tmp_path / "out", **options), run(f"{store}/in", f"{store}/out", **options)
    assert facts(local) == facts(remote)
    assert (remote.explained, remote.failed, remote.output) == (7, 1, f"{store}/out")
    for (_, own), (_, its) in zip(read_grids(local.output), read_grids(remote.output), strict=True):
        assert np.abs(own["rollout"] - its["rollout"]).max() <= 2**-11 * own["rollout"].max()
    names = {str(path.relative_to(local.output)) for path in local.output.rglob("*") if path.is_file()}
    there = set(RemoteFolder(f"{store}/out").every())
    assert {name for name in there if "grids/" not in name} == {
        name for name in names if "grids/" not in name and "lock" not in name
    }
    assert any("grids/" in name for name in there) == (kind == "grids")
    place = RemoteFolder(f"{store}/in")
    place.put("1.jpg", picture_bytes(77))
    place.put("7.jpg", picture_bytes(78))
    again = run(f"{store}/in", f"{store}/out", **options)
    assert (again.total, again.explained, again.kept) == (9, 8, 6)
    drawn = draw_run(f"{store}/out", tmp_path / "drawn", where="input in ('1.jpg', '7.jpg')")
    assert [one.error for one in drawn] == [None, None]
    with pytest.raises(OptionError, match="other options: options.rollout.residual"):
        run(f"{store}/in", f"{store}/out", residual=0.3, **options)
    run(f"{store}/in", f"{store}/out", **{**options, "store": "overlays"}, overwrite=True, format="png")
    assert not [name for name in RemoteFolder(f"{store}/out").every() if name.endswith(".parquet") or "jpg" in name]


def test_rows_that_were_told_are_there_after_a_kill(explainer, store):
    put(store, 12)
    seen = []

    class Killed(BaseException):
        pass

    def stop(state):
        seen.append(state.row)
        if len(seen) == 6:
            raise Killed

    with pytest.raises(Killed):
        run(f"{store}/in", f"{store}/out", model=explainer, progress=stop)
    told = {row["input"] for row in seen if row}
    journal = open_folder(f"{store}/out").open_journal(is_folder_row)
    assert told <= {row["input"] for row in journal.rows()}
    assert [name for name in RemoteFolder(f"{store}/out").names(".vitflow") if "journal-" in name]
    last = run(f"{store}/in", f"{store}/out", model=explainer)
    assert last.total == 13 and last.kept >= len(told) - 1
    assert RemoteFolder(f"{store}/out").names(".vitflow") == [".vitflow/journal.jsonl"]


def test_what_cannot_be_is_told(tmp_path, explainer, store):
    put(store, 1)
    with pytest.raises(ImageError, match="nothing at|Could not list"):
        run(f"{store}/nowhere", tmp_path / "out")
    with pytest.raises(ImageError, match="found none"):
        run(f"{store}/in", tmp_path / "out", glob="*.gif")
    with pytest.raises(OptionError, match="one folder where it is a URL"):
        run([f"{store}/in", f"{store}/more"], tmp_path / "out")
    with pytest.raises(OptionError, match="leave it out where"):
        run(f"{store}/in", tmp_path / "out", report=True)
    with pytest.raises(OptionError, match="lies in .* which is read"):
        run(f"{store}/in/", f"{store}/in/out")
    with pytest.raises(OptionError, match="Cannot reach 'nosuch://x'"):
        run("nosuch://x", tmp_path / "out")
    RemoteFolder(f"{store}/out").put("0-rollout.jpg", b"mine")
    with pytest.raises(OptionError, match="already a file '0-rollout.jpg'"):
        run(f"{store}/in", f"{store}/out", model=explainer)


def test_a_picture_that_vanishes_is_a_row(tmp_path, explainer, store, monkeypatch):
    put(store, 3)
    found = find_remote

    def vanish(source, recursive):
        listed = found(source, recursive)
        RemoteFolder(source).remove(["1.jpg"])
        return listed

    monkeypatch.setattr("vitflow.folder.plan.find_remote", vanish)
    summary = run(f"{store}/in", tmp_path / "out", model=explainer)
    assert {row["input"]: row["error"] for row in summary.failures()}["1.jpg"] == "FileNotFoundError"
    assert summary.explained == 2


def test_the_commands_take_urls(tmp_path, store):
    put(store, 2)
    words = ["folder", f"{store}/in", "-o", f"{store}/out", "--model", "demo", "--workers", "0", "--glob", "?.jpg"]
    found = CliRunner().invoke(cli, words)
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines() == [f"{store}/out/manifest.jsonl"]
    found = CliRunner().invoke(cli, ["draw", f"{store}/out", "-o", str(tmp_path / "drawn"), "--limit", "1"])
    assert found.exit_code == 0 and found.stdout.splitlines() == [str(tmp_path / "drawn/0-rollout.jpg")]
