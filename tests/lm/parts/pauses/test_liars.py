"""Hundreds of clients who lie about their pauses: they cost no other key more than its equal share of the tiers."""

import random
from dataclasses import replace

import pytest

from holdfast.core.pause import MAX_PAUSE, Pause
from holdfast.core.types import Identity
from tests.lm.parts.pauses.test_from_below import Engine
from tests.scheduling import create_requests

LIARS = 300
LIES = (
    Pause("tool:x", expected=0.0, keep_until=1e18),
    Pause("tool:x", expected=MAX_PAUSE),
    Pause("person", expected=0.05),
    Pause("tool:x", keep_until=MAX_PAUSE),
    Pause("person", keep_until=-1e18),
    Pause("branch", superseded=True),
)


def converse(engine, liars, pauses, seed=1, turns=20):
    """Conversations of an honest key, one turn after each of the liars' requests that follow. `liars` is their key.

    Returns the number of tokens computed for the honest key.
    """
    choose, computed, now = random.Random(seed), 0, 0.0
    prompts = [(number,) * 8 for number in range(1, 3)]
    for turn in range(turns):
        which = turn % len(prompts)
        prompts[which] += tuple(choose.randrange(100, 10**6) for _ in range(2))
        (request,) = create_requests(prompts[which], max_tokens=1, identity=Identity(tenant="honest"))
        computed += engine.run(replace(request, id=f"honest {turn}", pause=Pause("tool:x", expected=5.0)), now)
        for number in range(LIARS // turns):
            prompt = tuple(choose.randrange(100, 10**6) for _ in range(12))
            (lie,) = create_requests(prompt, max_tokens=1, identity=Identity(tenant=liars(number)))
            engine.run(replace(lie, id=f"liar {turn} {number}", pause=choose.choice(pauses)), now)
            now += 0.5
        engine.idle(now, steps=3)
    return computed


@pytest.mark.parametrize("eviction", ["pauses", "retention"])
def test_three_hundred_lies_of_one_key_leave_another_its_half(eviction):
    said = [converse(Engine(eviction=eviction), 20, lambda number: "liar", pauses) for pauses in (LIES, (Pause(),))]
    needed = 20 * 2 + 2 * 8
    assert said[0] <= said[1] + 4 * 4 and said[0] <= 3 * needed, "its conversations take less than half of the tiers"


def test_lies_of_many_keys_leave_another_more_than_its_share():
    computed = converse(Engine(eviction="pauses", pauses=True), 20, lambda number: f"liar {number}", LIES)
    honest = converse(Engine(eviction="pauses", pauses=False), 20, lambda number: f"liar {number}", (Pause(),))
    assert computed <= 1.1 * honest


def test_what_liars_teach_is_bounded_and_of_no_concern_to_others():
    engine = Engine(eviction="pauses")
    converse(engine, 20, lambda number: f"liar {number}", LIES)
    kinds = engine.pool.rule.turns.kinds
    assert len(kinds) <= 16 * 4
    assert kinds.find("honest", "tool:x").trust > 0.0
