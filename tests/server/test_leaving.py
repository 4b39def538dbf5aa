"""A server that leaves: health checks fail first, new requests are served for a while, and no connection is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx
from fake_engine import FakeClient

from holdfast.server.address import listen
from holdfast.server.config import ServerConfig
from holdfast.server.leaving import accept_all, has_queued

Listening = Callable[..., Any]
CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
DRAINING = {"status": "not ready", "reason": "draining"}


async def until_not_ready(api: httpx.AsyncClient) -> httpx.Response:
    while (answer := await api.get("/health/ready")).status_code == 200:
        await asyncio.sleep(0.001)
    return answer


async def test_a_lame_duck_serves_requests_while_its_readiness_fails(listening: Listening, client: FakeClient) -> None:
    async with listening(lame_duck_seconds=0.5) as server, httpx.AsyncClient(base_url=server.url) as api:
        assert (await api.get("/health/ready")).json() == {"status": "ready"}
        os.kill(os.getpid(), signal.SIGTERM)
        checked = await until_not_ready(api)
        assert (checked.status_code, checked.json()) == (503, DRAINING)
        assert (await api.get("/health")).status_code == 503
        assert (await api.get("/health/live")).status_code == 200
        answered = await api.post(CHAT, json=HELLO)
        assert answered.status_code == 200
        assert answered.headers["connection"] == "close"
        assert await server.code == 0


async def test_a_second_signal_ends_a_lame_duck_at_once(listening: Listening, client: FakeClient) -> None:
    async with listening(lame_duck_seconds=3600) as server, httpx.AsyncClient(base_url=server.url) as api:
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(api)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.code == 128 + signal.SIGTERM


async def test_an_answer_that_waits_at_the_signal_announces_the_end_of_its_connection(
    listening: Listening, client: FakeClient
) -> None:
    client.hold = asyncio.Event()
    async with listening(lame_duck_seconds=0.3) as server, httpx.AsyncClient(base_url=server.url) as api:
        waiting = asyncio.create_task(api.post(CHAT, json=HELLO))
        while not client.asked:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)
        await until_not_ready(api)
        client.hold.set()
        assert (await waiting).headers["connection"] == "close"
        assert await server.code == 0


async def test_every_connection_that_was_made_before_the_listener_closed_is_answered(listening: Listening) -> None:
    """Clients connect without a pause while the server leaves. Each either connects and gets its answer, or is
    refused before it sent anything.
    """
    answered, refused, lost = 0, 0, []

    async def one(host: str, port: int) -> bool:
        nonlocal answered, refused
        try:
            reader, writer = await asyncio.open_connection(host, port)
        except ConnectionError:
            refused += 1
            return False
        try:
            writer.write(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n")
            assert head == b"HTTP/1.1 200 OK\r\n"
            answered += 1
        except (OSError, asyncio.IncompleteReadError) as error:
            lost.append(error)
        finally:
            writer.close()
        return True

    async def clients(host: str, port: int) -> None:
        while await one(host, port):
            pass

    async with listening(lame_duck_seconds=0.2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        load = [asyncio.create_task(clients(host, int(port))) for _ in range(32)]
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.gather(*load)
        assert await server.code == 0
    assert lost == []
    assert answered > 32
    assert refused == 32


async def test_a_connection_in_the_listeners_queue_is_accepted_before_the_listener_may_close() -> None:
    with listen(ServerConfig(port=0)) as listener:
        early = [socket.create_connection(listener.getsockname()) for _ in range(5)]
        accepting = asyncio.create_task(accept_all(listener))
        await asyncio.sleep(0.1)
        assert not accepting.done(), "five connections are queued"
        with socket.socket() as late:
            late.setblocking(False)
            assert late.connect_ex(listener.getsockname()) != 0
            while has_queued(listener):
                early.append(listener.accept()[0])
            await accepting
            assert not has_queued(listener), "the late client's handshake is held off"
        for each in early:
            each.close()
