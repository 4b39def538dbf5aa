"""The adapters of a step's tokens and sampled rows, as a batch packs them."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.execution.batch import Batch
from holdfast.lm.parts.adapters.inputs import AdapterInputs
from holdfast.lm.parts.adapters.values import AdapterPlan
from holdfast.lm.types import Sampling, Segment, StepPlan, TableWrite

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)


def batch() -> Batch:
    where = torch.device("cpu")
    inputs = AdapterInputs((), 3, max_tokens=16, samples=8, device=where)
    return Batch(rows=4, max_blocks=4, max_tokens=16, block_size=4, device=where, samples=8, inputs=inputs)


def plan(*slots: int, samples: tuple[int, ...] | None = None) -> StepPlan:
    length = 1 if samples is None else samples[0]
    segments = tuple(Segment(str(row), row, 0, length, (7,) * length, GREEDY) for row in range(len(slots)))
    writes = tuple(TableWrite(row, 0, (row,)) for row in range(len(slots)))
    return StepPlan(0, segments, writes, samples=samples, parts=(AdapterPlan(slots=slots),) if any(slots) else ())


def test_a_step_without_adapters_has_tokens_only() -> None:
    with_room = batch()
    assert (with_room.stage(plan(0, 0)).kind, with_room.stage(plan(0, 2)).kind) == (0, 1)


@pytest.mark.parametrize("head", [None, 8])
def test_tiles_of_rows_are_written_for_a_head_even_if_all_tokens_are_sampled(head: int | None) -> None:
    with_room = batch()
    staged = with_room.stage(plan(2, 1, samples=(2, 2)))
    assert staged.num_tokens == staged.num_sampled == 4
    arrays = staged.host.arrays
    arrays["adapted_rows_order"][:] = -1  # as an earlier step left it
    with_room.upload(staged, 8, 8, head)
    assert sorted(arrays["adapted_order"][:4].tolist()) == [0, 1, 2, 3]
    assert (-1 in arrays["adapted_rows_order"][:4].tolist()) is (head is None)
