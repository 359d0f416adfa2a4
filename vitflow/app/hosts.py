"""Who may ask a page: only browsers that were sent to it by a name it has, and only pages that it served itself."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

# What stands for every address of a machine.
_EVERY_ADDRESS = ("0.0.0.0", "::", "")
_LOCAL = ("localhost", "127.0.0.1", "::1")
# Gradio fetches a URL that stands in this path for whoever asks.
_FETCHES = re.compile(r"/file=[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class HostCheck:
    """Middleware that refuses requests by a foreign Host, from a foreign Origin, or to fetch from another server.

    A foreign name in Host means that a name was rebound to this machine's address, by which the page of a stranger
    would reach this one. A page that is served to every address is also reached by any address in numbers, which cannot
    be rebound.

    Args:
        app: what answers.
        host: the host that is bound.
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
        """Why a request is refused; empty if it is not."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_known(_name(host)):
            return "This page is not served by that name. `vitflow app --allowed-host NAME` allows it.\n"
        if origin is not None and not self._is_own(origin, host):
            return "This page answers no other page. `vitflow app --allowed-host NAME` allows one by its host.\n"
        if _FETCHES.search(scope["path"]):
            return "This page fetches nothing from other servers.\n"
        return ""

    def _is_known(self, name: str) -> bool:
        return name in self._known or self._is_allowed(name) or (self._by_address and _is_address(name))

    def _is_allowed(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self._allowed)

    def _is_own(self, origin: str, host: str) -> bool:
        """Whether an origin is this page, or a host that was allowed, such as that of a proxy or a frame."""
        place = origin.partition("://")[2]
        return (bool(place) and place.lower() == host.lower()) or self._is_allowed(_name(place))


def _name(place: str) -> str:
    """The name of a host without its port; empty where there is none.

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
