"""Routes of Anthropic's Messages API: answers, whole or streamed, and token counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request, Response

from holdfast.lm.limits import RequestRefused
from holdfast.server.messages.protocol import MessagesRequest, TokensRequest
from holdfast.server.messages.replies import MessageShape, error_event
from holdfast.server.protocol import invalid
from holdfast.server.routes.generation import failure, read_request
from holdfast.server.routes.http import JSON, described, start_stream, tenant_of, while_connected
from holdfast.server.service import Answer, Service, refused


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
        answer.at_most = wanted.max_tokens
        request.state.usage = answer.usage
        shape = MessageShape(chat, service.client.text, answer.reading, wanted.max_tokens)
        if not wanted.stream:
            return JSON(await while_connected(request.receive, answer.whole(shape)))
        return await start_stream(request, _events(answer, shape), lambda error: error_event(failure(answer, error)))


async def _encoded(answer: Answer) -> list[list[int]]:
    return [list(prompt) for prompt in await answer.encode()]


async def _events(answer: Answer, shape: MessageShape) -> AsyncGenerator[bytes, None]:
    async with aclosing(answer.deltas()) as deltas:
        async for _, delta in deltas:
            for event in shape.events(delta, answer.usage):
                yield event
