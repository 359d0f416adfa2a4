"""The tab for words: what a word of a text rests on, what a model writes, and what it says of an image."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from vitflow.app.asking import Models, answer_column, asks, drawn, path_of, photograph
from vitflow.errors import OptionError, whole_number
from vitflow.explaining.captions import python_call
from vitflow.explaining.strips import draw_words
from vitflow.models.hub import default_prompt
from vitflow.text.generating import explain_generation
from vitflow.text.labels import labels_of, spoken_words
from vitflow.text.method_table import IMAGE_DEFAULT, PLAIN, TEXT_METHODS
from vitflow.text.reading import Reading, explain_text
from vitflow.text.shaded import ShadedText
from vitflow.text.view import color_of

_CAPTION, _READ, _WRITE = "What is in an image", "What a word rests on", "What is written next"
# Attention grows with the square of a text's length, so that one visitor's text has a limit.
_CHARACTERS = 2000
# The colours of words by the names of their shades.
_SHADES = {str(step): color_of(step / 8) for step in range(9)} | {"asked": "#f0b429"}


class _Answers:
    """What the tab does. It answers with words on shades, a figure, what a click means, files, code, and notes."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def words(self, question: str, model: str, image: Any, text: str, method: str, count: float) -> tuple[Any, ...]:
        if question == _READ:
            return self._read(text, model, method or PLAIN)
        method = method or (IMAGE_DEFAULT if question == _CAPTION else PLAIN)
        asked: dict[str, Any] = {"method": method, "max_new_tokens": int(count), "do_sample": False}
        if question == _WRITE:
            found = explain_generation(inputs=text, **asked, **self._models.reader(model))
            return _row(
                found, python_call("vitflow.text.explain_generation", model, text, **asked), len(found.values) - 1
            )
        path, prompt = path_of(image), text or default_prompt(model)
        found = explain_generation(inputs=prompt, image=path, **asked, **self._models.reader(model, sees=True))
        return _caption(found, python_call("vitflow.text.explain_generation", model, prompt, image=path.name, **asked))

    def _word(self, event: gr.SelectData, click: tuple[Any, str]) -> tuple[Any, ...]:
        """The same of a word that was clicked."""
        if click is None:
            raise OptionError("Expected a click on a word, got none: press Explain first.")
        found, made = click
        number = whole_number("the word", event.index, 0)
        if isinstance(found, Reading):
            return self._read(found.text, found.model, found.method, number)
        if found.images is None:
            return _row(found, made, number - found.prompt_tokens.length)
        spoken = spoken_words(found.generated_tokens)
        return _caption(found, made, spoken[whole_number("the word", number, 0, len(spoken) - 1)][1])

    def _read(self, text: str, model: str, method: str, token: int | None = None) -> tuple[Any, ...]:
        found = explain_text(text, method=method, token=token, **self._models.reader(model))
        made = python_call("vitflow.text.explain_text", text, model=model, method=method, token=token)
        return _text(found, made, found.shaded(), "shaded()")


def _row(found: Any, made: str, number: int) -> tuple[Any, ...]:
    """What a word rests on that was written."""
    if number < 0:
        raise OptionError("Expected a click on a word that was written, got one of the text before.")
    return _text(found, made, found.shaded(number), f"shaded({number})")


def _text(found: Any, made: str, view: ShadedText, call: str) -> tuple[Any, ...]:
    tokens = enumerate(zip(labels_of(view.words), view.shades, strict=True))
    words = [(f"{' ' * one.space}{one.text}", _shade(shade, n in view.selected)) for n, (one, shade) in tokens]
    return _shown(words, view.figure(), found, made, f"{call}.save('words.png')")


def _caption(found: Any, made: str, asked: tuple[int, ...] | None = None) -> tuple[Any, ...]:
    """The maps of all words of an answer, or of one."""
    named, left_out = found.words()
    maps = {places: found.image(places) for places in named.values()}
    if (asked or next(iter(maps), None)) not in maps:
        raise OptionError(f"Expected a word that has a map, got one that has none: {', '.join(left_out)}.")
    shares = {places: one.facts["on_image"] for places, one in maps.items()}
    spoken = spoken_words(found.generated_tokens)
    words = [(f" {word}", _shade(shares.get(places, 0.0), places == asked)) for word, places in spoken]
    if asked is None:
        return _shown(words, draw_words([*maps.values()], left_out=left_out), found, made, "words()")
    return _shown(words, maps[asked].figure(), found, made, f"image({asked}).figure('word.png')")


def _shown(words: Any, figure: Any, found: Any, made: str, call: str) -> tuple[Any, ...]:
    image, files = drawn(figure, "words")
    return words, image, (found, made), files, f"import vitflow\n\nfound = {made}\nfound.{call}", []


def _shade(share: float, asked: bool) -> str:
    return "asked" if asked else str(round(8 * min(abs(share), 1.0)))


def words_tab(models: Models, samples: Sequence[str | Path]) -> None:
    """Lay the tab out, and say what its buttons do."""
    answers = _Answers(models)
    with gr.Row():
        with gr.Column(scale=2, min_width=320):
            question = gr.Radio([_CAPTION, _READ, _WRITE], value=_CAPTION, label="Question")
            with gr.Column() as seeing:
                image, examples = photograph(samples)
            longest: dict[str, Any] = {"lines": 2, "max_length": _CHARACTERS}
            text = gr.Textbox("", label="Text", info="The text, or what to ask about the image.", **longest)
            model = gr.Dropdown(models.words, label="Model")
            usual = f"{TEXT_METHODS[IMAGE_DEFAULT].title} for images, {TEXT_METHODS[PLAIN].title.lower()} for texts"
            methods = [(f"Default: {usual}", ""), *((one.title, one.name) for one in TEXT_METHODS.values())]
            method = gr.Dropdown(methods, value="", label="Method")
            count = gr.Slider(1, 60, value=30, step=1, label="Tokens to write at most")
            go = gr.Button("Explain", variant="primary")
        with gr.Column(scale=3, min_width=320):
            words = gr.HighlightedText(show_label=False, color_map=_SHADES, show_inline_category=False, render=False)
            answer = answer_column("Click a word below to see what it rests on.", words)
    for trigger in (go.click, image.upload, examples.load_input_event.then):
        asks(trigger, answers.words, [question, model, image, text, method, count], [words, *answer])
    asks(words.select, answers._word, [answer[1]], [words, *answer])
    question.change(lambda asked: gr.update(visible=asked == _CAPTION), question, seeing, api_visibility="private")
