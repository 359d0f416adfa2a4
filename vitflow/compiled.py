"""Compiling with numba."""

from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function")


def compiled(function: Function) -> Function:
    """Compile on first use, keep the machine code on disk where possible, and let other threads run meanwhile."""
    return _compile(function)


def compiled_within(function: Function) -> Function:
    """As `compiled`, and put into its callers: for small functions in loops, where handing over arrays costs more."""
    return _compile(function, forceinline=True)


def compiled_loosely(function: Function) -> Function:
    """As `compiled`; sums may be taken in any order, and so by several numbers at once."""
    return _compile(function, fastmath={"reassoc", "contract", "nsz"})


def _compile(function: Function, **options: Any) -> Function:
    try:
        return cast(Function, njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # there is no place on disk that may be written to
        return cast(Function, njit(nogil=True, **options)(function))
