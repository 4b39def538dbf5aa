"""Encodings of items, turns and tokens: the bytes that are stored, and the words that a search finds."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from holdfast.server.conversations.words import item_text, words_of
from holdfast.server.replies import encode


class EncodedItem(NamedTuple):
    """An item as it is stored."""

    id: str
    data: bytes
    words: frozenset[str]
    """Words of its visible text."""


class EncodedTurn(NamedTuple):
    """A turn as it is stored."""

    response: bytes
    input: bytes
    history: bytes
    """Items before a first turn; of a later turn, an empty list."""
    start: int
    """Number of leading tokens that are stored with its parent."""
    tokens: bytes
    items: Sequence[EncodedItem]
    """Items that its conversation gets."""
    said: int
    """Number of bytes of its input and output."""

    @property
    def size(self) -> int:
        """Number of bytes of the turn and of its conversation's new items."""
        row = len(self.response) + len(self.input) + len(self.history) + len(self.tokens)
        return row + sum(len(item.data) for item in self.items)


def encoded_item(item: dict[str, Any], data: bytes | None = None) -> EncodedItem:
    """Encode an item. `data` is the encoded item if it is known."""
    data = encode(item) if data is None else data
    return EncodedItem(item["id"], data, frozenset(words_of(item_text(data))))


def encoded_items(items: Iterable[dict[str, Any]]) -> list[EncodedItem]:
    """Encode items."""
    return [encoded_item(item) for item in items]


def joined_items(encoded: Iterable[bytes]) -> bytes:
    """Return the list of encoded items, as if it was encoded whole."""
    return b"[" + b",".join(encoded) + b"]"


def tokens_to_bytes(tokens: Sequence[int]) -> bytes:
    """Encode token ids as 32-bit little-endian numbers."""
    numbers = array("I", tokens)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def tokens_from_bytes(data: bytes) -> array[int]:
    """Decode token ids."""
    numbers = array("I", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
