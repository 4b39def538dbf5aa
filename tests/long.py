"""The choice of cases that `make test` runs; the others have the marker `long` and run with `make test-long`.

CONTRIBUTING.md says which cases belong to which run. Every choice is fixed, so a case runs always or never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any

import pytest

FEW = 8
"""Most cases of a product that run always, unless a marker says otherwise."""


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


def mark_long(items: Iterable[pytest.Item], *, whole: bool) -> None:
    """Give the marker `long` to the cases that `make test` leaves out.

    Of a test whose lists of parameters have more than FEW cases together, those run always in which each row of each
    list occurs: the case with the most rows that no earlier one has, again and again, until all have occurred. Markers
    of the test change that, for any number of cases:

    - `each_value` takes values in place of rows, so that a row whose values all occur elsewhere is long, too.
    - `each_pair` takes pairs of rows, so that each row occurs with each row of each other list.
    - `always("llama*", "*-fp8")` names the cases that run always, by patterns of their ids.
    - `whole_product` lets all cases run always.

    Patterns after `each_value` or `each_pair` name further cases. Cases with the marker `gpu` or `long` stay as they
    are. `whole` says that all cases of each test are among the items: then each pattern must match a case, or
    pytest.UsageError is raised. Otherwise a test of which no case matches `always` stays as it is, too.
    """
    tests: dict[str, list[pytest.Function]] = {}
    for item in items:
        bare = item.get_closest_marker("gpu") or item.get_closest_marker("long")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not bare:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        if whole and (stale := _stale(cases)):
            raise pytest.UsageError(f"{cases[0].nodeid}: no case of the test matches {stale}, which is to run always")
        if len(cases) > 1 and not cases[0].get_closest_marker("whole_product"):
            kept = {case.callspec.id for case in _kept(cases)}
            for case in cases:
                if kept and case.callspec.id not in kept:
                    case.add_marker(pytest.mark.long)


def _kept(cases: list[pytest.Function]) -> Iterator[pytest.Function]:
    """The cases of a test that run always."""
    always, by_value, by_pair = map(cases[0].get_closest_marker, ("always", "each_value", "each_pair"))
    if not (always or by_value or by_pair) and len(cases) <= FEW:
        yield from cases
        return
    patterns = _patterns(cases[0])
    yield from (case for case in cases if any(fnmatchcase(case.callspec.id, pattern) for pattern in patterns))
    if always is None:
        values = [{*(_values(case) if by_value else enumerate(case.callspec._idlist))} for case in cases]
        if by_pair:
            values = [{*combinations(sorted(rows), 2)} for rows in values]
        left = set[object]().union(*values)
        while left:
            best = max(range(len(cases)), key=lambda at: len(values[at] & left))
            left -= values[best]
            yield cases[best]


def _patterns(case: pytest.Function) -> list[str]:
    marks = (case.get_closest_marker(name) for name in ("always", "each_value", "each_pair"))
    return [pattern for mark in marks if mark for pattern in mark.args]


def _stale(cases: list[pytest.Function]) -> list[str]:
    """The patterns of a test that match no case."""
    ids = [case.callspec.id for case in cases]
    return [pattern for pattern in _patterns(cases[0]) if not any(fnmatchcase(each, pattern) for each in ids)]


def _values(case: pytest.Function) -> Iterator[object]:
    """Each parameter's name and value, or its text if it has no hash."""
    for name, value in case.callspec.params.items():
        try:
            hash(value)
        except TypeError:
            value = repr(value)
        yield name, type(value), value
