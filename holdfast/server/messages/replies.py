"""Answers of the Messages API: whole, or as a sequence of events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from holdfast.core.types import FinishReason
from holdfast.engine.client.stream import Delta
from holdfast.server.formats.parts import Arguments, CallBegin, Part, Reasoning, Said, joined
from holdfast.server.messages.protocol import MessagesChat
from holdfast.server.protocol import ApiError
from holdfast.server.replies import Reply, RequestUsage, Shape, Written
from holdfast.server.replies import event as named_event

UNSIGNED = "unsigned"
"""Signature of thinking blocks. The server does not verify it when a client sends it back."""


class MessageShape(Shape):
    """Wire format of one message."""

    id_prefix, whole_object, chunk_object = "msg_", "message", "message"

    def __init__(self, wanted: MessagesChat, *given: Any, **head: Any) -> None:
        super().__init__(wanted, *given, **head)
        self.most_tokens = wanted.most
        """Limit that the client gave, which may exceed the context."""
        self.stop: str | None = None
        """Stop sequence that ended the answer; None if none did."""
        self.reason = ""
        self.begun = False
        self.called = False
        self.blocks = 0
        """Number of content blocks that have begun."""
        self.open: type[Part] | None = None
        """Part type of the open block: Said, Reasoning, or Arguments for a call. None if no block is open."""

    def read(self, choice: int, delta: Delta) -> list[Part]:
        parts = super().read(choice, delta)
        self.stop = delta.stop_string or self.stop
        self.reason = delta.finish_reason or self.reason
        self.called |= any(isinstance(part, CallBegin) for part in parts)
        return parts

    def events(self, delta: Delta, usage: RequestUsage) -> Iterator[bytes]:
        """Yield the next events of a stream: new content, and the last events when the answer ends."""
        if delta.finish_reason is None and not (delta.text or delta.tokens):
            return
        if not self.begun:
            self.begun = True
            yield from self._begin(usage)
        for part in self.read(0, delta):
            yield from self._part(part)
        if delta.finish_reason is not None:
            yield from self._close()
            ended = {"stop_reason": self.stop_reason(usage), "stop_sequence": self.stop}
            yield event("message_delta", delta=ended, usage=self.counts(usage))
            yield event("message_stop")

    def whole(self, written: Sequence[Written], usage: RequestUsage) -> Reply:
        """Return the whole message."""
        content: list[Reply] = []
        arguments = ""
        for part in joined(written[0].parts):
            match part:
                case Said(text):
                    content.append({"type": "text", "text": text})
                case Reasoning(text):
                    content.append({"type": "thinking", "thinking": text, "signature": UNSIGNED})
                case CallBegin(name):
                    content.append(self._call(name))
                    arguments = ""
                case Arguments(text):
                    arguments += text
                    content[-1]["input"] = read_arguments(arguments)
        return self._message(content, usage) | {
            "stop_reason": self.stop_reason(usage), "stop_sequence": self.stop, "usage": self.counts(usage)
        }  # fmt: skip

    def stop_reason(self, usage: RequestUsage) -> str:
        """Return the reason why the answer ended."""
        if self.reason == FinishReason.LENGTH:
            short = self.most_tokens is not None and usage.completion_tokens < self.most_tokens
            return "model_context_window_exceeded" if short else "max_tokens"
        if self.reason == FinishReason.ABORT:  # the engine fell asleep: sent again, the turn goes on
            return "pause_turn"
        if self.stop is not None:
            return "stop_sequence"
        return "tool_use" if self.called else "end_turn"

    def counts(self, usage: RequestUsage) -> Reply:
        """Return the `usage` object. Cached tokens are not part of `input_tokens`."""
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _message(self, content: list[Reply], usage: RequestUsage) -> Reply:
        return {
            "id": self.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.head["model"],
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.counts(usage),
        }

    def _call(self, name: str) -> Reply:
        return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": {}}

    def _begin(self, usage: RequestUsage) -> Iterator[bytes]:
        """Yield the first events."""
        message = self._message([], usage)
        message["usage"] = message["usage"] | {"output_tokens": 0}
        yield event("message_start", message=message)
        yield event("ping")

    def _part(self, part: Part) -> Iterator[bytes]:
        match part:
            case Said(text):
                yield from self._open(Said, {"type": "text", "text": ""})
                yield self._delta(type="text_delta", text=text)
            case Reasoning(text):
                yield from self._open(Reasoning, {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(type="thinking_delta", thinking=text)
            case CallBegin(name):
                yield from self._close()
                yield from self._open(Arguments, self._call(name))
            case Arguments(text):
                yield self._delta(type="input_json_delta", partial_json=text)

    def _open(self, kind: type[Part], block: Reply) -> Iterator[bytes]:
        if self.open is not kind:
            yield from self._close()
            self.open = kind
            self.blocks += 1
            yield event("content_block_start", index=self.blocks - 1, content_block=block)

    def _close(self) -> Iterator[bytes]:
        if self.open is not None:
            if self.open is Reasoning:
                yield self._delta(type="signature_delta", signature=UNSIGNED)
            self.open = None
            yield event("content_block_stop", index=self.blocks - 1)

    def _delta(self, **delta: Any) -> bytes:
        return event("content_block_delta", index=self.blocks - 1, delta=delta)


def read_arguments(text: str) -> dict[str, Any]:
    """Decode a call's arguments to a JSON object. Text that is not an object is kept under `arguments`."""
    try:
        given = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        given = text
    return given if isinstance(given, dict) else {"arguments": given}


def event(kind: str, **fields: Any) -> bytes:
    """Encode one server-sent event. Its name is its type."""
    return named_event({"type": kind, **fields}, kind)


def error_event(error: ApiError) -> bytes:
    """Encode the event that ends a stream after an error."""
    return event("error", error=error.message_body()["error"])
