"""OpenSockets: the WebSockets of a server, counted by tenant, and the turns in progress on them."""

from __future__ import annotations

import asyncio
from collections import Counter

from holdfast.server.config import ServerConfig
from holdfast.server.connection import connection_limit
from holdfast.server.protocol import ApiError

CHECK = "/connect"
"""End of the path of a handshake's check, an inner GET that finds no response. Its log line is the handshake's."""
SHARE = 2
"""Divisor of the connection limit that gives the maximum number of WebSockets. The others are left for requests."""


class OpenSockets:
    """Counts open WebSockets against their limits."""

    def __init__(self, config: ServerConfig) -> None:
        self.most = max(1, connection_limit(config) // SHARE)
        self.most_of_one = max(1, int(self.most * config.share))
        """Maximum number for one tenant."""
        self.answering = 0
        """Number of turns in progress."""
        self._open: Counter[str] = Counter()

    def open(self, tenant: str) -> None:
        """Count a new WebSocket. Raises ApiError beyond the limits."""
        if self._open.total() >= self.most:
            reason = f"{self.most} WebSockets are open, which is the limit; try again"
            raise ApiError(reason, status=503, code="overloaded", retry_after=1)
        if self._open[tenant] >= self.most_of_one:
            reason = f"this API key has {self.most_of_one} WebSockets, its share; close one"
            raise ApiError(reason, status=429, code="rate_limit_exceeded", retry_after=1)
        self._open[tenant] += 1

    def close(self, tenant: str) -> None:
        """Count a WebSocket that has ended."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]

    async def idle(self) -> None:
        """Wait until no turn is in progress."""
        while self.answering:
            await asyncio.sleep(0.005)
