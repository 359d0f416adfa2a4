"""`vitflow caption` as a user meets it: the answer, a strip of maps, JSON, and errors that say what to do."""

import json

import cv2
import numpy as np
import pytest
import transformers
from click.testing import CliRunner
from PIL import Image

from tests.models.vision_language import family
from vitflow.cli import cli
from vitflow.demo import sample_images

ANSWER = ["a", "red", "heart", "left", "of", "heart", "."]


@pytest.fixture(scope="module")
def captioner(tmp_path_factory):
    """A folder of a model with its processor; it begins with a bias for each word of its answer."""
    folder, one = tmp_path_factory.mktemp("captioner"), family("llava")
    one.model.save_pretrained(folder)
    one.processor.save_pretrained(folder)
    return folder


def answering(monkeypatch, kind: str, tokenizer) -> None:
    """Have models of a kind write the answer."""
    numbers, model = tokenizer.convert_tokens_to_ids(ANSWER), getattr(transformers, kind)

    def written(self, input_ids, **options):
        options = {name: value for name, value in options.items() if name != "max_new_tokens"}
        start, entry = input_ids.shape[1], super(model, self).generate
        say = lambda _batch, ids: [numbers[len(ids) - start]]  # noqa: E731
        return entry(input_ids=input_ids, prefix_allowed_tokens_fn=say, max_new_tokens=len(numbers), **options)

    monkeypatch.setattr(model, "generate", written, raising=False)


@pytest.fixture
def run(tmp_path, monkeypatch, captioner):
    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(0).integers(0, 255, (40, 64, 3), dtype=np.uint8)
    Image.fromarray(image).save("photo.png")
    answering(monkeypatch, "LlavaForConditionalGeneration", family("llava").processor.tokenizer)

    def call(*arguments: object):
        line = ["caption", "photo.png", "--model", captioner, "--prompt", "what is", *arguments]
        return CliRunner().invoke(cli, list(map(str, line)))

    return call


def test_the_answer_is_reported_with_a_strip_of_its_words(run, tmp_path):
    done = run()
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "a red heart left of heart ." and lines[-1] == "photo-caption.png"
    words = [line.split("  ")[0] for line in lines if "on the image" in line]
    assert words == ["red", "heart", "left", "heart (2)"] and "No map: a, of, ." in lines
    with Image.open(tmp_path / "photo-caption.png") as strip:
        assert strip.width > 900


def test_the_page_shows_the_image_and_the_maps_of_the_strip(run, tmp_path, captioner):
    done = run("--html", "words.html", "--json")
    assert done.exit_code == 0 and "written: words.html" in done.stderr, done.output
    page = (tmp_path / "words.html").read_text()
    assert page.count('class="stage"') == 1 and '"name": "photo.png"' in page
    reported = json.loads(done.stdout)
    assert reported["words"][0]["model"] == str(captioner)
    assert str(captioner.parent) not in page
    over = run("--html", "photo.png")
    assert over.exit_code != 0 and "overwrite the image" in over.stderr


def test_the_bundled_captioner_finds_each_drawn_thing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = next(one for one in sample_images() if "ring_heart_and_star" in one.name)
    done = CliRunner().invoke(cli, ["caption", str(image), "--model", "demo-caption", "--json"])
    assert done.exit_code == 0, done.output
    reported = json.loads(done.stdout)
    assert {"yellow", "star", "purple", "ring", "red", "heart"} <= set(reported["answer"].split())
    assert "</s>" not in reported["answer"] and reported["words"][0]["model"] == "demo-caption"


def test_the_bundled_captioner_says_what_it_knows_and_others_say_nothing(run, tmp_path):
    line = ["caption", "photo.png", "--model", "demo-caption", "--name", "mine", "--generate", "3", "-o", "one.svg"]
    done = CliRunner().invoke(cli, line)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("model: mine knows eight drawn shapes only") == 1
    assert "knows eight drawn shapes" not in run().stderr


def test_the_words_of_a_video_have_a_row_and_its_frames_a_column(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    one = family("qwen2_vl")
    one.model.save_pretrained("captioner")
    one.processor.save_pretrained("captioner")
    writer = cv2.VideoWriter("clip.avi", cv2.VideoWriter.fourcc(*"MJPG"), 4.0, (64, 40))
    for frame in np.random.default_rng(0).integers(0, 255, (8, 40, 64, 3), np.uint8):
        writer.write(frame)
    writer.release()
    answering(monkeypatch, "Qwen2VLForConditionalGeneration", one.processor.tokenizer)
    line = ["caption", "clip.avi", "--model", "captioner", "--prompt", f"{one.video_prompt} what", "--frames", "4"]
    line += ["--method", "rollout", "--generate", "7"]
    done = CliRunner().invoke(cli, line)
    assert done.exit_code == 0, done.output
    shares = [row for row in done.stdout.splitlines() if "on the video; of its map" in row]
    assert [row.split("  ")[0] for row in shares] == ["red", "heart", "left", "heart (2)"]
    record = json.loads(CliRunner().invoke(cli, [*line, "--json"]).stdout)
    assert all(np.shape(word["map"])[0] == 2 and len(word["frame_shares"]) == 2 for word in record["words"])
    with Image.open(record["output"]) as strip:
        assert strip.height > strip.width  # an image and four words in two frames


@pytest.mark.parametrize("arguments", [(), ("--model", "demo")])
def test_without_a_model_the_bundled_one_is_offered(arguments):
    done = CliRunner().invoke(cli, ["caption", "photo.jpg", *arguments])
    assert done.exit_code == 2 and "--model demo-caption" in done.stderr
