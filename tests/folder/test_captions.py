"""Captions of a folder as users meet them: words with a map each, a row for each image, and what was done is kept."""

import json
import shutil

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

pytest.importorskip("transformers")

from vitflow.cli import cli
from vitflow.demo import draw_scene
from vitflow.errors import OptionError
from vitflow.folder import caption_folder, read_grids
from vitflow.folder.captions import load_language_model, load_processor
from vitflow.folder.columns import placement_of
from vitflow.models.hub import bundled
from vitflow.text import explain_generation

SEEDS = (500_001, 500_003)


@pytest.fixture(scope="module")
def captioner():
    """The bundled model, loaded once, with its processor."""
    folder = bundled("demo-caption")
    model, _ = load_language_model(folder)
    return {"model": model, "processor": load_processor(folder), "prompt": "<image> here is", "name": "demo-caption"}


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "in"
    (folder / "below").mkdir(parents=True)
    for seed, name in zip(SEEDS, ("a.png", "below/b.png"), strict=True):
        Image.fromarray(draw_scene(seed).image).save(folder / name)
    (folder / "broken.png").write_bytes(b"no image")
    return folder


def rows_of(output):
    return [json.loads(line) for line in (output / "manifest.jsonl").read_text().splitlines()]


def test_each_image_has_its_words_and_a_map_of_each(images, tmp_path, captioner):
    out = tmp_path / "out"
    summary = caption_folder(images, out, recursive=True, **captioner)
    assert (summary.explained, summary.failed, summary.kept) == (2, 1, 0)
    first, below, broken = rows_of(out)
    assert [row["input"] for row in (first, below, broken)] == ["a.png", "below/b.png", "broken.png"]
    assert broken["status"] == "failed" and broken["error"] == "UnidentifiedImageError" and not broken["caption"]
    assert first["caption"] == draw_scene(SEEDS[0]).caption and first["model"] == "demo-caption"
    given = {name: captioner[name] for name in ("model", "processor")}
    actual = explain_generation(
        given["model"], captioner["prompt"], image=draw_scene(SEEDS[0]).image, max_new_tokens=30, do_sample=False,
        processor=given["processor"],
    )  # fmt: skip
    words, left_out = actual.words()
    assert [one["word"] for one in first["words"]] == list(words) and first["left_out"] == left_out
    stored = {row["input"]: (row, maps) for row, maps in read_grids(out)}
    assert list(stored) == ["a.png", "below/b.png"]
    row, maps = stored["a.png"]
    assert list(maps) == list(words) and placement_of(row["placement"]).image_size == (64, 64)
    for word, places in words.items():
        grid = actual.image(places).grid
        assert np.abs(maps[word] - grid).max() <= grid.max() / 2**11
    with Image.open(out / "below/b-caption.png") as strip:
        assert strip.width > 500
    assert [row["input"] for row in summary] == [row["input"] for row in rows_of(out)]
    assert json.loads((out / "run.json").read_text())["totals"] == {"total": 3, "explained": 2, "failed": 1}


def test_a_second_run_does_what_is_missing_or_changed(images, tmp_path, captioner, monkeypatch):
    out, made = tmp_path / "out", []
    import vitflow.folder.captions as module

    def seen(*args, **options):
        made.append(1)
        return explain_generation(*args, **options)

    monkeypatch.setattr(module, "explain_generation", seen)

    class Ended(Exception):
        pass

    def end(state):
        if state.done:
            raise Ended

    with pytest.raises(Ended):  # the run ends after its first image
        caption_folder(images, out, recursive=True, progress=end, **captioner)
    assert len(made) == 1 and not (out / "manifest.jsonl").exists()
    summary = caption_folder(images, out, recursive=True, **captioner)
    assert len(made) == 2 and (summary.kept, summary.explained) == (1, 2)
    (out / "a-caption.png").unlink()
    shutil.copy(images / "a.png", images / "broken.png")
    summary = caption_folder(images, out, recursive=True, **captioner)
    assert len(made) == 4 and (summary.kept, summary.explained, summary.failed) == (1, 3, 0)
    with pytest.raises(OptionError, match="contains a run with other options: .*prompt was"):
        caption_folder(images, out, recursive=True, **captioner | {"prompt": "<image> is"})
    assert caption_folder(images, out, overwrite=True, limit=1, **captioner).kept == 0
    assert not (out / "below/b-caption.png").exists()


def test_images_at_a_url_are_described(images, tmp_path, captioner):
    pytest.importorskip("fsspec")
    summary = caption_folder(f"local://{images}", tmp_path / "out", limit=1, **captioner)  # a URL for fsspec
    assert summary.explained == 1 and rows_of(tmp_path / "out")[0]["caption"] == draw_scene(SEEDS[0]).caption


def test_files_that_no_run_made_stay(images, tmp_path, captioner):
    out = tmp_path / "out"
    out.mkdir()
    (out / "a-caption.png").write_bytes(b"mine")
    with pytest.raises(OptionError, match="already has a file 'a-caption.png'"):
        caption_folder(images, out, **captioner)
    assert (out / "a-caption.png").read_bytes() == b"mine"


def test_what_stops_every_image_stops_the_run(images, tmp_path, captioner):
    with pytest.raises(OptionError, match="layer"):
        caption_folder(images, tmp_path / "out", method="attention", layer=9, **captioner)
    with pytest.raises(OptionError, match="max_new_tokens of at least 1"):
        caption_folder(images, tmp_path / "out", max_new_tokens=0, **captioner)


def test_on_the_command_line(images, tmp_path):
    line = ["folder", str(images), "-o", str(tmp_path / "out"), "--caption"]
    for more, reported in (
        ([], "--caption requires --model"),
        (
            ["--model", "demo-caption", "--report", "--batch-size", "2"],
            "--batch-size, --report cannot be used with --caption",
        ),
        (["--model", "demo-caption", "--method", "gradcam"], "Unknown method for texts 'gradcam'"),
        (["--model", "demo-caption", "--prompt", "a", "--prompt", "b"], "at most one --method and one --prompt"),
    ):
        done = CliRunner().invoke(cli, [*line, *more])
        assert done.exit_code == 2 and reported in done.stderr, done.stderr
    done = CliRunner().invoke(cli, [*line, "--model", "demo-caption"])
    assert done.exit_code == 1 and "1 explained, 1 failed" in done.stderr, done.output
    assert done.stdout.strip().endswith("manifest.jsonl")
    report = CliRunner().invoke(cli, ["report", str(tmp_path / "out")])
    assert report.exit_code == 2 and "No folder run" in report.stderr
