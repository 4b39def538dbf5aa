"""The private socket between hosts: TCP between two CURVE keys, encrypted, with heartbeats that notice a lost peer."""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from holdfast.engine.spawn import Link, Remote

HEARTBEAT_MS = 1000
"""Milliseconds between two heartbeats."""
SILENCE_MS = 5000
"""Milliseconds of silence after which a peer is lost: it has not even answered a heartbeat. libzmq's own threads send
and answer heartbeats, so a busy process is not silent.
"""
CONNECT_MS = 10_000
"""Milliseconds to connect, and again to agree on keys."""
LOST = 4
"""Exit status of an engine process that has lost its client, and of the process for an engine whose host is lost."""

log = logging.getLogger("holdfast.engine")


class Doorkeeper:
    """Listens for one engine on another host, and refuses all other connections. For one event loop."""

    is_watched = True
    """Whether a message that waits means that the engine is lost: sends never wait for a peer that is connected."""

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, remote: Remote) -> None:
        """Bind the socket to a free port. Raises OSError, and ValueError for an address that is none."""
        self.where = f" on {remote.place}"
        """The engine's host in words that can follow "process"."""
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.start()  # before the socket listens: libzmq accepts everybody without an authenticator
        try:
            self._authenticator.configure_curve_callback(credentials_provider=OneKey(remote.key))
            public, secret = zmq.curve_keypair()
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            beat(socket)
            address = ipaddress.ip_address(remote.reach)
            host = f"[{address}]" if address.version == 6 else str(address)
            socket.setsockopt(zmq.IPV6, int(address.version == 6))
            port = socket.bind_to_random_port(f"tcp://{host}")
        except BaseException:
            self.close()
            raise
        self.link = Link(f"tcp://{host}:{port}", public.decode())
        """The link for the engine: address and client key. The engine adds its own keys."""

    def hide(self) -> None:
        """Do nothing: nobody else can connect in any case."""

    def close(self) -> None:
        """Refuse all new connections. May be called more than once."""
        if self._authenticator.zap_socket is not None:
            self._authenticator.stop()


class OneKey:
    """Accepts the one public key that may connect."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a peer with this public key may connect."""
        return key == self._key


def connect(socket: zmq.Socket[bytes], link: Link) -> None:
    """Connect an engine's socket to its client on another host, once, and end this process when the client is lost.

    It also ends if the client cannot be reached. `leave` stops this watch.
    """
    socket.setsockopt(zmq.CURVE_SERVERKEY, link.client_key.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, link.public_key.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, link.secret_key.encode())
    socket.setsockopt(zmq.IPV6, int("[" in link.address))
    socket.setsockopt(zmq.RECONNECT_IVL, -1)  # messages may be lost between two connections
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, CONNECT_MS)
    beat(socket)
    monitor = socket.get_monitor_socket(zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)
    threading.Thread(target=_end_when_lost, args=(monitor, link), name="holdfast-link", daemon=True).start()
    socket.connect(link.address)


def leave(socket: zmq.Socket[bytes]) -> None:
    """Stop the watch over a socket, which may then be closed."""
    socket.disable_monitor()


def beat(socket: zmq.Socket[Any]) -> None:
    """Send heartbeats, and close the connection to a peer that is silent."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)


def _end_when_lost(monitor: zmq.Socket[bytes], link: Link) -> None:
    try:
        event = recv_monitor_message(monitor)["event"]
    except zmq.ContextTerminated:  # the context ended before the event of `leave` was read
        event = zmq.EVENT_MONITOR_STOPPED
    monitor.close(0)
    if event == zmq.EVENT_MONITOR_STOPPED:
        return
    lost = "cannot be reached" if event == zmq.EVENT_CLOSED else "is lost"
    log.critical("holdfast: the API process at %s %s, so this engine ends", link.address, lost)
    os._exit(LOST)
