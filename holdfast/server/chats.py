"""Chat completions that clients have the server keep (`store: true`): whole, or put together from a stream's chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol

from holdfast.server.conversations.store import AsyncStore
from holdfast.server.protocol import ChatRequest, Metadata, RequestBody
from holdfast.server.replies import Reply


def new_id() -> str:
    """Return an unguessable end of a stored completion's id, in 32 hexadecimal digits.

    Half of them are the time in nanoseconds, so the ids of a server are in alphabetical order of their creation.
    """
    return f"{time.time_ns():016x}{secrets.token_hex(8)}"


class ChatUpdate(RequestBody, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/chat/completions/{id}."""

    metadata: Metadata


class Keeper(Protocol):
    """Stores one answer, or does not."""

    async def keep(self, reply: Reply) -> None:
        """Store a whole answer. Raises ApiError."""

    def add(self, chunk: Reply) -> None:
        """Take the next chunk of a stream."""

    async def end(self, usage: Reply) -> None:
        """Store the answer of a stream that has ended, with its usage. Raises ApiError."""


class Unkept:
    """Keeper of an answer that is not stored."""

    async def keep(self, reply: Reply) -> None:
        """Do nothing."""

    def add(self, chunk: Reply) -> None:
        """Do nothing."""

    async def end(self, usage: Reply) -> None:
        """Do nothing."""


class Kept:
    """Keeper of a chat completion that is stored."""

    def __init__(self, store: AsyncStore, tenant: str, wanted: ChatRequest) -> None:
        self._store, self._tenant, self._wanted = store, tenant, wanted
        self._merged = Merged()

    async def keep(self, reply: Reply) -> None:
        """Store a whole answer. Raises ApiError."""
        tenant, said, labels = self._tenant, self._wanted.messages, self._wanted.metadata
        await self._store.run(lambda store: store.chats.keep(tenant, reply, said, labels))

    def add(self, chunk: Reply) -> None:
        """Take the next chunk of a stream."""
        self._merged.add(chunk)

    async def end(self, usage: Reply) -> None:
        """Store the answer of a stream that has ended. Raises ApiError."""
        await self.keep(self._merged.whole(usage))


class StoredChats:
    """The chat completions in the store of one server."""

    def __init__(self, store: AsyncStore) -> None:
        self.store = store

    def keeper(self, tenant: str, wanted: ChatRequest) -> Keeper:
        """Return what stores the answer of a request, if the request wants that."""
        return Kept(self.store, tenant, wanted) if wanted.store else Unkept()


class Merged:
    """A whole chat completion, put together from the chunks of its stream."""

    def __init__(self) -> None:
        self._head: Reply = {}
        self._choices: dict[int, Reply] = {}
        self._usage: Reply | None = None

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add the next chunk."""
        self._head = {name: value for name, value in chunk.items() if name not in ("choices", "usage")} | self._head
        self._usage = chunk.get("usage") or self._usage
        for new in chunk["choices"]:
            choice = self._choices.setdefault(
                new["index"],
                {"index": new["index"], "message": {"role": "assistant", "content": None, "refusal": None}},
            )
            _extend(choice["message"], new["delta"])
            choice["finish_reason"] = new["finish_reason"] or choice.get("finish_reason")
            choice["logprobs"] = _joined(choice.get("logprobs"), new["logprobs"])
            if "stop_reason" in new:
                choice["stop_reason"] = new["stop_reason"]
            if "token_ids" in new:
                choice["token_ids"] = [*choice.get("token_ids", ()), *new["token_ids"]]

    def whole(self, usage: Reply) -> Reply:
        """Return the completion, with the usage of its request."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}


def _extend(message: Reply, delta: Mapping[str, Any]) -> None:
    """Add a chunk's delta to a message."""
    for name in ("content", "reasoning_content", "reasoning"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for new in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if "id" in new:
            calls.append({"id": new["id"], "type": new["type"], new["type"]: {}})
        call = calls[new["index"]]
        _call(call[call["type"]], new[call["type"]])
    if "function_call" in delta:
        _call(message.setdefault("function_call", {}), delta["function_call"])


def _call(call: Reply, new: Mapping[str, str]) -> None:
    """Add the next piece of a call: its name, and its arguments or its input."""
    for name, text in new.items():
        call[name] = call.get(name, "") + text


def _joined(before: Reply | None, new: Reply | None) -> Reply | None:
    """Return the log probabilities of a choice so far and of its next chunk."""
    if before is None or new is None:
        return before or new
    return {**before, "content": [*before["content"], *new["content"]]}
