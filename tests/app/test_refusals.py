"""Refusals of the app: files that nobody uploaded, foreign names and pages, and requests that block other visitors."""

import json

import httpx
import pytest

from vitflow.demo import sample_images

pytest.importorskip("gradio", reason="Gradio is not installed (extra app)")
SAMPLE = sample_images()[0]
META = {"_type": "gradio.FileData"}


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
    """The fields of the page."""
    usual = {"model": "demo", "method": "gae", "target": "", "prompts": "", "box": ""}
    return list(({"image": image} | usual | given).values())


def said(text: str) -> str:
    """Return the error that the page shows."""
    data = json.loads(text.rpartition("data: ")[2])
    words = data["error"] if isinstance(data, dict) else data[-1]
    assert isinstance(words, str) and words and "Traceback" not in text, text
    return words


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
        "upwards": f"{page.folder}/../{folder.name}/private.png",
        "link": str(link),
        "url": "http://127.0.0.1:9/private.png",
        "data": "data:image/png;base64,iVBORw0KGgo=",
    }
    files = {name: {"path": path} for name, path in paths.items()}
    files |= {f"{name}, as Gradio's": {"path": path, "meta": META} for name, path in paths.items()}
    files |= {
        "stream": {"path": str(private), "meta": META, "is_stream": True},
        "by its url": {"path": None, "url": private.as_uri(), "meta": META},
        "several": [{"path": str(private), "meta": META}],
    }
    return files


def test_a_file_that_nobody_uploaded_is_refused_whether_it_is_there_or_not(web, page, foreign):
    answers = {name: answer(web, "explain", image_fields(file)) for name, file in foreign.items()}
    [(status, text)] = set(answers.values())  # one and the same, to the letter
    assert status == 200 and "that was uploaded to this page" in said(text)
    assert set(page.heard.read_text().split()) == {"127.0.0.1"}


def test_no_field_takes_a_path_or_another_file(web, foreign, uploaded):
    for field in ("target", "prompts", "model"):
        answered = answer(web, "explain", image_fields(uploaded, **{field: foreign["plain, as Gradio's"]}))
        assert answered[0] == 200 and said(answered[1])
    for value in (foreign["plain"]["path"], 5):  # in place of an image
        said(answer(web, "explain", image_fields(value))[1])


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
        assert refused.status_code == 400, host
        assert answer(web, "explain", image_fields(uploaded), Host=host)[0] == 400
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


def test_other_pages_are_those_of_the_allowed_hosts():
    from starlette.datastructures import Headers

    from vitflow.app.page import RequestCheck

    def refuses(origin: str, host: str, *others: str) -> bool:
        headers = Headers({"host": host, "origin": origin})
        return bool(RequestCheck(None, names=["localhost"], others=others)._refused(headers, "/"))

    assert not refuses("https://user-name.hf.space", "user-name.hf.space") and not refuses("https://y", "x", "*")
    assert not refuses("https://a.example.org:8000", "127.0.0.1:7860", "*.example.org")
    assert refuses("https://example.org", "127.0.0.1:7860", "*.example.org") and refuses(
        "http://localhost:3000", "localhost"
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"target": "x" * 3000}, "at most 2,000 characters"),
        ({"prompts": "a\n" * 100}, "at most 16 prompts"),
        ({"method": None}, "field Method"),
        ({"target": None}, "field Class"),
        ({"method": ["gae"]}, "uploaded to this page"),
        ({"method": "rolout"}, "choices"),
        ({"model": "/etc"}, "choices"),
        ({"box": "inf,1,2,3"}, "left &lt; right"),
        ({"box": "1,2,3"}, "expected LEFT,TOP,RIGHT,BOTTOM"),
    ],
)
def test_what_is_requested_has_bounds(web, uploaded, given, expected):
    assert expected in said(answer(web, "explain", image_fields(uploaded, **given))[1])


def events(web, session: str):
    """The messages of the queue to one visitor, as they come."""
    with web.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def test_the_queue_says_who_waits(web, uploaded):
    [explain] = [one["id"] for one in web.get("/config").json()["dependencies"] if one["api_name"] == "explain"]

    def join(session: str, **given: object) -> None:
        body = {"data": image_fields(uploaded, **given), "fn_index": explain, "session_hash": session}
        assert web.post("/gradio_api/queue/join", json=body).status_code == 200

    join("slow", method="occlusion")
    join("next")
    reported = []
    for one in events(web, "next"):
        reported.append(one["msg"])
        if one["msg"] == "estimation":
            assert one["rank"] == 0 and one["queue_size"] == 1
        if one["msg"] == "process_completed":
            assert one["success"] and "-gae.npz" in json.dumps(one["output"])
            break
    assert "estimation" in reported
