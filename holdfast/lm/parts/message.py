"""Message: the base of the messages between the API process and the engine process."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True):
    """The base of all messages."""
