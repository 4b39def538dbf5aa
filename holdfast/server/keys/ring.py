"""KeyRing: finds the key of a request among those of the configuration and of the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.keys.tables import NO_KEYS, KeyTable, Snapshot
from holdfast.server.keys.values import ADAPTERS, OPERATOR, USE, Key, Secret, digest_of, tenant_of_secret
from holdfast.server.protocol import ApiError

CACHE_SECONDS = 1.0
"""Seconds for which the keys that were read from the store are used without another look."""
WAIT_SECONDS = 0.5
"""Maximum number of seconds for which a request waits for a look. Then the keys that were read last decide."""
SHOWN_DIGITS = 8
"""Number of the tenant's digits that name a key of the configuration in logs and metrics."""

Load = Callable[[int], Awaitable[Snapshot | None]]
"""Reads the keys of the store. Returns None if they still have the given version. Raises ApiError."""


class KeyRing:
    """All keys. A change in the store takes effect within CACHE_SECONDS, or later while the store cannot be read."""

    def __init__(
        self,
        config: ServerConfig,
        stored: Snapshot,
        load: Load,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._configured = configured(config)
        self._requires_key = bool(config.api_key)
        self._stored = stored
        self._load = load
        self._now = now
        self._clock = clock
        self._looked = clock()
        self._looking: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, config: ServerConfig, stored: Snapshot, shared: AsyncStore) -> KeyRing:
        """Create the ring of a server whose store has the keys `stored`; later looks read through `shared`."""
        return cls(config, stored, lambda version: shared.read(lambda store: _look(store, version)))

    @classmethod
    def without_store(cls, config: ServerConfig) -> KeyRing:
        """Create the ring of a server that has the keys of its configuration only."""

        async def unchanged(version: int) -> None:
            return None

        return cls(config, NO_KEYS, unchanged)

    @property
    def keyed(self) -> bool:
        """Whether requests need a key. They also do when all stored keys are revoked."""
        return self._requires_key or bool(self._stored.secrets)

    @property
    def names(self) -> set[str]:
        """Names of the valid keys, those of operators included."""
        found = {**self._configured, **self._stored.secrets}.values()
        return {each.key.name for each in found if each.valid(self._now())}

    @property
    def shared(self) -> bool:
        """Whether stored keys share the server with each other or with others. Then each has its share of places."""
        return bool(self._stored.secrets) and len(self.names) > 1

    def tenants(self) -> dict[str, str]:
        """Return the tenant of each key by the key's name, revoked ones included."""
        found = {**self._configured, **self._stored.secrets}.values()
        return {each.key.name: each.key.tenant for each in found}

    def find(self, secret: bytes) -> Key | None:
        """Return the valid key with this secret; None if there is none.

        The secret is found by its digest, so the time of the search reveals nothing about any key. An entry of the
        store overrides the same secret in the configuration.
        """
        digest = digest_of(secret)
        found = self._stored.secrets.get(digest) or self._configured.get(digest)
        return found.key if found is not None and found.valid(self._now()) else None

    async def refresh(self) -> None:
        """Read the stored keys if the last look is older than CACHE_SECONDS. Waits for at most WAIT_SECONDS."""
        if self._clock() - self._looked < CACHE_SECONDS:
            return
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        await asyncio.wait({self._looking}, timeout=WAIT_SECONDS)

    async def _look(self) -> None:
        began = self._clock()
        with suppress(ApiError):  # The store failed, and has logged the reason.
            self._stored = await self._load(self._stored.version) or self._stored
        self._looked = began


def configured(config: ServerConfig) -> dict[str, Secret]:
    """Return the keys of the configuration by digest. Operators' keys may do everything."""
    found = {}
    for secret in (*config.api_key, *config.operator_key):
        tenant = tenant_of_secret(secret)
        scopes = (USE, ADAPTERS, OPERATOR) if secret in config.operator_key else (USE, ADAPTERS)
        key = Key(name=tenant[:SHOWN_DIGITS], tenant=tenant, scopes=scopes, created=0.0)
        found[digest_of(secret.encode())] = Secret(key)
    return found


def read_keys(store: Store) -> Snapshot:
    """Read the keys of a store that no other thread uses yet."""
    return KeyTable(store.database).snapshot() or NO_KEYS


def _look(store: Store, version: int) -> Snapshot | None:
    return KeyTable(store.database).snapshot(version)
