"""RemoteTools: the remote servers that this server may call, and the connections of each response to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from http import HTTPStatus
from importlib import import_module
from typing import Any, Protocol

from holdfast.server.protocol import invalid
from holdfast.server.remote_tools.hosts import AllowedHosts, NotAllowed
from holdfast.server.remote_tools.values import RemoteFault, RemoteServer, Result

CLOSE_SECONDS = 5.0
"""Seconds for a server to hear that its session ends."""
MOST_ARGUMENTS = 64 << 10
"""Maximum number of characters of a call's arguments."""


class Connection(Protocol):
    """A connection to one server."""

    async def list_tools(self) -> list[dict[str, Any]]:
        """Return the server's tools. Raises RemoteFault."""

    async def call(self, name: str, arguments: dict[str, Any]) -> Result:
        """Call a tool. Raises RemoteFault."""

    async def close(self) -> None:
        """End the connection."""

    def abort(self) -> None:
        """End the connection without a word to the server."""


class RemoteTools:
    """The remote servers that this server may call."""

    def __init__(self, allowed: AllowedHosts, seconds: float) -> None:
        """Import the SDK, which takes a second: no stream may wait for that. `seconds` is the time limit of a call."""
        self._allowed, self._seconds = allowed, seconds
        self._session = import_module("holdfast.server.remote_tools.session").Session
        self._closing: set[asyncio.Task[None]] = set()

    def check(self, server: RemoteServer, name: str) -> None:
        """Raises ApiError if a server may not be called. `name` is the parameter that names it."""
        try:
            self._allowed.check(server.url)
        except NotAllowed as error:
            raise invalid(f"{name} is refused: {error}", name) from None

    def connect(self, server: RemoteServer) -> Connection:
        """Return a connection that is opened at its first use."""
        made: Connection = self._session(server, self._allowed, self._seconds)
        return made

    def leave(self, connection: Connection) -> None:
        """End a connection. Nobody waits for it."""
        task = asyncio.create_task(_ended(connection))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Wait until all connections have ended."""
        await asyncio.gather(*self._closing)


async def _ended(connection: Connection) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await connection.close()
    except TimeoutError:
        connection.abort()


class RemoteCalls:
    """The connections of one response."""

    def __init__(self, remote: RemoteTools) -> None:
        self._remote = remote
        self._open: dict[str, Connection] = {}

    async def list_tools(self, server: RemoteServer) -> list[dict[str, Any]]:
        """Return a server's tools, in the shape of an `mcp_list_tools` item. Raises RemoteFault."""
        return await self._connection(server).list_tools()

    async def call(self, server: RemoteServer, name: str, arguments: str) -> Result:
        """Call a tool with arguments as JSON text. A failure is a result, too."""
        try:
            return await self._connection(server).call(name, read_arguments(arguments))
        except RemoteFault as fault:
            return Result(None, fault.error())

    def leave(self) -> None:
        """End all connections. Nobody waits for them."""
        for connection in self._open.values():
            self._remote.leave(connection)
        self._open = {}

    def _connection(self, server: RemoteServer) -> Connection:
        if server.label not in self._open:
            self._open[server.label] = self._remote.connect(server)
        return self._open[server.label]


def read_arguments(text: str) -> dict[str, Any]:
    """Decode a call's arguments, which the model wrote. Raises RemoteFault."""
    try:
        found: Any = json.loads(text or "{}") if len(text) <= MOST_ARGUMENTS else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        reason = f"the arguments are not a JSON object of at most {MOST_ARGUMENTS} characters"
        raise RemoteFault(reason, code=HTTPStatus.BAD_REQUEST)
    return found


def failure_text(error: Mapping[str, Any]) -> str:
    """Return the error of an `mcp_call` item as text for the model."""
    if error.get("type") == "mcp_tool_execution_error":
        content = error.get("content")
        blocks = [each for each in content if isinstance(each, Mapping)] if isinstance(content, list) else []
        return "\n".join(str(each.get("text", "")) for each in blocks) or "The call failed."
    return f"The call failed: {error.get('message', '')}"
