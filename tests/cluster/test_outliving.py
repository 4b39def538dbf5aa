"""The end of a server leaves engines to their spawner; a drained replica, or an ended engine, is stopped."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from fake_engine import engine_info

from holdfast.cluster import fleet
from holdfast.cluster.attach_spawner import AttachSpawner
from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.local_spawner import LocalSpawner
from holdfast.cluster.replicas import Replicas
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from tests.cluster.test_replicas import FOUR, Scripted, Scripts, until
from tests.lab.simulator.simulation import PROFILE


class Noted(Scripts):
    """Scripted engines whose spawner notes which of them are stopped and left."""

    def __init__(self, refused: int | None = None) -> None:
        """The engine of the number `refused` cannot start."""
        super().__init__(self.refuse)
        self.refused = refused
        self.stopped: list[int] = []
        self.left: list[int] = []
        self.running: list[int] = []
        """Numbers of the engines of an earlier server."""

    def refuse(self, engine: Scripted) -> None:
        if engine.number == self.refused:
            raise EngineStartError("no room")

    async def first(self, count: int, most: int) -> Sequence[int]:
        return [*range(count), *(number for number in self.running if count <= number < most)]

    async def stop(self, number: int, engine: EngineClient) -> None:
        self.stopped.append(number)
        await engine.close()

    async def leave(self, number: int, engine: EngineClient) -> None:
        self.left.append(number)


async def test_engines_are_left_when_the_server_ends_and_stopped_when_they_are_drained() -> None:
    noted = Noted()
    replicas = await Replicas.start(ClusterConfig(replicas=3, routing="least-loaded"), noted)
    replicas.fleet.drain("1")
    await until(lambda: len(replicas.members) == 2)
    assert (noted.stopped, noted.left) == ([1], [])
    noted.engines[2].die()
    await until(lambda: len(noted.engines) == 4)
    assert (noted.stopped, noted.left) == ([1, 2], [])
    await replicas.close()
    assert (noted.stopped, sorted(noted.left)) == ([1, 2], [0, 2])


async def test_a_start_that_fails_leaves_the_engines_that_were_ready() -> None:
    noted = Noted(refused=2)
    with pytest.raises(EngineStartError, match="no room"):
        await Replicas.start(ClusterConfig(replicas=3, routing="least-loaded"), noted)
    assert (noted.stopped, noted.left) == ([], [0, 1])


async def test_a_server_begins_with_the_engines_that_an_earlier_one_had_added() -> None:
    noted = Noted()
    noted.running = [0, 3, 5]
    config = ClusterConfig(replicas=2, max_replicas=5, routing="least-loaded", scale_down_seconds=3600)
    replicas = await Replicas.start(config, noted)
    assert [each.name for each in replicas.members] == ["0", "1", "3"], "5 is beyond the maximum"
    assert {each.name: each.engine.number for each in replicas.members} == {"0": 0, "1": 1, "3": 3}  # type: ignore[union-attr]
    assert replicas.fleet.add().name == "2"
    await until(lambda: len(replicas.serving) == 4)
    await replicas.close()
    assert sorted(noted.left) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("spawner", "lasting"),
    [
        (AttachSpawner, True),
        (LocalSpawner, False),
        ("ray_kept.KeptRaySpawner", True),
        ("ray_spawner.RaySpawner", False),
    ],
)
def test_engines_that_are_attached_to_or_kept_outlive_their_server(spawner: Any, lasting: bool) -> None:
    if isinstance(spawner, str):
        pytest.importorskip("ray")
        module, _, name = spawner.partition(".")
        spawner = getattr(importlib.import_module(f"holdfast.cluster.{module}"), name)
    assert spawner.lasting is lasting


async def test_engines_that_outlive_their_server_hold_its_requests_for_others() -> None:
    for lasting in (True, False):
        scripts = Scripts(lasting=lasting)
        replicas = await Replicas.start(ClusterConfig(replicas=2, routing="least-loaded"), scripts)
        assert replicas.adopts is lasting
        await replicas.close()


async def test_a_start_does_not_wait_for_an_engine_without_room_if_others_outlived_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "OTHERS_SECONDS", 0.01)
    there = asyncio.Event()

    class Short(Scripts):
        """Its second engine has no room at first."""

        async def start(self, number: int, on_progress: Callable[[str], None]) -> EngineClient:
            if number == 1:
                await there.wait()
            return await super().start(number, on_progress)

    replicas = await Replicas.start(ClusterConfig(replicas=2, routing="least-loaded"), Short(lasting=True))
    assert [each.name for each in replicas.serving] == ["0"]
    there.set()
    await until(lambda: len(replicas.serving) == 2)
    await replicas.close()


@pytest.mark.parametrize("asked", [True, False])
async def test_a_new_router_asks_the_engines_that_earlier_servers_have_used(asked: bool, tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")

    def prepare(engine: Scripted) -> None:
        profile = str(tmp_path / "profile.json")
        engine.info = engine_info(vocab_size=1 << 20, max_model_len=4096, num_blocks=400, profile_path=profile)
        engine.on_disk = 2000 if engine.number == 1 else 0

    scripts = Scripts(prepare, lasting=asked)
    replicas = await Replicas.start(ClusterConfig(replicas=2), scripts)
    async with aclosing(replicas.stream(list(range(2000)), FOUR, conversation="old")) as deltas:
        assert [delta async for delta in deltas]
    assert [engine.searches for engine in scripts.engines] == [asked] * 2
    assert len(scripts.engines[1 if asked else 0].asked) == 1
    await replicas.close()
