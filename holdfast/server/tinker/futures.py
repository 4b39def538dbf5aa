"""Futures: requests that are answered later. They are stored, so a client may ask again after a server has ended."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.tinker.tables import FutureTable, LimitReached, ModelEnded, Reused
from holdfast.server.tinker.values import Category, Checkpoint, Future

MOST_PENDING = 512
"""Maximum number of pending requests of one model or sampling session."""
MOST_PENDING_TENANT = 4096
"""Maximum number of pending requests of one tenant."""
LOOK_SECONDS = (0.02, 0.5)
"""Seconds until a waiting client's request is read again, in case another server has ended it: at first, and at most.

Each time, they are twice as many as before.
"""


def new_future(
    tenant: str,
    item: str,
    seq: int,
    kind: str,
    digest: str,
    now: float,
    *,
    call: int | None = None,
    detail: Mapping[str, Any] | None = None,
) -> Future:
    """Return a new pending request with an id of its own."""
    id = f"future-{uuid.uuid4().hex}"
    return Future(
        id=id, tenant=tenant, item=item, seq=seq, kind=kind, digest=digest, created=now, call=call, detail=detail or {}
    )  # fmt: skip


class Futures:
    """The requests of one server. Each change is stored before anybody sees it."""

    def __init__(self, store: AsyncStore, share: float, now: Callable[[], float] = time.time) -> None:
        """A tenant may have `share` of all pending requests, at least one item's."""
        self._store = store
        self._tenant_limit = max(MOST_PENDING, int(MOST_PENDING_TENANT * share))
        self._now = now
        self._waiting: dict[str, set[asyncio.Event]] = {}
        """Events of the clients that wait here, by request."""
        self._closed = False

    def close(self) -> None:
        """Let all clients that wait get an answer at once. They ask again, at this server's successor."""
        self._closed = True
        for events in self._waiting.values():
            for event in events:
                event.set()

    async def begin(
        self,
        tenant: str,
        item: str,
        seq: int,
        kind: str,
        digest: str,
        *,
        call: int | None = None,
        detail: Mapping[str, Any] | None = None,
        saves: Sequence[Checkpoint] = (),
    ) -> tuple[Future, bool]:
        """Store a request, with the checkpoints that it writes. Returns it, and whether it is new.

        A request that is sent again, with the same item, number and digest, gives the earlier one. Raises ApiError:
        400 if its number had another content, 429 if too many requests are pending.
        """
        future = new_future(tenant, item, seq, kind, digest, self._now(), call=call, detail=detail)

        def add(store: Store) -> tuple[Future, bool]:
            limits = {"limit": MOST_PENDING, "tenant_limit": self._tenant_limit}
            return FutureTable(store.database).begin(future, **limits, saves=saves)

        return await self.refusing(add)

    async def refusing(self, work: Callable[[Store], tuple[Future, bool]]) -> tuple[Future, bool]:
        """Run work that adds a request. Raises ApiError 400 and 429 for its refusals."""
        try:
            return await self._store.run(work)
        except Reused as error:
            # Not 409: the SDK would send such a request again.
            raise invalid(str(error), "seq_id", "seq_id_reused") from None
        except ModelEnded as error:
            raise invalid(str(error), "model_id", "model_ended") from None
        except LimitReached as error:
            raise ApiError(str(error), status=429, code="too_many_requests", retry_after=1) from None

    async def finish(self, id: str, body: bytes, media: str) -> None:
        """End a request with its result. One that has ended stays as it is."""
        await self.end([(id, {"state": "done", "media": media}, body)])

    async def fail(self, id: str, message: str, category: Category) -> None:
        """End a request with an error. `category` says who is at fault."""
        await self.end([(id, {"state": "failed", "error": message, "category": category}, None)])

    async def end(
        self,
        ended: Iterable[tuple[str, Mapping[str, Any], bytes | None]],
        ready: Iterable[Checkpoint] = (),
        model: tuple[str, Mapping[str, Any]] | None = None,
    ) -> list[Checkpoint]:
        """End requests, each with changed fields and its result, in one transaction with the checkpoints they wrote.

        `model` is the id of a model that ends with them, and its changed fields. Returns the checkpoints that were
        replaced.
        """
        now = self._now()
        rows = [(id, {"ended": now, **fields}, body) for id, fields, body in ended]
        _, replaced = await self._store.run(lambda store: FutureTable(store.database).finish(rows, ready, model))
        for id, _, _ in rows:
            for event in self._waiting.get(id, ()):
                event.set()
        return replaced

    async def get(self, tenant: str, id: str) -> Future:
        """Return a request. Raises ApiError: 404 for an unknown one, 410 if its result is deleted."""
        future = await self._store.read(lambda store: FutureTable(store.database).get(tenant, id))
        if future.state == "expired":
            raise ApiError(f"the result of {id[:64]} is deleted by now", status=410, code="future_expired")
        return future

    async def of_item(self, item: str) -> list[Future]:
        """Return the pending requests of an item in the order of their numbers."""
        return await self._store.read(lambda store: FutureTable(store.database).of_item(item, pending=True))

    async def body(self, tenant: str, id: str) -> bytes:
        """Return the stored result of a finished request. Raises ApiError 404."""
        return await self._store.read(lambda store: FutureTable(store.database).body(tenant, id))

    async def wait(
        self, tenant: str, id: str, seconds: float, lost: Callable[[Future], bool] = lambda _: False
    ) -> Future:
        """Wait until a request has ended or is `lost`, at most for some seconds. Returns it as it is then.

        Raises ApiError.
        """
        deadline = time.monotonic() + seconds
        look, longest = LOOK_SECONDS
        event = asyncio.Event()
        self._waiting.setdefault(id, set()).add(event)
        try:
            while True:
                future = await self.get(tenant, id)
                left = deadline - time.monotonic()
                if future.state != "pending" or left <= 0 or self._closed:
                    return future
                if lost(future):
                    return await self.get(tenant, id)  # It may have ended here since it was read.
                try:
                    async with asyncio.timeout(min(left, look)):
                        await event.wait()
                except TimeoutError:
                    look = min(2 * look, longest)
        finally:
            self._waiting[id].discard(event)
            if not self._waiting[id]:
                del self._waiting[id]
