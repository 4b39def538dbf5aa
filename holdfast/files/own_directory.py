"""OwnDirectory: a directory that only this user can write to, and the files that are opened in it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path
from typing import Self

from holdfast.files.regular import KINDS, open_regular

OTHERS_WRITE = 0o022
"""Write permission of the group and of all other users."""


class OwnDirectory:
    """A directory of this user that no other user may write to. It is held open; files are opened in it.

    If others could write to a directory, they could put links there, through which this process would overwrite files
    elsewhere. So a directory with another owner, or with write permission for others, is refused, and so are links in
    it. Because the directory is held open, it stays the checked one even if its path later leads elsewhere.
    """

    def __init__(self, path: Path, parent: OwnDirectory | None = None) -> None:
        """Open the directory, or create it for this user alone. With `parent`, `path` is a name in that directory.

        Raises OSError with the reason why an existing directory is refused.
        """
        self.path: Path = path if parent is None else parent.path / path
        at: int | None = None if parent is None else parent._descriptor
        if at is None:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        else:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700, dir_fd=at)
        self._descriptor: int = _open_own(path, at)

    def below(self, name: str) -> OwnDirectory:
        """Open a directory in this one, with the same checks, or create it. Raises OSError."""
        return OwnDirectory(Path(name), self)

    def open(self, name: str, flags: int) -> int:
        """Open a regular file in this directory, and return its descriptor. A new file is for this user alone.

        Raises OSError, also for a link, for another user's file, and for a file with a second hard link.
        """
        descriptor = open_regular(name, flags | os.O_NOFOLLOW, directory=self._descriptor)
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid() or found.st_nlink > 1:
            os.close(descriptor)
            reason = "it belongs to another user" if found.st_uid != os.geteuid() else "it has another name elsewhere"
            raise OSError(errno.EPERM, reason, str(self.path / name))
        return descriptor

    def write_text(self, name: str, text: str) -> None:
        """Replace the contents of a file of this user. Raises OSError."""
        with os.fdopen(self.open(name, os.O_WRONLY | os.O_CREAT), "w", encoding="utf-8") as file:
            file.truncate()
            file.write(text)

    def names(self) -> list[str]:
        """Return the names of all entries in the directory, sorted."""
        return sorted(os.listdir(self._descriptor))  # noqa: PTH208  by descriptor

    def bytes_on_disk(self) -> int:
        """Return the number of bytes that the files in and below the directory occupy on the disk. Raises OSError."""
        total = 0
        for name in self.names():
            found = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
            total += found.st_blocks * 512
            if stat.S_ISDIR(found.st_mode):
                with self.below(name) as inner:
                    total += inner.bytes_on_disk()
        return total

    def remove_tree(self, name: str) -> None:
        """Remove a directory in this one with its contents, as far as possible. Does not remove a link."""
        shutil.rmtree(name, ignore_errors=True, dir_fd=self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        """Close the directory. Files opened in it stay open."""
        os.close(self._descriptor)


def check_own(found: os.stat_result, path: Path | str) -> None:
    """Raises OSError unless `found`, the status of `path`, is a directory that only this user may write to."""
    if not stat.S_ISDIR(found.st_mode):
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "a regular file")
        raise OSError(errno.ENOTDIR, f"it is {kind}, not a directory", str(path))
    if found.st_uid != os.geteuid():
        reason = f"it belongs to user {found.st_uid}, and this process runs as {os.geteuid()}"
        raise OSError(errno.EPERM, reason, str(path))
    if found.st_mode & OTHERS_WRITE:
        mode = stat.S_IMODE(found.st_mode)
        reason = f"others may write to it (mode {mode:o}); use chmod 700, or a new directory below it"
        raise OSError(errno.EPERM, reason, str(path))


def _open_own(path: str | Path, directory: int | None) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            check_own(os.stat(path, dir_fd=directory, follow_symlinks=False), path)
        raise
    try:
        check_own(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
