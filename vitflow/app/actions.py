"""Actions of the app's buttons: one request at a time, with errors shown on the page."""

import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache, wraps
from html import escape
from pathlib import Path
from shutil import copy
from tempfile import mkdtemp
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from matplotlib.figure import Figure
from torch import nn

from vitflow.demo import sample_images
from vitflow.errors import OptionError, VitflowError, VitflowWarning, printable
from vitflow.explaining.captions import Code, python_call
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.regions import about_region
from vitflow.images.figures import save_figure
from vitflow.models.hub import bundled
from vitflow.models.loading import load_model
from vitflow.models.names import has_regions, is_segmenting
from vitflow.models.pairs import is_pair
from vitflow.models.pairs import prompts as prompt_scores
from vitflow.progress import Update, shown_by
from vitflow.recording.isolation import default_device
from vitflow.text.languages import load_language_model, load_processor


class Models:
    """Models of a page by name, each loaded once: `images` for images, `words` for texts and captions.

    `checkpoint` and `class_names` belong to the first image model, as for `load_model`.
    """

    def __init__(
        self,
        images: Sequence[str],
        words: Sequence[str],
        *,
        checkpoint: str | Path | None = None,
        class_names: str | Path | None = None,
    ) -> None:
        self.images, self.words = list(images), list(words)
        given = {"checkpoint": checkpoint, "class_names": class_names}
        self._of_first: dict[str, Any] = {name: str(path) for name, path in given.items() if path is not None}
        self._image_model, self._language_model = cache(self._load), cache(load_language_model)
        self._processor = cache(load_processor)
        self.explainer = lru_cache(32)(self._explainer)  # prompts that were embedded are kept

    def _load(self, name: str) -> nn.Module:
        return load_model(bundled(name), **self._given(name))

    def _given(self, name: str) -> dict[str, Any]:
        """Return the arguments of `load_model` for an image model."""
        return self._of_first if name == self.images[0] else {}

    def _explainer(
        self, name: str, fit: str, prompts: tuple[str, ...] = (), region: tuple[float, ...] | None = None
    ) -> tuple[Explainer, Code]:
        """Return an explainer, and the Python call that makes it."""
        model = self._image_model(name)
        outputs: Any = None
        made: Code | None = None
        if prompts:
            outputs, made = prompt_scores(prompts), python_call("vitflow.prompts", list(prompts))
        elif region or has_regions(model):
            question = "vitflow.masks" if is_segmenting(model) else "vitflow.boxes"
            outputs, made = about_region(model, region), python_call(question, *([region] if region else []))
        explainer = Explainer(model, device=default_device(), fit=fit, outputs=outputs)
        given, changed = self._given(name), None if fit == "crop" else fit
        loaded = python_call("vitflow.load_model", name, **given) if given else name
        return explainer, python_call("vitflow.Explainer", loaded, outputs=made, fit=changed)

    def takes_prompts(self, name: str) -> bool:
        """Return True if an image model is used with prompts."""
        return is_pair(self._image_model(name))

    def takes_region(self, name: str) -> bool:
        """Return True for a detector or a segmentation model."""
        return has_regions(self._image_model(name))

    def reader(self, name: str, *, sees: bool = False) -> dict[str, Any]:
        """Return a language model with its tokenizer, and its processor if it has one, as arguments."""
        processor = {"processor": self._processor(bundled(name))} if sees else {}
        model, tokenizer = self._language_model(bundled(name))
        return {"model": model, "tokenizer": tokenizer, "name": name, **processor}


# One forward pass is recorded at a time, and warnings are caught globally.
_TURN = threading.Lock()
# A request that is predicted to exceed the limit by this factor is stopped after this share of the limit.
_BEYOND, _SEEN = 2.0, 0.1


class TimeLimitError(VitflowError):
    """A request exceeds the time limit of the page."""


def limited(seconds: float, now: Callable[[], float] = time.monotonic) -> AbstractContextManager[None]:
    """Stop the body if its steps exceed a number of seconds, or are predicted to.

    Time is counted from the first tracked step, without loading the model or waiting in the queue.
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
            elapsed, counted = moment - warm[1], done - warm[0]
            hopeless = elapsed > _SEEN * seconds and elapsed * (total - done) > _BEYOND * seconds * counted
            if moment - start > seconds or hopeless:
                raise TimeLimitError(
                    f"This takes longer than the limit of {seconds:g} s on this page: choose "
                    "fewer masks, larger patches, fewer layers or tokens, a shorter video, or a smaller model. The "
                    "command line has no such limit."
                )

        yield update

    return shown_by(display)


def connect(
    trigger: Any, function: Callable[..., Sequence[Any]], inputs: Sequence[Any], outputs: Sequence[Any], **more: Any
) -> Any:
    """Connect a trigger with a function whose last output is the notes; after an error, only these are shown.

    A file among the inputs is {"path": …}. A click is the first argument.
    """

    @wraps(function)
    def answer(*given: Any) -> tuple[Any, ...]:
        with _TURN, warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", VitflowWarning)
            try:
                *shown, notes = function(*given)
            except VitflowError as error:
                return *(gr.skip() for _ in outputs[1:]), _messages("error", [error])
        return *shown, _messages("note", [*(one.message for one in noted), *notes])

    named = {"api_visibility": "private"} if function.__name__.startswith("_") else {"api_name": function.__name__}
    turn = {"concurrency_id": "model", "concurrency_limit": 1, "trigger_mode": "always_last", "preprocess": False}
    return trigger(answer, list(inputs), list(outputs), **turn, **named, **more)


def _messages(kind: str, lines: Iterable[object]) -> str:
    words = dict.fromkeys(f"{kind}: {escape(printable(str(line), lines=True))}" for line in lines)
    return "".join(f'<p class="{kind}" role="status">{line}</p>' for line in words)


def image_field(samples: Sequence[str | Path]) -> tuple[Any, Any]:
    """Build the upload field for an image, with samples below."""
    sources: Any = ["upload", "clipboard", "webcam"]
    shown: dict[str, Any] = {"height": 155, "sources": sources, "buttons": ["fullscreen"]}
    image = gr.Image(label="Image", type="filepath", image_mode=None, **shown)
    return image, gr.Examples([[str(one)] for one in samples or sample_images()], [image], label="Samples")


def path_of(file: Any) -> Path:
    """Return the path of an uploaded image."""
    if file is None:
        raise OptionError("Expected a photograph, got none: drop one, or take one of the samples.")
    return Path(file["path"])


def class_field(hint: str) -> gr.Dropdown:
    """Build the field for a class, whose choices are known once a model is loaded."""
    return gr.Dropdown([""], value="", label="Class", info=hint, allow_custom_value=True, min_width=160)


def result_fields(hint: str, words: Any = None) -> list[Any]:
    """Build the output fields: figure, click target, files, code, and notes."""
    gr.Markdown(hint)
    notes = gr.HTML(elem_classes="messages")
    if words is not None:
        words.render()
    shown: dict[str, Any] = {"elem_classes": "result", "buttons": ["download", "fullscreen"]}
    figure = gr.Image(show_label=False, interactive=False, type="filepath", **shown)
    with gr.Accordion("Download", open=False):
        files = gr.File(label="Files", file_count="multiple", interactive=False)
        code = gr.Code(label="The same in Python", language="python", interactive=False)
    return [figure, gr.State(), files, code, notes]


def drawn(
    figure: Figure, name: str, save: Callable[[Path], object] | None = None, suffixes: Sequence[str] = (".npz",)
) -> tuple[str, list[str]]:
    """Save a figure as an image to show and files to download, which Gradio removes later.

    Args:
        figure: the figure.
        name: name of the files.
        save: saves the result in further formats.
        suffixes: suffixes of these.
    """
    Path(get_upload_folder()).mkdir(parents=True, exist_ok=True)
    path = Path(mkdtemp(dir=get_upload_folder())) / name
    files = [str(save_figure(figure, f"{path}{suffix}")) for suffix in (".png", ".pdf")]
    if save is not None:
        files += [str(save(Path(f"{path}{suffix}"))) for suffix in suffixes]
    return files[0], files


def shared(sample: Path) -> str:
    """Copy a sample to the files that the page may show, and return the path."""
    Path(get_upload_folder()).mkdir(parents=True, exist_ok=True)
    return str(copy(sample, mkdtemp(dir=get_upload_folder())))
