"""Held requests: what a client needs to continue a request whose own client is lost, for a limited time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.core.types import NO_OUTPUT, FinishReason, Request, SequenceOutput, TokenLogprobs

NEVER = math.inf
"""Time of an event that has not happened."""
GRACE_SECONDS = 30.0
"""Seconds that a request whose client is lost goes on without one. It is aborted then."""
ENDED_SECONDS = 60.0
"""Seconds for which the tokens of an ended request are held."""
HELD_TOKENS = 1 << 22
"""Most tokens that are held, prompts included. The requests that ended first are dropped beyond it."""
LOGPROBS_COST = 64
"""Number of tokens that one token's log probabilities count for."""


@dataclass(eq=False)
class HeldRequest:
    """One request, its answer so far, and the number of the client that it belongs to."""

    id: str
    """The engine's id of the request."""
    request: Request
    """The request under its client's own id."""
    note: bytes
    owner: int
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    first: SequenceOutput = NO_OUTPUT
    """The first output. It says how much of the prompt was cached."""
    finish_reason: FinishReason | None = None
    ended_at: float = NEVER
    lost_at: float = NEVER
    """Time at which its client was lost; NEVER while it has one."""

    @property
    def ended(self) -> bool:
        """Whether no more tokens come."""
        return self.ended_at < NEVER

    @property
    def lost(self) -> bool:
        """Whether its client is lost."""
        return self.lost_at < NEVER

    @property
    def key(self) -> tuple[str, str]:
        """Tenant, and the client's own id."""
        return self.request.identity.tenant, self.request.id

    @property
    def size(self) -> int:
        """Number of tokens that it counts for."""
        return len(self.request.prompt) + len(self.tokens) + LOGPROBS_COST * len(self.logprobs)

    def take(self, output: SequenceOutput, now: float) -> None:
        """Add the output of one step."""
        self.first = output if self.first is NO_OUTPUT else self.first
        self.tokens.extend(output.tokens)
        self.logprobs.extend(output.logprobs)
        if output.finish_reason:
            self.finish_reason = output.finish_reason
            self.end(now)

    def end(self, now: float) -> None:
        """Record that no more tokens come."""
        self.ended_at = now

    def lose(self, now: float) -> None:
        """Record that its client is lost."""
        self.lost_at = now

    def move(self, owner: int) -> None:
        """Give it to another client."""
        self.owner, self.lost_at = owner, NEVER

    def due(self, now: float) -> bool:
        """Whether it was held for long enough."""
        return now > (self.ended_at + ENDED_SECONDS if self.ended else self.lost_at + GRACE_SECONDS)


class HeldRequests:
    """All held requests of an engine, in the order of their arrival."""

    def __init__(self, limit: int = HELD_TOKENS) -> None:
        """`limit` is the most tokens that are held."""
        self._limit = limit
        self._size = 0
        self._by_id: dict[str, HeldRequest] = {}
        self._by_key: dict[tuple[str, str], HeldRequest] = {}

    def add(self, held: HeldRequest) -> bool:
        """Hold a request from its arrival on, in place of one with the same key that has ended or lost its client.

        Returns False, and holds nothing, if another one has a client, or if there is no room for the prompt.
        """
        former = self._by_key.get(held.key, held)
        if former is not held:
            if not (former.ended or former.lost):
                return False
            self.drop(former)
        self._make_room(held.size)
        if self._size + held.size > self._limit:
            return False
        self._by_id[held.id] = self._by_key[held.key] = held
        self._size += held.size
        return True

    def get(self, id: str) -> HeldRequest | None:
        """The request with the engine's id, if it is held."""
        return self._by_id.get(id)

    def find(self, tenant: str, own_id: str) -> HeldRequest | None:
        """The tenant's request under its client's own id, if it is held."""
        return self._by_key.get((tenant, own_id))

    def take(self, output: SequenceOutput, now: float) -> None:
        """Add an output of one step to its request, if that is held."""
        if held := self._by_id.get(output.request_id):
            self._size -= held.size
            held.take(output, now)
            self._size += held.size
            self._make_room(0)

    def drop(self, held: HeldRequest) -> None:
        """Hold a request no longer."""
        if held.id in self._by_id:
            del self._by_id[held.id], self._by_key[held.key]
            self._size -= held.size

    def of(self, owner: int) -> list[HeldRequest]:
        """The requests of a client."""
        return [held for held in self._by_id.values() if held.owner == owner]

    def due(self, now: float) -> Iterator[HeldRequest]:
        """Drop the requests that were held for long enough, and yield those of them that still run."""
        for held in [held for held in self._by_id.values() if held.due(now)]:
            self.drop(held)
            if not held.ended:
                yield held

    def _make_room(self, size: int) -> None:
        """Drop the requests that ended first, until `size` more tokens fit or only running requests are left."""
        if self._size + size <= self._limit:
            return
        for held in sorted((each for each in self._by_id.values() if each.ended), key=lambda each: each.ended_at):
            self.drop(held)
            if self._size + size <= self._limit:
                return
