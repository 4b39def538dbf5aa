"""Replies to clients: OpenAI's response bodies and stream chunks, in their exact shapes."""

from __future__ import annotations

import math
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from holdfast.core.types import TokenLogprobs
from holdfast.engine.client import Delta
from holdfast.engine.text import Text
from holdfast.server.logprobs import CompletionLogprobs, ToldToken, prompt_records, records, told_tokens
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


@dataclass
class Written:
    """One choice of a whole answer, as it is written."""

    texts: list[str] = field(default_factory=list)
    reason: str = ""
    told: list[ToldToken] = field(default_factory=list)
    """Its tokens with their log probabilities, if they are asked for."""
    prompt: Sequence[int] = ()
    told_of_prompt: list[TokenLogprobs] = field(default_factory=list)
    """Of each token of its prompt but the first, if they are asked for."""

    @property
    def likelihood(self) -> float:
        """Mean log probability of its tokens; minus infinity without any."""
        values = [each.logprobs.logprob for each in self.told if each.logprobs is not None]
        return sum(values) / len(values) if values else -math.inf

    def add(self, delta: Delta) -> None:
        """Add what came."""
        self.texts.append(delta.text)
        self.reason = delta.finish_reason or self.reason
        self.told_of_prompt += delta.prompt_logprobs
        if delta.logprobs:
            self.told += told_tokens(delta)


class Shape:
    """The wire format of one answer's choices. A kind of answer defines `chunks` and `content`."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, wanted: GenerationRequest, text: Text) -> None:
        """`text` spells the tokens whose log probabilities are told."""
        id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.head: Reply = {"id": id, "created": int(time.time()), "model": wanted.model}
        self.text = text
        self.prompt_logprobs = wanted.prompt_logprobs
        no_usage = {"usage": None} if wanted.stream_options.include_usage else {}
        self.chunk_head: Reply = {**self.head, "object": self.chunk_object, **no_usage}
        self.held: dict[int, list[ToldToken]] = {}
        """By choice, tokens whose log probabilities go with its next chunk that has text or ends it."""

    def chunks(self, choice: int, delta: Delta) -> Iterator[Reply]:
        """The stream's next chunks: the new text of `choice`, and its finish reason if it has ended."""
        if delta.logprobs:
            self.held.setdefault(choice, []).extend(told_tokens(delta))
        yield from self.pieces(choice, delta.text, delta.finish_reason)

    def pieces(self, choice: int, text: str, reason: str | None) -> Iterator[Reply]:
        """The chunks of some new text, and of the finish reason."""
        raise NotImplementedError

    def content(self, text: str) -> Reply:
        """The field of a whole choice that holds its text."""
        raise NotImplementedError

    def logprobs(self, choice: int, told: Sequence[ToldToken]) -> Reply:
        """The field of a choice that has the log probabilities of these tokens, its next ones."""
        raise NotImplementedError

    def usage(self, usage: RequestUsage) -> Reply:
        """The stream's last chunk, if the client asked for usage."""
        return {**self.chunk_head, "choices": [], "usage": usage.reply()}

    def whole(self, written: Sequence[Written], usage: RequestUsage) -> Reply:
        """The whole answer, with all choices."""
        choices = [
            _choice(
                index,
                self.content("".join(choice.texts)),
                choice.reason,
                self.logprobs(index, choice.told) if choice.told else None,
            )
            for index, choice in enumerate(written)
        ]
        reply = {**self.head, "object": self.whole_object, "choices": choices, "usage": usage.reply()}
        most = self.prompt_logprobs
        if most is not None:
            told = [prompt_records(self.text, each.prompt, each.told_of_prompt, most) for each in written]
            self.tell_prompts(reply, told)
        return reply

    def tell_prompts(self, reply: Reply, told: Sequence[Any]) -> None:
        """Add to a whole answer what is told of the prompt of each choice."""
        raise NotImplementedError

    def _chunk(self, choice: int, content: Reply, reason: str | None = None, *, tells: bool = True) -> Reply:
        held = self.held.pop(choice, None) if tells else None
        logprobs = self.logprobs(choice, held) if held else None
        return {**self.chunk_head, "choices": [_choice(choice, content, reason, logprobs)]}


def _choice(index: int, content: Reply, reason: str | None, logprobs: Reply | None) -> Reply:
    return {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}


class ChatShape(Shape):
    """Chat completions: each choice's stream opens with its role and closes with an empty delta and the reason."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, wanted: GenerationRequest, text: Text) -> None:
        super().__init__(wanted, text)
        self.begun: set[int] = set()

    def pieces(self, choice: int, text: str, reason: str | None) -> Iterator[Reply]:
        if choice not in self.begun:
            self.begun.add(choice)
            yield self._chunk(choice, {"delta": {"role": "assistant", "content": ""}}, tells=False)
        if text:
            yield self._chunk(choice, {"delta": {"content": text}})
        if reason is not None:
            yield self._chunk(choice, {"delta": {}}, reason)

    def content(self, text: str) -> Reply:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def tell_prompts(self, reply: Reply, told: Sequence[Any]) -> None:
        reply["prompt_logprobs"] = told[0]

    def logprobs(self, choice: int, told: Sequence[ToldToken]) -> Reply:
        return {"content": records(self.text, told), "refusal": None}


class TextShape(Shape):
    """Completions: chunks have the shape of the whole."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, wanted: GenerationRequest, text: Text) -> None:
        super().__init__(wanted, text)
        self.columns: defaultdict[int, CompletionLogprobs] = defaultdict(lambda: CompletionLogprobs(text))

    def pieces(self, choice: int, text: str, reason: str | None) -> Iterator[Reply]:
        if text or reason is not None:
            yield self._chunk(choice, {"text": text}, reason)

    def content(self, text: str) -> Reply:
        return {"text": text}

    def tell_prompts(self, reply: Reply, told: Sequence[Any]) -> None:
        for choice, each in zip(reply["choices"], told, strict=True):
            choice["prompt_logprobs"] = each

    def logprobs(self, choice: int, told: Sequence[ToldToken]) -> Reply:
        return self.columns[choice].columns(told)
