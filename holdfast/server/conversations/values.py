"""The store's values and errors: turns, contexts, bounds. Imports no database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec import Raw

from holdfast.server.conversations.encoded import EncodedTurn, encoded_item, joined_items, tokens_to_bytes
from holdfast.server.replies import encode

Item = dict[str, Any]
"""An item in the API's shape, for example a message with type, id, status, role and content."""

GOOD = ("completed", "incomplete")
"""Statuses of turns that other turns may build on."""
RUNNING = ("queued", "in_progress")
"""Statuses of turns that are still being written."""


MOST_CONTEXT = 16 << 20
"""Maximum number of bytes of stored messages that a turn may build on. The turn holds all of them in memory."""


class StoreError(Exception):
    """The store cannot be opened. The message is one line with the reason."""


class NotFound(Exception):
    """An object does not exist or belongs to another tenant. To a client, both look the same."""

    def __init__(self, kind: str, id: str, param: str | None = None) -> None:
        """`param` names the request's parameter that held the id. It is None if the path held it."""
        super().__init__(kind, id, param)
        self.kind, self.id, self.param = kind, id, param


class Conflict(Exception):
    """A turn's parent or conversation was deleted or changed while the turn was written."""

    code = "conflict"
    """Code of the error that a client gets."""
    retry_after: int | None = None
    """Seconds after which the client may try again; None if that will not help."""


class ConversationBusy(Conflict):
    """Another turn or edit of the conversation is in progress, at this server or another one, or came first."""

    code = "conversation_busy"
    retry_after = 1


class ThreadTooLarge(Exception):
    """A thread exceeds its share of the store, or the limit of one turn's context. The message is for the user."""


def check_context(size: int) -> None:
    """Raises ThreadTooLarge if the messages before a turn have too many bytes."""
    if size > MOST_CONTEXT:
        reason = (
            f"the messages before this turn have {size} bytes or more; at most {MOST_CONTEXT} are read for one turn"
        )
        raise ThreadTooLarge(f"{reason}; begin a new conversation, or compact this one")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Limits of the store. Beyond any of them, the longest idle threads are dropped."""

    seconds: float
    """Maximum number of seconds since a thread's last turn."""
    threads: float
    """Maximum number of threads; `math.inf` for any number."""
    bytes: float
    """Maximum number of stored bytes of tokens and items; `math.inf` for any number."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A response to be stored. `tokens` is the whole sequence; only tokens that differ from the parent's are stored."""

    response: Mapping[str, Any]
    """The response as the API shows it, with id, status, output and previous_response_id."""
    tenant: str
    input: Sequence[Item]
    context: Context
    conversation: str | None = None
    branch: bool = False
    """Whether the turn stands next to others of its conversation, whose head and items stay as they are."""
    visible: bool = True
    tokens: Sequence[int] = ()
    known: int = 0
    """Number of leading tokens that were taken unchanged from the context."""
    characters: int = 0
    digest: bytes = b""
    recipe: bytes = b""
    """The recipe by which another server can write a response that is stored before its end; empty: none can."""
    recorded: bool = False
    """Whether the response has a record as a stream in progress (`stream_records`), which this turn ends."""

    @property
    def id(self) -> str:
        """Id of the response."""
        return str(self.response["id"])

    @cached_property
    def encoded(self) -> EncodedTurn:
        """The turn as it is stored. It is encoded once, also if storing it is tried again."""
        context, start = self.context, self._shared()
        given = [encode(item) for item in self.input]
        answered = [encode(item) for item in self.response["output"]]
        output, said = joined_items(answered), joined_items(given)
        extends = self.conversation is not None and self.response["status"] in GOOD
        both = zip((*self.input, *self.response["output"]), (*given, *answered), strict=True) if extends else ()
        return EncodedTurn(
            response=encode({**self.response, "output": Raw(output)}),
            input=said,
            history=encode([] if context.parent else context.items),
            start=start,
            tokens=tokens_to_bytes(self.tokens[start:]),
            items=[encoded_item(item, data) for item, data in both],
            said=len(said) + len(output),
        )

    def _shared(self) -> int:
        """Return the number of leading tokens shared with the parent."""
        if self.context.parent is None:
            return 0
        known = self.context.tokens
        if self.known == len(known) or self.tokens[: len(known)] == known:
            return len(known)
        pairs = enumerate(zip(self.tokens, known, strict=False))
        return next((at for at, (one, other) in pairs if one != other), min(len(self.tokens), len(known)))


@dataclass(frozen=True, kw_only=True)
class Context:
    """State that a new turn builds on."""

    thread: str | None = None
    """Id of the thread; None for a turn that begins one."""
    parent: str | None = None
    """Id of the last turn. None at the beginning, and after a client edited the conversation's items."""
    status: str = "completed"
    items: Sequence[Item] = ()
    """All items so far."""
    tokens: Sequence[int] = ()
    """Raw tokens of the items' text, up to the first character whose tokens are not known."""
    characters: int = 0
    """Number of characters of the text that `tokens` encodes."""
    digest: bytes = b""
    """Digest of the text and of the tokenizer."""
    size: int = 0
    """Approximate number of bytes of the items as they are stored."""
