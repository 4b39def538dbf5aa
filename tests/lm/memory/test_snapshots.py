"""Snapshots: the keys by which they are found, and which of them their conversations have gone on from."""

from array import array

import pytest

from holdfast.core.types import Identity
from holdfast.lm.memory.digests import block_digests
from holdfast.lm.memory.snapshots import NOTHING_KEPT, Snapshot, StateKey

ROOT = Identity("model").root()
DIGESTS = block_digests(ROOT, range(12), 4)


@pytest.mark.parametrize(
    ("length", "parent", "tail"),
    [(3, ROOT, (0, 1, 2)), (4, DIGESTS[0], ()), (10, DIGESTS[1], (8, 9))],
    ids=["less than a block", "one block", "two blocks and a part"],
)
def test_a_key_names_the_full_blocks_and_the_tokens_after_them(length, parent, tail):
    key = StateKey.of(ROOT, DIGESTS, range(12), length, 4)
    assert (key.length, key.parent, key.tail) == (length, parent, array("I", tail))
    assert bool(key.tail_digest) == bool(tail) and key.tail_digest not in (parent, *DIGESTS)


def test_equal_tails_of_different_tokens_have_different_digests():
    others = block_digests(ROOT, range(100, 112), 4)
    first, second = (StateKey.of(ROOT, each, range(12), 10, 4) for each in (DIGESTS, others))
    assert first.tail == second.tail and first.tail_digest != second.tail_digest


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        ({}, False),
        ({"is_continued": True}, True),
        ({"is_continued": True, "starts": 1}, True),
        ({"is_continued": True, "starts": 2}, False),
        ({"is_continued": True, "shared": True}, False),
    ],
)
def test_a_snapshot_is_passed_once_its_only_conversation_has_gone_on(fields, passed):
    assert Snapshot(StateKey.of(ROOT, DIGESTS, range(12), 8, 4), NOTHING_KEPT, **fields).is_passed == passed


def test_the_state_before_the_first_token_has_no_slot_and_comes_before_itself():
    assert (NOTHING_KEPT.length, NOTHING_KEPT.is_kept, NOTHING_KEPT.previous) == (0, False, NOTHING_KEPT)


@pytest.mark.parametrize("length", [3, 4, 10, 11, 12])
def test_a_key_survives_as_bytes(length):
    key = StateKey.of(ROOT, DIGESTS, range(12), length, 4)
    assert StateKey.unpacked(key.packed()) == key
    assert len(key.packed()) <= StateKey.most_bytes(4)


def test_a_key_with_the_longest_tail_takes_the_most_bytes():
    assert len(StateKey.of(ROOT, DIGESTS, range(12), 11, 4).packed()) == StateKey.most_bytes(4)


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"1234", lambda data: data[:20]])
def test_bytes_of_another_length_are_no_key(change):
    with pytest.raises(ValueError, match="bytes are no key of a recurrent state"):
        StateKey.unpacked(change(StateKey.of(ROOT, DIGESTS, range(12), 10, 4).packed()))


def test_a_key_shorter_than_its_tail_is_refused():
    data = StateKey.of(ROOT, DIGESTS, range(12), 10, 4)._replace(length=1).packed()
    with pytest.raises(ValueError, match="are no key"):
        StateKey.unpacked(data)


def test_a_state_is_named_by_the_digest_of_all_its_tokens():
    assert StateKey.of(ROOT, DIGESTS, range(12), 8, 4).digest == DIGESTS[1]
    key = StateKey.of(ROOT, DIGESTS, range(12), 10, 4)
    assert key.digest == key.tail_digest
