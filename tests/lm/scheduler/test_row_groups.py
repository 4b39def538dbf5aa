"""Groups of prompts by length: what a group may hold, and that every prompt is in one."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.scheduler.row_groups import group

LENGTHS = st.lists(st.integers(1, 5000), max_size=40)


def test_a_group_takes_shorter_prompts_while_padding_stays_below_a_quarter():
    assert group([100, 50, 100, 30], most=8) == [[0, 2, 1], [3]]  # 50 of 300 are padding, then 120 of 400
    assert group([100, 49, 1], most=8) == [[0], [1], [2]]  # 51 of 200


def test_a_group_is_no_larger_than_asked():
    assert group([7] * 5, most=2) == [[0, 1], [2, 3], [4]]


def test_prompts_of_one_length_alone_share_a_group_where_padding_is_wrong():
    assert group([7, 8, 7, 8, 9], most=8, unequal=False) == [[4], [1, 3], [0, 2]]


@given(LENGTHS, st.integers(1, 9), st.booleans())
def test_groups_go_by_falling_length_and_hold_every_prompt_once(lengths, most, unequal):
    groups = group(lengths, most=most, unequal=unequal)
    flat = [index for each in groups for index in each]
    assert sorted(flat) == list(range(len(lengths)))
    assert [lengths[index] for index in flat] == sorted(lengths, reverse=True)
    for each in groups:
        rectangle = len(each) * lengths[each[0]]
        idle = rectangle - sum(lengths[index] for index in each)
        assert 0 < len(each) <= most and idle <= (rectangle / 4 if unequal else 0)
