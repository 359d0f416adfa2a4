"""Compiling with numba, which is loaded with the first compiled function that is called: that takes about a second.

A few pictures are done before numba would be loaded: they are left to NumPy and torch, by functions that round alike.
"""

import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

# NumPy and torch need about as much longer for so many numbers as numba needs to load.
_MANY = 2**25

_guard = threading.RLock()
_counted = 0


def compiled(function: Function, **options: Any) -> Function:
    """Compile on first use, keep the machine code on disk where possible, and let other threads run meanwhile."""
    return cast(Function, _Later(function, **options))


#: As `compiled`, and put into its callers: for small functions in loops, where handing over arrays costs more.
compiled_within = partial(compiled, forceinline=True)
#: As `compiled`; sums may be taken in any order, and so by several numbers at once.
compiled_loosely = partial(compiled, fastmath={"reassoc", "nsz"})


def worth_compiling(numbers: int) -> bool:
    """Whether numba is loaded, or by now, with these numbers, the process has had as much work as loading it."""
    global _counted
    _counted += numbers
    return _counted > _MANY or _Later.any_compiled


class _Later:
    """A function that is compiled when it is first called."""

    any_compiled = False

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
                _Later.any_compiled = True
            return cast(Callable[..., Any], self._compiled)
