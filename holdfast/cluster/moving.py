"""Moves conversations' state between engines, and measures how long this takes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead

FIRST_BYTES_PER_SECOND = 1e9
"""Assumed rate of moves in bytes per second, until a move is measured."""
LEAST_TOKENS = 256
"""Minimum number of tokens of a move that counts as a measurement."""
WEIGHT = 0.3
"""Weight of the latest measurement in the average time per token."""
PATIENCE = 4.0
"""Time limit of a move, as a multiple of its expected time. PATIENCE_SECONDS are added."""
PATIENCE_SECONDS = 2.0

log = logging.getLogger("holdfast.cluster")


class Mover:
    """Moves state from one engine to another, and measures the time per token."""

    def __init__(self, bytes_per_token: float, block_size: int) -> None:
        self.ms_per_token = bytes_per_token / FIRST_BYTES_PER_SECOND * 1e3
        """Milliseconds per moved token. Each measurement updates it."""
        self._block_size = block_size

    @staticmethod
    def can(engine: EngineClient) -> bool:
        """Whether state can be moved to and from this engine."""
        return bool(engine.chunk_address)

    async def move(self, chain: Sequence[bytes], source: EngineClient, target: EngineClient) -> int:
        """Copy the blocks of a chain that `target` lacks from `source`. Returns the number of tokens copied.

        It is smaller, or 0, if the source no longer has all blocks, if one of the engines ends, or if the move takes
        too long. Nothing is lost then, because the missing tokens are computed again.
        """
        tokens = len(chain) * self._block_size
        if not tokens or not (self.can(source) and self.can(target)):
            return 0
        began, came = time.monotonic(), 0
        limit = PATIENCE_SECONDS + PATIENCE * tokens * self.ms_per_token / 1e3
        with suppress(TimeoutError, EngineDead):
            came = await asyncio.wait_for(target.fetch(chain, range(len(chain)), source.chunk_address), limit)
        seconds = time.monotonic() - began
        if came >= LEAST_TOKENS:
            self.ms_per_token += WEIGHT * (seconds * 1e3 / came - self.ms_per_token)
        log.info("%d of %d tokens moved in %.1f ms", came, tokens, seconds * 1e3)
        return came
