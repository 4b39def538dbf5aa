"""KeptRows: the state that a prompt finds, against a search through everything, and which state goes first."""

from __future__ import annotations

import random

import pytest

from holdfast.core.pause import Pause
from holdfast.core.types import Identity
from holdfast.lm.memory.kept_rows import STRIDE, FoundRow, KeptRows, RowKey
from holdfast.lm.memory.retention import EVICTIONS, RetentionRule
from holdfast.lm.memory.turn_queue import make_turns
from holdfast.lm.memory.turns import NEW, Departure
from holdfast.lm.types import RowBytes

ROOT, OTHER = Identity("m").root(), Identity("m", tenant="other").root()
GROWING, RECURRENT = RowBytes(growing=((8, None),)), RowBytes(fixed=1000)


def kept_rows(*, croppable=True, sizes=GROWING, eviction="retention", cost=lambda position: 1.0):
    rule = RetentionRule(EVICTIONS[eviction], cost=cost, turns=make_turns(eviction))
    return KeptRows(sizes.of, rule, croppable=croppable)


def numbers(count, start=0):
    return list(range(start, start + count))


@pytest.mark.parametrize("croppable", [True, False])
def test_the_next_turn_finds_the_whole_state_of_the_one_before(croppable):
    for length in (1, STRIDE - 1, STRIDE, STRIDE + 1, 5 * STRIDE + 3):
        kept = kept_rows(croppable=croppable)
        kept.add(3, ROOT, numbers(length), 0.0)
        assert kept.find(ROOT, numbers(length + 1)) == FoundRow(3, length, on_host=False)
        assert kept.find(ROOT, numbers(length + 40)) == FoundRow(3, length, on_host=False)
        assert kept.find(OTHER, numbers(length + 40)) is None


def test_the_last_token_of_a_prompt_is_never_found():
    kept, whole = kept_rows(), kept_rows(croppable=False)
    for each in (kept, whole):
        each.add(0, ROOT, numbers(2 * STRIDE), 0.0)
    assert kept.find(ROOT, numbers(2 * STRIDE)) == FoundRow(0, STRIDE, on_host=False)
    assert whole.find(ROOT, numbers(2 * STRIDE)) is None
    assert kept.find(ROOT, numbers(2 * STRIDE + 1)) == FoundRow(0, 2 * STRIDE, on_host=False)
    assert kept.find(ROOT, []) is None and kept.find(ROOT, [0]) is None


def test_a_state_that_cannot_be_cut_serves_no_prompt_that_leaves_it():
    kept, whole = kept_rows(), kept_rows(croppable=False)
    branch = [*numbers(40), 500, *numbers(60, 600)]
    for each in (kept, whole):
        each.add(0, ROOT, numbers(70), 0.0)
    assert kept.find(ROOT, branch) == FoundRow(0, 32, on_host=False)
    assert whole.find(ROOT, branch) is None


def test_a_longer_state_that_can_be_cut_replaces_those_that_it_begins_with():
    kept = kept_rows()
    assert kept.add(0, ROOT, numbers(20), 0.0) == ()
    assert kept.add(1, ROOT, [*numbers(20), 900], 0.0) == (0,)
    assert kept.add(2, ROOT, numbers(70), 0.0) == (), "it leaves the other after 20 tokens"
    assert kept.add(3, ROOT, numbers(32), 1.0) == (3,), "all that it saves is saved by cutting the longer one"
    assert sorted(slot for slot in range(4) if slot in kept) == [1, 2]
    assert kept.device_bytes == GROWING.of(21) + GROWING.of(70)
    whole = kept_rows(croppable=False)
    assert whole.add(0, ROOT, numbers(20), 0.0) == whole.add(1, ROOT, numbers(40), 0.0) == ()
    assert whole.add(2, ROOT, numbers(20), 5.0) == (2,), "equal states are kept once"
    assert whole.add(3, ROOT, numbers(16), 5.0) == (), "a longer one that cannot be cut does not stand in for it"


def test_an_equal_state_counts_as_used_in_place_of_the_second_one():
    kept = kept_rows()
    kept.add(0, ROOT, numbers(20), 0.0)
    kept.add(1, ROOT, numbers(20, 100), 1.0)
    assert kept.victims(9.0, on_host=False) == [0, 1]
    kept.add(2, ROOT, numbers(20), 2.0)
    assert kept.victims(9.0, on_host=False) == [1, 0]


def test_a_state_on_the_device_is_found_before_an_equally_long_one_on_the_host():
    kept = kept_rows()
    kept.add(0, ROOT, numbers(40), 0.0)
    kept.add(1, ROOT, [*numbers(35), 900], 0.0)
    prompt = [*numbers(33), 800, 801]
    assert kept.find(ROOT, prompt) == FoundRow(1, 32, on_host=False)
    kept.offload(1)
    assert kept.find(ROOT, prompt) == FoundRow(0, 32, on_host=False)
    kept.offload(0)
    assert kept.find(ROOT, prompt) == FoundRow(1, 32, on_host=True)
    assert (kept.device_bytes, kept.host_bytes) == (0, GROWING.of(40) + GROWING.of(36))
    assert kept.positions(on_host=True) == 76


def test_the_cheapest_to_compute_again_goes_first_for_each_byte_and_second():
    kept = kept_rows(cost=float)
    kept.add(0, ROOT, numbers(64), 0.0)
    kept.add(1, ROOT, numbers(16, 100), 0.0)
    kept.add(2, ROOT, numbers(64, 200), 30.0)
    # Worth of a byte: 32 / 8, 8 / 8 and 32 / 8, over the ages 40, 40 and 10.
    assert kept.victims(40.0, on_host=False) == [1, 0, 2]
    recurrent = kept_rows(cost=float, sizes=RECURRENT, croppable=False)
    recurrent.add(0, ROOT, numbers(64), 0.0)
    recurrent.add(1, ROOT, numbers(30, 100), 10.0)
    # Both take 1,000 bytes: 32 * 64 / 40 against 15 * 30 / 30.
    assert recurrent.victims(40.0, on_host=False) == [1, 0]


def test_without_costs_the_least_recently_used_goes_first():
    kept = kept_rows(eviction="lru", cost=float)
    kept.add(0, ROOT, numbers(64), 0.0)
    kept.add(1, ROOT, numbers(16, 100), 1.0)
    assert kept.victims(9.0, on_host=False) == [0, 1]
    kept.touch(0, 2.0)
    assert kept.victims(9.0, on_host=False) == [1, 0]
    kept.offload(1)
    assert kept.victims(9.0, on_host=False) == [0] and kept.victims(9.0, on_host=True) == [1]


@pytest.mark.parametrize("length", [1, STRIDE - 1, STRIDE, 5 * STRIDE + 3])
def test_a_key_is_read_from_its_bytes_and_finds_what_its_tokens_find(length):
    kept, other = kept_rows(), kept_rows()
    kept.add(3, ROOT, numbers(length), 1.0)
    key = RowKey.unpacked(kept.key(3).packed())
    assert (key, key.length, key.digest) == (kept.key(3), length, kept.key(3).digest)
    other.put(8, key, 1.0, on_host=True)
    assert other.find(ROOT, numbers(length + 1)) == FoundRow(8, length, on_host=True)
    assert (other.device_bytes, other.host_bytes) == (0, GROWING.of(length))
    other.forget(8)
    assert other.host_bytes == 0 and other.find(ROOT, numbers(length + 1)) is None


def test_bytes_that_are_no_key_are_refused():
    kept = kept_rows()
    kept.add(0, ROOT, numbers(20), 0.0)
    packed = kept.key(0).packed()
    for damaged in (b"", packed[:7], packed[:-1], packed + b"\0", bytes(8), packed[:4] + b"\x10" + packed[5:]):
        with pytest.raises(ValueError, match="bytes are no key"):
            RowKey.unpacked(damaged)


def test_keys_of_other_tokens_and_other_tenants_have_other_digests():
    kept = kept_rows()
    prompts = [(ROOT, numbers(20)), (ROOT, numbers(19)), (ROOT, [*numbers(19), 900]), (ROOT, numbers(32))]
    for slot, (root, tokens) in enumerate([*prompts, (OTHER, numbers(20))]):
        kept.put(slot, key_of(root, tokens), 0.0)
    assert len({kept.key(slot).digest for slot in range(5)}) == 5


def key_of(root, tokens):
    kept = kept_rows()
    kept.add(0, root, tokens, 0.0)
    return kept.key(0)


def test_a_state_that_replaces_others_remembers_the_digests_of_all_of_them():
    kept = kept_rows()
    digests = []
    for slot, length in enumerate((20, 40, 70)):
        kept.add(slot, ROOT, numbers(length), 0.0)
        digests.append(kept.key(slot).digest)
    assert sorted(kept.replaced(2)) == sorted(digests[:2]) and kept.slots == (2,)


def test_a_held_state_is_no_victim_until_each_hold_has_ended():
    kept = kept_rows()
    for slot in range(2):
        kept.put(slot, key_of(ROOT, numbers(20, 100 * slot)), 0.0, on_host=True)
    kept.hold(0), kept.hold(0)
    assert kept.victims(9.0, on_host=True) == [1] and kept.held_bytes == GROWING.of(20)
    kept.release(0)
    assert kept.victims(9.0, on_host=True) == [1]
    kept.release(0), kept.release(1)
    assert kept.victims(9.0, on_host=True) == [0, 1] and kept.held_bytes == 0
    kept.hold(1)
    kept.forget(1)
    assert kept.held_bytes == 0, "a state that is given up is not held"


def test_mistakes_of_the_caller_are_refused():
    kept = kept_rows()
    kept.add(0, ROOT, [1], 0.0)
    with pytest.raises(RuntimeError, match="slot 0 keeps a state already"):
        kept.add(0, ROOT, [2], 0.0)
    with pytest.raises(ValueError, match="tokens is empty"):
        kept.add(1, ROOT, [], 0.0)
    kept.offload(0)
    with pytest.raises(RuntimeError, match="slot 0 is on the host already"):
        kept.offload(0)


def common(one, two):
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@pytest.mark.parametrize("croppable", [True, False])
def test_long_histories_find_the_state_that_a_search_through_all_kept_states_finds(croppable):
    choose = random.Random(7)
    kept, held, now = kept_rows(croppable=croppable), {}, 0.0
    texts = [[choose.randint(0, 1) for _ in range(choose.randint(1, 100))] for _ in range(12)]

    def draw():
        root, text = choose.choice((ROOT, OTHER)), choose.choice(texts)
        return root, text[: choose.randint(1, len(text))] + [choose.randint(2, 4) for _ in range(choose.randint(0, 20))]

    def saved(root, state, prompt):
        if state[0] != root:
            return 0
        shared = common(state[1], prompt[:-1])
        if shared == len(state[1]):
            return shared
        return shared // STRIDE * STRIDE if croppable else 0

    for slot in range(1500):
        now += choose.random()
        root, tokens = draw()
        lost = kept.add(slot, root, tokens, now)
        if lost != (slot,):
            held[slot] = root, tokens, False
        for other in set(lost) - {slot}:
            assert croppable and held[other][0] == root and common(held[other][1], tokens) == len(held[other][1])
            del held[other]
        if choose.random() < 0.3 and (on_device := kept.victims(now, on_host=False)):
            kept.offload(on_device[0])
            held[on_device[0]] = *held[on_device[0]][:2], True
        while len(held) > 25:
            victim = kept.victims(now, on_host=(choose.random() < 0.5 and kept.host_bytes > 0) or not kept.device_bytes)
            kept.forget(victim[0])
            del held[victim[0]]
        root, prompt = draw()
        found = kept.find(root, prompt)
        best = max((saved(root, state, prompt) for state in held.values()), default=0)
        assert (found.length if found else 0) == best
        if found:
            assert saved(root, held[found.slot], prompt) == best and held[found.slot][2] == found.on_host
        for on_host, total in ((False, kept.device_bytes), (True, kept.host_bytes)):
            assert total == sum(GROWING.of(len(tokens)) for _, tokens, there in held.values() if there == on_host)
    for slot in list(held):
        kept.forget(slot)
    assert not kept._ends and not kept._passing and kept.device_bytes == kept.host_bytes == 0


def leave(kept, slot, tokens, tenant, until, now):
    """Keep the state of a turn that has ended, whose client wants it kept until some time."""
    kept.left(ROOT, tokens, Departure(f"{slot}", tenant, Pause("person", keep_until=until)), NEW, now)
    kept.add(slot, ROOT, tokens, now)


@pytest.mark.parametrize("on_host", [False, True])
def test_rows_that_clients_want_kept_go_last_up_to_their_tenants_share(on_host):
    kept = kept_rows(eviction="pauses")
    for slot in range(3):
        leave(kept, slot, numbers(32, 100 * (slot + 1)), "greedy", 1000.0 + slot, float(slot))
    leave(kept, 3, numbers(32, 900), "honest", None, 3.0)
    for slot in range(4 if on_host else 0):
        kept.offload(slot)
    assert kept.victims(9.0, on_host=on_host)[-2:] == [0, 1], "two of four: half"
    assert kept.victims(2000.0, on_host=on_host)[-1] == 3
    assert kept.victims(9.0, on_host=not on_host) == []
