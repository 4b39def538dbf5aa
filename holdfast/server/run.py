"""Runs the server: starts the engines, listens, drains on a signal, and stops when an engine dies."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import math
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import uvicorn

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.spawner import make_spawner
from holdfast.core.config import AppConfig
from holdfast.engine import logs
from holdfast.engine.client.app_group import AnyApp, AppGroup, start_app
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineConnection, EngineStartError
from holdfast.engine.client.warming import started_warm
from holdfast.engine.ledger import make_ledger
from holdfast.engine.spawn import EngineProcess
from holdfast.lm.config import EngineConfig
from holdfast.server.adapter_versions import AdapterVersions
from holdfast.server.address import loopback, url_of
from holdfast.server.closing import all_answered, leave_listener, stop_accepting
from holdfast.server.config import ServerConfig
from holdfast.server.connection import Connection, Connections
from holdfast.server.conversations.database import default_bytes, place
from holdfast.server.conversations.service import Responses
from holdfast.server.conversations.store import Store
from holdfast.server.conversations.values import Bounds, StoreError
from holdfast.server.grpc_server import GrpcServer
from holdfast.server.jobs.batches import Batches
from holdfast.server.jobs.tables import create_indexes
from holdfast.server.jobs.tuning import Tuning
from holdfast.server.keys.accounts import Accounts
from holdfast.server.keys.tables import KeyTable
from holdfast.server.protocol import ApiError
from holdfast.server.schema import SCHEMA
from holdfast.server.service import Admission, AnyEngine
from holdfast.server.shared_adapters import SharedAdapters
from holdfast.server.sockets import OpenSockets
from holdfast.server.tinker.sample_table import create_sampler_table
from holdfast.server.tinker.sampling import Samplers
from holdfast.server.tinker.tables import create_tables
from holdfast.server.tinker.training import Training
from holdfast.server.tracing import Tracing

Work = Tuning | Training | Samplers | Batches
"""Work that goes on at a server while no request of a client waits for it."""
CUT_SECONDS = 2.0
"""Seconds for which running streams may send their error event after the engine has ended."""
ENDING = (signal.SIGTERM, signal.SIGINT)
"""Signals that end a server."""
HAND_OVER = signal.SIGHUP
"""Signal by which a supervisor lets an API process hand over to its successor."""

log = logging.getLogger("holdfast.server")


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a server: one for a language model, some for applications, or both."""

    model: EngineClient | Replicas | None
    apps: Sequence[AnyApp] = ()

    @property
    def all(self) -> list[AnyEngine]:
        """All engines."""
        return [*([] if self.model is None else [self.model]), *self.apps]


async def run(
    engine: EngineConfig | None,
    config: ServerConfig,
    apps: AppConfig,
    listener: socket.socket,
    process: EngineProcess | None = None,
    *,
    cluster: ClusterConfig = ClusterConfig(),  # noqa: B008  a constant
    threads: int | None = None,
    supervised: bool = False,
    on_progress: Callable[[str], None],
    on_ready: Callable[[Engines, str], None],
) -> int:
    """Serve on `listener` until a signal or an engine's death. Returns the process's exit code.

    If `supervised`, SIGHUP hands over to a successor at the same listener. Without `engine` there is no language model
    and no store. `cluster` sets the number of its engines. `threads` is for the engines of applications. `on_ready` is
    called with the engines and the base URL once the server accepts requests. The language model's engine starts in
    `process`, if given, which the caller ends. Raises StoreError if the store cannot be opened, and EngineStartError if
    an engine cannot start.
    """
    with contextlib.ExitStack() as held:
        store = None if engine is None else held.enter_context(contextlib.closing(open_store(config)))
        warn_if_open(config, store)
        # FastAPI takes a second to import. That is done while the engine starts, which takes longer.
        routes = asyncio.create_task(asyncio.to_thread(import_module, "holdfast.server.app"))
        ledger = held.enter_context(shared_page()) if engine is not None and apps.app else ""
        engines = await start(
            engine, apps, process, cluster,
            threads=threads, on_progress=on_progress, ledger=ledger, tuning_state=config.tuning_state,
        )  # fmt: skip
        try:
            await routes
            return await serve(
                engines.model, config, store, listener,
                apps=engines.apps, supervised=supervised, on_ready=on_ready,
            )  # fmt: skip
        finally:
            await asyncio.gather(*(client.close() for client in engines.all))


def warn_if_open(config: ServerConfig, store: Store | None) -> None:
    """Warn if the server listens beyond this machine without any key."""
    if config.api_key or loopback(config.host) or (store is not None and KeyTable(store.database).all()):
        return
    log.warning(
        "ANYBODY who reaches %s:%d can use this server: it listens beyond this machine and has no API key; "
        "set HOLDFAST_API_KEY, add a key with `holdfast keys add`, or listen on 127.0.0.1",
        config.host,
        config.port,
    )


async def start(
    engine: EngineConfig | None,
    apps: AppConfig,
    process: EngineProcess | None,
    cluster: ClusterConfig,
    *,
    threads: int | None,
    on_progress: Callable[[str], None],
    ledger: str = "",
    tuning_state: str | None = None,
) -> Engines:
    """Start all engines in parallel. If one cannot start, all are closed. Raises EngineStartError.

    `ledger` is the page by which a language model and applications share a device; empty: one of them is missing.
    `tuning_state` is the directory of tuning jobs, which engines on other hosts must see.
    """
    if engine is not None and ledger and set(apps.app_device) != {"cpu"}:
        engine = replace(engine, memory_reserved=max(engine.memory_reserved, apps.app_memory_fraction))
    starts: list[Coroutine[Any, Any, AnyEngine]] = []
    if engine is not None and cluster.many:
        spawner = make_spawner(engine, cluster, process, ledger, tuning_state=tuning_state)
        starts.append(Replicas.start(cluster, spawner, on_progress))
    elif engine is not None:
        start = EngineClient.start(engine, on_progress=on_progress, process=process, ledger=ledger)
        starts.append(started_warm(start))
    for app in apps.app:
        starts.append(start_app(app, apps, partial(report_stage, on_progress, app), threads, ledger))
    tasks = [asyncio.create_task(each) for each in starts]
    try:
        clients = await asyncio.gather(*tasks)
        names = [client.info.name for client in clients if isinstance(client, AnyApp)]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise EngineStartError(f"two applications are named {twice[0]}; serve one of them")
    except BaseException:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, EngineConnection | AppGroup | Replicas):
                await ended.close()
        raise
    model = next((client for client in clients if isinstance(client, EngineClient | Replicas)), None)
    return Engines(model, tuple(client for client in clients if isinstance(client, AnyApp)))


@contextlib.contextmanager
def shared_page() -> Iterator[str]:
    """The path of a page that engines share, which is removed at the end."""
    path = make_ledger()
    try:
        yield path
    finally:
        with contextlib.suppress(OSError):
            Path(path).unlink()


def report_stage(on_progress: Callable[[str], None], app: str, stage: str) -> None:
    """Report a stage of an application's start."""
    on_progress(f"{app}: {stage}")


def log_as(config: ServerConfig) -> None:
    """Configure this process's log, which goes to standard error."""
    logs.log_as(config.log_format, config.log_level, timed=config.log_level in ("debug", "info"))


def open_store(config: ServerConfig) -> Store:
    """Open the configured store. Raises StoreError, with a way out if no place was configured."""
    where = place(config.store)
    most, size = config.store_conversations, config.store_bytes
    bounds = Bounds(
        seconds=config.store_seconds,
        threads=math.inf if most is None else most,
        bytes=default_bytes(where) if size is None else size,
    )
    try:
        return Store.open(where, bounds, more=SCHEMA, additions=[create_indexes, create_tables, create_sampler_table])
    except StoreError as error:
        if config.store is not None:
            raise
        raise StoreError(f"{error}; --store names another place, or `memory` to forget at the end") from None


async def serve(
    client: EngineClient | Replicas | None,
    config: ServerConfig,
    store: Store | None,
    listener: socket.socket,
    *,
    apps: Sequence[AnyApp] = (),
    supervised: bool = False,
    on_ready: Callable[[Engines, str], None],
) -> int:
    """Serve requests on `listener` until a signal or an engine's death. Returns the exit code. See `run`."""
    from holdfast.server.app import create_app

    app = create_app(client, config, store, apps)
    engines = Engines(client, apps)
    admissions: list[Admission] = app.state.admissions
    responses: Responses | None = app.state.responses
    shared: SharedAdapters | None = app.state.shared_adapters
    versions: AdapterVersions | None = app.state.adapter_versions
    jobs: tuple[Work, ...] = app.state.jobs
    connections = Connections(config)
    calls = calls_over_grpc(app, config)
    server = Server(
        uvicorn.Config(
            app, http=partial(Connection, shared=connections), ws=websocket_protocol(connections),  # type: ignore[arg-type]
            ws_max_size=config.max_body_bytes, ws_per_message_deflate=False,
            lifespan="off", log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=1,
            timeout_keep_alive=config.idle_seconds, ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile,
            log_level="error",  # uvicorn warns of each request that is not HTTP.
        )
    )  # fmt: skip
    with signals((*ENDING, *([HAND_OVER] if supervised else []))) as received:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        died = asyncio.create_task(first_death(engines.all))
        stop = asyncio.create_task(received.get())
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        gc.collect()
        gc.freeze()  # Without this, a full collection over all modules stops every stream for 50 to 100 ms.
        await start_jobs(jobs)
        if responses is not None:
            responses.begin_takeovers()
        if shared is not None and versions is not None:
            shared.begin()
            await clean_versions(versions)
        if calls is not None:
            await calls.start()
        on_ready(engines, url_of(listener, config))
        await asyncio.wait({died, stop, serving}, return_when=asyncio.FIRST_COMPLETED)
        if died.done():
            log.error("the engine has ended, so the server ends: %s", died.result())
            code = 1
        else:
            parts = Closing(server, listener, connections, app.state.sockets, admissions, jobs)
            handed_over = stop.done() and stop.result() == HAND_OVER
            ends = hand_over(parts, config) if handed_over else leave(parts, config)
            code = await ended_first(ends, died, received)
        if shared is not None and versions is not None:
            await shared.close()
            await versions.close()
        await end_work(admissions, jobs, engines)
        if calls is not None:
            await calls.close(CUT_SECONDS)
        server.should_exit = True
        for task in (died, stop):
            task.cancel()
        await asyncio.gather(serving, died, stop, return_exceptions=True)
        await close_store(responses, app.state.accounts, app.state.tracing)
    return code


def calls_over_grpc(app: Any, config: ServerConfig) -> GrpcServer | None:
    """Return the server of calls to `app`'s applications over gRPC, which is not started; None if it is not asked for.

    Raises OSError if it cannot listen.
    """
    if config.grpc_port is None or app.state.calls is None:
        return None
    calls = app.state.calls
    return GrpcServer(calls.entry, config, unary=calls.unary, streams=calls.streams)


def websocket_protocol(connections: Connections) -> Any:
    """Return the protocol of WebSockets; without the extra for it, requests for one are answered as any others."""
    if importlib.util.find_spec("websockets") is None:
        return "none"
    return partial(import_module("holdfast.server.upgraded").Upgraded, shared=connections)


async def start_jobs(jobs: Sequence[Work]) -> None:
    """Continue the batches and tuning jobs of an earlier start."""
    for each in jobs:
        try:
            await each.start()
        except ApiError as error:  # The jobs try again every few seconds.
            log.error("batches and tuning jobs of an earlier start cannot continue yet: %s", error.message)


async def clean_versions(versions: AdapterVersions) -> None:
    """Delete the files of adapters' versions that ended servers left."""
    try:
        await versions.clean()
    except (ApiError, OSError) as error:  # The next server tries again.
        log.warning("files of replaced adapters cannot be deleted now: %s", error)


async def end_work(admissions: Sequence[Admission], jobs: Sequence[Work], engines: Engines) -> None:
    """End the jobs and the engines. Running streams get a moment to send an error event."""
    for admission in admissions:
        admission.draining = True
    for each in jobs:
        await each.close()
    await asyncio.gather(*(each.close() for each in engines.all))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(all_idle(admissions), CUT_SECONDS)


async def close_store(responses: Responses | None, accounts: Accounts | None, tracing: Tracing | None) -> None:
    """Write the usage of keys, and close the store and tracing. No request may be in progress."""
    if accounts is not None:
        await accounts.close()
    if responses is not None:
        await responses.close()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


async def first_death(clients: Sequence[AnyEngine]) -> str:
    """Wait until one of the engines ends. Returns the reason."""
    waits = [asyncio.create_task(client.dead.wait()) for client in clients]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return next(client.reason for client in clients if client.dead.is_set())
    finally:
        for wait in waits:
            wait.cancel()


async def all_idle(admissions: Sequence[Admission]) -> None:
    """Wait until no request is in progress."""
    for admission in admissions:
        await admission.idle.wait()


class Closing(NamedTuple):
    """Parts of a server that end before its engines and its store."""

    server: uvicorn.Server
    listener: socket.socket
    connections: Connections
    sockets: OpenSockets
    admissions: Sequence[Admission]
    jobs: Sequence[Work]


async def leave(parts: Closing, config: ServerConfig) -> None:
    """Serve on for the lame-duck time while health checks fail, close the listener, and drain within the time limit."""
    for admission in parts.admissions:
        admission.leave()
    parts.connections.leave()
    if config.lame_duck_seconds:
        log.warning("leaving: new requests are served for %g s; a second signal ends at once", config.lame_duck_seconds)
    await asyncio.sleep(config.lame_duck_seconds)
    await stop_accepting(parts.server, parts.listener, parts.connections)
    await drain(parts, config.drain_seconds)


async def hand_over(parts: Closing, config: ServerConfig) -> None:
    """Let the successor at the same listener accept all further connections, and drain within the time limit."""
    await leave_listener(parts.server, parts.connections, config.idle_seconds)
    await drain(parts, config.drain_seconds)


async def drain(parts: Closing, seconds: float) -> None:
    """Leave batches and jobs to other servers, and refuse new requests.

    Waits up to the time limit until running requests have ended and their answers are sent.
    """
    for each in parts.jobs:
        await each.close()
    for admission in parts.admissions:
        admission.draining = True
    if in_progress := sum(admission.in_progress for admission in parts.admissions):
        log.warning(
            "draining: %d requests in progress, at most %g s; a second signal ends at once", in_progress, seconds
        )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await all_idle(parts.admissions)
            await all_answered(parts.connections)
            await parts.sockets.idle()


async def ended_first(closing: Coroutine[Any, Any, None], died: asyncio.Task[str], received: asyncio.Queue[int]) -> int:
    """Run `closing` until it has ended, a second signal comes or an engine dies. Returns the exit code."""
    again, task = asyncio.create_task(received.get()), asyncio.create_task(closing)
    try:
        await asyncio.wait({again, task, died}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        return 128 + again.result() if again.done() else 1 if died.done() else 0
    finally:
        again.cancel()
        task.cancel()
        await asyncio.gather(again, task, return_exceptions=True)


@contextlib.contextmanager
def signals(kinds: Sequence[signal.Signals] = ENDING) -> Iterator[asyncio.Queue[int]]:
    """Put these signals into a queue within the context, instead of their default action."""
    received: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for kind in kinds:
        loop.add_signal_handler(kind, received.put_nowait, int(kind))
    try:
        yield received
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, because `serve` decides when the server stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
