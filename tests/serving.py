"""The real server over a fake client, on a loopback socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fake_engine import FakeClient

from holdfast.server.address import listen
from holdfast.server.config import ServerConfig
from holdfast.server.conversations.database import MEMORY
from holdfast.server.run import open_store, serve


@dataclass
class Listening:
    """A listening server: its base URL, and the task that returns its exit code."""

    url: str
    code: asyncio.Task[int]


@asynccontextmanager
async def listening(client: FakeClient, **fields: Any) -> AsyncIterator[Listening]:
    """Serve on a free port. At the end the fake engine dies, which ends the server."""
    config = ServerConfig(port=0, **{"store": MEMORY, **fields})
    store = open_store(config)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    code = asyncio.create_task(
        serve(client, config, store, listen(config), on_ready=lambda _, url: ready.set_result(url))  # type: ignore[arg-type]
    )
    url = await ready
    try:
        yield Listening(url, code)
    finally:
        client.die("the test is over")
        await code
