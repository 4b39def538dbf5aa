"""The server on a loopback socket: the official client, clients that leave, draining, an engine that dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fake_engine import WORDS, FakeClient

from holdfast.server.address import check_tls, listen
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.keys.tables import KeyTable
from holdfast.server.keys.values import Key
from holdfast.server.run import open_store, warn_if_open

Listening = Callable[..., Any]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until the condition holds, or until pytest's timeout."""
    while not condition():
        await asyncio.sleep(0.001)


def official(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def test_the_official_client_reads_answers_and_streams(listening: Listening, client: FakeClient) -> None:
    client.cached = 2
    async with listening() as server, official(server.url) as api:
        whole = await api.chat.completions.create(model="tiny", messages=HELLO, n=2)
        assert [choice.message.content for choice in whole.choices] == ["Ahoy, sailor!"] * 2
        assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 2

        stream = await api.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Ahoy, sailor!"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == len(WORDS)

        text = await api.completions.create(model="tiny", prompt=["a", "b"], max_tokens=1)
        assert [choice.text for choice in text.choices] == ["Ahoy", "Ahoy"]
        assert [model.id async for model in api.models.list()] == ["tiny"]
        assert (await api.models.retrieve("tiny")).id == "tiny"


async def test_the_official_client_raises_its_own_errors(listening: Listening) -> None:
    async with listening(api_key=("sesame",)) as server, official(server.url, "sesame") as api:
        with pytest.raises(openai.BadRequestError, match="moderation is not supported yet") as refused:
            await api.chat.completions.create(model="tiny", messages=HELLO, extra_body={"moderation": {"model": "x"}})
        assert refused.value.param == "moderation"
        with pytest.raises(openai.NotFoundError):
            await api.chat.completions.create(model="other", messages=HELLO)
        async with official(server.url, "wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of this machine's own address, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    place = tmp_path_factory.mktemp("tls")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *names]
    subprocess.run([*command, "-keyout", "key.pem", "-out", "cert.pem"], cwd=place, check=True, capture_output=True)
    return str(place / "cert.pem"), str(place / "key.pem")


class TestTLS:
    """HTTPS with a certificate and its key."""

    async def test_the_official_client_streams_over_https(
        self, listening: Listening, certificate: tuple[str, str]
    ) -> None:
        trusted = httpx.AsyncClient(verify=ssl.create_default_context(cafile=certificate[0]))
        async with listening(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]) as server, trusted:
            assert server.url.startswith("https://")
            api = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=trusted, max_retries=0)
            stream = await api.chat.completions.create(model="tiny", messages=HELLO, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Ahoy, sailor!"

    async def test_a_refused_request_gets_its_answer_and_the_connection_ends(
        self, listening: Listening, certificate: tuple[str, str]
    ) -> None:
        trusted = httpx.AsyncClient(verify=ssl.create_default_context(cafile=certificate[0]))
        options = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1], "max_body_mb": 0.001}
        async with listening(**options) as server, trusted:
            large = await trusted.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x" * 100_000})
            assert large.status_code == 413
            host, port = server.url.removeprefix("https://").split(":")
            context = ssl.create_default_context(cafile=certificate[0])
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
            writer.write(b"nonsense\r\n\r\n")
            assert b"400 Bad Request" in await reader.read()
            writer.close()

    def test_a_certificate_is_checked_before_anything_starts(
        self, certificate: tuple[str, str], tmp_path: Path
    ) -> None:
        check_tls(ServerConfig(ssl_certfile=certificate[0], ssl_keyfile=certificate[1]))
        check_tls(ServerConfig())
        (tmp_path / "bad.pem").write_text("no certificate")
        for files in (
            {"ssl_certfile": str(tmp_path / "none.pem")},
            {"ssl_certfile": str(tmp_path / "bad.pem")},
            {"ssl_certfile": certificate[0]},
            {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[0]},
        ):
            with pytest.raises(ValueError, match=r"\.pem.* cannot be used as certificate and key"):
                check_tls(ServerConfig(**files))


async def test_an_engine_that_dies_ends_streams_with_an_error_and_the_server_with_1(
    listening: Listening, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.run.CUT_SECONDS", 60.0)
    client.hold = asyncio.Event()
    async with listening() as server, official(server.url) as api:
        stream = await api.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        client.die("out of memory")
        with pytest.raises(openai.APIError, match="engine has stopped"):
            async for _ in stream:
                pass
        assert await server.code == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_request_at_once(
    listening: Listening, client: FakeClient, stream: bool
) -> None:
    client.hold = asyncio.Event()
    body = {"model": "tiny", "messages": HELLO, "stream": stream, "n": 2}
    async with listening() as server, httpx.AsyncClient(base_url=server.url) as api:
        leaving = asyncio.create_task(api.post("/v1/chat/completions", json=body))
        await until(lambda: len(client.asked) == 2)
        leaving.cancel()
        await until(lambda: [asked.ended for asked in client.asked] == ["aborted"] * 2)
        assert 'outcome="left"' in (await api.get("/metrics")).text


async def test_a_finished_request_is_not_aborted(listening: Listening, client: FakeClient) -> None:
    async with listening() as server, official(server.url) as api:
        await api.chat.completions.create(model="tiny", messages=HELLO)
        async for _ in await api.chat.completions.create(model="tiny", messages=HELLO, stream=True):
            pass
    assert [asked.ended for asked in client.asked] == ["finished"] * 2


async def refused(url: str) -> None:
    """Wait until the server refuses connections."""
    while True:
        async with httpx.AsyncClient(base_url=url) as plain:
            try:
                assert (await plain.get("/health")).status_code in (200, 503)
            except httpx.ConnectError:
                return
            except httpx.TransportError:  # on a busy machine, a request may come too late for its connection
                pass


async def test_sigterm_lets_streams_finish_and_refuses_connections(
    listening: Listening, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.run.CUT_SECONDS", 0.001)
    client.hold = asyncio.Event()
    async with listening() as server, official(server.url) as api:
        stream = await api.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await refused(server.url)
        client.hold.set()
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Ahoy, sailor!"
        assert await server.code == 0


async def test_a_stream_that_outlives_the_drain_ends_with_an_error_event(
    listening: Listening, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.server.run.CUT_SECONDS", 60.0)
    client.hold = asyncio.Event()
    async with listening(drain_seconds=0) as server, official(server.url) as api:
        stream = await api.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(openai.APIError, match="was not answered in time; the server is going"):
            async for _ in stream:
                pass
        assert await server.code == 0


async def test_a_second_signal_ends_at_once(listening: Listening, client: FakeClient) -> None:
    client.hold = asyncio.Event()
    async with listening(drain_seconds=3600) as server, official(server.url) as api:
        await api.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGINT)
        assert await server.code == 128 + signal.SIGINT


def test_a_port_in_use_raises_an_error_that_names_it() -> None:
    first = listen(ServerConfig(port=0))
    port = first.getsockname()[1]
    with first, pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*; choose another --port"):
        listen(ServerConfig(port=port))


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [("0.0.0.0", (), True), ("::", (), True), ("0.0.0.0", ("sesame",), False), ("127.0.0.1", (), False)],
)
async def test_an_address_beyond_this_machine_without_a_key_is_warned_of(
    host: str, keys: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(host=host, port=0, api_key=keys, store=MEMORY)
    with closing(open_store(config)) as store:
        warn_if_open(config, store)
        assert ("ANYBODY" in caplog.text) == warned
        caplog.clear()
        KeyTable(store.database).add(Key(name="a", tenant="a", scopes=("use",), created=0.0), "digest")
        warn_if_open(config, store)
        assert caplog.text == ""


def test_the_listener_is_a_tcp_socket_for_which_asyncio_turns_nagle_off() -> None:
    with listen(ServerConfig(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


def test_the_api_process_never_imports_torch() -> None:
    program = """
import asyncio, sys, httpx
from holdfast.server.app import create_app
from holdfast.server.run import ServerConfig, open_store
import holdfast.cli
from fake_engine import FakeClient

async def main():
    config = ServerConfig(store="memory")
    app = create_app(FakeClient(), config, open_store(config))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as api:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        assert (await api.post("/v1/chat/completions", json=body)).status_code == 200

asyncio.run(main())
heavy = {"torch", "triton", "transformers", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""
    paths = os.pathsep.join(["tests", *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
