"""Conversations as their clients see them, for benchmarks that kill or restart what serves them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TURNS = 4
"""Number of turns of a conversation before its client begins another."""
SAID = (
    "Hello! My name is {name}. Tell me about the sea.",
    "What is my name, and what did I ask you?",
    "Tell me a story about a ship and a storm.",
    "And how does the story end?",
)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn")


@dataclass
class Turn:
    """One turn as its client saw it."""

    said: str
    kind: str = ""
    """Kind of the request, or phase of the run in which it was sent."""
    previous: str | None = None
    """Id of the response before."""
    response: str = ""
    """Id of the response; empty until the client knows it."""
    text: str = ""
    done: bool = False
    last: int = -1
    """Number of the last event."""
    resumed: int = 0
    """Number of times that the client went on at another server."""
    cut: bool = False
    """Whether its engine was killed before the turn was done."""
    latest: float = 0.0
    """Time at which the latest piece of text came."""
    ended: float = 0.0
    """Time at which the last event came."""
    silent: float = 0.0
    """Seconds without an event: the longest time, or that after a kill."""
    before: int = 0
    """Number of tokens of the conversation after the turn before."""
    cached: int = 0
    """Number of prompt tokens found in the cache."""
    prompt: int = 0
    """Number of prompt tokens."""
    total: int = 0
    """Number of tokens of the prompt and the answer."""

    def count(self, usage: dict[str, Any]) -> None:
        """Note a response's `usage`."""
        self.prompt, self.total = usage["input_tokens"], usage["total_tokens"]
        self.cached = usage["input_tokens_details"]["cached_tokens"]


@dataclass
class Talk:
    """One conversation."""

    id: str
    turns: list[Turn] = field(default_factory=list)
    unseen: int = 0
    """Number of requests that were sent and whose id the client never saw."""

    @property
    def seen(self) -> list[Turn]:
        """The turns that the client saw end."""
        return [turn for turn in self.turns if turn.done]

    @property
    def expected(self) -> list[tuple[str, str]]:
        """Role and text of each item that the store must have, in order."""
        return [pair for turn in self.seen for pair in (("user", turn.said), ("assistant", turn.text))]


def said_in(items: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Role and text of a conversation's items."""
    return [(each["role"], each["content"][0]["text"]) for each in items]


def text_of(response: dict[str, Any]) -> str:
    """The text of a response's messages."""
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, 90th percentile and largest; empty without values."""
    if not values:
        return {}
    ranked = sorted(values)
    parts = dict(median=statistics.median(ranked), p90=ranked[int(0.9 * (len(ranked) - 1))], most=ranked[-1])
    return {name: round(value, digits) for name, value in parts.items()}
