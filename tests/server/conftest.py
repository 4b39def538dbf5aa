"""A server over a fake client: in process for most tests, on a loopback socket where the transport matters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
import serving
from fake_engine import FakeClient

from holdfast.server.app import create_app
from holdfast.server.config import ServerConfig


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


@pytest.fixture
def listening(client: FakeClient) -> Callable[..., Any]:
    """The real server over the fake client, on a free port: `async with listening(drain_seconds=...) as server`."""
    return partial(serving.listening, client)
