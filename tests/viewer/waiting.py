"""Pages in a browser: opening them under watch, and waiting for what they do."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def watched(browser: Any, width: int = 1200, height: int = 900, **options: Any) -> Iterator[Any]:
    """Open a window; what its pages ask the network, log or show as a dialog is in `page.trouble` and fails it."""
    options = {"viewport": {"width": width, "height": height}, "color_scheme": "light", **options}
    context, trouble = browser.new_context(**options), []
    page = context.new_page()
    page.trouble = trouble
    page.on("request", lambda one: one.url.startswith(("file:", "data:", "blob:")) or trouble.append(one.url))
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on("dialog", lambda dialog: (trouble.append("a dialog: " + dialog.message), dialog.dismiss()))
    yield page
    context.close()
    assert trouble == []


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until something holds on the page, whose policy lets no test wait in it."""
    for _ in range(600):  # half a minute: the machine may be busy
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{expression} never came true")
