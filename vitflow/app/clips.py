"""The clip tab: the share of each frame of an uploaded video, and maps of its frames."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from vitflow.app.actions import Models, class_field, connect, drawn, result_fields
from vitflow.errors import ImageError, OptionError
from vitflow.explaining.captions import Code, python_call
from vitflow.explaining.clips import FRAMES, explain_clip
from vitflow.explaining.method_table import list_methods
from vitflow.images import VIDEO_FORMATS
from vitflow.images.videos import read_video
from vitflow.models.videos import StackedFrames

# Limits of a video in bytes, frames, and pixels of a frame (1920 × 1080, in multiples of 16); and explained frames.
_BYTES, _VIDEO_FRAMES, _FRAME_PIXELS, _MOST_FRAMES = 100_000_000, 3000, 1920 * 1088, 16
# First bytes of Matroska and WebM, and types of the first box of MP4 and QuickTime.
_MATROSKA, _BOXES = b"\x1aE\xdf\xa3", (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")


class _Answers:
    """Actions of the tab."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def clip(self, video: Any, model: str, method: str, target: str, frames: int) -> tuple[Any, ...]:
        """Explain a video."""
        path = _checked(video)
        explainer, call = self._models.explainer(model, "crop")
        of_video = explainer.model if isinstance(explainer.model, StackedFrames) else None
        count = frames if of_video is None else of_video.shape.frames
        images = read_video(path, count, max_frames=_VIDEO_FRAMES, max_pixels=_FRAME_PIXELS)
        arguments: dict[str, Any] = {"method": method, "target": target or None}
        clip = replace(explain_clip(images, model=explainer, **arguments), source=path.name)
        name = f"{path.stem}-clip"
        image, files = drawn(clip.figure(), name, clip.save, (".mp4", ".npz"))
        arguments["frames"] = None if of_video else frames
        made = python_call("vitflow.explain_clip", path.name, model=Code("explainer"), **arguments)
        code = f"import vitflow\n\nexplainer = {call}\nclip = {made}\nclip.save('{name}.png')"
        return image, None, files, code, gr.update(choices=["", *(explainer.class_names or [])]), []


def _checked(video: Any) -> Path:
    """Return the path of an uploaded video.

    Only containers are opened: OpenCV also reads playlists, which name other files.
    """
    if video is None:
        raise OptionError("Expected a video, got none: upload one.")
    path = Path(video["path"])
    if (size := path.stat().st_size) > _BYTES:
        raise ImageError(f"Expected a video of at most {_BYTES:,} bytes, got {size:,}.")
    with path.open("rb") as file:
        head = file.read(12)
    is_avi = head[:4] == b"RIFF" and head[8:] == b"AVI "
    if not (is_avi or head[:4] == _MATROSKA or head[4:8] in _BOXES):
        raise ImageError(f"Expected a video ({', '.join(VIDEO_FORMATS)}), got {path.name!r}, which is none.")
    return path


def clips_tab(models: Models) -> None:
    """Build the tab and connect its button."""
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            video = gr.File(label="Video", file_types=[*VIDEO_FORMATS], height=170)
            model = gr.Dropdown(models.images, label="Model")
            methods = [(f"{one.title}: {one.question}", one.name) for one in list_methods()]
            method = gr.Dropdown(methods, value="gae", label="Method")
            target = class_field("Name or number; empty: the likeliest.")
            hint = "Evenly spaced frames; a video model reads as many as it was trained with."
            frames = gr.Slider(1, _MOST_FRAMES, value=FRAMES, step=1, label="Frames", info=hint)
            go = gr.Button("Explain", variant="primary")
        with gr.Column(scale=3, min_width=320):
            *answer, notes = result_fields("Upload a video to see which of its frames the output is attributed to.")
    for trigger in (go.click, video.upload):
        connect(trigger, _Answers(models).clip, [video, model, method, target, frames], [*answer, target, notes])
