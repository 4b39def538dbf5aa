"""Grids of which `make test` runs some cases only."""

from __future__ import annotations

import pytest

from tests.long import long_unless, then_long


def test_all_but_the_first_cases_of_a_grid_are_long() -> None:
    kept, other = then_long(1, [(1, "a"), (2, "b")])
    assert kept == (1, "a") and other.values == (2, "b") and other.marks[0].name == "long"
    with pytest.raises(ValueError, match="2 of 2 cases"):
        then_long(2, [(1, "a"), (2, "b")])


def test_cases_at_other_places_are_long() -> None:
    other, kept = long_unless(lambda at: at == 1, ["a", "b"])
    assert kept == "b" and other.values == ("a",) and other.marks[0].name == "long"
