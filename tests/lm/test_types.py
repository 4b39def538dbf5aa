"""The values of a plan: idle tokens by hand, bytes of rows, shapes that contradict themselves."""

from dataclasses import replace

import pytest

from holdfast.lm.types import (
    Abilities,
    EngineShape,
    Forward,
    RowBytes,
    RowPlan,
    RowShape,
    Segment,
    StepPlan,
    idle_tokens,
)

SIZES = dict(
    model="m",
    precision="float32",
    num_blocks=8,
    token_budget=8,
    max_step_tokens=8,
    max_model_len=8,
    vocab_size=9,
    tile=1,
)
ABILITIES = Abilities(chunks=True, left_padding=True, batched_decode=True, shaping=True, croppable=True)


def plan_of(lengths, forwards):
    segments = [Segment(str(row), row, 0, length, (1,) * length, None) for row, length in enumerate(lengths)]
    return StepPlan(0, segments, parts=(RowPlan(forwards=tuple(forwards)),))


def test_one_insertion_by_shaping_makes_the_idle_tokens_of_the_paper():
    for batch, length in ((2, 5), (8, 100), (4, 1)):
        plan = plan_of([1] * (batch - 1) + [length], [Forward(batch)])
        assert idle_tokens(plan) == (batch - 1) * (length - 1)


def test_decodes_alone_and_one_prompt_apart_make_no_idle_tokens():
    assert idle_tokens(plan_of([1, 1, 1, 40], [Forward(3), Forward(4, apart=True)])) == 0


def test_a_padded_group_is_idle_where_its_prompts_are_shorter_than_the_longest():
    assert idle_tokens(plan_of([3, 7, 5], [Forward(3, apart=True)])) == 4 + 0 + 2


def test_each_ended_row_is_idle_in_every_token_of_its_forward():
    assert idle_tokens(plan_of([1, 1], [Forward(2, ended=(5, 6, 7))])) == 3
    assert idle_tokens(plan_of([1, 4], [Forward(2, ended=(5,))])) == 3 + 4
    assert idle_tokens(plan_of([], [Forward(0, ended=(5, 6))])) == 2


def test_packed_segments_have_no_idle_tokens():
    assert idle_tokens(plan_of([1, 9, 3], [])) == 0


def test_a_window_bounds_the_bytes_of_a_long_row():
    bytes_of = RowBytes(fixed=100, growing=((8, None), (4, 10)))
    assert [bytes_of.of(length) for length in (0, 3, 10, 30)] == [100, 136, 220, 380]
    assert bytes_of.position == 12
    assert RowBytes(fixed=100).position == 100


def test_rows_count_their_memory_in_positions():
    assert RowShape(memory=1000, bytes=RowBytes(growing=((8, None),)), abilities=ABILITIES).positions == 125


@pytest.mark.parametrize("executor", ["paged", "padded"])
def test_a_shape_whose_rows_contradict_its_executor_is_refused(executor):
    rows = RowShape(memory=1000, bytes=RowBytes(fixed=8), abilities=ABILITIES) if executor == "paged" else None
    with pytest.raises(ValueError, match=f"executor is {executor} and rows are"):
        EngineShape(**SIZES, executor=executor, rows=rows)


def test_the_line_at_start_says_how_prompts_and_rows_run():
    def sentence(**changes):
        return Abilities(**dict.fromkeys(("chunks", "left_padding", "shaping", "croppable"), True) | changes).sentence

    assert sentence(batched_decode=True) == "prompts in chunks, rows decoded together"
    assert sentence(batched_decode=False, chunks=False) == "whole prompts, rows decoded one by one"
    assert "computed again" in sentence(batched_decode=False, keeps_state=False)


def test_abilities_say_whether_decodes_are_captured_and_why_not():
    able = Abilities(chunks=True, left_padding=True, batched_decode=True, shaping=True, croppable=True)
    assert able.sentence == "prompts in chunks, rows decoded together"
    assert replace(able, graphs=True).sentence == "prompts in chunks, rows decoded together, decodes captured"
    assert replace(able, not_captured="it waits").sentence.endswith(
        "rows decoded together, decodes not captured: it waits"
    )
