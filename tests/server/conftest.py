"""A server over a fake client: in process for most tests, on a loopback socket where the transport matters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.run import listen, serve
from tests.server.fake import FakeClient


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def http(client: FakeClient) -> Callable[..., httpx.AsyncClient]:
    """A client of the app, in process: `async with http(api_key=...) as api`."""

    def make(headers: dict[str, str] | None = None, **config: Any) -> httpx.AsyncClient:
        app = create_app(client, ServerConfig(**config))  # type: ignore[arg-type]
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://holdfast", headers=headers)

    return make


class Listening:
    """A server that listens, its base URL, and the exit code that it will return."""

    def __init__(self, url: str, code: asyncio.Task[int]) -> None:
        self.url = url
        self.code = code


@pytest.fixture
def listening(client: FakeClient) -> Callable[..., Any]:
    """The real server on a free port of the loopback: `async with listening(drain_seconds=...) as server`."""

    @asynccontextmanager
    async def start(**fields: Any) -> AsyncIterator[Listening]:
        config = ServerConfig(port=0, **fields)
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            serve(client, config, listen(config), on_ready=lambda _, url: ready.set_result(url))  # type: ignore[arg-type]
        )
        url = await ready
        try:
            yield Listening(url, serving)
        finally:
            client.die("the test is over")
            await serving

    return start
