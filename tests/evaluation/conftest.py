"""Evaluations without figures, whose drawing takes longer than small evaluations."""

import pytest

from vitflow.evaluation import results


@pytest.fixture
def no_drawing(monkeypatch) -> None:
    """Write tables, and a page without charts."""
    monkeypatch.setattr(results, "draw_charts", lambda *_: {})
