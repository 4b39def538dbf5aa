"""A server over a fake client: in process for most tests, on a loopback socket where the transport matters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest
import serving
from fake_engine import FakeClient

from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.run import open_store

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
        state.batches.files.close()
        state.responses.store.close()


@pytest.fixture
def listening(client: FakeClient) -> Callable[..., Any]:
    """The real server over the fake client, on a free port: `async with listening(drain_seconds=...) as server`."""
    return partial(serving.listening, client)
