"""Opens regular files, and no other kind, at paths that somebody else chose or may have changed.

Opening a named pipe waits for a writer, and opening a device may have any effect. So all files are opened through this
module, without waiting, and anything but a regular file is refused with an error that names its kind. Links are
followed, because a path from a user may lead into the hub's cache, which is made of links. In the server's own
directories, `own_directory` follows no links.
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
"""Names of the file kinds that are not regular files."""


def file_fault(error: OSError) -> str:
    """The file and the reason of an error, without its number."""
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.strerror and error.filename else reason


def open_regular(path: str | Path, flags: int = os.O_RDONLY, *, directory: int | None = None, mode: int = 0o600) -> int:
    """Open a regular file without waiting, and return its descriptor. `path` may be relative to `directory`.

    Raises OSError as `os.open` does, or with the kind of a file that is not regular. `flags` must not contain O_TRUNC,
    because a file may only be changed once it is known to be regular.
    """
    assert not flags & os.O_TRUNC
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode, dir_fd=directory)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise irregular(stat.S_IFLNK, path) from None
        if error.errno == errno.ENXIO:  # A pipe that nobody reads, or a socket at which nobody listens.
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
    """Return the error for a file that is not regular. For a directory it is an IsADirectoryError."""
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFDIR:
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    return OSError(errno.EINVAL, f"it is {KINDS.get(kind, 'a special file')}, not a regular file", str(path))


def open_file(path: str | Path) -> BufferedReader:
    """Open a regular file for reading bytes. Raises OSError."""
    return BufferedReader(FileIO(open_regular(path), "rb"))


def create_file(path: str | Path, *, follow_links: bool = False, mode: int = 0o666) -> BufferedWriter:
    """Open a regular file for writing bytes. An existing file is emptied once it is known to be regular.

    Set `follow_links` for a path that a user gave, but not for a name that this process made. Raises OSError.
    """
    flags = os.O_WRONLY | os.O_CREAT | (0 if follow_links else os.O_NOFOLLOW)
    descriptor = open_regular(path, flags, mode=mode)
    os.ftruncate(descriptor, 0)
    return BufferedWriter(FileIO(descriptor, "wb"))


def open_directory(path: str | Path) -> int:
    """Open a directory, and return its descriptor. The last part of the path must not be a link. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def sync_directory(path: str | Path) -> None:
    """Make the names in a directory durable, with fsync. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def name_of_regular(path: str | Path) -> Iterator[str]:
    """Yield a name by which a library can open a regular file. It is valid within the context. Raises OSError."""
    with open_file(path) as file:
        yield f"/dev/fd/{file.fileno()}"


def read_bytes(path: str | Path) -> bytes:
    """Return all bytes of a regular file. Raises OSError."""
    with open_file(path) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """Return the text of a regular file. Raises OSError, and UnicodeDecodeError (a ValueError) if it is not UTF-8."""
    return read_bytes(path).decode()


def samples_of(path: str | Path, count: int, size: int) -> Iterator[bytes]:
    """Yield up to `size` bytes from each of `count` places spread over a regular file. Raises OSError."""
    with open_file(path) as file:
        total = os.fstat(file.fileno()).st_size
        for part in range(count):
            file.seek(total * part // count)
            yield file.read(size)


def check_regular_below(directory: Path) -> None:
    """Raises OSError if a directory holds anything but regular files, directories, and links to them.

    This is for directories whose files a library opens by name. A link without a target is accepted: only code that
    needs the target fails.
    """
    with os.scandir(directory) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            try:
                mode = entry.stat().st_mode
            except OSError:
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise irregular(mode, entry.path)
