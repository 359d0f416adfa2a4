"""Refusals of the app: files that nobody uploaded, foreign names and pages, and requests that block other visitors."""

import json
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.app.served import serving
from tests.explaining.test_clips import video
from vitflow.demo import sample_images
from vitflow.errors import ImageError, OptionError
from vitflow.images.videos import read_video

pytest.importorskip("gradio", reason="Gradio is not installed (extra app)")
SAMPLE = sample_images()[0]
META = {"_type": "gradio.FileData"}
LIMIT = 5.0  # seconds that a question may take


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page in a process of its own."""
    with serving(tmp_path_factory.mktemp("gradio"), "demo", time_limit=LIMIT) as served:
        yield served


@pytest.fixture(scope="module")
def web(page):
    """A program that speaks to it."""
    with httpx.Client(base_url=page.local_url, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def uploaded(web) -> dict:
    """A photograph that was uploaded."""
    with SAMPLE.open("rb") as file:
        [path] = web.post("/gradio_api/upload", files={"files": ("star.png", file)}).json()
    return {"path": path, "meta": META}


def answer(web, function: str, data: list, **headers: str) -> tuple[int, str]:
    """The status and the text of an answer, as any program gets it."""
    joined = web.post(f"/gradio_api/call/{function}", json={"data": data}, headers=headers)
    if joined.status_code != 200:
        return joined.status_code, joined.text
    actual = web.get(f"/gradio_api/call/{function}/{joined.json()['event_id']}", headers=headers)
    return actual.status_code, actual.text.replace("event: heartbeat\ndata: null\n\n", "")


def image_fields(image: object, **given: object) -> list:
    """The fields of the tab for photographs."""
    from vitflow.app.images import _NAMES

    usual = {"model": "demo", "method": "gae", "fit": "crop", "background": "grey", "interpolation": "smooth"}
    return [
        ({**dict.fromkeys(_NAMES, ""), **usual, "contours": False} | given | {"image": image})[one] for one in _NAMES
    ]


def worded(**given: object) -> list:
    """The fields of the tab for words."""
    usual = {"question": "What a word rests on", "model": "demo-caption", "image": None, "text": "a red heart"}
    return list((usual | {"method": "", "count": 8} | given).values())


def clip_fields(video: object, **given: object) -> list:
    """The fields of the tab for clips."""
    usual = {"video": video, "model": "demo", "method": "gae", "target": "", "frames": 4}
    return list((usual | given).values())


def upload(web, path: Path) -> dict:
    with path.open("rb") as file:
        [uploaded] = web.post("/gradio_api/upload", files={"files": (path.name, file)}).json()
    return {"path": uploaded, "meta": META}


def said(text: str) -> str:
    """Return the error that the page shows."""
    data = json.loads(text.rpartition("data: ")[2])
    words = data["error"] if isinstance(data, dict) else data[-1]
    assert isinstance(words, str) and words and "Traceback" not in text, text
    return words


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def foreign(tmp_path_factory, page, uploaded) -> dict:
    """Files that nobody uploaded, in ways that a program can name them; each is an image, or nothing at all."""
    folder = tmp_path_factory.mktemp("private")
    private = folder / "private.png"
    private.write_bytes(SAMPLE.read_bytes())
    link = page.folder / "link.png"
    link.symlink_to(private)
    paths = {
        "plain": str(private),
        "missing": str(folder / "missing.png"),
        "folder": str(folder),
        "upwards": f"{page.folder}/../{folder.name}/private.png",
        "link": str(link),
        "upload folder": str(page.folder),
        "not yet uploaded": f"{page.folder}/other.png",
        "relative": "README.md",
        "no name": "a\0b",
        "long": "a" * 5000,
        "url": "http://127.0.0.1:9/private.png",
        "data": "data:image/png;base64,iVBORw0KGgo=",
        "file url": private.as_uri(),
    }
    files = {name: {"path": path} for name, path in paths.items()}
    files |= {f"{name}, as Gradio's": {"path": path, "meta": META} for name, path in paths.items()}
    files |= {
        "other type": {"path": str(private), "meta": {"_type": "gradio.Other"}},
        "stream": {"path": str(private), "meta": META, "is_stream": True},
        "by its url": {"path": None, "url": private.as_uri(), "meta": META},
        "a path alone": str(private),
        "several": [{"path": str(private), "meta": META}],
        "deeper": {"path": {"path": str(private)}, "meta": META},
        "a number": 5,
    }
    return files


@pytest.mark.parametrize("function", ["explain", "compare", "words", "clip"])
def test_a_file_that_nobody_uploaded_is_refused_whether_it_is_there_or_not(web, page, foreign, function):
    made = {"words": lambda file: worded(question="What is in an image", image=file), "clip": clip_fields}.get(
        function, image_fields
    )
    answers = {name: answer(web, function, made(file)) for name, file in foreign.items()}
    [(status, text)] = set(answers.values())  # one and the same, to the letter
    assert status == 200 and "that was uploaded to this page" in said(text)
    assert set(page.heard.read_text().split()) == {"127.0.0.1"}


def test_no_other_field_takes_a_file(web, foreign, uploaded):
    for field in ("target", "prompts", "model"):
        status, text = answer(web, "explain", image_fields(uploaded, **{field: foreign["plain, as Gradio's"]}))
        assert status == 200 and "expected a text" in said(text)


def test_what_was_uploaded_and_samples_are_explained(web, uploaded):
    assert '"error"' not in answer(web, "explain", image_fields(uploaded))[1]
    status, text = answer(web, "load_example", [0])
    [sample] = json.loads(text.rpartition("data: ")[2])
    shown = sample.get("value", sample)
    assert status == 200 and "-gae.npz" in answer(web, "explain", image_fields(shown))[1], sample


def test_the_page_fetches_nothing_for_others(web, page, uploaded):
    for url in ("http://127.0.0.1:9/private.png", "HTTPS://example.org/", "ftp://example.org/"):
        assert "fetches nothing" in web.get(f"/gradio_api/file={url}").text
    assert web.get(f"/gradio_api/file={SAMPLE}").status_code == 403
    assert web.get(f"/gradio_api/file={uploaded['path']}").status_code == 200


# --- names and pages -------------------------------------------------------------------------------------------------


def test_a_foreign_name_is_refused(web, page, uploaded):
    at = f":{page.server_port}"
    for host in (
        "evil.example",
        f"evil.example{at}",
        f"127.0.0.1.evil.example{at}",
        "evil@127.0.0.1",
        "192.0.2.1",
        "::1",
    ):
        refused = web.get("/config", headers={"Host": host})
        assert refused.status_code == 403 and "not served by that name" in refused.text, host
        assert answer(web, "explain", image_fields(uploaded), Host=host)[0] == 403
    for host in (f"127.0.0.1{at}", f"localhost{at}", f"LOCALHOST{at}", f"[::1]{at}", "photos.example"):
        assert web.get("/config", headers={"Host": host}).status_code == 200, host


def test_a_foreign_page_is_refused(web, page, uploaded):
    entry = page.local_url.strip("/")
    for origin in (
        "http://evil.example",
        "null",
        "http://localhost:3000",
        f"{entry}.evil.example",
        "file://",
        "http://",
    ):
        assert answer(web, "explain", image_fields(uploaded), Origin=origin)[0] == 403, origin
    for origin in (entry, "https://photos.example"):  # itself, and behind a proxy by the name that was allowed
        assert answer(web, "explain", image_fields(uploaded), Origin=origin)[0] == 200, origin


def test_which_names_a_page_has_follows_from_where_it_is_served():
    from vitflow.app.page import HostCheck

    def served(host: str, *allowed: str):
        check = HostCheck(None, host=host, allowed=allowed)

        def refuses(name: str, origin: str | None = None) -> bool:
            headers = [(b"host", name.encode()), *([(b"origin", origin.encode())] if origin else [])]
            return bool(check._refused({"type": "http", "path": "/", "headers": headers}))

        return refuses

    everywhere, anyhow, below = served("0.0.0.0"), served("0.0.0.0", "*"), served("box.lan", "*.example.org")
    assert not everywhere("192.0.2.1:7860") and not everywhere("[2001:db8::1]:7860") and everywhere("box.lan:7860")
    assert not anyhow("user-name.hf.space", "https://user-name.hf.space") and not anyhow("x", "https://y")
    assert not below("box.lan:80") and not below("a.example.org") and below("example.org") and below("192.0.2.1")
    assert not below("127.0.0.1:7860", "https://a.example.org") and below("127.0.0.1:7860", "https://example.org")


# --- what keeps others waiting, and what makes no sense --------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"method": "sampling", "masks": "1000000000"}, "masks: expected at most 4,096"),
        ({"method": "sampling", "masks": "1e9"}, "masks: expected N≥2"),
        ({"method": "sampling", "cells": "100000"}, "cells: expected at most 64"),
        ({"method": "sampling", "keep": "nan"}, "keep: expected"),
        ({"method": "random", "random_seed": "9" * 30}, "random_seed: expected at most"),
        ({"method": "centre", "sigma": "inf"}, "sigma: expected"),
        ({"method": "occlusion", "patch_size": "1"}, f"longer than the limit of {LIMIT:g} s"),
        ({"fit": "native"}, "Unknown fit of this page"),
        ({"contours": "yes"}, "contours: expected on or off"),
        ({"background": 7}, "background: expected a text"),
        ({"target": "x" * 300}, "class: expected at most 200 characters"),
        ({"prompts": "a\n" * 100}, "Expected at most 16 prompts"),
        ({"prompts": "a" * 3000}, "prompts: expected at most 2,000 characters"),
        ({"prompts": None, "target": None, "method": None}, "Unknown method of this page"),
        ({"method": ["gae"]}, "method: expected a text"),
        ({"contours": float("1e400")}, "contours: expected"),
    ],
)
def test_what_is_requested_of_a_photograph_has_bounds(web, uploaded, given, expected):
    body = json.dumps({"data": image_fields(uploaded, **given)})
    started = time.monotonic()
    joined = web.post("/gradio_api/call/explain", content=body, headers={"Content-Type": "application/json"})
    actual = web.get(f"/gradio_api/call/explain/{joined.json()['event_id']}")
    assert expected in said(actual.text) and time.monotonic() - started < 4 * LIMIT


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"text": "a heart " * 1000}, "text: expected at most 2,000 characters, got 8,000"),
        ({"question": "What is written next", "count": 1e9}, "from 1 to 60, got 1000000000"),
        ({"question": "What is written next", "count": "many"}, "whole number from 1 to 60"),
        ({"question": "What is written next", "count": None}, "whole number from 1 to 60"),
        ({"question": "What is written next", "count": True}, "whole number from 1 to 60"),
        ({"question": "Who is it"}, "Unknown question of this page"),
        ({"model": "/etc"}, "Unknown model of this page"),
        ({"method": "gradcam"}, "Unknown method of this page"),
    ],
)
def test_what_is_requested_of_words_has_bounds(web, given, expected):
    assert expected in said(answer(web, "words", worded(**given))[1])


def test_a_video_has_bounds(web, tmp_path):
    video(tmp_path / "short.mp4", np.zeros((3, 16, 16, 3), np.uint8))
    video(tmp_path / "long.mp4", np.zeros((3001, 16, 16, 3), np.uint8))
    video(tmp_path / "wide.mp4", np.zeros((2, 1200, 2000, 3), np.uint8))
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:1,\n/etc/hostname\n")
    (tmp_path / "cut.mp4").write_bytes((tmp_path / "short.mp4").read_bytes()[:200])
    expected = {
        "long.mp4": "to have at most 3,000 frames, got more",
        "wide.mp4": "at most 2,088,960 pixels a frame in ",
        "list.mp4": "Expected a video (.mp4, .mov, .avi, .mkv, .webm), got ",
        "cut.mp4": "as a video: 0 of 0 frames were decoded",
    }
    for name, words in expected.items():
        assert words in said(answer(web, "clip", clip_fields(upload(web, tmp_path / name)))[1]), name
    assert "Expected a video, got none" in said(answer(web, "clip", clip_fields(None))[1])
    short = upload(web, tmp_path / "short.mp4")
    for given, words in (
        ({"frames": 17}, "from 1 to 16, got 17"),
        ({"frames": 1e9}, "from 1 to 16"),
        ({"method": "rolout"}, "Unknown method of this page"),
        ({"model": "/etc"}, "Unknown model of this page"),
        ({"target": "x" * 300}, "class: expected at most 200 characters"),
        ({"method": "occlusion", "target": "top3"}, "top3"),
    ):
        assert words in said(answer(web, "clip", clip_fields(short, **given))[1]), given
    assert "-clip.npz" in answer(web, "clip", clip_fields(short))[1]


def test_a_large_video_is_refused_and_reading_one_has_a_time_limit(tmp_path, monkeypatch):
    from vitflow.app import images
    from vitflow.app.actions import TimeLimitError, limited

    path = tmp_path / "short.mp4"
    video(path, np.zeros((30, 16, 16, 3), np.uint8))
    with pytest.raises(TimeLimitError, match="a shorter video"), limited(1e-9):
        read_video(path, 4)
    monkeypatch.setattr(images, "_BYTES", 100)
    with pytest.raises(ImageError, match="at most 100 bytes"):
        images._video_of({"path": str(path)})


def test_a_prompt_that_cannot_be_joined_with_an_image_is_an_error_in_words(web, uploaded):
    requested = worded(question="What is in an image", image=uploaded, text="<image><image>")
    assert "cannot join the prompt" in said(answer(web, "words", requested)[1])


def test_malformed_requests_are_answered_in_words(web, uploaded):
    assert said(answer(web, "explain", [])[1]).startswith("Expected ")
    assert said(answer(web, "explain", [uploaded])[1]).startswith("Expected ")
    assert "samples" in said(answer(web, "load_example", [999])[1])
    assert answer(web, "nothing", [1])[0] == 404
    assert web.post("/gradio_api/call/v2/explain", json={"nothing": 1}).status_code == 404
    assert web.post("/gradio_api/call/explain", content=b"{").status_code == 422
    outside = {"data": [], "fn_index": 999, "session_hash": "any"}
    assert web.post("/gradio_api/queue/join", json=outside).status_code == 404
    for route in ("api", "run"):  # without the queue
        assert web.post(f"/gradio_api/{route}/explain", json={"data": image_fields(uploaded)}).status_code == 404


def events(web, session: str):
    """The messages of the queue to one visitor, as they come."""
    with web.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_clicks_on_nothing_are_answered_in_words(web, uploaded):
    functions = web.get("/config").json()["dependencies"]
    numbers = {one["api_name"]: one["id"] for one in functions if one["api_name"] in ("_patch", "_word")}
    for name, given in {"_patch": image_fields(uploaded), "_word": []}.items():
        for click in (
            None,
            {},
            "x",
            {"index": "x", "value": None},
            {"index": [1, 2, 3], "value": 0},
            {"index": [1, 2], "value": 0},
        ):
            session = f"{name}-{json.dumps(click)}"
            body = {"data": [None, *given], "fn_index": numbers[name], "session_hash": session, "event_data": click}
            assert web.post("/gradio_api/queue/join", json=body).status_code == 200
            done = next(one for one in events(web, session) if one["msg"] == "process_completed")
            words = done["output"].get("error") or done["output"]["data"][-1]
            assert "Expected a click" in words, (click, words)


def test_the_queue_says_who_waits_and_a_slow_question_ends(web, uploaded):
    [explain] = [one["id"] for one in web.get("/config").json()["dependencies"] if one["api_name"] == "explain"]

    def join(session: str, **given: object) -> None:
        body = {"data": image_fields(uploaded, **given), "fn_index": explain, "session_hash": session}
        assert web.post("/gradio_api/queue/join", json=body).status_code == 200

    started = time.monotonic()
    join("slow", method="occlusion", patch_size="1")
    join("next")
    reported = []
    for one in events(web, "next"):
        reported.append(one["msg"])
        if one["msg"] == "estimation":
            assert one["rank"] == 0 and one["queue_size"] == 1
        if one["msg"] == "process_completed":
            assert one["success"] and "-gae.npz" in json.dumps(one["output"])
            break
    assert "estimation" in reported and time.monotonic() - started < 6 * LIMIT


def test_no_bad_request_leaves_a_traceback_in_the_console(page, web):
    assert web.get("/config").status_code == 200  # it still serves
    assert page.console.read_text() == ""


def test_time_counts_from_the_first_step_and_what_is_hopeless_is_stopped_early():
    from vitflow.app.actions import TimeLimitError, limited
    from vitflow.progress import tracking

    clock = [0.0]

    def run(steps: int, each: float, first: float = 0.0) -> float:
        clock[0] = 0.0
        with limited(10.0, now=lambda: clock[0]):
            clock[0] += 1000  # a model is loaded
            with tracking("work", steps) as progress:
                for number in range(steps):
                    clock[0] += each + (first if not number else 0.0)
                    progress(1)
        return clock[0] - 1000

    assert run(90, 0.1) == pytest.approx(9)
    assert run(10, 0.1, first=5) == pytest.approx(6)  # something is compiled at first
    for steps, each, latest in ((150, 0.1, 10.2), (10_000, 0.1, 1.3)):
        with pytest.raises(TimeLimitError, match="longer than the limit of 10 s on this page"):
            run(steps, each)
        assert clock[0] - 1000 <= latest


def test_a_limit_that_makes_no_sense_is_refused():
    from vitflow.app import serve

    with pytest.raises(OptionError, match="above 0 seconds"):
        serve(["demo"], time_limit=0)
