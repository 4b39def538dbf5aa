"""Writing: one response of the Responses API, from its prompt to its stored turn."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from holdfast.core.types import FinishReason
from holdfast.engine.client.client import Adoption, Delta, Stream, continued
from holdfast.lm.limits import RequestRefused
from holdfast.server.conversations.items import messages, searched_item, text_size
from holdfast.server.conversations.progress import PASSING, Progress
from holdfast.server.conversations.prompt import Prompt, compose
from holdfast.server.conversations.protocol import Event, Response, ResponseRequest, ResponseShape, new_response
from holdfast.server.conversations.recipe import Recipe
from holdfast.server.conversations.store import STORE_UNAVAILABLE, AsyncStore
from holdfast.server.conversations.stream_records import StreamRecord
from holdfast.server.conversations.values import GOOD, RUNNING, Context, Item, Turn
from holdfast.server.formats.parts import Part, Said
from holdfast.server.formats.reader import AnswerReader
from holdfast.server.formats.registry import Reading
from holdfast.server.logprobs import records, tokens_with_logprobs
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.search import MOST_SEARCHES, SEARCH_KINDS, SEARCH_TOOL, SearchFailed, WebSearch, read_query
from holdfast.server.service import Answer, Lane, Service, check_length, refused

COMMIT_SECONDS = 15.0
"""Seconds for which an answer waits for a store that cannot be used. Then it fails."""
COMMIT_PAUSE_SECONDS = 0.5
"""Seconds between two tries."""


class Server(Protocol):
    """The part of the stateful API that one response uses."""

    service: Service
    store: AsyncStore
    search: WebSearch | None
    progress: Progress

    def lock(self, tenant: str, conversation: str | None, former: str = "") -> AbstractAsyncContextManager[None]:
        """Lock a conversation against other changes. Raises ApiError if any server but `former` locks it."""

    def running(self, tenant: str, response: str) -> object | None:
        """Return a background response that this server is writing; None if it writes no such response."""


@dataclass(slots=True)
class Written:
    """One answer of the model. A response that searches the web has several."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasoning: int = 0
    """Number of reasoning tokens in the answer."""
    reason: FinishReason = FinishReason.STOP


class Writing:
    """One response in progress. It is stored when it ends, so nothing is stored if the client leaves earlier."""

    def __init__(
        self, server: Server, wanted: ResponseRequest, tenant: str, lane: Lane | None, name: str | None, batch: str,
        recipe: Recipe | None = None, adopted: Adoption | None = None, id: str = "",
    ) -> None:  # fmt: skip
        """`recipe` is that of a response that an ended server began. `adopted` is its request if an engine holds it.

        `id` is the id of a new response; empty: a random one.
        """
        service = server.service
        service.check_model(wanted.model, tenant)
        wanted = service.settled(wanted, lane)
        self.input: list[Item] = recipe.input if recipe else wanted.items()
        (lane or service.lane).admission.check(1, tenant)
        self.server = server
        self.wanted = wanted
        self.tenant = tenant
        self.batch = batch
        self.reading = Reading(service.format, wanted.toolset, wanted.template_options)
        if wanted.search_results and server.search is None:
            place = next(f"tools[{at}].type" for at, tool in enumerate(wanted.tools) if tool["type"] in SEARCH_KINDS)
            reason = f"{place} is web_search, and this server has no search engine (see --web-search)"
            raise invalid(reason, place, "unsupported_parameter")
        self.searched = 0
        """Number of web searches so far."""
        response = recipe.response if recipe else new_response(wanted, wanted.model, id)
        self.shape = ResponseShape(response, self.reading)
        self.former = recipe.server if recipe else ""
        """Name of the server that began the response; empty: this one."""
        self.lasting = service.client.adopts and wanted.store and (wanted.background or wanted.stream)
        self.lasting = self.lasting and not (batch or wanted.search_results)
        """Whether another server can write the response if this one ends. A web search cannot be repeated."""
        self.recorded = self.lasting and not wanted.background
        """Whether the store has the recipe while the response is streamed."""
        self._recording: asyncio.Task[None] | None = None
        """Task that stores the recipe while the engine computes the first token."""
        self.recipe = b""
        if self.lasting:
            wanted = self.wanted = service.seeded(wanted)
            begun = Recipe(wanted, tenant, response, self.input, server.store.server)
            self.recipe = begun.encoded()
        self.context = Context()
        self.prompt = Prompt("", array("I"), 0)
        own = self.id if self.lasting else name
        self.answer = Answer(service, wanted, tenant, self._prepare, self.reading, 1, lane, own, batch)
        self.answer.id = self.id
        self.answer.hold(self.recipe, adopted)
        self.known = 0
        """Number of leading prompt tokens that came from the store: the minimum over all answers."""
        self.name = name
        self.prepared = asyncio.Event()
        """Set once the engine can take the response: its prompt is composed, and its beginning is stored if needed."""
        self.begun = recipe is not None and wanted.background
        """Whether the beginning of a background response is stored, so that clients can poll it."""
        self.settled = False
        """Whether the end of the response was sent to the store. It can then no longer be cancelled."""

    @property
    def id(self) -> str:
        """Id of the response."""
        return str(self.shape.response["id"])

    @property
    def running(self) -> bool:
        """Whether the model has begun to answer."""
        return bool(self.shape.response["status"] == "in_progress")

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the response's events as it is written. The last one holds the whole response. Raises ApiError."""
        async with (
            self.server.progress.noted(self.id),
            self._record(),
            self.server.lock(self.tenant, None if self.wanted.branch else self.wanted.conversation_id, self.former),
        ):
            if self.wanted.background:
                for event in self.shape.queued():
                    yield event
            reasoning = 0
            while True:
                written = Written()
                async with aclosing(self._round(written, self.answer.deltas())) as events:
                    async for event in events:
                        yield event
                reasoning += written.reasoning
                async with aclosing(self._search(written.reason)) as events:
                    async for event in events:
                        yield event
                if not self.answer.goes_on:
                    break
                if not self._next_round():
                    written.reason = FinishReason.LENGTH
                    break
            whole = self.shape.whole(written.reason, self.answer.usage, reasoning)
            await self._commit(whole, "".join(written.texts), written.tokens, written.reason)
            self.shape.response = whole
            for event in self.shape.closing():
                yield event

    @asynccontextmanager
    async def _record(self) -> AsyncGenerator[None, None]:
        """Give up the record of a stream that cannot be written to its end.

        It is removed, unless the error passes or this server ends: then a server may write the response yet.
        """
        try:
            yield
        except BaseException as error:
            if self._recording is not None:
                await asyncio.gather(self._recording, return_exceptions=True)
            if self.recorded and (self._recording or self.former):
                passes = isinstance(error, ApiError) and error.code in PASSING
                passes = passes or self.server.service.client.dead.is_set()
                progress = self.server.progress
                await (progress.leave(self.id) if passes else progress.drop(self.id))
            raise

    async def _recorded(self) -> None:
        """Wait until the store has the recipe. Raises ApiError if another server writes the response.

        A store that fails delays nothing: the response then ends with its server.
        """
        if self._recording is not None:
            try:
                await self._recording
            except ApiError as error:
                if error.code != STORE_UNAVAILABLE:
                    raise

    async def again(self, adopted: Adoption, stored: Response) -> AsyncGenerator[Event, None]:
        """Yield the events of a response that has ended, from its tokens. `stored` is its final state.

        Yields nothing if the tokens are not complete.
        """
        stream = continued(self.server.service.client.text, adopted, self.reading.shown)
        stream.take(adopted.output, 0.0, 0.0)
        if stream.finish_reason is None:
            return
        if self.wanted.background:
            for event in self.shape.queued():
                yield event
        async with aclosing(self._round(Written(), deltas_of(stream))) as events:
            async for event in events:
                yield event
        self.shape.response = stored
        for event in self.shape.closing():
            yield event

    async def _round(
        self, written: Written, choices: AsyncGenerator[tuple[int, Delta], None]
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one answer of the model, and record the answer in `written`.

        A response that searches the web has several answers.
        """
        reader: AnswerReader | None = None
        logprobs: list[dict[str, Any]] = []
        before = len(self.shape.output)
        async with aclosing(choices) as deltas:
            async for _, delta in deltas:
                if reader is None:
                    reader = self.reading.reader()
                    await self._recorded()
                    for event in self.shape.opening() if not before else ():
                        yield event
                written.tokens += delta.tokens
                written.texts.append(delta.text)
                if delta.logprobs:
                    logprobs += records(self.server.service.client.text, tokens_with_logprobs(delta))
                thought = reader.thinking
                for part in self._parts(reader, delta):
                    for event in self.shape.part(part, logprobs):
                        yield event
                    logprobs = [] if isinstance(part, Said) else logprobs
                if thought or reader.thinking:
                    written.reasoning += len(delta.tokens)
                if delta.finish_reason is not None:
                    written.reason = delta.finish_reason
                    calls = any(item["type"] == "function_call" for item in self.shape.output[before:])
                    searched = bool(self.shape.searches) and delta.finish_reason is FinishReason.STOP
                    self.answer.goes_on = searched and not calls
        self.shape.add_logprobs(logprobs)

    async def _search(self, reason: FinishReason) -> AsyncGenerator[Event, None]:
        """Yield the events of the web searches that the last answer asked for.

        A search fails if the answer was cut short, or if no more searches are allowed.
        """
        for at, arguments in list(self.shape.searches.items()):
            query, results = "", None
            with suppress(SearchFailed):
                if reason is FinishReason.STOP and self._may_search:
                    self.searched += 1
                    query = read_query(arguments)
                    yield self.shape.searching(at)
                    assert self.server.search is not None
                    results = await self.server.search.ask(query, self.wanted.search_results)
            for event in self.shape.searched(at, searched_item(self.shape.output[at], query, results)):
                yield event

    def _next_round(self) -> bool:
        """Prepare the model's next answer, after the search results. Returns False if no tokens are left for it."""
        wanted, last = self.wanted, self.answer
        most = wanted.max_output_tokens
        left = None if most is None else most - last.usage.completion_tokens
        if left is not None and left <= 0:
            return False
        toolset = self.reading.toolset
        assert toolset is not None
        toolset = toolset.after_call(None if self._may_search else SEARCH_TOOL)
        reading = Reading(last.service.format, toolset, self.reading.options)
        name = self.name and f"{self.name}/{len(self.shape.output)}"
        self.wanted = wanted.changed(max_output_tokens=left)
        self.reading = self.shape.reading = reading
        self.answer = Answer(
            last.service, self.wanted, self.tenant, self._go_on, reading, 1, last.lane, name, self.batch
        )
        self.answer.usage, self.answer.conversation = last.usage, last.conversation
        self.answer.sent, self.answer.id = last.sent, self.id
        return True

    @property
    def _may_search(self) -> bool:
        return self.searched < min(MOST_SEARCHES, self.wanted.max_tool_calls or MOST_SEARCHES)

    def _parts(self, reader: AnswerReader, delta: Delta) -> Sequence[Part]:
        if self.reading.plain:
            return [Said(delta.text)] if delta.text else []
        return reader.push(delta.text, last=delta.finish_reason is not None)

    async def whole(self) -> Response:
        """Write the response to its end and return it. Raises ApiError."""
        async with aclosing(self.events()) as events:
            async for _ in events:
                pass
        return self.shape.response

    def failed(self, error: ApiError) -> Event:
        """Return the event that ends the stream after an error. Counts the request as failed."""
        self.answer.ended("failed")
        return self.shape.failed(error)

    async def compose(self, most: int | None) -> Prompt:
        """Find the context of the response and compose its prompt of at most `most` tokens. Raises ApiError."""
        self.context = await self._find_context()
        if self.context.parent is not None and most is not None and not self.wanted.branch:
            replaced = self.server.service.answered.follow(self.tenant, self.context.parent, self.id)
            self.answer.supersede([replaced] if replaced else [])
        self.answer.conversation = self.context.thread or self.wanted.conversation_id or ""
        return await self._compose(self.context, most)

    async def _compose(self, known: Context, most: int | None) -> Prompt:
        """Compose the prompt of all items, this response's included. `known` may hold its leading tokens."""
        service = self.server.service
        items = [*self.context.items, *self.input, *self.shape.output]
        if not (items or self.wanted.instructions):
            raise invalid("input is missing: there is nothing to answer", "input")
        try:
            text, wanted = service.client.text, self.wanted
            size = self.context.size + text_size(self.wanted.instructions or "", self.input)

            def build(kept: Sequence[dict[str, Any]]) -> Prompt:
                return compose(text, self.reading.render(text, kept), known, most)

            def work() -> Prompt:
                said = messages(wanted.instructions, items)
                if not said:
                    raise invalid("input is missing: there is nothing to answer", "input")
                if wanted.truncation == "auto":
                    return service.truncation.compose(said, wanted.most_tokens, build, self.reading.toolset)
                return build(said)

            return await service.off_loop(size, work, renders=True, lane=self.answer.lane)
        except RequestRefused as error:
            raise refused(error, self.wanted, service.client) from None
        except ValueError as error:  # The chat template refuses these messages.
            raise invalid(str(error), "input") from None

    async def _prepare(self) -> list[Sequence[int]]:
        """Compose the prompt, and store the beginning of a background response. Returns the prompt's tokens."""
        service = self.server.service
        self.prompt = await self.compose(service.client.info.max_model_len)
        self.known = self.prompt.known
        check_length(len(self.prompt.tokens), service.client, self.wanted)
        if self.wanted.background and not self.begun:
            await self._keep(replace(self._turn(self.shape.response), recipe=self.recipe))
            self.begun = True
        if self.recorded and not self.former:
            record = StreamRecord(self.id, self.tenant, self.recipe, self.context.parent)
            self._recording = asyncio.create_task(self.server.progress.begin(record))
        self.prepared.set()
        return [self.prompt.tokens]

    async def _go_on(self) -> list[Sequence[int]]:
        """Compose the prompt with the search results, reusing known tokens. Returns its tokens."""
        service = self.server.service
        known = self.prompt.answered(service.client.text, "", (), FinishReason.LENGTH)
        context = replace(self.context, tokens=known.tokens, characters=known.characters, digest=known.digest)
        self.prompt = await self._compose(context, service.client.info.max_model_len)
        self.known = min(self.known, self.prompt.known)
        check_length(len(self.prompt.tokens), service.client, self.wanted)
        return [self.prompt.tokens]

    async def _find_context(self) -> Context:
        store, tenant = self.server.store, self.tenant
        previous, conversation = self.wanted.previous_response_id, self.wanted.conversation_id
        if self.wanted.branch and self.begun:  # The conversation may have another end now.
            return await store.read(lambda store: store.turns.context_before(self.id), "response_id")
        if conversation is not None:
            return await store.read(lambda store: store.conversations.context(tenant, conversation), "conversation")
        if previous is None:
            return Context()
        context = await store.read(lambda store: store.turns.context(tenant, previous), "previous_response_id")
        if context.status not in GOOD:
            lost = context.status in RUNNING and not (
                self.server.running(tenant, previous)
                or await store.read(lambda store: store.leases.elsewhere(previous))
            )
            status = "failed" if lost else context.status
            reason = f"the previous response is {status}; go on from one that is completed or incomplete"
            raise invalid(reason, "previous_response_id")
        return context

    def _turn(self, response: Response) -> Turn:
        return Turn(
            response=response, tenant=self.tenant, input=self.input, context=self.context,
            conversation=self.wanted.conversation_id, branch=self.wanted.branch,
            visible=self.wanted.store, recorded=self.recorded,
        )  # fmt: skip

    async def _commit(self, whole: Response, answer: str, tokens: list[int], reason: FinishReason) -> None:
        """Store the whole turn, with its items and raw tokens, in one transaction.

        While the store cannot be used, this tries again for COMMIT_SECONDS, so a short outage costs no answer. If the
        answer has several parts, its tokens are not stored, because the template renders the parts differently
        from the generated text.
        """
        if not self.wanted.store and self.wanted.conversation is None:
            return
        said = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
        known = self.prompt.answered(
            self.server.service.client.text, answer, tokens if said == [answer] else [], reason
        )
        self.settled = True
        turn = replace(
            self._turn(whole),
            tokens=known.tokens, known=self.known, characters=known.characters, digest=known.digest,
        )  # fmt: skip
        until = time.monotonic() + COMMIT_SECONDS
        while True:
            try:
                await self._keep(turn)
                return
            except ApiError as error:
                if error.code != STORE_UNAVAILABLE or time.monotonic() >= until:
                    raise
                await asyncio.sleep(COMMIT_PAUSE_SECONDS)

    async def _keep(self, turn: Turn) -> None:
        await self.server.store.run(lambda store: store.turns.commit(turn, begun=self.begun))

    def adopt(self, adopted: Adoption | None) -> None:
        """Continue the request of the server that began the response; None: no engine holds it, so it runs again."""
        self.answer.hold(self.recipe, adopted)

    async def leave(self) -> None:
        """Leave the response to another server. Its beginning is stored."""
        self.settled = True
        with suppress(ApiError):  # The store failed. The lease ends by itself.
            await self.server.store.run(lambda store: store.leases.leave(self.id))

    async def end(self, response: Response) -> None:
        """Store the final state of a background response that failed or was cancelled.

        Stores nothing if the client has deleted the response.
        """
        self.shape.response = response
        self.settled = True
        with suppress(ApiError):  # The client has deleted it meanwhile.
            await self._keep(self._turn(response))


async def deltas_of(stream: Stream) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield the deltas of a stream that has ended, as those of the first choice."""
    while not stream.given:
        yield 0, await stream.next()
