"""The order of test files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.order import LONGEST, longest_first


def test_each_of_the_longest_files_exists() -> None:
    missing = [name for name in LONGEST if not (Path(__file__).parent / name).is_file()]
    assert missing == []


def test_the_longest_files_begin_first_and_others_keep_their_order() -> None:
    first, second = (f"tests/{name}::test_it" for name in LONGEST[:2])
    items = [SimpleNamespace(nodeid=each) for each in ("tests/b.py::test_b", second, "tests/a.py::test_a[::]", first)]
    longest_first(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [first, second, "tests/b.py::test_b", "tests/a.py::test_a[::]"]
