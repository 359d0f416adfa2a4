"""Compiling with numba."""

from typing import TypeVar, cast

from numba import njit

Function = TypeVar("Function")


def compiled(function: Function) -> Function:
    """Compile on first use, keep the machine code on disk where possible, and let other threads run meanwhile."""
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:  # there is no place on disk that may be written to
        return cast(Function, njit(nogil=True)(function))
