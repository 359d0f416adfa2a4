"""What a button of the page does: one question at a time; the page shows what is wrong."""

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from html import escape
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from matplotlib.figure import Figure

from vitflow.app.fields import checked
from vitflow.demo import sample_pictures
from vitflow.errors import OptionError, VitflowError, VitflowWarning, printable
from vitflow.explaining.asked import Update, shown_by
from vitflow.pictures.figures import save_figure

# Recording is of one pass at a time, and warnings are caught for all threads at once.
_TURN = threading.Lock()
# What will take more than so many times the limit is stopped as soon as this share of the limit has shown it.
_BEYOND, _SEEN = 2.0, 0.1


class TimeLimitError(VitflowError):
    """A question takes longer than one visitor may keep the others waiting."""


def limited(seconds: float, now: Callable[[], float] = time.monotonic) -> AbstractContextManager[None]:
    """Stop what runs inside once its steps take longer than some seconds, or would.

    Time counts from the first step that is tracked on: to load a model, or to wait for one's turn, is no part of it.
    """
    start: float | None = None

    @contextmanager
    def display(_label: str, total: int) -> Iterator[Update]:
        nonlocal start
        start = now() if start is None else start
        done, warm = 0, (0, 0.0)  # the first steps may compile something

        def update(steps: int) -> None:
            nonlocal done, warm
            done, moment = done + steps, now()
            warm = warm if warm[0] else (done, moment)
            own, counted = moment - warm[1], done - warm[0]
            hopeless = own > _SEEN * seconds and own * (total - done) > _BEYOND * seconds * counted
            if moment - start > seconds or hopeless:
                raise TimeLimitError(
                    f"This takes longer than the {seconds:g} s that one question may take on this page: choose "
                    "fewer masks, larger patches, fewer layers or tokens, or a smaller model. The command line has no "
                    "such limit."
                )

        yield update

    return shown_by(display)


def asks(
    trigger: Any, function: Callable[..., Sequence[Any]], inputs: Sequence[Any], outputs: Sequence[Any], **more: Any
) -> None:
    """Let a trigger call a function, whose last output is the notes; of an error these alone are shown.

    Inputs are what the browser sent, as far as their fields can have such values: a file is {"path": …}. A click comes
    before them.
    """

    @wraps(function)
    def answer(*given: Any) -> tuple[Any, ...]:
        with _TURN, warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", VitflowWarning)
            click, values = given[: -len(inputs)], given[-len(inputs) :]
            try:
                *shown, notes = function(*click, *map(checked, inputs, values))
            except VitflowError as error:
                return *(gr.skip() for _ in outputs[1:]), _told("error", [error])
        return *shown, _told("note", [*(one.message for one in noted), *notes])

    named = {"api_visibility": "private"} if function.__name__.startswith("_") else {"api_name": function.__name__}
    turn = {"concurrency_id": "model", "concurrency_limit": 1, "trigger_mode": "always_last", "preprocess": False}
    trigger(answer, list(inputs), list(outputs), **turn, **named, **more)


def _told(kind: str, lines: Iterable[object]) -> str:
    words = dict.fromkeys(f"{kind}: {escape(printable(str(line), lines=True))}" for line in lines)
    return "".join(f'<p class="{kind}" role="status">{line}</p>' for line in words)


def photograph(samples: Sequence[str | Path]) -> tuple[Any, Any]:
    """Where a photograph is dropped, pasted or taken, and the samples below it."""
    sources: Any = ["upload", "clipboard", "webcam"]
    picture = gr.Image(label="Photograph", type="filepath", image_mode=None, sources=sources, buttons=["fullscreen"])
    return picture, gr.Examples([[str(one)] for one in samples or sample_pictures()], [picture], label="Samples")


def path_of(file: Any) -> Path:
    """Where a photograph lies that came from the browser."""
    if file is None:
        raise OptionError("Expected a photograph, got none: drop one, or take one of the samples.")
    return Path(file["path"])


def answer_column(hint: str, words: Any = None) -> list[Any]:
    """Where an answer stands: the figure, what a click on it means, files and code to take along, and notes."""
    gr.Markdown(hint)
    notes = gr.HTML(elem_classes="told")
    if words is not None:
        words.render()
    figure = gr.Image(show_label=False, interactive=False, type="filepath", buttons=["download", "fullscreen"])
    with gr.Accordion("Take it along", open=False):
        files = gr.File(label="Files", file_count="multiple", interactive=False)
        code = gr.Code(label="The same in Python", language="python", interactive=False)
    return [figure, gr.State(), files, code, notes]


def drawn(figure: Figure, name: str, save_map: Callable[[Path], object] | None = None) -> tuple[str, list[str]]:
    """A figure as a picture to show, and as files to take along, which Gradio removes after a while."""
    Path(get_upload_folder()).mkdir(parents=True, exist_ok=True)
    path = Path(mkdtemp(dir=get_upload_folder())) / name
    files = [str(save_figure(figure, f"{path}{suffix}")) for suffix in (".png", ".pdf")]
    if save_map is not None:
        files.append(str(save_map(Path(f"{path}.npz"))))
    return files[0], files
