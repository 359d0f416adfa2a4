"""Compiling with numba, which is loaded by the first call of a compiled function: that takes about a second."""

import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_guard = threading.RLock()


def compiled(function: Function, **options: Any) -> Function:
    """Compile on first use, keep the machine code on disk where possible, and let other threads run meanwhile."""
    return cast(Function, _Later(function, **options))


#: As `compiled`, and put into its callers: for small functions in loops, where handing over arrays costs more.
compiled_within = partial(compiled, forceinline=True)


class _Later:
    """A function that is compiled when it is first called."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        update_wrapper(self, function)
        self._function, self._options = function, options
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *given: Any) -> Any:
        return (self._compiled or self._compile())(*given)

    def _compile(self) -> Callable[..., Any]:
        from numba import njit

        with _guard:
            if self._compiled is None:
                known = self._function.__globals__  # numba takes what a function calls as compiled as well
                for name in self._function.__code__.co_names:
                    if isinstance(known.get(name), _Later):
                        known[name] = known[name]._compile()
                try:
                    self._compiled = njit(cache=True, nogil=True, **self._options)(self._function)
                except RuntimeError:  # there is no place on disk that may be written to
                    self._compiled = njit(nogil=True, **self._options)(self._function)
            return cast(Callable[..., Any], self._compiled)
