"""A server of batches over a fake engine, without HTTP; it can be killed."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from batch_lines import CHAT, jsonl
from fake_engine import FakeClient

from holdfast.server.config import ServerConfig
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import AsyncStore
from holdfast.server.jobs.batches import Batches, BatchRequest
from holdfast.server.jobs.files import Files
from holdfast.server.jobs.values import Batch
from holdfast.server.run import open_store
from holdfast.server.service import Service


class Server:
    """Files and batches over a fake engine, without HTTP. Its clock is `now`."""

    def __init__(self, directory: Path, client: FakeClient, **config: Any) -> None:
        self.client = client
        self.now = 1000.0
        places = {"store": str(directory / "store.sqlite"), "files": str(directory / "files")}
        settings = ServerConfig(**places | config)
        self.store = AsyncStore(open_store(settings))
        self.service = Service(client, settings)  # type: ignore[arg-type]
        self.files = Files(self.store, settings, lambda: self.now)
        responses = Responses(self.service, self.store)
        self.batches = Batches(responses, self.files, lambda: self.now, tick=0.01)

    async def submit(self, given: list[Any], tenant: str = "", **wanted: Any) -> str:
        file = await self.files.copy(tenant, "batch", "in.jsonl", io.BytesIO(jsonl(given)))
        request = BatchRequest(**{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | wanted)
        return (await self.batches.create(request, tenant)).id

    async def ended(self, id: str, tenant: str = "") -> Batch:
        while not (batch := await self.batches.retrieve(tenant, id)).ended:
            await asyncio.sleep(0.01)
        return batch

    def read(self, file: str | None) -> list[dict[str, Any]]:
        return [] if file is None else [json.loads(each) for each in self.files.path(file).read_text().splitlines()]

    async def kill(self) -> None:
        """End as if the process were killed: nothing is stored any more, and its lock is free."""
        runner, self.batches._closed = self.batches.runner, True
        tasks = [*runner._loops, *(each.task for each in runner.running.values())]
        tasks += [task for each in runner.running.values() for task in each.in_flight.values()]
        tasks += [] if self.batches._ticking is None else [self.batches._ticking]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.batches.owner.close()
        self.files.close()
        await asyncio.to_thread(self.store.close)

    async def close(self) -> None:
        await self.batches.close()
        await asyncio.to_thread(self.store.close)


@asynccontextmanager
async def server(directory: Path, client: FakeClient | None = None, **config: Any) -> AsyncIterator[Server]:
    made = Server(directory, client or FakeClient(), **config)
    try:
        await made.batches.start()
        yield made
    finally:
        if not made.batches._closed:
            await made.close()
