"""A server that leaves: health checks fail first, new requests are served for a while, and no connection is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_engine import FakeClient

from holdfast.server import closing, run
from holdfast.server.address import listen
from holdfast.server.closing import accept_all, has_queued
from holdfast.server.config import ServerConfig

Listening = Callable[..., Any]
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
DRAINING = {"status": "not ready", "reason": "draining"}


LAME_DUCK_SECONDS = 3600.0


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The lame-duck time passes once this is set, so that a slow machine does not miss it."""
    passed = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await (passed.wait() if seconds == LAME_DUCK_SECONDS else asyncio.sleep(seconds))

    monkeypatch.setattr(run, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return passed


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that are queued or new have as much time as a slow machine needs."""
    monkeypatch.setattr(closing, "MOST_SECONDS", 60.0)
    monkeypatch.setattr(closing, "BEGIN_SECONDS", 60.0)


async def until_not_ready(api: httpx.AsyncClient) -> httpx.Response:
    while (answer := await api.get("/health/ready")).status_code == 200:
        await asyncio.sleep(0.001)
    return answer


async def test_a_lame_duck_serves_requests_while_its_readiness_fails(
    listening: Listening, client: FakeClient, passes: asyncio.Event
) -> None:
    async with listening(lame_duck_seconds=LAME_DUCK_SECONDS) as server, httpx.AsyncClient(base_url=server.url) as api:
        assert (await api.get("/health/ready")).json() == {"status": "ready"}
        os.kill(os.getpid(), signal.SIGTERM)
        checked = await until_not_ready(api)
        assert (checked.status_code, checked.json()) == (503, DRAINING)
        assert (await api.get("/health")).status_code == 503
        assert (await api.get("/health/live")).status_code == 200
        answered = await api.post(CHAT, json=HELLO)
        assert answered.status_code == 200
        assert answered.headers["connection"] == "close"
        passes.set()
        assert await server.code == 0


async def test_a_second_signal_ends_a_lame_duck_at_once(listening: Listening, client: FakeClient) -> None:
    async with listening(lame_duck_seconds=LAME_DUCK_SECONDS) as server, httpx.AsyncClient(base_url=server.url) as api:
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(api)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.code == 128 + signal.SIGTERM


async def test_an_answer_that_waits_at_the_signal_announces_the_end_of_its_connection(
    listening: Listening, client: FakeClient, passes: asyncio.Event
) -> None:
    client.hold = asyncio.Event()
    async with listening(lame_duck_seconds=LAME_DUCK_SECONDS) as server, httpx.AsyncClient(base_url=server.url) as api:
        waiting = asyncio.create_task(api.post(CHAT, json=HELLO))
        while not client.asked:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(api)
        client.hold.set()
        assert (await waiting).headers["connection"] == "close"
        passes.set()
        assert await server.code == 0


class Clients:
    """Clients in threads, which connect again and again until they are refused."""

    def __init__(self, host: str, port: int) -> None:
        self.place = host, port
        self.answered, self.refused, self.lost = 0, 0, list[str]()

    def run(self) -> None:
        while self.ask():
            pass

    def ask(self) -> bool:
        """Connect and send a request. Returns False if the connection is refused."""
        with socket.socket() as connection:
            connection.settimeout(200)
            try:
                connection.connect(self.place)
            except ConnectionRefusedError:
                self.refused += 1
                return False
            try:
                connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
                answer = connection.recv(64)
            except OSError as error:
                self.lost.append(repr(error))
                return True
            if answer.startswith(b"HTTP/1.1 200 OK"):
                self.answered += 1
            else:
                self.lost.append(repr(answer))
            return True


@pytest.mark.usefixtures("patient")
async def test_every_connection_that_was_made_before_the_listener_closed_is_answered(listening: Listening) -> None:
    """Clients connect without a pause while the server leaves. Each is answered, or refused before it sent anything."""
    async with listening(lame_duck_seconds=0.1) as server:
        host, port = server.url.removeprefix("http://").split(":")
        clients = Clients(host, int(port))
        with ThreadPoolExecutor(24) as threads:
            load = [asyncio.wrap_future(threads.submit(clients.run)) for _ in range(24)]
            while clients.answered < 100:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.gather(*load)
        assert await server.code == 0
    assert clients.lost == []
    assert clients.refused == 24


@pytest.mark.usefixtures("patient")
async def test_a_connection_in_the_listeners_queue_is_accepted_before_the_listener_may_close() -> None:
    with listen(ServerConfig(port=0)) as listener:
        early = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        accepting = asyncio.create_task(accept_all(listener))
        await asyncio.sleep(0.1)
        assert not accepting.done(), "five connections are queued"
        with socket.socket() as late:
            late.setblocking(False)
            late.connect_ex(listener.getsockname())
            accepted = []
            while has_queued(listener):
                accepted.append(listener.accept()[0])
            await accepting
            assert len(accepted) == 5 and not has_queued(listener), "the late client's handshake is held off"
        for each in (*early, *accepted):
            each.close()
