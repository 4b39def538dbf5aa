"""Upgraded: a connection that has become a WebSocket. Needs the extra holdfast[websockets]."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from holdfast.server.connection import Connections


class Upgraded(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket protocol. It counts as an open connection."""

    def __init__(self, *args: Any, shared: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared

    def connection_made(self, transport: Any) -> None:
        self._shared.upgraded.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.upgraded.discard(self)
        super().connection_lost(exc)
