"""Warming: a first request to a new engine, so that no client's request pays for what the first one compiles."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from contextlib import aclosing

from holdfast.core.types import WARMING, SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineAsleep, EngineDead, EngineStartError, QueueFull
from holdfast.lm.limits import RequestRefused

WARM_SECONDS = 120.0
"""Maximum number of seconds for the first requests. Compiling kernels takes most of it."""
PROMPT_TOKENS = 4
"""Number of tokens of the first prompts, or fewer if the context is shorter. No whole block is cached of them."""
ANSWER_TOKENS = 3
"""Number of tokens of the first answers: a prefill, and decode steps."""

log = logging.getLogger("holdfast.engine")


async def started_warm(start: Awaitable[EngineClient]) -> EngineClient:
    """Await an engine's start, and warm the engine up. Raises EngineStartError; the engine is closed then."""
    client = await start
    try:
        await warm_up(client)
    except BaseException as error:
        await client.close()
        if isinstance(error, EngineDead):
            raise EngineStartError(str(error)) from error
        raise
    return client


async def warm_up(client: EngineClient) -> None:
    """Have an engine that has computed nothing yet answer a greedy and a sampled request. Raises EngineDead.

    It is left cold, with a line in the log, if it takes no such request or needs longer than WARM_SECONDS. So is an
    engine that would keep the recurrent states of these requests in a tier that outlives it.
    """
    if (await client.health()).tokens_computed or keeps_states(client):
        return
    length = min(PROMPT_TOKENS, client.info.max_model_len - ANSWER_TOKENS)
    try:
        async with asyncio.timeout(WARM_SECONDS):
            for temperature in (0.0, 1.0):
                params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=temperature, ignore_eos=True)
                async with aclosing(client.stream([0] * length, params, tenant=WARMING)) as deltas:
                    async for _ in deltas:
                        pass
    except (TimeoutError, QueueFull, EngineAsleep, RequestRefused) as error:
        log.warning("the engine could not be warmed up, so its first requests may be slow: %s", error or "it took long")


def keeps_states(client: EngineClient) -> bool:
    """Whether states of any length are kept on a disk or in a remote cache."""
    kept = client.config.disk_cache_dir is not None or client.config.remote_cache is not None
    return kept and client.info.memory.rows > 0
