"""`holdfast engine`: runs an engine at an address, where servers attach to it. It outlives them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import shlex
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from holdfast.cli.flags import UsageError
from holdfast.cli.notify import notify
from holdfast.cli.output import stage_printer
from holdfast.core.config import option
from holdfast.engine.address import check_address, is_local, new_key, read_key
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.unattended import until_unattended
from holdfast.engine.client.warming import started_warm
from holdfast.engine.logs import fields, log_as
from holdfast.lm.config import EngineConfig
from holdfast.server.conversations.database import data_directory
from holdfast.server.run import signals

log = logging.getLogger("holdfast.engine")

MOST_SECONDS = 30 * 86400.0
"""Longest time without a server, in seconds."""


@dataclass(frozen=True, kw_only=True)
class ListenConfig:
    """Options of `holdfast engine`. Raises ValueError for an invalid address."""

    listen: str = option(
        "./holdfast.sock",
        "address at which servers attach: the path of a Unix socket, with a slash, or HOST:PORT, which needs a key",
    )
    engine_key: str | None = option(
        None, "with HOST:PORT: the file with the key that servers must have, too; it is made if it does not exist"
    )
    drain_seconds: float = option(
        30.0,
        "time after SIGTERM or Ctrl-C in which running requests finish, and conversations move to the servers' other "
        "engines (with --chunk-host); the engine ends earlier once all servers have left",
    )
    end_unattended: float | None = option(
        None, "seconds without any attached server after which the engine ends; default: it waits without a limit"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("warning", "lowest level that is logged")
    log_format: Literal["text", "json"] = option(
        "text", "form of the log's lines: text for people, or json with a field for each value"
    )

    def __post_init__(self) -> None:
        check_address(self.listen, self.engine_key)
        if not 0 <= self.drain_seconds <= 86400:
            raise ValueError(f"drain_seconds is {self.drain_seconds}; it must lie between 0 and 86400")
        if self.end_unattended is not None and not 1 <= self.end_unattended <= MOST_SECONDS:
            raise ValueError(
                f"end_unattended is {self.end_unattended:g}; it must lie between 1 and {MOST_SECONDS:g} seconds"
            )


async def run(config: ListenConfig, engine: EngineConfig) -> int:
    """Run the engine until a signal, or until it ends. Returns the exit code. Raises EngineStartError, UsageError."""
    log_as(config.log_format, config.log_level)
    console = Console(highlight=False, quiet=config.log_format == "json")
    key = key_of(config)
    start = EngineClient.start(
        engine,
        on_progress=stage_printer(console),
        priced=True,
        chunk_secret=secret_of(key or (local_key() if engine.chunk_host else "")),
        listen=config.listen,
        listen_key=key,
    )
    client = await started_warm(start)
    try:
        with signals() as received:
            notify("READY=1")
            log.info(
                "ready at %s",
                config.listen,
                extra=fields(model=client.info.model, listen=config.listen, seconds=client.info.started_in),
            )
            words = ["holdfast", "serve", "--engines", config.listen]
            if key:
                words += ["--engine-key", str(config.engine_key)]
            console.print(Text(f"{client.info.model} is ready at {config.listen} in {client.info.started_in:.1f} s"))
            console.print(Text(f"{shlex.join(words)} serves it", style="dim"), soft_wrap=True)
            code = await until_ended(client, config, received)
        if client.dead.is_set():
            log.error("the engine has ended: %s", client.reason)
            return 1
        return code
    finally:
        await client.close()


async def until_ended(client: EngineClient, config: ListenConfig, received: asyncio.Queue[int]) -> int:
    """Wait until the engine has ended or no server needs it, or for a signal, which drains it. Returns the exit code.

    The drain ends once all servers have left, at its time limit, or at a second signal.
    """
    died, stop = asyncio.create_task(client.dead.wait()), asyncio.create_task(received.get())
    alone = asyncio.create_task(no_server(client, config.end_unattended))
    tasks: set[asyncio.Task[Any]] = {died, stop, alone}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            return 0
        again, drain = asyncio.create_task(received.get()), asyncio.create_task(drained(client, config.drain_seconds))
        tasks |= {again, drain}
        await asyncio.wait({died, again, drain}, return_when=asyncio.FIRST_COMPLETED)
        return 128 + again.result() if again.done() else 0
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def drained(client: EngineClient, seconds: float) -> None:
    """Wait until all servers have left the engine, at most `seconds`."""
    try:
        await asyncio.wait_for(client.drain(seconds), seconds)
    except TimeoutError:
        log.warning("servers are still attached after %g s, and the engine ends; their requests are cut", seconds)
    except EngineDead:
        return


def secret_of(key: str) -> bytes:
    """The secret by which engines that share a key recognise each other; empty without a key."""
    return hashlib.sha256(key.encode()).digest() if key else b""


def local_key() -> str:
    """The key that all engines of this user on this machine share, which is made if it is missing. Raises UsageError.

    State moves between engines that listen at Unix sockets with it.
    """
    path = data_directory() / "engines.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        new_key(str(path))
        return read_key(str(path))
    except (ValueError, OSError) as error:
        raise UsageError(f"the key of this user's engines cannot be used: {error}") from None


async def no_server(client: EngineClient, seconds: float | None) -> None:
    """Wait until no server has been attached for `seconds`, or without a limit."""
    if seconds is None:
        await asyncio.Event().wait()
        return
    with suppress(EngineDead):
        await until_unattended(client, seconds)
        log.warning("no server was attached for %g s, so the engine ends", seconds)


def key_of(config: ListenConfig) -> str:
    """The key of an engine on TCP, whose file is made if it is missing; empty for a Unix socket. Raises UsageError."""
    if is_local(config.listen) or config.engine_key is None:
        return ""
    try:
        new_key(config.engine_key)
        return read_key(config.engine_key)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None
