"""A plan's packed inputs: ids, positions, slots, block tables, pending tokens, sampling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from holdfast.lm.execution.batch import Batch, PackedStep
from holdfast.lm.types import GUESSED, PENDING, Sampling, Segment, StepPlan, TableWrite

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def make_batch(rows: int = 4, max_blocks: int = 8, max_tokens: int = 32, block_size: int = 4) -> Batch:
    return Batch(
        rows=rows, max_blocks=max_blocks, max_tokens=max_tokens, block_size=block_size, device=torch.device("cpu")
    )


def segment(row: int, start: int, tokens: tuple[int, ...], sampling: Sampling | None = None) -> Segment:
    return Segment(str(row), row, start, start + len(tokens), tokens, sampling)


def step(batch: Batch, *segments: Segment, writes: tuple[TableWrite, ...] = ()) -> PackedStep:
    return batch.enter(batch.stage(StepPlan(0, segments, writes)))


def test_segments_are_packed_without_padding() -> None:
    batch = make_batch()
    writes = (TableWrite(0, 0, (5, 2)), TableWrite(3, 0, (7,)))
    packed = step(batch, segment(0, 0, (10, 11, 12, 13, 14), GREEDY), segment(3, 0, (20, 21)), writes=writes)
    assert packed.ids.tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert packed.slot_mapping.tolist() == [20, 21, 22, 23, 8, 28, 29]
    assert packed.sample_at.tolist() == [4]
    assert packed.sample_rows.tolist() == [0]
    assert batch.block_tables[0, :2].tolist() == [5, 2]
    assert batch.block_tables[3, 0] == 7


def test_block_tables_persist_between_steps() -> None:
    batch = make_batch()
    step(batch, segment(1, 0, (1, 2, 3, 4)), writes=(TableWrite(1, 0, (6,)),))
    packed = step(batch, segment(1, 4, (5,)), writes=(TableWrite(1, 1, (3,)),))
    assert packed.slot_mapping.tolist() == [12]
    packed = step(batch, segment(1, 0, (9,)), writes=(TableWrite(1, 0, (2,)), TableWrite(1, 0, (4,))))
    assert packed.slot_mapping.tolist() == [16]
    assert batch.block_tables[1, :2].tolist() == [4, 3]


def test_two_segments_of_one_row_share_its_table() -> None:
    packed = step(make_batch(), segment(2, 0, (1,)), segment(2, 4, (2, 3)), writes=(TableWrite(2, 0, (1, 0)),))
    assert packed.positions.tolist() == [0, 4, 5]
    assert packed.slot_mapping.tolist() == [4, 0, 1]


def test_a_draft_is_sampled_after_each_of_its_last_tokens_as_its_positions_ask() -> None:
    seeded = replace(GREEDY, temperature=0.5, seed=9)
    batch, writes = make_batch(), (TableWrite(0, 0, (5, 2, 3)), TableWrite(3, 0, (7,)))
    segments = (segment(0, 4, (1, 2, 3, 4, 5), GREEDY), segment(3, 0, (6, 7)), segment(3, 2, (8,), seeded))
    packed = batch.enter(batch.stage(StepPlan(0, segments, writes, samples=(3, 1))))
    assert packed.sample_at.tolist() == [2, 3, 4, 7]
    assert packed.sample_rows.tolist() == [0, 0, 0, 3]
    assert packed.sample_position.tolist() == [7, 8, 9, 3]
    assert packed.sampling["seed"].tolist() == [0, 0, 0, 9]


def test_more_samples_than_there_is_room_for_are_refused() -> None:
    batch = make_batch(rows=2)
    plan = StepPlan(0, (segment(0, 0, (1, 2, 3), GREEDY),), (TableWrite(0, 0, (5,)),), samples=(3,))
    with pytest.raises(ValueError, match="draws 3 tokens; the batch holds 2"):
        batch.stage(plan)


def test_pending_tokens_are_the_last_sampled_of_their_row() -> None:
    batch = make_batch()
    batch.last_token.copy_(torch.tensor([100, 101, 102, 103]))
    writes = tuple(TableWrite(row, 0, (row,)) for row in range(4))
    packed = step(batch, segment(2, 0, (PENDING,)), segment(0, 0, (7,)), segment(1, 0, (PENDING,)), writes=writes)
    assert packed.ids.tolist() == [102, 7, 101]


def test_guessed_tokens_are_those_that_the_device_guessed_for_their_row() -> None:
    batch = Batch(rows=3, max_blocks=8, max_tokens=32, block_size=4, device=torch.device("cpu"), guesses=2)
    batch.drawn.copy_(torch.arange(100, 109).view(3, 3))
    writes = tuple(TableWrite(row, 0, (row,)) for row in range(3))
    packed = step(batch, segment(2, 0, (PENDING, GUESSED, GUESSED - 1)), segment(0, 0, (7, GUESSED)), writes=writes)
    assert packed.ids.tolist() == [106, 107, 108, 7, 101]
    assert batch.last_token.tolist() == [100, 103, 106]


def test_each_sampled_row_gets_its_own_sampling_record() -> None:
    warm = Sampling(temperature=0.5, top_k=3, top_p=0.75, seed=2**63 - 1)
    batch = make_batch()
    writes = tuple(TableWrite(row, 0, (row,)) for row in range(3))
    segments = (segment(0, 0, (1, 2), GREEDY), segment(1, 0, (3,)), segment(2, 0, (4, 5, 6), warm))
    staged = batch.stage(StepPlan(0, segments, writes))
    assert staged.any_random and staged.any_filtered
    packed = batch.enter(staged)
    assert packed.sampling["temperature"].tolist() == [0.0, 0.5]
    assert packed.sampling["top_k"].tolist() == [0, 3]
    assert packed.sampling["top_p"].tolist() == [1.0, 0.75]
    assert packed.sampling["seed"].tolist() == [0, 2**63 - 1]
    assert packed.sample_position.tolist() == [2, 3]
    assert packed.sample_at.tolist() == [1, 5]


def test_a_greedy_step_is_marked_as_not_random() -> None:
    batch = make_batch()
    staged = batch.stage(StepPlan(0, (segment(0, 0, (1,), GREEDY),), (TableWrite(0, 0, (1,)),)))
    assert not staged.any_random


def test_table_entries_beyond_the_buffer_are_written_too() -> None:
    batch = make_batch(rows=2, max_blocks=64, max_tokens=2, block_size=1)
    step(batch, segment(0, 63, (1,)), writes=(TableWrite(0, 0, tuple(range(64))),))
    assert batch.block_tables[0].tolist() == list(range(64))


def test_buffers_in_flight_are_not_shared() -> None:
    batch = make_batch()
    writes = (TableWrite(0, 0, (1,)),)
    first = batch.stage(StepPlan(0, (segment(0, 0, (1,)),), writes))
    second = batch.stage(StepPlan(1, (segment(0, 1, (2,)),)))
    assert batch.enter(first).ids.tolist() == [1]
    assert batch.enter(second).ids.tolist() == [2]
    batch.release(first)
    assert batch.stage(StepPlan(2, (segment(0, 2, (3,)),))).host is first.host


def test_plans_that_exceed_the_batch_are_refused() -> None:
    batch = make_batch()
    with pytest.raises(ValueError, match="has 33 tokens; the batch holds 32"):
        step(batch, segment(0, 0, (1,) * 33))
    with pytest.raises(ValueError, match="row 1 gets table entries up to 9; it has 8"):
        step(batch, segment(1, 0, (1,)), writes=(TableWrite(1, 7, (1, 2)),))
    with pytest.raises(ValueError, match="row 4 gets table entries; the batch has rows 0 to 3"):
        step(batch, segment(1, 0, (1,)), writes=(TableWrite(4, 0, (1,)),))
    with pytest.raises(ValueError, match="row 1 has no block for position 4"):
        step(batch, segment(1, 3, (1, 2)), writes=(TableWrite(1, 0, (1,)),))


def test_padding_tokens_write_no_slot() -> None:
    batch = make_batch()
    batch.last_token.copy_(torch.tensor([100, 101, 102, 103]))
    segments = (segment(2, 0, (PENDING,), GREEDY), segment(0, 0, (5, 6)))
    staged = batch.stage(StepPlan(0, segments, (TableWrite(2, 0, (4,)), TableWrite(0, 0, (3,)))))
    own = batch.upload(staged, 8, 4)
    padded = batch.apply(8, 4)
    assert own.ids.tolist() == [102, 5, 6]
    assert own.sample_rows.tolist() == [2]
    assert padded.ids.tolist() == [102, 5, 6, 0, 0, 0, 0, 0]
    assert padded.slot_mapping.tolist() == [16, 12, 13, -1, -1, -1, -1, -1]
    assert padded.sample_at.tolist() == [0, 0, 0, 0]
    assert batch.block_tables[[2, 0], 0].tolist() == [4, 3]
    assert batch.block_tables[[1, 3]].sum() == 0


@pytest.mark.parametrize("width", [8, 64])
def test_a_padded_step_writes_table_entries_beyond_its_room(width: int) -> None:
    batch = make_batch(rows=2, max_blocks=width, max_tokens=4, block_size=1)
    entries = tuple(range(1, width + 1))
    batch.upload(batch.stage(StepPlan(0, (segment(0, 0, (1,)),), (TableWrite(0, 0, entries),))), 4, 1)
    batch.apply(4, 1)
    assert batch.block_tables[0].tolist() == list(entries)
    assert batch.block_tables[1].sum() == 0


def test_a_cleared_batch_writes_nothing() -> None:
    batch = make_batch()
    batch.upload(batch.stage(StepPlan(0, (segment(1, 0, (5,)),), (TableWrite(1, 0, (3,)),))), 4, 4)
    batch.clear()
    assert batch.apply(4, 4).slot_mapping.tolist() == [-1] * 4
    assert batch.block_tables[:4].sum() == 0


@pytest.mark.parametrize(
    ("drawn", "random", "filtered"),
    [
        ({"temperature": 1.0}, True, False),
        ({"temperature": 1.0, "top_k": 3}, True, True),
        ({"temperature": 1.0, "top_p": 0.9}, True, True),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.9}, True, True),
        ({"top_k": 3, "top_p": 0.9}, False, False),
    ],
)
def test_either_of_top_k_and_top_p_filters_a_row_that_draws(
    drawn: dict[str, Any], random: bool, filtered: bool
) -> None:
    greedy, row = segment(0, 0, (1,), GREEDY), segment(1, 0, (1,), replace(GREEDY, **drawn))
    plan = StepPlan(0, (greedy, row), (TableWrite(0, 0, (0,)), TableWrite(1, 0, (1,))))
    staged = make_batch().stage(plan)
    assert (staged.any_random, staged.any_filtered) == (random, filtered)
