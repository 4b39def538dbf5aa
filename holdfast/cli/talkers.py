"""Who answers in `holdfast chat`: an engine that runs here, or a server behind a URL."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from holdfast.core.types import SamplingParams
from holdfast.engine.client import EngineClient, Usage

Message = dict[str, str]


class ChatError(Exception):
    """A turn, or the conversation, cannot go on; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new in an answer."""

    text: str
    usage: Usage | None = None
    """Token counts, once known."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How answers are written."""

    temperature: float
    max_tokens: int | None
    seed: int | None


class Talker(Protocol):
    """Answers a conversation."""

    name: str

    def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Piece, None]:
        """The answer, as it is written. Raises ChatError."""
        ...


class LocalTalker:
    """An engine of our own."""

    def __init__(self, client: EngineClient, settings: Settings) -> None:
        self.name = client.info.model
        self.client = client
        self.settings = settings

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Piece, None]:
        info, settings = self.client.info, self.settings
        try:
            prompt = self.client.text.encode_chat(messages)
            room = info.max_model_len - len(prompt)
            if room < 1:
                raise ChatError(
                    f"the conversation has {len(prompt)} tokens and the model takes {info.max_model_len}; "
                    "/clear begins a new one"
                )
            params = SamplingParams(
                temperature=settings.temperature,
                max_tokens=min(settings.max_tokens or room, room),
                seed=settings.seed,
            )
            async with aclosing(self.client.stream(prompt, params)) as deltas:
                async for delta in deltas:
                    yield Piece(delta.text, delta.usage)
        except ValueError as error:
            raise ChatError(str(error)) from None


class RemoteTalker:
    """A server with OpenAI's API."""

    def __init__(self, http: httpx.AsyncClient, model: str, settings: Settings) -> None:
        self.name = model
        self.http = http
        self.settings = settings

    @classmethod
    async def connect(cls, http: httpx.AsyncClient, model: str | None, settings: Settings) -> RemoteTalker:
        """Find the model that is served, unless one is named. Raises ChatError when there is no such server."""
        if model is None:
            try:
                response = await http.get("models")
            except httpx.HTTPError as error:
                raise ChatError(f"no server answers at {http.base_url}: {error}") from None
            if response.status_code != 200:
                raise ChatError(reason_of(response.status_code, response.content))
            try:
                model = str(response.json()["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ChatError(f"{http.base_url} answers, but not as a server with OpenAI's API does") from None
        return cls(http, model, settings)

    def body(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The request's body; what is not set is left to the server."""
        settings = {"max_tokens": self.settings.max_tokens, "seed": self.settings.seed}
        return {
            "model": self.name,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": self.settings.temperature,
        } | {name: value for name, value in settings.items() if value is not None}

    async def answer(self, messages: Sequence[Message]) -> AsyncGenerator[Piece, None]:
        try:
            async with self.http.stream("POST", "chat/completions", json=self.body(messages)) as response:
                if response.status_code != 200:
                    raise ChatError(reason_of(response.status_code, await response.aread()))
                async for line in response.aiter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield piece_of(json.loads(line[5:]))
        except httpx.HTTPError as error:
            raise ChatError(f"the connection to {self.http.base_url} broke: {error or type(error).__name__}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ChatError("the server sent an event that is not OpenAI's") from None


def piece_of(event: dict[str, Any]) -> Piece:
    """One event of a stream. Raises ChatError for one that tells of an error."""
    if "error" in event:
        raise ChatError(str(event["error"]["message"]))
    text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    usage = event.get("usage")
    if not usage:
        return Piece(text)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Piece(text, Usage(usage["prompt_tokens"], usage["completion_tokens"], cached))


def reason_of(status: int, body: bytes) -> str:
    """Why a server refused, in its own words where it has some."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"the server answered with status {status}"
