"""Replies to clients: OpenAI's response bodies and stream chunks, in their exact shapes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from holdfast.server.protocol import GenerationRequest

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
Reply = dict[str, Any]


def event(reply: Reply) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(reply) + b"\n\n"


@dataclass
class RequestUsage:
    """Token counts of one HTTP request; each prompt is counted once, however many choices it has."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens

    def counts(self) -> Reply:
        """`usage` of a chunk: the counts so far. What came from the cache is told at the end."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }

    def reply(self) -> Reply:
        """`usage` of completions."""
        return {**self.counts(), "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


class Shape:
    """The wire format of one answer's choices. A kind of answer defines `chunks` and `content`."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, model: str, wanted: GenerationRequest) -> None:
        id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.head: Reply = {"id": id, "created": int(time.time()), "model": model}
        no_usage = {"usage": None} if wanted.stream_options.include_usage else {}
        self.chunk_head: Reply = {**self.head, "object": self.chunk_object, **no_usage}

    def chunks(self, choice: int, text: str, reason: str | None) -> Iterator[Reply]:
        """The stream's next chunks: the new `text` of `choice`, and its finish reason if it has ended."""
        raise NotImplementedError

    def content(self, text: str) -> Reply:
        """The field of a whole choice that holds its text."""
        raise NotImplementedError

    def usage(self, usage: RequestUsage) -> Reply:
        """The stream's last chunk, if the client asked for usage."""
        return {**self.chunk_head, "choices": [], "usage": usage.reply()}

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: RequestUsage) -> Reply:
        """The whole answer, with all choices."""
        pairs = enumerate(zip(texts, reasons, strict=True))
        choices = [_choice(index, self.content(text), reason) for index, (text, reason) in pairs]
        return {**self.head, "object": self.whole_object, "choices": choices, "usage": usage.reply()}

    def _chunk(self, choice: int, content: Reply, reason: str | None = None) -> Reply:
        return {**self.chunk_head, "choices": [_choice(choice, content, reason)]}


def _choice(index: int, content: Reply, reason: str | None) -> Reply:
    return {"index": index, **content, "finish_reason": reason, "logprobs": None}


class ChatShape(Shape):
    """Chat completions: each choice's stream opens with its role and closes with an empty delta and the reason."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, wanted: GenerationRequest) -> None:
        super().__init__(model, wanted)
        self.begun: set[int] = set()

    def chunks(self, choice: int, text: str, reason: str | None) -> Iterator[Reply]:
        if choice not in self.begun:
            self.begun.add(choice)
            yield self._chunk(choice, {"delta": {"role": "assistant", "content": ""}})
        if text:
            yield self._chunk(choice, {"delta": {"content": text}})
        if reason is not None:
            yield self._chunk(choice, {"delta": {}}, reason)

    def content(self, text: str) -> Reply:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


class TextShape(Shape):
    """Completions: chunks have the shape of the whole."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def chunks(self, choice: int, text: str, reason: str | None) -> Iterator[Reply]:
        if text or reason is not None:
            yield self._chunk(choice, {"text": text}, reason)

    def content(self, text: str) -> Reply:
        return {"text": text}
