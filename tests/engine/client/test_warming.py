"""The first requests of a new engine, which no client has to wait for."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.core.types import WARMING, SamplingParams
from holdfast.engine.client import warming
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError, QueueFull
from holdfast.engine.client.warming import ANSWER_TOKENS, PROMPT_TOKENS, started_warm, warm_up

TWO_REQUESTS = 2 * (PROMPT_TOKENS + ANSWER_TOKENS - 1)
"""Number of tokens that are computed for two first requests: the last token of an answer is not."""


async def cached(client: EngineClient, prompt: list[int]) -> int:
    """Ask for a token. Returns the number of prompt tokens found in the cache."""
    async for delta in client.stream(prompt, SamplingParams(max_tokens=1, ignore_eos=True)):
        usage = delta.usage
    assert usage is not None
    return usage.cached_tokens


async def test_an_engine_is_warmed_up_once_and_leaves_nothing_that_a_request_finds(small):
    client = await started_warm(EngineClient.start(small()))
    computed = (await client.health()).tokens_computed
    assert 0 < computed <= TWO_REQUESTS
    await warm_up(client)
    stats = await client.health()
    assert (stats.tokens_computed, stats.waiting, stats.running) == (computed, 0, 0)
    assert await cached(client, [0] * PROMPT_TOKENS) == 0
    await client.close()


async def test_a_context_shorter_than_the_first_prompts_is_warmed_up_too(small):
    client = await started_warm(EngineClient.start(small(max_model_len=ANSWER_TOKENS + 1)))
    assert (await client.health()).tokens_computed > 0
    await client.close()


async def test_the_first_requests_are_nobodys(small, monkeypatch):
    tenants, stream = [], EngineClient.stream

    def noted(*args, tenant="", **options):
        tenants.append(tenant)
        return stream(*args, tenant=tenant, **options)

    monkeypatch.setattr(EngineClient, "stream", noted)
    client = await started_warm(EngineClient.start(small()))
    assert tenants == [WARMING] * 2
    await client.close()


async def test_an_engine_that_takes_no_request_stays_cold_and_is_started(small, caplog, monkeypatch):
    def full(*_, **__):
        raise QueueFull("its queue is full")

    monkeypatch.setattr(EngineClient, "stream", full)
    client = await started_warm(EngineClient.start(small()))
    assert not client.dead.is_set() and "could not be warmed up" in caplog.text
    await client.close()


async def test_an_engine_that_ends_in_its_first_request_fails_the_start(small, monkeypatch):
    monkeypatch.setattr(warming, "WARM_SECONDS", 30.0)
    start = asyncio.create_task(EngineClient.start(small()))
    client = await start
    client.kill()
    with pytest.raises(EngineStartError, match="killed by SIGKILL"):
        await started_warm(start)
