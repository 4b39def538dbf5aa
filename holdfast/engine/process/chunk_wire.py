"""ChunkPeer: one connection between two engines, over which KV blocks move: authenticated, framed, checksummed.

Each side shows that it knows the shared secret, by HMAC over both sides' nonces, and names the format of its blocks. A
frame is a header and a payload. The header has the payload's length and checksum, and an HMAC over them and the frame's
number, so that no frame can be put in, left out or repeated. Blocks are not encrypted: other hosts belong on a private
network.
"""

from __future__ import annotations

import contextlib
import enum
import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple, Self

from holdfast.lm.tiers import Pieces, checksum_of

MAGIC = b"HFCHUNK2"
NONCE = 32
TAG = 16
HEADER = struct.Struct("<BIQ")
DIGEST = 32
"""Bytes of a block's digest."""
MAX_DIGESTS = 1 << 15
"""Most digests of one question."""
MAX_TEXT = 4096
"""Most bytes of a side's description of its blocks, or of its reason for a refusal."""
SMALL = 1 << 14
"""Most bytes of a payload that is sent in one piece with its header."""
OPEN_SECONDS = 5.0
"""Time to connect, and for each side to show that it knows the secret."""
STALL_SECONDS = 15.0
"""Seconds for a frame, in addition to its time at SLOWEST. A peer that takes longer is given up."""
SLOWEST = 4e6
"""Bytes a second."""


class Kind(enum.IntEnum):
    """The kind of a frame."""

    PROOF = 1
    """The sender's HMAC. The client's frame also has the format of its blocks."""
    REFUSED = 2
    """Why the connection ends, for people."""
    HOLDS = 3
    """Digests: which of them does the peer have?"""
    HELD = 4
    """The answer: for each of them 1 or 0."""
    FETCH = 5
    """Digests of blocks to send."""
    CHUNK = 6
    """One of the blocks asked for, in that order."""
    MISSING = 7
    """Sent in place of a block that has been dropped."""
    ARRIVED = 8
    """Digests of blocks that have come, in the order of their sequence. Has no answer."""
    STATES = 9
    """Digests of blocks: which recurrent states come right after the last of them that has any?"""
    KEYS = 10
    """The answer: the keys of these states, each after its length."""
    STATE = 11
    """The key of a state to send. The answer is a CHUNK, or MISSING."""


class PeerError(ConnectionError):
    """The other side cannot be reached, or breaks the protocol. The message is one line."""


class Terms(NamedTuple):
    """Facts in which both sides of a connection must agree."""

    secret: bytes
    layout: str
    """Which model, dtype and block the bytes are of. At most MAX_TEXT bytes."""
    block_bytes: int


class ChunkPeer:
    """One side of a connection. For one thread. Methods raise PeerError, or OSError (TimeoutError among them)."""

    def __init__(self, connection: socket.socket, terms: Terms) -> None:
        """Use `connect` or `accept`."""
        self._socket, self._terms = connection, terms
        self._key = b""
        self._sent = self._received = 0
        """Frames so far."""
        self._sends, self._receives = b"", b""
        """Name of the sender in each side's tags."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @classmethod
    def connect(cls, address: str, terms: Terms) -> Self:
        """Connect to an engine at `host:port`."""
        connection = socket.create_connection(split_address(address), OPEN_SECONDS)
        try:
            peer = cls(connection, terms)
            peer._open(b"client", b"server")
            peer._say_proof(terms.layout.encode())
            if peer._hear_proof():
                raise PeerError("the peer's proof is not one")
        except BaseException:
            connection.close()
            raise
        return peer

    @classmethod
    def accept(cls, connection: socket.socket, terms: Terms) -> Self:
        """The other side of `connect`. Closes the connection of a client that is refused."""
        try:
            peer = cls(connection, terms)
            peer._open(b"server", b"client")
            layout = peer._hear_proof()
            if layout != terms.layout.encode():
                reason = f"its blocks are {layout.decode(errors='replace')}, and ours are {terms.layout}"
                peer.refuse(reason)
                raise PeerError(reason)
            peer._say_proof(b"")
        except BaseException:
            connection.close()
            raise
        return peer

    def close(self) -> None:
        """Close the connection. May be called in any thread, which ends what another does with it."""
        with contextlib.suppress(OSError):  # the other side has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def send(self, kind: Kind, *payload: bytes | memoryview) -> None:
        """Send a frame. Its payload is all of these, one after another."""
        size = sum(map(len, payload))
        head = HEADER.pack(kind, size, checksum_of(payload))
        self._socket.settimeout(STALL_SECONDS + size / SLOWEST)
        head += self._tag(self._sends, self._sent, head)
        if size <= SMALL:
            self._socket.sendall(b"".join((head, *payload)))
        else:
            for piece in (head, *payload):
                self._socket.sendall(piece)
        self._sent += 1

    def refuse(self, reason: str) -> None:
        """Say why this side ends the connection."""
        self.send(Kind.REFUSED, reason.encode()[:MAX_TEXT])

    def receive(self, *, most: int) -> tuple[Kind, bytes]:
        """The next frame. Raises PeerError for one of more than `most` bytes."""
        kind, size, checksum = self._head(STALL_SECONDS)
        if size > (MAX_TEXT if kind is Kind.REFUSED else most):
            raise PeerError(f"the peer sends a {kind.name} of {size} bytes; at most {most} are taken")
        payload = bytearray(size)
        self._body((memoryview(payload),), checksum)
        if kind is Kind.REFUSED:
            raise PeerError(f"the peer refuses: {payload.decode(errors='replace')}")
        return kind, bytes(payload)

    def receive_block(self, target: Pieces) -> bool:
        """Receive a block into `target`. False if the peer does not have it; then `target` is unchanged."""
        expected = sum(map(len, target))
        kind, size, checksum = self._head(STALL_SECONDS)
        if kind is Kind.MISSING and not size:
            return False
        if kind is not Kind.CHUNK or size != expected:
            raise PeerError(f"the peer sends a {kind.name} of {size} bytes for a block of {expected}")
        self._body(target, checksum)
        return True

    def wait(self, seconds: float) -> bool:
        """Whether the other side sends something, or ends, within this time."""
        self._socket.settimeout(seconds)
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        return True

    def _open(self, own: bytes, other: bytes) -> None:
        self._deadline = time.monotonic() + OPEN_SECONDS
        nonce, theirs = secrets.token_bytes(NONCE), bytearray(len(MAGIC) + NONCE)
        self._socket.settimeout(OPEN_SECONDS)
        self._socket.sendall(MAGIC + nonce)
        self._fill(memoryview(theirs), self._deadline)
        if theirs[: len(MAGIC)] != MAGIC:
            raise PeerError("the peer does not speak this protocol")
        nonces = {own: nonce, other: bytes(theirs[len(MAGIC) :])}
        if nonces[own] == nonces[other]:
            raise PeerError("the peer repeats our nonce")
        self._key = hmac.digest(self._terms.secret, MAGIC + nonces[b"client"] + nonces[b"server"], "sha256")
        self._sends, self._receives = own, other

    def _say_proof(self, text: bytes) -> None:
        self.send(Kind.PROOF, text)

    def _hear_proof(self) -> bytes:
        """The text that the other side sends with its proof: a frame whose tag is right."""
        kind, size, checksum = self._head(max(0.0, self._deadline - time.monotonic()))
        if kind not in (Kind.PROOF, Kind.REFUSED) or size > MAX_TEXT:
            raise PeerError(f"the peer sends a {kind.name} of {size} bytes in place of its proof")
        text = bytearray(size)
        self._body((memoryview(text),), checksum)
        if kind is Kind.REFUSED:
            raise PeerError(f"the peer refuses: {text.decode(errors='replace')}")
        return bytes(text)

    def _tag(self, sender: bytes, number: int, head: bytes) -> bytes:
        return hmac.digest(self._key, sender + struct.pack("<Q", number) + head, "sha256")[:TAG]

    def _head(self, seconds: float) -> tuple[Kind, int, int]:
        data = bytearray(HEADER.size + TAG)
        self._fill(memoryview(data), time.monotonic() + seconds)
        head, tag = bytes(data[: HEADER.size]), bytes(data[HEADER.size :])
        if not hmac.compare_digest(tag, self._tag(self._receives, self._received, head)):
            raise PeerError("the peer does not know the secret, or a frame was changed")
        self._received += 1
        kind, size, checksum = HEADER.unpack(head)
        return Kind(kind), size, checksum

    def _body(self, target: Pieces, checksum: int) -> None:
        size = sum(map(len, target))
        deadline = time.monotonic() + STALL_SECONDS + size / SLOWEST
        for piece in target:
            self._fill(piece, deadline)
        if checksum_of(target) != checksum:
            raise PeerError(f"{size} bytes came changed: their checksum is wrong")

    def _fill(self, target: memoryview, deadline: float) -> None:
        at = 0
        while at < len(target):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"the peer sent {at} of {len(target)} bytes in time")
            self._socket.settimeout(left)
            got = self._socket.recv_into(target[at:])
            if not got:
                raise PeerError(f"the peer ended after {at} of {len(target)} bytes")
            at += got


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port` or `[host]:port`; port 0 where there is none. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not colon or (address.count(":") > 1 and not address.startswith("[")):
        host, port = address, "0"
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"the address is {address!r}; it must look like HOST or HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def digests_in(payload: bytes) -> list[bytes]:
    """The digests of a question. Raises PeerError for bytes that end within one."""
    if len(payload) % DIGEST:
        raise PeerError(f"{len(payload)} bytes are no whole number of digests")
    return [payload[at : at + DIGEST] for at in range(0, len(payload), DIGEST)]
