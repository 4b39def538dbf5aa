"""Replies to clients: OpenAI's response bodies and stream chunks, in their exact form."""

from __future__ import annotations

import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

import msgspec

from holdfast.core.types import FinishReason, TokenLogprobs
from holdfast.engine.client.stream import Delta
from holdfast.engine.client.text import Text
from holdfast.server.formats.parts import Arguments, CallBegin, Input, Part, Reasoning, Said, joined
from holdfast.server.formats.reader import AnswerReader
from holdfast.server.formats.registry import Reading
from holdfast.server.logprobs import (
    CompletionLogprobs,
    TokenRecord,
    named,
    prompt_records,
    records,
    tokens_with_logprobs,
    written,
)  # fmt: skip
from holdfast.server.protocol import REASONING_FIELDS, ChatRequest, GenerationRequest, SampledRequest

encode = msgspec.json.Encoder().encode


def rfc3339(seconds: float) -> str:
    """Return a time in Unix seconds as RFC 3339 writes it, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


DONE = b"data: [DONE]\n\n"
Reply = dict[str, Any]


def event(data: Any, name: str = "") -> bytes:
    """Encode one server-sent event, with a name if one is given."""
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + encode(data) + b"\n\n"


@dataclass
class RequestUsage:
    """Token counts of one HTTP request. A prompt counts once, even if it has several choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    """Numbers of cached tokens from the host, the disk and the remote tier. `cached_tokens` includes them."""
    wanted: SampledRequest | None = None
    """The request. For embeddings, None until the first inputs are computed."""
    queued: float | None = None
    """Seconds for which the choice that ended first had waited for its first step."""
    ttft: float | None = None
    """Seconds from the request's arrival to its first token."""
    pace: float | None = None
    """Tokens per second after the first token, for the choice that ended first."""
    finish_reasons: set[str] = field(default_factory=set)
    """Finish reasons of the choices that have ended."""

    @property
    def total_tokens(self) -> int:
        """Number of tokens in prompts and answers."""
        return self.prompt_tokens + self.completion_tokens

    def counts(self) -> Reply:
        """Return the `usage` object of a chunk, with the counts so far. Cached tokens are reported only at the end."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }

    def add_tiers(self, tokens: tuple[int, int, int]) -> None:
        """Add one prompt's cached tokens from the host, the disk and the remote tier."""
        host, disk, remote = map(sum, zip(self.cached_by_tier, tokens, strict=True))
        self.cached_by_tier = host, disk, remote

    def include(self, other: RequestUsage) -> None:
        """Add the tokens of another count, whose request becomes this one's."""
        self.wanted = other.wanted
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens

    def cached(self) -> Reply:
        """Return the number of cached tokens, and the numbers by tier if some came from a tier below the device."""
        if not any(self.cached_by_tier):
            return {"cached_tokens": self.cached_tokens}
        device = self.cached_tokens - sum(self.cached_by_tier)
        tiers = dict(zip(("device", "host", "disk", "remote"), (device, *self.cached_by_tier), strict=True))
        return {"cached_tokens": self.cached_tokens, "cached_tokens_by_tier": tiers}

    def reply(self, reasoning_tokens: int | None = None) -> Reply:
        """Return the final `usage` object. `reasoning_tokens` is None if the model does not reason."""
        details = {"prompt_tokens_details": self.cached()}
        if reasoning_tokens is not None:
            details["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return {**self.counts(), **details}


@dataclass
class Written:
    """One choice of a whole answer, while it is written."""

    parts: list[Part] = field(default_factory=list)
    reason: str = ""
    tokens: list[TokenRecord] = field(default_factory=list)
    """Tokens with their log probabilities, if requested."""
    token_ids: list[int] = field(default_factory=list)
    """All tokens, including one that ended the answer."""
    end: str | int | None = None
    """Stop string that ended the choice, or else its last token; None if neither ended it."""
    prompt: Sequence[int] = ()
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log probabilities of the prompt's tokens except the first, if requested."""
    prompt_ranks: list[int] = field(default_factory=list)
    """Rank of each token of `prompt_logprobs`; 0 if the engine gives none."""

    @property
    def likelihood(self) -> float:
        """Mean log probability of the choice's tokens; minus infinity if it has none."""
        values = [each.logprobs.logprob for each in self.tokens if each.logprobs is not None]
        return sum(values) / len(values) if values else -math.inf

    def add(self, delta: Delta, parts: Sequence[Part]) -> None:
        """Add a delta, and the parts that were parsed from it."""
        self.parts += parts
        self.token_ids += delta.tokens
        self.reason = delta.finish_reason or self.reason
        self.end = end_of(delta)
        self.prompt_logprobs += delta.prompt_logprobs
        self.prompt_ranks += delta.prompt_ranks
        if delta.logprobs:
            self.tokens += tokens_with_logprobs(delta)


def end_of(delta: Delta) -> str | int | None:
    """Return the stop string that ended an answer with this delta, or else its last token; None if neither did."""
    if delta.finish_reason != FinishReason.STOP or delta.stop_string is not None:
        return delta.stop_string
    return delta.tokens[-1] if delta.tokens else None


class Shape:
    """Wire format of one answer's choices. Subclasses define the methods that raise NotImplementedError."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        wanted: GenerationRequest,
        text: Text,
        reading: Reading,
        *,
        request_id: str = "",
        fingerprint: str = "",
        prompt_of: Callable[[int], Sequence[int]] = lambda choice: (),
    ) -> None:
        """`text` converts tokens to strings for log probabilities. `reading` parses the answers.

        `request_id` is the client's id of the request; empty: none. `fingerprint` names what answers; empty: the
        format has none. `prompt_of` returns the tokens of a choice's prompt, once the answer has begun.
        """
        id = f"{self.id_prefix}{request_id or uuid.uuid4().hex}"
        self.head: Reply = {"id": id, "created": int(time.time()), "model": wanted.model}
        if fingerprint:
            self.head["system_fingerprint"] = fingerprint
        if wanted.service_tier is not None:
            self.head["service_tier"] = wanted.tier
        self.text = text
        self.spell = named if wanted.return_tokens_as_token_ids else written
        self.names_tokens = wanted.logprob_token_ids is not None
        """Whether log probabilities are those of tokens that the request names."""
        self.with_ids = wanted.return_token_ids
        """Whether the answer has token ids."""
        self.prompt_of = prompt_of
        self.new_ids: dict[int, list[int]] = {}
        """Tokens by choice that go into the choice's next chunk, if the answer has token ids."""
        self.prompt_logprobs = wanted.prompt_logprobs
        no_usage = {"usage": None} if wanted.stream_options.include_usage else {}
        self.chunk_head: Reply = {**self.head, "object": self.chunk_object, **no_usage}
        self.stops: frozenset[str | int] = frozenset(
            [*([wanted.stop] if isinstance(wanted.stop, str) else wanted.stop), *wanted.stop_token_ids]
        )
        """Stop strings and stop tokens that the client gave. If it gave any, each choice says which one ended it."""
        self.ends: dict[int, str | int | None] = {}
        """Stop string or last token of each choice that has ended."""
        self.held: dict[int, list[TokenRecord]] = {}
        """Tokens by choice whose log probabilities go into the choice's next chunk with text or a finish reason."""
        self.reading = reading
        self.readers: dict[int, AnswerReader] = {}
        self.reasoning_tokens = 0
        """Number of reasoning tokens in all choices."""

    def read(self, choice: int, delta: Delta) -> list[Part]:
        """Return the new parts of a choice. Must be called once for each of the choice's deltas, in order."""
        ended = delta.finish_reason is not None
        if self.reading.plain:
            return [Said(delta.text)] if delta.text else []
        reader = self.readers.get(choice)
        if reader is None:
            reader = self.readers[choice] = self.reading.reader()
        thought = reader.thinking
        parts = reader.push(delta.text, last=ended)
        if thought or reader.thinking:
            self.reasoning_tokens += len(delta.tokens)
        return parts

    def chunks(self, choice: int, delta: Delta) -> Iterator[Reply]:
        """Yield the stream's next chunks: new parts of `choice`, and its finish reason when it has ended."""
        if delta.logprobs:
            self.held.setdefault(choice, []).extend(tokens_with_logprobs(delta))
        if self.with_ids:
            self.new_ids.setdefault(choice, []).extend(delta.tokens)
        self.ends[choice] = end_of(delta)
        yield from self.pieces(choice, self.read(choice, delta), delta.finish_reason)

    def pieces(self, choice: int, parts: Sequence[Part], reason: str | None) -> Iterator[Reply]:
        """Yield the chunks for new parts of a choice, and for its finish reason."""
        raise NotImplementedError

    def content(self, parts: Sequence[Part], reason: str) -> tuple[Reply, str]:
        """Return the field with the content of a whole choice, and the choice's finish reason."""
        raise NotImplementedError

    def logprobs(self, choice: int, tokens: Sequence[TokenRecord]) -> Reply:
        """Return the `logprobs` field for the next tokens of a choice."""
        raise NotImplementedError

    def usage(self, usage: RequestUsage) -> Reply:
        """Return the stream's last chunk, which reports the usage."""
        return {**self.chunk_head, "choices": [], "usage": self._usage(usage)}

    def whole(self, written: Sequence[Written], usage: RequestUsage) -> Reply:
        """Return the whole answer, with all choices."""
        choices = [
            _choice(
                index,
                *self.content(joined(choice.parts), choice.reason),
                self.logprobs(index, choice.tokens) if choice.tokens else None,
            )
            | self._stop_reason(choice.end)
            for index, choice in enumerate(written)
        ]
        reply = {**self.head, "object": self.whole_object, "choices": choices, "usage": self._usage(usage)}
        if self.with_ids:
            self.add_token_ids(reply, written)
        most = self.prompt_logprobs
        if most is not None:
            records = [
                prompt_records(self.text, each.prompt, each.prompt_logprobs, each.prompt_ranks, most)
                for each in written
            ]
            self.add_prompt_logprobs(reply, records)
        return reply

    def add_prompt_logprobs(self, reply: Reply, records: Sequence[Any]) -> None:
        """Add the prompt log probabilities of each choice to a whole answer."""
        raise NotImplementedError

    def add_token_ids(self, reply: Reply, written: Sequence[Written]) -> None:
        """Add the token ids of each choice, and of the prompts, to a whole answer."""
        for choice, each in zip(reply["choices"], written, strict=True):
            choice["token_ids"] = each.token_ids

    def _stop_reason(self, end: str | int | None) -> Reply:
        """Return vLLM's field with the stop string or token that ended a choice; empty if the client gave none."""
        return {"stop_reason": end if end in self.stops else None} if self.stops else {}

    def _usage(self, usage: RequestUsage) -> Reply:
        format = self.reading.format
        reasons = format.reasoning is not None or format.calls.channels
        return usage.reply(self.reasoning_tokens if reasons else None)

    def _chunk(self, choice: int, content: Reply, reason: str | None = None, *, with_logprobs: bool = True) -> Reply:
        held = self.held.pop(choice, None) if with_logprobs else None
        logprobs = self.logprobs(choice, held) if held else None
        made = _choice(choice, content, reason, logprobs)
        if reason is not None:
            made |= self._stop_reason(self.ends[choice])
        if self.with_ids and with_logprobs:
            made["token_ids"] = self.new_ids.pop(choice, [])
        return {**self.chunk_head, "choices": [made]}


def _choice(index: int, content: Reply, reason: str | None, logprobs: Reply | None) -> Reply:
    return {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}


class ChatShape(Shape):
    """Chat completions. Each choice's stream begins with its role, and ends with its finish reason alone."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, wanted: ChatRequest, text: Text, reading: Reading, **head: Any) -> None:
        super().__init__(wanted, text, reading, **head)
        self.begun: set[int] = set()
        self.thoughts = wanted.include_reasoning
        self.opening = wanted.opening
        """Echoed text before each choice's own; empty: none."""
        self.old = bool(wanted.functions)
        """Whether the client uses the former name for calls, which allows only one call."""

    def pieces(self, choice: int, parts: Sequence[Part], reason: str | None) -> Iterator[Reply]:
        if choice not in self.begun:
            self.begun.add(choice)
            first = self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, with_logprobs=False)
            yield first | ({"prompt_token_ids": list(self.prompt_of(choice))} if self.with_ids else {})
            if self.opening:
                yield self._chunk(choice, {"delta": {"content": self.opening}}, with_logprobs=False)
        calls = self.readers[choice].calls if choice in self.readers else 0
        at = calls - sum(isinstance(part, CallBegin) for part in parts) - 1
        for part in parts:
            at += isinstance(part, CallBegin)
            if delta := self._delta(part, at):
                yield self._chunk(choice, {"delta": delta})
        if reason is not None:
            yield self._chunk(choice, {"delta": {}}, self._reason(reason, calls))

    def _delta(self, part: Part, at: int) -> Reply:
        """Return a part as a delta. `at` is the index of the current call."""
        match part:
            case Said(text):
                return {"content": text}
            case Reasoning(text):
                return dict.fromkeys(REASONING_FIELDS, text) if self.thoughts else {}
            case CallBegin(name, custom=True):
                call = {"id": self._call_id(), "type": "custom", "custom": {"name": name, "input": ""}}
            case CallBegin(name):
                call = {"id": self._call_id(), "type": "function", "function": {"name": name, "arguments": ""}}
            case Arguments(text):
                call = {"function": {"arguments": text}}
            case Input(text):
                call = {"custom": {"input": text}}
        return {"function_call": call["function"]} if self.old else {"tool_calls": [{"index": at, **call}]}

    def _call_id(self) -> str:
        return self.reading.format.calls.new_id()

    def _reason(self, reason: str, calls: int) -> str:
        called = "function_call" if self.old else "tool_calls"
        return called if calls and reason == FinishReason.STOP else reason

    def content(self, parts: Sequence[Part], reason: str) -> tuple[Reply, str]:
        text = self.opening + "".join(part.text for part in parts if isinstance(part, Said))
        thought = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls: list[Reply] = []
        for part in parts:
            if isinstance(part, CallBegin) and part.custom:
                calls.append({"type": "custom", "custom": {"name": part.name, "input": ""}})
            elif isinstance(part, CallBegin):
                calls.append({"type": "function", "function": {"name": part.name, "arguments": ""}})
            elif isinstance(part, Arguments):
                calls[-1]["function"]["arguments"] += part.text
            elif isinstance(part, Input):
                calls[-1]["custom"]["input"] += part.text
        silent = not text and (bool(calls) or bool(thought))
        message: Reply = {"role": "assistant", "content": None if silent else text, "refusal": None}
        if calls and self.old:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = [{"id": self._call_id(), **call} for call in calls]
        if thought and self.thoughts:
            message |= dict.fromkeys(REASONING_FIELDS, thought)
        return {"message": message}, self._reason(reason, len(calls))

    def add_prompt_logprobs(self, reply: Reply, records: Sequence[Any]) -> None:
        reply["prompt_logprobs"] = records[0]

    def add_token_ids(self, reply: Reply, written: Sequence[Written]) -> None:
        super().add_token_ids(reply, written)
        reply["prompt_token_ids"] = list(written[0].prompt)

    def logprobs(self, choice: int, tokens: Sequence[TokenRecord]) -> Reply:
        told = records(self.text, tokens, self.spell, with_own=self.names_tokens)
        return {"content": told, "refusal": None}


class TextShape(Shape):
    """Completions. A chunk has the same form as the whole answer."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, wanted: GenerationRequest, text: Text, reading: Reading, **head: Any) -> None:
        super().__init__(wanted, text, reading, **head)
        self.columns: defaultdict[int, CompletionLogprobs] = defaultdict(lambda: CompletionLogprobs(text, self.spell))
        self.begun: set[int] = set()

    def pieces(self, choice: int, parts: Sequence[Part], reason: str | None) -> Iterator[Reply]:
        if not parts and reason is None:
            return
        chunk = self._chunk(choice, self.content(parts, "")[0], reason)
        if self.with_ids and choice not in self.begun:
            self.begun.add(choice)
            chunk["choices"][0]["prompt_token_ids"] = list(self.prompt_of(choice))
        yield chunk

    def content(self, parts: Sequence[Part], reason: str) -> tuple[Reply, str]:
        return {"text": "".join(part.text for part in parts if isinstance(part, Said))}, reason

    def add_prompt_logprobs(self, reply: Reply, records: Sequence[Any]) -> None:
        for choice, each in zip(reply["choices"], records, strict=True):
            choice["prompt_logprobs"] = each

    def add_token_ids(self, reply: Reply, written: Sequence[Written]) -> None:
        super().add_token_ids(reply, written)
        for choice, each in zip(reply["choices"], written, strict=True):
            choice["prompt_token_ids"] = list(each.prompt)

    def logprobs(self, choice: int, tokens: Sequence[TokenRecord]) -> Reply:
        return self.columns[choice].columns(tokens)
