"""Baton's data sets: lengths, kinds and scale."""

import pytest

from benchmarks.lib import paper_workloads


def test_batons_first_data_set_has_a_quarter_of_long_prompts_and_a_quarter_of_long_answers():
    turns = [talk.turns[0] for talk in paper_workloads.baton_target_1(0)]
    kinds = [(turn.prompt >= 3600, turn.output >= 3600) for turn in turns]
    assert [kinds.count(kind) for kind in ((True, False), (False, True), (False, False))] == [30, 30, 60]
    lengths = [length for turn in turns for length in (turn.prompt, turn.output)]
    assert all(36 <= length <= 400 or 3600 <= length <= 4400 for length in lengths)
    assert kinds != sorted(kinds), "they come in random order"


def test_batons_second_data_set_is_short_in_both_directions():
    turns = [talk.turns[0] for talk in paper_workloads.baton_target_2(0)]
    assert len(turns) == 30
    assert all(36 <= length <= 200 for turn in turns for length in (turn.prompt, turn.output))


def test_batons_data_sets_depend_on_the_seed_alone_and_scale_every_length():
    assert paper_workloads.baton_target_1(3) == paper_workloads.baton_target_1(3) != paper_workloads.baton_target_1(4)
    plain, doubled = (paper_workloads.baton_target_1(3, scale=scale) for scale in (1.0, 2.0))
    assert all(abs(two.turns[0].output - 2 * one.turns[0].output) <= 1 for one, two in zip(plain, doubled, strict=True))


@pytest.mark.parametrize(
    ("draw", "options", "message"),
    [
        (paper_workloads.baton_target_1, {"count": 30}, "count is 30"),
        (paper_workloads.baton_target_2, {"count": 0}, "count is 0"),
        (paper_workloads.baton_target_1, {"scale": 0.0}, "scale is 0.0"),
    ],
)
def test_an_impossible_data_set_of_baton_is_refused(draw, options, message):
    with pytest.raises(ValueError, match=message):
        draw(0, **options)
