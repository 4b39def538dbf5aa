"""Marks of directories that several hosts share."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cluster.shared_directory import MARK, mark, read_mark


def test_a_mark_is_read_where_the_directory_is_and_nowhere_else(tmp_path: Path) -> None:
    marks = [mark(tmp_path / name) for name in ("here", "there")]
    here, there = (read_mark(str(path)) for path in marks)
    assert len(here) == len(there) == 32 and here != there
    assert read_mark(str(tmp_path / "elsewhere" / MARK)) == ""


def test_servers_that_share_a_directory_find_the_same_mark(tmp_path: Path) -> None:
    first = read_mark(str(mark(tmp_path / "jobs")))
    assert read_mark(str(mark(tmp_path / "jobs"))) == first != ""


def test_the_path_of_a_mark_does_not_depend_on_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert mark(Path("jobs")) == tmp_path / "jobs" / MARK


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs").chmod(0o777)
    with pytest.raises(OSError, match="others may write to it"):
        mark(tmp_path / "jobs")
    assert not (tmp_path / "jobs" / MARK).exists()
