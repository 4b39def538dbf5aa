"""AdapterVersions: the versions of each adapter's weights, which clients replace while requests run."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.types import AdapterInfo
from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineDead
from holdfast.server.protocol import ApiError
from holdfast.server.service import Service, engine_dead
from holdfast.server.shared_adapters import SharedAdapters
from holdfast.server.version_files import VersionFiles


@dataclass(frozen=True, slots=True)
class Version:
    """One version of an adapter's weights."""

    number: int
    """Counts from 1 for each name, in the order in which versions are published."""
    info: AdapterInfo
    directory: str
    """Directory of its files; empty if this server does not know it."""
    created: int
    """Time at which it was published, in Unix seconds."""

    def shown(self, *, current: bool) -> dict[str, Any]:
        """Return the version as a JSON object."""
        return {
            "version": self.number,
            "content": self.info.id,
            "created_at": self.created,
            "current": current,
            "rank": self.info.rank,
            "bytes": self.info.bytes,
            "modules": list(self.info.modules),
        }


class AdapterVersions:
    """Publishes versions of adapters, and forgets a replaced one when its last request has ended.

    Requests that run keep the version that they began with. A version's cached state has the content id of its weights
    in its digests, so no other version finds it.
    """

    def __init__(self, service: Service, shared: SharedAdapters, files: VersionFiles) -> None:
        self._service, self._shared, self._files = service, shared, files
        self._known: dict[str, Version] = {}
        """The last version of each name that this server has published."""
        self._former: defaultdict[str, list[Version]] = defaultdict(list)
        """The replaced versions of each name that requests still use, oldest first."""
        self._publishing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._ending: set[asyncio.Task[None]] = set()
        """Tasks that wait for the last requests of replaced versions."""
        self._given = dict(service.client.config.adapters)
        """Directories of the adapters that are served from the start, by name."""

    def current(self, name: str) -> Version:
        """Return the version that new requests for an adapter take. The adapter must be loaded."""
        info, number = self._service.client.adapters[name], self._shared.numbers.get(name, 1)
        known = self._known.get(name)
        if known is not None and (known.info, known.number) == (info, number):
            return known
        directory = self._shared.directories.get(name) or self._given.get(name, "")
        return Version(number, info, directory, self._service.started_at)

    def versions(self, name: str) -> list[dict[str, Any]]:
        """Return all versions of an adapter that requests use or may use at this server, the newest first."""
        former = [version.shown(current=False) for version in reversed(self._former.get(name, ()))]
        return [self.current(name).shown(current=True), *former]

    async def publish(
        self, name: str, directory: str, tenant: str | None, *, replace: bool, expected: int | None = None
    ) -> Version:
        """Serve the adapter in a directory under a name, for all tenants if `tenant` is None. Returns its version.

        Returns when new requests take it, at each server of the same engines. Raises ApiError: 409 unless the version
        before has the number `expected`, and 400 with the reason if the adapter cannot be served.
        """
        client = self._service.client
        async with self._publishing[name]:
            before = self.current(name) if name in client.adapters else None
            if before is not None:
                check_expected(name, before.number, expected)
            try:
                info = await client.load_adapter(name, directory, replace=replace)
            except AdapterError as error:
                raise ApiError(f"adapter {name[:128]}: {error}", code="invalid_adapter") from None
            except EngineDead as error:
                raise engine_dead(error) from None
            self._service.belongs(name, tenant or "", all_adapters=tenant is None)
            earlier = None if before is None else before.number
            number = await self._shared.put(name, directory, tenant, before=earlier, expected=expected)
            version = self._known[name] = Version(number, info, directory, int(time.time()))
        if before is not None:
            self._end(name, before)
        return version

    async def publish_body(self, name: str, directory: Path, tenant: str | None, expected: int | None) -> Version:
        """Publish a version of a loaded adapter from a directory of `VersionFiles`, which is deleted if that fails."""
        try:
            return await self.publish(name, str(directory), tenant, replace=True, expected=expected)
        except BaseException:
            await self._files.drop(directory)
            raise

    async def unloaded(self, name: str, last: Version) -> None:
        """Let no other server serve an adapter that was unloaded here, and delete the files of its last version."""
        self._known.pop(name, None)
        self._publishing.pop(name, None)
        await self._shared.remove(name)
        self._end(name, last)

    async def clean(self) -> None:
        """Delete the files of versions that servers left which have ended. Raises ApiError."""
        await self._files.clean(await self._shared.all_directories())

    async def close(self) -> None:
        """Stop waiting for the requests of replaced versions. Without shared engines, the files are of no more use."""
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        if not self._service.client.adopts:
            for version in (*self._known.values(), *(each for former in self._former.values() for each in former)):
                await self._files.drop(version.directory)

    def _end(self, name: str, before: Version) -> None:
        """Delete the files of a version that no new request takes, once its last request has ended."""
        self._former[name].append(before)
        task = asyncio.create_task(self._forget(name, before))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _forget(self, name: str, before: Version) -> None:
        with suppress(EngineDead):
            await self._service.client.forgotten(before.info.id)
        self._former[name].remove(before)
        if not self._former[name]:
            del self._former[name]
        if before.directory not in self._directories(name):
            await self._files.drop(before.directory)

    def _directories(self, name: str) -> Collection[str]:
        """Return the directories of the versions of an adapter that are in use."""
        known = self._known.get(name)
        return {version.directory for version in (*self._former.get(name, ()), *([] if known is None else [known]))}


def check_expected(name: str, number: int, expected: int | None) -> None:
    """Raises ApiError 409 if a client expects another version than the present one."""
    if expected is not None and expected != number:
        reason = f"adapter {name[:128]} has version {number}, and expected_version is {expected}; another client came"
        raise ApiError(f"{reason} first", status=409, param="expected_version", code="version_conflict")
