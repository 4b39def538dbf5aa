"""The work lists of recurrent layers, compared with the segments that they come from."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.kernels.recurrent.tiles import CHUNK, FEW, FIELDS, WorkListsBuilder, work_lists
from tests.lm.kernels.recurrent_oracle import scattered, with_drafts

BUILDER = WorkListsBuilder(torch.device("cpu"))
LENGTHS = st.lists(st.one_of(st.just(1), st.integers(1, 300)), min_size=1, max_size=20)


@given(LENGTHS)
def test_every_segment_is_in_one_list_and_every_long_one_is_cut_into_chunks(lengths: list[int]) -> None:
    segments = scattered(lengths)
    few, many, chunks, _ = (records.tolist() for records in work_lists(segments))
    expected = list(zip(segments.query_start.tolist(), lengths, segments.row.tolist(), strict=False))
    assert [tuple(record) for record in few] == [(*record, 0) for record in expected if record[1] <= FEW]
    assert sorted(tuple(record[:3]) for record in many) == [record for record in expected if record[1] > FEW]
    assert [record[1] for record in many] == sorted((record[1] for record in many), reverse=True)
    for first, length, slot, number in many:
        count = -(-length // CHUNK)
        assert chunks[number : number + count] == [[first, length, slot, CHUNK * index] for index in range(count)]
    assert len(chunks) == sum(-(-length // CHUNK) for length in lengths if length > FEW)


@given(LENGTHS, st.data())
def test_segments_of_drafts_are_marked_in_all_lists_and_their_tokens_have_places(
    lengths: list[int], data: st.DataObject
) -> None:
    drafted = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    plain = scattered(lengths)
    segments = with_drafts(plain, [number for number, chosen in enumerate(drafted) if chosen])
    assert segments.places is not None
    lists = work_lists(segments)
    slots = dict(zip(plain.query_start.tolist(), plain.row.tolist(), strict=False))
    marks = dict(zip(plain.query_start.tolist(), drafted, strict=False))
    for records, unmarked in zip(lists[:3], work_lists(plain), strict=False):
        assert len(records) == len(unmarked)
        for first, _, slot, _ in records.tolist():
            assert slot == (-1 - slots[first] if marks[first] else slots[first])
    kept = [[token, 1, place, 0] for token, place in enumerate(segments.places.tolist()) if place >= 0]
    assert lists[3].tolist() == kept
    assert len(kept) == sum(length for length, chosen in zip(lengths, drafted, strict=True) if chosen)


def test_lists_without_room_for_all_drafted_tokens_are_left_as_they_are() -> None:
    reserved = BUILDER.reserve(4, None, 3)
    assert BUILDER.refill(reserved, with_drafts(scattered([3, 1]), [0]))
    before = [place.clone() for place in reserved.tensors]
    assert not BUILDER.refill(reserved, with_drafts(scattered([2, 2]), [0, 1]))
    assert all(torch.equal(*pair) for pair in zip(reserved.tensors, before, strict=True))
    assert BUILDER.refill(reserved, scattered([2]))
    assert not reserved.kept.any()


@given(LENGTHS)
def test_any_batch_of_the_reserved_size_fits(lengths: list[int]) -> None:
    segments = scattered(lengths)
    reserved = BUILDER.reserve(len(lengths), sum(lengths))
    assert BUILDER.refill(reserved, segments)
    for place, records in zip(reserved.tensors, work_lists(segments), strict=True):
        assert np.array_equal(place[: len(records)].numpy(), records)
        assert not place[len(records) :].any()


@given(LENGTHS)
def test_a_list_for_decodes_holds_long_segments_too(lengths: list[int]) -> None:
    reserved = BUILDER.reserve(len(lengths), None)
    assert BUILDER.refill(reserved, scattered(lengths))
    assert reserved.few[:, 1].tolist() == lengths


def test_a_batch_without_room_changes_nothing() -> None:
    reserved = BUILDER.reserve(3, 40)
    assert BUILDER.refill(reserved, scattered([20, 1]))
    before = [place.clone() for place in reserved.tensors]
    for lengths in ([1, 1, 1, 1], [9, 9, 9, 9], [4 * CHUNK]):
        assert not BUILDER.refill(reserved, scattered(lengths))
    assert all(torch.equal(*pair) for pair in zip(reserved.tensors, before, strict=True))


def test_a_smaller_batch_leaves_zeros_in_place_of_the_one_before() -> None:
    reserved = BUILDER.reserve(4, 200)
    assert BUILDER.refill(reserved, scattered([100, 1, 1, 9]))
    assert BUILDER.refill(reserved, scattered([2]))
    assert reserved.few.tolist()[1:] == [[0] * FIELDS] * 3
    assert not reserved.many.any()
    assert not reserved.chunks.any()
