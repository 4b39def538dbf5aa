"""Engines of hybrid models over a Redis service: states there are found after a restart, and by another engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis

from holdfast.engine.process.build import Engine, build_engine
from holdfast.engine.process.parts.tiers import TierHandler
from holdfast.lm.config import EngineConfig
from tests.checkpoints import make
from tests.engine.process.parts.test_states import SIZES, conversation, drawn, generated, turn
from tests.engine.ranks.test_hybrids import PAIRS

fakeredis = pytest.importorskip("fakeredis")


@pytest.fixture(scope="module", params=["Qwen3_5Text", "NemotronH", "Lfm2"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.set_num_threads(1)
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return make(directory, request.param), directory


@pytest.fixture
def service() -> Iterator[str]:
    """The URL of an empty Redis service."""
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"redis://127.0.0.1:{server.server_address[1]}/0"
    server.shutdown()
    server.server_close()


def start(directory: Path, service: str, **changes: Any) -> Engine:
    """An engine with a remote tier. With `lru` nothing is priced: a tiny model computes faster than Redis answers."""
    options = {"host_cache_gb": 0.004, "remote_cache": service, "eviction": "lru", **changes}
    return build_engine(EngineConfig(model=str(directory), **SIZES, **options))


def states_of(service: str) -> list[bytes]:
    """The names of the lists of states in a service."""
    with Redis.from_url(service) as client:
        return [name for name in client.scan_iter() if b"after:" in name]


@pytest.mark.always("Qwen3_5Text")
def test_another_engine_goes_on_from_what_one_has_put_into_redis(served: tuple[Any, Path], service: str) -> None:
    one = start(served[1], service)
    prompt = conversation(one, turns=2)
    other = start(served[1], service)
    assert turn(other, "next", prompt) == (generated(served[0], prompt, 9), len(prompt) - 7 - 1)
    stats = other.loop.stats()
    assert stats.prefix_hits_on_remote == len(prompt) - 8 and stats.blocks_corrupt == stats.tier_failures == 0
    one.close()
    other.close()


@pytest.mark.always("Qwen3_5Text")
def test_a_restarted_engine_finds_its_states_in_redis(served: tuple[Any, Path], service: str) -> None:
    engine = start(served[1], service)
    prompt = conversation(engine, turns=1)
    engine.close()
    for number in range(2):
        engine = start(served[1], service)
        said, cached = turn(engine, "next", prompt)
        assert (said, cached) == (generated(served[0], prompt, 9), len(prompt) - 8)
        prompt += said + drawn(7, seed=number + 30)
        engine.close()


@pytest.mark.always("Qwen3_5Text")
def test_a_state_that_redis_has_evicted_is_computed(served: tuple[Any, Path], service: str) -> None:
    engine = start(served[1], service)
    prompt = conversation(engine, turns=1)
    engine.close()
    with Redis.from_url(service) as client:
        largest = max((name for name in client.scan_iter() if client.type(name) == b"string"), key=client.strlen)
        client.delete(largest)
    engine = start(served[1], service)
    assert turn(engine, "next", prompt) == (generated(served[0], prompt, 9), 0)
    assert not engine.loop.stats().blocks_corrupt
    engine.close()


@pytest.mark.always("Qwen3_5Text")
def test_a_flipped_bit_in_redis_costs_computing_and_no_wrong_token(served: tuple[Any, Path], service: str) -> None:
    engine = start(served[1], service)
    prompt = conversation(engine, turns=1)
    engine.close()
    with Redis.from_url(service) as client:
        largest = max((name for name in client.scan_iter() if client.type(name) == b"string"), key=client.strlen)
        value = bytearray(client.get(largest))
        value[-100] ^= 1
        client.set(largest, bytes(value))
    engine = start(served[1], service)
    assert turn(engine, "next", prompt) == (generated(served[0], prompt, 9), 0)
    assert engine.loop.stats().blocks_corrupt == 1
    engine.close()


@pytest.mark.always("Qwen3_5Text")
def test_a_service_that_is_gone_costs_nothing_but_computing(served: tuple[Any, Path]) -> None:
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    service = f"redis://127.0.0.1:{server.server_address[1]}/0"
    engine = start(served[1], service)
    prompt = conversation(engine, turns=1)
    server.shutdown()
    server.server_close()
    other = drawn(60, seed=9)
    assert turn(engine, "other", other) == (generated(served[0], other, 9), 0)
    assert turn(engine, "next", prompt) == (generated(served[0], prompt, 9), len(prompt) - 8)
    assert engine.loop.stats().remote_down == 1
    engine.close()


@pytest.mark.always("Qwen3_5Text")
def test_a_disk_and_redis_have_the_states_and_the_disk_gives_them(
    served: tuple[Any, Path], service: str, tmp_path: Path
) -> None:
    disk = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_gb": 0.02}
    engine = start(served[1], service, **disk)
    prompt = conversation(engine, turns=1)
    engine.close()
    assert states_of(service)
    engine = start(served[1], service, **disk)
    assert turn(engine, "next", prompt) == (generated(served[0], prompt, 9), len(prompt) - 8)
    stats = engine.loop.stats()
    assert stats.prefix_hits_on_disk == len(prompt) - 8 and stats.disk_snapshots_kept > 0
    engine.close()


@pytest.mark.each_value
@pytest.mark.parametrize("layout", [dict(tp=2), dict(pp=2)], ids=str)
@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_ranks_keep_their_parts_of_a_state_below_the_host(
    tmp_path: Path, service: str, layout: dict[str, int], tier: str
) -> None:
    torch.set_num_threads(1)
    module = make(tmp_path / "model", "Qwen3_5Text", **PAIRS)
    disk = {"disk_cache_dir": str(tmp_path / "disk"), "disk_cache_gb": 0.02, "remote_cache": None}
    options = {**layout, **(disk if tier == "disk" else {})}
    engine = start(tmp_path / "model", service, **options)
    prompt = conversation(engine, turns=2)
    engine.close()
    engine = start(tmp_path / "model", service, **options)
    assert turn(engine, "next", prompt) == (generated(module, prompt, 9), len(prompt) - 8)
    assert getattr(engine.loop.stats(), f"prefix_hits_on_{tier}") == len(prompt) - 8
    assert engine.handler(TierHandler).busy is False
    engine.close()
