"""StatePieces: the bytes of recurrent states on the host, as jobs of the disk tier write and read them."""

from __future__ import annotations

import pytest

from holdfast.lm.execution.state_pieces import StatePieces, cut_into
from holdfast.lm.tiers import StateAbout, TierBlock, TierJob

SIZE = 64
ABOUT = StateAbout(40, b"the tokens", 4)
"""64 bytes of description, then a state of 140 bytes: 3.2 pieces."""


class Slots:
    """States of two tensors, of 100 and 40 bytes."""

    def __init__(self, count: int) -> None:
        self.slots = [(bytearray([slot + 1] * 100), bytearray([slot + 101] * 40)) for slot in range(count)]

    def __getitem__(self, slot: int) -> tuple[memoryview, ...]:
        return tuple(memoryview(each) for each in self.slots[slot])


def job(slot: int, places: list[int]) -> TierJob:
    return TierJob(-1, "disk", "write", tuple(TierBlock(b"d" * 32, place, slot, place) for place in places), ABOUT)


def test_pieces_are_the_description_the_tensors_and_zeros() -> None:
    pieces = StatePieces(Slots(2), SIZE).begin(job(1, [0, 1, 2, 3])).pieces()
    assert [sum(map(len, piece)) for piece in pieces] == [SIZE] * 4
    data = b"".join(b"".join(piece) for piece in pieces)
    assert data == ABOUT.packed() + bytes([2] * 100) + bytes([102] * 40) + bytes(52)


def test_a_state_that_is_read_in_two_jobs_lands_in_its_slot_and_in_no_other() -> None:
    source, target = Slots(2), Slots(2)
    data = [b"".join(piece) for piece in StatePieces(source, SIZE).begin(job(0, [0, 1, 2, 3])).pieces()]
    states = StatePieces(target, SIZE)
    for places in ([3, 0], [1, 2]):
        part = states.begin(job(1, places))
        for place, pieces in zip(places, part.pieces(), strict=True):
            rest = memoryview(data[place])
            for piece in pieces:
                piece[:] = rest[: len(piece)]
                rest = rest[len(piece) :]
        assert part.end(["done", "corrupt"]) == ["done", "corrupt"]
    assert target.slots[1] == source.slots[0]
    assert target.slots[0] == Slots(1).slots[0], "the other slot is as it was"


@pytest.mark.parametrize("sizes", [(10, 22), (32,), (1, 0, 31), (64, 32)])
def test_cut_pieces_have_one_size_and_are_the_same_memory(sizes: tuple[int, ...]) -> None:
    parts = [bytearray(size) for size in sizes]
    pieces = [*cut_into([memoryview(part) for part in parts], 16)]
    assert [sum(map(len, piece)) for piece in pieces] == [16] * (sum(sizes) // 16)
    for piece in pieces:
        for part in piece:
            part[:] = bytes([7] * len(part))
    assert b"".join(parts) == bytes([7] * sum(sizes))
