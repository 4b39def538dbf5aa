"""Functions that are compiled to machine code: loops over the rows of the planner's table, by Numba."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a function at its first call, and keep the code on disk. Other threads run while it runs."""
    return cast(Function, numba.njit(cache=True, nogil=True)(function))
