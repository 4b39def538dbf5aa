"""Engines on one machine share its GPUs, cores and memory."""

from __future__ import annotations

import asyncio

import pytest

from holdfast.cluster import local_spawner
from holdfast.cluster.local_spawner import LocalSpawner, share, visible_gpus, with_own_files
from holdfast.engine.client.connection import EngineStartError
from holdfast.lm.config import EngineConfig


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_spawner, "visible_gpus", lambda: ["3", "4", "6", "7"])
    monkeypatch.setattr(local_spawner, "free_gb", lambda: 64.0)


@pytest.mark.usefixtures("gpus")
def test_each_engine_sees_its_own_gpus_and_no_others() -> None:
    spawner = LocalSpawner(EngineConfig(tp=2), 2)
    assert [spawner.environment(number)["CUDA_VISIBLE_DEVICES"] for number in (0, 1)] == ["3,4", "6,7"]
    assert spawner.place(1) == "GPU 6,7"
    assert spawner.config.host_cache_gb == 8.0, "half of what one engine would take"
    with pytest.raises(EngineStartError, match="3 replicas of 2 GPUs need 6, and there are 4"):
        LocalSpawner(EngineConfig(tp=2), 3)


@pytest.mark.usefixtures("gpus")
def test_engines_on_the_cpu_share_cores_and_memory_and_see_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_spawner, "cores", lambda: 8)
    spawner = LocalSpawner(EngineConfig(device="cpu"), 4)
    assert (spawner.environment(1), spawner.place(1)) == ({}, "CPU")
    assert (spawner.config.threads, spawner.config.cache_gb, spawner.config.host_cache_gb) == (2, 4.0, 1.0)
    monkeypatch.setattr(local_spawner, "free_gb", lambda: 8.0)
    shared = share(EngineConfig(threads=6), 4, on_gpus=False)
    assert (shared.threads, shared.cache_gb, shared.host_cache_gb) == (1, 1.0, 0.25)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("device", "at_once"), [("cpu", [0]), ("auto", [0, 1, 2])])
async def test_on_the_cpu_the_first_engine_measures_its_pace_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, at_once: list[int]
) -> None:
    measured, begun = asyncio.Event(), list[int]()

    class Engine:
        @staticmethod
        async def start(config: EngineConfig, *, process: int, priced: bool, **others: object) -> int:
            begun.append(process)
            if priced:
                await measured.wait()
            return process

    spawner = LocalSpawner(EngineConfig(device=device), 3)  # type: ignore[arg-type]
    numbers = iter(range(3))
    monkeypatch.setattr(local_spawner, "EngineClient", Engine)
    monkeypatch.setattr(local_spawner, "started_warm", lambda start: start)
    monkeypatch.setattr(local_spawner, "EngineProcess", lambda device, environment: next(numbers))
    starts = [asyncio.create_task(spawner.start(number, print)) for number in range(3)]
    await asyncio.sleep(0)
    assert begun == at_once
    measured.set()
    assert await asyncio.gather(*starts) == [0, 1, 2]  # type: ignore[comparison-overlap]


def test_configured_sizes_apply_to_each_engine() -> None:
    shared = share(EngineConfig(cache_gb=3.0, host_cache_gb=0.0), 4, on_gpus=False)
    assert (shared.cache_gb, shared.host_cache_gb) == (3.0, 0.0)


def test_a_pytorch_without_cuda_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(local_spawner.importlib.util, "find_spec", lambda name: None)
    assert visible_gpus() == []


def test_each_replica_writes_files_of_its_own() -> None:
    config = EngineConfig(trace="steps.jsonl", disk_cache_dir="/kv", host_cache_gb=1.0)
    own = [with_own_files(config, number) for number in range(2)]
    assert [each.trace for each in own] == ["steps.jsonl", "steps.jsonl.1"]
    assert [each.disk_cache_dir for each in own] == ["/kv/0", "/kv/1"]
    assert with_own_files(EngineConfig(), 1) == EngineConfig()
