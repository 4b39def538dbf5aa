"""Waits until an engine that listens at an address has had no client for some time."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from holdfast.engine.client.client import EngineClient

CHECK_SECONDS = 5.0
"""Seconds between two counts of the clients. A count also wakes an idle engine, which then drops silent clients."""


async def until_unattended(engine: EngineClient, seconds: float) -> None:
    """Wait until no client has been attached for `seconds`. The engine must listen at an address.

    The time counts from the last check that found a client. An engine that does not answer counts as attended. Raises
    EngineDead if it ends.
    """
    since = time.monotonic()
    while time.monotonic() - since < seconds:
        await asyncio.sleep(min(CHECK_SECONDS, seconds))
        count = 1
        with suppress(TimeoutError):
            count = await engine.count_clients()
        if count:
            since = time.monotonic()
