"""Moves between real engine processes: state computed at one is continued at another, or computed again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from contextlib import aclosing, asynccontextmanager

import pytest
import pytest_asyncio

from holdfast.core.types import SamplingParams
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead
from holdfast.lm.config import EngineConfig
from tests.engine.conftest import SMALL

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = b"for tests only" * 3
BLOCK = 16
BLOCK_BYTES = 8192
MOVING = SMALL | {"cache_gb": 0.008, "host_cache_gb": 0.004, "chunk_host": "127.0.0.1", "eviction": "lru"}
"""The device has room for 976 blocks, the host for 488."""


def start(checkpoint, secret=SECRET, **changes):
    return EngineClient.start(EngineConfig(model=str(checkpoint), **MOVING | changes), chunk_secret=secret)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(checkpoint):
    """Two engines, and one with a host tier of 24 blocks that may be killed. Each test uses prompts of its own."""
    three = await asyncio.gather(
        start(checkpoint), start(checkpoint), start(checkpoint, host_cache_gb=24.5 * BLOCK_BYTES / 1e9)
    )
    assert three[2].info.num_host_blocks == 24
    yield three
    for client in three[:2]:
        stats = await client.health()
        assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)
    for client in three:
        await client.close()


def prompt_of(seed, tokens):
    return random.Random(seed).choices(range(3, 380), k=tokens)


async def turn(client, prompt, tokens=8, **options):
    """The tokens of a greedy answer, and the number of prompt tokens that came from the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    async with aclosing(client.stream(prompt, params, **options)) as deltas:
        seen = [delta async for delta in deltas]
    return [token for delta in seen for token in delta.tokens], seen[-1].usage.cached_tokens


async def move(source, target, prompt, address=None):
    """Move all of a prompt's blocks. Returns the number of tokens that have come."""
    chain = target.chain(prompt)
    return await target.fetch(chain, range(len(chain)), address or source.chunk_address)


@asynccontextmanager
async def between(address, change=lambda data, at: data):
    """A proxy in front of an engine.

    Yields its address. `change` receives the engine's data, and its offset in all of it.

    It may be a coroutine function. If it gives None, both connections end.
    """
    host, port = address.split(":")
    tasks = set()

    async def forward(reader, writer, change):
        at = 0
        while data := await reader.read(1 << 14):
            changed = change(data, at)
            if asyncio.iscoroutine(changed):
                changed = await changed
            if changed is None:
                break
            at += len(data)
            writer.write(changed)
            await writer.drain()
        writer.close()

    async def serve(reader, writer):
        there, back = await asyncio.open_connection(host, int(port))
        ways = forward(reader, back, lambda data, at: data), forward(there, writer, change)
        running = [asyncio.ensure_future(way) for way in ways]
        tasks.update(running)
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for closing in (writer, back):
            closing.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()


async def test_a_moved_conversation_goes_on_as_if_it_had_stayed(engines):
    here, there, _ = engines
    prompt = prompt_of(1, 201)
    answer, _ = await turn(here, prompt)
    longer = prompt + answer + prompt_of(2, 20)
    chain = there.chain(longer)
    assert chain == here.chain(longer) and len(chain) == 14
    assert await there.found(chain) == (0, 0, 0)
    assert await here.found(chain) == (208, 0, 0)
    assert await move(here, there, longer) == 208
    assert await there.found(chain) == (0, 208, 0)
    assert await here.found(chain) == (208, 0, 0), "it stays at its source as well"
    expected, _ = await turn(here, longer, 30)
    assert await turn(there, longer, 30) == (expected, 208)
    before, after = (await here.health()), (await there.health())
    assert before.chunk_bytes_out == after.chunk_bytes_in == 13 * BLOCK_BYTES and after.chunk_rate > 0
    assert await move(here, there, longer) == 0, "nothing is brought twice"
    assert (await there.health()).chunk_bytes_in == after.chunk_bytes_in


async def test_the_part_of_a_conversation_that_came_is_used_and_the_rest_is_computed(engines):
    here, there, _ = engines
    prompt = prompt_of(3, 400)
    await turn(here, prompt)
    chain = there.chain(prompt)
    assert await there.fetch(chain, [2, 3, 10, 22, 23], here.chunk_address) == 80
    expected, _ = await turn(here, prompt, 20)
    assert await turn(there, prompt, 20) == (expected, 80)


async def test_another_tenants_state_is_not_found_and_does_not_move(engines):
    here, there, _ = engines
    prompt = prompt_of(4, 100)
    await turn(here, prompt, tenant="mine")
    assert await here.found(here.chain(prompt, tenant="mine")) == (96, 0, 0)
    for tenant in ("", "yours"):
        chain = there.chain(prompt, tenant=tenant)
        assert await here.found(chain) == (0, 0, 0)
        assert await there.fetch(chain, range(len(chain)), here.chunk_address) == 0


async def test_streams_at_both_engines_continue_during_moves_in_both_directions(engines):
    here, there, _ = engines
    prompts = [prompt_of(seed, 300) for seed in range(10, 16)]
    alone = await asyncio.gather(*[turn(here, prompt, 40) for prompt in prompts[:3]])
    alone += await asyncio.gather(*[turn(there, prompt, 40) for prompt in prompts[3:]])
    streams = [turn(client, prompt_of(seed, 50), 200) for seed, client in ((20, here), (21, there))]
    running = [asyncio.create_task(stream) for stream in streams]
    moved = await asyncio.gather(
        *[move(here, there, prompt) for prompt in prompts[:3]], *[move(there, here, prompt) for prompt in prompts[3:]]
    )
    assert moved == [288] * 6
    again = await asyncio.gather(*[turn(there, prompt, 40) for prompt in prompts[:3]])
    again += await asyncio.gather(*[turn(here, prompt, 40) for prompt in prompts[3:]])
    assert again == [(answer, 288) for answer, _ in alone]
    beside = [tokens for tokens, _ in await asyncio.gather(*running)]
    assert beside == [(await turn(client, prompt_of(seed, 50), 200))[0] for seed, client in ((20, there), (21, here))]


async def test_bytes_that_change_on_the_way_are_refused_and_earlier_ones_stay(engines):
    here, there, _ = engines
    prompt = prompt_of(5, 1000)
    await turn(here, prompt)
    wrong = 20 * BLOCK_BYTES

    def change(data, at):
        place = wrong - at
        if 0 <= place < len(data):
            data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    failures = (await there.health()).chunk_failures
    async with between(here.chunk_address, change) as address:
        came = await move(here, there, prompt, address)
    assert came == 19 * BLOCK, "the frames' heads are in front of the 20th block's changed byte"
    assert (await there.health()).chunk_failures == failures + 1
    assert await there.found(there.chain(prompt)) == (0, came, 0)
    expected, _ = await turn(here, prompt, 20)
    assert await turn(there, prompt, 20) == (expected, came)


async def test_an_engine_without_the_secret_gets_nothing(engines):
    here, there, _ = engines
    prompt = prompt_of(6, 100)
    await turn(here, prompt)

    def change(data, at):
        return bytes([data[0], *(byte ^ 1 for byte in data[1:])]) if at else data  # the proof of the source

    async with between(here.chunk_address, change) as address:
        assert await move(here, there, prompt, address) == 0
    assert await move(here, there, prompt, "127.0.0.1:1") == 0, "nobody listens there"
    assert await move(here, there, prompt) == 96


async def test_a_cancelled_fetch_keeps_what_came_and_leaves_room_for_the_next(engines):
    here, there, _ = engines
    prompt = prompt_of(7, 1000)
    await turn(here, prompt)
    stalls = asyncio.Event()

    async def change(data, at):
        if at > 10 * BLOCK_BYTES:
            stalls.set()
            await asyncio.sleep(0.5)
        return data

    async with between(here.chunk_address, change) as address:
        fetch = asyncio.create_task(move(here, there, prompt, address))
        await stalls.wait()
        fetch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetch
    assert await move(here, there, prompt) > 0
    expected, _ = await turn(here, prompt, 20)
    assert await turn(there, prompt, 20) == (expected, 992)


async def test_a_long_conversation_passes_through_a_small_host_tier(engines):
    here, _, small = engines
    prompt = prompt_of(8, 1000)
    expected, _ = await turn(small, prompt, 20)
    assert await move(small, here, prompt) == 992
    assert await turn(here, prompt, 20) == (expected, 992)


async def test_a_small_host_tier_takes_the_blocks_it_has_room_for(engines):
    here, _, small = engines
    prompt = prompt_of(9, 1000)
    expected, _ = await turn(here, prompt, 20)
    assert await move(here, small, prompt) == 12 * BLOCK
    assert await turn(small, prompt, 20) == (expected, 12 * BLOCK)


async def test_an_engine_killed_during_a_move_loses_only_blocks_that_had_not_come(engines):
    _, there, small = engines
    prompt = prompt_of(30, 2000)
    expected, _ = await turn(small, prompt, 20)

    def change(data, at):
        if at > 40 * BLOCK_BYTES:
            os.kill(small.pid, signal.SIGKILL)
            return None
        return data

    async with between(small.chunk_address, change) as address:
        came = await move(small, there, prompt, address)
    assert 30 * BLOCK <= came <= 45 * BLOCK
    assert await turn(there, prompt, 20) == (expected, came)
    with pytest.raises(EngineDead):
        await small.found(small.chain(prompt))
    assert await move(small, there, prompt_of(31, 100)) == 0
