"""Feed: sends the events of a tenant's batches to its listeners."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator

from holdfast.server.conversations.protocol import Event, event_bytes
from holdfast.server.protocol import ApiError

MOST_LISTENERS = 64
"""Maximum number of listeners per tenant."""
MOST_UNREAD = 8 << 20
"""Maximum number of unread bytes per listener. Beyond it, the stream ends and the listener starts anew."""
HEARTBEAT_SECONDS = 15.0


class Feed:
    """Passes on events as they happen. It stores none, so a new listener first asks for the current state."""

    def __init__(self) -> None:
        self._listeners: defaultdict[str, set[_Listener]] = defaultdict(set)
        self._closed = False

    def publish(self, tenant: str, event: Event) -> None:
        """Send an event to all listeners of a tenant."""
        if listeners := self._listeners.get(tenant):
            data = event_bytes(event)
            for listener in listeners:
                listener.add(data)

    async def listen(self, tenant: str) -> AsyncGenerator[bytes, None]:
        """Yield server-sent events: `batch.listening` at once, then every later event. Raises ApiError 429."""
        if len(self._listeners[tenant]) >= MOST_LISTENERS:
            reason = f"{MOST_LISTENERS} clients of this API key listen to its batches; close one of them"
            raise ApiError(reason, status=429, code="rate_limit_exceeded", retry_after=5)
        listener = _Listener(closed=self._closed)
        self._listeners[tenant].add(listener)
        try:
            yield event_bytes({"type": "batch.listening"})
            while (data := await listener.next()) is not None:
                yield data
        finally:
            self._listeners[tenant].discard(listener)
            if not self._listeners[tenant]:
                del self._listeners[tenant]

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        for listeners in self._listeners.values():
            for listener in listeners:
                listener.close()


class _Listener:
    def __init__(self, closed: bool) -> None:
        self._unread: deque[bytes] = deque()
        self._size = 0
        self._closed = closed
        self._changed = asyncio.Event()

    def add(self, data: bytes) -> None:
        self._unread.append(data)
        self._size += len(data)
        if self._size > MOST_UNREAD:
            self.close()
        self._changed.set()

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def next(self) -> bytes | None:
        """Return the events that came, joined; a comment after a quiet time; None at the end."""
        if not self._unread and not self._closed:
            self._changed.clear()
            try:
                async with asyncio.timeout(HEARTBEAT_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                return b": still here\n\n"
        if self._size > MOST_UNREAD or not self._unread:
            return None
        data = b"".join(self._unread)
        self._unread.clear()
        self._size = 0
        return data
