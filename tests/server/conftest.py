"""A server over a fake client: in process for most tests, on a loopback socket if the transport matters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import serving
from fake_engine import FakeClient
from postgresql_server import empty_schema, postgresql_server

from holdfast.server import shared_adapters
from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.run import open_store
from holdfast.server.shared_adapters import SharedAdapters

KIND = {"content-type": "application/json"}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def http(client: FakeClient) -> Iterator[Callable[..., httpx.AsyncClient]]:
    """A client of the app, in process: `async with http(api_key=...) as api`."""
    servers: list[Any] = []

    def make(headers: dict[str, str] | None = None, **config: Any) -> httpx.AsyncClient:
        settings = ServerConfig(**{"store": MEMORY, **config})
        app = create_app(client, settings, open_store(settings))  # type: ignore[arg-type]
        servers.append(app.state)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", headers={**KIND, **(headers or {})})

    yield make
    for state in servers:
        state.jobs[0].files.close()
        state.responses.store.close()


@pytest.fixture
def listening(client: FakeClient) -> Callable[..., Any]:
    """The real server over the fake client, on a free port: `async with listening(drain_seconds=...) as server`."""
    return partial(serving.listening, client)


class Looks:
    """The module `asyncio` as `shared_adapters` sees it. Servers look at the store often.

    A change waits until each server has looked at the store after it, instead of for the seconds in which each does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._looks = dict[SharedAdapters, int]()
        begin, sync = SharedAdapters.begin, SharedAdapters.sync

        def begin_noted(server: SharedAdapters) -> None:
            begin(server)
            if server._following is not None:
                self._looks[server] = 0

        async def sync_noted(server: SharedAdapters) -> None:
            await sync(server)
            if server in self._looks:
                self._looks[server] += 1

        monkeypatch.setattr(SharedAdapters, "begin", begin_noted)
        monkeypatch.setattr(SharedAdapters, "sync", sync_noted)

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        wanted = {server: looks + 2 for server, looks in self._looks.items()}  # one may be under way
        await asyncio.sleep(0.005)
        if seconds == shared_adapters.KNOWN_SECONDS:
            while any(self._looks[server] < looks for server, looks in wanted.items()):
                await asyncio.sleep(0.002)


@pytest.fixture
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of the same engines learn of each other's adapters soon, on a slow machine, too."""
    monkeypatch.setattr(shared_adapters, "asyncio", Looks(monkeypatch))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[str]:
    """The URL of a database: that of HOLDFAST_TEST_POSTGRES, or of a server that the tests start."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if given := os.environ.get("HOLDFAST_TEST_POSTGRES"):
        yield given
        return
    with postgresql_server() as server:
        yield server.url


@pytest.fixture
def postgresql_schema(postgresql: str) -> Iterator[str]:
    """The URL of an empty schema in the database, which is dropped at the end."""
    with empty_schema(postgresql) as url:
        yield url
