"""Moves of conversations' state between engines: how long they take, and doing them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress

from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead

FIRST_BYTES_PER_SECOND = 1e9
"""What moves are believed to reach before any was measured."""
LEAST_TOKENS = 256
"""A smaller move says little of the pace."""
WEIGHT = 0.3
"""Of the newest measurement, in the pace."""
PATIENCE = 4.0
"""A move may take so many times as long as it should, and PATIENCE_SECONDS more."""
PATIENCE_SECONDS = 2.0

log = logging.getLogger("holdfast.cluster")


class Mover:
    """Moves state from one engine to another, and knows at what pace."""

    def __init__(self, bytes_per_token: float, block_size: int) -> None:
        self.ms_per_token = bytes_per_token / FIRST_BYTES_PER_SECOND * 1e3
        """Time that one token's state takes."""
        self._block_size = block_size

    @staticmethod
    def can(engine: EngineClient) -> bool:
        """Whether state can be moved to and from this engine."""
        return bool(engine.chunk_address)

    async def move(self, chain: Sequence[bytes], source: EngineClient, target: EngineClient) -> int:
        """Bring those blocks of a chain that the source has and the target lacks. Returns how many tokens have come.

        It is fewer, or none, if the source has them no more, if one of the two ends, or if it takes far too long:
        nothing is lost then, and the rest is computed again.
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
