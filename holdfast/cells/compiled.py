"""Compiles functions to machine code with Numba: the loops over the rows of the planner's table."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function at its first call, and keep the code on disk. It runs without Python's lock."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
