"""Door: the places at which an engine may listen."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.engine.process.door import Door


def test_the_socket_of_an_engine_that_has_ended_is_replaced_and_removed_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "e"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with closing(Door(str(path))):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def test_the_socket_of_a_living_engine_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "e"
    with closing(Door(str(path))):
        with pytest.raises(OSError, match="another engine does"):
            Door(str(path))
        assert path.is_socket()


def test_a_directory_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="missing/e: No such file or directory; choose another --listen"):
        Door(str(tmp_path / "missing" / "e"))


def test_other_files_made_meanwhile_keep_the_usual_mode(tmp_path: Path) -> None:
    with closing(Door(str(tmp_path / "e"))):
        (tmp_path / "file").touch()
    before = os.umask(0)
    os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~before
