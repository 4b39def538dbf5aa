"""Contracts over several scripted engines: who is asked, what the client hears, and what an engine's end leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator
from math import inf
from typing import Any

import pytest

from holdfast.cluster import fleet
from holdfast.cluster.contracts import ContractCounts
from holdfast.cluster.replicas import ReplicaLost
from holdfast.core.contract import NO_CONTRACT, Contract, ContractRefused, Refusal
from holdfast.core.types import FinishReason, SequenceOutput
from holdfast.engine.client.connection import EngineDead, QueueFull
from holdfast.engine.client.stream import Adoption, Delta, Stream
from holdfast.lm.types import SchedulerStats
from tests.cluster.test_replicas import Scripted, Scripts, read, started, stats, until

__all__ = ["started"]

LOOSE = Contract(ttft=600.0, tbt=60.0, complete=3600.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart engines at once."""
    monkeypatch.setattr(fleet, "PAUSES", (0.0, 0.01))


class Promising(Scripted):
    """A scripted engine that refuses contracts as its test says, and gives tokens in real time."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.refusal: Refusal | None = None
        self.contracts: list[Contract] = []
        """Contract of each request that it was sent."""
        self.apart = 0.0
        """Seconds before each token after the first."""

    async def run(self, stream: Stream, adopted: Adoption | None = None) -> AsyncGenerator[Delta, None]:
        self.asked.append(stream)
        self.contracts.append(stream.request.contract)
        request = stream.request
        if request.contract and self.refusal is not None:
            stream.fail(ContractRefused(self.refusal))
            yield await stream.next()
        for place in range(request.answered, request.params.max_tokens):
            if place == self.dies_at:
                self.die()
                raise EngineDead(self.reason)
            await asyncio.sleep(self.apart if place else 0.0)
            last = FinishReason.LENGTH if place == request.params.max_tokens - 1 else None
            now = time.monotonic()
            stream.take(SequenceOutput(request.id, (1000 + place,), last, 0, now), now, now)
            yield await stream.next()

    async def health(self, timeout: float = 1.0) -> SchedulerStats:
        refused = sum(map(bool, self.contracts)) if self.refusal else 0
        return dataclasses.replace(stats(), contracts_refused=refused, contracts_accepted=5, contracts_kept=3)


class Promisers(Scripts):
    """A spawner of these engines."""

    async def start(self, number: int, on_progress: Any) -> Promising:
        engine = Promising(number)
        self.prepare(engine)
        self.engines.append(engine)
        return engine


def refusal(seconds: float, ttft: float | None = None) -> Refusal:
    return Refusal(f"busy for {seconds:g} s", seconds, Contract(ttft=ttft))


def refusing(engine: Promising) -> None:
    engine.refusal = refusal(2.0)


async def test_the_next_replica_is_asked_when_one_refuses(started: Any) -> None:
    scripts = Promisers()
    replicas = await started(scripts, 3)
    scripts.engines[0].refusal = scripts.engines[1].refusal = refusal(2.0)
    assert await read(replicas, contract=LOOSE) == [1000, 1001, 1002, 1003]
    assert [len(engine.asked) for engine in scripts.engines] == [1, 1, 1]
    assert scripts.engines[2].contracts == [LOOSE]
    found = await replicas.health()
    assert (found.contracts_refused, found.contracts_accepted, found.contracts_kept) == (0, 15, 9)


@pytest.mark.parametrize("seconds", [(4.0, 1.5, 3.0), (inf, 1.5, inf)])
async def test_a_contract_that_all_refuse_is_refused_with_the_least_time_to_come_again(
    started: Any, seconds: tuple[float, ...]
) -> None:
    scripts = Promisers()
    replicas = await started(scripts, 3)
    for engine, wait in zip(scripts.engines, seconds, strict=True):
        engine.refusal = refusal(wait, ttft=wait if wait < inf else None)
    with pytest.raises(ContractRefused, match=r"busy for 1\.5 s") as refused:
        await read(replicas, contract=LOOSE)
    assert refused.value.refusal == refusal(1.5, ttft=1.5)
    assert [len(engine.asked) for engine in scripts.engines] == [1, 1, 1]
    assert (await replicas.health()).contracts_refused == 1
    assert await read(replicas) == [1000, 1001, 1002, 1003]


async def test_a_full_replica_is_not_waited_for_when_another_refuses(started: Any) -> None:
    scripts = Promisers()
    replicas = await started(scripts)
    scripts.engines[0].refusal = refusal(2.0)
    scripts.engines[1].is_full = True
    with pytest.raises(ContractRefused, match="busy for 2 s"):
        await read(replicas, contract=LOOSE)
    scripts.engines[0].is_full = True
    with pytest.raises(QueueFull):
        await read(replicas, contract=LOOSE)


async def test_the_contract_of_an_ended_engine_moves_with_the_times_that_are_left(started: Any) -> None:
    scripts = Promisers()
    replicas = await started(scripts)
    scripts.engines[0].dies_at = 2
    assert await read(replicas, contract=LOOSE) == [1000, 1001, 1002, 1003]
    (moved,) = scripts.engines[1].contracts
    request = scripts.engines[1].asked[0].request
    assert (moved.tbt, moved.complete) == (60.0, 3600.0)
    assert 60.0 <= moved.ttft <= 60.0 + time.monotonic() - request.arrival
    assert replicas.contracts == ContractCounts()  # the second engine counts it


async def test_a_contract_without_a_token_yet_moves_whole(started: Any) -> None:
    scripts = Promisers()
    replicas = await started(scripts)
    scripts.engines[0].dies_at = 0
    await read(replicas, contract=LOOSE)
    assert scripts.engines[1].contracts == [LOOSE]


async def test_an_answer_goes_on_without_its_contract_if_no_other_engine_accepts_it(started: Any) -> None:
    scripts = Promisers()
    replicas = await started(scripts)
    scripts.engines[0].dies_at = 2
    scripts.engines[1].refusal = refusal(2.0)
    scripts.prepare = refusing
    assert await read(replicas, contract=LOOSE) == [1000, 1001, 1002, 1003]
    asked = [contract for engine in scripts.engines[1:] for contract in engine.contracts]
    assert asked[-1] == NO_CONTRACT and all(each.tbt == 60.0 for each in asked[:-1]) and len(asked) > 1
    assert (replicas.contracts.kept, replicas.contracts.refused) == (1, 0)
    assert not any(replicas.contracts.broken.values())


async def test_a_contract_that_the_end_of_an_engine_breaks_is_counted(started: Any) -> None:
    def slow(engine: Promising) -> None:
        engine.apart = 0.03

    scripts = Promisers(slow)
    replicas = await started(scripts)
    scripts.engines[0].dies_at = 2
    scripts.engines[1].refusal = refusal(2.0)
    tight = Contract(ttft=600.0, tbt=0.02)
    assert await read(replicas, contract=tight) == [1000, 1001, 1002, 1003]
    assert replicas.contracts.broken == {"ttft": 0, "tbt": 1, "complete": 0}
    assert (await replicas.health()).contracts_broken_tbt == 1


async def test_a_late_token_leaves_nothing_to_promise_elsewhere(started: Any) -> None:
    scripts = Promisers()
    replicas = await started(scripts)
    scripts.engines[0].dies_at = 0
    late = time.monotonic() - 5.0
    assert await read(replicas, contract=Contract(ttft=1.0), arrival=late) == [1000, 1001, 1002, 1003]
    assert scripts.engines[1].contracts == [NO_CONTRACT]
    assert replicas.contracts.broken["ttft"] == 1


async def test_a_request_that_is_given_up_breaks_its_contract(started: Any) -> None:
    def dying(engine: Promising) -> None:
        engine.dies_at = 1

    scripts = Promisers(dying)
    replicas = await started(scripts, 3)
    with pytest.raises(ReplicaLost):
        await read(replicas, contract=Contract(ttft=600.0, complete=3600.0))
    assert replicas.contracts.broken == {"ttft": 0, "tbt": 0, "complete": 1}
    await until(lambda: len(scripts.engines) > 3)
