"""Long random histories with notes of pauses, right and wrong: every request gets the tokens that it gets alone.

The device checks that nothing is read or written before its copy has come, and the history that no block is lost. State
comes back ahead of turns that come, of turns that never come, and while others take its blocks.
"""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.pause import Pause
from holdfast.lm.parts.pauses.planner import PausePart
from tests.lm.scheduler.test_histories import STEPS, History, check


class Paused(History):
    """A history in which clients say what follows their answers, and announce turns."""

    def policy(self, name):
        """Called before memory is made: most histories have a host tier that holds several conversations."""
        if self.growth.random() < 0.8:
            self.host_blocks = self.host_ready = 6 * self.blocks
        return super().policy(name)

    def more_settings(self):
        return {"pauses": True}

    def chat(self):
        """Note a pause, or announce a turn."""
        part, choose, now = self.scheduler.part(PausePart), self.random, float(self.steps)
        if not self.requests:
            return
        name = choose.choice(list(self.requests)[-12:])
        if choose.random() < 0.3:
            earlier = self.requests[name]
            tokens = earlier.prompt + tuple(self.outputs.get(name, ()))
            pool = self.scheduler.pool
            part.warm(pool.digest_cache.digests(earlier.identity.root(), tokens[: len(tokens) // pool.block_size]), now)
        else:
            expected = choose.choice((None, 0.0, 1.0, 3.0, 20.0))
            part.note(name, Pause("tool:x", expected=expected, superseded=choose.random() < 0.2), now)

    def step(self):
        if self.random.random() < 0.5:
            self.chat()
        super().step()
        ahead = self.scheduler.pool.ahead
        assert ahead.swapped_in == ahead.used + ahead.wasted + len(ahead)


def play(seed, name="stall-free", stages=1):
    history = Paused(seed, name, None, stages)
    while history.steps < STEPS:
        while history.random.random() < 0.2 and history.scheduler.stats().waiting < 12:
            history.add()
        if history.random.random() < 0.04:
            history.abort()
        history.step()
        if not history.plans and not history.scheduler.has_work():
            history.steps += 1  # time goes on in an idle engine
    history.drain()
    check(history)
    stats = history.scheduler.stats()
    return Counter(
        brought=stats.blocks_swapped_in_ahead, used=stats.blocks_ahead_used, wasted=stats.blocks_ahead_wasted
    )


@pytest.mark.parametrize("name", ["stall-free", "latency-target", "orca", "speculating"])
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("seed", range(12))
def test_every_request_gets_the_tokens_it_gets_alone(seed, stages, name):
    play(seed, name, stages)


@given(seed=st.integers(0, 1 << 32), stages=st.integers(1, 3))
def test_every_request_gets_the_tokens_it_gets_alone_whatever_is_noted(seed, stages):
    play(seed, stages=stages)


@pytest.mark.long
def test_blocks_come_back_ahead_and_are_used_or_wasted():
    seen = sum((play(seed) for seed in range(80)), Counter())
    assert min(seen["brought"], seen["used"], seen["wasted"]) > 10, seen
