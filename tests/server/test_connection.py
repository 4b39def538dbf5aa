"""Connections to a real server that send too much, too little, too slowly, or read nothing."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fake_engine import FakeClient
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from holdfast.server import connection
from holdfast.server.config import ServerConfig
from holdfast.server.connection import LINGER_BYTES, MAX_HEADER_BYTES, Connection, Connections

Listening = Callable[..., Any]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CHAT = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}).encode()
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@asynccontextmanager
async def connected(server: Any, count: int = 1, first: bytes = b"") -> AsyncIterator[list[Streams]]:
    """Open connections to the server. It finds the `first` bytes on each as soon as it accepts it, in whatever time."""
    host, port = server.url.removeprefix("http://").split(":")
    opened = []
    for _ in range(count):
        raw = socket.create_connection((host, int(port)))
        raw.sendall(first)
        opened.append(await asyncio.open_connection(sock=raw))
    yield opened
    for _, writer in opened:
        writer.transport.abort()


async def pour(writer: asyncio.StreamWriter, piece: bytes, pieces: int) -> int:
    """Send `piece` again and again. Returns how often it was sent until the connection ended, at most `pieces`."""
    for sent in range(pieces):
        try:
            writer.write(piece)
            await writer.drain()
        except ConnectionError:
            return sent
        if writer.is_closing():
            return sent
    return pieces


def head(code: int) -> bytes:
    return b"HTTP/1.1 %d " % code


async def read_one(reader: asyncio.StreamReader) -> bytes:
    """Read one answer that has a content-length."""
    top = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in top.lower().split(b"\r\n") if line.startswith(b"content-length"))
    return top + await reader.readexactly(int(length.split(b":")[1]))


async def test_headers_beyond_the_limit_end_the_connection_with_431(listening: Listening) -> None:
    async with listening() as server, connected(server) as [(reader, writer)]:
        writer.write(b"GET /health HTTP/1.1\r\nx-endless: " + b"a" * MAX_HEADER_BYTES)
        answer = await reader.read()
        assert answer.startswith(head(431)) and b"65536 bytes" in answer
        async with httpx.AsyncClient(base_url=server.url) as api:
            assert (await api.get("/health", headers={"x-long": "a" * 8000})).status_code == 200


@pytest.mark.parametrize("trailer", [b"x-1: vvv\r\n" * 1000, b"v" * 10_000], ids=["many", "one"])
async def test_trailers_beyond_the_limit_end_the_connection(
    listening: Listening, client: FakeClient, trailer: bytes
) -> None:
    async with listening() as server, connected(server) as [(reader, writer)]:
        writer.write(CHUNKED + b"0\r\nx-0: ")
        assert await pour(writer, trailer, 100) <= 100
        assert (await reader.read()).startswith(head(431))
    assert not client.asked


async def test_trailers_within_the_limit_are_dropped(listening: Listening) -> None:
    async with listening() as server, connected(server) as [(reader, writer)]:
        writer.write(CHUNKED + b"%x\r\n%s\r\n0\r\nx-checksum: 7\r\n\r\n" % (len(CHAT), CHAT))
        answer = await read_one(reader)
        assert answer.startswith(head(200)) and b"connection: close" not in answer
        writer.write(GET)
        assert (await read_one(reader)).startswith(head(200))


@pytest.mark.parametrize("more", [b"", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n"])
async def test_a_stream_over_http_1_0_has_no_chunks_and_ends_with_its_connection(
    listening: Listening, more: bytes
) -> None:
    asked = json.dumps({**json.loads(CHAT), "stream": True}).encode()
    async with listening() as server:
        answers = []
        for version in (b"HTTP/1.1", b"HTTP/1.0"):
            async with connected(server) as [(reader, writer)]:
                top = POST.replace(b"HTTP/1.1", version) + (b"connection: close\r\n" if not answers else more)
                writer.write(top + b"content-length: %d\r\n\r\n%s" % (len(asked), asked))
                answers.append(await asyncio.wait_for(reader.read(), 30))
    (_, _, chunks), (begun, _, events) = (answer.partition(b"\r\n\r\n") for answer in answers)
    assert begun.startswith(head(200)) and b"transfer-encoding" not in begun
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")
    assert b"\r\n" in chunks and b"\r\n" not in events
    assert events.count(b"data: ") == chunks.count(b"data: ")


async def test_a_whole_answer_over_http_1_0_has_its_length(listening: Listening) -> None:
    async with listening() as server, connected(server) as [(reader, writer)]:
        writer.write(POST.replace(b"HTTP/1.1", b"HTTP/1.0") + b"content-length: %d\r\n\r\n%s" % (len(CHAT), CHAT))
        top, _, body = (await asyncio.wait_for(reader.read(), 30)).partition(b"\r\n\r\n")
        assert top.startswith(head(200)) and b"content-length: %d" % len(body) in top
        assert json.loads(body)["object"] == "chat.completion"


async def test_a_refused_request_closes_its_connection_and_its_body_is_not_swallowed(listening: Listening) -> None:
    async with listening(api_key=("sesame",)) as server, connected(server) as [(reader, writer)]:
        writer.write(CHUNKED + b"0\r\n")
        answer = await asyncio.wait_for(reader.read(), 200)  # Up to the end, so the server has closed.
        assert answer.startswith(head(401)) and b"connection: close" in answer
        assert await pour(writer, b"x-1: vvv\r\n" * 100_000, 1_000_000) < 1_000_000


async def test_data_read_and_dropped_after_a_refusal_is_limited(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_SECONDS", 3600)
    async with listening(api_key=("sesame",)) as server, connected(server) as [(reader, writer)]:
        writer.write(CHUNKED + b"0\r\n")
        assert (await reader.read()).startswith(head(401))
        piece = b"x" * 1_000_000
        assert await pour(writer, piece, 10 * LINGER_BYTES // len(piece)) < 5 * LINGER_BYTES // len(piece)


async def test_requests_that_are_not_http_write_nothing_to_the_log(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = GET.replace(b"\r\n\r\n", b"\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n")
    with caplog.at_level(logging.WARNING):
        async with listening() as server:
            for sent in (b"\0\r\n\r\n", upgrade):
                async with connected(server) as [(reader, writer)]:
                    writer.write(sent)
                    assert (await reader.read(4)) == b"HTTP"
            assert not caplog.records


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])  # Java's client asks for h2c.
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_a_request_with_a_body_is_answered_though_it_asks_for_another_protocol(
    listening: Listening, framing: str, protocol: bytes
) -> None:
    upgrade = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: %b\r\n" % protocol
    body = b"content-length: %d\r\n\r\n%b" % (len(CHAT), CHAT)
    if framing == "chunks":
        body = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(CHAT), CHAT)
    async with listening() as server, connected(server) as [(reader, writer)]:
        for _ in range(2):
            writer.write(POST + upgrade + body)
            assert (await read_one(reader)).startswith(head(200))
        writer.write(POST + upgrade + body[:-9])
        await asyncio.sleep(0.02)  # so that the body comes in two pieces, the second one with the next request
        writer.write(body[-9:] + GET)
        assert (await read_one(reader)).startswith(head(200))
        assert (await read_one(reader)).startswith(head(200))
        writer.write(b"CONNECT localhost:80 HTTP/1.1\r\nhost: localhost\r\n" + upgrade + b"\r\n")
        assert (await reader.read(4)) == b"HTTP"
    async with listening() as server, connected(server) as [(reader, writer)]:
        writer.write(GET.replace(b"\r\n\r\n", b"\r\n" + upgrade + b"content-length: 1\r\n\r\nx"))
        assert (await reader.read(4)) == b"HTTP"


async def test_a_refused_request_that_was_read_to_its_end_keeps_its_connection(listening: Listening) -> None:
    async with listening(api_key=("sesame",)) as server, connected(server) as [(reader, writer)]:
        for _ in range(2):
            writer.write(POST + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT)
            answer = await read_one(reader)
            assert answer.startswith(head(401)) and b"connection: close" not in answer


async def test_a_body_that_ends_in_a_large_piece_does_not_count_as_part_of_the_next_head(listening: Listening) -> None:
    body = CHAT + b" " * (MAX_HEADER_BYTES - len(POST) // 2 - len(CHAT))
    async with listening() as server, connected(server) as [(reader, writer)]:
        for _ in range(3):
            writer.write(POST + b"content-length: %d\r\n\r\n" % len(body))
            await asyncio.sleep(0.05)  # so that the body comes by itself, and is read as one piece
            writer.write(body)
            assert (await read_one(reader)).startswith(head(200))


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_gets_413_even_while_it_is_sent(listening: Listening, declared: bool) -> None:
    async with listening(max_body_mb=0.01) as server, connected(server) as [(reader, writer)]:
        writer.write(POST + b"content-length: 500000\r\n\r\n" if declared else CHUNKED)
        await pour(writer, b"x" * 5000 if declared else b"3e8\r\n" + b"x" * 1000 + b"\r\n", 100)
        answer = await reader.read()
        assert answer.startswith(head(413)) and b"connection: close" in answer


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET / HT", head(408)),
        (b"GET / HTTP/1.1\r\nx: y\r\n", head(408)),
        (b"\r\n", head(408)),
        (POST + b"content-length: 100\r\n\r\n{", head(408)),
        (CHUNKED + b"0\r\nx: y\r\n", head(408)),
    ],
)
async def test_a_request_that_never_ends_is_closed_after_the_timeout(
    listening: Listening, sent: bytes, answer: bytes
) -> None:
    async with (
        listening(header_seconds=0.1, body_seconds=0.1) as server,
        connected(server, first=sent) as [(reader, _)],
    ):
        assert (await reader.read())[: len(head(408))] == answer


@pytest.mark.parametrize(
    "declared", [b"content-length: 7900000\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
async def test_a_body_gets_no_extra_time_for_bytes_that_were_only_announced(
    listening: Listening, declared: bytes
) -> None:
    async with listening(body_seconds=0.1) as server, connected(server) as [(reader, writer)]:
        writer.write(POST + declared)
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(head(408))


async def test_a_trickle_of_bytes_does_not_extend_the_timeout(listening: Listening) -> None:
    first = b"GET / HTTP/1.1\r\nx: "
    async with listening(header_seconds=0.3) as server, connected(server, first=first) as [(reader, writer)]:
        answer = asyncio.create_task(reader.read())
        while not answer.done():
            writer.write(b"y")
            await asyncio.sleep(0.05)
        assert (await answer).startswith(head(408))


async def test_a_long_answer_is_not_cut_by_the_timeouts(listening: Listening, client: FakeClient) -> None:
    client.hold = asyncio.Event()
    times = {"header_seconds": 0.4, "body_seconds": 0.4, "write_seconds": 0.4}
    first = POST + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT
    async with listening(**times) as server, connected(server, first=first) as [(reader, _)]:
        await asyncio.sleep(0.8)
        client.hold.set()
        assert (await read_one(reader)).startswith(head(200))


async def test_an_idle_connection_is_closed_after_the_timeout(listening: Listening) -> None:
    async with listening(idle_seconds=1) as server, connected(server) as [(reader, writer)]:
        writer.write(GET)
        assert (await reader.read()).startswith(head(200))


async def test_a_client_that_reads_nothing_is_disconnected(listening: Listening) -> None:
    requests = 40_000
    async with listening(write_seconds=0.5) as server:
        host, port = server.url.removeprefix("http://").split(":")
        raw = socket.socket()
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(raw, (host, int(port)))
        asking = GET.replace(b"/health", b"/openapi.json") * requests
        with pytest.raises(ConnectionError):
            await loop.sock_sendall(raw, asking)
            while True:
                await loop.sock_sendall(raw, b"G")
                await asyncio.sleep(0.1)
        raw.close()


async def test_many_requests_sent_at_once_are_answered_one_after_the_other(listening: Listening) -> None:
    requests = 3000
    async with listening() as server, connected(server) as [(reader, writer)]:
        padded = GET.replace(b"\r\n\r\n", b"\r\nx-pad: " + b"p" * 1000 + b"\r\n\r\n")
        writer.write(padded * requests)
        for _ in range(requests):
            assert (await read_one(reader)).startswith(head(200))


async def test_few_requests_are_parsed_ahead_of_the_one_that_is_answered(
    listening: Listening, client: FakeClient
) -> None:
    client.hold = asyncio.Event()
    tiny, requests = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n", 5000
    async with listening(api_key=("sesame",)) as server, connected(server) as [(reader, writer)]:
        allowed = POST + b"authorization: Bearer sesame\r\n"
        writer.write(allowed + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT + tiny * requests)
        while not client.asked:
            await asyncio.sleep(0.001)
        while not any(type(found) is Connection and found.flow.held for found in gc.get_objects()):
            assert sum(type(found) is RequestResponseCycle for found in gc.get_objects()) < 100
            await asyncio.sleep(0.001)
        assert sum(type(found) is RequestResponseCycle for found in gc.get_objects()) < 100
        client.hold.set()
        for _ in range(1 + requests):
            assert (await read_one(reader)).startswith(head(200))


async def test_a_client_that_leaves_with_requests_waiting_frees_the_running_one(
    listening: Listening, client: FakeClient
) -> None:
    client.hold = asyncio.Event()
    async with listening() as server:
        async with connected(server) as [(_, writer)]:
            writer.write((POST + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT) * 2)
            while not client.asked:
                await asyncio.sleep(0.001)
        while client.asked[0].ended != "aborted":
            await asyncio.sleep(0.001)


async def test_beyond_the_connection_limit_the_longest_waiting_is_closed(
    listening: Listening, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast.server"):
        async with listening(max_connections=10) as server, connected(server, 10) as opened:
            await asyncio.sleep(2 * connection.UNREAD_SECONDS)
            async with httpx.AsyncClient(base_url=server.url) as api:
                assert (await api.get("/health")).status_code == 200
            with pytest.raises(ConnectionError):
                assert not await opened[0][0].read()
                raise ConnectionResetError  # An orderly close is also good.
    assert len([record for record in caplog.records if "10 connections are open" in record.message]) == 1


def test_a_connection_whose_request_cannot_have_been_read_yet_is_not_closed_for_a_new_one() -> None:
    shared = Connections(ServerConfig(max_connections=1))
    first, second, third = (Mock(spec=Connection, transport=Mock()) for _ in range(3))
    assert shared.make_room(first, 0.0)
    shared.waiting[first] = 0.0
    assert not shared.make_room(second, 0.01)
    shared.forget(second)
    first.transport.abort.assert_not_called()
    assert shared.make_room(third, 0.03)
    first.transport.abort.assert_called_once()


async def test_connections_with_running_requests_are_never_closed_for_new_ones(
    listening: Listening, client: FakeClient
) -> None:
    client.hold = asyncio.Event()
    async with listening(max_connections=3) as server, connected(server, 3) as opened:
        for _, writer in opened:
            writer.write(POST + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT)
        while len(client.asked) < 3:
            await asyncio.sleep(0.001)
        async with httpx.AsyncClient(base_url=server.url) as api:
            refused = await api.get("/health")
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "overloaded"
        client.hold.set()
        for reader, _ in opened:
            assert (await read_one(reader)).startswith(head(200))


async def test_running_requests_never_outnumber_the_connection_limit(listening: Listening) -> None:
    half = POST + b"content-length: %d\r\n\r\n" % len(CHAT) + CHAT[:-1]
    async with listening(max_connections=3) as server, connected(server, 3) as opened:
        for reader, writer in opened:
            writer.write(GET + half)
            await read_one(reader)
        more: list[asyncio.StreamWriter] = []
        for _ in range(10):
            reader, writer = await asyncio.open_connection(*server.url.removeprefix("http://").split(":"))
            more.append(writer)
            writer.write(half)
            async with asyncio.timeout(200):
                assert (await reader.read()).startswith(head(503))
        for writer in more:
            writer.transport.abort()
        for reader, writer in opened:
            writer.write(CHAT[-1:])
            assert (await read_one(reader)).startswith(head(200))


async def test_bodies_beyond_the_budget_get_503_and_their_bytes_are_freed(listening: Listening) -> None:
    begun = POST + b"content-length: 50000\r\n\r\n" + b" " * 40_000
    async with listening(max_bodies_mb=0.1) as server:
        async with connected(server, 3) as opened:
            for _, writer in opened:
                writer.write(begun)
            done, rest = await asyncio.wait(
                [asyncio.create_task(reader.read()) for reader, _ in opened], return_when=asyncio.FIRST_COMPLETED
            )
            for task in rest:
                task.cancel()
            answer = done.pop().result()
            assert answer.startswith(head(503)) and b"retry-after: 1\r\n" in answer
        async with connected(server) as [(reader, writer)]:
            writer.write(begun + b" " * (10_000 - len(CHAT)) + CHAT)
            assert (await read_one(reader)).startswith(head(200))


async def test_requests_that_one_key_sends_slowly_leave_connections_for_others(listening: Listening) -> None:
    def of(key: bytes) -> bytes:
        return POST + b"authorization: Bearer %s\r\ncontent-length: %d\r\n\r\n" % (key, len(CHAT)) + CHAT[:-1]

    async with listening(max_connections=8, api_key=("one", "two")) as server, connected(server, 4) as opened:
        for reader, writer in opened:
            writer.write(GET + of(b"one"))
            await read_one(reader)
        async with connected(server, 2) as [(fifth, slow), (other, writer)]:
            slow.write(of(b"one"))
            refused = await read_one(fifth)
            assert refused.startswith(head(429)) and b"retry-after: 1\r\n" in refused
            assert b"4 requests in progress" in refused
            writer.write(of(b"two") + CHAT[-1:])
            assert (await read_one(other)).startswith(head(200))
        for reader, writer in opened:
            writer.write(CHAT[-1:])
            assert (await read_one(reader)).startswith(head(200))
        async with connected(server) as [(again, writer)]:
            writer.write(of(b"one") + CHAT[-1:])
            assert (await read_one(again)).startswith(head(200))
