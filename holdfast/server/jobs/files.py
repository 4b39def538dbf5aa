"""Files: bytes in a directory, found by id through the store. Uploads are received piece by piece, within limits."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

from holdfast.files.own_directory import OwnDirectory
from holdfast.files.regular import open_file, sync_directory
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY, data_directory
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import StoreError
from holdfast.server.jobs.locks import Scratch
from holdfast.server.jobs.tables import FileTable
from holdfast.server.jobs.values import StoredFile
from holdfast.server.multipart import OVERHEAD, FormReader, base_name
from holdfast.server.protocol import ApiError, invalid

T = TypeVar("T")

PURPOSES = ("batch", "fine-tune")
"""Purposes for which clients may upload files."""
DAYS_30 = 30 * 86400.0
EXPIRY = (3600, 30 * 86400)
"""Shortest and longest lifetime that a client may give a file, in seconds, as in OpenAI's API."""
PIECE = 1 << 20
"""Number of bytes of an upload that are written at once."""
MOST_UPLOADS = 16
"""Maximum number of simultaneous uploads. Each holds two pieces in memory."""
UNFINISHED = "upload-"
"""Prefix of the names of unfinished files."""
ABANDONED_SECONDS = 3600.0
"""Seconds without a write after which an unfinished file counts as abandoned, because its server was killed."""
RETRY_SECONDS = (0.25, 10.0)
"""First and longest wait in seconds before work that must succeed is tried again after a failure."""

log = logging.getLogger("holdfast.server")


class Files:
    """The files of one server."""

    def __init__(self, store: AsyncStore, config: ServerConfig, now: Callable[[], float] = time.time) -> None:
        """Raises StoreError if the directory cannot be used."""
        self.store = store
        self.now = now
        self.largest = config.max_file_bytes
        self.limit = config.files_bytes
        self.tenant_limit = int(self.limit * config.share)
        self.tenant_uploads = max(1, int(MOST_UPLOADS * config.share))
        """Maximum number of simultaneous uploads of one API key."""
        self._remove: Callable[[], object] = lambda: None
        """Removes the directory, if it is for this server alone."""
        if config.files is not None:
            self.directory = Path(config.files)
        elif config.store == MEMORY:
            scratch = Scratch()
            self._scratch, self.directory, self._remove = scratch, scratch.directory, scratch.remove
        else:
            self.directory = data_directory() / "files"
        try:
            with OwnDirectory(self.directory), self.new():
                pass
        except OSError as error:
            raise StoreError(f"the directory of files {self.directory} cannot be used: {error.strerror}") from None
        self._uploading: Counter[str] = Counter()
        """Number of bytes that each tenant is uploading."""
        self._uploads: Counter[str] = Counter()
        """Number of uploads in progress of each tenant."""
        self._disk = ThreadPoolExecutor(2, "holdfast-files")

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run `work`, which uses the disk, in a thread, and return its result. Raises OSError."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, work)

    async def receive(
        self, tenant: str, content_type: str, declared: int | None, pieces: AsyncIterator[bytes]
    ) -> StoredFile:
        """Receive an upload: a form with `file`, `purpose` and optionally `expires_after`. Raises ApiError.

        `declared` is the length of the form, if the client declared it.
        """
        if declared is not None and declared > self.largest + OVERHEAD:
            raise self._too_large()
        self._check_uploads(tenant)
        form = FormReader(content_type)
        self._uploads[tenant] += 1
        size, held = 0, bytearray()
        try:
            held_bytes = await self._held(tenant)
            with self.new() as file:
                async for piece in pieces:
                    held += (found := form.feed(piece))
                    size += len(found)
                    self._uploading[tenant] += len(found)
                    if size > self.largest:
                        raise self._too_large()
                    self._check_space(tenant, *held_bytes)
                    if len(held) >= PIECE:
                        await self.on_disk(partial(file.write, bytes(held)))
                        held.clear()
                form.finish()
                if not size:
                    raise invalid("the file is empty", "file")
                purpose = read_purpose(form.fields)
                seconds = read_expiry(form.fields) or (DAYS_30 if purpose == "batch" else None)
                await self.on_disk(partial(file.write, bytes(held)))
                self._check_space(tenant, *await self._held(tenant))  # Others may have ended.
                return await self._keep(file, tenant, purpose, form.filename or "file", seconds)
        except OSError as error:
            raise unavailable(error) from None
        finally:
            self._uploads[tenant] -= 1
            self._uploading[tenant] -= size
            for counts in (self._uploads, self._uploading):
                if not counts[tenant]:
                    del counts[tenant]

    async def copy(self, tenant: str, purpose: str, name: str, source: IO[bytes]) -> StoredFile:
        """Store a copy of `source`, without a limit. Raises ApiError, OSError."""
        with self.new() as file:
            await self.on_disk(lambda: shutil.copyfileobj(source, file))
            return await self._keep(file, tenant, purpose, base_name(name), None)

    async def keep(self, tenant: str, purpose: str, name: str, data: bytes, seconds: float) -> StoredFile:
        """Store bytes as the tenant's for this number of seconds, within the limits of uploads. Raises ApiError."""
        self._uploading[tenant] += len(data)
        try:
            self._check_space(tenant, *await self._held(tenant))
            with self.new() as file:
                await self.on_disk(partial(file.write, data))
                return await self._keep(file, tenant, purpose, name, seconds)
        except OSError as error:
            raise unavailable(error) from None
        finally:
            self._uploading[tenant] -= len(data)
            if not self._uploading[tenant]:
                del self._uploading[tenant]

    async def get(self, tenant: str, id: str) -> StoredFile:
        """Return a file. Raises ApiError 404."""
        return await self.store.read(lambda store: FileTable(store.database).get(tenant, id, self.now()))

    async def page(
        self, tenant: str, *, limit: int, newest_first: bool, after: str | None, purpose: str | None
    ) -> tuple[list[StoredFile], bool]:
        """Return a page of a tenant's files, and whether there are more. Raises ApiError 404 for an unknown `after`."""

        def read(store: Store) -> tuple[list[StoredFile], bool]:
            table = FileTable(store.database)
            return table.page(tenant, self.now(), limit=limit, newest_first=newest_first, after=after, purpose=purpose)

        return await self.store.read(read)

    async def open(self, tenant: str, id: str) -> tuple[StoredFile, IO[bytes]]:
        """Return a file and its bytes, which stay readable if it is deleted meanwhile. Raises ApiError 404."""
        file = await self.get(tenant, id)
        try:
            return file, await self.on_disk(lambda: open_file(self.path(id)))
        except OSError as error:
            raise unavailable(error) from None

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a file. Raises ApiError: 404, or 409 if a batch reads it."""
        await self.store.run(lambda store: FileTable(store.database).delete(tenant, id, self.now()))
        await self.on_disk(lambda: self.path(id).unlink(missing_ok=True))

    def path(self, id: str) -> Path:
        """Return the path of a stored file's bytes. `id` must come from the store, never directly from a client."""
        return self.directory / id

    @contextmanager
    def new(self) -> Iterator[IO[bytes]]:
        """Create a file in the directory that only its owner can read. It is deleted unless `settle` gives it an id."""
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix=UNFINISHED, delete=False) as file:
            try:
                yield file
            finally:
                Path(file.name).unlink(missing_ok=True)

    def settle(self, file: IO[bytes], id: str) -> int:
        """Make the bytes of a `new` file durable under their id. Returns the number of bytes. Raises OSError."""
        file.flush()
        os.fsync(file.fileno())
        size = os.fstat(file.fileno()).st_size
        Path(file.name).rename(self.path(id))
        sync_directory(self.directory)
        return size

    async def clean(self) -> None:
        """Delete expired files, and uploads whose server was killed. Raises ApiError, OSError."""
        gone = await self.store.run(lambda store: FileTable(store.database).drop_expired(self.now()))
        for id in gone:
            await self.on_disk(partial(self.path(id).unlink, missing_ok=True))
        await self.on_disk(lambda: drop_abandoned(self.directory))

    def close(self) -> None:
        """Wait for running writes, and delete a temporary directory."""
        self._disk.shutdown()
        self._remove()

    async def _keep(self, file: IO[bytes], tenant: str, purpose: str, name: str, seconds: float | None) -> StoredFile:
        """Store a `new` file as the tenant's, for this number of seconds. Raises ApiError, OSError."""
        id, now = new_id(), self.now()
        expires = None if seconds is None else now + seconds
        try:
            size = await self.on_disk(lambda: self.settle(file, id))
            stored = StoredFile(
                id=id, tenant=tenant, purpose=purpose, name=name, bytes=size, created=now, expires=expires
            )
            await self.store.run(lambda store: FileTable(store.database).add(stored))
        except Exception:
            self.path(id).unlink(missing_ok=True)
            raise
        return stored

    async def _held(self, tenant: str) -> tuple[int, int]:
        """Return the number of bytes of all files, and of the tenant's files. Raises ApiError."""
        return await self.store.read(lambda store: FileTable(store.database).held(tenant))

    def _check_uploads(self, tenant: str) -> None:
        """Raises ApiError if too many uploads run: 503 at the limit of all API keys, 429 at this key's own."""
        if self._uploads.total() >= MOST_UPLOADS:
            reason = f"{MOST_UPLOADS} files are being received; try again in a moment"
            raise ApiError(reason, status=503, code="overloaded", retry_after=1)
        if self._uploads[tenant] >= self.tenant_uploads:
            reason = (
                f"this API key is sending {self._uploads[tenant]} files, and may send {self.tenant_uploads} at once"
            )
            raise ApiError(f"{reason}; try again in a moment", status=429, code="rate_limit_exceeded", retry_after=1)

    def _check_space(self, tenant: str, all_bytes: int, own_bytes: int) -> None:
        """Raises ApiError if the files and running uploads exceed their limits."""
        if all_bytes + self._uploading.total() > self.limit:
            reason = f"the server keeps at most {self.limit} bytes of files; delete some that are not needed"
            raise ApiError(reason, status=429, code="files_full", retry_after=60)
        if own_bytes + self._uploading[tenant] > self.tenant_limit:
            reason = f"this API key may keep {self.tenant_limit} bytes of files; delete some that are not needed"
            raise ApiError(reason, status=429, code="files_full", retry_after=60)

    def _too_large(self) -> ApiError:
        reason = f"the file is larger than {self.largest} bytes; send less, or raise the server's --max-file-mb"
        return ApiError(reason, status=413, param="file", code="file_too_large")


def pauses() -> Iterator[float]:
    """Yield the seconds to wait before each new try of the same work."""
    wait, longest = RETRY_SECONDS
    while True:
        yield wait
        wait = min(2 * wait, longest)


async def persist(work: Callable[[], Awaitable[T]]) -> T:
    """Retry a job's work on the store or the disk until it succeeds, and return its result.

    Raises FileNotFoundError, and an ApiError other than 503, at once.
    """
    waits = pauses()
    while True:
        try:
            return await work()
        except ApiError as error:
            if error.status != 503:
                raise
        except FileNotFoundError:
            raise
        except OSError as error:
            log.error("a batch or a tuning job waits for the disk: %s", error.strerror or error)
        await asyncio.sleep(next(waits))


def new_id() -> str:
    """Return an unguessable id."""
    return f"file-{uuid.uuid4().hex}"


def read_purpose(fields: Mapping[str, str]) -> str:
    """Return the purpose of an upload. Raises ApiError."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise invalid("purpose is missing", "purpose", "missing_required_parameter")
    if purpose not in PURPOSES:
        raise invalid(f"purpose is {purpose[:32]!r}; it must be {' or '.join(PURPOSES)}", "purpose")
    return purpose


def read_expiry(fields: Mapping[str, str]) -> int | None:
    """Return the lifetime of an upload in seconds, if it is given. Raises ApiError, also for an unknown field."""
    for name in fields:
        if name not in ("purpose", "expires_after[anchor]", "expires_after[seconds]"):
            raise invalid(f"unknown parameter: {name[:64]}", name[:64], "unknown_parameter")
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    return check_expiry(anchor, int(seconds) if seconds and re.fullmatch("[0-9]{1,9}", seconds) else seconds)


def check_expiry(anchor: object, seconds: object, param: str = "expires_after") -> int:
    """Check the parameter `param`, and return its seconds. Raises ApiError."""
    if anchor != "created_at":
        raise invalid(f'{param}.anchor must be "created_at"', param)
    least, most = EXPIRY
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not least <= seconds <= most:
        given = "missing" if seconds is None else repr(seconds)[:32]
        raise invalid(f"{param}.seconds is {given}; it must be an integer between {least} and {most}", param)
    return seconds


def unavailable(error: OSError) -> ApiError:
    """Return the error for a failed read or write of the disk. The reason goes to the log."""
    log.error("the directory of files fails: %s", error.strerror or error)
    reason = "the server's disk cannot take or give files now; nothing of this request was stored"
    return ApiError(reason, status=503, code="files_unavailable")


def drop_abandoned(directory: Path) -> None:
    """Delete unfinished files that were not written to for ABANDONED_SECONDS. Raises OSError."""
    oldest = time.time() - ABANDONED_SECONDS
    for path in directory.glob(f"{UNFINISHED}*"):
        with suppress(FileNotFoundError):  # an upload has just ended
            if path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)
