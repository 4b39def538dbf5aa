"""Sequence: a request's token stream while the scheduler holds it."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from holdfast.core.types import FinishReason, Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's token stream while the scheduler holds it. Only the scheduler changes it.

    Its `SequenceCache` knows which of its positions are in the KV cache.
    """

    request: Request
    seed: int
    """The request's own seed, or one drawn for it."""
    tokens: array[int] = field(init=False)
    """Prompt and generated tokens known to the host."""
    length: int = field(init=False)
    """Number of positions, including those whose token is still being sampled."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    cached_by_tier: tuple[int, int, int] = (0, 0, 0)
    """Numbers of `cached_tokens` from the host, from the disk and from the remote tier."""
    preemptions: int = 0
    scheduled_at: float | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = array("I", self.request.prompt)
        self.length = len(self.tokens)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def in_flight(self) -> int:
        """Most tokens that steps in flight sample for this sequence."""
        return self.length - len(self.tokens)

    @property
    def ended(self) -> bool:
        """Whether the sequence has ended, and gets no further token."""
        return self.finish_reason is not None

    def rollback(self, length: int) -> None:
        """Drop the positions from `length` on, whose tokens were not accepted; known tokens stay."""
        assert len(self.tokens) <= length <= self.length
        self.length = length
