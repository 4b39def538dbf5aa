"""Sessions: clients that run. A session without heartbeats is away, and the engine keeps no memory for its models."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from holdfast.server.conversations.store import AsyncStore
from holdfast.server.protocol import ApiError
from holdfast.server.tinker.sample_table import SamplerTable
from holdfast.server.tinker.tables import ModelTable, SessionTable
from holdfast.server.tinker.values import Session

AWAY_SECONDS = 300.0
"""Seconds without a heartbeat after which a session is away. The SDK sends one every 10 s."""


class Sessions:
    """The sessions of all servers with one store."""

    def __init__(self, store: AsyncStore, now: Callable[[], float] = time.time) -> None:
        self._store, self._now = store, now

    async def create(
        self, tenant: str, *, name: str | None, metadata: Mapping[str, Any] | None, tags: Sequence[str], sdk: str
    ) -> Session:
        """Create a session. Raises ApiError."""
        now = self._now()
        session = Session(
            id=f"session-{uuid.uuid4().hex}", tenant=tenant, created=now, seen=now, name=name, metadata=metadata,
            tags=tags, sdk=sdk,
        )  # fmt: skip
        await self._store.run(lambda store: SessionTable(store.database).add(session))
        return session

    async def find(self, tenant: str, id: str) -> Session:
        """Return a session. Raises ApiError 404."""
        return await self._store.read(lambda store: SessionTable(store.database).get(tenant, id))

    async def running(self, tenant: str, id: str) -> Session:
        """Return a session that may begin new work. Raises ApiError: 404, or 410 if the client has finished it."""
        session = await self.find(tenant, id)
        if session.finished:
            raise finished(session)
        return session

    async def page(self, tenant: str, *, offset: int, limit: int) -> list[Session]:
        """Return a page of a tenant's sessions, the newest first."""
        return await self._store.read(
            lambda store: SessionTable(store.database).page(tenant, offset=offset, limit=limit)
        )

    async def beat(self, tenant: str, id: str) -> None:
        """Note a heartbeat. Raises ApiError: 404, or 410 if the client has finished the session."""
        now = self._now()
        session = await self._store.run(lambda store: SessionTable(store.database).beat(tenant, id, now))
        if session.finished:
            raise finished(session)

    async def finish(self, tenant: str, id: str, reason: str) -> list[str]:
        """Finish a session. Returns the ids of its models, which are to be unloaded. Raises ApiError 404."""
        return await self._store.run(lambda store: SessionTable(store.database).finish(tenant, id, reason))

    async def seen(self, id: str) -> float:
        """Return the time of a session's last heartbeat; 0 for an unknown session."""
        return (await self._store.read(lambda store: SessionTable(store.database).seen([id]))).get(id, 0.0)

    async def away(self, id: str) -> bool:
        """Whether a session has sent no heartbeat for AWAY_SECONDS."""
        return self._now() - await self.seen(id) > AWAY_SECONDS

    async def models(self, id: str) -> list[str]:
        """Return the ids of a session's models, the oldest first."""
        return await self._store.read(lambda store: ModelTable(store.database).of_session(id))

    async def samplers(self, id: str) -> list[str]:
        """Return the ids of a session's sampling sessions."""
        found = await self._store.read(lambda store: SamplerTable(store.database).of_session(id))
        return [sampler.id for sampler in found]


def finished(session: Session) -> ApiError:
    """Return the error for a request to a session that its client has finished. The SDK then stops its heartbeats."""
    return ApiError(f"{session.id} is finished; create a new session", status=410, code="session_finished")
