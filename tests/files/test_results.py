"""Files of results: an error names the file."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from holdfast.files.results import write_result, writing


def test_a_result_is_written_in_utf_8(tmp_path: Path) -> None:
    write_result(tmp_path / "é.json", "ü")
    assert (tmp_path / "é.json").read_bytes() == "ü".encode()


def test_a_full_disk_is_said_with_the_file() -> None:
    with (
        pytest.raises(OSError, match=r"^plots/a\.png cannot be written: No space left on device$"),
        writing("plots/a.png"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match=r"^/dev/full cannot be written: No space left on device$"):
            write_result("/dev/full", "text")
