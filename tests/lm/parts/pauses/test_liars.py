"""Hundreds of clients who lie about their pauses: they cost no other key more than its equal share of the tiers."""

import random
from dataclasses import replace
from math import inf, nan

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


def test_three_hundred_lies_of_one_key_cost_another_nothing_where_wishes_do_not_count():
    lies, silence = (converse(Engine(), lambda number: "liar", said) for said in (LIES, (Pause(),)))
    assert lies <= silence


def test_three_hundred_wishes_of_one_key_leave_another_its_half_of_the_tiers():
    engines = [Engine(eviction="pauses") for _ in range(2)]
    lies, silence = (
        converse(engine, lambda number: "liar", said) for engine, said in zip(engines, (LIES, (Pause(),)), strict=True)
    )
    assert lies <= 1.15 * silence


def test_three_hundred_lies_of_many_keys_cost_another_little():
    lies = silence = 0
    for seed in range(1, 5):
        lies += converse(Engine(eviction="pauses"), lambda number: f"liar {number}", LIES, seed)
        silent = Engine(eviction="pauses", pauses=False)
        silence += converse(silent, lambda number: f"liar {number}", (Pause(),), seed)
    assert lies <= 1.1 * silence, "each key that has state is owed an equal share, liars too"


def test_liars_teach_the_engine_nothing_of_others():
    engine = Engine(eviction="pauses")
    converse(engine, lambda number: f"liar {number}", LIES)
    kinds = engine.pool.rule.turns.kinds
    assert len(kinds) <= 16 * 6, "the number of kinds is bounded by keys and their words"
    assert kinds.find("honest", "tool:x").trust > 0.0


@pytest.mark.parametrize(
    ("field", "value"), [("expected", -1.0), ("expected", nan), ("expected", 1e18), ("keep_until", inf)]
)
def test_impossible_pauses_are_refused_with_their_value(field, value):
    with pytest.raises(ValueError, match=r"it must (lie|be)"):
        Pause(**{field: value})
