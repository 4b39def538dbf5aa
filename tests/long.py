"""Grids of cases whose first ones run always, and whose others run with `make test-long`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def then_long(few: int, cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test. All but the first `few` have the marker `long`. Raises ValueError."""
    found = [*cases]
    if not 0 <= few < len(found):
        raise ValueError(f"{few} of {len(found)} cases are to run always; leave out the marker for all of them")
    return long_unless(lambda at: at < few, found)


def long_unless(always: Callable[[int], bool], cases: Iterable[Any]) -> list[Any]:
    """The cases as parameters of a test. Those at places that do not run `always` have the marker `long`."""
    return [
        case if always(at) else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long)
        for at, case in enumerate(cases)
    ]
