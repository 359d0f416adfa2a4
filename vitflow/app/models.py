"""The models of a page, each loaded once, and the actions of its fields: one request at a time."""

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, wraps
from html import escape
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from matplotlib.figure import Figure
from torch import nn

from vitflow.errors import VitflowError, VitflowWarning, printable
from vitflow.explaining.captions import Code, python_call
from vitflow.explaining.explainer import Explainer
from vitflow.explaining.regions import about_region
from vitflow.files import is_there
from vitflow.images.figures import save_figure
from vitflow.models.devices import default_device
from vitflow.models.hub import bundled, check_timm_name, is_of_transformers
from vitflow.models.loading import load_model
from vitflow.models.names import has_regions, is_segmenting
from vitflow.models.pairs import is_pair
from vitflow.models.pairs import prompts as prompt_scores

#: Bundled models, which know drawn shapes only.
BUNDLED = ("demo", "demo-text")
_TURN = threading.Lock()  # one pass is recorded at a time, and warnings are caught globally
# An error or a result is scrolled to, as on a phone the buttons are below it.
_SHOW = """() => {
  const shown = [".error", ".says", ".result"].flatMap((one) => [...document.querySelectorAll(one)]);
  shown.find((element) => element.offsetParent)?.scrollIntoView({block: "nearest"});
}"""


class Models:
    """Models of a page by name, each loaded once; `loading` are arguments of `load_model` for the first one."""

    def __init__(self, images: Sequence[str], loading: dict[str, Any]) -> None:
        for name in images:  # models are loaded at their first use, by which nobody sees a misspelt name
            if name != "demo" and not (":" in name or is_there(name) or is_of_transformers(name)):
                check_timm_name(name)
        self.images, self._loading = list(images), loading
        self._image_model = cache(self._load)
        self.explainer = lru_cache(32)(self._explainer)  # prompts that were embedded are kept

    def _load(self, name: str) -> nn.Module:
        return load_model(bundled(name), **self._loading_of(name))

    def _loading_of(self, name: str) -> dict[str, Any]:
        return self._loading if name == self.images[0] else {}

    def _explainer(
        self, name: str, prompts: tuple[str, ...] = (), box: tuple[float, ...] | None = None
    ) -> tuple[Explainer, Code]:
        """Return an explainer, and the Python call that makes it."""
        model = self._image_model(name)
        outputs: Any = prompt_scores(prompts) if prompts else None
        made = python_call("vitflow.prompts", list(prompts)) if prompts else None
        if box or (has_regions(model) and not prompts):
            question = "vitflow.masks" if is_segmenting(model) else "vitflow.boxes"
            made = python_call(question, *([box] if box else []), prompts=made)
            outputs = about_region(model, box, prompts=outputs)
        loading = {
            key: str(value) if isinstance(value, Path) else value for key, value in self._loading_of(name).items()
        }
        loaded = python_call("vitflow.load_model", name, **loading) if loading else name
        explainer = Explainer(model, device=default_device(), outputs=outputs)
        return explainer, python_call("vitflow.Explainer", loaded, outputs=made)

    def takes(self, name: str) -> tuple[bool, bool]:
        """Return whether an image model is used with prompts, and whether with a box."""
        model = self._image_model(name)
        return is_pair(model), has_regions(model)

    def connect(
        self,
        trigger: Any,
        function: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        cleared: int = 0,
    ) -> None:
        """Connect a trigger with a function whose last output is its notes.

        After an error the first `cleared` outputs are emptied, the notes show the error, and the others stay.
        """

        @wraps(function)
        def answer(*given: Any) -> tuple[Any, ...]:
            with _TURN, warnings.catch_warnings(record=True) as noted:
                warnings.simplefilter("ignore")
                warnings.simplefilter("always", VitflowWarning)
                try:
                    *shown, notes = function(*given)
                except VitflowError as error:
                    kept = (gr.skip() for _ in outputs[cleared + 1 :])
                    return *(None,) * cleared, *kept, _messages("error", [error])
            return *shown, _messages("note", [*(one.message for one in noted), *notes])

        named = {"api_visibility": "private"} if function.__name__.startswith("_") else {"api_name": function.__name__}
        turn = {"concurrency_id": "model", "concurrency_limit": 1, "trigger_mode": "always_last"}
        trigger(answer, list(inputs), list(outputs), **turn, **named).then(None, None, None, js=_SHOW)


def _messages(kind: str, lines: Iterable[object]) -> str:
    """Return messages as HTML, each with a button that closes it."""
    close = '<button aria-label="Close" onclick="this.parentElement.remove()">×</button>'
    words = dict.fromkeys(f"{kind}: {escape(printable(str(line), lines=True))}" for line in lines)
    return "".join(f'<p class="{kind}" role="status">{close}{line}</p>' for line in words)


def image_field(samples: Sequence[str | Path], *, first: bool = False) -> tuple[Any, Any]:
    """Build the upload field for an image, with samples below; `first`: it shows the first sample."""
    shown: dict[str, Any] = {"height": 155, "sources": ["upload", "clipboard", "webcam"], "buttons": ["fullscreen"]}
    start = str(samples[0]) if first else None
    image = gr.Image(start, label="Image", type="filepath", image_mode=None, **shown)
    image.preprocess = lambda payload: payload and payload.path  # read as on the command line, with its errors
    return image, gr.Examples([[str(one)] for one in samples], [image], label="Samples")


def result_fields(hint: str) -> list[Any]:
    """Build the output fields: figure, click target, files, code, and notes."""
    notes = gr.HTML(elem_classes="messages")
    gr.Markdown(hint)
    shown: dict[str, Any] = {"elem_classes": "result", "buttons": ["download", "fullscreen"]}
    figure = gr.Image(show_label=False, interactive=False, type="filepath", **shown)
    with gr.Accordion("Download", open=False):
        files = gr.File(label="Files", file_count="multiple", interactive=False)
        code = gr.Code(label="The same in Python", language="python", interactive=False)
    return [figure, gr.State(), files, code, notes]


def drawn(figure: Figure, name: str, save: Callable[[Path], object] | None = None) -> tuple[str, list[str]]:
    """Save a figure as an image to show and as files to download, which Gradio removes later; `save` writes .npz."""
    Path(get_upload_folder()).mkdir(parents=True, exist_ok=True)
    path = Path(mkdtemp(dir=get_upload_folder())) / name
    files = [str(save_figure(figure, f"{path}{suffix}")) for suffix in (".png", ".pdf")]
    return files[0], [*files, *([str(save(Path(f"{path}.npz")))] if save else [])]
