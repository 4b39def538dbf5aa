"""The values of the lower tiers: the description of a state, and the size of its pieces."""

import pytest

from holdfast.lm.tiers import ALIGNMENT, LEAST_PIECE, MOST_PIECE, POSITIONS, StateAbout, piece_bytes


@pytest.mark.parametrize("key", [b"", b"k", bytes(range(200))])
def test_a_description_is_read_from_the_bytes_that_begin_with_it(key):
    about = StateAbout(1234, key, 7)
    packed = about.packed()
    assert len(packed) == about.size == StateAbout.size_with(len(key)) and about.size % ALIGNMENT == 0
    assert StateAbout.unpacked(packed + b"numbers") == about
    assert len(key) < StateAbout.size_of(packed) <= about.size


def test_bytes_that_differ_by_a_bit_are_no_description():
    packed = StateAbout(1234, b"the tokens", 7).packed()
    used = StateAbout.size_of(packed)
    for at in range(used):
        damaged = bytearray(packed)
        damaged[at] ^= 4
        with pytest.raises(ValueError, match="do not begin with the description of a state"):
            StateAbout.unpacked(bytes(damaged))
    for size in range(used):
        with pytest.raises(ValueError, match=f"{size} bytes do not begin"):
            StateAbout.unpacked(packed[:size])


def test_only_bytes_that_begin_with_a_description_have_a_size_of_it():
    packed = StateAbout(1, b"k", 1).packed()
    assert StateAbout.size_of(packed[:3]) == StateAbout.size_of(b"X" + packed) == StateAbout.size_of(b"") == 0


def test_pieces_grow_with_the_states_within_limits():
    sizes = [piece_bytes(lambda length, each=each: each * length) for each in (0, 1, 1 << 10, 100_000, 1 << 20)]
    assert sizes == [LEAST_PIECE, LEAST_PIECE, (1 << 10) * POSITIONS // 8, 1 << 20, MOST_PIECE]
