"""The page: its style and server, and which requests it answers."""

import os
import re
import socket
from collections.abc import Sequence
from fnmatch import fnmatchcase
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vitflow.app.models import Models
from vitflow.app.tabs import image_fields
from vitflow.errors import OptionError, printable
from vitflow.images.reading import MAX_PIXELS

# Maximum number of queued and remembered visitors, and lifetime of their files in seconds.
_VISITORS, _KEPT = 32, 3600
# Maximum number of characters of a field.
_CHARACTERS = 2000
_CSS = """
.gradio-container > main { padding-top: 8px }
.gallery-item, .gallery-item :is(img, .container) { max-width: 60px; max-height: 60px }
.result img { max-height: calc(100vh - 300px); object-fit: contain }
.secondary-wrap input { margin-right: 2.4em; text-overflow: ellipsis }
.says { font-size: 1.2em }
.bars:not(:has(button)) { display: none }
.bars dl { font-family: inherit }
.messages p { margin: 0; padding: .5em .75em; white-space: pre-wrap; overflow-wrap: anywhere; border-left: 4px solid }
.messages .note { border-color: #2b5fb3 }
.messages .error { border-color: #c0392b; font-weight: 600 }
.messages button { float: right; padding: 0 .5em; font-size: 1.3em; line-height: 1 }
:is(.block, .messages):not(:has(p)):is(:has(.messages), .messages) { display: none }
@media (max-width: 760px) { .answer:has(.result img, .error) { order: -1 } }
"""
# Gradio would fetch a URL in this path for any visitor.
_FETCHES = re.compile(r"/file=[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class RequestCheck(TrustedHostMiddleware):
    """Middleware that also refuses requests of other pages, and requests to fetch from other servers.

    A foreign name in Host indicates DNS rebinding, by which another site could reach this page. `names` are its hosts;
    pages of `others` may also send requests.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str], others: Sequence[str]) -> None:
        super().__init__(app, [*names, *others], www_redirect=False)
        self._others = others

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and (reason := self._refused(Headers(scope=scope), scope["path"])):
            await PlainTextResponse(f"{reason}\n", status_code=403)(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def _refused(self, headers: Headers, path: str) -> str:
        place = headers.get("origin", "").partition("://")[2].lower()
        allowed = any(fnmatchcase(place.partition(":")[0], pattern) for pattern in self._others)
        if "origin" in headers and place != headers.get("host", "").lower() and not allowed:
            return "This page answers no other page. `vitflow app --allowed-host NAME` allows one by its host."
        if _FETCHES.search(path):
            return "This page fetches nothing from other servers."
        return ""


class _Page(gr.Blocks):  # type: ignore[misc]
    """A page that opens no other files than uploads, and shows invalid requests as text without a traceback."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *rest: Any, **more: Any) -> list[Any]:
        """Validate the values of a request, before Gradio opens the paths and URLs among them."""
        try:
            checked = [_checked(field, value) for field, value in zip(block_fn.inputs, inputs, strict=True)]
            values: list[Any] = await super().preprocess_data(block_fn, checked, *rest, **more)
            return values
        except Exception as error:
            raise gr.Error(escape(printable(str(error), lines=True)), print_exception=False) from error


def _checked(field: Any, value: Any) -> Any:
    """Return a value of a request: a short text, a number, or an uploaded file; OptionError for any other."""
    if isinstance(value, str) and len(value) > _CHARACTERS:
        raise OptionError(f"Expected at most {_CHARACTERS:,} characters, got {len(value):,}.")
    if value is None and isinstance(field, gr.Dropdown | gr.Radio | gr.Slider | gr.Textbox):
        raise OptionError(f"Expected a value of the field {field.label}, got none.")
    if value is None or field.stateful or (isinstance(value, str | int | float) and not isinstance(field, gr.Image)):
        return value
    path = value.get("path") if isinstance(value, dict) else None
    try:
        real = Path(os.path.realpath(path))  # type: ignore[arg-type]  # without links and ".."
        known = real.is_relative_to(os.path.realpath(get_upload_folder())) and real.is_file()
    except (OSError, TypeError, ValueError):  # no name of a file at all
        known = False
    if not known:
        raise OptionError(
            "Expected a sample, or a file that was uploaded to this page and is not yet removed: upload it again."
        )
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def launch(
    models: Models,
    samples: Sequence[str | Path],
    prompts: Sequence[str],
    *,
    host: str,
    port: int | None,
    allowed_hosts: Sequence[str],
) -> Any:
    """Build the page and serve it in the background; arguments as for `serve`."""
    with _Page(title="vitflow", analytics_enabled=False, delete_cache=(_KEPT, _KEPT)) as page:
        gr.Markdown("### vitflow: see what a Vision Transformer looks at")
        image_fields(models, samples, prompts, page.load)
    others, names = [one.lower() for one in allowed_hosts], {"localhost", "127.0.0.1", "[::1]", host}
    if host in ("0.0.0.0", "::"):  # every address of this machine
        names |= {socket.gethostname().lower(), *socket.gethostbyname_ex(socket.gethostname())[2]}
    if wrong := [one for one in others if not re.fullmatch(r"\*|(\*\.)?[^*]+", one)]:
        raise OptionError(f"Expected an allowed host as NAME, *.NAME or *, got {wrong[0]!r}.")
    check = Middleware(RequestCheck, names=[*names], others=others)
    settings: dict[str, Any] = {
        "server_name": host,
        "server_port": port,
        "app_kwargs": {"middleware": [check]},
        "theme": gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        "css": _CSS,
        "footer_links": [],
        "max_file_size": MAX_PIXELS,  # as many bytes as an image has pixels
        "state_session_capacity": _VISITORS,
        **dict.fromkeys(("share", "enable_monitoring", "ssr_mode", "pwa"), False),
    }
    page.queue(max_size=_VISITORS, api_open=False)  # no API outside the queue, which shows its length
    try:
        page.launch(prevent_thread_lock=True, quiet=True, **settings)
    except OSError as error:
        raise OptionError(f"Expected a free port, got {port or 'none from 7860 on'}: {error}") from error
    return page
