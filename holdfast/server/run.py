"""Runs the server: starts the engine, listens, drains on a signal, and ends when the engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

import uvicorn

from holdfast.core.config import EngineConfig
from holdfast.engine.client import EngineClient
from holdfast.engine.spawn import EngineProcess
from holdfast.server.address import loopback, url_of
from holdfast.server.config import ServerConfig
from holdfast.server.connection import Connection, Connections
from holdfast.server.conversations.database import place
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds
from holdfast.server.service import Service

CUT_SECONDS = 2.0
"""Time for streams to send their error event after the engine has ended."""

log = logging.getLogger("holdfast.server")


async def run(
    engine: EngineConfig,
    config: ServerConfig,
    listener: socket.socket,
    process: EngineProcess,
    *,
    on_progress: Callable[[str], None],
    on_ready: Callable[[EngineClient, str], None],
) -> int:
    """Serve on `listener` until a signal or the engine's death. Returns the process's exit code.

    `on_ready` is called with the client and the base URL once the server takes requests. Raises StoreError if the store
    cannot be opened, and EngineStartError if the engine cannot start in its `process`, which the caller ends.
    """
    if not config.api_key and not loopback(config.host):
        log.warning(
            "ANYBODY who reaches %s:%d can use this server: it listens beyond this machine and has no API key; "
            "set HOLDFAST_API_KEY, or listen on 127.0.0.1",
            config.host,
            config.port,
        )
    with contextlib.closing(open_store(config)) as store:
        # FastAPI takes a second to import, and the engine takes longer to start.
        routes = asyncio.create_task(asyncio.to_thread(import_module, "holdfast.server.app"))
        client = await EngineClient.start(engine, on_progress=on_progress, process=process)
        try:
            await routes
            return await serve(client, config, store, listener, on_ready=on_ready)
        finally:
            await client.close()


def open_store(config: ServerConfig) -> Store:
    """Open the configured store. Raises StoreError."""
    bounds = Bounds(
        seconds=config.store_days * 86400, threads=config.store_conversations, bytes=int(config.store_gb * 1e9)
    )
    return Store.open(place(config.store), bounds)


async def serve(
    client: EngineClient,
    config: ServerConfig,
    store: Store,
    listener: socket.socket,
    *,
    on_ready: Callable[[EngineClient, str], None],
) -> int:
    """Serve requests on `listener` until a signal or the engine's death. Returns the exit code."""
    from holdfast.server.app import create_app

    app = create_app(client, config, store)
    service: Service = app.state.service
    responses: Responses = app.state.responses
    server = Server(
        uvicorn.Config(
            app, http=partial(Connection, shared=Connections(config)), ws="none",  # type: ignore[arg-type]
            lifespan="off", log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=1,
            timeout_keep_alive=config.idle_seconds, log_level="error",  # it warns of each request that is not HTTP
        )
    )  # fmt: skip
    with signals() as received:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        died = asyncio.create_task(client.dead.wait())
        stop = asyncio.create_task(received.get())
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        gc.collect()
        gc.freeze()  # a full collection over all modules would stop every stream for 50 to 100 ms
        on_ready(client, url_of(listener))
        await asyncio.wait({died, stop, serving}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            log.error("the engine has ended, so the server ends: %s", client.reason)
            code = 1
        else:
            code = await drain(service, died, received)
        service.admission.draining = True
        await client.close()  # streams that still run end with an error event
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.admission.idle.wait(), CUT_SECONDS)
        server.should_exit = True
        for task in (died, stop):
            task.cancel()
        await asyncio.gather(serving, died, stop, return_exceptions=True)
        await responses.close()
    return code


async def drain(service: Service, died: asyncio.Task[bool], received: asyncio.Queue[int]) -> int:
    """Refuse new requests and let running ones finish, within the time limit. A second signal ends the wait at once."""
    service.admission.draining = True
    if service.admission.in_progress:
        log.warning(
            "draining: %d requests in progress, at most %g s; a second signal ends at once",
            service.admission.in_progress,
            service.config.drain_seconds,
        )
    again = asyncio.create_task(received.get())
    idle = asyncio.create_task(service.admission.idle.wait())
    try:
        await asyncio.wait(
            {again, idle, died}, timeout=service.config.drain_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        return 128 + again.result() if again.done() else 1 if died.done() else 0
    finally:
        again.cancel()
        idle.cancel()


@contextlib.contextmanager
def signals() -> Iterator[asyncio.Queue[int]]:
    """A queue of the SIGTERM and SIGINT signals that arrive. Their default action is off."""
    received: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGTERM, signal.SIGINT)
    for kind in kinds:
        loop.add_signal_handler(kind, received.put_nowait, int(kind))
    try:
        yield received
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, because `serve` decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
