"""State of stopped `holdfast batch` and `holdfast tune` runs, and files that are written completely or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import msgspec

from holdfast.cli.flags import UsageError
from holdfast.cli.talkers import ChatError, reason_of
from holdfast.files.regular import open_file, read_bytes

MARK = "mark.json"
PIECE = 1 << 20
"""Number of bytes that are copied at a time."""


class Stopped(Protocol):
    """A run that may have been stopped before."""

    @property
    def given(self) -> str:
        """Name of the run's input, for messages."""
        ...

    @property
    def partial(self) -> Path:
        """Path of the run's state: a directory, or a file if it runs at a server."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the run's input and options. A stopped run can be continued only if it is equal."""
        ...


class Mark(msgspec.Struct, frozen=True):
    """Contents of the file that identifies the task of a stopped run."""

    digest: str
    place: str
    """Name of the model for a run on this machine, or the server's URL."""
    id: str = ""
    """Id of the batch or job at the server; empty for a run on this machine."""


async def download(http: httpx.AsyncClient, path: str, target: Path) -> None:
    """Write the body of a server's answer to a file, completely or not at all.

    Raises ChatError, httpx.HTTPError, OSError.
    """
    async with http.stream("GET", path) as response:
        if response.status_code != 200:
            raise ChatError(reason_of(response.status_code, await response.aread()))
        with replacing(target) as file:
            async for piece in response.aiter_bytes(PIECE):
                file.write(piece)


def read_mark(path: Path, place: Stopped) -> Mark | None:
    """Return the mark of a stopped run with the same task, if any. Raises UsageError for another task."""
    try:
        mark = msgspec.json.decode(read_bytes(path), type=Mark)
    except FileNotFoundError:
        if place.partial.is_file():
            raise UsageError(f"{place.partial} was begun at a server; go on there with --url, or delete it") from None
        return None
    except NotADirectoryError:
        raise UsageError(f"{place.partial} was begun at a server; go on there with --url, or delete it") from None
    except IsADirectoryError:
        raise UsageError(f"{place.partial} was begun without --url; go on so, or delete it") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise UsageError(f"{place.partial} is not from a stopped run; choose another --out, or delete it") from None
    if mark.digest != place.digest:
        raise UsageError(f"{place.given} has changed since {place.partial} was begun; delete that to begin anew")
    return mark


@contextmanager
def replacing(target: Path) -> Iterator[Any]:
    """Yield a new file that replaces `target` when it is complete."""
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    finally:
        Path(temporary).unlink(missing_ok=True)


def write_whole(target: Path, data: bytes) -> None:
    """Write a small file, completely or not at all."""
    with replacing(target) as file:
        file.write(data)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a file, completely or not at all."""
    with open_file(source) as original, replacing(target) as file:
        shutil.copyfileobj(original, file)
