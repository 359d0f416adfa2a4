"""The page: its tabs, style and server, the requests that it answers, and the values that they may have."""

import math
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from html import escape
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
from gradio.route_utils import FnIndexInferError
from gradio.utils import get_upload_folder
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vitflow.app.actions import Models, limited
from vitflow.app.images import clips_tab, images_tab
from vitflow.app.words import words_tab
from vitflow.errors import OptionError, check_known, whole_number
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


# Hosts that mean every address of a machine.
_EVERY_ADDRESS = ("0.0.0.0", "::", "")
_LOCAL = ("localhost", "127.0.0.1", "::1")
# Gradio would fetch a URL in this path for any visitor.
_FETCHES = re.compile(r"/file=[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class HostCheck:
    """Middleware that refuses requests by a foreign Host, from a foreign Origin, or to fetch from another server.

    A foreign name in Host indicates DNS rebinding, by which another site could reach this page. A page that is bound to
    every address also accepts numeric addresses, which cannot be rebound.

    Args:
        app: the ASGI application.
        host: bound host.
        allowed: further hosts, such as "example.org", "*.example.org", or "*" for any.
    """

    def __init__(self, app: ASGIApp, *, host: str, allowed: Sequence[str] = ()) -> None:
        self._app, self._allowed = app, [one.lower() for one in allowed]
        self._known = {*_LOCAL, host.strip("[]").lower()} - {*_EVERY_ADDRESS}
        self._by_address = host in _EVERY_ADDRESS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        reason = self._refused(scope) if scope["type"] == "http" else ""
        answer = PlainTextResponse(reason, status_code=403) if reason else self._app
        await answer(scope, receive, send)

    def _refused(self, scope: Scope) -> str:
        """Return the reason why a request is refused, or an empty string."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_known(_name(host)):
            return "This page is not served by that name. `vitflow app --allowed-host NAME` allows it.\n"
        if origin is not None and not self._is_allowed_origin(origin, host):
            return "This page answers no other page. `vitflow app --allowed-host NAME` allows one by its host.\n"
        if _FETCHES.search(scope["path"]):
            return "This page fetches nothing from other servers.\n"
        return ""

    def _is_known(self, name: str) -> bool:
        return name in self._known or self._is_allowed(name) or (self._by_address and _is_address(name))

    def _is_allowed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._allowed)

    def _is_allowed_origin(self, origin: str, host: str) -> bool:
        """Return True if an origin is this page or an allowed host, such as a proxy."""
        place = origin.partition("://")[2]
        return (bool(place) and place.lower() == host.lower()) or self._is_allowed(_name(place))


def _name(place: str) -> str:
    """Return the name of a host without its port, or an empty string.

    >>> _name("[::1]:7860"), _name("Example.org:80"), _name("a@b:c")
    ('::1', 'example.org', '')
    """
    try:
        parts = urlsplit(f"//{place}")
    except ValueError:
        return ""
    return (parts.netloc == place and parts.username is None and parts.hostname) or ""


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


# A name or a number needs no more characters; fields for longer texts declare their own limit.
_CHARACTERS = 200


def _refusal(message: object) -> gr.Error:
    """Error shown on the page, without a traceback in the console."""
    return gr.Error(escape(str(message)), print_exception=False)


def _received(fields: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return validated values of a request, before Gradio opens the paths and URLs among them.

    Args:
        fields: components of the values.
        values: values of the request.

    Raises:
        gr.Error: their number is wrong, a value is not one that its field declares, or a file is not of this page.
    """
    if len(values) != len(fields):
        raise _refusal(f"Expected {len(fields)} values, got {len(values)}.")
    try:
        return [_valid(field, value) for field, value in zip(fields, values, strict=True)]
    except OptionError as error:
        raise _refusal(error) from error


def _valid(field: Any, value: Any) -> Any:
    """Return the value of a field, with an empty text for None; OptionError if the field does not declare it."""
    name = str(getattr(field, "label", None) or type(field).__name__).lower()
    if field.stateful:
        return value
    if isinstance(field, gr.Image | gr.File):
        return None if value is None else _uploaded(value)
    if isinstance(field, gr.Dataset):
        count = len(field.samples)
        return whole_number(f"one of the {count} samples", None if value is True else value, 0, count - 1)
    if isinstance(field, gr.Slider):
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return whole_number(name, None if isinstance(whole, bool) else whole, int(field.minimum), int(field.maximum))
    if isinstance(field, gr.Checkbox):
        if not isinstance(value, bool | None):
            raise OptionError(f"{name}: expected on or off, got {value!r:.80}.")
        return bool(value)
    text = "" if value is None else value
    if not isinstance(text, str):
        raise OptionError(f"{name}: expected a text, got {type(value).__name__}.")
    most = getattr(field, "max_length", None) or _CHARACTERS
    if len(text) > most:
        raise OptionError(f"{name}: expected at most {most:,} characters, got {len(text):,}.")
    if isinstance(field, gr.Radio | gr.Dropdown) and not getattr(field, "allow_custom_value", False):
        check_known(f"{name} of this page", text, [str(known) for _, known in field.choices])
    return text


def _uploaded(file: Any) -> dict[str, Any]:
    """Serve a file of the upload folder; any other path gives the same response."""
    path = file.get("path") if isinstance(file, dict) else None
    try:
        real = Path(os.path.realpath(path))  # type: ignore[arg-type]  # without links and ".."
        known = real.is_relative_to(os.path.realpath(get_upload_folder())) and real.is_file()
    except (OSError, TypeError, ValueError):  # no name of a file at all
        known = False
    if not known:
        raise OptionError(
            "Expected a file that was uploaded to this page, or one of its samples, got another one. Uploads are "
            "removed after a while: upload it again."
        )
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def _is_click(event: Any) -> bool:
    """Return True if a click event has valid coordinates: a number, or two."""
    data = getattr(event, "_data", None)
    at = data.get("index") if isinstance(data, dict) and "value" in data else None
    numbers = at if isinstance(at, list) else [at]
    return 1 <= len(numbers) <= 2 and all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)


class _Page(gr.Blocks):  # type: ignore[misc]
    """A page that validates requests before Gradio handles them, and shows errors as text."""

    def __init__(self, time_limit: float, **more: Any) -> None:
        self._time_limit = time_limit
        super().__init__(**more)

    async def process_api(self, block_fn: Any, inputs: Any, *rest: Any, event_data: Any = None, **more: Any) -> Any:
        """Answer one request; arguments as given by Gradio."""
        inputs = _received(block_fn.inputs, inputs)
        if block_fn.collects_event_data and not _is_click(event_data):
            raise _refusal("Expected a click on the page, got something else.")
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
