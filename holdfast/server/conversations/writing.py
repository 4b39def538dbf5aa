"""Writing: one response of the Responses API, from its prompt to its stored turn."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from msgspec.structs import replace as replace_struct

from holdfast.core.types import FinishReason
from holdfast.engine.client.stream import Adoption, Delta, Stream, continued
from holdfast.lm.limits import RequestRefused
from holdfast.server.conversations.compaction import summarize, worth_compacting
from holdfast.server.conversations.items import (
    check_results,
    encode_compacted,
    messages,
    opening_messages,
    replacing,
    text_size,
)
from holdfast.server.conversations.memory import TurnMemory
from holdfast.server.conversations.progress import PASSING, Progress
from holdfast.server.conversations.prompt import Prompt, compose
from holdfast.server.conversations.protocol import Event, Response, ResponseRequest, ResponseShape, new_response
from holdfast.server.conversations.recipe import Recipe
from holdfast.server.conversations.server_tools import ServerTools
from holdfast.server.conversations.store import STORE_UNAVAILABLE, AsyncStore
from holdfast.server.conversations.stream_records import StreamRecord
from holdfast.server.conversations.values import GOOD, RUNNING, Context, Item, Turn
from holdfast.server.formats.parts import Part, Said
from holdfast.server.formats.reader import AnswerReader
from holdfast.server.formats.registry import Reading
from holdfast.server.logprobs import records, tokens_with_logprobs
from holdfast.server.protocol import ApiError, invalid
from holdfast.server.remote_tools.hub import RemoteTools
from holdfast.server.search import WebSearch
from holdfast.server.service import Answer, Lane, Service, check_length, refused
from holdfast.server.stored_prompts import StoredPrompts, filled

COMMIT_SECONDS = 15.0
"""Seconds for which an answer waits for a store that cannot be used. Then it fails."""
COMMIT_PAUSE_SECONDS = 0.5
"""Seconds between two tries."""


LEFT_ITEMS = ("function_call", "custom_tool_call", "mcp_approval_request")
"""Types of items with which the response ends, because the client must act."""


class Server(Protocol):
    """The part of the stateful API that one response uses."""

    service: Service
    store: AsyncStore
    search: WebSearch | None
    remote: RemoteTools | None
    progress: Progress
    prompts: StoredPrompts

    def lock(self, tenant: str, conversation: str | None, former: str = "") -> AbstractAsyncContextManager[None]:
        """Lock a conversation against other changes. Raises ApiError if any server but `former` locks it."""

    def running(self, tenant: str, response: str) -> object | None:
        """Return a background response that this server is writing; None if it writes no such response."""


@dataclass(slots=True)
class Written:
    """One answer of the model. A response whose tools the server runs has several."""

    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    reasoning: int = 0
    """Number of reasoning tokens in the answer."""
    reason: FinishReason = FinishReason.STOP


class Writing:
    """One response in progress. It is stored when it ends, so nothing is stored if the client leaves earlier."""

    def __init__(
        self, server: Server, wanted: ResponseRequest, tenant: str, lane: Lane | None, name: str | None, batch: str,
        recipe: Recipe | None = None, adopted: Adoption | None = None, id: str = "", memory: TurnMemory | None = None,
    ) -> None:  # fmt: skip
        """`recipe` is that of a response that an ended server began. `adopted` is its request if an engine holds it.

        `id` is the id of a new response; empty: a random one. `memory` holds turns that are not stored, this one
        included; None: they are forgotten.
        """
        self.memory = memory
        service = server.service
        service.check_model(wanted.model, tenant)
        self.server = server
        wanted, stored = self._with_prompt(service.settled(wanted, lane))
        self.input: list[Item] = recipe.input if recipe else wanted.items()
        (lane or service.lane).admission.check(1, tenant)
        self.wanted = wanted
        self.tenant = tenant
        self.batch = batch
        self.reading = Reading(service.format, wanted.toolset, wanted.template_options)
        self.opening = opening_messages(wanted.instructions, stored)
        """Messages that come first in the turn's prompt."""
        response = recipe.response if recipe else new_response(wanted, wanted.model, id)
        self.shape = ResponseShape(response, self.reading)
        self.tools = ServerTools(wanted, self.shape, server.search, server.remote)
        self.former = recipe.server if recipe else ""
        """Name of the server that began the response; empty: this one."""
        self.lasting = service.client.adopts and wanted.store and (wanted.background or wanted.stream)
        self.lasting = self.lasting and not (batch or wanted.search_results or self.tools.servers)
        self.lasting = self.lasting and not wanted.context_management
        """Whether another server can write the response if this one ends.

        The server's own calls cannot be repeated, nor can a summary.
        """
        self.recorded = self.lasting and not wanted.background
        """Whether the store has the recipe while the response is streamed."""
        self._recording: asyncio.Task[None] | None = None
        """Task that stores the recipe while the engine computes the first token."""
        self.recipe = b""
        if self.lasting:
            wanted = self.wanted = service.seeded(wanted)
            begun = Recipe(wanted, tenant, response, self.input, server.store.server)
            self.recipe = begun.encoded()
        self.context: Context | None = None
        """State that the turn builds on; None until it is found."""
        self.prompt = Prompt("", array("I"), 0)
        own = self.id if self.lasting else name
        self.answer = Answer(service, wanted, tenant, self._prepare, self.reading, 1, lane, own, batch)
        self.answer.id = self.id
        self.answer.hold(self.recipe, adopted)
        self.known = 0
        """Number of leading prompt tokens that came from the store: the minimum over all answers."""
        self.name = name
        self._most = wanted.max_output_tokens
        """Maximum number of tokens of all answers together; None: no such limit."""
        self._opened = False
        """Whether the first events were sent."""
        self._summarized = 0
        """Number of generated tokens that are summaries, which do not count toward the client's maximum."""
        self.prepared = asyncio.Event()
        """Set once the engine can take the response: its prompt is composed, and its beginning is stored if needed."""
        self.begun = recipe is not None and wanted.background
        """Whether the beginning of a background response is stored, so that clients can poll it."""
        self.settled = False
        """Whether the end of the response was sent to the store. It can then no longer be cancelled."""

    def _with_prompt(self, wanted: ResponseRequest) -> tuple[ResponseRequest, list[dict[str, str]]]:
        """Return the request with the version of the stored prompt that it names, and its messages. Raises ApiError."""
        if wanted.prompt is None:
            return wanted, []
        found = self.server.prompts.find(wanted.prompt.id, wanted.prompt.version)
        named = replace_struct(wanted.prompt, version=found.version)
        return wanted.changed(prompt=named), filled(found, named.variables or {})

    @property
    def id(self) -> str:
        """Id of the response."""
        return str(self.shape.response["id"])

    @property
    def found(self) -> Context:
        """State that the turn builds on, once it is found."""
        assert self.context is not None
        return self.context

    @property
    def running(self) -> bool:
        """Whether the model has begun to answer."""
        return bool(self.shape.response["status"] == "in_progress")

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the response's events as it is written. The last one holds the whole response. Raises ApiError."""
        async with (
            self._leaving_tools(),
            self.server.progress.noted(self.id),
            self._record(),
            self.server.lock(self.tenant, None if self.wanted.branch else self.wanted.conversation_id, self.former),
        ):
            if self.wanted.background:
                for event in self.shape.queued():
                    yield event
            reasoning = 0
            async with aclosing(self._begin_tools()) as events:
                async for event in events:
                    yield event
            while True:
                async with aclosing(self._compact()) as events:
                    async for event in events:
                        yield event
                written = Written()
                async with aclosing(self._round(written, self.answer.deltas())) as events:
                    async for event in events:
                        yield event
                reasoning += written.reasoning
                self.tools.note_answer()
                async with aclosing(self.tools.run(written.reason)) as events:
                    async for event in events:
                        yield event
                if not self.answer.goes_on:
                    break
                if not self._next_answer(self._go_on):
                    written.reason = FinishReason.LENGTH
                    break
            whole = self.shape.whole(written.reason, self.answer.usage, reasoning)
            await self._commit(whole, "".join(written.texts), written.tokens, written.reason)
            self.shape.response = whole
            for event in self.shape.closing():
                yield event

    @asynccontextmanager
    async def _leaving_tools(self) -> AsyncGenerator[None, None]:
        """End the connections to remote servers at the end of the response."""
        try:
            yield
        finally:
            self.tools.leave()

    def _open(self) -> Iterator[Event]:
        """Yield the first events, unless they were sent."""
        if not self._opened:
            self._opened = True
            yield from self.shape.opening()

    async def _compact(self) -> AsyncGenerator[Event, None]:
        """Yield the events of a compaction if the next prompt is beyond the client's threshold. Raises ApiError."""
        service = self.server.service
        threshold = self.wanted.compact_threshold(service.client.info.max_model_len)
        if threshold is None:
            return
        if self.context is None:
            self.context = await self._find_context()
        items = [*self.context.items, *self.input, *self.shape.output]
        with self.answer.lane.admission.admit(1, self.tenant):
            size = len(await self._compose(self.context, None))
        if size <= threshold or not worth_compacting(items):
            return
        await self._begin_background()
        for event in (*self._open(), *self.shape.compacting()):
            yield event
        before = self.answer.usage.completion_tokens
        summary = await summarize(service, self.wanted, self.opening, items, self.answer)
        self._summarized += self.answer.usage.completion_tokens - before
        yield self.shape.compacted(encode_compacted(replacing(summary, items)))

    async def _begin_tools(self) -> AsyncGenerator[Event, None]:
        """Yield the events of what remote servers do before the model's first answer. Raises ApiError.

        The response has then begun, so a prompt that is too long is a failed response.
        """
        if not self.tools.servers:
            self.tools.check_approvals(self.input)
            return
        self.context = await self._find_context()
        await self._begin_background()
        for event in self._open():
            yield event
        async with aclosing(self.tools.begin(self.context.items, self.input)) as events:
            async for event in events:
                yield event
        self._next_answer(self._prepare)

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
        stream = continued(self.server.service.client.text, adopted, self.answer.shown)
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

        A response whose tools the server runs has several answers.
        """
        reader: AnswerReader | None = None
        logprobs: list[dict[str, Any]] = []
        before = len(self.shape.output)
        async with aclosing(choices) as deltas:
            async for _, delta in deltas:
                if reader is None:
                    reader = self.reading.reader()
                    await self._recorded()
                    if not self._opened:
                        for event in (*self._open(), *self.shape.answering()):
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
                    left = any(item["type"] in LEFT_ITEMS for item in self.shape.output[before:])
                    self.answer.goes_on = self.shape.waits and delta.finish_reason is FinishReason.STOP and not left
        self.shape.add_logprobs(logprobs)

    def _next_answer(self, encode: Callable[[], Awaitable[Sequence[Sequence[int]]]]) -> bool:
        """Prepare the model's next answer, whose prompt is `encode`. Returns False if no tokens are left for it."""
        last, most = self.answer, self._most
        left = None if most is None else most - (last.usage.completion_tokens - self._summarized)
        if left is not None and left <= 0:
            return False
        reading = Reading(last.service.format, self.tools.toolset(), self.reading.options)
        name = self.name and f"{self.name}/{len(self.shape.output)}"
        self.wanted = self.wanted.changed(max_output_tokens=left)
        self.reading = self.shape.reading = reading
        self.answer = Answer(last.service, self.wanted, self.tenant, encode, reading, 1, last.lane, name, self.batch)
        self.answer.usage, self.answer.conversation = last.usage, last.conversation
        self.answer.sent, self.answer.id = last.sent, self.id
        return True

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
        if self.context is None:
            self.context = await self._find_context()
        if self.context.parent is not None and most is not None and not self.wanted.branch:
            replaced = self.server.service.answered.follow(self.tenant, self.context.parent, self.id)
            self.answer.supersede([replaced] if replaced else [])
        self.answer.conversation = self.context.thread or self.wanted.conversation_id or ""
        return await self._compose(self.context, most)

    async def _compose(self, known: Context, most: int | None) -> Prompt:
        """Compose the prompt of all items, this response's included. `known` may hold its leading tokens."""
        service, before = self.server.service, self.found
        items = [*before.items, *self.input, *self.shape.output]
        if not (items or self.opening):
            raise invalid("input is missing: there is nothing to answer", "input")
        try:
            text, wanted = service.client.text, self.wanted
            size = before.size + text_size(self.opening, self.input)

            def build(kept: Sequence[dict[str, Any]]) -> Prompt:
                return compose(text, self.reading.render(text, kept), known, most)

            def work() -> Prompt:
                said = messages(self.opening, items)
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
        await self._begin_background()
        if self.recorded and not self.former:
            record = StreamRecord(self.id, self.tenant, self.recipe, self.found.parent)
            self._recording = asyncio.create_task(self.server.progress.begin(record))
        self.prepared.set()
        return [self.prompt.tokens]

    async def _begin_background(self) -> None:
        """Store the beginning of a background response, so that clients can poll it."""
        if self.wanted.background and not self.begun:
            await self._keep(replace(self._turn(self.shape.response), recipe=self.recipe))
            self.begun = True
            self.prepared.set()

    async def _go_on(self) -> list[Sequence[int]]:
        """Compose the prompt with the results of calls, reusing known tokens. Returns its tokens."""
        service = self.server.service
        known = self.prompt.answered(service.client.text, "", (), FinishReason.LENGTH)
        context = replace(self.found, tokens=known.tokens, characters=known.characters, digest=known.digest)
        self.prompt = await self._compose(context, service.client.info.max_model_len)
        self.known = min(self.known, self.prompt.known)
        check_length(len(self.prompt.tokens), service.client, self.wanted)
        return [self.prompt.tokens]

    async def _find_context(self) -> Context:
        """Find the state that the turn builds on. Raises ApiError, also if a result in the input has no call."""
        context = await self._stored_context()
        check_results(context.items, self.input)
        return context

    async def _stored_context(self) -> Context:
        store, tenant = self.server.store, self.tenant
        previous, conversation = self.wanted.previous_response_id, self.wanted.conversation_id
        if self.wanted.branch and self.begun:  # The conversation may have another end now.
            return await store.read(lambda store: store.turns.context_before(self.id), "response_id")
        if conversation is not None:
            return await store.read(lambda store: store.conversations.context(tenant, conversation), "conversation")
        if previous is None:
            return Context()
        if self.memory is not None and (kept := self.memory.find(previous)) is not None:
            if not self.wanted.store:
                return kept
            self.input = [*kept.items, *self.input]  # The store does not have them.
            return replace(kept, items=())
        try:
            context = await store.read(lambda store: store.turns.context(tenant, previous))
        except ApiError as error:
            if error.status != 404:
                raise
            reason = f"Previous response with id '{previous[:64]}' not found."  # Clients look for OpenAI's words.
            raise invalid(reason, "previous_response_id", "previous_response_not_found") from None
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
            response=response, tenant=self.tenant, input=self.input, context=self.context or Context(),
            conversation=self.wanted.conversation_id, branch=self.wanted.branch,
            visible=self.wanted.store, recorded=self.recorded,
        )  # fmt: skip

    async def _commit(self, whole: Response, answer: str, tokens: list[int], reason: FinishReason) -> None:
        """Store the whole turn, with its items and raw tokens, in one transaction.

        While the store cannot be used, this tries again for COMMIT_SECONDS, so a short outage costs no answer. If the
        answer has several parts, its tokens are not stored, because the template renders the parts differently
        from the generated text.
        """
        stored = self.wanted.store or self.wanted.conversation is not None
        if not stored and self.memory is None:
            return
        said = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
        known = self.prompt.answered(
            self.server.service.client.text, answer, tokens if said == [answer] else [], reason
        )
        if not stored and self.memory is not None:
            items = [*self.found.items, *self.input, *whole["output"]]
            context = Context(items=items, tokens=known.tokens, characters=known.characters, digest=known.digest)
            self.memory.keep(self.id, context)
            return
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
        await self.server.store.commit(turn, begun=self.begun)

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
