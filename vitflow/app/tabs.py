"""The tabs: the map of an image with two baselines, and the attribution of words of a text or a caption."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from vitflow.analysis.strips import Strip, draw_words
from vitflow.app.models import Models, drawn, image_field, model_field, path_of, result_fields
from vitflow.demo import sample_images
from vitflow.errors import OptionError, printable, whole_number
from vitflow.explaining.captions import class_lines, python_call
from vitflow.explaining.targets import is_several
from vitflow.images.figures import Column, draw_bands
from vitflow.images.pen import Pen
from vitflow.registry.method_table import BASELINES, get_method, list_methods
from vitflow.registry.options import OPTIONS
from vitflow.text.generating import explain_generation
from vitflow.text.languages import default_prompt
from vitflow.text.method_table import IMAGE_DEFAULT, PLAIN, TEXT_METHODS
from vitflow.text.reading import Reading, explain_text
from vitflow.text.view import ShadedText, color_of
from vitflow.text.words import grouped_words, labels_of

# The default method, and the method for a clicked patch if the selected one does not support patches.
_METHOD, _OF_PATCHES = "gae", "rollout"
_MOST_PROMPTS = 16


class _ImageAnswers:
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
        region = OPTIONS["box"].read(box) if box.strip() else None
        if more and not get_method(method).accepts("patch"):
            method = _OF_PATCHES
        explainer, made = self._models.explainer(model, lines, region)
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
        shown = [escape(printable(line)) for line in class_lines(saliency.score)] or ["The model has no classes."]
        classes = gr.update(choices=["", *(explainer.class_names or [])])
        notes = [saliency.facts["note"]] if "note" in saliency.facts else []
        return figure_file, click, files, code, f"<b>{'<br>'.join(shown)}</b>", baseline_image, method, classes, notes

    def _model(self, name: str) -> tuple[Any, ...]:
        """Show the fields that a model takes, empty the others, and forget the classes of the last model."""
        shown = [gr.update(visible=takes, **({} if takes else {"value": ""})) for takes in self._models.takes(name)]
        return *shown, gr.update(choices=[""], value=""), []


def images_tab(models: Models, samples: Sequence[str | Path], prompts: Sequence[str], loaded: Any) -> None:
    """Build the tab and connect its buttons; `loaded` is the trigger when a browser has loaded the page."""
    answers = _ImageAnswers(models)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            image, examples = image_field(samples or sample_images(), first=bool(samples))
            model = model_field(models.images)
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


# -- words

_CAPTION, _READ, _WRITE = "What is in an image", "What a word is attributed to", "What is written next"
# The colours of words by the names of their shades.
_SHADES = {str(step): color_of(step / 8) for step in range(9)} | {"selected": "#f0b429"}


class _WordAnswers:
    """Actions of the tab: shaded words, figure, click target, files, code, and notes."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def words(self, question: str, model: str, image: Any, text: str, method: str, count: float) -> tuple[Any, ...]:
        if question == _READ:
            return self._read(text, model, method or PLAIN)
        sees = question == _CAPTION
        options: dict[str, Any] = {"method": method or (IMAGE_DEFAULT if sees else PLAIN), "max_new_tokens": int(count)}
        seen: dict[str, Any] = {"image": path_of(image)} if sees else {}
        prompt = text or default_prompt(model) if sees else text
        reader = self._models.reader(model, sees=sees)
        generation = explain_generation(inputs=prompt, do_sample=False, **seen, **options, **reader)
        named = {"image": seen["image"].name} if sees else {}
        made = python_call("vitflow.text.explain_generation", model, prompt, do_sample=False, **named, **options)
        return _caption(generation, made) if sees else _row(generation, made, len(generation.values) - 1)

    def _word(self, event: gr.SelectData, click: tuple[Any, str]) -> tuple[Any, ...]:
        """Explain a clicked word."""
        if click is None:
            raise OptionError("Expected a click on a word, got none: press Explain first.")
        result, made = click
        number = whole_number("the word", event.index, 0)
        if isinstance(result, Reading):
            return self._read(result.text, result.model, result.method, number)
        if result.images is None:
            return _row(result, made, number - result.prompt_tokens.length)
        groups = grouped_words(result.generated_tokens)
        return _caption(result, made, groups[whole_number("the word", number, 0, len(groups) - 1)][1])

    def _read(self, text: str, model: str, method: str, token: int | None = None) -> tuple[Any, ...]:
        reading = explain_text(text, method=method, token=token, **self._models.reader(model))
        made = python_call("vitflow.text.explain_text", text, model=model, method=method, token=token)
        return _text(reading, made, reading.shaded(), "shaded()")


def _row(generation: Any, made: str, number: int) -> tuple[Any, ...]:
    """Show the attribution of a generated word."""
    if number < 0:
        raise OptionError("Expected a click on a word that was written, got one of the text before.")
    return _text(generation, made, generation.shaded(number), f"shaded({number})")


def _text(result: Any, made: str, view: ShadedText, call: str) -> tuple[Any, ...]:
    tokens = enumerate(zip(labels_of(view.words), view.shades, strict=True))
    words = [(f"{' ' * one.space}{one.text}", _shade(shade, n in view.selected)) for n, (one, shade) in tokens]
    return _shown(words, view.figure(), result, made, f"{call}.save('words.png')")


def _caption(generation: Any, made: str, selected: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    """Show the maps of all words of an answer, or of one."""
    named, left_out = generation.words()
    maps = {places: generation.image(places) for places in named.values()}
    if (selected or next(iter(maps), None)) not in maps:
        raise OptionError(f"Expected a word that has a map, got one that has none: {', '.join(left_out)}.")
    shares = {places: one.facts["on_image"] for places, one in maps.items()}
    groups = grouped_words(generation.generated_tokens)
    words = [(f" {word}", _shade(shares.get(places, 0.0), places == selected)) for word, places in groups]
    if selected is None:
        return _shown(words, draw_words([*maps.values()], left_out=left_out, most=2), generation, made, "words()")
    return _shown(words, maps[selected].figure(), generation, made, f"image({selected}).figure('word.png')")


def _shown(words: Any, figure: Any, result: Any, made: str, call: str) -> tuple[Any, ...]:
    image, files = drawn(figure, "words")
    return words, image, (result, made), files, f"import vitflow\n\nresult = {made}\nresult.{call}", []


def _shade(share: float, selected: bool) -> str:
    return "selected" if selected else str(round(8 * min(abs(share), 1.0)))


def words_tab(models: Models, samples: Sequence[str | Path]) -> None:
    """Build the tab and connect its buttons."""
    answers = _WordAnswers(models)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            question = gr.Radio([_CAPTION, _READ, _WRITE], value=_CAPTION, label="Question")
            with gr.Column() as seeing:
                image, examples = image_field(samples or sample_images())
            text = gr.Textbox("", label="Text", info="The text, or what to ask about the image.", lines=2)
            model = model_field(models.words)
            methods = [("Default", ""), *((one.title, one.name) for one in TEXT_METHODS.values())]
            method = gr.Dropdown(methods, value="", label="Method")
            count = gr.Slider(1, 60, value=30, step=1, label="Tokens to write at most")
            go = gr.Button("Explain", variant="primary")
        with gr.Column(scale=3, min_width=320, elem_classes="answer"):
            words = gr.HighlightedText(show_label=False, color_map=_SHADES, show_inline_category=False, render=False)
            answer = result_fields("Click a word below to see what it is attributed to.", words)
    fields = [question, model, image, text, method, count]
    for trigger in (go.click, image.upload, examples.load_input_event.then):
        models.connect(trigger, answers.words, fields, [words, *answer])
    models.connect(words.select, answers._word, [answer[1]], [words, *answer])
    question.change(lambda kind: gr.update(visible=kind == _CAPTION), question, seeing, api_visibility="private")
