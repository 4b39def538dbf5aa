"""Departures: copies to the host that make room on the device before a contract's first chunk."""

from holdfast.core.contract import Contract
from holdfast.lm.parts.contracts.promises import Departures
from tests.lm.parts.contracts.test_histories import KINDS, history
from tests.lm.parts.contracts.test_promises import entry_of, learn_rate, swapped_out

IN_FLIGHT = 2


def full_world():
    """A world whose device holds idle state, most of which is not on the host yet, with two prompts that wait."""
    world, _ = swapped_out()
    learn_rate(world)
    for name in ("first to wait", "second to wait"):
        world.add(name, 480, 2)
    return world, entry_of(world, "first to wait"), entry_of(world, "second to wait")


def test_a_sequence_waits_for_the_copies_that_make_room_for_it():
    world, first, second = full_world()
    pool = world.scheduler.pool
    blocks, room = pool.blocks_for(first.sequence.length), pool.allocatable
    assert 0 < room < blocks + pool.blocks_for(second.sequence.length)
    leaving = Departures(pool, room, IN_FLIGHT)  # all room is for sequences that decode
    assert leaving.before(first) == (IN_FLIGHT + -(-blocks // pool.max_copies), pool.copy_seconds(blocks))
    later = leaving.before(second)
    assert later[1] > pool.copy_seconds(blocks) > 0


def test_a_sequence_with_room_waits_for_nothing():
    world, first, second = full_world()
    pool = world.scheduler.pool
    leaving, room = Departures(pool, 0, IN_FLIGHT), pool.allocatable
    steps, seconds = leaving.before(first)
    short = pool.blocks_for(first.sequence.length) - room
    assert (steps > 0, seconds > 0) == (short > 0, short > 0)
    assert leaving.before(second)[0] > 0


def test_a_sequence_that_has_its_blocks_waits_for_none():
    world, first, _ = full_world()
    world.run()
    world.add("running", 300, 40, Contract(complete=100.0))
    while not entry_of(world, "running").decoding:
        world.step()
    assert Departures(world.scheduler.pool, 1000, IN_FLIGHT).before(entry_of(world, "running")) == (0, 0.0)
    assert first.cache.capacity == 0


def test_copies_that_make_room_break_no_accepted_contract():
    """In these histories a first token or a later one came late before such copies were counted."""
    for seed in (125, 149):
        world = history(seed, **KINDS["a slow host tier"])
        assert world.broken == {}, seed
        assert sum(map(bool, world.contracts.values())) > 15
