"""The tabs for images and clips: maps for a class, a prompt or a clicked patch, comparisons, shares of frames."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradio as gr

from vitflow.analysis.clips import FRAMES, explain_clip
from vitflow.analysis.comparison import compare
from vitflow.app.actions import Models, class_field, connect, drawn, image_field, path_of, result_fields, shared
from vitflow.demo import sample_images
from vitflow.errors import ImageError, OptionError
from vitflow.explaining.captions import Code, python_call
from vitflow.explaining.targets import Contrast, is_several, top_count
from vitflow.images import BACKGROUNDS, FITS, INTERPOLATIONS, VIDEO_FORMATS
from vitflow.images.figures import image_bounds
from vitflow.images.videos import read_video
from vitflow.models.videos import StackedFrames
from vitflow.registry.method_table import get_method, list_methods
from vitflow.registry.options import METHOD_OPTIONS, Option, default_in_words

# The default method, and the method for a clicked patch if the selected one does not support patches.
_METHOD, _OF_PATCHES = "gae", "rollout"
# Method options with a field: a patch is clicked, and the last two change the duration only.
_OPTIONS = [
    option for option in METHOD_OPTIONS.values() if option.name not in ("patch", "occlusion_batch", "peer_options")
]
# Maximum values for visitors of options without a limit in the table.
_MOST = {"masks": 4096, "cells": 64, "random_seed": 2**31 - 1}
_PRIVATE: dict[str, Any] = {"api_visibility": "private"}
_REGION = "left, top, right and bottom in pixels, such as 40,20,300,260"
_LARGEST, _MOST_PROMPTS, _PROMPT_CHARACTERS, _MOST_TARGETS = 10_000, 16, 2000, 10
_DRAWING, _USUAL = ("background", "interpolation", "contours"), ("grey", "smooth", False)
_NAMES = ["image", "model", "method", "target", "prompts", "against", "fit", *_DRAWING]
_NAMES += [*(one.name for one in _OPTIONS), "region"]
# Limits of a video in bytes, frames, and pixels of a frame (1920 × 1080, in multiples of 16); and explained frames.
_BYTES, _VIDEO_FRAMES, _FRAME_PIXELS, _MOST_FRAMES = 100_000_000, 3000, 1920 * 1088, 16
# First bytes of Matroska and WebM, and types of the first box of MP4 and QuickTime.
_MATROSKA, _BOXES = b"\x1aE\xdf\xa3", (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")
# Result shown, as in the address: a map, the map of a patch as "ROW,COL", or the comparison.
_COMPARISON = "compare"
# The address of the page holds the fields that differ from their defaults, and the name of the image if it is a sample.
_ADDRESS = """(...given) => {
  const fields = %s, usual = %s, query = new URLSearchParams();
  fields.forEach((name, i) => {
    const value = name === "image" ? given[i]?.orig_name : given[i];
    if (value && String(value) !== usual[name]) query.set(name, value);
  });
  history.replaceState(null, "", "?" + query);
}"""


class _Request:
    """Values of the page's fields, and the selected model."""

    def __init__(self, models: Models, fields: Sequence[Any]) -> None:
        given = dict(zip(_NAMES, fields, strict=True))
        self.path, self.method = path_of(given["image"]), get_method(given["method"])
        prompts = tuple(filter(None, map(str.strip, given["prompts"].splitlines())))
        if len(prompts) > _MOST_PROMPTS:
            raise OptionError(f"Expected at most {_MOST_PROMPTS} prompts, got {len(prompts)}.")
        region = _read_region(given["region"])
        self.explainer, made = models.explainer(given["model"], given["fit"], prompts, region)
        target, against = given["target"] or None, given["against"]
        if (top_count(target) or 1) > _MOST_TARGETS:
            raise OptionError(f"Expected at most 'top{_MOST_TARGETS}' on this page, got {target!r}.")
        self.target = Contrast(target, against=against) if against else target
        self.targets = [self.target] if self.target else list(prompts) or None
        self.drawing = {name: given[name] for name in _DRAWING if given[name] not in _USUAL}
        options = [option for option in _OPTIONS if given[option.name] and self.method.accepts(option.name)]
        self.options = {option.name: _read(option, given[option.name]) for option in options}
        self.code = f"import vitflow\n\nexplainer = {made}"


def _read(option: Option, text: str) -> Any:
    """Return the value of an option, limited to the maximum for visitors."""
    value = option.read(text)
    if option.kind is int and abs(value) > (most := _MOST.get(option.name, _LARGEST)):
        raise OptionError(f"{option.name}: expected at most {most:,} on this page, got {text!r:.80}.")
    if option.kind is float and not math.isfinite(value):
        raise OptionError(f"{option.name}: expected {option.values}, got {text!r}.")
    return value


def _read_region(text: str) -> tuple[float, ...] | None:
    """Return the numbers of a region, a box or a point; None for an empty text."""
    if not text.strip():
        return None
    try:
        numbers = tuple(float(number) for number in text.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) not in (2, 4) or not all(map(math.isfinite, numbers)):
        raise OptionError(f"region: expected {_REGION}, got {text!r:.80}.")
    return numbers


class _Answers:
    """Actions of the buttons of the tabs; notes are the last output."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def explain(self, *fields: Any) -> tuple[Any, ...]:
        return self._map(_Request(self._models, fields))

    def _patch(self, event: gr.SelectData, click: Any, *fields: Any) -> tuple[Any, ...]:
        """Explain a patch clicked on the figure of another map."""
        if click is None or not isinstance(event.index, list | tuple):
            raise OptionError("Expected a click on a map, got none: press Explain first.")
        (left, top, right, bottom), placement, grid = click
        down, across = (event.index[1] - top) / (bottom - top), (event.index[0] - left) / (right - left)
        height, width = placement.image_size
        return self._of_patch(placement.patch_at(down * height, across * width, grid), fields)

    def _of_patch(self, patch: tuple[int, int], fields: Sequence[Any]) -> tuple[Any, ...]:
        request = _Request(self._models, fields)
        if not request.method.accepts("patch"):
            request.method, request.options = get_method(_OF_PATCHES), {}
        return self._map(request, patch=patch)

    def _corner(self, event: gr.SelectData, model: str, region: str) -> tuple[Any, ...]:
        """Add a corner that was clicked on the photograph: the first click begins a region, the second ends it."""
        if not self._models.takes_region(model) or not isinstance(event.index, list | tuple):
            return gr.skip(), []
        corners = [round(place) for place in event.index]
        before = _read_region(region)
        if before is not None and len(before) == 2:
            (left, right), (top, bottom) = (sorted(map(round, pair)) for pair in zip(before, corners, strict=True))
            corners = [left, top, right, bottom]
        return ",".join(map(str, corners)), []

    def _map(self, request: _Request, **more: Any) -> tuple[Any, ...]:
        if is_several(request.target):
            return self._strip(request, [request.method.name], request.options, view="map")
        arguments = {"method": request.method.name, "target": request.target, **request.options, **more}
        saliency = request.explainer.explain(request.path, **arguments)
        figure, name = saliency.figure(**request.drawing), f"{request.path.stem}-{request.method.name}"
        image, files = drawn(figure, name, saliency.save)
        click = image_bounds(figure), saliency.placement, saliency.facts.get("patch_grid", saliency.grid.shape)
        made, written = (
            python_call("explainer.explain", request.path.name, **arguments),
            _written("saliency.figure", name, request),
        )
        classes = _choices(request.explainer)
        notes = [saliency.facts["note"]] if "note" in saliency.facts else []
        code, view = f"{request.code}\nsaliency = {made}\n{written}", ",".join(map(str, more.get("patch", ())))
        return image, click, files, code, request.method.name, classes, view, notes

    def compare(self, *fields: Any) -> tuple[Any, ...]:
        return self._strip(_Request(self._models, fields), None, {}, view=_COMPARISON)

    def _strip(self, request: _Request, methods: Any, options: dict[str, Any], *, view: str) -> tuple[Any, ...]:
        """Draw the maps of several methods or of several classes."""
        arguments = {"methods": methods, "targets": request.targets, **options}
        comparison = compare(request.path, model=request.explainer, **arguments)
        name = f"{request.path.stem}-{methods[0] if methods else _COMPARISON}"
        image, files = drawn(comparison.figure(**request.drawing), name)
        made = python_call("vitflow.compare", request.path.name, model=Code("explainer"), **arguments)
        code = f"{request.code}\ncomparison = {made}\n{_written('comparison.figure', name, request)}"
        agreement = [" ".join(str(comparison.agreement()).splitlines()[:2])] if methods is None else []
        return image, None, files, code, request.method.name, _choices(request.explainer), view, agreement

    def _open(self, *fields: Any) -> tuple[Any, ...]:
        """Compute the result given by the address of the page."""
        *values, view = fields
        if not view or values[0] is None:
            return *(gr.skip() for _ in range(7)), []
        if view == _COMPARISON:
            return self.compare(*values)
        patch = view.split(",")
        if len(patch) == 2 and all(number.isdecimal() for number in patch):
            return self._of_patch((int(patch[0]), int(patch[1])), values)
        return self.explain(*values)

    def clip(self, video: Any, model: str, method: str, target: str, frames: int) -> tuple[Any, ...]:
        """Explain a video."""
        path = _video_of(video)
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
        return image, None, files, code, _choices(explainer), []

    def _method(self, name: str) -> tuple[Any, ...]:
        return *(_field(option, name, gr.update) for option in _OPTIONS), []

    def _model(self, name: str) -> tuple[Any, ...]:
        shown = [
            gr.update(visible=takes, **({} if takes else {"value": ""}))
            for takes in (self._models.takes_region(name), self._models.takes_prompts(name))
        ]
        return *shown, gr.update(choices=[""], value=""), []


def _video_of(video: Any) -> Path:
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


def _choices(explainer: Any) -> Any:
    return gr.update(choices=["", *(explainer.class_names or [])])


def _written(function: str, name: str, request: _Request) -> str:
    return python_call(function, f"{name}.png", **request.drawing)


def _field(option: Option, name: str, make: Any = None) -> Any:
    """Build the field of a method's option, or with `gr.update` change it; empty means the default."""
    method = get_method(name)
    default = f"default: {default_in_words(option.name, method.defaults.get(option.name))}"
    about: dict[str, Any] = {"label": option.name, "info": option.help, "visible": method.accepts(option.name)}
    about |= {} if make else {"value": ""}
    if option.kind is bool or option.kind == "choice":
        choices = [(default, ""), *((one, one) for one in option.values.split("|"))]
        return (make or gr.Dropdown)(choices=choices, **about)
    most = f", at most {_MOST[option.name]:,} here" if option.name in _MOST else ""
    return (make or gr.Textbox)(placeholder=f"{option.values}{most}, {default}", **about)


def _restored(models: Models, samples: Sequence[str | Path], fields: Sequence[Any], request: gr.Request) -> list[Any]:
    """Return the values of the fields that the address of the page names, and of the view; others stay as they are."""
    query = {name: value for name, value in dict(request.query_params).items() if isinstance(value, str)}
    known = {Path(one).name: Path(one) for one in samples or sample_images()}
    values: list[Any] = []
    for name, field in zip([*_NAMES, "view"], fields, strict=True):
        if name not in query:
            values.append("map" if name == "view" and query.get("image") in known else gr.skip())
        elif name == "image":
            values.append(shared(known[query[name]]) if query[name] in known else gr.skip())
        elif name in ("prompts", "region"):
            values.append(gr.update(value=query[name], visible=True))
        elif isinstance(field, gr.Checkbox):
            values.append(query[name] == "true")
        elif isinstance(field, gr.Dropdown) and not field.allow_custom_value:
            allowed = [value for _, value in field.choices]
            values.append(query[name] if query[name] in allowed else gr.skip())
        else:
            values.append(query[name])
    return values


def images_tab(models: Models, samples: Sequence[str | Path], first_prompts: Sequence[str], loaded: Any) -> None:
    """Build the tab and connect its buttons.

    Args:
        models: the models of the page.
        samples: sample images.
        first_prompts: initial prompts.
        loaded: the trigger of the page when a browser has loaded it.
    """
    answers = _Answers(models)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            image, examples = image_field(samples)
            model = gr.Dropdown(models.images, label="Model")
            methods = [(f"{one.title}: {one.question}", one.name) for one in list_methods()]
            method = gr.Dropdown(methods, value=_METHOD, label="Method")
            with gr.Row():
                region = gr.Textbox(
                    "",
                    label="Region",
                    info="Pixels, or click two corners.",
                    placeholder="left,top,right,bottom",
                    min_width=160,
                    visible=False,
                )
                target = class_field("Name, index, or top3.")
            hint = f"What to ask, one per line, at most {_MOST_PROMPTS}."
            longest: dict[str, Any] = {"lines": 3, "max_length": _PROMPT_CHARACTERS}
            prompts = gr.Textbox(
                "\n".join(first_prompts), label="Prompts", info=hint, visible=bool(first_prompts), **longest
            )
            with gr.Row():
                go, compare_button = gr.Button("Explain", variant="primary"), gr.Button("Compare methods")
            with gr.Accordion("Options", open=False):
                against = gr.Textbox("", label="Against", info="Another class: what speaks for the one, not for this.")
                fit = gr.Dropdown([one for one in FITS if one != "native"], label="Fit")
                background = gr.Dropdown([*BACKGROUNDS], value="grey", label="Background")
                interpolation = gr.Dropdown([*INTERPOLATIONS], label="Interpolation")
                contours = gr.Checkbox(label="Contours")
                options = [_field(option, _METHOD) for option in _OPTIONS]
        with gr.Column(scale=3, min_width=320):
            *answer, notes = result_fields("Click the photograph below to see what that patch of it looks at.")
    view = gr.Textbox("", visible="hidden", max_length=_PROMPT_CHARACTERS)
    fields = [image, model, method, target, prompts, against, fit, background, interpolation, contours, *options]
    fields.append(region)
    drawing = [*answer, method, target, view, notes]
    usual = {"model": models.images[0], "method": _METHOD, "fit": "crop", "prompts": "\n".join(first_prompts)}
    usual |= dict(zip(_DRAWING, map(str, _USUAL), strict=True))
    address: dict[str, Any] = {"js": _ADDRESS % (json.dumps([*_NAMES, "view"]), json.dumps(usual))}
    uploaded, chosen = (
        trigger(lambda: "", None, region, **_PRIVATE) for trigger in (image.upload, examples.load_input_event.then)
    )
    if not samples and "demo" in models.images:  # which alone knows the drawn ones
        hidden = gr.update(value="", visible=False)
        chosen = chosen.then(lambda: ("demo", hidden, hidden), None, [model, region, prompts], **_PRIVATE)
    results = [connect(trigger, answers.explain, fields, drawing) for trigger in (go.click, uploaded.then, chosen.then)]
    results += [
        connect(answer[0].select, answers._patch, [answer[1], *fields], drawing),
        connect(compare_button.click, answers.compare, fields, drawing),
    ]
    for result in results:
        result.then(None, [*fields, view], None, **address)
    connect(method.change, answers._method, [method], [*options, notes])
    connect(model.input, answers._model, [model], [region, prompts, target, notes])
    connect(image.select, answers._corner, [model, region], [region, notes])

    def restored(request: gr.Request) -> list[Any]:
        return _restored(models, samples, [*fields, view], request)

    connect(loaded(restored, None, [*fields, view], **_PRIVATE).then, answers._open, [*fields, view], drawing)


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
