"""The work that an accepted sequence needs before its first token, and the counting of answers that began elsewhere."""

from math import inf
from unittest.mock import Mock

from holdfast.core.contract import Contract
from holdfast.core.types import Identity, Request, SamplingParams
from holdfast.lm.parts.contracts.promises import JOINING, Promise, Promises, needed, prompt_of
from tests.lm.parts.contracts.world import BLOCK_BYTES, World

COPY = 0.0001
"""Seconds to copy a block, a third of those to compute it."""


def swapped_out(**kind):
    """A world in which the host alone has most blocks of a prompt, and that prompt."""
    world = World(blocks=64, host_blocks=256, copy_seconds=COPY, **kind)
    prompt = tuple(number % 997 for number in range(325))
    world.add("first", prompt, 2)
    world.run()
    for number in range(4):
        world.add(f"other {number}", 400, 2)
        world.run()
    return world, prompt


def learn_rate(world):
    """Let the engine measure the rate of copies, as it does with each."""
    world.scheduler.pool.host_link.observe(64 * BLOCK_BYTES, 64 * COPY)
    world.scheduler.pool.host_link.seconds_per_byte = COPY / BLOCK_BYTES


def entry_of(world, name):
    return world.scheduler._entries[name]


def test_state_on_the_host_counts_as_copied_at_the_measured_rate():
    world, prompt = swapped_out()
    learn_rate(world)
    world.add("again", prompt, 2)
    pool, entry = world.scheduler.pool, entry_of(world, "again")
    need, found = needed(entry, pool), entry.cache.match(prompt)
    assert (need.positions, need.copies) == (325 - 16 * len(found), True) and len(found.host) > 10
    assert need.seconds == pool.copy_seconds(len(found.host)) > 0.0
    seen = prompt_of(entry, Promise(Contract(ttft=1.0), 0.0, 2, 21), pool)
    assert seen[:3] == (need.positions, 325, 2) and (seen.copying, seen.joining) == (need.seconds, JOINING)
    pool.host_link.seconds_per_byte = 1.0
    assert needed(entry, pool).positions == 325, "what is cheaper to compute is computed"


def test_state_on_the_host_counts_as_computed_until_a_copy_was_measured():
    world, prompt = swapped_out()
    world.add("again", prompt, 2)
    entry = entry_of(world, "again")
    found, need = entry.cache.match(prompt), needed(entry, world.scheduler.pool)
    assert (need.positions, need.seconds) == (325 - 16 * (len(found) - len(found.host)), 0.0)


def test_a_prompt_whose_state_is_on_the_host_is_promised_a_shorter_time():
    world, prompt = swapped_out()
    learn_rate(world)
    for name, tokens in (("again", prompt), ("new", tuple(reversed(prompt)))):
        assert not world.add(name, tokens, 2, Contract(ttft=1e-6))
    again, new = (world.refusals[name].predicted.ttft for name in ("again", "new"))
    assert again < new
    assert world.add("promised", prompt, 2, Contract(ttft=again / 0.94))
    world.run()
    assert world.broken == {}


def test_all_positions_beyond_a_state_that_is_saved_within_a_prompt_are_needed():
    world = World(snapshots=8, blocks=800)
    world.add("long", 1500, 2)
    world.step()
    entry = entry_of(world, "long")
    (missing,) = entry.cache.missing(1500)
    assert missing[1] < 1500
    assert needed(entry, world.scheduler.pool).positions == 1500 - entry.cache.planned
    assert entry.cache.most_cuts(1500) == 1


def test_a_late_token_of_an_answer_that_began_elsewhere_breaks_its_pace():
    for answered, broken in ((0, "ttft"), (2, "tbt")):
        request = Request("r", (1, 2, 3, 4), SamplingParams(), identity=Identity(), answered=answered)
        entry = Mock(sequence=Mock(request=request))
        promises = Promises()
        promises.add(entry, Promise(Contract(ttft=1.0), 0.0, 2, 1), 0.1)
        promises.given([], 0.5)
        promises.ended(entry, 2.0)
        assert {term: count for term, count in promises.outcomes.broken.items() if count} == {broken: 1}


def test_a_share_of_each_promised_time_is_left_over_and_little_of_a_long_one():
    promise = Promise(Contract(ttft=0.5, tbt=0.05, complete=20.0), 100.0, 2, 21)
    assert (promise.due, promise.tbt, promise.complete_by) == (100.475, 0.0475, 119.6)
    free = Promise(Contract(), 100.0, 2, 21)
    assert free.due == free.tbt == free.complete_by == inf
