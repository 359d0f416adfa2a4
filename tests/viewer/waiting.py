"""Waiting for what a page does."""

from typing import Any

import pytest


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until something holds on the page, whose policy lets no test wait in it."""
    for _ in range(200):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"{expression} never came true")
