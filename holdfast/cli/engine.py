"""`holdfast engine`: runs an engine at an address, where servers attach to it. It outlives them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

from holdfast.cli.flags import UsageError
from holdfast.cli.notify import notify
from holdfast.cli.output import stage_printer
from holdfast.core.config import option
from holdfast.engine.address import check_address, is_local, new_key, read_key
from holdfast.engine.client.client import EngineClient
from holdfast.engine.logs import fields, log_as
from holdfast.lm.config import EngineConfig
from holdfast.server.run import signals

log = logging.getLogger("holdfast.engine")


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
    log_level: Literal["debug", "info", "warning", "error"] = option("warning", "lowest level that is logged")
    log_format: Literal["text", "json"] = option(
        "text", "form of the log's lines: text for people, or json with a field for each value"
    )

    def __post_init__(self) -> None:
        check_address(self.listen, self.engine_key)


async def run(config: ListenConfig, engine: EngineConfig) -> int:
    """Run the engine until a signal, or until it ends. Returns the exit code. Raises EngineStartError, UsageError."""
    log_as(config.log_format, config.log_level)
    console = Console(highlight=False, quiet=config.log_format == "json")
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
            notify("READY=1")
            log.info(
                "ready at %s",
                config.listen,
                extra=fields(model=client.info.model, listen=config.listen, seconds=client.info.started_in),
            )
            option = f" --engine-key {config.engine_key}" if key else ""
            console.print(Text(f"{client.info.model} is ready at {config.listen} in {client.info.started_in:.1f} s"))
            console.print(
                Text(f"holdfast serve --engines {config.listen}{option} serves it", style="dim"), soft_wrap=True
            )
            died, stop = asyncio.create_task(client.dead.wait()), asyncio.create_task(received.get())
            await asyncio.wait({died, stop}, return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            stop.cancel()
        if client.dead.is_set():
            log.error("the engine has ended: %s", client.reason)
            return 1
        return 0
    finally:
        await client.close()


def key_of(config: ListenConfig) -> str:
    """The key of an engine on TCP, whose file is made if it is missing; empty for a Unix socket. Raises UsageError."""
    if is_local(config.listen) or config.engine_key is None:
        return ""
    try:
        new_key(config.engine_key)
        return read_key(config.engine_key)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from None
