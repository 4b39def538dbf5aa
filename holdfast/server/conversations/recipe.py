"""Recipe: what another server needs to write a response when the server that began it has ended."""

from __future__ import annotations

import msgspec

from holdfast.server.conversations.protocol import Response, ResponseRequest
from holdfast.server.conversations.values import Item


class Recipe(msgspec.Struct, frozen=True):
    """A response before its first token. Its events follow from the recipe and the tokens."""

    wanted: ResponseRequest
    """The request, with the model's defaults filled in."""
    tenant: str
    response: Response
    """The response in its first state. The ids of its items follow from its own id."""
    input: list[Item]
    server: str
    """Name of the server that wrote the recipe, as in its leases."""

    def encoded(self) -> bytes:
        """The recipe as bytes, for an engine or the store."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, data: bytes) -> Recipe:
        """Read a recipe. Raises ValueError for anything else, for example one of another version of Holdfast."""
        return msgspec.msgpack.decode(data, type=cls)
