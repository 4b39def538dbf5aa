"""The stateful API: responses that run while the client waits, or in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.server.conversations.items import MOST_TOKENS, SUMMARIZE, new_item
from holdfast.server.conversations.leases import BUSY, RENEW_SECONDS, conversation_key
from holdfast.server.conversations.protocol import (
    CompactRequest,
    Event,
    InputTokensRequest,
    Response,
    ResponseRequest,
    compacted,
    ended,
    replay,
    replay_begun,
)  # fmt: skip
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import RUNNING, Context, ConversationBusy, Turn
from holdfast.server.conversations.writing import Writing
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.replies import RequestUsage, encode
from holdfast.server.search import WebSearch
from holdfast.server.service import Lane, Service, internal

POLL_SECONDS = 0.25
"""Seconds between two checks whether another server's response has ended."""
KEPT_EVENTS = 1 << 16
"""Maximum number of kept events of ended background responses. Readers that reconnect get them."""
KEPT_BYTES = 64 << 20
"""Maximum total size in bytes of the ended responses whose events are kept."""


class Responses:
    """The stateful API of one server."""

    def __init__(self, service: Service, store: AsyncStore) -> None:
        self.service = service
        self.store = store
        url = service.config.web_search
        self.search = None if url is None else WebSearch(url)
        self._locked: set[str] = set()
        """Keys of the leases of conversations that this server changes now."""
        self._background: dict[str, Background] = {}
        self._ended: dict[str, tuple[list[Event], int]] = {}
        """Events and size in bytes of recently ended background responses by id, the oldest first."""
        self._kept_events = self._kept_bytes = 0
        self._renewing: asyncio.Task[None] | None = None
        """Task that renews this server's leases. It ends when there are none."""

    def write(
        self, wanted: ResponseRequest, tenant: str, lane: Lane | None = None, name: str | None = None, batch: str = ""
    ) -> Writing:
        """Prepare a response; it runs when its events are iterated. Raises ApiError for errors known before it runs.

        `name` is the prefix of its request ids in the engine, and `batch` the batch job that it is a line of.
        """
        return Writing(self, wanted, tenant, lane, name, batch)

    async def start(self, wanted: ResponseRequest, tenant: str) -> Background:
        """Begin a background response. Returns once the engine has accepted it. Raises ApiError."""
        writing = self.write(wanted, tenant)
        background = Background(writing)
        try:
            await background.begun()
        except BaseException:
            background.task.cancel()
            raise
        self._background[writing.id] = background
        self._keep_renewing()
        background.task.add_done_callback(lambda task: self._end(background))
        return background

    def _keep_renewing(self) -> None:
        """Begin to renew leases, unless this is in progress."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Renew this server's leases, and stop the background responses that other servers cancelled."""
        while self._background or self._locked:
            await asyncio.sleep(RENEW_SECONDS)
            with suppress(ApiError):  # The store failed, and has logged the reason.
                for begun in [*self._background.values()]:
                    if begun.writing.running and not begun.stored_running:
                        await self.store.run(partial(_run, begun.writing.id))
                        begun.stored_running = True
                for id in await self.store.run(partial(_renewed, [*self._background, *self._locked])):
                    if (background := self._background.get(id)) is not None:
                        await background.stop()

    async def _ended_elsewhere(self, tenant: str, response: Response) -> Response:
        """Wait until another server ends a response or dies. Raises ApiError."""
        while response["status"] in RUNNING:
            await asyncio.sleep(POLL_SECONDS)
            response = await self.retrieve(tenant, response["id"])
        return response

    async def _elsewhere(self, tenant: str, response: Response, after: int) -> AsyncGenerator[Event, None]:
        """Yield the events above `after` of a response that another server writes. All text comes at the end."""
        for event in replay_begun(response):
            if event["sequence_number"] > after:
                yield event
                after = event["sequence_number"]
        for event in replay(await self._ended_elsewhere(tenant, response), after):
            yield event

    def _end(self, background: Background) -> None:
        """Keep the events of a background response that has ended. Beyond the limits, drop the oldest kept events."""
        del self._background[background.writing.id]
        size = len(encode(background.writing.shape.response))  # May be large, because it repeats the request's tools.
        self._ended[background.writing.id] = background.events, size
        self._kept_events += len(background.events)
        self._kept_bytes += size
        while self._kept_events > KEPT_EVENTS or self._kept_bytes > KEPT_BYTES:
            self._forget(next(iter(self._ended)))

    def _forget(self, response: str) -> None:
        """Drop the events of a response, if they are kept."""
        events, size = self._ended.pop(response, ((), 0))
        self._kept_events -= len(events)
        self._kept_bytes -= size

    async def events(self, tenant: str, response: str) -> Events:
        """Return the events of a background response. Raises ApiError: 404, or 400 if it is not in the background."""
        stored = await self.retrieve(tenant, response)
        if not stored["background"]:
            raise invalid("only a response with background: true can be streamed again", "stream")
        background, (kept, _) = self.running(tenant, response), self._ended.get(response, (None, 0))
        if background is None and stored["status"] in RUNNING:
            return Events(None, lambda after: self._elsewhere(tenant, stored, after))
        if background is not None:
            return Events(len(background.events) - 1, background.follow)
        if kept is not None:
            return Events(len(kept) - 1, lambda after: each(kept[after + 1 :]))
        return Events(None, lambda after: each(replay(stored, after)))

    async def count(self, wanted: InputTokensRequest, tenant: str) -> int:
        """Return the number of prompt tokens that a turn would have. Raises ApiError."""
        wanted = wanted.changed(model=wanted.model or self.service.client.info.model, background=False)
        writing = self.write(wanted, tenant)
        with self.service.lane.admission.admit(1, tenant):
            return len((await writing.compose(most=None)).tokens)

    async def compact(self, wanted: CompactRequest, tenant: str, usage: RequestUsage) -> dict[str, Any]:
        """Replace a turn's input and its context by the user's own items and a summary. Raises ApiError.

        The tokens of the summary are added to `usage`.
        The result is stored as a response without a parent, so that a turn can continue from the response's id.
        """
        most = wanted.max_output_tokens or max(1, min(MOST_TOKENS, self.service.client.info.max_model_len // 4))
        writing = self.write(wanted.changed(store=False, max_output_tokens=most), tenant)
        if not writing.input and wanted.previous_response_id is None:
            raise invalid("input and previous_response_id are missing: there is nothing to compact", "input")
        given = list(writing.input)
        writing.input.append(new_item("user", SUMMARIZE))
        try:
            response = await writing.whole()
        finally:
            usage.include(writing.answer.usage)
        made = compacted(response, [*writing.context.items, *given])
        if wanted.store:
            *said, summary = made["output"]
            stored = response | {"store": True, "output": [summary]}
            await self.store.run(
                lambda store: store.turns.commit(Turn(response=stored, tenant=tenant, input=said, context=Context()))
            )
        return made

    def running(self, tenant: str, response: str) -> Background | None:
        """Return a background response that this server is writing; None if it writes no such response."""
        background = self._background.get(response)
        return background if background is not None and background.writing.tenant == tenant else None

    async def retrieve(self, tenant: str, response: str) -> Response:
        """Return the current state of a stored response, whichever server writes it. Raises ApiError 404."""
        background = self.running(tenant, response)
        if background is not None:
            return background.writing.shape.response
        stored, elsewhere = await self.store.read(lambda store: store.turns.response(tenant, response))
        if stored["status"] in RUNNING and not elsewhere:  # The server that wrote it has ended.
            return ended(stored, "failed", "server_error", "the server ended before the response was complete")
        return stored

    async def cancel(self, tenant: str, response: str) -> Response:
        """Stop a background response, whichever server writes it. An ended one does not change. Raises ApiError."""
        background = self.running(tenant, response)
        if background is not None:
            await background.stop()
        found = await self.retrieve(tenant, response)
        if background is None and found["status"] in RUNNING:
            await self.store.run(lambda store: store.leases.cancel(response))
            found = await self._ended_elsewhere(tenant, found)
        if not found["background"]:
            reason = "only a response with background: true can be cancelled; to stop this one, close its connection"
            raise invalid(reason, "response_id")
        return found

    async def delete(self, tenant: str, response: str) -> None:
        """Delete a response, and stop it first if it is still being written. Raises ApiError 404."""
        background = self.running(tenant, response)
        if background is not None:
            await background.stop()
        await self.store.run(lambda store: store.turns.delete(tenant, response))
        self._forget(response)

    @asynccontextmanager
    async def lock(self, tenant: str, conversation: str | None) -> AsyncGenerator[None, None]:
        """Lock a conversation against other changes, at all servers of the store. Raises ApiError if it is locked."""
        if conversation is None:
            yield
            return
        key = conversation_key(tenant, conversation)
        if key in self._locked:
            raise ApiError(BUSY, status=409, param="conversation", code=ConversationBusy.code)
        self._locked.add(key)
        self._keep_renewing()
        try:
            await self.store.run(lambda store: store.leases.lock(key))
            yield
        finally:
            self._locked.discard(key)
            with suppress(ApiError):  # The store failed. The lease ends by itself.
                await self.store.run(lambda store: store.leases.unlock(key))

    async def close(self) -> None:
        """Stop the background responses and close the store."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        for background in list(self._background.values()):
            await background.stop()
        if self.search is not None:
            await self.search.close()
        await asyncio.to_thread(self.store.close)


def _run(id: str, store: Store) -> None:
    store.turns.run(id)


def _renewed(ids: Sequence[str], store: Store) -> set[str]:
    return store.leases.renew(ids)


@dataclass(frozen=True, slots=True)
class Events:
    """Events of one background response."""

    last: int | None
    """Value of `sequence_number` of the last event so far; None if it is not known."""
    after: Callable[[int], AsyncGenerator[Event, None]]
    """Function that yields the events with a `sequence_number` above its argument."""


async def each(events: Iterable[Event]) -> AsyncGenerator[Event, None]:
    """Yield events that are already known, as an asynchronous generator."""
    for event in events:
        yield event


class Background:
    """A response that runs without waiting for a reader. Its events are kept for readers that follow it."""

    def __init__(self, writing: Writing) -> None:
        self.writing = writing
        self.events: list[Event] = []
        self.stored_running = False
        """Whether the store has recorded that the model began to answer."""
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    async def begun(self) -> None:
        """Wait until the engine has accepted the response and its beginning is stored. Raises ApiError."""
        prepared = asyncio.create_task(self.writing.prepared.wait())
        try:
            await asyncio.wait({prepared, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not self.writing.prepared.is_set():
                await self.task
        finally:
            prepared.cancel()

    async def follow(self, after: int = -1) -> AsyncGenerator[Event, None]:
        """Yield the past and future events with a sequence_number above `after`."""
        at = after + 1
        while True:
            while at < len(self.events):
                yield self.events[at]
                at += 1
            if self.task.done():
                return
            changed = asyncio.create_task(self._changed.wait())
            await asyncio.wait({changed, self.task}, return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()

    async def stop(self) -> None:
        """Cancel the response, unless it has ended or its end is being stored."""
        if not (self.writing.settled or self.task.cancelling()):
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def _add(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed.clear()

    async def _run(self) -> None:
        writing = self.writing
        try:
            async with aclosing(writing.events()) as events:
                async for event in events:
                    self._add(event)
        except asyncio.CancelledError:
            if writing.begun and not writing.settled:
                await writing.end(writing.shape.cancelled())
                for event in writing.shape.closing():
                    self._add(event)
        except Exception as error:
            refusal = error if isinstance(error, ApiError) else internal(error)
            if not writing.begun:
                raise refusal from None
            self._add(writing.shape.failed(refusal))
            await writing.end(writing.shape.response)
