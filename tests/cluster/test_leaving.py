"""The end of a server leaves engines to their spawner; a drained replica, or an ended engine, is stopped."""

from __future__ import annotations

import pytest

from holdfast.cluster.config import ClusterConfig
from holdfast.cluster.replicas import Replicas
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineStartError
from tests.cluster.test_replicas import Scripted, Scripts, until


class Noted(Scripts):
    """Scripted engines whose spawner notes which of them are stopped and left."""

    def __init__(self, refused: int | None = None) -> None:
        """The engine of the number `refused` cannot start."""
        super().__init__(self.refuse)
        self.refused = refused
        self.stopped: list[int] = []
        self.left: list[int] = []

    def refuse(self, engine: Scripted) -> None:
        if engine.number == self.refused:
            raise EngineStartError("no room")

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
