"""Closing: how a server closes its listener and its connections without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import select
import socket
import struct

import uvicorn

from holdfast.server.connection import Connections

FILTER_SECONDS = 0.05
"""Seconds after the last new connection until a listener is closed. A handshake that has begun ends meanwhile."""
MOST_SECONDS = 2.0
"""Maximum number of seconds in which connections that are still queued are accepted."""
BEGIN_SECONDS = 0.5
"""Maximum number of seconds for which new connections may send their request after the listener is closed."""
SO_ATTACH_FILTER = 26
"""Linux's socket option for a classic BPF program. Python's `socket` does not name it."""
TCP_FLAGS = 13
"""Offset in bytes of the flags in a TCP header, where the program begins to read."""
SYN = 0x02
DROP_SYN = (
    (0x30, 0, 0, TCP_FLAGS),  # load the byte of the flags
    (0x45, 0, 1, SYN),  # SYN is set: go on; else skip one
    (0x06, 0, 0, 0),  # drop the packet
    (0x06, 0, 0, 0xFFFFFFFF),  # keep all of it
)
"""BPF program that drops each packet that asks for a connection: (code, jump if true, jump if false, operand)."""


async def stop_accepting(server: uvicorn.Server, listener: socket.socket, connections: Connections) -> None:
    """Close the listener, and the connections that have had their answers.

    A connection that is new may send its request within BEGIN_SECONDS; it is answered.
    """
    await accept_all(listener)
    for each in server.servers:
        each.close()
    loop = asyncio.get_running_loop()
    end = loop.time() + BEGIN_SECONDS
    while not connections.begun and loop.time() < end:
        await asyncio.sleep(0.005)
    connections.end_idle()


async def leave_listener(server: uvicorn.Server, connections: Connections, idle_seconds: float) -> None:
    """Stop accepting at a listener that a successor has, too, and let each connection end with its next answer.

    A connection that stays idle ends by itself after `idle_seconds`. None is ended while its client may send a request.
    """
    connections.leave()
    for each in server.servers:
        each.close()
    loop = asyncio.get_running_loop()
    end = loop.time() + idle_seconds + BEGIN_SECONDS
    while connections.waiting and loop.time() < end:
        await asyncio.sleep(0.02)
    connections.end_idle()


async def all_answered(connections: Connections) -> None:
    """Wait until no request is being answered."""
    while connections.busy:
        await asyncio.sleep(0.005)


async def accept_all(listener: socket.socket) -> None:
    """Let the kernel accept no further connection, and wait until the event loop has taken all that are queued.

    Closing a listener resets the connections in its queue, whose clients may have sent a request. A client that comes
    after this call gets no answer until the listener is closed, which refuses its connection.
    """
    refuse_new(listener)
    loop = asyncio.get_running_loop()
    end = loop.time() + MOST_SECONDS
    quiet = loop.time() + FILTER_SECONDS
    while loop.time() < min(quiet, end):
        if has_queued(listener):
            quiet = loop.time() + FILTER_SECONDS
        await asyncio.sleep(0.005)


def refuse_new(listener: socket.socket) -> None:
    """Drop requests for connections from now on, where the system can: on Linux, for TCP."""
    code = b"".join(struct.pack("HBBI", *step) for step in DROP_SYN)
    program = ctypes.create_string_buffer(code, len(code))
    with contextlib.suppress(OSError):
        listener.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(DROP_SYN), ctypes.addressof(program))
        )


def has_queued(listener: socket.socket) -> bool:
    """Whether a connection waits to be accepted."""
    return bool(select.select([listener], [], [], 0)[0])
