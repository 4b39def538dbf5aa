"""Routes that generate: OpenAI's completions, embeddings and responses, and Anthropic's messages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from msgspec.structs import replace as replace_struct

from holdfast.lm.limits import RequestRefused
from holdfast.server.chats import Keeper, StoredChats, Unkept, new_id
from holdfast.server.conversations.protocol import (
    CompactRequest,
    Event,
    InputTokensRequest,
    ResponseRequest,
    error_event,
    event_bytes,
)
from holdfast.server.conversations.service import Responses
from holdfast.server.embeddings import VectorRequest, embed
from holdfast.server.messages.protocol import MessagesRequest, TokensRequest
from holdfast.server.messages.replies import MessageShape
from holdfast.server.messages.replies import error_event as message_error
from holdfast.server.protocol import (
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    SampledRequest,
    invalid,
)  # fmt: skip
from holdfast.server.replies import DONE, ChatShape, RequestUsage, Shape, TextShape, event
from holdfast.server.routes.edge import given_id
from holdfast.server.routes.http import (
    JSON,
    described,
    page,
    query_integer,
    read_parsed,
    start_stream,
    tenant_of,
    while_connected,
    wishes,
)  # fmt: skip
from holdfast.server.routes.repeats import REPEATED, id_of
from holdfast.server.service import Answer, Service, internal, refused
from holdfast.server.time_spent import spending

MOST_EVENTS = 999_999_999
"""Maximum `starting_after` if the number of a response's events is unknown."""


def add_completion_routes(app: FastAPI, service: Service, chats: StoredChats) -> None:
    """Add POST /v1/chat/completions and /v1/completions."""

    @app.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """One answer to a conversation; with `stream`, sent as it is written."""
        wanted = service.settled(await read_request(request, service, ChatRequest))
        answer = service.answer(wanted, tenant_of(request))
        # An id names one stored answer, so it is not the client's.
        id = new_id() if wanted.store else named_by(request, wanted.request_id)
        return await respond(request, answer, answer.shape(ChatShape, id), chats.keeper(answer.tenant, wanted))

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continuations of one or several prompts, given as text or token ids."""
        wanted = service.settled(await read_request(request, service, CompletionRequest))
        answer = service.answer(wanted, tenant_of(request))
        return await respond(request, answer, answer.shape(TextShape, named_by(request, wanted.request_id)), Unkept())


async def read_request(request: Request, service: Service, shape: type[Body]) -> Body:
    """Read and parse the request's body. A large body is parsed off the event loop. Raises ApiError.

    A deployment in the path of Azure's clients is the model, whatever the body names. A request without a model name is
    for the served model, as in vLLM.
    """
    with spending("read"):
        wanted = await read_parsed(request, service, shape, wishes(request))
    model = getattr(request.state, "deployment", "")
    if not model and getattr(wanted, "model", None) == "":
        model = service.client.info.model
    if not model:
        return wanted
    if isinstance(wanted, SampledRequest):  # Its grammar is already built.
        return wanted.changed(model=model)
    return replace_struct(wanted, model=model)


def named_by(request: Request, given: str | None) -> str:
    """Return the id that the client gave the request, in its header or else `given` in its body; empty if it gave none.

    The answer's header `x-request-id` has that id, too.
    """
    id = given_id(request.scope) or given or ""
    if id:
        request.state.request_id = id
    return id


async def respond(request: Request, answer: Answer, shape: Shape, keeper: Keeper) -> Response:
    """Return the whole answer, or a stream of it, and store it if the client wants that."""
    request.state.usage = answer.usage  # For the log.
    answer.id = shape.head["id"]
    if not answer.wanted.stream:
        reply = await while_connected(request.receive, answer.whole(shape))
        await keeper.keep(reply)
        return JSON(reply)
    return await start_stream(
        request, answer_events(answer, shape, keeper), lambda error: event(failure(answer, error).body())
    )


async def answer_events(answer: Answer, shape: Shape, keeper: Keeper) -> AsyncGenerator[bytes, None]:
    """Yield the answer as server-sent events."""
    options = answer.wanted.stream_options
    counted = options.include_usage and options.continuous_usage_stats
    async with aclosing(answer.deltas()) as deltas:
        async for choice, delta in deltas:
            for chunk in shape.chunks(choice, delta):
                keeper.add(chunk)
                yield event({**chunk, "usage": answer.usage.counts()} if counted else chunk)
    last = shape.usage(answer.usage)
    await keeper.end(last["usage"])
    if options.include_usage:
        yield event(last)
    yield DONE


def failure(answer: Answer, error: Exception) -> ApiError:
    """Return the error that ends a stream after its first event. Counts the request as failed."""
    answer.ended("failed")
    return error if isinstance(error, ApiError) else internal(error)


def add_message_routes(app: FastAPI, service: Service) -> None:
    """Add POST /v1/messages and /v1/messages/count_tokens."""

    @app.post("/v1/messages/count_tokens", openapi_extra=described(TokensRequest))
    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a prompt."""
        wanted, tenant = await read_request(request, service, TokensRequest), tenant_of(request)
        answer = service.answer(wanted.chat(truncate_prompt_tokens=-1), tenant)  # May exceed the context.
        with service.lane.admission.admit(1, tenant):
            try:
                (prompt,) = await while_connected(request.receive, _encoded(answer))
            except RequestRefused as error:
                raise refused(error, answer.wanted, service.client) from None
            except ValueError as error:
                raise invalid(str(error), "messages") from None
        return JSON({"input_tokens": len(prompt)})

    @app.post("/v1/messages", openapi_extra=described(MessagesRequest))
    async def messages(request: Request) -> Response:
        """Answer a conversation: whole, or as a stream of events."""
        wanted = await read_request(request, service, MessagesRequest)
        chat = wanted.to_answer()
        answer = service.answer(chat, tenant_of(request))
        request.state.usage = answer.usage
        shape = answer.shape(MessageShape)
        answer.id = shape.head["id"]
        if not wanted.stream:
            return JSON(await while_connected(request.receive, answer.whole(shape)))
        return await start_stream(
            request, message_events(answer, shape), lambda error: message_error(failure(answer, error))
        )


async def _encoded(answer: Answer) -> list[list[int]]:
    return [list(prompt) for prompt in await answer.encode()]


async def message_events(answer: Answer, shape: MessageShape) -> AsyncGenerator[bytes, None]:
    async with aclosing(answer.deltas()) as deltas:
        async for _, delta in deltas:
            for event in shape.events(delta, answer.usage):
                yield event


def add_response_routes(app: FastAPI, responses: Responses) -> None:
    """Add the routes under /v1/responses: create, get, delete, cancel, input_items, input_tokens and compact."""

    @app.post("/v1/responses/input_tokens", openapi_extra=described(InputTokensRequest))
    async def input_tokens(request: Request) -> Response:
        """Count the tokens of a turn's prompt, its context included. Generates and stores nothing."""
        wanted = await read_request(request, responses.service, InputTokensRequest)
        count = await while_connected(request.receive, responses.count(wanted, tenant_of(request)))
        return JSON({"object": "response.input_tokens", "input_tokens": count})

    @app.post("/v1/responses/compact", openapi_extra=described(CompactRequest))
    async def compact(request: Request) -> Response:
        """Shorten a long conversation: keep the user's messages, and let the model summarize the rest."""
        wanted = await read_request(request, responses.service, CompactRequest)
        request.state.usage = usage = RequestUsage()
        return JSON(await while_connected(request.receive, responses.compact(wanted, tenant_of(request), usage)))

    @app.post("/v1/responses", openapi_extra=described(ResponseRequest))
    async def create(request: Request) -> Response:
        """Answer a turn: at once, as a stream, or in the background.

        A request with the `Idempotency-Key` and the body of an earlier one gets the same turn, if that was stored.
        """
        wanted, tenant = await read_request(request, responses.service, ResponseRequest), tenant_of(request)
        id = id_of(request, wanted, tenant)
        if id and (found := await responses.repeated(tenant, id)) is not None:
            return await repeat(request, responses, wanted, tenant, found)
        if wanted.background:
            background = await responses.start(wanted, tenant, id)
            request.state.usage, request.state.background = background.writing.answer.usage, background.task
            if not wanted.stream:
                return JSON(background.writing.shape.response)
            return await stream(request, background.follow(), error_event)
        writing = responses.write(wanted, tenant, id=id, memory=getattr(request.state, "memory", None))
        request.state.usage = writing.answer.usage
        if wanted.stream:
            return await stream(request, writing.events(), writing.failed)
        return JSON(await while_connected(request.receive, writing.whole()))

    @app.get("/v1/responses/{response_id}")
    async def retrieve(request: Request, response_id: str) -> Response:
        """A stored response. With `stream`, the events of a background response that follow `starting_after`."""
        tenant, query = tenant_of(request), request.query_params
        if query.get("stream") != "true":
            return JSON(await responses.retrieve(tenant, response_id))
        events = await responses.events(tenant, response_id)
        after = query_integer(request, "starting_after", 0, MOST_EVENTS if events.last is None else events.last)
        return await stream(request, events.after(-1 if after is None else after), error_event)

    @app.delete("/v1/responses/{response_id}")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        """Delete a response."""
        await responses.delete(tenant_of(request), response_id)
        return {"id": response_id, "object": "response.deleted", "deleted": True}

    @app.post("/v1/responses/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        """Stop a background response."""
        return JSON(await responses.cancel(tenant_of(request), response_id))

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        """The input items of a response."""
        tenant = tenant_of(request)
        found = await responses.store.read(lambda store: store.turns.input(tenant, response_id))
        return JSON(page(request, found))


async def repeat(
    request: Request, responses: Responses, wanted: ResponseRequest, tenant: str, found: dict[str, Any]
) -> Response:
    """Return the turn of an earlier attempt of a request, which may still be in progress."""
    if wanted.stream:
        events = await responses.events(tenant, found["id"], ended=True)
        reply = await stream(request, events.after(-1), error_event)
    else:
        if not wanted.background:
            found = await while_connected(request.receive, responses.until_ended(tenant, found))
        reply = JSON(found)
    reply.headers.update(REPEATED)
    return reply


async def stream(
    request: Request, events: AsyncGenerator[Event, None], failed: Callable[[ApiError], Event]
) -> Response:
    """Return a response as server-sent events. An error after the first event becomes the last event."""

    async def encoded() -> AsyncGenerator[bytes, None]:
        async with aclosing(events):
            async for event in events:
                yield event_bytes(event)

    def last(error: Exception) -> bytes:
        return event_bytes(failed(error if isinstance(error, ApiError) else internal(error)))

    return await start_stream(request, encoded(), last)


def add_embedding_route(app: FastAPI, service: Service) -> None:
    """Add POST /v1/embeddings."""

    @app.post("/v1/embeddings", openapi_extra=described(VectorRequest))
    async def embeddings(request: Request) -> Response:
        """One vector for each input, if the served model is made for embeddings."""
        wanted = await read_request(request, service, VectorRequest)
        request.state.usage = usage = RequestUsage()
        embedded = embed(service, wanted, tenant_of(request), usage, named_by(request, wanted.request_id))
        return JSON(await while_connected(request.receive, embedded))
