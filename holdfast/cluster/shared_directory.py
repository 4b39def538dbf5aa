"""Marks of directories that engines on other hosts must see at the same path, such as that of tuning jobs."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from holdfast.files.own_directory import OwnDirectory
from holdfast.files.regular import open_file

MARK = ".holdfast-shared"
"""Name of the file that marks a directory. Its text is random, so two directories never have the same mark."""
MARK_LIMIT = 256
"""Maximum number of bytes of a mark."""


def mark(directory: Path) -> Path:
    """Mark a directory, which is created if it does not exist. Returns the path of its mark.

    A mark that is there stays, because several servers may share the directory. Raises OSError.
    """
    with OwnDirectory(directory) as own, suppress(FileExistsError):
        descriptor = own.open(MARK, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(16))
            file.flush()
            os.fsync(file.fileno())
    return directory.absolute() / MARK


def read_mark(path: str) -> str:
    """The text of a mark as this host sees it; empty if the host has no such file, or may not read it."""
    try:
        with open_file(path) as file:
            return file.read(MARK_LIMIT).decode(errors="replace")
    except OSError:
        return ""
