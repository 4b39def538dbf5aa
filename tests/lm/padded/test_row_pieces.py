"""Pieces of rows' states: what jobs write and read of a slot, also if the slot is given up or a piece is bad."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from holdfast.lm.padded.host_rows import HostRows
from holdfast.lm.padded.row_pieces import MOST_PARTS, RowPieces, pieces_of
from holdfast.lm.padded.state_bytes import StateBytes
from holdfast.lm.padded.state_layout import StateLayout
from holdfast.lm.tiers import StateAbout, TierBlock, TierJob
from tests.lm.padded.echo import CPU, Echo, keys_of

LAYOUT = StateLayout.discover(Echo().run)
SIZE = 64
ABOUT = StateAbout(40, b"the tokens", 4)
"""40 positions of 4 bytes after 64 bytes of description: 3.5 pieces."""


def state_of(*tokens):
    return {"keys": torch.tensor(tokens, dtype=torch.float32)[None, :, None]}


def rows_of(**slots):
    """The pieces of states on a host. By default slot 3 has 40 positions."""
    host = HostRows(LAYOUT, 10_000, CPU)
    host.store(3, state_of(*range(40)), 40, step=0)
    return host, RowPieces(host, StateBytes(LAYOUT, Echo().run(1, 5)), SIZE, pinned=False)


def job(kind, slot, places, about=ABOUT):
    return TierJob(0, "disk", kind, tuple(TierBlock(b"d" * 32, place, slot, place) for place in places), about)


def written(rows):
    return [b"".join(piece) for piece in rows.begin(job("write", 3, range(4))).pieces()]


def fill(part, data):
    for piece, each in zip(part.pieces(), data, strict=True):
        (memory,) = piece
        memory[:] = each


def test_a_state_that_was_written_is_in_its_new_slot_once_all_its_pieces_are_there():
    host, rows = rows_of()
    data = written(rows)
    assert [len(piece) for piece in data] == [SIZE] * 4
    first, second = rows.begin(job("read", 7, [2, 0])), rows.begin(job("read", 7, [1, 3]))
    fill(second, [data[1], data[3]])
    assert second.end(["done", "done"]) == ["done", "done"] and 7 not in host
    fill(first, [data[2], data[0]])
    assert first.end(["done", "done"]) == ["done", "done"]
    assert keys_of(host.load(7, 40, step=1).take()) == [[*range(40)]]
    assert host.used == 2 * 40 * 4 and not rows._arriving


def test_a_state_with_a_piece_that_did_not_come_is_not_there():
    host, rows = rows_of()
    data = written(rows)
    first, second = rows.begin(job("read", 7, [0, 1])), rows.begin(job("read", 7, [2, 3]))
    fill(first, data[:2])
    assert first.end(["done", "corrupt"]) == ["done", "corrupt"]
    assert second.end(["done", "done"]) == ["done", "done"]
    assert 7 not in host and not rows._arriving


@pytest.mark.parametrize("change", [{"positions": 39}, {"key": b"other tokens"}])
def test_a_state_of_other_tokens_is_corrupt(change):
    host, rows = rows_of()
    data = written(rows)
    part = rows.begin(job("read", 7, range(4), replace(ABOUT, **change)))
    fill(part, data)
    assert part.end(["done"] * 4) == ["corrupt"] * 4
    assert 7 not in host and not rows._arriving


def test_a_job_that_writes_keeps_its_state_although_the_slot_is_given_up():
    host, rows = rows_of()
    expected = written(rows)
    departure = rows.begin(job("write", 3, [3, 1]))
    host.forget(3)
    assert [b"".join(piece) for piece in departure.pieces()] == [expected[3], expected[1]]
    departure.end(["done", "done"])
    assert departure.pieces() == [], "nothing is held after the end"
    assert rows.begin(job("write", 3, range(4))).pieces() == [], "the slot has no state"


def test_bytes_in_parts_of_any_size_are_cut_into_pieces_of_one_size():
    draw = random.Random(3)
    for _ in range(50):
        parts = [draw.randbytes(draw.choice((0, 1, 3, SIZE, 200))) for _ in range(draw.randrange(1, 9))]
        pieces = [b"".join(piece) for piece in pieces_of([memoryview(part) for part in parts], SIZE)]
        whole = b"".join(parts)
        assert b"".join(pieces) == whole.ljust(-(-len(whole) // SIZE) * SIZE, b"\0")
        assert all(len(piece) == SIZE for piece in pieces)


def test_a_piece_of_very_many_parts_is_joined():
    parts = [memoryview(bytes([number])) for number in range(MOST_PARTS + 1)]
    (piece,) = pieces_of(parts, MOST_PARTS + 1)
    assert piece == (bytes(range(MOST_PARTS + 1)),)
