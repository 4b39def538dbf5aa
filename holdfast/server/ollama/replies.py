"""Answers of Ollama's API: one object, or a line of JSON for each new piece."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from holdfast.engine.client.stream import Delta, Timings
from holdfast.server.formats.parts import Arguments, CallBegin, Part, Reasoning, Said
from holdfast.server.logprobs import records, tokens_with_logprobs
from holdfast.server.protocol import ApiError
from holdfast.server.replies import Reply, RequestUsage, Shape, encode, rfc3339

NANO = 1_000_000_000


def line(reply: Reply) -> bytes:
    """Encode one line of a stream."""
    return encode(reply) + b"\n"


def error_line(error: ApiError) -> bytes:
    """Encode the line that ends a failed stream."""
    return line({"error": error.message})


def stamp(seconds: float | None = None) -> str:
    """Return a time in Unix seconds, by default now, as Ollama writes it."""
    return rfc3339(time.time() if seconds is None else seconds)


class OllamaShape(Shape):
    """Wire format of one answer. The pieces of a chat are messages, those of a generated text are texts."""

    id_prefix, whole_object, chunk_object = "", "", ""

    def __init__(self, *given: Any, chat: bool, **head: Any) -> None:
        """`chat` means that the answer is to /api/chat."""
        super().__init__(*given, **head)
        self.chat = chat
        self.began = time.monotonic()
        self.call: list[str] = []
        """Name of the call that is being written, and the pieces of its arguments; empty: none is."""
        self.reason = ""
        self.timings: Timings | None = None

    def lines(self, delta: Delta) -> Iterator[Reply]:
        """Yield the next pieces: text, thoughts and whole calls."""
        self.reason, self.timings = delta.finish_reason or self.reason, delta.timings or self.timings
        logprobs = records(self.text, tokens_with_logprobs(delta)) if delta.logprobs else []
        for part in self.read(0, delta):
            for piece in self.pieces_of(part):
                told, logprobs = ({"logprobs": logprobs} if logprobs else {}), []
                yield self.piece(piece) | told
        if delta.finish_reason is not None and self.call:
            yield self.piece(self.ended_call())

    def pieces_of(self, part: Part) -> Iterator[Reply]:
        """Yield the fields of the messages for a part."""
        if self.call and not isinstance(part, Arguments):
            yield self.ended_call()
        match part:
            case Said(text):
                yield {"content": text}
            case Reasoning(text):
                yield {"thinking": text}
            case CallBegin(name):
                self.call = [name]
            case Arguments(text):
                self.call.append(text)

    def ended_call(self) -> Reply:
        """Return the call that was written. Arguments that are not a JSON object are empty."""
        name, *written = self.call
        self.call = []
        try:
            arguments = msgspec.json.decode("".join(written) or "{}", type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError):
            arguments = {}
        return {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}

    def piece(self, fields: Reply, *, done: bool = False) -> Reply:
        """Return one line of a stream."""
        content: Reply = {"message": {"role": "assistant", "content": "", **fields}}
        if not self.chat:
            content = {"response": fields.get("content", "")}
            content |= {"thinking": fields["thinking"]} if "thinking" in fields else {}
        return {"model": self.head["model"], "created_at": stamp(), **content, "done": done}

    def last(self, usage: RequestUsage, fields: Reply | None = None) -> Reply:
        """Return the last line of a stream, or with the `fields` of its message the whole answer. Times are in ns."""
        timings = self.timings
        times = (0.0, 0.0) if timings is None else (timings.prefill, timings.decode)
        return self.piece(fields or {}, done=True) | {
            "done_reason": self.reason or "stop",
            "total_duration": int((time.monotonic() - self.began) * NANO),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(times[0] * NANO),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(times[1] * NANO),
        }

    def joined(self, pieces: Sequence[Reply], usage: RequestUsage) -> Reply:
        """Return the whole answer, from all lines before the last."""
        messages = [piece["message"] if self.chat else {"content": piece["response"], **piece} for piece in pieces]
        fields: Reply = {"content": "".join(message["content"] for message in messages)}
        if thought := "".join(message.get("thinking", "") for message in messages):
            fields["thinking"] = thought
        if calls := [call for message in messages for call in message.get("tool_calls", ())]:
            fields["tool_calls"] = calls
        told = [record for piece in pieces for record in piece.get("logprobs", ())]
        return self.last(usage, fields) | ({"logprobs": told} if told else {})
