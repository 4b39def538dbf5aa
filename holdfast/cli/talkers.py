"""Backends of `holdfast chat`: our own engine, a server that stores conversations, or any other server."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx
import msgspec

from holdfast.cli.flags import CommandError
from holdfast.engine.client.stream import Usage
from holdfast.server.conversations.protocol import ResponseRequest
from holdfast.server.conversations.service import Responses
from holdfast.server.protocol import ApiError, parse

Messages = list[dict[str, str]]
Head = str | Messages | None
"""End of a conversation: a response's id if the server stores it, otherwise all messages. None at the beginning."""
TENANT = ""
"""Tenant of the conversations in our own engine."""
PATIENT = httpx.Timeout(30, read=300, write=300)
"""Timeouts for a server that receives files and reads them before it answers."""


class ChatError(CommandError):
    """A turn, or the whole conversation, failed. The message is for the user."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer."""

    text: str
    usage: Usage | None = None
    """Token counts; None until they are known."""
    head: Head = None
    """New end of the conversation; None until the answer is complete."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Sampling options for all answers."""

    temperature: float
    max_tokens: int | None


@dataclass(frozen=True, slots=True)
class Turn:
    """A past turn: the user's message, the answer, and the conversation's end before them."""

    said: str
    answer: str
    previous: Head


class Talker(Protocol):
    """Backend that answers a conversation."""

    name: str

    def answer(self, said: str, system: str | None, head: Head) -> AsyncGenerator[Piece, None]:
        """Yield the answer as it is written. The last piece has the conversation's new end. Raises ChatError."""
        ...

    async def recall(self, head: str | Messages) -> Turn:
        """Return the last turn of the conversation that ends with `head`. Raises ChatError if it no longer exists."""
        ...


class LocalTalker:
    """Our own engine with our own store. The first given adapter answers, or the model if no adapter is given."""

    def __init__(self, responses: Responses, settings: Settings) -> None:
        info = responses.service.client.info
        self.name = info.adapters[0].name if info.adapters else info.model
        self.responses = responses
        self.settings = settings

    async def answer(self, said: str, system: str | None, head: Head) -> AsyncGenerator[Piece, None]:
        try:
            body = msgspec.json.encode(response_body(self.name, self.settings, said, system, head))
            writing = self.responses.write(parse(body, ResponseRequest), TENANT)
            async with aclosing(writing.events()) as events:
                async for event in events:
                    yield piece_of_response(event)
        except ApiError as error:
            hint = "; /clear begins a new one" if error.code == "context_length_exceeded" else ""
            raise ChatError(f"{error.message}{hint}") from None

    async def recall(self, head: str | Messages) -> Turn:
        id = str(head)
        try:
            response = await self.responses.retrieve(TENANT, id)
            said = await self.responses.store.run(lambda store: store.turns.input(TENANT, id))
        except ApiError as error:
            raise ChatError(error.message) from None
        return turn_of(response, said)


@dataclass
class StatefulTalker:
    """A server that stores conversations. Each turn sends only its new message."""

    http: httpx.AsyncClient
    name: str
    settings: Settings
    context: int | None = None
    """Maximum number of tokens of a sequence; None if the server does not report it."""

    async def answer(self, said: str, system: str | None, head: Head) -> AsyncGenerator[Piece, None]:
        body = response_body(self.name, self.settings, said, system, head)
        async with aclosing(server_events(self.http, "responses", body)) as events:
            async for event in events:
                yield piece_of_response(event)

    async def recall(self, head: str | Messages) -> Turn:
        response = await fetched(self.http, f"responses/{head}")
        said = await fetched(self.http, f"responses/{head}/input_items")
        return turn_of(response, said["data"])


@dataclass
class RemoteTalker:
    """Any server with OpenAI's chat completions. Each turn sends the whole conversation."""

    http: httpx.AsyncClient
    name: str
    settings: Settings

    async def answer(self, said: str, system: str | None, head: Head) -> AsyncGenerator[Piece, None]:
        first: Messages = [{"role": "system", "content": system}] if system else []
        messages: Messages = [*(head if isinstance(head, list) else []), {"role": "user", "content": said}]
        texts = []
        body = {
            "model": self.name,
            "messages": [*first, *messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self.settings.temperature,
        }
        if self.settings.max_tokens is not None:
            body["max_tokens"] = self.settings.max_tokens
        async with aclosing(server_events(self.http, "chat/completions", body)) as events:
            async for event in events:
                piece = piece_of(event)
                texts.append(piece.text)
                yield piece
        yield Piece("", head=[*messages, {"role": "assistant", "content": "".join(texts)}])

    async def recall(self, head: str | Messages) -> Turn:
        if not isinstance(head, list):
            raise ChatError("the server no longer keeps conversations, and this one is nowhere else")
        return Turn(head[-2]["content"], head[-1]["content"], head[:-2] or None)


async def connect(http: httpx.AsyncClient, model: str | None, settings: Settings) -> Talker:
    """Return the talker for a server. If no model is named, it uses the server's first one.

    Raises ChatError if no server answers.
    """
    try:
        cards = (await fetched(http, "models"))["data"]
        card = next((card for card in cards if model in (None, card["id"])), {"id": model})
        model = str(card["id"])
    except ChatError:
        if model is None:
            raise
        card = {}
    except (LookupError, TypeError):
        raise ChatError(f"{http.base_url} answers, but not as a server with OpenAI's API does") from None
    if card.get("stateful") is not True:
        return RemoteTalker(http, model, settings)
    context = card.get("max_model_len")
    return StatefulTalker(http, model, settings, context if isinstance(context, int) else None)


def server_client(
    url: str, api_key: str | None, timeout: httpx.Timeout, transport: httpx.AsyncBaseTransport | None = None
) -> httpx.AsyncClient:
    """Return a client for a server's URL, with or without /v1 at its end. It allows any number of requests.

    `transport` replaces httpx's own.
    """
    return httpx.AsyncClient(
        transport=transport,
        base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
        timeout=timeout,
    )


@contextmanager
def connection(http: httpx.AsyncClient) -> Iterator[None]:
    """Convert httpx errors within the context to ChatError."""
    try:
        yield
    except httpx.HTTPError as error:
        raise ChatError(f"the connection to {http.base_url} broke: {error or type(error).__name__}") from None


async def fetched(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """GET a JSON object from a server. Raises ChatError."""
    try:
        return answer_of(await http.get(path))
    except httpx.HTTPError as error:
        raise ChatError(f"no server answers at {http.base_url}: {error}") from None


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object in an answer. Raises ChatError."""
    if response.status_code != 200:
        raise ChatError(reason_of(response.status_code, response.content))
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ChatError(f"{response.url} answers, but not as a server with OpenAI's API does") from None


async def server_events(
    http: httpx.AsyncClient, path: str, body: dict[str, Any] | None
) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the events of the answer to a POST with `body`, or to a GET if `body` is None.

    Raises ChatError for an error reply, a broken connection or an invalid event.
    """
    try:
        with connection(http):
            async with http.stream("GET" if body is None else "POST", path, json=body) as response:
                if response.status_code != 200:
                    raise ChatError(reason_of(response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield json.loads(line[5:])
    except (ValueError, RecursionError):
        raise ChatError("the server sent an event that is not OpenAI's") from None


def response_body(model: str, settings: Settings, said: str, system: str | None, head: Head) -> dict[str, Any]:
    """Return the body of a turn in the Responses API. Options that are not set are left out."""
    body = {"model": model, "input": said, "stream": True, "temperature": settings.temperature}
    given = {"instructions": system, "previous_response_id": head, "max_output_tokens": settings.max_tokens}
    return body | {name: value for name, value in given.items() if value is not None}


def piece_of_response(event: dict[str, Any]) -> Piece:
    """Convert an event of a response's stream to a piece. Raises ChatError for an error event."""
    try:
        match event["type"]:
            case "response.output_text.delta":
                return Piece(event["delta"])
            case "response.completed" | "response.incomplete":
                response = event["response"]
                usage = response["usage"]
                cached = usage["input_tokens_details"]["cached_tokens"]
                return Piece("", Usage(usage["input_tokens"], usage["output_tokens"], cached), response["id"])
            case "response.failed":
                raise ChatError(str(event["response"]["error"]["message"]))
            case _:
                return Piece("")
    except (LookupError, TypeError):
        raise ChatError("the server sent an event that is not OpenAI's") from None


def turn_of(response: dict[str, Any], said: Sequence[dict[str, Any]]) -> Turn:
    """Convert a stored response and its input to a turn. Raises ChatError for any other object."""
    try:
        return Turn(text_of(said), text_of(response["output"]), response["previous_response_id"])
    except (LookupError, TypeError):
        raise ChatError("the server keeps this conversation in a form that is not OpenAI's") from None


def text_of(items: Sequence[dict[str, Any]]) -> str:
    """Return the text of all messages."""
    return "\n".join(part["text"] for item in items for part in item["content"])


def piece_of(event: dict[str, Any]) -> Piece:
    """Convert an event of a completion's stream to a piece. Raises ChatError for an error event."""
    try:
        if "error" in event:
            raise ChatError(str(event["error"]["message"]))
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        usage = event.get("usage")
        if not usage:
            return Piece(text)
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Piece(text, Usage(usage["prompt_tokens"], usage["completion_tokens"], cached))
    except (LookupError, TypeError, AttributeError):
        raise ChatError("the server sent an event that is not OpenAI's") from None


def reason_of(status: int, body: bytes) -> str:
    """Return the reason for a server's error reply: its own message if it has one."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, RecursionError, LookupError, TypeError):
        return f"the server answered with status {status}"
