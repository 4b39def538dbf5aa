"""The lab's HTTP transport against a server that answers byte by byte as each test says."""

import asyncio
import time
from contextlib import asynccontextmanager

import httpx
import pytest

from holdfast.lab.http_stream import StreamTransport, arrived_of

CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data):
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def served(answer):
    """A client of a server that runs `answer(request, writer)` for each request, and the list of its connections.

    The server closes a connection when `answer` returns False.
    """
    connections = []

    async def talk(reader, writer):
        connections.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.lower().split(b"\r\n")
                length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
                body = await reader.readexactly(length)
                if await answer(head + body, writer) is False:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with httpx.AsyncClient(transport=StreamTransport(), base_url=f"http://127.0.0.1:{port}/v1/") as http:
        yield http, connections
    server.close()


async def test_a_slow_reader_learns_when_data_came():
    second, sent = asyncio.Event(), []

    async def answer(request, writer):
        writer.write(CHUNKED + chunk(b"one"))
        await second.wait()
        sent.append(time.monotonic())
        writer.write(chunk(b"two") + END)

    async with served(answer) as (http, _), http.stream("POST", "completions", json={"a": 1}) as response:
        pieces, arrived = response.aiter_raw(), arrived_of(response)
        assert await anext(pieces) == b"one"
        first = arrived()
        second.set()
        while not response.stream._stream._connection.whole:  # the reader is busy with other work meanwhile
            await asyncio.sleep(0.001)
        came = time.monotonic()
        await asyncio.sleep(0.01)
        assert await anext(pieces) == b"two"
        assert first < sent[0] <= arrived() <= came


async def test_a_request_has_its_method_path_headers_and_body():
    requests = []

    async def answer(request, writer):
        requests.append(request)
        writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\nx-why: none\r\n\r\nno")

    async with served(answer) as (http, _):
        response = await http.post("completions?x=1", json={"a": 1}, headers={"authorization": "Bearer k"})
    assert (response.status_code, response.headers["x-why"], response.text) == (404, "none", "no")
    assert requests[0].startswith(b"POST /v1/completions?x=1 HTTP/1.1\r\n")
    assert b"\r\nauthorization: Bearer k\r\n" in requests[0].replace(b"Authorization", b"authorization")
    assert requests[0].endswith(b'\r\n\r\n{"a":1}')


async def test_an_ended_response_leaves_its_connection_to_the_next_request():
    async def answer(request, writer):
        writer.write(CHUNKED + chunk(b"a") + END)

    async with served(answer) as (http, connections):
        assert [(await http.get("models")).text for _ in range(3)] == ["a", "a", "a"]
        assert len(connections) == 1


async def test_a_response_that_is_left_early_takes_its_connection_along():
    async def answer(request, writer):
        writer.write(CHUNKED + chunk(b"a"))
        if b"GET" in request:
            writer.write(END)

    async with served(answer) as (http, connections):
        async with http.stream("POST", "completions") as response:
            assert await anext(response.aiter_raw()) == b"a"
        assert (await http.get("models")).text == "a"
        assert len(connections) == 2


@pytest.mark.parametrize("end", [b"connection: close\r\ncontent-length: 1\r\n\r\na", b"\r\na"])
async def test_a_connection_that_the_server_closes_serves_one_response(end):
    async def answer(request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\n" + end)
        return False

    async with served(answer) as (http, connections):
        assert [(await http.get("models")).text for _ in range(2)] == ["a", "a"]
        assert len(connections) == 2


@pytest.mark.parametrize("sent", [b"", CHUNKED[:20], CHUNKED + chunk(b"part"), b"gibberish\r\n\r\n"])
async def test_a_broken_response_is_an_error(sent):
    async def answer(request, writer):
        writer.write(sent)
        return False

    async with served(answer) as (http, _):
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("models")


async def test_a_server_that_is_not_there_and_one_that_is_silent_are_errors():
    async def answer(request, writer):
        pass

    async with served(answer) as (http, _):
        with pytest.raises(httpx.ReadTimeout, match="nothing came within"):
            await http.get("models", timeout=httpx.Timeout(60, read=0.05))
        address = http.base_url
    async with httpx.AsyncClient(transport=StreamTransport(), base_url=address) as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("models")
