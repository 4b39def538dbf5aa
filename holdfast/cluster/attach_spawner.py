"""AttachSpawner: engines that run already, each at an address of its own. Stopping a replica leaves its engine."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from holdfast.core.version import __version__
from holdfast.engine.client.attachment import Attachment
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from holdfast.engine.client.warming import started_warm
from holdfast.engine.messages import Attached, EngineInfo

FIRST_SECONDS = 30.0
"""Seconds that the first attempt waits for an engine to listen at its address."""
LATER_SECONDS = 1e9
"""Seconds that later attempts wait: an engine that has ended may be started again at any time."""

log = logging.getLogger("holdfast.cluster")


class Attacher:
    """Attaches to engines that listen at addresses. All must serve the same model."""

    def __init__(self) -> None:
        self._infos: list[EngineInfo] = []
        """The first engine's description, once it is known."""
        self._kept = tempfile.TemporaryDirectory(prefix="holdfast-profiles-")

    async def attach(
        self,
        number: int,
        address: str,
        key: str,
        seconds: float = 0.0,
        here: Callable[[Attached], Attached] = lambda welcome: welcome,
    ) -> EngineClient:
        """Attach to the engine of a replica. Waits at most `seconds` for it to listen.

        `here` changes the engine's welcome to what holds on this host. Raises EngineStartError.
        """
        try:
            attachment, welcome = await Attachment.open(address, key, seconds)
        except (ValueError, OSError) as error:
            raise EngineStartError(str(error)) from error
        try:
            welcome = here(self._checked(address, welcome, number))
        except BaseException:
            await attachment.close()
            raise
        if welcome.version != __version__:
            log.warning(
                "the engine at %s is Holdfast %s, and this server is %s; they work together during an upgrade",
                address, welcome.version or "of an earlier version", __version__,
            )  # fmt: skip
        return await started_warm(EngineClient.attach(attachment, welcome))

    def close(self) -> None:
        """Remove the engines' profiles from this host."""
        self._kept.cleanup()

    def _checked(self, address: str, welcome: Attached, number: int) -> Attached:
        """The welcome of an engine, with a profile that is a file here. Raises EngineStartError for another model."""
        mine = welcome.info
        self._infos = self._infos or [mine]
        first = self._infos[0]
        for what in ("model", "precision", "vocab_size", "block_size", "max_model_len"):
            if getattr(mine, what) != getattr(first, what):
                raise EngineStartError(
                    f"the engine at {address} has {what} {getattr(mine, what)}, and the first one has "
                    f"{getattr(first, what)}; all must serve the same model"
                )
        if welcome.profile_content and not Path(mine.profile_path).exists():
            here = Path(self._kept.name) / f"{number}.json"
            here.write_bytes(welcome.profile_content)
            return msgspec.structs.replace(welcome, info=replace(mine, profile_path=str(here)), profile_content=b"")
        return welcome


class AttachSpawner:
    """Attaches to engines at given addresses."""

    kind = "attached"
    lasting = True

    def __init__(self, addresses: Sequence[str], key: str = "") -> None:
        """`addresses` are as `engine.address` reads them. `key` is the secret key of those on TCP."""
        self.most: int | None = len(addresses)
        self._addresses, self._key = addresses, key
        self._tried: set[int] = set()
        """Numbers of the replicas whose first attempt has begun."""
        self._attacher = Attacher()

    def place(self, number: int) -> str:
        """See `Spawner.place`."""
        return self._addresses[number]

    async def first(self, count: int, most: int) -> Sequence[int]:
        """See `Spawner.first`."""
        return range(count)

    async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
        """See `Spawner.start`. Waits for an engine that does not listen yet."""
        address = self._addresses[number]
        on_progress(f"attaching to the engine at {address}")
        seconds = LATER_SECONDS if number in self._tried else FIRST_SECONDS
        self._tried.add(number)
        return await self._attacher.attach(number, address, self._key, seconds)

    async def stop(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.stop`. The engine goes on."""
        await engine.close()

    async def leave(self, number: int, engine: EngineClient) -> None:
        """See `Spawner.leave`."""
        await engine.close()

    async def close(self) -> None:
        """See `Spawner.close`. Engines go on."""
        self._attacher.close()
