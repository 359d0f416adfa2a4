"""The tab for images: the map of a class, a prompt, a box or a clicked patch, with two baselines."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from vitflow.analysis.strips import Strip
from vitflow.app.models import Models, drawn, image_field, path_of, result_fields
from vitflow.demo import sample_images
from vitflow.errors import OptionError, printable
from vitflow.explaining.captions import class_lines, python_call
from vitflow.explaining.targets import is_several
from vitflow.images.figures import Column, draw_bands
from vitflow.images.pen import Pen
from vitflow.registry.method_table import BASELINES, get_method, list_methods

# The default method, and the method for a clicked patch if the selected one does not support patches.
_METHOD, _OF_PATCHES = "gae", "rollout"
_MOST_PROMPTS = 16


class _Answers:
    """Actions of the tab; notes are the last output."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def explain(self, *fields: Any) -> tuple[Any, ...]:
        return self._map(*fields)

    def _patch(self, event: gr.SelectData, click: Any, *fields: Any) -> tuple[Any, ...]:
        """Explain a patch clicked on the figure of another map."""
        if click is None or not isinstance(event.index, list | tuple) or len(event.index) != 2:
            raise OptionError("Expected a click on a map, got none: press Explain first.")
        (left, top, right, bottom), grid, placement = click
        down, across = (event.index[1] - top) / (bottom - top), (event.index[0] - left) / (right - left)
        height, width = placement.image_size
        return self._map(*fields, patch=placement.patch_at(down * height, across * width, grid))

    def _map(
        self, image: str | None, model: str, method: str, target: str, prompts: str, box: str, **more: Any
    ) -> tuple[Any, ...]:
        path = path_of(image)
        lines = tuple(filter(None, map(str.strip, prompts.splitlines())))
        if len(lines) > _MOST_PROMPTS:
            raise OptionError(f"Expected at most {_MOST_PROMPTS} prompts, got {len(lines)}.")
        if is_several(target):
            raise OptionError(f"Expected one class, got {target!r}: vitflow explain draws several.")
        if more and not get_method(method).accepts("patch"):
            method = _OF_PATCHES
        explainer, made = self._models.explainer(model, lines, _numbers(box))
        choices = [(method, more), *((name, {}) for name in BASELINES if name != method)]
        saliency, *baselines = explainer.explain_batch([path], methods=choices, targets=[target or None])
        strip = Strip(Pen(1.3))
        bands = [([Column(one.definition.title)], [[[strip.cell(one)]]]) for one in baselines]
        baseline_image, _ = drawn(draw_bands(bands), "baselines")
        figure, name = saliency.figure(), f"{path.stem}-{method}"
        figure_file, files = drawn(figure, name, saliency.save)
        bounds, height = figure.axes[-2].get_window_extent(), figure.bbox.height  # the bar is last
        box_of_map = bounds.x0, height - bounds.y1, bounds.x1, height - bounds.y0
        click = box_of_map, *saliency.patch_grid
        call = python_call("explainer.explain", path.name, method=method, target=target or None, **more)
        code = f"import vitflow\n\nexplainer = {made}\nsaliency = {call}\nsaliency.figure({f'{name}.png'!r})"
        says = (
            "<br>".join(escape(printable(line)) for line in class_lines(saliency.score)) or "The model has no classes."
        )
        classes = gr.update(choices=["", *(explainer.class_names or [])])
        notes = [saliency.facts["note"]] if "note" in saliency.facts else []
        return figure_file, click, files, code, f"<b>{says}</b>", baseline_image, method, classes, notes

    def _model(self, name: str) -> tuple[Any, ...]:
        """Show the fields that a model takes, empty the others, and forget the classes of the last model."""
        shown = [gr.update(visible=takes, **({} if takes else {"value": ""})) for takes in self._models.takes(name)]
        return *shown, gr.update(choices=[""], value=""), []


def _numbers(text: str) -> tuple[float, ...] | None:
    """Return the numbers of a box; None for an empty text."""
    if not text.strip():
        return None
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if len(numbers) != 4 or not all(map(math.isfinite, numbers)):
        raise OptionError(
            f"Box: expected left, top, right and bottom in pixels, such as 40,20,300,260, got {text!r:.80}."
        )
    return numbers


def images_tab(models: Models, samples: Sequence[str | Path], prompts: Sequence[str], loaded: Any) -> None:
    """Build the tab and connect its buttons; `loaded` is the trigger when a browser has loaded the page."""
    answers = _Answers(models)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            image, examples = image_field(samples or sample_images(), first=bool(samples))
            model = gr.Dropdown(models.images, label="Model")
            methods = [(f"{one.title}: {one.question}", one.name) for one in list_methods()]
            method = gr.Dropdown(methods, value=_METHOD, label="Method")
            about: dict[str, Any] = {"label": "Class", "info": "Name or index; empty: the most probable."}
            target = gr.Dropdown([""], value="", allow_custom_value=True, **about)
            about = {"label": "Prompts", "info": f"What to ask, one per line, at most {_MOST_PROMPTS}."}
            prompt_box = gr.Textbox("\n".join(prompts), lines=3, visible=bool(prompts), **about)
            box = gr.Textbox("", label="Box", placeholder="left,top,right,bottom in pixels", visible=False)
            go = gr.Button("Explain", variant="primary")
        with gr.Column(scale=3, min_width=320, elem_classes="answer"):
            says = gr.HTML(elem_classes="says")
            with gr.Row():
                with gr.Column(scale=4, min_width=240):
                    *answer, notes = result_fields("Click the map to see what a patch of it attends to.")
                with gr.Column(scale=1, min_width=110):
                    baseline_image = gr.Image(show_label=False, interactive=False, elem_classes="result", buttons=[])
    fields = [image, model, method, target, prompt_box, box]
    outputs = [*answer, says, baseline_image, method, target, notes]
    clicked = examples.load_input_event
    if not samples and "demo" in models.images:  # which alone knows the drawn samples
        hidden = gr.update(value="", visible=False)
        unseen: dict[str, Any] = {"api_visibility": "private"}
        clicked = clicked.then(lambda: ("demo", hidden, hidden), None, [model, prompt_box, box], **unseen)
    for trigger in (go.click, image.upload, clicked.then, *([loaded] if samples else [])):
        models.connect(trigger, answers.explain, fields, outputs)
    models.connect(answer[0].select, answers._patch, [answer[1], *fields], outputs)
    models.connect(model.input, answers._model, [model], [prompt_box, box, target, notes])
