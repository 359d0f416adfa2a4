"""The page: tabs, style, and server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.route_utils import FnIndexInferError
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse

from vitflow.app.actions import Models, limited
from vitflow.app.clips import clips_tab
from vitflow.app.hosts import HostCheck, is_click, received, refusal
from vitflow.app.images import images_tab
from vitflow.app.words import words_tab
from vitflow.errors import OptionError
from vitflow.images.reading import MAX_PIXELS

# Maximum number of queued and remembered visitors, and lifetime of their files in seconds.
_VISITORS, _KEPT = 32, 3600
_CSS = """
.gradio-container > main { padding-top: 8px }
.gallery-item, .gallery-item :is(img, .container) { max-width: 60px; max-height: 60px }
.result img { max-height: calc(100vh - 250px); object-fit: contain }
.messages p { margin: 0; padding: .5em .75em; white-space: pre-wrap; overflow-wrap: anywhere; border-left: 4px solid }
.messages .note { border-color: #2b5fb3 }
.messages .error { border-color: #c0392b; font-weight: 600; background: var(--body-background-fill) }
.messages .error { position: fixed; inset: 0 0 auto; z-index: 99; box-shadow: 0 2px 8px #0006 }
:is(.block, .messages):not(:has(p)):is(:has(.messages), .messages) { display: none }
"""


class _Page(gr.Blocks):  # type: ignore[misc]
    """A page that validates requests before Gradio handles them, and shows errors as text."""

    def __init__(self, time_limit: float, **more: Any) -> None:
        self._time_limit = time_limit
        super().__init__(**more)

    async def process_api(self, block_fn: Any, inputs: Any, *rest: Any, event_data: Any = None, **more: Any) -> Any:
        """Answer one request; arguments as given by Gradio."""
        inputs = received(block_fn.inputs, inputs)
        if block_fn.collects_event_data and not is_click(event_data):
            raise refusal("Expected a click on the page, got something else.")
        try:
            with limited(self._time_limit):
                return await super().process_api(block_fn, inputs, *rest, event_data=event_data, **more)
        except gr.Error:
            raise
        except Exception as error:
            raise gr.Error("This failed for a reason that the page does not know; its console shows it.") from error


async def _unknown(_request: Request, _error: Exception) -> JSONResponse:
    return JSONResponse({"detail": "This page has no such function, or the function has no such argument."}, 404)


def launch(
    models: Models,
    samples: Sequence[str | Path],
    *,
    prompts: Sequence[str],
    browser: bool,
    time_limit: float,
    **where: Any,
) -> Any:
    """Build the page and serve it in the background; arguments as for `serve`."""
    about: dict[str, Any] = {"title": "vitflow", "analytics_enabled": False, "delete_cache": (_KEPT, _KEPT)}
    with _Page(time_limit, **about) as page:
        gr.Markdown("### vitflow: see what a Vision Transformer looks at")
        with gr.Tab("Photographs"):
            images_tab(models, samples, prompts, page.load)
        with gr.Tab("Clips"):
            clips_tab(models)
        if models.words:
            with gr.Tab("Texts and captions"):
                words_tab(models, samples)
    fonts: dict[str, Any] = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # local
    shut: dict[str, Any] = {"share": False, "enable_monitoring": False, "ssr_mode": False, "pwa": False}
    look: dict[str, Any] = {"theme": gr.themes.Default(**fonts), "css": _CSS, "footer_links": []}
    # The maximum number of bytes of a file equals that of pixels of an image.
    bounds: dict[str, Any] = {"max_file_size": MAX_PIXELS, "state_session_capacity": _VISITORS}
    to: dict[str, Any] = {"server_name": where["host"], "server_port": where["port"], "inbrowser": browser}
    check = Middleware(HostCheck, host=where["host"], allowed=where["allowed_hosts"])
    unknown: Any = dict.fromkeys((FnIndexInferError, KeyError, TypeError), _unknown)  # what Gradio raises then
    shut["app_kwargs"] = {"middleware": [check], "exception_handlers": unknown}
    # No API access outside the queue, which shows its length.
    page.queue(max_size=_VISITORS, api_open=False)
    try:
        page.launch(prevent_thread_lock=True, quiet=True, **to, **bounds, **look, **shut)
    except OSError as error:
        raise OptionError(f"Expected a free port, got {where['port'] or 'none from 7860 on'}: {error}") from error
    return page
