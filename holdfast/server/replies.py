"""Replies to clients: OpenAI's response bodies and stream chunks, in their exact shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Protocol, TypedDict

import msgspec
from msgspec import UNSET, Struct, UnsetType

from holdfast.server.protocol import GenerationRequest

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


class Head(TypedDict):
    """The fields that all chunks of one answer share."""

    id: str
    created: int
    model: str


class PromptTokensDetails(Struct):
    cached_tokens: int


class UsageReply(Struct):
    """Token counts of one HTTP request; each prompt is counted once, however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> UsageReply:
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(cached))


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: None = None


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    object: Literal["chat.completion"] = "chat.completion"


class ChatDelta(Struct, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: None = None


class ChatChunk(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageReply | UnsetType | None
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class TextChoice(Struct):
    index: int
    text: str
    finish_reason: str | None
    logprobs: None = None


class TextCompletion(Struct):
    """A whole completion, or one chunk of a stream: both have this shape."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageReply | UnsetType | None
    object: Literal["text_completion"] = "text_completion"


def event(reply: Struct | dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(reply) + b"\n\n"


class Shape(Protocol):
    """The wire format of one answer's choices."""

    def chunks(self, choice: int, text: str, reason: str | None) -> Iterator[Struct]:
        """The stream's next chunks: the new `text` of `choice`, and its finish reason if it has ended."""
        ...

    def usage(self, usage: UsageReply) -> Struct:
        """The stream's last chunk, if the client asked for usage."""
        ...

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: UsageReply) -> Struct:
        """The whole answer, with all choices."""
        ...


class ChatShape:
    """Chat completions: each choice's stream opens with its role and closes with an empty delta and the reason."""

    def __init__(self, model: str, wanted: GenerationRequest) -> None:
        self.head: Head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.no_usage = None if wanted.stream_options.include_usage else UNSET
        self.begun: set[int] = set()

    def _chunk(self, choice: int, delta: ChatDelta, reason: str | None = None) -> ChatChunk:
        return ChatChunk(**self.head, choices=[ChatChunkChoice(choice, delta, reason)], usage=self.no_usage)

    def chunks(self, choice: int, text: str, reason: str | None) -> Iterator[Struct]:
        if choice not in self.begun:
            self.begun.add(choice)
            yield self._chunk(choice, ChatDelta(role="assistant", content=""))
        if text:
            yield self._chunk(choice, ChatDelta(content=text))
        if reason is not None:
            yield self._chunk(choice, ChatDelta(), reason)

    def usage(self, usage: UsageReply) -> Struct:
        return ChatChunk(**self.head, choices=[], usage=usage)

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: UsageReply) -> Struct:
        pairs = enumerate(zip(texts, reasons, strict=True))
        choices = [ChatChoice(index, ChatMessage(text), reason) for index, (text, reason) in pairs]
        return ChatCompletion(**self.head, choices=choices, usage=usage)


class TextShape:
    """Completions: chunks have the shape of the whole."""

    def __init__(self, model: str, wanted: GenerationRequest) -> None:
        self.head: Head = {"id": f"cmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self.no_usage = None if wanted.stream_options.include_usage else UNSET

    def chunks(self, choice: int, text: str, reason: str | None) -> Iterator[Struct]:
        if text or reason is not None:
            yield TextCompletion(**self.head, choices=[TextChoice(choice, text, reason)], usage=self.no_usage)

    def usage(self, usage: UsageReply) -> Struct:
        return TextCompletion(**self.head, choices=[], usage=usage)

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: UsageReply) -> Struct:
        pairs = enumerate(zip(texts, reasons, strict=True))
        choices = [TextChoice(index, text, reason) for index, (text, reason) in pairs]
        return TextCompletion(**self.head, choices=choices, usage=usage)
