"""Request checks of the app: allowed hosts, origins and field values."""

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
from gradio.utils import get_upload_folder
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vitflow.errors import OptionError, check_known, whole_number

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


def refusal(message: str) -> gr.Error:
    """Error shown on the page, without a traceback in the console."""
    return gr.Error(escape(message), print_exception=False)


def received(fields: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return validated values for Gradio and the page: plain values, or uploaded files.

    Gradio opens every path and URL among its inputs, so they are checked first.

    Args:
        fields: components of the values.
        values: values of the request.

    Raises:
        gr.Error: the number or the type of the values is wrong, or a file is not of this page.
    """
    if len(values) != len(fields):
        raise refusal(f"Expected {len(fields)} values, got {len(values)}.")
    return [_received(field, value) for field, value in zip(fields, values, strict=True)]


def _received(field: Any, value: Any) -> Any:
    if field.stateful or value is None:
        return value
    if isinstance(field, gr.Image | gr.File):
        return _uploaded(value)
    if isinstance(field, gr.Dataset) and (type(value) is not int or not 0 <= value < len(field.samples)):
        raise refusal(f"Expected one of the {len(field.samples)} samples, got another.")
    if isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise refusal(f"{_name_of(field)}: expected a text, a number or a switch, got {type(value).__name__}.")


def _uploaded(file: Any) -> dict[str, Any]:
    """Serve a file of the upload folder; any other path gives the same response."""
    path = file.get("path") if isinstance(file, dict) else None
    if not isinstance(path, str) or not _is_uploaded(path):
        raise refusal(
            "Expected a file that was uploaded to this page, or one of its samples, got another one. Uploads are "
            "removed after a while: upload it again."
        )
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def _is_uploaded(path: str) -> bool:
    try:
        real = Path(os.path.realpath(path))  # without links and ".."
        return real.is_relative_to(os.path.realpath(get_upload_folder())) and real.is_file()
    except (OSError, ValueError):  # no name of a file at all
        return False


def is_click(event: Any) -> bool:
    """Return True if a click event has valid coordinates: a number, or two."""
    data = getattr(event, "_data", None)
    at = data.get("index") if isinstance(data, dict) and "value" in data else None
    numbers = at if isinstance(at, list) else [at]
    return 1 <= len(numbers) <= 2 and all(isinstance(one, int | float) and math.isfinite(one) for one in numbers)


def checked(field: Any, value: Any) -> Any:
    """Return the value of a field, with an empty text for None.

    Raises:
        OptionError: the value is not one that the field declares.
    """
    name = _name_of(field)
    if isinstance(field, gr.Slider):
        return _of_slider(field, name, value)
    if isinstance(field, gr.Checkbox):
        if value not in (None, True, False):
            raise OptionError(f"{name}: expected on or off, got {value!r:.80}.")
        return bool(value)
    if not isinstance(field, gr.Textbox | gr.Dropdown | gr.Radio):
        return value
    text = "" if value is None else value
    if not isinstance(text, str):
        raise OptionError(f"{name}: expected a text, got {text!r:.80}.")
    most = getattr(field, "max_length", None) or _CHARACTERS
    if len(text) > most:
        raise OptionError(f"{name}: expected at most {most:,} characters, got {len(text):,}.")
    if isinstance(field, gr.Radio | gr.Dropdown) and not getattr(field, "allow_custom_value", False):
        check_known(f"{name} of this page", text, [str(known) for _, known in field.choices])
    return text


def _of_slider(field: gr.Slider, name: str, value: Any) -> Any:
    if field.step == 1:
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        return whole_number(name, None if isinstance(whole, bool) else whole, int(field.minimum), int(field.maximum))
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not field.minimum <= value <= field.maximum:
        raise OptionError(f"{name}: expected a number from {field.minimum} to {field.maximum}, got {value!r:.80}.")
    return value


def _name_of(field: Any) -> str:
    return str(getattr(field, "label", None) or type(field).__name__).lower()
