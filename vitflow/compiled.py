"""Lazy compilation with numba, which is imported (about one second) by the first call of a compiled function."""

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_guard = threading.RLock()


def compiled(function: Function) -> Function:
    """Compile on first use without the GIL, and cache the machine code on disk if possible."""
    return cast(Function, _Later(function))


class _Later:
    """A function that is compiled on its first call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        return (self._compiled or self._compile())(*args)

    def _compile(self) -> Callable[..., Any]:
        from numba import njit

        with _guard:
            if self._compiled is None:
                known = self._function.__globals__  # numba requires that called functions are compiled, too
                for name in self._function.__code__.co_names:
                    if isinstance(known.get(name), _Later):
                        known[name] = known[name]._compile()
                try:
                    self._compiled = njit(cache=True, nogil=True)(self._function)
                except RuntimeError:  # no writable cache folder
                    self._compiled = njit(nogil=True)(self._function)
            return self._compiled
