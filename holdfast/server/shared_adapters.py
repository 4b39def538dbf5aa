"""SharedAdapters: an adapter that one server has loaded is served by all servers of the same engines and store."""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import suppress

from holdfast.engine.client.client import AdapterError
from holdfast.engine.client.connection import EngineDead
from holdfast.server.conversations.adapter_table import StoredAdapter
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.protocol import ApiError
from holdfast.server.service import Service

SYNC_SECONDS = 1.0
"""Seconds between two looks at the store."""
KNOWN_SECONDS = 1.5
"""Seconds after which all servers have looked at the store, and serve what it has."""

log = logging.getLogger("holdfast.server")


class SharedAdapters:
    """The adapters that requests load at any server. Without shared engines, each server knows its own alone."""

    def __init__(self, service: Service, store: AsyncStore) -> None:
        self._service, self._store = service, store
        self.numbers: dict[str, int] = {}
        """Version numbers of the adapters that requests have loaded, by name."""
        self.directories: dict[str, str] = {}
        """Directories of these adapters, by name."""
        self._served: dict[str, str] = {}
        """The load of each stored adapter that is served here, by name. Failed ones count, and are not tried again."""
        self._changing = asyncio.Lock()
        """Held while this server loads or unloads what the store says, or stores what it has loaded."""
        self._following: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Serve the adapters of all servers from now on, if they share engines."""
        if self._service.client.adopts:
            self._following = asyncio.create_task(self._follow())

    async def put(
        self, name: str, path: str, tenant: str | None, *, before: int | None = None, expected: int | None = None
    ) -> int:
        """Let all servers serve an adapter that is loaded here. Returns its version number, when they do.

        `before` is the number of the version that it has replaced here; None if there was none. Raises ApiError 409 if
        the store has another number than `expected`; this server then serves what the store has.
        """
        number = (before or 0) + 1
        if self._service.client.adopts:
            stored = StoredAdapter(name, path, tenant, uuid.uuid4().hex)
            try:
                async with self._changing:
                    number = await self._store.run(
                        lambda store: store.adapters.put(self._model, stored, before or 0, expected)
                    )
                    self._served[name] = stored.version
            except ApiError:
                await self.sync()
                raise
        self.numbers[name], self.directories[name] = number, path
        if self._service.client.adopts:
            await asyncio.sleep(KNOWN_SECONDS)
        return number

    async def all_directories(self) -> list[str]:
        """Return the directories of all stored adapters, of all models. Raises ApiError."""
        return await self._store.read(lambda store: store.adapters.directories())

    async def remove(self, name: str) -> None:
        """Let no server serve an adapter that was unloaded here. Returns when none does. Raises ApiError."""
        self._drop(name)
        if not self._service.client.adopts:
            return
        async with self._changing:
            await self._store.run(lambda store: store.adapters.remove(self._model, name))
            self._served.pop(name, None)
        await asyncio.sleep(KNOWN_SECONDS)

    async def sync(self) -> None:
        """Load and unload adapters until this server serves those of the store. Raises ApiError."""
        async with self._changing:
            stored = {each.name: each for each in await self._store.read(lambda store: store.adapters.all(self._model))}
            for name in self._served.keys() - stored.keys():
                del self._served[name]
                with suppress(AdapterError, EngineDead):
                    await self._service.client.unload_adapter(name)
                self._service.own.pop(name, None)
                self._drop(name)
            for name, adapter in stored.items():
                if self._served.get(name) != adapter.version:
                    await self._serve(adapter)

    async def close(self) -> None:
        """Stop following the other servers."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    @property
    def _model(self) -> str:
        return self._service.client.info.model

    async def _serve(self, adapter: StoredAdapter) -> None:
        """Serve an adapter that another server has loaded. If that fails, the log has the reason."""
        client, name = self._service.client, adapter.name
        try:
            await client.load_adapter(name, adapter.path, replace=name in client.adapters)
        except AdapterError as error:
            log.error("adapter %s of another server cannot be served here: %s", name, error)
        except EngineDead:
            return  # It is tried again.
        else:
            self._service.belongs(name, adapter.tenant or "", all_adapters=adapter.tenant is None)
            self.numbers[name], self.directories[name] = adapter.number, adapter.path
        self._served[name] = adapter.version

    def _drop(self, name: str) -> None:
        """Forget the number and directory of an adapter that is not served any more."""
        self.numbers.pop(name, None)
        self.directories.pop(name, None)

    async def _follow(self) -> None:
        while True:
            with suppress(ApiError):  # The store failed, and has logged the reason.
                await self.sync()
            await asyncio.sleep(SYNC_SECONDS)
