"""Images behind fsspec: the rows of a local run, resumed, with faults as rows."""

import os
import signal
import sqlite3
import threading
import time
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.folder.test_run import fill, image_bytes, run, tiny_model
from tests.typed import Typed
from vitflow import Explainer
from vitflow.cli import cli
from vitflow.errors import ImageError, OptionError
from vitflow.folder.decoders import DecoderPool
from vitflow.folder.draw import draw_run, read_grids, report_run
from vitflow.folder.plan import _changed, list_inputs
from vitflow.folder.saved import FILE

fsspec = pytest.importorskip("fsspec")


@pytest.fixture(scope="module")
def explainer():
    return Explainer(tiny_model())


@pytest.fixture
def store():
    """The URL of an empty folder on a store."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield "memory://store"
    system.store.clear()


def put_one(url: str, content: bytes) -> None:
    system, path = fsspec.core.url_to_fs(url)
    system.makedirs(path.rpartition("/")[0], exist_ok=True)
    system.pipe_file(path, content)


def put(store: str, count: int) -> None:
    for number in range(count):
        put_one(f"{store}/in/{number}.jpg", image_bytes(number))
    put_one(f"{store}/in/below/0.jpg", image_bytes(50))
    put_one(f"{store}/in/bad.png", b"nothing")
    put_one(f"{store}/in/notes.txt", b"no image")


def facts(rows) -> list[dict]:
    # When a file was changed is each store's own to tell.
    return [
        {key: row.get(key) for key in ("input", "status", "error", "class_index", "sha256", "size")} for row in rows
    ]


def test_a_run_on_a_store_is_that_of_a_folder_and_goes_on_where_it_was(tmp_path, explainer, store):
    put(store, 6)
    source = fill(tmp_path / "in", 6)
    fill(source / "below", 1)
    (source / "below/0.jpg").write_bytes(image_bytes(50))
    (source / "bad.png").write_bytes(b"nothing")
    options, out = {"model": explainer, "recursive": True}, tmp_path / "remote"
    local, remote = run(source, tmp_path / "out", **options), run(f"{store}/in", out, **options)
    assert facts(local) == facts(remote)
    assert (remote.explained, remote.failed) == (7, 1)
    for (_, entry), (_, its) in zip(read_grids(local.output), read_grids(out), strict=True):
        assert (entry["rollout"] == its["rollout"]).all()
    names = [{str(path.relative_to(place)) for path in place.rglob("*")} for place in (local.output, out)]
    assert names[0] == names[1]
    put_one(f"{store}/in/1.jpg", image_bytes(77))
    put_one(f"{store}/in/7.jpg", image_bytes(78))
    again = run(f"{store}/in", out, **options)
    assert (again.total, again.explained, again.kept) == (9, 8, 6)
    two = {"where": "input in ('1.jpg', '7.jpg')", "images": f"{store}/in"}
    drawn = draw_run(out, tmp_path / "drawn", **two)
    assert [one.error for one in drawn] == [None, None]
    with pytest.raises(OptionError, match="other options: options.rollout.residual"):
        run(f"{store}/in", out, residual=0.3, **options)
    run(f"{store}/in", out, **options, overwrite=True, format="png")
    assert not list(out.rglob("*.jpg"))


def test_what_cannot_be_is_reported(tmp_path, explainer, store):
    put(store, 1)
    with pytest.raises(ImageError, match="nothing at|Could not list|got none"):
        run(f"{store}/nowhere", tmp_path / "out")
    with pytest.raises(ImageError, match="got none"):
        run(f"{store}/in", tmp_path / "out", glob="*.gif")
    with pytest.raises(OptionError, match="a URL as the only source"):
        run([f"{store}/in", f"{store}/more"], tmp_path / "out")
    with pytest.raises(OptionError, match="does not support a URL"):
        run(f"{store}/in", tmp_path / "out", report=True)
    with pytest.raises(OptionError, match="Expected a local output folder, got the URL"):
        run(f"{store}/in/", f"{store}/out")
    with pytest.raises(OptionError, match="Cannot reach 'nosuch://x'"):
        run("nosuch://x", tmp_path / "out")


def test_an_image_that_vanishes_is_a_row(tmp_path, explainer, store):
    put(store, 3)
    system, path = fsspec.core.url_to_fs(f"{store}/in/1.jpg")

    def vanish(state) -> None:
        if state.done == 0 and system.exists(path):
            system.rm_file(path)

    summary = run(f"{store}/in", tmp_path / "out", model=explainer, progress=vanish)
    assert {row["input"]: row["error"] for row in summary.failures()}["1.jpg"] == "FileNotFoundError"
    assert summary.explained == 2


def test_the_commands_take_urls(tmp_path, store):
    put(store, 2)
    out = str(tmp_path / "out")
    words = ["folder", f"{store}/in", "-o", out, "--model", "demo", "--workers", "0", "--glob", "?.jpg"]
    actual = CliRunner().invoke(cli, words)
    assert actual.exit_code == 0, actual.output
    assert actual.stdout.splitlines() == [f"{out}/manifest.jsonl"]
    words = ["draw", out, "-o", str(tmp_path / "drawn"), "--limit", "1"]
    actual = CliRunner().invoke(cli, words)
    assert actual.exit_code == 2 and "--images URL" in actual.stderr
    actual = CliRunner().invoke(cli, [*words, "--images", f"{store}/in"])
    assert actual.exit_code == 0 and actual.stdout.splitlines() == [str(tmp_path / "drawn/0-rollout.jpg")]


class Served(SimpleHTTPRequestHandler):
    """A folder as a web server gives it; some names are answered as no honest server would."""

    def __init__(self, *args, place: Path, requested: list, **kwargs):
        self.requested = requested
        super().__init__(*args, directory=str(place), **kwargs)

    def do_GET(self):
        self.requested.append(self.path)
        if self.path.endswith("endless.jpg"):  # it says that it is short
            self.send_response(200)
            self.end_headers()
            piece = bytes(2**20)
            try:
                while True:
                    self.wfile.write(piece)
                    self.requested.append(len(piece))
            except OSError:
                return
        if self.path.endswith("stalled.jpg"):
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"some")
            self.wfile.flush()
            self.server.released.wait(30)
            return
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def web(tmp_path):
    """A web server on this machine: (URL, its folder, what it was asked for)."""
    pytest.importorskip("aiohttp")
    place, requested = tmp_path / "web", []
    place.mkdir()

    class Server(ThreadingHTTPServer):
        released = threading.Event()
        daemon_threads = True

        def finish_request(self, request, client_address):
            Served(request, client_address, self, place=place, requested=requested)

    with Server(("127.0.0.1", 0), None) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", place, requested
        server.released.set()
        server.shutdown()
    for one in list(fsspec.get_filesystem_class("http")._cache.values()):
        one.dircache.clear()


def test_images_of_a_web_server_which_lists_nothing_of_them_are_kept(tmp_path, explainer, web):
    url, place, requested = web
    fill(place, 3)
    assert run(url, tmp_path / "out", model=explainer).explained == 3
    requested.clear()
    fill(place, 4)
    again = run(url, tmp_path / "out", model=explainer, batch_size=1)
    assert (again.explained, again.kept) == (4, 3)
    assert [path for path in requested if path.endswith(".jpg")] == ["/3.jpg"]


def test_a_file_that_does_not_end_is_a_row_and_takes_no_memory(tmp_path, explainer, web, monkeypatch):
    url, place, requested = web
    fill(place, 1)
    (place / "endless.jpg").touch()
    monkeypatch.setattr("vitflow.folder.decoders.LARGEST", 2**24)
    summary = run(url, tmp_path / "out", model=explainer)
    [row] = summary.failures()
    assert (row["input"], row["error"], summary.explained) == ("endless.jpg", "ImageError", 1), row
    assert "at most 16 MiB" in row["message"]
    assert sum(one for one in requested if isinstance(one, int)) < 2**26


def test_a_server_that_stalls_costs_a_row(tmp_path, explainer, web, monkeypatch):
    url, place, _ = web
    fill(place, 1)
    (place / "stalled.jpg").touch()
    monkeypatch.setattr("vitflow.folder.run.DecoderPool", partial(DecoderPool, timeout=3.0))
    summary = run(url, tmp_path / "out", model=explainer, workers=1)
    [row] = summary.failures()
    assert (row["input"], row["error"], summary.explained) == ("stalled.jpg", "TimeoutError", 1)
    assert "timed out after 3 seconds" in row["message"]


def test_ctrl_c_ends_a_run_whose_server_stalls(tmp_path, web):
    url, place, requested = web
    (place / "stalled.jpg").touch()
    words = ["folder", url, "-o", str(tmp_path / "out"), "--model", "demo", "--workers", "1"]
    program = Typed(*words)
    deadline = time.monotonic() + 120
    while not any(str(path).endswith("stalled.jpg") for path in requested):
        assert time.monotonic() < deadline and program.poll() is None, program.talk()
        time.sleep(0.1)
    time.sleep(0.5)
    os.kill(program.pid, signal.SIGINT)
    began = time.monotonic()
    code, _, talk = program.ended(timeout=60)
    assert time.monotonic() - began < 10
    assert code == 130 and "Traceback" not in talk
    assert talk.splitlines()[-1].startswith("interrupted: finished images are saved"), talk


def test_a_url_of_this_machine_is_a_path(tmp_path):
    source = fill(tmp_path / "in", 2)
    (source / "out").mkdir()
    fill(source / "out", 1)
    files = list_inputs(f"file://{source}", source / "out", recursive=True).files
    assert list(files.values()) == [str(source / "0.jpg"), str(source / "1.jpg")]
    with pytest.raises(OptionError, match="is also a source"):
        list_inputs(f"file://{source}", source)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/in", "github://in"])
def test_a_store_that_cannot_be_reached_is_reported_without_a_traceback(tmp_path, url):
    actual = CliRunner().invoke(cli, ["folder", url, "-o", str(tmp_path / "out"), "--model", "demo"])
    assert actual.exit_code in (1, 2) and actual.stderr.startswith("error: C"), actual.output
    assert isinstance(actual.exception, SystemExit)


def test_times_of_stores_are_understood():
    changed = datetime(1994, 11, 6, 8, 49, 37, tzinfo=UTC)
    known = [{"LastModified": changed}, {"mtime": changed.timestamp()}, {"size": 3, "updated": changed}]
    assert [_changed(facts) for facts in known] == [784111777 * 10**9] * 3
    assert _changed({"size": 3}) is None and _changed({"created": "yesterday"}) is None


def test_a_run_folder_does_not_say_what_is_fetched(tmp_path, explainer, web):
    url, place, requested = web
    source = fill(tmp_path / "in", 2)
    (place / "0.jpg").write_bytes((source / "0.jpg").read_bytes())
    (place / "1.jpg").write_bytes(image_bytes(9))
    out = run(source, tmp_path / "out", model=explainer).output
    with closing(sqlite3.connect(out / FILE)) as db:
        db.execute("UPDATE run SET fingerprint = replace(fingerprint, ?, ?)", (str(source), url))
        db.commit()
    with pytest.raises(OptionError, match="URLs in a record are not fetched"):
        draw_run(out, tmp_path / "drawn")
    assert "are not fetched" in report_run(out).read_text() and not requested
    # And of what the caller named, that which the run has seen.
    drawn = draw_run(out, tmp_path / "drawn", images=url)
    assert [one.error for one in drawn] == [None, "The image has changed since the run: run vitflow folder again."]
    drawn = draw_run(out, tmp_path / "again", images=source)
    assert [one.error for one in drawn] == [None, None]
