"""The connection between two engines: peers that may talk, messages that arrive, and errors that end it."""

import random
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from holdfast.engine.process import chunk_wire
from holdfast.engine.process.chunk_wire import (
    HEADER,
    MAGIC,
    NONCE,
    SMALL,
    TAG,
    ChunkPeer,
    Kind,
    PeerError,
    Terms,
    digests_in,
    join_address,
    split_address,
)

DATA = random.Random(1).randbytes(2 * SMALL)
OURS = Terms(b"secret", "model, float32, (2, 2, 16, 2, 16)", 1000)


@contextmanager
def listening(terms=OURS, answer=lambda peer: None):
    """An engine that accepts one connection and answers it: its address, and its result or error."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server, ThreadPoolExecutor(1) as pool:

        def serve():
            connection, _ = server.accept()
            with ChunkPeer.accept(connection, terms) as peer:
                return answer(peer)

        yield f"127.0.0.1:{server.getsockname()[1]}", pool.submit(serve)


@pytest.mark.parametrize("size", [1000, 2 * SMALL])
def test_frames_and_blocks_arrive_as_they_were_sent_whatever_parts_they_lie_in(size):
    def answer(peer):
        asked = peer.receive(most=100)
        peer.send(Kind.CHUNK, *(memoryview(DATA)[at : at + 250] for at in range(0, size, 250)))
        peer.send(Kind.MISSING)
        return asked

    with listening(answer=answer) as (address, answered), ChunkPeer.connect(address, OURS) as peer:
        peer.send(Kind.FETCH, b"d" * 32)
        block = bytearray(size)
        parts = memoryview(block)[:333], memoryview(block)[333:]
        assert peer.receive_block(parts) and block == DATA[:size]
        assert not peer.receive_block(parts) and block == DATA[:size]
        assert answered.result() == (Kind.FETCH, b"d" * 32)


@pytest.mark.parametrize("theirs", [OURS._replace(secret=b"other"), OURS._replace(secret=b"")])
def test_a_side_without_the_secret_is_refused(theirs):
    with listening() as (address, answered):
        with pytest.raises((PeerError, ConnectionError)):
            ChunkPeer.connect(address, theirs)
        with pytest.raises(PeerError, match="does not know the secret"):
            answered.result()


def test_a_source_without_the_secret_is_refused():
    """An engine that accepts any peer, and sends a forged proof."""

    def pretend(server):
        connection, _ = server.accept()
        with connection:
            connection.sendall(MAGIC + b"n" * NONCE + HEADER.pack(Kind.PROOF, 0, 0) + b"t" * TAG)
            while connection.recv(1 << 16):
                pass

    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        with pytest.raises(PeerError, match="does not know the secret"):
            ChunkPeer.connect(f"127.0.0.1:{server.getsockname()[1]}", OURS)
        thread.join()


def test_blocks_of_another_layout_are_refused_by_name():
    with listening() as (address, answered):
        with pytest.raises(PeerError, match=r"its blocks are model, bfloat16.*ours are model, float32"):
            ChunkPeer.connect(address, OURS._replace(layout="model, bfloat16"))
        with pytest.raises(PeerError):
            answered.result()


def test_what_a_client_said_once_opens_no_second_connection():
    said = []

    class Recording(socket.socket):
        def sendall(self, data):
            said.append(bytes(data))
            super().sendall(data)

    with listening() as (address, _):
        connection = Recording(socket.AF_INET, socket.SOCK_STREAM)
        connection.connect(split_address(address))
        peer = ChunkPeer(connection, OURS)
        peer._open(b"client", b"server")
        peer._say_proof(OURS.layout.encode())
        assert peer._hear_proof() == b""
        peer.close()
    with listening() as (address, answered), closing(socket.create_connection(split_address(address))) as again:
        again.sendall(b"".join(said))
        with pytest.raises(PeerError, match="does not know the secret"):
            answered.result()


class Catching:
    """A socket that keeps the bytes it is to send."""

    def __init__(self, sent):
        self.sent = sent

    def settimeout(self, seconds):
        pass

    def sendall(self, data):
        self.sent.append(bytes(data))


def changed(way):
    """A block of 1000 bytes with its header, as `way` changes them."""
    sent = []

    def answer(peer):
        real, peer._socket = peer._socket, Catching(sent)
        peer.send(Kind.CHUNK, memoryview(b"x" * 1000))
        peer._socket = real
        real.sendall(way(b"".join(sent)))

    return answer


@pytest.mark.parametrize(
    "way, reason",
    [
        (lambda data: data[:-1] + b"y", "checksum"),
        (lambda data: data[:1] + struct.pack("<I", 999) + data[5:], "a frame was changed"),
        (lambda data: data[: HEADER.size + TAG], "ended after 0 of 1000 bytes"),
        (lambda data: data[:500], "ended after"),
        (lambda data: b"", "ended after 0 of"),
    ],
)
def test_a_block_that_comes_changed_or_cut_raises(way, reason):
    sending = listening(answer=changed(way))
    with sending as (address, _), ChunkPeer.connect(address, OURS) as peer, pytest.raises(PeerError, match=reason):
        peer.receive_block((memoryview(bytearray(1000)),))


def test_a_frame_that_is_sent_twice_raises():
    sending = listening(answer=changed(lambda data: data + data))
    with sending as (address, _), ChunkPeer.connect(address, OURS) as peer:
        block = (memoryview(bytearray(1000)),)
        assert peer.receive_block(block)
        with pytest.raises(PeerError, match="a frame was changed"):
            peer.receive_block(block)


def test_more_bytes_than_the_receiver_takes_are_refused_before_they_are_read():
    with (
        listening(answer=lambda peer: peer.send(Kind.HELD, b"1" * 50)) as (address, _),
        ChunkPeer.connect(address, OURS) as peer,
        pytest.raises(PeerError, match="50 bytes; at most 10"),
    ):
        peer.receive(most=10)


def test_a_peer_that_says_nothing_is_given_up(monkeypatch):
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        monkeypatch.context() as impatient,
        pytest.raises(TimeoutError),
    ):
        impatient.setattr(chunk_wire, "OPEN_SECONDS", 0.1)
        ChunkPeer.connect(f"127.0.0.1:{server.getsockname()[1]}", OURS)
    monkeypatch.setattr(chunk_wire, "STALL_SECONDS", 0.1)
    given_up = threading.Event()
    with listening(answer=lambda _: given_up.wait(60)) as (address, _), ChunkPeer.connect(address, OURS) as peer:
        with pytest.raises(TimeoutError):
            peer.receive(most=10)
        given_up.set()


def test_digests_that_end_within_one_are_refused():
    assert digests_in(b"a" * 32 + b"b" * 32) == [b"a" * 32, b"b" * 32]
    with pytest.raises(PeerError, match="33 bytes"):
        digests_in(b"a" * 33)


@pytest.mark.parametrize(
    "address, parts",
    [("a.b:80", ("a.b", 80)), ("127.0.0.1", ("127.0.0.1", 0)), ("[::1]:9", ("::1", 9)), ("::1", ("::1", 0))],
)
def test_addresses_are_read_and_written(address, parts):
    assert split_address(address) == parts == split_address(join_address(*parts))


@pytest.mark.parametrize("address", ["", ":80", "host:x", "host:70000"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ValueError, match="must look like"):
        split_address(address)
