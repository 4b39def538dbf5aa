"""What is stored and what it builds on, as values: turns, contexts, pages, bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Item = dict[str, Any]
"""A message as the API shows it: type, id, status, role, content."""

GOOD = ("completed", "incomplete")
"""How a turn ended on which others may build."""


class StoreError(Exception):
    """The store cannot be opened; the message says why in one line."""


class Gone(Exception):
    """What a turn builds on was deleted, or has gone on, while it was written."""


class Full(Exception):
    """A thread takes up more of the store than one may; the message is for its user."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """How much is kept. Beyond any of them the threads that were not active for longest are dropped whole."""

    seconds: float
    """Time since a thread's last turn."""
    threads: int
    bytes: int
    """Of all tokens and items, as they are stored."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A response as it is stored. Tokens are the whole sequence's: what it shares with its parent is stored once."""

    response: Mapping[str, Any]
    """As the API shows it; among its fields id, status, output, previous_response_id."""
    tenant: str
    input: Sequence[Item]
    context: Context
    conversation: str | None = None
    visible: bool = True
    tokens: Sequence[int] = ()
    known: int = 0
    """How many of the first of them were taken from the context as they are."""
    characters: int = 0
    digest: bytes = b""

    @property
    def id(self) -> str:
        """The response's id."""
        return str(self.response["id"])


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a new turn builds on."""

    thread: str | None = None
    """None for a turn that begins one."""
    parent: str | None = None
    """The turn that was last; None at the beginning, and after a conversation's items were edited by hand."""
    status: str = "completed"
    items: Sequence[Item] = ()
    """All messages so far."""
    tokens: Sequence[int] = ()
    """The raw tokens behind them, as far as they are known."""
    characters: int = 0
    """How long the text is that these tokens stand for."""
    digest: bytes = b""
    """Of that text and the tokenizer."""


@dataclass(frozen=True)
class Page:
    """Some of a list of items."""

    items: list[Item]
    has_more: bool
