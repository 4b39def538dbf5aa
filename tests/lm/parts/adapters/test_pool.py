"""AdapterPool against a brute-force oracle: a list of slots, searched and written in the plainest way."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.parts.adapters.pool import AdapterPool


class Oracle:
    """Slots as a list of [adapter, state, last use, pins]; states are loading and here."""

    def __init__(self, slots):
        self.slots = [None] * slots
        self.clock = 0

    def find(self, adapter):
        return next((slot for slot in self.slots if slot is not None and slot["adapter"] == adapter), None)

    def use(self, slot):
        self.clock += 1
        slot["used"] = self.clock

    def load(self, adapter, step, spared):
        """The place it goes to and who loses it; None if there is none."""
        empty = [place for place, slot in enumerate(self.slots) if slot is None]
        idle = [
            (slot["used"], place)
            for place, slot in enumerate(self.slots)
            if slot is not None and slot["step"] is None and not slot["pins"] and slot["adapter"] not in spared
        ]
        if not empty and not idle:
            return None
        loser = None
        if empty:
            places = empty
        else:
            places = [min(idle)[1]]
            loser = self.slots[places[0]]["adapter"]
        return places, loser

    def put(self, place, adapter, step):
        self.slots[place] = {"adapter": adapter, "step": step, "used": 0, "pins": 0}

    def finish(self, step, known):
        """The adapters whose loads are complete, in the order in which these began."""
        done = []
        loading = [slot for slot in self.slots if slot is not None and slot["step"] is not None]
        for slot in sorted(loading, key=lambda slot: slot["step"]):
            if slot["step"] <= step:
                place = self.slots.index(slot)
                slot["step"] = None
                done.append(slot["adapter"])
                if slot["adapter"] not in known:
                    self.slots[place] = None
        return done


def check(pool, oracle, known):
    """The pool and the oracle hold the same, and every slot is in exactly one state."""
    for adapter in known:
        slot = oracle.find(adapter)
        assert (pool.slot(adapter) is not None) == (slot is not None and slot["step"] is None)
        assert pool.is_loading(adapter) == (slot is not None and slot["step"] is not None)
        if pool.slot(adapter) is not None:
            assert oracle.slots[pool.slot(adapter)]["adapter"] == adapter
        assert pool.pinned.get(adapter, 0) == (slot["pins"] if slot is not None else 0)
    assert len(pool) == len(known)
    assert pool.resident == sum(slot is not None and slot["step"] is None for slot in oracle.slots)
    taken = sorted(pool._slots.values())
    assert sorted([*taken, *pool._empty]) == list(range(pool.num_slots))
    assert {*pool._loading, *pool._idle, *pool._pins} == {*pool._slots}
    assert len(pool._loading) + len(pool._idle) + len(pool._pins) == len(pool._slots)


@given(st.integers(1, 4), st.integers(0, 1 << 30))
def test_random_histories_agree_with_a_plain_list_of_slots(slots, seed):
    choose = random.Random(seed)
    pool, oracle, known, pins, step = AdapterPool(slots), Oracle(slots), [], [], 0
    for _ in range(120):
        match choose.randrange(7):
            case 0 if len(known) < 9:
                known.append(f"a{choose.randrange(10**6)}")
                pool.add(known[-1])
            case 1 if known:
                adapter = choose.choice(known)
                if adapter not in pins:
                    known.remove(adapter)
                    pool.remove(adapter)
                    slot = oracle.find(adapter)
                    if slot is not None and slot["step"] is None:
                        oracle.slots[oracle.slots.index(slot)] = None
            case 2 | 3 if known:
                adapter = choose.choice(known)
                if oracle.find(adapter) is None:
                    step += 1
                    spared = choose.sample(known, choose.randrange(len(known)))
                    wanted = oracle.load(adapter, step, spared)
                    found = pool.load(adapter, step, spared.__contains__)
                    assert (found is None) == (wanted is None)
                    if found is not None:
                        assert found[0].slot in wanted[0] and found[1] == wanted[1]
                        oracle.put(found[0].slot, adapter, step)
            case 4:
                until = step - choose.randrange(3)
                done = oracle.finish(until, known)
                slots = {adapter: oracle.slots.index(oracle.find(adapter)) for adapter in done if adapter in known}
                assert dict(pool.finish_loads(until)) == slots
                for adapter in done:
                    if adapter in known:
                        oracle.use(oracle.find(adapter))
            case 5 if known:
                adapter = choose.choice(known)
                slot = oracle.find(adapter)
                if slot is not None and slot["step"] is None:
                    assert oracle.slots[pool.pin(adapter)] is slot
                    slot["pins"] += 1
                    pins.append(adapter)
                else:
                    with pytest.raises(RuntimeError, match="is not in a slot"):
                        pool.pin(adapter)
            case 6 if pins:
                adapter = pins.pop(choose.randrange(len(pins)))
                pool.unpin(adapter)
                slot = oracle.find(adapter)
                slot["pins"] -= 1
                if not slot["pins"]:
                    oracle.use(slot)
        check(pool, oracle, known)


def test_an_adapter_that_is_used_keeps_its_slot_and_the_longest_idle_one_loses_its():
    pool = AdapterPool(2)
    for number, adapter in enumerate("ab"):
        pool.add(adapter)
        pool.load(adapter, number)
    assert [adapter for adapter, _ in pool.finish_loads(1)] == ["a", "b"]
    pool.add("c")
    slot = pool.pin("a")
    load, loser = pool.load("c", 2)
    assert loser == "b" and load.slot != slot
    assert pool.load("b", 3) is None


def test_a_failed_load_leaves_its_slot_empty():
    pool = AdapterPool(1)
    pool.add("a")
    pool.load("a", 0)
    pool.fail_load("a")
    assert list(pool.finish_loads(0)) == []
    assert pool.slot("a") is None and pool.load("a", 1) is not None


def test_an_adapter_in_use_is_not_forgotten_and_one_forgotten_while_it_loads_gives_its_slot_back():
    pool = AdapterPool(1)
    pool.add("a")
    pool.users["a"] += 1
    with pytest.raises(RuntimeError, match="1 requests use adapter a"):
        pool.remove("a")
    pool.users["a"] -= 1
    pool.load("a", 0)
    pool.remove("a")
    assert "a" not in pool and list(pool.finish_loads(0)) == []
    pool.add("b")
    assert pool.load("b", 1) is not None


def test_a_pool_without_slots_is_refused():
    with pytest.raises(ValueError, match="0 slots"):
        AdapterPool(0)
