"""The real server over a fake client, on a loopback socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fake_app import FakeApp
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
async def listening(client: FakeClient | None, apps: Sequence[FakeApp] = (), **fields: Any) -> AsyncIterator[Listening]:
    """Serve on a free port. At the end the fake engines die, which ends the server."""
    config = ServerConfig(port=0, **{"store": MEMORY, **fields})
    store = None if client is None else open_store(config)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    answering = serve(
        client,  # type: ignore[arg-type]
        config,
        store,
        listen(config),
        apps=apps,  # type: ignore[arg-type]
        on_ready=lambda _, url: ready.set_result(url),
    )
    code = asyncio.create_task(answering)
    url = await ready
    try:
        yield Listening(url, code)
    finally:
        for engine in (client, *apps):
            if engine is not None:
                engine.die("the test is over")
        await code
