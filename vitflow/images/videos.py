"""Read and write video files."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from vitflow.errors import ImageError, OptionError
from vitflow.files import write_atomically
from vitflow.images.reading import MAX_PIXELS, image_name
from vitflow.progress import tracking


def read_video(path: str | os.PathLike[str], count: int) -> NDArray[np.uint8]:
    """Read evenly spaced frames of a video file, uint8 RGB [frames, height, width, 3]; at most as many as there are."""
    if count < 1:
        raise OptionError(f"Expected at least 1 frame, got frames={count}.")
    name = image_name(str(path))
    if not Path(path).is_file():
        raise ImageError(f"Expected a video at {name!r}, but there is no such file.")
    video = cv2.VideoCapture(os.fspath(path))
    try:
        width, height = (int(video.get(each)) for each in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        if width * height > MAX_PIXELS:
            raise ImageError(f"Expected at most {MAX_PIXELS:,} pixels a frame in {name!r}, got {width} × {height}.")
        decoded = 0
        # The count in the header is often an estimate.
        with tracking("reading", max(int(video.get(cv2.CAP_PROP_FRAME_COUNT)), 1)) as progress:
            while video.grab():
                decoded += 1
                progress(1)
        count = min(count, decoded)
        chosen = set(((np.arange(count) + 0.5) * decoded / max(count, 1)).astype(int).tolist())
        video.open(os.fspath(path))  # from the start again; seeking fails in a video of one frame
        images = []
        for number in range(decoded):
            if not video.grab():
                break
            if number in chosen:
                read, image = video.retrieve()
                if not read:
                    break
                images.append(cv2.cvtColor(image, cv2.COLOR_BGR2RGB))
    finally:
        video.release()
    if not images or len(images) < len(chosen):
        raise ImageError(f"Could not read {name!r} as a video: {len(images)} of {len(chosen)} frames were decoded.")
    return np.stack(images).astype(np.uint8)


def seconds_of(path: str | os.PathLike[str]) -> float | None:
    """Return the duration of a video file by its header, or None."""
    video = cv2.VideoCapture(os.fspath(path))
    try:
        count, rate = video.get(cv2.CAP_PROP_FRAME_COUNT), video.get(cv2.CAP_PROP_FPS)
    finally:
        video.release()
    return count / rate if count > 0 and rate > 0 else None


def write_video(path: Path, images: Sequence[NDArray[np.uint8]], rate: int) -> None:
    """Write images as an MP4 file, `rate` per second; its sides are even, as the codec requires."""
    height, width = (side - side % 2 for side in images[0].shape[:2])
    with tempfile.TemporaryDirectory() as folder:
        unfinished = Path(folder) / "clip.mp4"
        writer = cv2.VideoWriter(str(unfinished), cv2.VideoWriter.fourcc(*"mp4v"), rate, (width, height))
        if not writer.isOpened():
            raise OptionError("This OpenCV cannot write .mp4 files: use .gif.")
        for image in images:
            writer.write(cv2.cvtColor(image[:height, :width], cv2.COLOR_RGB2BGR))
        writer.release()
        with write_atomically(path) as file:
            file.write(unfinished.read_bytes())
