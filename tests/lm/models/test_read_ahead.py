"""Files are read ahead in parallel, each once, unless they would not fit into memory."""

from __future__ import annotations

import os
import threading
import time
from io import BufferedReader
from pathlib import Path

import pytest

from holdfast.lm.models import read_ahead as module
from holdfast.lm.models.read_ahead import read_ahead


def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are opened after this call."""
    names: list[str] = []
    before = module.open_file

    def open_and_note(path: Path) -> BufferedReader:
        names.append(path.name)
        return before(path)

    monkeypatch.setattr(module, "open_file", open_and_note)
    return names


def files(directory: Path, count: int) -> list[Path]:
    paths = [directory / f"{number}.safetensors" for number in range(count)]
    for path in paths:
        path.write_bytes(b"x" * 1000)
    return paths


def finished() -> bool:
    return all(thread.name != "holdfast-read-ahead" for thread in threading.enumerate())


def test_each_process_reads_its_share_of_the_files_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK", 300)
    paths = [*files(tmp_path, 9), tmp_path / "gone"]
    names = opened(monkeypatch)
    for share in range(2):
        with read_ahead(paths, share, 2):
            while not finished():
                time.sleep(0.001)
        assert sorted(names) == sorted(path.name for path in paths[share:9:2])
        names.clear()


def test_large_checkpoints_and_single_files_are_not_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = files(tmp_path, 3)
    names = opened(monkeypatch)
    with read_ahead(paths[:1]):
        assert finished()
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 5, "SC_PAGE_SIZE": 1000}.__getitem__)
    with read_ahead(paths):
        assert finished()
    assert names == []
