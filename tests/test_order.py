"""How the processes that run tests share them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.order import LONGEST, MOST, longest_first, pytest_xdist_auto_num_workers


def test_each_of_the_longest_files_exists() -> None:
    missing = [name for name in LONGEST if not (Path(__file__).parent / name).is_file()]
    assert missing == []


def test_the_longest_files_begin_first_and_others_keep_their_order() -> None:
    first, second = (f"tests/{name}::test_it" for name in LONGEST[:2])
    items = [SimpleNamespace(nodeid=each) for each in ("tests/b.py::test_b", second, "tests/a.py::test_a[::]", first)]
    longest_first(items)  # type: ignore[arg-type]
    assert [item.nodeid for item in items] == [first, second, "tests/b.py::test_b", "tests/a.py::test_a[::]"]


@pytest.mark.parametrize(("cores", "processes"), [(None, 2), (1, 2), (2, 3), (3, MOST), (64, MOST)])
def test_there_is_one_process_more_than_cores_up_to_a_few(
    monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config, cores: int | None, processes: int
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert pytest_xdist_auto_num_workers(pytestconfig) == processes
