"""Attachment: a client's connection to an engine that has an address of its own, and that outlives the client."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from holdfast.core.version import __version__
from holdfast.engine import messages
from holdfast.engine.address import endpoint, is_local
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.curve import CONNECT_MS, beat
from holdfast.engine.spawn import Remote
from holdfast.engine.wire import WIRE, mismatch

RETRY_SECONDS = 0.25
"""Seconds between two attempts to reach an engine."""
LINGER_MS = 200
"""Milliseconds for the last message to leave."""
RECONNECT_MS = 24 * 3600 * 1000
"""Milliseconds after which libzmq connects again: a lost connection is closed long before.

It must not connect, because messages may be lost between two connections. Told never to, it drops what it has received.
"""
QUEUE_LIMIT = 4096
"""Most messages that wait to be read. The engine drops a client that lets more wait."""


ENDS = (
    zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)  # fmt: skip
"""Events after which a connection carries no messages. A wrong key fails the handshake."""


class NoEngine(EngineStartError):
    """No engine listens at the address, or the connection to it was lost before it answered."""


class Attachment:
    """A connection to a running engine, in place of a process and its `Child`. For one event loop."""

    def __init__(self, address: str, key: str = "") -> None:
        """Connect. `key` is the secret key for TCP. Raises ValueError for an address that is none."""
        url = endpoint(address)
        self.address = address
        self.began = time.monotonic()
        self._place = f"the engine at {address}"
        self.remote: Remote | None = Remote(self._place, "", "")
        """The engine's place, in words."""
        self.pid = os.getpid()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor: zmq.asyncio.Socket = self._socket.get_monitor_socket(ENDS)
        self._set_up(key)
        self._socket.connect(url)
        self._lost = asyncio.ensure_future(recv_monitor_message(self._monitor))
        """Done once the connection has failed or was lost."""
        self._on_end: Callable[[str], None] = lambda reason: None
        self._losing: list[asyncio.Task[None]] = []
        """The task that reports the loss of the connection, once it is lost."""

    @classmethod
    async def open(cls, address: str, key: str = "", seconds: float = 0.0) -> tuple[Attachment, messages.Attached]:
        """Attach to the engine at an address, and return its welcome. Waits at most `seconds` for it to listen there.

        An engine that still loads keeps the client waiting. Raises NoEngine, EngineStartError if the engine refuses
        this client, and ValueError.
        """
        until = time.monotonic() + seconds
        while True:
            attachment = cls(address, key)
            try:
                return attachment, await attachment._greet()
            except BaseException as error:
                attachment._release(linger=0)
                if not isinstance(error, NoEngine) or time.monotonic() >= until:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    def join(self, on_end: Callable[[str], None]) -> Attachment:
        """Call `on_end` once, with the reason, when the connection ends from now on."""
        self._on_end = on_end
        self._lost.add_done_callback(self._note_loss)
        return self

    def send(self, message: messages.ToEngine) -> None:
        """Send a message without waiting. Lost if the connection has ended."""
        if not self._socket.closed:
            sent = asyncio.ensure_future(self._socket.send(messages.encode(message)))
            sent.add_done_callback(lambda sent: sent.cancelled() or sent.exception())  # The end is reported elsewhere.

    async def receive(self) -> messages.FromEngine:
        """Wait for the next message. Raises ValueError for an invalid one."""
        return messages.decode_from_engine(await self._socket.recv())

    def hide(self) -> None:
        """Do nothing: other clients may attach."""

    async def close(self, *, at_once: bool = False) -> None:
        """Leave the engine, which goes on. It aborts the requests of this client."""
        self.send(messages.Detach())
        self._release()

    def kill(self) -> None:
        """Leave the engine, as `close` does: a client cannot end it."""
        self.send(messages.Detach())
        self._end("this client has left it")
        self._release()

    def _note_loss(self, lost: asyncio.Future[Any]) -> None:
        if not lost.cancelled():
            self._losing.append(asyncio.ensure_future(self._report_loss()))

    async def _report_loss(self) -> None:
        """Report that the connection was lost, after the messages that came before.

        The last one may have the reason. The loss and the messages come by two sockets, which may be read in any order.
        """
        while not self._socket.closed and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            await asyncio.sleep(0)
        await asyncio.sleep(0)  # The reader takes the last message first.
        self._end("the connection to it was lost")

    def _end(self, reason: str) -> None:
        self._on_end(f"{self._place}: {reason}")

    async def _greet(self) -> messages.Attached:
        """Send the first message, and wait for its answer. Raises NoEngine, EngineStartError."""
        self.send(messages.Attach(__version__, WIRE))
        answer = asyncio.ensure_future(self.receive())
        await asyncio.wait({answer, self._lost}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            raise NoEngine(
                f"no engine answers at {self.address}; start it with holdfast engine --listen {self.address}"
            )
        match answer.result():
            case messages.Attached() as welcome if reason := mismatch(welcome.wire):
                raise EngineStartError(
                    f"{self._place} is Holdfast {welcome.version}, and this is {__version__}: {reason}"
                )
            case messages.Attached() as welcome:
                return welcome
            case messages.Draining(seconds):
                raise NoEngine(f"{self._place} drains: it takes no new clients, and ends within {seconds:.0f} s")
            case messages.Failure(reason):
                raise EngineStartError(f"{self._place}: {reason}")
            case other:
                raise EngineStartError(f"{self._place} answered {type(other).__name__}, not Attached")

    def _set_up(self, key: str) -> None:
        socket = self._socket
        socket.setsockopt(zmq.MAXMSGSIZE, messages.MESSAGE_LIMIT)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_MS)
        if key and not is_local(self.address):  # An engine at a path has none.
            public = zmq.curve_public(key.encode())
            socket.setsockopt(zmq.CURVE_SERVERKEY, public)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, key.encode())
            socket.setsockopt(zmq.IPV6, int("[" in self.address))
            beat(socket)

    def _release(self, linger: int = LINGER_MS) -> None:
        """Close the socket once its last message has left. May be called more than once."""
        self._lost.cancel()
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=linger)
            # It waits for the last message, and for a handshake that never ends.
            threading.Thread(target=self._context.term, name="holdfast-detach", daemon=True).start()
