"""A server with a hundred replicas: all of them serve, and choosing one of them stays cheap."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

from holdfast.cluster.config import MOST_REPLICAS, ClusterConfig
from holdfast.cluster.priced import PricedRouter, Pricing, RoutingRules
from holdfast.cluster.replicas import Replicas
from holdfast.cluster.turns import ReplicaView, Turn
from holdfast.core.cost import CostModel
from tests.cluster.test_replicas import Scripted, Scripts, read, until
from tests.lab.simulator.simulation import COST

HUNDRED = 100


class Counting:
    """A cost model that counts how often it is asked for the duration of linear layers."""

    def __init__(self, cost: CostModel) -> None:
        self.cost, self.asked = cost, 0

    def linear(self, tokens: int) -> float:
        self.asked += 1
        return self.cost.linear(tokens)

    def __getattr__(self, name: str) -> object:
        return getattr(self.cost, name)


async def test_requests_reach_all_of_a_hundred_replicas_and_survive_the_end_of_half_of_them() -> None:
    scripts = Scripts()
    replicas = await Replicas.start(ClusterConfig(replicas=HUNDRED, routing="least-loaded"), scripts)
    gate = asyncio.Event()

    def hold(engine: Scripted) -> None:
        engine.gate = gate

    for engine in scripts.engines:
        hold(engine)
    answers = [asyncio.create_task(read(replicas)) for _ in range(2 * HUNDRED)]
    await until(lambda: sum(len(engine.asked) for engine in scripts.engines) == 2 * HUNDRED)
    assert Counter(len(engine.asked) for engine in scripts.engines) == {2: HUNDRED}, "each has its share"
    for engine in scripts.engines[: HUNDRED // 2]:
        engine.reason = "it was killed"
        engine.dead.set()
    gate.set()
    texts = await asyncio.wait_for(asyncio.gather(*answers), 60)
    assert {len(text) for text in texts} == {4}
    assert replicas.counts.lost == 0 and replicas.counts.resumed == HUNDRED
    await replicas.close()


def test_choosing_among_a_hundred_replicas_prices_a_prompt_that_none_has_once() -> None:
    counting = Counting(COST)
    router = PricedRouter(counting, RoutingRules(step_tokens=1024))  # type: ignore[arg-type]
    before = counting.asked
    chain = [bytes([block]) * 32 for block in range(32)]
    turn = Turn("conversation", chain, 32 * 16 + 1, 20)
    router.choose(turn, [ReplicaView(str(number)) for number in range(HUNDRED)], 0.0)
    assert counting.asked - before == 1


def test_remembered_durations_are_those_of_the_same_range_and_cost_model() -> None:
    twice = replace(COST, linear_seconds=tuple(2 * seconds for seconds in COST.linear_seconds))
    pricing, slower = Pricing(COST, 1024), Pricing(twice, 1024)
    for start, stop in ((0, 100), (0, 100), (50, 100), (0, 3000)):
        assert pricing.prefill(start, stop) < slower.prefill(start, stop)
        assert pricing.prefill(start, stop) == Pricing(COST, 1024).prefill(start, stop)
    assert pricing.prefill(50, 100) < pricing.prefill(0, 100)


def test_a_server_has_at_most_256_replicas() -> None:
    assert ClusterConfig(replicas=MOST_REPLICAS).count == 256
    with pytest.raises(ValueError, match="replicas is 257; it must lie between 1 and 256"):
        ClusterConfig(replicas=257)
