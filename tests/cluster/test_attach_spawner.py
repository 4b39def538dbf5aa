"""AttachSpawner: servers over engines that run already, and that outlive them."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from holdfast.cluster import attach_spawner
from holdfast.cluster.attach_spawner import AttachSpawner
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.core.types import SamplingParams
from holdfast.core.version import __version__
from holdfast.engine.client.attachment import Attachment, NoEngine
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from tests.engine.conftest import checkpoint, small  # noqa: F401  # fixtures

PROMPT = list(range(40, 104))


async def found(client: Replicas, count: int = 1) -> int:
    """Ask for tokens. Returns the number of prompt tokens found in the cache."""
    async for delta in client.stream(PROMPT, SamplingParams(max_tokens=count, ignore_eos=True)):
        usage = delta.usage
    assert usage is not None
    return usage.cached_tokens


async def test_a_server_after_another_finds_the_cache_and_follows_an_engine_that_is_started_again(small, tmp_path):  # noqa: F811
    address = str(tmp_path / "engine.sock")
    config = ClusterConfig(engines=(address,))
    engine = await EngineClient.start(small(), listen=address, priced=True)
    first = await Replicas.start(config, AttachSpawner(config.addresses))
    assert await found(first) == 0
    await first.close()
    assert not engine.dead.is_set()
    second = await Replicas.start(config, AttachSpawner(config.addresses))
    assert await found(second) == 48
    await engine.close()
    engine = await EngineClient.start(small(), listen=address, priced=True)
    assert await asyncio.wait_for(found(second), 200) == 0, "a new engine, which the server found by itself"
    await second.close()
    await engine.close()


async def test_a_drained_engine_is_left_and_the_next_one_at_its_address_is_found(small, tmp_path):  # noqa: F811
    addresses = [str(tmp_path / name) for name in ("a", "b")]
    config = ClusterConfig(engines=tuple(addresses))
    engines = [await EngineClient.start(small(), listen=address, priced=True) for address in addresses]
    server = await Replicas.start(config, AttachSpawner(config.addresses))
    running = asyncio.create_task(found(server, 400))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(engines[0].drain(200.0), 200)
    assert (await engines[0].health()).running == 0
    with pytest.raises(NoEngine, match="drains: it takes no new clients"):
        await Attachment.open(addresses[0])
    assert [replica.serves for replica in server.members] == [False, True]
    await found(server)
    await engines[0].close()
    engines[0] = await EngineClient.start(small(), listen=addresses[0], priced=True)
    while not server.members[0].serves:
        await asyncio.sleep(0.05)
    await running
    assert server.members[0].engine.version == __version__
    await server.close()
    for engine in engines:
        await engine.close()


async def test_a_server_with_a_key_for_other_hosts_also_attaches_to_an_engine_at_a_path(small, tmp_path):  # noqa: F811
    address = str(tmp_path / "engine.sock")
    engine = await EngineClient.start(small(), listen=address, priced=True)
    spawner = AttachSpawner([address], zmq.curve_keypair()[1].decode())
    client = await asyncio.wait_for(spawner.start(0, lambda stage: None), 200)
    assert client.adopts
    await client.close()
    await spawner.close()
    await engine.close()


async def test_engines_of_different_models_are_refused(small, tmp_path):  # noqa: F811
    addresses = [str(tmp_path / name) for name in ("a", "b")]
    starts = [(small(), addresses[0]), (small(max_model_len=2048), addresses[1])]
    engines = [await EngineClient.start(config, listen=address) for config, address in starts]
    with pytest.raises(EngineStartError, match=r"has max_model_len (2048|4096), and the first one has (2048|4096)"):
        await Replicas.start(ClusterConfig(engines=(",".join(addresses),)), AttachSpawner(addresses))
    for engine in engines:
        await engine.close()


async def test_an_engine_that_never_listens_fails_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr(attach_spawner, "FIRST_SECONDS", 0.3)
    spawner = AttachSpawner([str(tmp_path / "nobody")])
    with pytest.raises(EngineStartError, match="no engine answers at"):
        await spawner.start(0, lambda stage: None)
    await spawner.close()


def test_addresses_are_separated_by_commas_and_each_is_given_once():
    config = ClusterConfig(engines=("./a,./b", "./c"))
    assert config.addresses == ("./a", "./b", "./c") and config.most == config.count == 3 and config.many
    for given, reason in (
        ({"engines": ("./a", "./a")}, "each once"),
        ({"engines": ("host:80",)}, "--engine-key"),
        ({"engines": ("./a",), "max_replicas": 2}, "max_replicas is 2"),
        ({"engines": ("./a",), "replicas": 3}, "replicas is 3"),
    ):
        with pytest.raises(ValueError, match=reason):
            ClusterConfig(**given)


async def test_a_server_starts_with_the_engines_that_are_there_and_others_join_later(small, tmp_path):  # noqa: F811
    addresses = [str(tmp_path / name) for name in ("late", "there")]
    there = await EngineClient.start(small(), listen=addresses[1], priced=True)
    server = await asyncio.wait_for(
        Replicas.start(ClusterConfig(engines=tuple(addresses)), AttachSpawner(addresses)), 200
    )
    assert [replica.name for replica in server.serving] == ["1"] and await found(server) == 0
    late = await EngineClient.start(small(), listen=addresses[0], priced=True)
    while len(server.serving) < 2:
        await asyncio.sleep(0.05)
    await server.close()
    await there.close()
    await late.close()
