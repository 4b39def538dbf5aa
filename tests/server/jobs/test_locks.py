"""Temporary directories of servers with `--store memory` are deleted with their server, however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from served import environment

from holdfast.files.regular import open_directory
from holdfast.server.jobs import locks as module
from holdfast.server.jobs.locks import Owner, Scratch, drop_left

KILLED = """
import os, signal, tempfile
tempfile.tempdir = {parent!r}
from holdfast.server.jobs.locks import Scratch
scratch = Scratch()
(scratch.directory / "file-a").write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_directory_of_a_killed_server_is_deleted_by_the_next_one(parent: Path) -> None:
    program = KILLED.format(parent=str(parent))
    assert subprocess.run([sys.executable, "-c", program], env=environment(), check=False).returncode == -9
    (left,) = parent.iterdir()
    assert (left / "file-a").exists()
    scratch = Scratch()
    assert [*parent.iterdir()] == [scratch.directory] != [left]
    scratch.remove()


def test_directories_of_running_servers_of_others_and_links_stay(parent: Path) -> None:
    running = Scratch()
    older = parent / "holdfast-files-older"  # Its server locks only its owner's file.
    older.mkdir()
    owner = Owner(older)
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir()
    (parent / "holdfast-files-link").symlink_to(elsewhere)
    (parent / "holdfast-files-plain").write_text("")
    before = {*parent.iterdir()}
    scratch = Scratch()
    assert {*parent.iterdir()} == {*before, scratch.directory} and elsewhere.is_dir()
    owner.close()
    scratch.remove()
    again = Scratch()
    assert {*parent.iterdir()} == (before - {older}) | {again.directory}
    for each in (again, running):
        each.remove()


def test_a_directory_that_another_server_deletes_before_it_is_locked_is_made_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, made = tempfile.mkdtemp, list[str]()

    def made_and_deleted(prefix: str) -> str:
        made.append(make(prefix=prefix))
        if len(made) == 1:
            drop_left(parent)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_deleted)
    scratch = Scratch()
    assert [*parent.iterdir()] == [scratch.directory] == [Path(made[1])]
    scratch.remove()


def test_a_directory_is_locked_while_it_is_deleted(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delete, locked = module.shutil.rmtree, list[bool]()

    def delete_and_note(path: Path, **options: bool) -> None:
        opened = open_directory(path)
        locked.append(not module._take(opened))
        os.close(opened)
        delete(path, **options)

    monkeypatch.setattr(module.shutil, "rmtree", delete_and_note)
    (parent / "holdfast-files-left").mkdir()
    drop_left(parent)
    assert locked == [True] and [*parent.iterdir()] == []
