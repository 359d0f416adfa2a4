"""Videos in prompts: the tokens of each frame, and the maps of generated words over them."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.vision_language import Family, family
from tests.text.test_image_tokens import centre_of, decoder_inputs, holding, silenced
from vitflow.text import Generation, explain_generation
from vitflow.text.image_tokens import ImageTokens
from vitflow.text.prompts import Video, with_images

pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers")

NAMES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava_next_video", "llava_onevision"]
SPANS = {"qwen2_vl": 2, "qwen2_5_vl": 2, "qwen3_vl": 2, "llava_next_video": 1, "llava_onevision": 1}
#: Height and width of a frame.
SIZES = [(40, 56), (64, 40)]


def embedded(one: Family, frames: np.ndarray) -> tuple[dict[str, Any], tuple[ImageTokens, ...], Tensor]:
    """Return the inputs for a video and a question, the layout, and the embeddings of the decoder."""
    prompt = f"{one.video_prompt} what is on"
    inputs, _, images = with_images(one.model, prompt, Video(frames, "clip", 2.0), one.processor, None)
    return dict(inputs), images.parts, decoder_inputs(one, inputs)


@pytest.mark.parametrize("size", SIZES, ids=["landscape", "portrait"])
@pytest.mark.parametrize("name", NAMES)
def test_the_token_that_moves_is_of_the_frame_and_place_that_was_lit(name, size):
    one, span = silenced(name), SPANS[name]
    height, width = size
    dark = np.full((6, height, width, 3), 96, np.uint8)
    inputs, parts, before = embedded(one, dark)
    assert [part.image for part in parts] == list(range(6 // span))
    placed = [place for part in parts for place in part.positions]
    token = getattr(one.model.config, "video_token_id", None)
    assert len(set(placed)) == len(placed) and (inputs["input_ids"][0, placed] == token).all()
    generator, tried = np.random.default_rng(0), 0
    while tried < 4:
        frame = int(generator.integers(6))
        part = parts[frame // span]
        x, y = centre_of(part, generator.integers(part.rows), generator.integers(part.cols))
        left, top = int(x) - 1, int(y) - 1
        if not (0 <= left < width - 3 and 0 <= top < height - 3) or holding(part, (left, top, 3)) is None:
            continue
        tried += 1
        lit = dark.copy()
        lit[frame, top : top + 3, left : left + 3] = 255
        _, _, after = embedded(one, lit)
        moved = (after - before).norm(dim=-1)
        assert int(moved.argmax()) == holding(part, (left, top, 3)), (frame, x, y)
        others = [place for place in range(len(moved)) if place not in part.positions]
        assert moved[others].max() < 1e-5


FRAMES = np.random.default_rng(0).integers(0, 255, (4, 40, 64, 3), np.uint8)


@lru_cache
def explained(name: str = "qwen2_vl", method: str = "rollout") -> Generation:
    one = family(name)
    options = {"method": method, "max_new_tokens": 3, "do_sample": False, "processor": one.processor}
    return explain_generation(one.model, f"{one.video_prompt} what is on", video=FRAMES, **options)


@pytest.mark.parametrize("name", NAMES)
def test_a_generated_token_has_a_map_for_each_position_along_time(name):
    one, generation, span = family(name), explained(name), SPANS[name]
    clip = generation.clip(0)
    times = len(FRAMES) // span
    assert len(clip.frames) == times and clip.span == span and clip.joint
    assert clip.grid.shape[0] == times and clip.grid.sum() == pytest.approx(1, abs=1e-5)
    assert clip.shares.sum() == pytest.approx(1)
    for index, (frame, part) in enumerate(zip(clip.frames, generation.images.parts, strict=True)):
        expected = generation.values[0, list(part.positions), -1].reshape(part.rows, part.cols)
        np.testing.assert_allclose(frame.grid, expected, atol=1e-7)
        np.testing.assert_array_equal(frame.image, FRAMES[index * span])
        assert frame.placement == part.placement and frame.source == f"video, frame {index * span + 1}"
        np.testing.assert_array_equal(generation.image(0, image=index).grid, frame.grid)
    on_video = sum(frame.grid.sum() for frame in clip.frames)
    total = generation.values[0, :, -1].sum() + generation.among_generated[0, :, -1].sum()
    assert clip.frames[0].facts["on_video"] == pytest.approx(on_video / total, abs=1e-5)
    inputs = with_images(one.model, f"{one.video_prompt} what is on", Video(FRAMES, "", 2.0), one.processor, None)[0]
    with torch.no_grad():
        plain = one.model.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert (generation.prompt_tokens + generation.generated_tokens).ids == tuple(plain[0].tolist())


def test_teacher_forcing_takes_the_times_of_the_frames_too():
    one, slow = family("qwen2_5_vl"), {"method": "attention", "max_new_tokens": 2, "do_sample": False}
    maps = []
    for rate, seconds in ((0.25, 8.0), (2.0, 1.0)):
        video, prompt = Video(FRAMES, "clip", rate), f"{one.video_prompt} what"
        inputs, _, _ = with_images(one.model, prompt, video, one.processor, None)
        assert inputs["second_per_grid_ts"].tolist() == [seconds]
        maps.append(explain_generation(one.model, prompt, video=video, processor=one.processor, **slow).values)
    assert np.abs(maps[0] - maps[1]).max() > 1e-4


def test_a_lit_token_lights_its_frame_and_the_clip_is_drawn_and_saved(tmp_path):
    generation = explained()
    part = generation.images.parts[1]
    values = np.zeros_like(generation.values)
    values[:, part.positions[3]] = 1
    clip = replace(generation, values=values).clip(0)
    assert clip.shares.tolist() == [0.0, 1.0] and clip.frames[1].grid.ravel()[3] == 1
    for suffix in (".png", ".gif", ".npz"):
        assert clip.save(tmp_path / f"clip{suffix}").stat().st_size
    record = clip.to_dict()
    assert record["frames"] == 4 and record["frames_per_share"] == 2 and record["frame_shares"] == [0.0, 1.0]
    assert not any("for every class" in note for note in clip.notes())
    assert len(generation.page().html) > 1000


def test_a_file_gives_its_frames_and_their_rate(tmp_path):
    path = str(tmp_path / "clip.avi")
    writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 40))
    for frame in np.repeat(FRAMES, 5, axis=0):
        writer.write(frame)
    writer.release()
    video = Video.read(path, 4)
    assert video.frames.shape == FRAMES.shape and video.rate == pytest.approx(2.0) and video.source == "clip.avi"
    assert len(Video.read(path).frames) == 8


def test_frames_of_an_odd_number():
    one = family("qwen3_vl")
    options = {"processor": one.processor, "method": "rollout", "max_new_tokens": 1, "do_sample": False}
    generation = explain_generation(one.model, "what", video=list(FRAMES[:3]), **options)
    assert [frame.source for frame in generation.clip(0).frames] == ["video, frame 1", "video, frame 3"]


def with_inputs(one: Family, frames: np.ndarray) -> dict[str, Any]:
    """Return the output of a processor called by the user."""
    return dict(
        one.processor(videos=[frames], text=f"{one.video_prompt} what", return_tensors="pt", do_sample_frames=False)
    )
