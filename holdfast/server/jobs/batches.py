"""Batches of one server: creates, lists and cancels them, resumes them after a restart, and streams their events."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from holdfast.server.conversations.protocol import event_bytes
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import Store, not_found
from holdfast.server.jobs.batch_runner import REST_SECONDS, BatchRunner, Charge, charge_nobody, updated
from holdfast.server.jobs.feed import Feed
from holdfast.server.jobs.files import DAYS_30, Files, check_expiry
from holdfast.server.jobs.lines import REQUESTS
from holdfast.server.jobs.locks import Owner
from holdfast.server.jobs.results import BATCH, form_of
from holdfast.server.jobs.tables import BatchTable, TooMany, WrongPurpose
from holdfast.server.jobs.values import Batch, Ending
from holdfast.server.protocol import ApiError, Metadata, RequestBody, invalid

WINDOW = "24h"
WINDOW_SECONDS = 86400.0
MOST_OPEN = 1024
"""Maximum number of batches that have not ended, of all tenants."""
KEPT_SECONDS = DAYS_30
"""Seconds for which an ended batch is kept."""
TICK_SECONDS = 2.0
"""Seconds between two checks for batches that expired, were cancelled at another server, or whose server ended."""
CLEAN_SECONDS = 3600.0

log = logging.getLogger("holdfast.server")


class BatchRequest(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: dict[str, Any] | None = None


class Batches:
    """The batches of one server, which runs them from `start` to `close`."""

    def __init__(
        self,
        responses: Responses,
        files: Files,
        now: Callable[[], float] = time.time,
        *,
        tick: float = TICK_SECONDS,
        charge: Charge = charge_nobody,
    ) -> None:
        """`charge` is called with each answered line. Raises OSError if the directory of files cannot be used."""
        service = responses.service
        self.files = files
        self.feed = Feed()
        self.runner = BatchRunner(service, responses, files, self.feed, now, charge)
        self.owner = Owner(files.directory)
        self._service, self._store, self._now = service, responses.store, now
        self._tenant_limit = max(1, int(MOST_OPEN * service.config.share))
        self._tick_seconds = tick
        self._ticking: asyncio.Task[None] | None = None
        self._adopting = asyncio.Lock()
        """Held while work of ended servers is taken over."""
        self._started = asyncio.Event()
        """Set once the batches of an earlier server have been taken over."""
        self._warned = False
        self._closed = False

    async def start(self) -> None:
        """Continue the batches that an earlier server left unfinished. Raises ApiError if the store fails."""
        if self._ticking is None:
            self._ticking = asyncio.create_task(self._tick())
            try:
                await self._adopt()
            finally:
                self._started.set()

    async def cleared(self) -> None:
        """Wait until earlier batches are taken over, and no line is suspected of having ended an engine."""
        await self._started.wait()
        await self.runner.cleared()

    async def create(self, wanted: BatchRequest, tenant: str, key: str = "") -> Batch:
        """Create a batch. Returns before any of its lines runs. Raises ApiError.

        `key` is the name of the API key that pays for it.
        """
        if wanted.endpoint == "/v1/embeddings":
            raise invalid("no model served here has embeddings", "endpoint", "unsupported_endpoint")
        if wanted.endpoint not in REQUESTS:
            raise invalid(f"endpoint is {wanted.endpoint[:64]!r}; it must be one of {', '.join(REQUESTS)}", "endpoint")
        if wanted.completion_window != WINDOW:
            reason = f"completion_window is {wanted.completion_window[:32]!r}; it must be {WINDOW!r}"
            raise invalid(reason, "completion_window")
        kept = DAYS_30
        if wanted.output_expires_after is not None:
            given = wanted.output_expires_after
            kept = float(check_expiry(given.get("anchor"), given.get("seconds"), "output_expires_after"))
        return await self.submit(
            tenant, wanted.input_file_id, wanted.endpoint, WINDOW_SECONDS,
            metadata=wanted.metadata, output_seconds=kept, key=key,
        )  # fmt: skip

    async def submit(
        self,
        tenant: str,
        input_file: str,
        endpoint: str,
        seconds: float | None,
        *,
        metadata: dict[str, str] | None = None,
        output_seconds: float = DAYS_30,
        key: str = "",
        total: int = 0,
        purpose: str = "batch",
    ) -> Batch:
        """Create a batch that expires after `seconds`, or never if that is None. Raises ApiError.

        `total` is the number of lines, if it is known. `purpose` is that of the input file.
        """
        if self._closed:
            reason = "the server is shutting down and takes no new batches; try another one"
            raise ApiError(reason, status=503, code="shutting_down", retry_after=5)
        self._warn_of_order()
        now = self._now()
        batch = Batch(
            id=f"{form_of(endpoint).prefix}{uuid.uuid4().hex}",
            tenant=tenant,
            endpoint=endpoint,
            input_file=input_file,
            model=self.runner.model,
            created=now,
            expires=None if seconds is None else now + seconds,
            output_seconds=output_seconds,
            key=key,
            metadata=metadata,
            total=total,
        )

        def add(store: Store) -> None:
            limits = {"limit": MOST_OPEN, "tenant_limit": self._tenant_limit}
            BatchTable(store.database).add(batch, self.owner.id, purpose=purpose, **limits)

        try:
            await self._store.run(add, "input_file_id")
        except WrongPurpose as error:
            raise invalid(str(error), "input_file_id") from None
        except TooMany as error:
            raise ApiError(str(error), status=429, code="too_many_batches", retry_after=60) from None
        await self.start()
        self.runner.begin(batch)
        self.runner.publish(batch, updated(batch))
        return batch

    async def retrieve(self, tenant: str, id: str, prefix: str = BATCH) -> Batch:
        """Return a batch in its current state. Raises ApiError 404, also for an id with another prefix."""
        check_prefix(id, prefix)
        return await self._store.read(lambda store: BatchTable(store.database).get(tenant, id))

    async def page(
        self, tenant: str, *, limit: int, after: str | None, before: str | None = None, prefix: str = BATCH
    ) -> tuple[list[Batch], bool]:
        """Return a page of a tenant's batches, the newest first, and whether there are more. Raises ApiError 404.

        With `before`, the page ends before that batch, and there may be more that are newer.
        """

        def read(store: Store) -> tuple[list[Batch], bool]:
            return BatchTable(store.database).page(tenant, limit=limit, after=after, before=before, prefix=prefix)

        return await self._store.read(read)

    async def delete(self, tenant: str, id: str, prefix: str) -> None:
        """Delete a batch that has ended, and its files. Raises ApiError: 404, or 409 if it has not ended."""
        if (await self.retrieve(tenant, id, prefix)).ended:
            await self._forget_answers()  # Without its batch, an answer would stay.
        for file in await self._store.run(lambda store: BatchTable(store.database).delete(tenant, id)):
            await self.files.on_disk(partial(self.files.path(file).unlink, missing_ok=True))

    async def cancel(self, tenant: str, id: str, prefix: str = BATCH) -> Batch:
        """Stop a batch. Finished answers go to its output file. Raises ApiError: 404, or 409 if it has ended."""
        check_prefix(id, prefix)
        now = self._now()
        batch = await self._store.run(lambda store: BatchTable(store.database).ask_cancel(tenant, id, now))
        self.runner.stop(id, "cancelled")
        self.runner.publish(batch, updated(batch))
        return batch

    async def events(self, tenant: str) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events of a tenant's batches: the state of each open one, then all changes.

        Batches of other servers on the same store are not included. Raises ApiError.
        """
        async with aclosing(self.feed.listen(tenant)) as feed:
            yield await anext(feed)
            for batch in await self._store.read(lambda store: BatchTable(store.database).open_of(tenant, BATCH)):
                yield event_bytes(updated(batch))
            async for data in feed:
                yield data

    async def close(self) -> None:
        """Abort all lines. The batches continue at the next start. May be called more than once."""
        if self._closed:
            return
        self._closed = True
        self.feed.close()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.runner.close()
        self.owner.close()
        self.files.close()

    async def _tick(self) -> None:
        """Stop cancelled and expired batches, adopt those of ended servers, and delete old ones, until cancelled."""
        next_clean = 0.0
        while True:
            try:
                await self._stop_some()
                await self._adopt()
                if time.monotonic() >= next_clean:
                    await self._clean()
                    next_clean = time.monotonic() + CLEAN_SECONDS
            except (ApiError, OSError) as error:
                log.warning("open and old batches cannot be checked now: %s", error)
            await asyncio.sleep(self._tick_seconds)

    async def _stop_some(self) -> None:
        """Stop cancelled and expired batches."""
        now = self._now()
        for id, running in list(self.runner.running.items()):
            if running.batch.expires is not None and running.batch.expires <= now:
                self.runner.stop(id, "expired")
        if ids := list(self.runner.running):
            for id in await self._store.read(lambda store: BatchTable(store.database).cancelled(ids)):
                self.runner.stop(id, "cancelled")

    async def _adopt(self) -> None:
        """Continue the batches of ended servers, if they are for the model served here.

        One call waits for another, so that a start returns when all of them run here.
        """
        async with self._adopting:
            await self._take_over()

    async def _take_over(self) -> None:
        """Continue the batches of ended servers.

        Batches for other models are taken over only to end them. A batch whose input does not exist here belongs to
        servers with another directory of files.
        """
        owners = await self._store.read(lambda store: BatchTable(store.database).owners())
        gone = [owner for owner in owners - {self.owner.id} if self.owner.gone(owner)]
        if not gone:
            return
        model, now = self.runner.model, self._now()
        found: dict[str, tuple[Batch, Ending | None]] = {}
        for batch, cancelled in await self._store.read(lambda store: BatchTable(store.database).orphans(gone)):
            late = batch.expires is not None and batch.expires <= now
            ending: Ending | None = "cancelled" if cancelled else "expired" if late else None
            if (batch.model == model or ending) and self.files.path(batch.input_file).exists():
                found[batch.id] = batch, ending
        if found:
            mine = self.owner.id
            taken = await self._store.run(lambda store: BatchTable(store.database).adopt(mine, gone, [*found]))
            for id in found:  # The oldest first.
                if id in taken:
                    self.runner.begin(*found[id], taken[id])

    async def _clean(self) -> None:
        await self.files.clean()
        oldest = self._now() - KEPT_SECONDS
        await self._store.run(lambda store: BatchTable(store.database).drop_old(oldest))
        await self._forget_answers()

    async def _forget_answers(self) -> None:
        """Delete the answers of all batches that have ended. Their files have them."""
        while await self._store.run(lambda store: BatchTable(store.database).forget_answers()):
            await asyncio.sleep(REST_SECONDS)

    def _warn_of_order(self) -> None:
        """Log a warning once if the engine's order does not put batch lines after other requests."""
        order = self._service.client.config.order
        if order in ("fcfs", "fair") and not self._warned:
            self._warned = True
            log.warning(
                "with --order %s lines of batches do not wait for other requests; priority and deadline do", order
            )


def check_prefix(id: str, prefix: str) -> None:
    """Raises ApiError 404 for the id of a batch of another API."""
    if not id.startswith(prefix):
        raise not_found("batch", id)
