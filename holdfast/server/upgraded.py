"""Upgraded: a connection that has become a WebSocket. Needs the extra holdfast[websockets]."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast.server.connection import Connections

MOST_FRAMES = 4096
"""Maximum number of frames of one message. Each takes memory of its own, however short it is."""


class Upgraded(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol. It counts as an open connection, and its unfinished message as a body received.

    A connection that exceeds the limit of all of these is cut, as it has no request that could get an answer.
    """

    def __init__(self, *args: Any, shared: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared
        self._held = 0
        """Number of bytes of the message that is being received."""

    def connection_made(self, transport: Any) -> None:
        self._shared.upgraded.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.upgraded.discard(self)
        self._hold(0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.disconnected:
            return
        self._hold(len(self.conn.reader.buffer) + sum(map(len, self.frames)))
        if len(self.frames) > MOST_FRAMES or self._shared.held_bytes > self._shared.config.max_bodies_bytes:
            self.transport.abort()

    def _hold(self, size: int) -> None:
        self._shared.held_bytes += size - self._held
        self._held = size
