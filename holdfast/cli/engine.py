"""`holdfast engine`: runs an engine at an address, where servers attach to it. It outlives them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from holdfast.cli.flags import UsageError
from holdfast.cli.output import stage_printer
from holdfast.core.config import option
from holdfast.engine.address import check_address, is_local, new_key, read_key
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.engine.client.unattended import until_unattended
from holdfast.lm.config import EngineConfig
from holdfast.server.run import signals

log = logging.getLogger("holdfast")


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
    end_unattended: float | None = option(
        None, "seconds without any attached server after which the engine ends; default: it waits without a limit"
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("warning", "lowest level that is logged")

    def __post_init__(self) -> None:
        check_address(self.listen, self.engine_key)
        if self.end_unattended is not None and not 1 <= self.end_unattended <= MOST_SECONDS:
            raise ValueError(
                f"end_unattended is {self.end_unattended:g}; it must lie between 1 and {MOST_SECONDS:g} seconds"
            )


async def run(config: ListenConfig, engine: EngineConfig) -> int:
    """Run the engine until a signal, or until it ends. Returns the exit code. Raises EngineStartError, UsageError."""
    logging.basicConfig(format="holdfast: %(message)s", level=config.log_level.upper())
    console = Console(highlight=False)
    key = key_of(config)
    client = await EngineClient.start(
        engine,
        on_progress=stage_printer(console),
        priced=True,
        chunk_secret=hashlib.sha256(key.encode()).digest() if key else b"",
        listen=config.listen,
        listen_key=key,
    )
    try:
        with signals() as received:
            option = f" --engine-key {config.engine_key}" if key else ""
            console.print(Text(f"{client.info.model} is ready at {config.listen} in {client.info.started_in:.1f} s"))
            console.print(
                Text(f"holdfast serve --engines {config.listen}{option} serves it", style="dim"), soft_wrap=True
            )
            await first_of(client.dead.wait(), received.get(), no_server(client, config.end_unattended))
        if client.dead.is_set():
            log.error("the engine has ended: %s", client.reason)
            return 1
        return 0
    finally:
        await client.close()


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of these ends, and cancel the others. Raises its exception."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


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
