"""VersionFiles: the directories of adapter versions whose weights clients send as bodies."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections.abc import AsyncIterator, Collection
from pathlib import Path

from holdfast.files.own_directory import OwnDirectory
from holdfast.files.regular import create_file, open_file, sync_directory
from holdfast.server.conversations.values import StoreError
from holdfast.server.jobs.locks import Owner
from holdfast.server.jobs.tuning import ADAPTER_FILES
from holdfast.server.protocol import ApiError, invalid

CONFIG_FILE, WEIGHTS_FILE = ADAPTER_FILES
CONFIG_LIMIT = 1 << 20
"""Largest config of an adapter that is copied, in bytes."""
PIECE = 1 << 20
"""Number of bytes that are written at once."""


class VersionFiles:
    """Directories below `root`, one for each version, in PEFT's format. All engines see them at the same path."""

    def __init__(self, root: Path, owner: Owner, largest: int) -> None:
        """`largest` is the size in bytes of the largest file of weights."""
        self.root, self._owner, self._largest = root, owner, largest

    async def receive(self, before: Path, declared: int | None, pieces: AsyncIterator[bytes]) -> Path:
        """Write the weights of a new version, with the config of the version in `before`. Returns its directory.

        The directory is gone if anything fails. `declared` is the body's length, if the client declared it. Raises
        ApiError: 413 if the body is too large, 400 if it is empty or if `before` has no config, 503 if the disk fails.
        """
        if declared is not None and declared > self._largest:
            raise self._too_large()
        try:
            directory = await asyncio.to_thread(self._create, before)
        except FileNotFoundError:
            reason = f"the adapter's present version has no {CONFIG_FILE} any more; give lora_path instead of a body"
            raise invalid(reason, code="invalid_adapter") from None
        except (OSError, StoreError) as error:
            raise unwritable(error) from None
        try:
            size = await self._write(directory / WEIGHTS_FILE, pieces)
            if not size:
                raise invalid(f"the body is empty; it must be an {WEIGHTS_FILE}", code="invalid_adapter")
            await asyncio.to_thread(sync_directory, directory)
        except BaseException as error:
            await self.drop(directory)
            if isinstance(error, OSError):
                raise unwritable(error) from None
            raise
        return directory

    async def drop(self, directory: Path | str) -> None:
        """Delete the directory of a version. Does nothing for one that is not below the root."""
        directory = Path(directory)
        if directory.parent == self.root:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    async def clean(self, kept: Collection[str]) -> None:
        """Delete the versions of servers that have ended, except for the directories in `kept`."""
        await asyncio.to_thread(self._clean, frozenset(kept))

    def _create(self, before: Path) -> Path:
        with open_file(before / CONFIG_FILE) as file:
            config = file.read(CONFIG_LIMIT + 1)
        if len(config) > CONFIG_LIMIT:
            reason = f"{CONFIG_FILE} of the present version is larger than {CONFIG_LIMIT} bytes"
            raise invalid(reason, code="invalid_adapter")
        with OwnDirectory(self.root) as root, root.below(f"{self._owner.id}.{uuid.uuid4().hex}") as directory:
            with os.fdopen(directory.open(CONFIG_FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
                file.write(config)
            return directory.path

    async def _write(self, path: Path, pieces: AsyncIterator[bytes]) -> int:
        size, held = 0, bytearray()
        with await asyncio.to_thread(create_file, path, mode=0o600) as file:
            async for piece in pieces:
                held += piece
                size += len(piece)
                if size > self._largest:
                    raise self._too_large()
                if len(held) >= PIECE:
                    await asyncio.to_thread(file.write, bytes(held))
                    held.clear()
            file.write(held)
            file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        return size

    def _clean(self, kept: frozenset[str]) -> None:
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            owner = path.name.partition(".")[0]
            if str(path) not in kept and owner != self._owner.id and self._owner.gone(owner):
                shutil.rmtree(path, ignore_errors=True)

    def _too_large(self) -> ApiError:
        reason = f"the body is larger than {self._largest} bytes; send less, or raise the server's --max-file-mb"
        return ApiError(reason, status=413, code="body_too_large")


def unwritable(error: Exception) -> ApiError:
    """Return the error for a directory of versions that cannot be written. The reason is in the message alone."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return ApiError(f"the server cannot store the weights now: {reason}", status=503, code="store_unavailable")
