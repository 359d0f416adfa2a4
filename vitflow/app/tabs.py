"""The fields of the page and what they do: the map of an image with two baselines, for a class chosen by its bar."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
import torch

from vitflow.analysis.strips import Strip
from vitflow.app.models import BUNDLED, Models, drawn, image_field, result_fields
from vitflow.demo import PHOTOGRAPH, sample_images
from vitflow.errors import OptionError, printable
from vitflow.explaining.captions import NOT_SPECIFIC, class_lines, python_call
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.inputs import PlacedImage, name_of
from vitflow.explaining.saliency import Saliency
from vitflow.images.figures import Column, draw_bands
from vitflow.images.pen import Pen
from vitflow.models.classes import is_several
from vitflow.registry.method_table import BASELINES, get_method, list_methods
from vitflow.registry.options import OPTIONS

# The default method, and the method for a clicked patch if the selected one does not support patches.
_METHOD, _OF_PATCHES = "gae", "rollout"
_MOST_PROMPTS, _BARS = 16, 5


class _Answers:
    """Actions of the page; notes are the last output."""

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

    def _class(self, event: gr.SelectData, image: Any, model: str, method: str, _: str, *fields: Any) -> Any:
        """Explain the class of a clicked bar, whose label is a name, or an index if several have the name."""
        if not isinstance(event.value, str):
            raise OptionError("Expected a click on a class, got none: press Explain first.")
        return self._map(image, model, method, event.value, *fields)

    def _map(
        self, image: str | None, model: str, method: str, target: str, prompts: str, box: str, **more: Any
    ) -> tuple[Any, ...]:
        if image is None:
            raise OptionError("Expected a photograph, got none: drop one, or take one of the samples.")
        path = Path(image)
        lines = tuple(filter(None, map(str.strip, prompts.splitlines())))
        if len(lines) > _MOST_PROMPTS:
            raise OptionError(f"Expected at most {_MOST_PROMPTS} prompts, got {len(lines)}.")
        if is_several(target):
            raise OptionError(f"Expected one class, got {target!r}: vitflow explain draws several.")
        region = OPTIONS["box"].read(box) if box.strip() else None
        if more and not get_method(method).accepts("patch"):
            method = _OF_PATCHES
        explainer, made = self._models.explainer(model, lines, region)
        choices = [(method, more), *((name, {}) for name in BASELINES if name != method)]
        placed = explainer.placed(path, name_of(path, 1))
        saliency, *baselines = explainer.explain_batch([placed], methods=choices, targets=[target or None])
        strip, titles = Strip(Pen(1.3)), [Column(one.definition.title) for one in baselines]
        baseline_image, _ = drawn(draw_bands([(titles, [[[strip.cell(one)] for one in baselines]])]), "baselines")
        figure, name = saliency.figure(), f"{path.stem}-{method}"
        figure_file, files = drawn(figure, name, saliency.save)
        bounds, height = figure.axes[-2].get_window_extent(), figure.bbox.height  # the bar is last
        box_of_map = bounds.x0, height - bounds.y1, bounds.x1, height - bounds.y0
        click = box_of_map, saliency.grid.shape, saliency.placement
        call = python_call("explainer.explain", path.name, method=method, target=target or None, **more)
        code = f"import vitflow\n\nexplainer = {made}\nsaliency = {call}\nsaliency.figure({f'{name}.png'!r})"
        bars = {} if self._models.takes(model)[1] else _bars(explainer, placed)  # of a detection, classes have none
        shown = figure_file, click, files, code, _heading(saliency, **more), baseline_image
        classes = gr.update(choices=["", *(explainer.class_names or [])], value=target)
        notes = [saliency.facts["note"]] if "note" in saliency.facts else []
        return *shown, bars, method, classes, notes

    def _model(self, name: str) -> tuple[Any, ...]:
        """Show the fields that a model takes, empty the others, and forget the map and the classes of the last one."""
        shown = [gr.update(visible=takes, **({} if takes else {"value": ""})) for takes in self._models.takes(name)]
        return *(None,) * 7, *shown, gr.update(choices=[""], value=""), []


def _heading(saliency: Saliency, patch: tuple[int, int] | None = None) -> str:
    """Return the class with its probability as HTML, with what else a map is of: the output in general, or a patch."""
    lines = class_lines(saliency.score, saliency.class_specific)
    shown = [escape(printable(line)) for line in lines] or ["The model has no classes."]
    if patch is not None:
        return (
            f"<b>The patch in row {patch[0]}, column {patch[1]}</b><br>"
            "Press <b>Explain</b> to return to the map of the output."
        )
    if saliency.score.name and not saliency.class_specific:
        return f"{saliency.definition.title} ({NOT_SPECIFIC}); {', '.join(shown)}"
    return f"<b>{'<br>'.join(shown)}</b>"


def _bars(explainer: Explainer, placed: PlacedImage) -> dict[str, float]:
    """Return the most probable classes with their probabilities, by name, or by index if several have the name."""
    names = explainer.class_names or [str(index) for index in range(explainer.num_classes)]
    with torch.no_grad():
        scores = explainer.outputs.scores(explainer.logits(explainer.pixels(placed)))[0]
    if explainer.outputs.activation not in ("softmax", "sigmoid") or len(scores) < 2:
        return {}
    top = scores.float().topk(min(_BARS, len(scores)))
    named = ((names[index] if names.count(names[index]) == 1 else str(index)) for index in top.indices.tolist())
    return dict(zip(named, top.values.tolist(), strict=True))


def image_fields(models: Models, samples: Sequence[str | Path], prompts: Sequence[str], loaded: Any) -> None:
    """Build the page and connect its fields; `loaded` is the trigger when a browser has loaded it."""
    answers = _Answers(models)
    of_photographs = next((name for name in models.images if name not in BUNDLED), None)
    bundled = [*([PHOTOGRAPH] if of_photographs else []), *sample_images()]
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            image, examples = image_field(samples or bundled, first=bool(samples))
            labels = [f"{name} (knows drawn shapes only)" if name in BUNDLED else name for name in models.images]
            model = gr.Dropdown([*zip(labels, models.images, strict=True)], label="Model")
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
                with gr.Column(scale=5, min_width=240):
                    *answer, notes = result_fields("Click the map to see what a patch of it attends to.")
                with gr.Column(scale=3, min_width=220):
                    about = {"label": "Click a class to explain it", "show_heading": False}
                    bars = gr.Label(num_top_classes=_BARS, elem_classes="bars", **about)
                    baseline_image = gr.Image(show_label=False, interactive=False, elem_classes="result", buttons=[])
    fields, results = [image, model, method, target, prompt_box, box], [*answer, says, baseline_image, bars]
    outputs, clicked = [*results, method, target, notes], examples.load_input_event
    if not samples and "demo" in models.images:  # which alone knows the drawn samples
        hidden = gr.update(value="", visible=False)

        def known(sample: Any) -> tuple[Any, ...]:
            return (of_photographs if Path(sample or "").name == PHOTOGRAPH.name else "demo"), "", hidden, hidden

        clicked = clicked.then(known, [image], [model, target, prompt_box, box], api_visibility="private")
    for trigger in (go.click, image.upload, clicked.then, *([loaded] if samples else [])):
        models.connect(trigger, answers.explain, fields, outputs, cleared=len(results))
    models.connect(bars.select, answers._class, fields, outputs, cleared=len(results))
    models.connect(answer[0].select, answers._patch, [answer[1], *fields], outputs)
    models.connect(model.input, answers._model, [model], [*results, prompt_box, box, target, notes], len(results))
    image.clear(lambda: (None,) * len(results), None, results, api_visibility="private")
