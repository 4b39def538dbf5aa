"""Mover: its time limits, its measured pace, and that a failed move loses nothing."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.cluster import moving
from holdfast.cluster.moving import PATIENCE, PATIENCE_SECONDS, Mover
from holdfast.engine.client.client import EngineClient
from holdfast.engine.client.connection import EngineDead

BLOCK = 16
CHAIN = [bytes([number]) for number in range(64)]


class Peer:
    """An engine at the end of a move: it takes `seconds` for `came` tokens, or fails."""

    def __init__(self, came: int = 0, seconds: float = 0.0, address: str = "tcp://peer", dies: bool = False) -> None:
        self.chunk_address = address
        self.asked: list[tuple[int, Sequence[int], str]] = []
        self._came, self._seconds, self._dies = came, seconds, dies

    async def fetch(self, chain: Sequence[bytes], indices: Sequence[int], source: str) -> int:
        self.asked.append((len(chain), indices, source))
        await asyncio.sleep(self._seconds)
        if self._dies:
            raise EngineDead("it was killed")
        return self._came


def peer(**options: Any) -> EngineClient:
    return cast(EngineClient, Peer(**options))


def mover(ms_per_token: float) -> Mover:
    made = Mover(1.0, BLOCK)
    made.ms_per_token = ms_per_token
    return made


async def test_the_target_fetches_the_whole_chain_from_the_source() -> None:
    source, target = peer(address="tcp://source"), peer(came=512)
    assert await mover(0.01).move(CHAIN, source, target) == 512
    assert cast(Peer, target).asked == [(64, range(64), "tcp://source")]


@pytest.mark.parametrize("ends", ["source", "target"])
async def test_engines_without_an_address_move_nothing(ends: str) -> None:
    source, target = (peer(came=512, address="" if end == ends else "tcp://x") for end in ("source", "target"))
    assert await mover(0.01).move(CHAIN, source, target) == 0
    assert not cast(Peer, target).asked


async def test_a_move_is_given_up_after_a_multiple_of_its_expected_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    async def wait_for(work: Any, limit: float) -> Any:
        limits.append(limit)
        return await work

    monkeypatch.setattr(moving.asyncio, "wait_for", wait_for)
    await mover(0.5).move(CHAIN, peer(), peer())
    assert limits == [pytest.approx(PATIENCE_SECONDS + PATIENCE * 64 * BLOCK * 0.5e-3)]


async def test_a_move_that_takes_too_long_or_loses_its_engine_moves_nothing_and_is_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(moving, "PATIENCE_SECONDS", 0.0)
    made = mover(1e-6)
    assert await made.move(CHAIN, peer(), peer(came=512, seconds=60)) == 0
    assert await made.move(CHAIN, peer(), peer(came=512, dies=True)) == 0
    assert made.ms_per_token == 1e-6


async def test_the_pace_follows_the_times_of_moves_and_ignores_short_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "time", SimpleNamespace(monotonic=itertools.count(step=0.5).__next__))
    made = mover(10.0)
    await made.move(CHAIN, peer(), peer(came=moving.LEAST_TOKENS - 1))
    assert made.ms_per_token == 10.0
    await made.move(CHAIN, peer(), peer(came=moving.LEAST_TOKENS))
    measured = 500 / moving.LEAST_TOKENS
    assert made.ms_per_token == pytest.approx(10.0 + moving.WEIGHT * (measured - 10.0))
    for _ in range(50):
        await made.move(CHAIN, peer(), peer(came=moving.LEAST_TOKENS))
    assert made.ms_per_token == pytest.approx(measured)
