"""Long random histories in a world whose costs are exact: no accepted contract is ever broken by a later arrival.

The reserve is off, so that a forecast that errs by the smallest step is seen. Requests with and without contracts come
at random, at times many at once, with shared prefixes, in small memories, under every order.
"""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.contract import NO_CONTRACT, Contract
from holdfast.lm.parts.contracts import promises
from tests.invariants import check_scheduler
from tests.lm.parts.contracts.world import EXACT, World
from tests.long import then_long

STEP = EXACT.step([(1, 500)])
"""Seconds of a step with one decode."""
HISTORIES = 40
"""Histories of 60 requests, of which half run always; more than 800 were run once."""


@pytest.fixture(autouse=True)
def no_reserve(monkeypatch):
    monkeypatch.setattr(promises, "RESERVE", 0.0)


def some_contract(choose):
    """A contract of any terms, from ones that no engine could keep to loose ones."""
    times = choose.uniform(2, 100), choose.uniform(1.2, 8), choose.uniform(20, 400)
    return Contract(*(time * STEP if choose.random() < 0.7 else None for time in times))


def history(seed, requests=60, share=0.65, **kind):
    """A world in which `requests` have come and ended, a `share` of them with contracts. `kind` is of its engine."""
    choose = random.Random(seed)
    world = World(
        blocks=choose.choice((130, 200, 400)),
        budget=choose.choice((64, 256, 512)),
        max_sequences=choose.choice((4, 16, 64)),
        steps_in_flight=choose.choice((1, 2)),
        order=choose.choice(("fcfs", "priority", "fair", "deadline")),
        prefix_sharing=choose.random() < 0.5,
        **({"tbt_target": 40} if choose.random() < 0.3 else {}),
        **kind,
    )
    shared = [tuple(choose.randrange(900) for _ in range(900)) for _ in range(3)]
    gap, at, arrivals = choose.choice((0.5, 2, 5, 20)) * STEP, 0.0, []
    for number in range(requests):
        at += choose.expovariate(1 / gap) + (choose.uniform(0, 500) * STEP if choose.random() < 0.05 else 0.0)
        prompt, tokens = int(2 ** choose.uniform(0, 10)), int(2 ** choose.uniform(0, 7))
        given = {
            "prompt": choose.choice(shared)[: prompt + 1] if choose.random() < 0.4 else prompt,
            "tokens": tokens,
            "contract": some_contract(choose) if choose.random() < share else NO_CONTRACT,
            "priority": choose.choice((0, 0, 5, 100)),
        }
        arrivals.append((at, lambda world, at, name=str(number), given=given: world.add(name, **given, at=at)))
    return world.run(arrivals)


@given(st.integers(0, 1 << 32))
def test_no_later_arrival_breaks_an_accepted_contract(seed):
    world = history(seed, requests=30)
    assert world.broken == {}
    assert world.reasons.keys() == world.contracts.keys()
    check_scheduler(world.scheduler)
    assert world.scheduler.stats().blocks_used == 0


KINDS = {
    "recurrent layers": {"snapshots": 12},
    "few states": {"snapshots": 2},
    "two stages": {"stages": 2},
    "four stages": {"stages": 4},
    "stages and states": {"stages": 2, "snapshots": 6},
    "a host tier": {"host_blocks": 200, "copy_seconds": STEP / 40},
    "a slow host tier": {"host_blocks": 200, "copy_seconds": STEP / 4},
}


@pytest.mark.always(
    "recurrent layers-from 0", "few states-from 0", "two stages-from 0", "a host tier-from 0", "a slow host tier-from 0"
)
@pytest.mark.parametrize("seeds", then_long(1, [range(6), range(6, 12)]), ids=lambda seeds: f"from {seeds.start}")
@pytest.mark.parametrize("kind", KINDS)
def test_other_memories_and_pipelines_break_no_accepted_contract(kind, seeds):
    accepted = 0
    for seed in seeds:
        world = history(seed, **KINDS[kind])
        assert world.broken == {}, seed
        assert world.reasons.keys() == world.contracts.keys()
        check_scheduler(world.scheduler)
        accepted += sum(map(bool, world.contracts.values()))
    assert accepted > 100


@pytest.mark.parametrize(
    "seeds",
    then_long(1, [range(HISTORIES // 2), range(HISTORIES // 2, HISTORIES)]),
    ids=lambda seeds: f"from {seeds.start}",
)
def test_histories_accept_refuse_and_preempt(seeds):
    seen = Counter()
    for seed in seeds:
        world = history(seed)
        stats = world.scheduler.stats()
        assert world.broken == {}, seed
        accepted = sum(map(bool, world.contracts.values()))
        assert (stats.contracts_accepted, stats.contracts_refused) == (accepted, len(world.refusals))
        assert stats.contracts_kept == accepted
        seen.update(accepted=accepted, preempted=stats.preemptions, plain=len(world.contracts) - accepted)
        seen.update(refusal.reason for refusal in world.refusals.values())
    assert seen["accepted"] > 500 and seen["preempted"] > 15 and seen["plain"] > 250
    assert len([reason for reason in seen if reason.startswith("the contract")]) >= 5


@pytest.mark.parametrize("seeds", then_long(1, [range(8), range(8, 40)]), ids=lambda seeds: f"from {seeds.start}")
def test_contracts_that_are_only_just_possible_are_kept(seeds):
    for seed in seeds:
        choose = random.Random(seed)
        world = World(max_sequences=32, blocks=800)
        for number in range(40):
            prompt, tokens = choose.randrange(1, 600), choose.randrange(1, 60)
            world.add(f"plain {number}", choose.randrange(1, 600), choose.randrange(1, 60))  # to fill steps with
            ttft, steps = STEP / 1000, choose.randrange(4)
            for attempt in range(3):  # more than any engine can, then what an idle one can, then what this one can
                name = f"{number}.{attempt}"
                if world.add(name, prompt, tokens, Contract(ttft=ttft)):
                    break
                ttft = world.refusals[name].predicted.ttft * (1 + 1e-9)
            for _ in range(steps):
                world.step()
        world.run()
        assert world.broken == {}, seed
        assert sum(map(bool, world.contracts.values())) > 10


def test_paces_are_kept_while_many_decodes_grow():
    refused = 0
    for seed in range(3):
        choose = random.Random(seed)
        world = World(max_sequences=64, blocks=8000, budget=512)
        pace = choose.uniform(1.35, 1.8) * STEP
        for number in range(64):
            world.add(str(number), choose.randrange(1, 60), choose.randrange(1200, 1900), Contract(tbt=pace))
            for _ in range(choose.randrange(3)):
                world.step()
        world.run()
        assert world.broken == {}, seed
        refused += sum("too slow beside it" in refusal.reason for refusal in world.refusals.values())
    assert refused > 50
