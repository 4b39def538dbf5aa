"""Tile lists: every pair of a query row and a key that it sees is computed once, in bounded pieces."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.attention.tiles import (
    DeviceTilesBuilder,
    TileList,
    split_evenly,
    split_to_stream,
    tile_list,
)

SPLIT_UNIT = 64


def make_segments(lengths_and_stops: list[tuple[int, int]]) -> Segments:
    lengths = [length for length, _ in lengths_and_stops]
    return Segments(
        query_start=np.cumsum([0, *lengths]).astype(np.int32),
        context_stop=np.array([stop for _, stop in lengths_and_stops], np.int32),
        row=np.arange(len(lengths), dtype=np.int32) + 3,
    )


def make_tiles(segments: Segments, *, group_size: int = 4, block_m: int = 16, work_target: int = 10) -> TileList:
    chosen = np.ones(len(segments.row), bool)
    split_for = partial(split_to_stream, heads=4, processors=work_target, spare=work_target, unit=SPLIT_UNIT)
    return tile_list(segments, chosen, group_size=group_size, block_m=block_m, split_for=split_for)


segment_lists = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 2000)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    min_size=1,
    max_size=12,
).map(make_segments)


@given(segments=segment_lists, group_size=st.sampled_from([1, 3, 4, 8]), work_target=st.integers(1, 200))
def test_pieces_cover_each_row_and_key_once(segments: Segments, group_size: int, work_target: int) -> None:
    tiles = make_tiles(segments, group_size=group_size, work_target=work_target)
    covered: dict[tuple[int, int], list[range]] = {}
    for token, rows, start, table_row, first_row, first_key, stop_key, _ in tiles.work.tolist():
        segment = segments.query_start.tolist().index(token)
        assert rows == segments.query_length[segment] * group_size
        assert start + rows // group_size == segments.context_stop[segment]
        assert table_row == segments.row[segment]
        covered.setdefault((segment, first_row), []).append(range(first_key, stop_key))
    for segment, length in enumerate(segments.query_length.tolist()):
        for first_row in range(0, length * group_size, tiles.block_m):
            pieces = sorted(covered.pop((segment, first_row)), key=lambda piece: piece.start)
            last_row = min(first_row + tiles.block_m, length * group_size) - 1
            keys = int(segments.context_stop[segment]) - length + last_row // group_size + 1
            assert [key for piece in pieces for key in piece] == list(range(keys))
    assert not covered


@given(segments=segment_lists, work_target=st.integers(1, 200))
def test_cutting_adds_at_most_the_target_number_of_pieces(segments: Segments, work_target: int) -> None:
    tiles = make_tiles(segments, work_target=work_target)
    uncut = int((-(-segments.query_length * 4 // tiles.block_m)).sum())
    assert len(tiles.work) <= uncut + work_target
    assert (tiles.work[:, 5] % SPLIT_UNIT == 0).all()


@given(segments=segment_lists, work_target=st.integers(1, 200))
def test_each_partial_result_is_merged_once(segments: Segments, work_target: int) -> None:
    tiles = make_tiles(segments, work_target=work_target)
    named = []
    for token, rows, first_row, first_partial, count, *_ in tiles.merges.tolist():
        assert count > 1
        same = (tiles.work[:, [0, 1, 4]] == (token, rows, first_row)).all(1)
        own = sorted((tiles.work[same, 7] - 1).tolist())
        assert own == list(range(first_partial, first_partial + count))
        named += own
    assert sorted(named) == list(range(tiles.partials))
    assert (tiles.work[:, 7] > 0).sum() == tiles.partials


def test_longest_pieces_come_first() -> None:
    tiles = make_tiles(make_segments([(1, 50), (1, 700), (40, 300), (1, 3)]), work_target=1)
    keys = tiles.work[:, 6] - tiles.work[:, 5]
    assert (np.diff(keys) <= 0).all()


@pytest.mark.parametrize("chosen", [[True, False, True], [False, False, False]])
def test_only_chosen_segments_get_tiles(chosen: list[bool]) -> None:
    segments = make_segments([(1, 50), (5, 70), (1, 9)])
    tiles = tile_list(segments, np.array(chosen), group_size=4, block_m=16, split_for=lambda keys: SPLIT_UNIT)
    starts = segments.query_start[:-1][np.array(chosen)]
    assert set(tiles.work[:, 0].tolist()) == set(starts.tolist())


tile_lengths = st.lists(st.integers(1, 20_000), min_size=1, max_size=80).map(lambda keys: np.array(keys, np.int32))


@given(keys=tile_lengths, heads=st.sampled_from([1, 2, 8]), spare=st.integers(0, 40))
def test_an_even_split_is_a_multiple_of_the_unit_and_makes_few_pieces(keys: np.ndarray, heads: int, spare: int) -> None:
    split = split_evenly(keys, heads=heads, processors=132, spare=spare, unit=128)
    assert split > 0 and split % 128 == 0
    assert (-(-keys // split)).sum() <= len(keys) + spare


@example(keys=np.array([449, 449, 653, 449, 449], np.int32), heads=1, spare=4)
@given(keys=tile_lengths, heads=st.sampled_from([1, 2, 8]), spare=st.integers(0, 40))
def test_a_split_to_stream_is_a_multiple_of_the_unit_and_makes_few_pieces(
    keys: np.ndarray, heads: int, spare: int
) -> None:
    split = split_to_stream(keys, heads=heads, processors=132, spare=spare, unit=64)
    assert split > 0 and split % 64 == 0
    assert (-(-keys // split)).sum() <= len(keys) + spare


def test_few_contexts_are_cut_until_programs_saturate_memory() -> None:
    split = partial(split_to_stream, heads=8, processors=132, spare=66, unit=64)
    assert split(np.full(32, 600)) == 640  # 256 programs: two to a processor, and no merge
    assert split(np.full(8, 2048)) == 512  # 64 would be too few; 256 of a quarter
    assert split(np.full(1, 8192)) == 256
    assert split(np.full(1, 640)) == 64
    assert split(np.full(128, 3000)) == 3008
    assert split(np.array([600] * 31 + [9000])) == 832  # a long one among short ones


def test_long_contexts_in_a_crowd_are_cut_for_three_programs_to_a_processor() -> None:
    split = partial(split_to_stream, heads=8, processors=132, spare=66, unit=64)
    some, crowd = np.array([600] * 64 + [3000] * 2), np.array([600] * 65 + [3000] * 2)
    assert split(some) == split(some, crowd_streams=2) == 1024  # four to a processor: no crowd
    assert (split(crowd), split(crowd, crowd_streams=2)) == (768, 1024)
    assert split(np.full(128, 600)) == 640  # alike, so none is cut, and there is no merge


@pytest.mark.parametrize(("partial_keys", "longest"), [(None, 1024), (64, 1536)])
def test_only_kernels_whose_launch_fits_a_crowd_cut_for_one(partial_keys: int | None, longest: int) -> None:
    builder = DeviceTilesBuilder(
        device=torch.device("cpu"),
        num_processors=132,
        num_kv_heads=8,
        group_size=4,
        narrow_m=16,
        wide_m=128,
        partial_keys=partial_keys,
        most_partials=200,
    )
    (tiles,) = builder.build(make_segments([(1, 600)] * 100 + [(1, 3000)] * 2))
    assert int((tiles.work[:, 6] - tiles.work[:, 5]).max()) == longest


def test_tiles_are_cut_where_a_last_round_would_leave_most_processors_idle() -> None:
    split = partial(split_evenly, heads=8, processors=132, spare=33, unit=128)
    assert split(np.full(19, 8192)) == 4096  # 152 items: the second round would have 20
    assert split(np.full(16, 8192)) == 8192  # 128 items: one round
    assert split(np.full(1, 16384)) == 1024  # 8 items: 128 pieces
    assert split(np.full(64, 8192)) == 8192  # 512 items: nearly four rounds, and no room for twice as many
