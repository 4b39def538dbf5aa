"""Random histories of hybrid models: every request gets the tokens it gets alone, and every state is exact.

The device knows which tokens each state has seen, and asserts that each segment begins with the state of exactly the
tokens before it. All else is as in test_histories.py, with which these share their settings.
"""

from collections import Counter
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.memory import hybrid_cache
from holdfast.lm.types import SchedulerStats
from tests.hybrid import HybridDevice, check_hybrid
from tests.lm.scheduler.test_histories import STEPS, History, check
from tests.long import then_long

POLICIES = ("request-level", "orca", "prefill-first", "chunked-only", "hybrid-only", "unified", "latency-target")
SPECULATING = ("speculating", "where it pays")


class HybridHistory(History):
    """A random run with recurrent states, and few or many slots for snapshots."""

    def __init__(self, seed, name="stall-free"):
        super().__init__(seed, name)
        self.steps_in_flight = self.random.choice((1, 2, 2, self.steps_in_flight))
        self.talkative = self.random.choice((0.8, 0.95))
        self.device = HybridDevice(
            self.blocks,
            self.block_size,
            self.max_sequences + self.snapshots,
            self.host_blocks,
            self.host_snapshots,
            self.random,
        )

    def more_settings(self):
        self.snapshots = self.random.choice((1, 3, 8, 30))
        self.host_snapshots = self.random.choice((0, 1, 5, 30))
        whole = not self.any_order and not getattr(self.policy_class(), "chunks", True)
        sizes = {"snapshots": self.snapshots, "host_snapshots": self.host_snapshots}
        if self.parts:
            sizes["places"] = self.random.choice((0, 1, 2, 5, 64))
        return {**sizes, "forks": not whole and self.random.random() < 0.7}

    def policy(self, name):
        self.chosen = super().policy(name)
        return self.chosen

    def policy_class(self):
        return type(self.chosen)

    def check_books(self):
        check_hybrid(self.scheduler)


def play(seed, name):
    history = HybridHistory(seed, name)
    while history.steps < STEPS:
        while history.random.random() < 0.4 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
    history.drain()
    return history


@cache
def seen_in(seed, name):
    """The events of a history in which every request got the tokens that it gets alone."""
    history = play(seed, name)
    check(history)
    stats = history.scheduler.stats()
    names = [name for name in SchedulerStats.__dataclass_fields__ if "snapshot" in name and "total" not in name]
    found = {"tails": history.device.tails, "replayed": history.device.replayed}
    return history.seen + Counter({name: getattr(stats, name) for name in names}, **found)


@pytest.mark.parametrize(
    ("name", "seed"),
    then_long(10, [("stall-free", seed) for seed in range(80)])
    + then_long(len(POLICIES), [(name, seed) for seed in range(8) for name in POLICIES])
    + then_long(4 * len(SPECULATING), [(name, seed) for seed in range(40) for name in SPECULATING]),
)
def test_every_segment_of_a_random_history_begins_with_the_state_of_the_tokens_before_it(name, seed):
    seen_in(seed, name)


@given(seed=st.integers(0, 1 << 32), name=st.sampled_from(("stall-free", "stall-free", *POLICIES, *SPECULATING)))
def test_states_are_exact_in_any_history(seed, name):
    check(play(seed, name))


@pytest.mark.parametrize("seed", then_long(4, range(12)))
def test_states_at_the_ends_of_long_prompts_are_exact(seed, monkeypatch):
    monkeypatch.setattr(hybrid_cache, "LONG", 6)
    history = play(1000 + seed, "stall-free")
    check(history)


@pytest.mark.long
def test_random_histories_exercise_snapshots_tails_forks_and_preemption():
    seen = Counter()
    for seed in range(30):
        seen += seen_in(seed, "stall-free")
    assert seen["snapshot_hits"] > 100
    assert seen["snapshot_tokens"] > 1000
    assert seen["snapshots_dropped"] > 100
    assert seen["tails"] > 25
    assert seen["preempted"] > 50
    assert seen["swapped in"] > 25
    assert seen["snapshots_swapped_in"] > 25


@pytest.mark.long
@pytest.mark.parametrize(("name", "often"), [("speculating", 75), ("where it pays", 18)])
def test_random_histories_exercise_states_that_move_on_after_drafts(name, often):
    seen = Counter()
    for seed in range(15):
        seen += seen_in(seed, name)
    assert seen["replayed"] > often
    assert seen["several"] > often / 2
    assert seen["preempted"] > 7
    assert seen["snapshot_hits"] > 18
    assert seen["snapshots_swapped_in"] > 3
