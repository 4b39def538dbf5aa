"""`holdfast store`: checks and backups from the command line."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.cli.command import main
from holdfast.server.config import ServerConfig
from holdfast.server.run import open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a store with one conversation."""
    path = tmp_path / "store.sqlite"
    store = open_store(ServerConfig(store=str(path)))
    store.conversations.create("", "conv", {"title": "kept"}, [])
    store.close()
    return path


def test_a_check_says_what_a_whole_store_holds(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "check", "--store", str(path)]) == 0
    assert capsys.readouterr().out == f"{path} is whole: 1 conversations, 0 items, 16 bytes of content\n"


def test_a_backup_is_a_store_of_its_own(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.sqlite"
    assert main(["store", "backup", str(copy), "--store", str(path)]) == 0
    assert capsys.readouterr().out == f"{copy.stat().st_size} bytes in {copy}\n"
    store = open_store(ServerConfig(store=str(copy)))
    assert store.conversations.get("", "conv")["metadata"] == {"title": "kept"}
    store.close()


def test_a_store_that_only_keys_were_added_to_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.sqlite"
    assert main(["keys", "add", "acme", "--store", str(path)]) == 0
    capsys.readouterr()
    assert main(["store", "check", "--store", str(path)]) == 0
    assert capsys.readouterr().out == f"{path} is whole: 0 conversations, 0 items, 0 bytes of content\n"


def test_another_programs_file_is_not_called_a_damaged_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "places.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE places (url TEXT)")
    assert main(["store", "check", "--store", str(path)]) == 2
    assert capsys.readouterr().err == f"holdfast: {path} is a SQLite file, but no conversation store\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "ACTION is missing; it must be one of check, backup"),
        (["mend"], "ACTION is mend; it must be one of check, backup"),
        (["backup"], "name the FILE of the backup"),
        (["check", "file"], "check takes no FILE, and file is given"),
        (["check"], "there is no conversation store /nowhere/store.sqlite"),
    ],
)
def test_a_bad_command_names_what_is_wrong(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", *words, "--store", "/nowhere/store.sqlite"]) == 2
    assert reason in capsys.readouterr().err
