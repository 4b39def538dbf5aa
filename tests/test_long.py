"""Grids of which `make test` runs some cases only."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.long import FEW, long_unless, mark_long, then_long


def test_all_but_the_first_cases_of_a_grid_are_long() -> None:
    kept, other = then_long(1, [(1, "a"), (2, "b")])
    assert kept == (1, "a") and other.values == (2, "b") and other.marks[0].name == "long"
    with pytest.raises(ValueError, match="2 of 2 cases"):
        then_long(2, [(1, "a"), (2, "b")])


def test_cases_at_other_places_are_long() -> None:
    other, kept = long_unless(lambda at: at == 1, ["a", "b"])
    assert kept == "b" and other.values == ("a",) and other.marks[0].name == "long"


Always = Callable[..., set[str]]
PRODUCT = """
import pytest

@pytest.fixture(params=["x", "y", "z"])
def letter(request):
    return request.param

MARKER
@pytest.mark.parametrize("number", [1, 2, pytest.param(3, marks=pytest.mark.long), 4, 5])
@pytest.mark.parametrize(("name", "values"), [("a", [1]), ("b", [2])])
def test_product(letter, number, name, values):
    pass
"""


@pytest.fixture
def always(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Always:
    """Gives the ids of the cases that run always, of a test with a marker, given in the text of a file."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # pytest adds the file's directory

    def found(marker: str, text: str, whole: bool = True) -> set[str]:
        path = tmp_path / f"collected_{len([*tmp_path.iterdir()])}_{request.node.name}.py"
        path.write_text(text.replace("MARKER", marker and f"@pytest.mark.{marker}"))
        items = [*pytest.Module.from_parent(request.session, path=path).collect()]
        assert all(isinstance(item, pytest.Function) for item in items)
        mark_long((item for item in items if isinstance(item, pytest.Item)), whole=whole)
        return {item.name.partition("[")[2][:-1] for item in items if not item.get_closest_marker("long")}

    return found


def test_of_a_large_product_each_row_of_each_list_runs_always(always: Always) -> None:
    assert always("", PRODUCT) == {"x-a-values0-1", "y-b-values1-2", "z-a-values0-4", "x-a-values0-5"}
    assert len(always("whole_product", PRODUCT)) == 24


def test_a_product_of_few_cases_runs_whole_unless_a_marker_says_otherwise(
    always: Always,
) -> None:
    small = PRODUCT.replace('params=["x", "y", "z"]', 'params=["x"]')
    assert len(always("", small)) == FEW == 8
    assert len(always("each_value", small)) == 4


def test_each_row_may_run_with_each_row_of_each_other_list(always: Always) -> None:
    pairs = [case.replace("-values", "").split("-") for case in always("each_pair", PRODUCT)]
    assert len(pairs) < 24
    assert {(letter, number) for letter, _, number in pairs} == {(a, b) for a in "xyz" for b in "1245"}
    assert {(letter, name) for letter, name, _ in pairs} == {(a, b) for a in "xyz" for b in ("a0", "b1")}


def test_values_that_occur_elsewhere_need_no_case_of_their_own(always: Always) -> None:
    text = """
import pytest

MARKER
@pytest.mark.parametrize(("a", "b"), [(1, {}), (1, {2}), (True, {2}), (3, {}), (1, {})])
def test_rows(a, b):
    pass
"""
    assert len(always("", text)) == 5
    assert always("each_value", text) == {"1-b0", "True-b2", "3-b3"}
    assert always('each_value("1-b4")', text) == {"1-b0", "1-b4", "True-b2", "3-b3"}


def test_the_cases_that_run_always_may_be_named(always: Always) -> None:
    assert always('always("x-*-1", "z-b-*-5")', PRODUCT) == {"x-a-values0-1", "x-b-values1-1", "z-b-values1-5"}
    assert len(always('always("other")', PRODUCT, whole=False)) == 24
    with pytest.raises(pytest.UsageError, match=r"no case of the test matches \['other'\], which is to run always"):
        always('always("x-*", "other")', PRODUCT)
