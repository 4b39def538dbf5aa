"""State brought back ahead of turns in simulations, whose costs are exact: whom it helps, and that it delays nobody."""

import random
from dataclasses import replace

import pytest

from holdfast.lab.workloads import Conversation, Turn
from holdfast.lm.parts.pauses.planner import ALONE_SECONDS
from holdfast.loop.contracts import Observer
from tests.lab.simulator.simulation import PROFILE, run
from tests.long import then_long

BLOCK = 16
COPY_SECONDS = 0.0001
"""Time to copy one block: always less than to compute it, so that what is learned of the link changes no choice."""
BOUND = 1.01 * ALONE_SECONDS
"""Longest time that copies for others take on the link before a request's own: more than that of one block."""
TIERED = replace(PROFILE, cache_tokens=64 * BLOCK, token_bytes=1 << 16, copy_rate=BLOCK * (1 << 16) / COPY_SECONDS)
SLOW = replace(TIERED, copy_rate=TIERED.copy_rate / 20)
CONFIG = {"host_cache_gb": 1.0, "max_sequences": 4}


def on_and_off(workload, profile=TIERED, **config):
    runs = [
        run(workload, config={**CONFIG, **config, "swap_in_ahead": ahead}, profile=profile) for ahead in (True, False)
    ]
    return runs


def test_a_turn_whose_pause_is_known_finds_its_state_on_the_device():
    agent = Conversation(0.0, (Turn(400, 8, pause="tool:x", expected_pause=20.0), Turn(20, 8, think=20.0)))
    others = [Conversation(1.0 + number, (Turn(300, 8, pause="person"),)) for number in range(6)]
    ahead, without = on_and_off([agent, *others], SLOW)
    assert ahead.stats.blocks_swapped_in_ahead == ahead.stats.blocks_ahead_used > 10
    first, second = (max(outcome.records, key=lambda record: record.arrival) for outcome in (ahead, without))
    assert first.token_times[0] - first.arrival < 0.8 * (second.token_times[0] - second.arrival)


def test_the_time_of_a_tool_is_learned_and_used_without_any_hint():
    pauses = [Turn(300, 8, pause="tool:x"), *[Turn(16, 8, think=10.0, pause="tool:x") for _ in range(12)]]
    others = [
        Conversation(3.0 + 10 * number + 2 * half, (Turn(500, 8, pause="person"),))
        for number in range(13)
        for half in (0, 1)
    ]
    ahead, _ = on_and_off([Conversation(0.0, tuple(pauses)), *others])
    stats = ahead.stats
    assert stats.blocks_swapped_in_ahead > 20 and stats.blocks_ahead_used > 0.5 * stats.blocks_swapped_in_ahead


class Planned(Observer):
    """Keeps the plans of a run."""

    def __init__(self):
        self.plans = []

    def planned(self, plan):
        self.plans.append(plan)


def test_state_comes_back_while_others_decode():
    agent = Conversation(0.0, (Turn(400, 8, pause="tool:x", expected_pause=20.0), Turn(20, 8, think=20.0)))
    others = [Conversation(1.0 + number, (Turn(200, 8, pause="person"),)) for number in range(6)]
    stream = Conversation(12.5, (Turn(32, 400, pause="person"),))
    seen = Planned()
    outcome = run([agent, *others, stream], config=CONFIG, profile=SLOW, watch=lambda *_: (seen,))
    beside = [plan for plan in seen.plans if plan.num_tokens == 1 and plan.copies.swap_in]
    assert len(beside) > 4 and all(plan.copies.awaits == -1 for plan in beside)
    assert outcome.stats.blocks_ahead_used > 4


def lying(seed):
    """Conversations of one turn whose clients promise another, which never comes, among requests without a pause."""
    choose = random.Random(seed)
    workload, at = [], 0.0
    for _ in range(choose.randint(10, 40)):
        at += choose.choice((0.0, 0.05, 0.5, 2.0, 5.0))
        lies = choose.random() < 0.5
        pause = {"pause": "tool:x", "expected_pause": choose.choice((0.1, 1.0, 5.0))} if lies else {}
        workload.append(Conversation(at, (Turn(choose.randint(20, 600), choose.randint(1, 40), **pause),)))
    honest = [Conversation(at + 1.0, (Turn(choose.randint(20, 600), 4), Turn(20, 4, think=30.0))) for _ in range(3)]
    return workload + honest


def check_nobody_is_delayed(workload, **config):
    """Each request is planned, and all of them end, as early as without wrong guesses, up to the copies of one step.

    Later tokens of an answer may come later: another request that starts earlier shares its steps.
    """
    ahead, without = on_and_off(workload, **config)
    for one, other in zip(ahead.records, without.records, strict=True):
        assert one.scheduled <= other.scheduled + BOUND
    assert ahead.seconds <= without.seconds + BOUND
    return ahead.stats.blocks_swapped_in_ahead


@pytest.mark.always("60.0-by-layer")
@pytest.mark.parametrize(
    ("target", "swap_in"),
    then_long(2, [(None, "complete"), (60.0, "by-layer"), (None, "by-layer"), (60.0, "complete")]),
)
def test_wrong_guesses_delay_no_request_beyond_the_copies_of_one_step(target, swap_in):
    brought = [check_nobody_is_delayed(lying(seed), tbt_target=target, swap_in=swap_in) for seed in range(20)]
    assert sum(brought) > 200
