"""The work lists of recurrent layers, compared with the segments that they come from."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.kernels.recurrent.tiles import CHUNK, EXACT_CHUNK, FEW, FIELDS, MOST_MANY, WorkListsBuilder, work_lists
from tests.lm.kernels.recurrent_oracle import scattered

BUILDER = WorkListsBuilder(torch.device("cpu"), CHUNK)
LENGTHS = st.lists(st.one_of(st.just(1), st.integers(1, 300)), min_size=1, max_size=20)


@given(LENGTHS, st.sampled_from([EXACT_CHUNK, CHUNK]))
def test_every_segment_is_in_one_list_and_every_long_one_is_cut_into_chunks(lengths: list[int], chunk: int) -> None:
    segments = scattered(lengths)
    few, many, chunks = (records.tolist() for records in work_lists(segments, chunk))
    expected = list(zip(segments.query_start.tolist(), lengths, segments.row.tolist(), strict=False))
    assert [tuple(record) for record in few] == [(*record, 0) for record in expected if record[1] <= FEW]
    assert sorted(tuple(record[:3]) for record in many) == [record for record in expected if record[1] > FEW]
    assert [record[1] for record in many] == sorted((record[1] for record in many), reverse=True)
    for first, length, slot, number in many:
        count = -(-length // chunk)
        assert chunks[number : number + count] == [[first, length, slot, chunk * index] for index in range(count)]
    assert len(chunks) == sum(-(-length // chunk) for length in lengths if length > FEW)


def test_of_too_many_long_segments_the_longest_are_cut_into_chunks() -> None:
    segments = scattered([30, 1, 200, 70, 70])
    few, many, chunks = work_lists(segments, CHUNK, most=2)
    assert few[:, 1].tolist() == [30, 1, 70]
    assert many[:, 1].tolist() == [200, 70]
    assert many[:, 0].tolist() == [31, 231]
    assert chunks[:, 1].tolist() == [200] * 4 + [70] * 2


def test_a_batch_of_more_long_segments_than_launches_have_room_for_fits() -> None:
    lengths = [FEW + 1] * (MOST_MANY + 5)
    reserved = BUILDER.reserve(len(lengths), sum(lengths))
    assert BUILDER.refill(reserved, scattered(lengths))
    assert len(reserved.many) == MOST_MANY
    assert (reserved.few[:5, 1] == FEW + 1).all()
    assert not reserved.few[5:].any()


@given(LENGTHS)
def test_any_batch_of_the_reserved_size_fits(lengths: list[int]) -> None:
    segments = scattered(lengths)
    reserved = BUILDER.reserve(len(lengths), sum(lengths))
    assert BUILDER.refill(reserved, segments)
    for place, records in zip(reserved.tensors, work_lists(segments, CHUNK), strict=True):
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
    for lengths in ([1, 1, 1, 1], [9] * 7, [4 * CHUNK]):
        assert not BUILDER.refill(reserved, scattered(lengths))
    assert all(torch.equal(*pair) for pair in zip(reserved.tensors, before, strict=True))


def test_a_smaller_batch_leaves_zeros_in_place_of_the_one_before() -> None:
    reserved = BUILDER.reserve(4, 200)
    assert BUILDER.refill(reserved, scattered([100, 1, 1, 9]))
    assert BUILDER.refill(reserved, scattered([2]))
    assert reserved.few.tolist()[1:] == [[0] * FIELDS] * 3
    assert not reserved.many.any()
    assert not reserved.chunks.any()
