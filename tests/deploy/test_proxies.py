"""The proxies' files, each tried with the proxy itself in front of two real servers over fake engines."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import serving
from deployed import DEPLOY, program
from fake_engine import FakeClient

from tests.served import free_port

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@dataclass
class Behind:
    """A proxy, and the two servers that it sends requests to."""

    api: httpx.AsyncClient
    clients: list[FakeClient]
    addresses: list[str]


def nginx_command(place: Path, addresses: list[str], port: int) -> list[str]:
    """Write nginx's whole configuration around our file. Returns the command."""
    text = (DEPLOY / "nginx" / "holdfast.conf").read_text()
    line = "    server server:8000 max_fails=1 fail_timeout=5s;\n"
    assert line in text
    text = text.replace(line, "".join(line.replace("server:8000", each) for each in addresses))
    text = text.replace("listen 80;", f"listen 127.0.0.1:{port};")
    temporary = "".join(
        f"{kind}_temp_path {place}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (place / "nginx.conf").write_text(
        f"daemon off; pid {place}/pid; error_log stderr error;\nevents {{}}\n"
        f"http {{ access_log off;\n{temporary}{text}}}\n"
    )
    return [program("nginx"), "-p", str(place), "-e", "stderr", "-c", str(place / "nginx.conf")]


def caddy_command(place: Path, addresses: list[str], port: int) -> list[str]:
    """Write our file with these servers. Returns the command."""
    text = (DEPLOY / "caddy" / "Caddyfile").read_text()
    assert "reverse_proxy server:8000 {" in text
    text = text.replace("reverse_proxy server:8000 {", f"reverse_proxy {' '.join(addresses)} {{")
    text = text.replace("\n:80 {", f"\nhttp://127.0.0.1:{port} {{").replace("admin off", "admin off\n\tauto_https off")
    (place / "Caddyfile").write_text(text)
    return [program("caddy"), "run", "--config", str(place / "Caddyfile"), "--adapter", "caddyfile"]


COMMANDS = {"nginx": nginx_command, "caddy": caddy_command}


@asynccontextmanager
async def proxied(kind: str, place: Path, **config: Any) -> AsyncIterator[Behind]:
    """Run a proxy in front of two servers."""
    clients, port = [FakeClient(), FakeClient()], free_port()
    async with AsyncExitStack() as held:
        servers = [await held.enter_async_context(serving.listening(client, **config)) for client in clients]
        addresses = [server.url.removeprefix("http://") for server in servers]
        environment = {"HOME": str(place), "PATH": "/usr/bin:/bin", "XDG_DATA_HOME": str(place)}
        process = subprocess.Popen(COMMANDS[kind](place, addresses, port), stderr=subprocess.DEVNULL, env=environment)
        held.callback(process.wait)
        held.callback(process.terminate)
        api = await held.enter_async_context(httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30))
        while True:
            assert process.poll() is None, f"{kind} has ended"
            try:
                if (await api.get("/version")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
        yield Behind(api, clients, addresses)


@pytest.mark.parametrize("kind", COMMANDS)
class TestProxies:
    """The duties of each proxy."""

    async def test_the_first_token_arrives_while_the_second_is_not_computed(self, kind: str, tmp_path: Path) -> None:
        async with proxied(kind, tmp_path) as behind:
            for client in behind.clients:
                client.hold = asyncio.Event()
            async with behind.api.stream("POST", CHAT, json={**HELLO, "stream": True}) as answer:
                lines = answer.aiter_lines()
                text = ""
                while "Ahoy" not in text and client.words[0] not in text:
                    text += await asyncio.wait_for(anext(lines), 60)
                assert "[DONE]" not in text, "the engine still holds the second token"
                for client in behind.clients:
                    assert client.hold is not None
                    client.hold.set()
                rest = [line async for line in lines]
            assert "data: [DONE]" in rest

    async def test_the_clients_request_id_passes_in_both_directions(self, kind: str, tmp_path: Path) -> None:
        async with proxied(kind, tmp_path) as behind:
            answer = await behind.api.post(CHAT, json=HELLO, headers={"x-request-id": "abc-1"})
            assert answer.status_code == 200 and answer.headers["x-request-id"] == "abc-1"
            assert len((await behind.api.post(CHAT, json=HELLO)).headers["x-request-id"]) == 32

    async def test_routes_of_operators_are_not_reached_from_outside(self, kind: str, tmp_path: Path) -> None:
        async with proxied(kind, tmp_path) as behind:
            for path in ("/metrics", "/replicas", "/replicas/0/drain"):
                assert (await behind.api.get(path)).status_code == 404
            assert "holdfast_" not in (await behind.api.get("/metrics")).text

    async def test_no_request_fails_when_a_server_is_gone(self, kind: str, tmp_path: Path) -> None:
        async with proxied(kind, tmp_path, drain_seconds=0) as behind:
            behind.clients[0].die("the test ends it")
            async with httpx.AsyncClient() as direct:
                while True:
                    try:
                        await direct.get(f"http://{behind.addresses[0]}/version")
                    except httpx.TransportError:
                        break
                    await asyncio.sleep(0.05)
            answers = [await behind.api.post(CHAT, json=HELLO) for _ in range(20)]
            assert [answer.status_code for answer in answers] == [200] * 20
            assert len(behind.clients[1].asked) == 20

    async def test_a_post_that_a_server_has_begun_is_not_repeated_at_another_one(
        self, kind: str, tmp_path: Path
    ) -> None:
        async with proxied(kind, tmp_path) as behind:
            for client in behind.clients:
                client.poison = "poisonous"
            poison = {**HELLO, "messages": [{"role": "user", "content": "poisonous"}]}
            answer = await behind.api.post(CHAT, json=poison)
            assert answer.status_code >= 500
            assert sum(len(client.asked) for client in behind.clients) == 1

    async def test_a_large_body_reaches_the_servers_own_limit(self, kind: str, tmp_path: Path) -> None:
        async with proxied(kind, tmp_path, max_body_mb=2) as behind:
            large = {**HELLO, "messages": [{"role": "user", "content": "x" * 3_000_000}]}
            answer = await behind.api.post(CHAT, json=large)
            assert answer.status_code == 413 and answer.json()["error"]["code"] == "body_too_large"
