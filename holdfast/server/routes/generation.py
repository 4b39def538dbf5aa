"""Routes of chat completions and completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import FastAPI, Request, Response

from holdfast.server.protocol import ApiError, ChatRequest, CompletionRequest, GenerationRequest, parse
from holdfast.server.replies import DONE, ChatShape, Shape, TextShape, event
from holdfast.server.routes.http import JSON, described, read_body, start_stream, tenant_of, while_connected
from holdfast.server.service import Answer, Service, internal


def add_generation_routes(app: FastAPI, service: Service) -> None:
    """POST /v1/chat/completions and /v1/completions."""
    limit = int(service.config.max_body_mb * 1e6)
    model = service.client.info.model

    @app.post("/v1/chat/completions", openapi_extra=described(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """One answer to a conversation; with `stream`, as it is written."""
        wanted = parse(await read_body(request, limit), ChatRequest)
        return await respond(request, wanted, service.answer(wanted, tenant_of(request)), ChatShape(model, wanted))

    @app.post("/v1/completions", openapi_extra=described(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continuations of one or several prompts, given as text or token ids."""
        wanted = parse(await read_body(request, limit), CompletionRequest)
        return await respond(request, wanted, service.answer(wanted, tenant_of(request)), TextShape(model, wanted))


async def respond(request: Request, wanted: GenerationRequest, answer: Answer, shape: Shape) -> Response:
    """The whole answer, or a stream."""
    if not wanted.stream:
        return JSON(await while_connected(request.receive, whole(answer, shape)))
    return await start_stream(request, events(answer, shape, include_usage=wanted.stream_options.include_usage))


async def whole(answer: Answer, shape: Shape) -> msgspec.Struct:
    """Collect all choices of an answer into one completion."""
    texts: list[list[str]] = [[] for _ in range(answer.num_choices)]
    reasons = [""] * answer.num_choices
    async with aclosing(answer.deltas()) as deltas:
        async for choice, delta in deltas:
            texts[choice].append(delta.text)
            reasons[choice] = delta.finish_reason or reasons[choice]
    return shape.whole(["".join(parts) for parts in texts], reasons, answer.usage)


async def events(answer: Answer, shape: Shape, *, include_usage: bool) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events. After the first one, an error is an event and ends the stream."""
    begun = False
    try:
        async with aclosing(answer.deltas()) as deltas:
            async for choice, delta in deltas:
                for chunk in shape.chunks(choice, delta.text, delta.finish_reason):
                    yield event(chunk)
                    begun = True
        if include_usage:
            yield event(shape.usage(answer.usage))
        yield DONE
    except Exception as error:
        if not begun:
            raise
        answer.service.metrics.outcome(answer.wanted.route, "failed")
        refusal = error if isinstance(error, ApiError) else internal(error)
        yield event(refusal.body())
