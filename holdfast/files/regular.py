"""Opens regular files, and nothing else, at paths that somebody else chose or may have changed.

Opening a named pipe waits until somebody writes to it, and opening a device may have any effect. So all files are
opened by path through this module: without waiting, and refused by name unless they are regular. Links are followed at
paths that a user gives, because the hub's cache is made of them. `own_directory` follows none in a directory of the
server's own.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter, FileIO
from pathlib import Path

KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFDIR: "a directory",
}
"""Kinds of files that are not regular, in words."""


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, directory: int | None = None, mode: int = 0o600) -> int:
    """The descriptor of a regular file, opened without waiting. `path` is relative to the descriptor `directory`.

    Raises OSError as `os.open` does, and one that names the kind of a file that is not regular. `flags` must not have
    O_TRUNC: a file is changed only once it is known to be regular.
    """
    assert not flags & os.O_TRUNC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise irregular(stat.S_IFLNK, path) from None
        if error.errno == errno.ENXIO:  # nobody reads the pipe, or nobody listens at the socket
            kind = os.stat(path, dir_fd=directory).st_mode
            raise irregular(kind, path) from None
        raise
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            raise irregular(kind, path)
        os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def irregular(mode: int, path: str | Path) -> OSError:
    """The error for a file that is not regular. For a directory it is an IsADirectoryError."""
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'a special file')}, not a regular file", str(path))


def open_file(path: str | Path) -> BufferedReader:
    """A regular file, open for reading bytes. Raises OSError."""
    return BufferedReader(FileIO(open_regular(path), "rb"))


def create_file(path: str | Path, *, follow_links: bool = False, mode: int = 0o666) -> BufferedWriter:
    """A regular file, open for writing bytes. An existing file is emptied once it is known to be regular.

    `follow_links` is for a path that a user gives, not for a name that this process made. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = open_regular(path, flags, mode=mode)
    os.ftruncate(descriptor, 0)
    return BufferedWriter(FileIO(descriptor, "wb"))


def open_directory(path: str | Path) -> int:
    """The descriptor of a directory. The path's last part may not be a link. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory durable (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def name_of_regular(path: str | Path) -> Iterator[str]:
    """A name by which a library can open a file that is known to be regular, valid within the block. Raises OSError."""
    with open_file(path) as file:
        yield f"/dev/fd/{file.fileno()}"


def read_bytes(path: str | Path) -> bytes:
    """All bytes of a regular file. Raises OSError."""
    with open_file(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """The text of a regular file. Raises OSError, and UnicodeDecodeError (a ValueError) if it is not UTF-8."""
    return read_bytes(path).decode()


def check_regular_below(directory: Path) -> None:
    """Raise OSError if a directory holds anything but regular files, directories, and links to them.

    For directories whose files others open by name. A link without a target is left to the code that needs the target.
    """
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            try:
                mode = entry.stat().st_mode
            except OSError:
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise irregular(mode, entry.path)
