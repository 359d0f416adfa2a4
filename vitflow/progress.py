"""Progress of long computations, shown only if the command line or a caller provides a display."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

# Called with the number of completed steps since the last call.
Update = Callable[[int], object]
# Opens a display for a label and a number of steps.
Display = Callable[[str, int], AbstractContextManager[Update]]

_display: ContextVar[Display | None] = ContextVar("vitflow_progress_display", default=None)


@contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Show the progress of the enclosed code with `display`."""
    token = _display.set(display)
    try:
        yield
    finally:
        _display.reset(token)


def tracking(label: str, total: int) -> AbstractContextManager[Update]:
    """Announce `total` steps; the context yields a function to call with the steps done since the last call."""
    display = _display.get()
    return nullcontext(lambda _steps: None) if display is None else display(label, total)


@contextmanager
def watched(report: Callable[[float], object], rounds: float) -> Iterator[None]:
    """Report the completed share, from 0 to 1, of `rounds` tracked computations of the size of the first one."""
    done, first, share = 0, 0, 0.0

    @contextmanager
    def display(_label: str, total: int) -> Iterator[Update]:
        nonlocal first
        first = first or total

        def update(steps: int) -> None:
            nonlocal done, share
            done += steps
            if (now := min(done / (first * rounds), 1.0)) > share:
                share = now
                report(share)

        yield update

    with shown_by(display):
        yield
