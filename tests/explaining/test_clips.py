"""Clips: input, the mean output, shares, scaled maps, files and the command line."""

import json

import cv2
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from benchmarks.clips import drawn_clip, separates
from vitflow import explain_clip
from vitflow.analysis.clips import shares_of
from vitflow.cli import cli
from vitflow.errors import ImageError, OptionError, ShapeError
from vitflow.images.videos import read_video


@pytest.fixture(scope="module")
def drawn():
    return next(made for seed in range(700_000, 700_050) if (made := drawn_clip(seed)) is not None)


def video(path, frames: np.ndarray) -> None:
    height, width = frames.shape[1:3]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 8, (width, height))
    for frame in frames:
        writer.write(cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))
    writer.release()


def test_the_output_is_the_mean_of_the_logits_and_shares_are_its_parts(demo, drawn):
    frames, label, shown = drawn
    clip = explain_clip(frames, model=demo, target=label)
    with torch.no_grad():
        logits = [float(demo.logits(demo.pixels(frame))[0, label]) for frame in frames]
    best = int(np.argmax(logits))  # the softmax of the mean would be below each of these
    assert clip.best == best and clip.score.value == pytest.approx(1 / (1 + np.exp(-logits[best])), rel=1e-4)
    assert (
        best in clip.key_frames and clip.score == clip.frames[best].score and clip.to_dict()["best_frame"] == best + 1
    )
    assert f"{clip.score.display} in frame {best + 1}" in clip.figure().get_suptitle()
    above = [logit - min(logits) for logit in logits]
    np.testing.assert_allclose(clip.shares, [each / sum(above) for each in above], atol=1e-4)
    assert separates(clip.shares, shown)
    for frame, image in zip(clip.frames, frames, strict=True):
        np.testing.assert_allclose(frame.grid, demo.explain(image, method="gae", target=label).grid, atol=1e-5)


def test_the_maps_are_scaled_to_the_shares_and_follow_shuffled_frames(demo, drawn):
    frames, label, _ = drawn
    clip = explain_clip(frames, model=demo, target=label)
    np.testing.assert_allclose(np.abs(clip.grid).sum(axis=(1, 2)), clip.shares, atol=1e-5)
    order = [3, 0, 7, 5, 1, 2, 6, 4]
    shuffled = explain_clip(frames[order], model=demo, target=label)
    np.testing.assert_allclose(shuffled.shares, clip.shares[order], atol=1e-5)
    np.testing.assert_allclose(shuffled.grid, clip.grid[order], atol=1e-5)


def test_several_classes_and_large_videos_are_refused(demo, drawn, tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="one class for a clip, got 'top3'"):
        explain_clip(drawn[0], model=demo, target="top3")
    video(tmp_path / "clip.mp4", drawn[0])
    assert len(read_video(tmp_path / "clip.mp4", 4)) == 4
    video(tmp_path / "still.mp4", drawn[0][:1])
    assert len(read_video(tmp_path / "still.mp4", 4)) == 1
    monkeypatch.setattr("vitflow.images.videos.MAX_PIXELS", 96 * 95)
    with pytest.raises(ImageError, match="at most 9,120 pixels a frame"):
        read_video(tmp_path / "clip.mp4", 4)


def test_a_list_an_array_and_model_inputs_give_the_same_clip(demo, drawn):
    frames, label, _ = drawn
    clips = [
        explain_clip(frames, model=demo, target=label),
        explain_clip([Image.fromarray(frame) for frame in frames], model=demo, target=label),
        explain_clip(torch.cat([demo.pixels(frame) for frame in frames]), model=demo, target=label),
    ]
    for other in clips[1:]:
        np.testing.assert_allclose(other.grid, clips[0].grid, atol=1e-6)


def test_a_video_gives_frames_at_equal_distances(tmp_path):
    frames = np.stack([np.full((32, 48, 3), 10 * number, np.uint8) for number in range(20)])
    video(tmp_path / "clip.mp4", frames)
    actual = read_video(tmp_path / "clip.mp4", 5)
    assert actual.shape == (5, 32, 48, 3)
    np.testing.assert_allclose(actual.mean(axis=(1, 2, 3)), [20, 60, 100, 140, 180], atol=4)
    assert len(read_video(tmp_path / "clip.mp4", 99)) == 20


def test_a_clip_is_written_as_figure_animation_video_and_maps(demo, drawn, tmp_path):
    clip = explain_clip(drawn[0], model=demo, target=drawn[1])
    np.testing.assert_array_equal(shares_of(np.array([0.0, 0.0])), [0.5, 0.5])
    for suffix in (".png", ".gif", ".mp4", ".npz"):
        assert clip.save(tmp_path / f"clip{suffix}").stat().st_size > 0
    with Image.open(tmp_path / "clip.gif") as animation:
        durations = []
        for number in range(animation.n_frames):  # Pillow joins equal frames
            animation.seek(number)
            durations.append(animation.info["duration"])
        assert sum(durations) == 8 * 250
    assert read_video(tmp_path / "clip.mp4", 99).shape == (8, 96, 96, 3)
    np.testing.assert_array_equal(np.load(tmp_path / "clip.npz")["grid"], clip.grid)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".part"]
    with pytest.raises(OptionError, match="suffixes"):
        clip.save(tmp_path / "clip.txt")


def test_what_is_no_clip_is_refused(demo, tmp_path):
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    frame = np.zeros((32, 32, 3), np.uint8)
    cases = [
        (tmp_path / "absent.mp4", ImageError, "no such file"),
        (tmp_path / "broken.mp4", ImageError, "as a video"),
        ([], ShapeError, "no frames"),
        ([frame, frame[:16]], ShapeError, "frames of 2 sizes"),
        (torch.zeros(3, 96, 96), ShapeError, r"\[frames, channels, height, width\]"),
    ]
    for clip, error, words in cases:
        with pytest.raises(error, match=words):
            explain_clip(clip, model=demo)
    with pytest.raises(OptionError, match="frames=0"):
        explain_clip(tmp_path / "broken.mp4", model=demo, frames=0)


def test_the_command_line_explains_a_video(drawn, tmp_path):
    video(tmp_path / "clip.mp4", drawn[0])
    arguments = ["explain", str(tmp_path / "clip.mp4"), "--model", "demo", "--class", str(drawn[1]), "--json"]
    result = CliRunner().invoke(cli, [*arguments, "--frames", "4", "-o", str(tmp_path / "map.gif")])
    assert result.exit_code == 0, result.output
    record = json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{")))
    assert record["frames"] == 4 and len(record["frame_shares"]) == 4 and (tmp_path / "map.gif").exists()
    refused = CliRunner().invoke(cli, [*arguments, "--against", "rest", "-o", str(tmp_path / "map.gif")])
    assert refused.exit_code == 2 and "without --against" in refused.output
