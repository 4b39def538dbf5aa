"""Engines on other hosts: the keys that they connect with, their clocks, and how a lost one is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import zmq
import zmq.asyncio

from holdfast.core.types import SamplingParams
from holdfast.engine import curve
from holdfast.engine.client import connection
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead, EngineStartError
from holdfast.engine.link import Child
from holdfast.engine.messages import Failure, Progress, Submit, encode
from holdfast.engine.spawn import EngineProcess, Link, Remote

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
SKEW = 86400.0
"""Seconds that the other host's clock is ahead."""
CLOCK = f"import time\nhere = time.monotonic\ntime.monotonic = lambda: here() + {SKEW}\n"


class Distant(EngineProcess):
    """An engine process of this machine, reached like one of another host."""

    def __init__(self) -> None:
        super().__init__("cpu")
        public, self.secret = (key.decode() for key in zmq.curve_keypair())
        self.remote = Remote("node 2", "127.0.0.1", public)
        self.through = lambda address: address

    def connect(self, link: Link) -> None:
        assert self.remote is not None
        address = self.through(link.address)
        super().connect(Link(address, link.client_key, self.remote.key, self.secret))


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, started_engines):
    """Gives the engine's process another monotonic clock. Python reads it only when it starts."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))


async def test_an_engine_with_another_clock_answers_and_its_times_are_ours(small, elsewhere, monkeypatch):
    began = time.monotonic()
    with Distant() as process:
        client = await EngineClient.start(small(), process=process)
        try:
            assert 0 < client.info.started_in < time.monotonic() - began + 0.5
            while abs(client.ahead - SKEW) > 1.0:  # what comes late on a busy machine is corrected with the next tick
                await asyncio.sleep(0.05)
            monkeypatch.setattr(client, "_note_clock", lambda there: None)  # it stays as it is known now
            sent = list[Submit]()
            send = client._child.send
            monkeypatch.setattr(client._child, "send", lambda message: (sent.append(message), send(message)))
            known = client.ahead
            for error in (0.0, -0.2, 0.2):  # times stay in order where the other clock is known badly
                client.ahead = known + error
                deltas = [delta async for delta in client.stream([5, 6, 7], FOUR)]
                timings = deltas[-1].timings
                (submit,) = (message for message in sent if isinstance(message, Submit))
                sent.clear()
                assert submit.request.arrival - timings.arrival == pytest.approx(client.ahead), (
                    "it is told by its own clock"
                )
                assert timings.tokens == 4
                assert timings.arrival <= timings.scheduled <= timings.first_token <= time.monotonic()
        finally:
            await client.close()


async def test_a_checkpoint_that_the_host_lacks_is_named_with_the_host(small, monkeypatch):
    monkeypatch.setattr(
        "holdfast.engine.client.client.for_other_hosts", lambda config, found: small(model="/models/none")
    )
    said = "node 2: model '/models/none': /models/none does not exist"
    with Distant() as process, pytest.raises(EngineStartError, match=said):
        await EngineClient.start(small(), process=process)


class Silent:
    """A network that may go silent: it still accepts data, and delivers nothing."""

    def __init__(self) -> None:
        self.silent = False
        self.server: asyncio.Server
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, address: str) -> str:
        host, port = address.removeprefix("tcp://").rsplit(":", 1)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            self._writers += [writer, far_writer]
            for pair in ((reader, far_writer), (far_reader, writer)):
                self._tasks.add(asyncio.create_task(self._pass_on(*pair)))

        self.server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.silent:
                    writer.write(data)
        if not self.silent:
            writer.close()

    async def close(self) -> None:
        self.server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


async def test_both_sides_notice_within_seconds_that_the_network_is_silent(small):
    network, killed = Silent(), threading.Event()
    with Distant() as process:
        opened: list[asyncio.Task[None]] = []

        def connect(link: Link) -> None:
            async def through() -> None:
                address = await network.open(link.address)
                process.through = lambda _: address
                Distant.connect(process, link)

            opened.append(asyncio.get_running_loop().create_task(through()))

        process.connect = connect  # type: ignore[method-assign]
        process.kill = killed.set  # type: ignore[method-assign]
        process.wait = lambda: -9 * killed.wait()  # type: ignore[method-assign]  # nothing is heard of a lost host
        client = await EngineClient.start(small(), process=process)
        network.silent, since = True, time.monotonic()
        with pytest.raises(EngineDead, match="the connection to the engine process on node 2 was lost"):
            async for _ in client.stream([5], SamplingParams(max_tokens=2000, ignore_eos=True)):
                pass
        slowest = (curve.HEARTBEAT_MS + curve.SILENCE_MS) / 1000 + connection.TICK_SECONDS
        assert time.monotonic() - since < slowest + 30
        assert killed.is_set()
        assert await asyncio.to_thread(EngineProcess.wait, process) == curve.LOST  # by itself
        await client.close()
        await network.close()
        del process.kill, process.wait  # type: ignore[method-assign]


class Unstarted:
    """A process whose socket the test handles itself."""

    began, pid = 0.0, 0

    def __init__(self, key: bytes) -> None:
        self.remote = Remote("node 2", "127.0.0.1", key.decode())
        self.link = Link("")
        self._end = asyncio.Event()

    def connect(self, link: Link) -> None:
        self.link = link

    def wait(self) -> int:
        while not self._end.is_set():
            time.sleep(0.01)
        return 0

    def kill(self) -> None:
        self._end.set()


async def test_only_the_engines_own_key_gets_a_word_in():
    public, secret = zmq.curve_keypair()
    process = Unstarted(public)
    child = Child(lambda reason: None, process)
    context = zmq.asyncio.Context()

    def connect(**options: bytes) -> zmq.asyncio.Socket:
        peer = context.socket(zmq.DEALER)
        for name, value in options.items():
            setattr(peer, name, value)
        peer.connect(process.link.address)
        peer.send(encode(Failure("a stranger's") if options.get("curve_publickey") != public else Progress("own")))
        return peer

    client_key = process.link.client_key.encode()
    others, others_secret = zmq.curve_keypair()
    peers = [connect()]  # no key
    peers.append(connect(curve_serverkey=others, curve_publickey=public, curve_secretkey=secret))  # another client's
    peers.append(connect(curve_serverkey=client_key, curve_publickey=others, curve_secretkey=others_secret))
    host, port = process.link.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(os.urandom(4096))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(child.receive(), 0.5)
        peers.append(connect(curve_serverkey=client_key, curve_publickey=public, curve_secretkey=secret))
        assert await asyncio.wait_for(child.receive(), 60) == Progress("own")
    for peer in peers:
        peer.close(0)
    context.term()
    await child.close(at_once=True)


async def test_an_engine_that_cannot_reach_its_client_ends_and_says_so(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # nobody listens
        command = [
            sys.executable,
            "-P",
            "-m",
            "holdfast.engine.process.serve",
            str(os.getpid()),
            "cpu",
            "holdfast.engine.process.build",
        ]
        key = zmq.curve_keypair()
        link = Link(f"tcp://127.0.0.1:{port}", key[0].decode(), key[0].decode(), key[1].decode())
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdin.write(f"{' '.join(link)}\n".encode())
            process.stdin.flush()  # it stays open: an engine whose input ends takes its client for gone
            status = await asyncio.to_thread(process.wait, 60)
            said = process.stderr.read()
    assert status == curve.LOST
    assert f"the API process at tcp://127.0.0.1:{port} cannot be reached".encode() in said


def test_the_watch_over_a_link_ends_quietly_with_the_link():
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        for _ in range(20):
            context = zmq.Context()
            link = context.socket(zmq.DEALER)
            curve.connect(link, Link(f"tcp://127.0.0.1:{listener.getsockname()[1]}", public, public, secret))
            curve.leave(link)
            link.close(0)
            context.term()
    for thread in threading.enumerate():
        if thread.name == "holdfast-link":
            thread.join(60)  # an exception in it fails the test
            assert not thread.is_alive()
