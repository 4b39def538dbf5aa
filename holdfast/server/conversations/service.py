"""The stateful API: responses that run while the client waits, or in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.engine.client.stream import Adoption
from holdfast.server.conversations.items import MOST_TOKENS, SUMMARIZE, new_item
from holdfast.server.conversations.leases import BUSY, RENEW_SECONDS, conversation_key
from holdfast.server.conversations.memory import TurnMemory
from holdfast.server.conversations.progress import PASSING, Progress
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
from holdfast.server.conversations.recipe import Recipe
from holdfast.server.conversations.store import AsyncStore, Store
from holdfast.server.conversations.values import GOOD, RUNNING, Context, ConversationBusy, Turn
from holdfast.server.conversations.writing import Writing
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.remote_tools.hosts import AllowedHosts
from holdfast.server.remote_tools.hub import RemoteTools
from holdfast.server.replies import RequestUsage, encode
from holdfast.server.search import WebSearch
from holdfast.server.service import Lane, Service, internal
from holdfast.server.stored_prompts import StoredPrompts

log = logging.getLogger("holdfast.server")

POLL_SECONDS = 0.25
"""Seconds between two checks whether another server's response has ended."""
SWEEP_SECONDS = 5.0
"""Seconds between two looks for responses of servers that have ended. The end of a server is mostly known at once."""
BUSY_SECONDS = 0.3
"""Seconds after which a conversation is tried again whose server may have ended just now."""
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
        hosts, seconds = service.config.mcp_allow, service.config.mcp_seconds
        self.prompts = StoredPrompts.read(service.config.prompts)
        self.remote = RemoteTools(AllowedHosts.read(hosts), seconds) if hosts else None
        self.progress = Progress(store, self._keep_renewing)
        self._locked: set[str] = set()
        """Keys of the leases of conversations that this server changes now."""
        self._background: dict[str, Background] = {}
        self._ended: dict[str, tuple[list[Event], int]] = {}
        """Events and size in bytes of recently ended background responses by id, the oldest first."""
        self._kept_events = self._kept_bytes = 0
        self._renewing: asyncio.Task[None] | None = None
        """Task that renews this server's leases. It ends when there are none."""
        self._sweeping: asyncio.Task[None] | None = None
        """Task that takes over the responses of servers that have ended."""
        self._servers_changed = asyncio.Event()
        self._released: set[str] = set()
        """Servers that have ended and whose leases were released."""
        self._adopting = asyncio.Lock()
        """Held while a response is adopted, so that no other request for it finds it neither here nor there."""

    def write(
        self, wanted: ResponseRequest, tenant: str, lane: Lane | None = None, name: str | None = None, batch: str = "",
        id: str = "", memory: TurnMemory | None = None,
    ) -> Writing:  # fmt: skip
        """Prepare a response; it runs when its events are iterated. Raises ApiError for errors known before it runs.

        `name` is the prefix of its request ids in the engine, and `batch` the batch job that it is a line of. `id` is
        the response's id; empty: a random one. `memory` holds turns that are not stored, if there is a place for them.
        """
        return Writing(self, wanted, tenant, lane, name, batch, id=id, memory=memory)

    async def start(self, wanted: ResponseRequest, tenant: str, id: str = "") -> Background:
        """Begin a background response. Returns once the engine has accepted it. Raises ApiError."""
        await self.service.check_awake()
        writing = self.write(wanted, tenant, id=id)
        background = Background(writing)
        try:
            await background.begun()
        except BaseException:
            background.task.cancel()
            raise
        self._keep(background)
        return background

    def _keep(self, background: Background) -> None:
        """Keep a response that runs in the background, until it ends."""
        self._background[background.writing.id] = background
        self._keep_renewing()
        background.task.add_done_callback(lambda task: self._end(background))

    def begin_takeovers(self) -> None:
        """Take over the responses of servers that end, from now on, if engines outlive their servers."""
        if self.service.client.adopts:
            self.service.client.introduce(self.store.server, self._servers_changed.set)
            self._sweeping = asyncio.create_task(self._take_over())

    async def _take_over(self) -> None:
        """Take over the responses that no server writes, at the end of each server and every few seconds."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._servers_changed.wait(), SWEEP_SECONDS)
            self._servers_changed.clear()
            with suppress(ApiError):  # The store failed, and has logged the reason.
                await self._release_gone()
                await self.progress.settle()
                await self.store.run(_drop_old)
                for response, recipe in await self.store.read(lambda store: store.leases.left()):
                    await self._take_over_one(response, recipe)

    async def _release_gone(self) -> None:
        """Let the leases of servers end that the engines report as ended."""
        gone = self.service.client.gone
        for server in gone - self._released:
            await self.store.run(partial(_release, server))
        self._released = gone

    async def _take_over_one(self, response: str, data: bytes) -> None:
        """Write a response that no server writes now, unless another server is faster or this one is full."""
        try:
            recipe = Recipe.read(data)
            writing = Writing(self, recipe.wanted, recipe.tenant, None, None, "", recipe)
        except (ValueError, ApiError) as error:
            log.warning("response %s of an ended server is not taken over now: %s", response, error)
            return
        if response in self._background or not await self.store.run(partial(_taken, response)):
            return
        writing.adopt(await self.service.client.adopt(recipe.tenant, response))
        log.warning("response %s of an ended server goes on here", response)
        self._keep(Background(writing))

    async def _adopt(self, tenant: str, response: str) -> Background | None:
        """Continue a streamed response whose server has ended and that is not stored; None if nobody knows it.

        If no engine holds its request, it is computed again, with the same seed. Raises ApiError if this server cannot
        take it now, or if a server that runs writes it.
        """
        client = self.service.client
        async with self._adopting:
            if not client.adopts or (running := self.running(tenant, response)) is not None:
                return running if client.adopts else None
            adopted = await client.adopt(tenant, response)
            if adopted is None or not adopted.yours:
                return await self._compute_again(tenant, response)
            try:
                recipe = Recipe.read(adopted.note)
                if recipe.wanted.background:  # Its client has deleted it.
                    client.give_up(adopted)
                    return None
                await self.progress.take(tenant, response, ended=True)
                background = Background(self._written_before(recipe, adopted))
            except BaseException:
                client.give_up(adopted)
                raise
            self._keep(background)
            return background

    async def _compute_again(self, tenant: str, response: str) -> Background | None:
        """Compute a streamed response again whose server and engine have ended; None without its recipe.

        Raises ApiError if this server cannot take it now, or if a server that runs writes it.
        """
        if (record := await self.store.read(lambda store: store.streams.find(tenant, response))) is None:
            return None
        self.progress.check(response)
        try:
            recipe = Recipe.read(record.recipe)
        except ValueError as error:  # A server of another version wrote it.
            log.warning("response %s of an ended server is not computed again: %s", response, error)
            return None
        writing = Writing(self, recipe.wanted, recipe.tenant, None, None, "", recipe)
        await self._release_gone()
        if not await self.progress.take(tenant, response):
            return None
        if (conversation := recipe.wanted.conversation_id) is not None:
            context = await self.store.read(lambda store: store.conversations.context(tenant, conversation))
            if context.parent != record.parent:  # Its client has gone on without it.
                await self.progress.drop(response)
                return None
        log.warning("response %s of an ended server is computed again", response)
        self._keep(background := Background(writing))
        return background

    def _written_before(self, recipe: Recipe, adopted: Adoption) -> Writing:
        """Return a response that another server began, with the request that an engine holds. Raises ApiError."""
        return Writing(self, recipe.wanted, recipe.tenant, None, None, "", recipe, adopted)

    async def _exact_events(self, tenant: str, stored: Response) -> list[Event]:
        """Return the events of an ended response as they were sent first; none if no engine holds its tokens."""
        client = self.service.client
        if not client.adopts or stored["status"] not in GOOD:
            return []
        adopted = await client.adopt(tenant, stored["id"])
        if adopted is None:
            return []
        client.give_up(adopted)
        with suppress(ValueError, ApiError):
            writing = self._written_before(Recipe.read(adopted.note), adopted)
            return [event async for event in writing.again(adopted, stored)]
        return []

    def _keep_renewing(self) -> None:
        """Begin to renew leases, unless this is in progress."""
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        """Renew this server's leases, and stop the background responses that other servers cancelled."""
        while self._background or self._locked or self.progress.recorded:
            await asyncio.sleep(RENEW_SECONDS)
            with suppress(ApiError):  # The store failed, and has logged the reason.
                for begun in [*self._background.values()]:
                    if begun.writing.running and not begun.stored_running:
                        await self.store.run(partial(_run, begun.writing.id))
                        begun.stored_running = True
                stored = [id for id, begun in self._background.items() if begun.writing.begun]
                for id in await self.store.run(partial(_renewed, [*stored, *self._locked, self.store.server])):
                    if (background := self._background.get(id)) is not None:
                        await background.stop()

    async def until_ended(self, tenant: str, response: Response) -> Response:
        """Wait for the end of a response, whichever server writes it. Raises ApiError."""
        while response["status"] in RUNNING:
            await asyncio.sleep(POLL_SECONDS)
            response = await self.retrieve(tenant, response["id"])
        return response

    async def _elsewhere(self, tenant: str, response: Response, after: int) -> AsyncGenerator[Event, None]:
        """Yield the events above `after` of a response that another server writes. All text comes at the end.

        If that server ends and this one takes over, the events come from here.
        """
        for event in replay_begun(response):
            if event["sequence_number"] > after:
                yield event
                after = event["sequence_number"]
        while response["status"] in RUNNING:
            await asyncio.sleep(POLL_SECONDS)
            if (background := self.running(tenant, response["id"])) is not None:
                async for event in background.follow(after):
                    yield event
                return
            response = await self.retrieve(tenant, response["id"])
        exact = await self._exact_events(tenant, response)
        for event in exact[after + 1 :] if exact else replay(response, after):
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

    async def repeated(self, tenant: str, response: str) -> Response | None:
        """Return the response of an earlier attempt of a request; None if there was none, or if it left nothing.

        Raises ApiError 409 if that attempt is in progress.
        """
        if self.running(tenant, response) is None:
            self.progress.check(response)
        try:
            return await self.retrieve(tenant, response)
        except ApiError as error:
            if error.status != 404:
                raise
            return None

    async def events(self, tenant: str, response: str, *, ended: bool = False) -> Events:
        """Return the events of a response that runs in the background, or whose tokens an engine holds.

        With `ended`, also those of any response that has ended, with all text at once. Raises ApiError: 404, or 400 if
        it is none of these.
        """
        stored = await self.retrieve(tenant, response)
        background, (kept, _) = self.running(tenant, response), self._ended.get(response, (None, 0))
        if background is None and stored["status"] in RUNNING:
            return Events(None, lambda after: self._elsewhere(tenant, stored, after))
        if background is not None:
            known = not background.writing.former  # Its client may have seen events that do not exist here yet.
            return Events(len(background.events) - 1 if known else None, background.follow)
        if kept is not None:
            return Events(len(kept) - 1, lambda after: each(kept[after + 1 :]))
        if exact := await self._exact_events(tenant, stored):
            return Events(len(exact) - 1, lambda after: each(exact[after + 1 :]))
        if not (stored["background"] or ended):
            reason = "only a response with background: true can be streamed again, or a streamed one soon after its end"
            raise invalid(reason, "stream")
        return Events(None, lambda after: each(replay(stored, after)))

    async def count(self, wanted: InputTokensRequest, tenant: str) -> int:
        """Return the number of prompt tokens that a turn would have. Raises ApiError."""
        wanted = wanted.changed(model=wanted.model or self.service.client.info.model, background=False)
        writing = self.write(wanted.without_remote_servers(), tenant)
        with self.service.lane.admission.admit(1, tenant):
            return len((await writing.compose(most=None)).tokens)

    async def compact(self, wanted: CompactRequest, tenant: str, usage: RequestUsage) -> dict[str, Any]:
        """Replace a turn's input and its context by the user's own items and a summary. Raises ApiError.

        The tokens of the summary are added to `usage`.
        The result is stored as a response without a parent, so that a turn can continue from the response's id.
        """
        most = wanted.max_output_tokens or max(1, min(MOST_TOKENS, self.service.client.info.max_model_len // 4))
        plain = wanted.without_remote_servers().changed(store=False, max_output_tokens=most)
        writing = self.write(plain, tenant)
        if not writing.input and wanted.previous_response_id is None:
            raise invalid("input and previous_response_id are missing: there is nothing to compact", "input")
        given = list(writing.input)
        writing.input.append(new_item("user", SUMMARIZE))
        try:
            response = await writing.whole()
        finally:
            usage.include(writing.answer.usage)
        made = compacted(response, [*writing.found.items, *given])
        if wanted.store:
            *said, summary = made["output"]
            stored = response | {"store": True, "output": [summary]}
            await self.store.commit(Turn(response=stored, tenant=tenant, input=said, context=Context()))
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
        try:
            stored, elsewhere = await self.store.read(lambda store: store.turns.response(tenant, response))
        except ApiError as error:
            background = await self._adopt(tenant, response) if error.status == 404 else None
            if background is None:
                raise
            return background.writing.shape.response
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
            found = await self.until_ended(tenant, found)
        if not found["background"]:
            reason = "Cannot cancel a synchronous response: it needs background: true; to stop it, close its connection"
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
    async def lock(self, tenant: str, conversation: str | None, former: str = "") -> AsyncGenerator[None, None]:
        """Lock a conversation against other changes, at all servers of the store. Raises ApiError if it is locked.

        A `former` server, which has ended, loses its lock.
        """
        if conversation is None:
            yield
            return
        key = conversation_key(tenant, conversation)
        if key in self._locked:
            busy = ConversationBusy
            raise ApiError(BUSY, status=409, param="conversation", code=busy.code, retry_after=busy.retry_after)
        self._locked.add(key)
        self._keep_renewing()
        try:
            await self._take_lock(key, former)
            yield
        finally:
            self._locked.discard(key)
            with suppress(ApiError):  # The store failed. The lease ends by itself.
                await self.store.run(lambda store: store.leases.unlock(key))

    async def _take_lock(self, key: str, former: str) -> None:
        """Take a conversation's lease. Raises ApiError if another server holds it.

        If that server ended just now, the engines report it within moments, so this tries again once.
        """
        try:
            await self.store.run(lambda store: store.leases.lock(key, former))
        except ApiError as error:
            if error.code != ConversationBusy.code or not self.service.client.adopts:
                raise
            await asyncio.sleep(BUSY_SECONDS)
            await self.store.run(lambda store: store.leases.lock(key, former))

    async def close(self) -> None:
        """Stop the background responses and close the store."""
        tasks = [task for task in (self._renewing, self._sweeping) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for background in list(self._background.values()):
            await background.stop()
        if self.search is not None:
            await self.search.close()
        if self.remote is not None:
            await self.remote.close()
        await asyncio.to_thread(self.store.close)


def _run(id: str, store: Store) -> None:
    store.turns.run(id)


def _release(server: str, store: Store) -> None:
    store.leases.release(server)


def _drop_old(store: Store) -> None:
    store.streams.drop_old()


def _taken(response: str, store: Store) -> bool:
    return store.leases.take_over(response)


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
            try:
                await asyncio.wait({changed, self.task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
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
            if not (writing.begun or writing.former):
                raise refusal from None
            if writing.begun and writing.lasting and refusal.code in PASSING:
                await writing.leave()
                return
            self._add(writing.shape.failed(refusal))
            if writing.begun:
                await writing.end(writing.shape.response)
