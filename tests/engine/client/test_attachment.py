"""Clients that attach to a running engine: what they find there, and what their end leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_engine import engine_info

from holdfast.core.types import SamplingParams
from holdfast.engine import messages
from holdfast.engine.address import new_key, read_key
from holdfast.engine.client.attachment import Attachment, NoEngine
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead, EngineStartError
from holdfast.engine.process.door import Door
from holdfast.engine.wire import WIRE
from holdfast.lm.config import EngineConfig
from tests.served import free_port

PROMPT = list(range(40, 104))
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
CLIENT = """\
import asyncio, sys
from holdfast.core.types import SamplingParams
from holdfast.engine.client.attachment import Attachment
from holdfast.engine.client.client import EngineClient

async def main():
    client = await EngineClient.attach(*await Attachment.open(sys.argv[1]))
    params = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)
    async for delta in client.stream(list(range(40, 104)), params, request_id="same"):
        print(len(delta.tokens), flush=True)

asyncio.run(main())
"""


async def attach(address: str, key: str = "") -> EngineClient:
    return await EngineClient.attach(*await Attachment.open(address, key))


async def answer(client: EngineClient, count: int = 8) -> tuple[list[int], int]:
    """The tokens of an answer, and the number of prompt tokens found in the cache."""
    tokens: list[int] = []
    params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
    async for delta in client.stream(PROMPT, params, request_id="same"):
        tokens += delta.tokens
        usage = delta.usage
    assert usage is not None
    return tokens, usage.cached_tokens


async def test_a_killed_client_costs_its_requests_and_leaves_the_cache(small, tmp_path):
    address = str(tmp_path / "engine.sock")
    engine = await EngineClient.start(small(), listen=address)
    try:
        assert stat.S_IMODE(Path(address).stat().st_mode) == 0o600
        one, two = await attach(address), await attach(address)
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, address], env=ENVIRONMENT, stdout=subprocess.PIPE
        ) as killed:
            assert killed.stdout is not None
            await asyncio.to_thread(killed.stdout.readline)  # Its first token.
            assert (await one.health()).running == 1
            killed.kill()
        while (await one.health()).running:
            await asyncio.sleep(0.05)
        (first, found), (second, _) = await asyncio.gather(answer(one), answer(two))
        assert first == second and found == 48, "all whole blocks but the last"
        await one.close()
        assert (await answer(two))[1] == 48
    finally:
        await engine.close()
    await asyncio.wait_for(two.dead.wait(), 60)
    assert two.reason == f"the engine at {address}: the engine was stopped"
    with pytest.raises(EngineDead, match="was stopped"):
        await answer(two)
    await two.close()
    assert not Path(address).exists()


@pytest.mark.parametrize("reads", ["before", "after"])
async def test_the_loss_of_a_connection_is_reported_after_all_that_came_before(tmp_path, reads):
    """The client is busy while the engine sends its reason and goes. It waits for messages, or comes to read later."""
    address = str(tmp_path / "engine.sock")
    seen: list[str] = []

    async def read(attachment: Attachment) -> None:
        while True:
            message = await attachment.receive()
            assert isinstance(message, messages.Failure)
            seen.append(message.reason)

    with contextlib.closing(Door(address)) as door:
        opening = asyncio.create_task(Attachment.open(address))
        while not (greeting := [*door.waiting()]):
            await asyncio.sleep(0.01)
        key = greeting[0][0]
        door.send(key, messages.encode(messages.Attached(EngineConfig(), engine_info(), wire=WIRE)))
        attachment, _ = await opening
        attachment.join(seen.append)
        if reads == "before":
            reading = asyncio.create_task(read(attachment))
            await asyncio.sleep(0)
        for number in range(3):
            door.send(key, messages.encode(messages.Failure(f"reason {number}")))
    if reads == "before":
        time.sleep(0.2)  # The loss and the messages are seen at the same time.
    else:
        await asyncio.sleep(0.2)  # The loss is seen, and no message is read.
        reading = asyncio.create_task(read(attachment))
    while not any("lost" in each for each in seen):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    reading.cancel()
    await attachment.close()
    assert seen == ["reason 0", "reason 1", "reason 2", f"the engine at {address}: the connection to it was lost"]


async def test_a_killed_engine_is_noticed_at_once(small, tmp_path):
    address = str(tmp_path / "engine.sock")
    engine = await EngineClient.start(small(), listen=address)
    client = await attach(address)
    engine.kill()
    await asyncio.wait_for(client.dead.wait(), 60)
    assert client.reason == f"the engine at {address}: the connection to it was lost"
    await client.close()
    await engine.close()
    again = await EngineClient.start(small(), listen=address)  # In place of the socket that was left.
    await again.close()


async def test_over_tcp_only_those_with_the_key_attach(small, tmp_path):
    new_key(str(tmp_path / "key"))
    new_key(str(tmp_path / "other"))
    key, other = read_key(str(tmp_path / "key")), read_key(str(tmp_path / "other"))
    address = f"127.0.0.1:{free_port()}"
    engine = await EngineClient.start(small(), listen=address, listen_key=key)
    try:
        client = await attach(address, key)
        assert len((await answer(client))[0]) == 8
        await client.close()
        with pytest.raises(NoEngine, match="no engine answers"):
            await Attachment.open(address, other)
    finally:
        await engine.close()


async def test_without_an_engine_the_error_says_how_to_start_one(tmp_path):
    with pytest.raises(NoEngine, match=r"holdfast engine --listen .*nobody\.sock"):
        await Attachment.open(str(tmp_path / "nobody.sock"))


async def test_an_address_in_use_fails_the_start(small, tmp_path):
    address = str(tmp_path / "engine.sock")
    (tmp_path / "engine.sock").write_text("a file")
    with pytest.raises(EngineStartError, match="it is a file; choose another --listen"):
        await EngineClient.start(small(), listen=address)
    assert (tmp_path / "engine.sock").read_text() == "a file"
