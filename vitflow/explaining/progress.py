"""Tell a long computation's progress to whoever shows it: nobody, unless the command line or a caller asks."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

# Called with the number of further steps that are done.
Update = Callable[[int], object]
# Opens a display for a label and a number of steps.
Display = Callable[[str, int], AbstractContextManager[Update]]

_display: ContextVar[Display | None] = ContextVar("vitflow_progress_display", default=None)


@contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Show the progress of what runs inside by `display`."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


def tracking(label: str, total: int) -> AbstractContextManager[Update]:
    """Announce `total` steps; the context gives a function to call with the steps done since the last call."""
    display = _display.get()
    return nullcontext(lambda _steps: None) if display is None else display(label, total)
