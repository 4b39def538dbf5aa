"""Checkpoints: weights that clients saved, found by paths such as tinker://MODEL/weights/NAME."""

from __future__ import annotations

import re
import shutil
import tarfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec import structs

from holdfast.files.regular import open_file
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.files import Files
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.tinker.tables import CheckpointTable
from holdfast.server.tinker.values import PLACES, SCHEME, Checkpoint, CheckpointKind, Model

KINDS: dict[str, CheckpointKind] = {place: kind for kind, place in PLACES.items()}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Names of checkpoints. They are parts of paths and URLs."""
TTL_SECONDS = (3600, 10 * 366 * 86400)
"""Shortest and longest time for which a client may keep a checkpoint, as in Tinker: an hour, and ten years."""
DIRECTORY = "checkpoints"
PIECE = 1 << 20

T = TypeVar("T")


class Path3(NamedTuple):
    """The parts of a checkpoint's path."""

    model: str
    kind: CheckpointKind
    name: str


def parse_path(path: str, param: str = "path") -> Path3:
    """Return the parts of a path such as tinker://MODEL/weights/NAME. Raises ApiError, which names `param`."""
    parts = path.removeprefix(SCHEME).split("/") if path.startswith(SCHEME) else []
    if len(parts) != 3 or parts[1] not in KINDS:
        reason = f"{param} is {path[:128]!r}; it must look like tinker://MODEL/weights/NAME, or …/sampler_weights/NAME"
        raise invalid(reason, param)
    return Path3(parts[0], KINDS[parts[1]], parts[2])


def check_name(name: str, param: str = "path") -> str:
    """Return the name of a new checkpoint. Raises ApiError, which names `param`."""
    if not NAME.fullmatch(name):
        reason = f"{param} is {name[:64]!r}; a name must begin with a letter or digit, and have at most 128 letters"
        raise invalid(f"{reason}, digits, '.', '_' or '-'", param)
    return name


def check_ttl(seconds: int | None) -> int | None:
    """Return the time to keep a checkpoint in seconds; None for ever. Raises ApiError."""
    least, most = TTL_SECONDS
    if seconds is not None and not least <= seconds <= most:
        raise invalid(f"ttl_seconds is {seconds}; it must lie between {least} and {most}", "ttl_seconds")
    return seconds


class Checkpoints:
    """The checkpoints of all servers with one store and one directory."""

    def __init__(self, store: AsyncStore, files: Files, directory: Path, now: Callable[[], float] = time.time) -> None:
        """`directory` has a directory for each model."""
        self._store, self._files, self._now = store, files, now
        self.directory = directory

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Run work that reads or deletes files of checkpoints in a thread. Raises OSError."""
        return await self._files.on_disk(work)

    def new(
        self,
        model: Model,
        kind: CheckpointKind,
        name: str,
        *,
        ttl: int | None = None,
        listed: bool = True,
        metadata: dict[str, str] | None = None,
    ) -> Checkpoint:
        """Return a checkpoint that is to be written, without storing it."""
        id, now = f"checkpoint-{uuid.uuid4().hex}", self._now()
        return Checkpoint(
            id=id, tenant=model.tenant, model=model.id, kind=kind, name=name, created=now, listed=listed,
            directory=str(self.directory / model.job / DIRECTORY / id), expires=None if ttl is None else now + ttl,
            metadata=metadata,
        )  # fmt: skip

    async def find(self, tenant: str, path: str, param: str = "path") -> Checkpoint:
        """Return a finished checkpoint by its path. Public ones are found by every tenant. Raises ApiError 404, 400."""
        parts, now = parse_path(path, param), self._now()
        return await self._store.read(lambda store: CheckpointTable(store.database).find(tenant, *parts, now), param)

    async def own(self, tenant: str, model: str, place: str, name: str) -> Checkpoint:
        """Return a tenant's own checkpoint by the parts of its path. Raises ApiError 404."""
        found = await self.find(tenant, f"{SCHEME}{model}/{place}/{name}")
        if found.tenant != tenant:
            raise ApiError(f"checkpoint {name[:64]!r} was not found", status=404, code="checkpoint_not_found")
        return found

    async def get(self, id: str) -> Checkpoint | None:
        """Return a checkpoint by its id, finished or not; None if there is none."""
        return await self._store.read(lambda store: CheckpointTable(store.database).get(id))

    async def known(self, ids: Collection[str]) -> set[str]:
        """Return those of some ids that are checkpoints."""
        return await self._store.read(lambda store: CheckpointTable(store.database).known(ids))

    async def taken(self, model: str, kind: CheckpointKind, name: str) -> bool:
        """Whether a model has a checkpoint of this name, finished or being written."""
        return await self._store.read(lambda store: CheckpointTable(store.database).taken(model, kind, name))

    async def page(
        self, tenant: str, *, model: str | None = None, offset: int = 0, limit: int = 100
    ) -> tuple[list[Checkpoint], int]:
        """Return a page of a tenant's checkpoints, the newest first, and the number of all."""
        now = self._now()
        return await self._store.read(
            lambda store: CheckpointTable(store.database).page(tenant, now, model=model, offset=offset, limit=limit)
        )

    async def keep_for(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        """Keep a checkpoint for some seconds from now; None for ever. Raises ApiError."""
        expires = None if check_ttl(seconds) is None else self._now() + (seconds or 0)
        await self._change(checkpoint, expires=expires)

    async def publish(self, checkpoint: Checkpoint, public: bool) -> None:
        """Let every API key load a checkpoint, or only its own again."""
        await self._change(checkpoint, public=public)

    async def _change(self, checkpoint: Checkpoint, **fields: object) -> None:
        await self._store.run(lambda store: CheckpointTable(store.database).change(checkpoint.id, fields))

    async def drop(self, *gone: Checkpoint) -> None:
        """Delete checkpoints with their files."""
        await self._store.run(lambda store: CheckpointTable(store.database).delete([each.id for each in gone]))
        await self.delete_files(gone)

    async def delete_files(self, gone: Iterable[Checkpoint]) -> None:
        """Delete the files of checkpoints that are no longer stored."""
        for checkpoint in gone:
            await self._files.on_disk(partial(_delete, Path(checkpoint.directory)))

    async def delete_unknown(self, model: Model) -> None:
        """Delete the directories of a model's checkpoints that a killed server has left."""
        directory = self.directory / model.job / DIRECTORY
        for path in await self._files.on_disk(lambda: [*directory.glob("*")]):
            if await self.get(path.name) is None:
                await self._files.on_disk(partial(_delete, path))

    async def drop_unfinished(self, model: str) -> None:
        """Delete the checkpoints of an ended model that were never written."""
        left = await self._store.read(lambda store: CheckpointTable(store.database).unfinished(model))
        await self.drop(*left)

    async def drop_expired(self) -> None:
        """Delete the checkpoints whose time has ended."""
        now = self._now()
        while gone := await self._store.read(lambda store: CheckpointTable(store.database).expired(now)):
            await self.drop(*gone)

    async def written(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint as finished, with the size of its files. Raises OSError if there are none."""

        def size() -> int:
            return sum(path.stat().st_size for path in Path(checkpoint.directory).iterdir())

        return structs.replace(checkpoint, ready=True, bytes=await self._files.on_disk(size))


def _delete(directory: Path) -> None:
    """Delete a checkpoint's directory, and those above it if they are empty: its model has ended."""
    shutil.rmtree(directory, ignore_errors=True)
    model = directory.parent.parent
    with suppress(OSError):
        if [*model.iterdir()] == [directory.parent]:
            directory.parent.rmdir()
            model.rmdir()


def archive(directory: Path) -> Iterator[bytes]:
    """Yield a directory's files as a tar archive, piece by piece. Raises OSError."""
    for path in sorted(directory.iterdir()):
        with open_file(path) as file:
            info = tarfile.TarInfo(path.name)
            info.size = path.stat().st_size
            yield info.tobuf(tarfile.PAX_FORMAT)
            left = info.size
            while left:
                piece = file.read(min(PIECE, left))
                if not piece:
                    raise OSError(f"{path.name} has become shorter")
                left -= len(piece)
                yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)
