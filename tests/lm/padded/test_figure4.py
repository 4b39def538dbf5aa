"""Vector shaping gives the tensors of Baton's Figure 4: three queries, query 2 ends, and query 3 of 2 tokens joins.

The paper prints them for a batch that has generated for a while. Here query 0 has 4 tokens in the state, query 1 has 3
after one placeholder, and query 2, which ends, has 2 after two.
"""

import pytest
import torch

from holdfast.lm.padded import shaping
from tests.lm.padded.echo import decode, echo_rows, keys_of, shape

QUERIES = [(0, (10, 11, 12)), (1, (20, 21)), (2, (30,))]
LAST = {0: (13, 14), 1: (22, 23), 2: (31, 32)}
"""The two tokens that each query has sampled."""
QUERY3 = (3, (40, 41))


def batch_of_figure_4(*, compact):
    """The batch after query 2 has ended: all have decoded once, and know one more token."""
    echo, batch = echo_rows(compact=compact)
    shape(echo, batch, *QUERIES)
    for number in range(2):
        batch.set_last([*LAST], [tokens[number] for tokens in LAST.values()])
        if number == 0:
            decode(echo, batch)
    assert keys_of(batch.state) == [[10, 11, 12, 13], [0, 20, 21, 22], [0, 0, 30, 31]]
    batch.drop(2)
    return echo, batch


def test_the_tensors_of_a_shaped_forward_are_those_of_the_figure():
    last = torch.tensor([14, 23, 32])
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]])
    inputs = shaping.shaped_inputs(last, mask, torch.tensor([4, 3, 2]), {2: (40, 41)})
    assert inputs.ids.tolist() == [[14, 0], [23, 0], [40, 41]]
    assert inputs.mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert inputs.positions.tolist() == [[4, 4], [3, 3], [0, 1]]
    assert inputs.columns.tolist() == [0, 0, 1]


def test_a_newcomer_may_take_any_slot_and_several_are_aligned_at_their_ends():
    last = torch.tensor([14, 23, 32])
    mask = torch.tensor([[1, 1], [0, 1], [1, 1]])
    inputs = shaping.shaped_inputs(last, mask, torch.tensor([2, 1, 2]), {0: (40,), 1: (50, 51, 52)})
    assert inputs.ids.tolist() == [[0, 0, 40], [50, 51, 52], [32, 0, 0]]
    assert inputs.mask.tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert inputs.positions.tolist() == [[0, 0, 0], [0, 1, 2], [2, 2, 2]]
    assert inputs.columns.tolist() == [2, 2, 0]


def test_the_state_after_the_forward_is_that_of_the_figure():
    echo, batch = batch_of_figure_4(compact=False)
    inputs = shape(echo, batch, QUERY3)
    assert inputs.ids.tolist() == [[14, 0], [23, 0], [40, 41]]
    assert inputs.mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert keys_of(batch.state) == [[10, 11, 12, 13, 14, 0], [0, 20, 21, 22, 23, 0], [0, 0, 0, 0, 40, 41]]
    assert (batch.rows, batch.lengths, batch.width) == ([0, 1, 3], [5, 4, 2], 6)
    batch.check()


def test_positions_count_the_tokens_that_are_not_masked_after_shaping():
    echo, batch = batch_of_figure_4(compact=False)
    shape(echo, batch, QUERY3)
    for _ in range(3):
        inputs = decode(echo, batch)
        assert inputs.positions[:, 0].tolist() == (inputs.mask.sum(1) - 1).tolist()
    assert inputs.mask.tolist()[:2] == [[1, 1, 1, 1, 1, 0, 1, 1, 1], [0, 1, 1, 1, 1, 0, 1, 1, 1]]


def test_leading_placeholders_of_all_rows_are_cut_before_an_insertion():
    echo, batch = batch_of_figure_4(compact=False)
    shape(echo, batch, QUERY3)
    batch.drop(0)  # index is 1 and 4 in what stays
    inputs = shape(echo, batch, (4, (50, 51)))
    assert inputs.mask.tolist() == [[0, 0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1]]
    assert keys_of(batch.state)[0] == [0, 0, 0, 40, 41, 0, 0]
    batch.check()


def test_a_compact_batch_ends_as_if_the_newcomer_had_been_embedded():
    echo, batch = batch_of_figure_4(compact=True)
    inputs = shape(echo, batch, QUERY3)
    assert inputs.mask.tolist() == [[1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1]]
    assert keys_of(batch.state) == [[10, 11, 12, 13, 14], [0, 20, 21, 22, 23], [0, 0, 0, 40, 41]]
    assert (batch.rows, batch.lengths, batch.width) == ([0, 1, 3], [5, 4, 2], 5)
    assert decode(echo, batch).mask.tolist() == [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
    batch.check()


@pytest.mark.parametrize("compact", [True, False])
def test_a_prompt_longer_than_the_batch_joins_it(compact):
    echo, batch = batch_of_figure_4(compact=compact)
    shape(echo, batch, (5, (1, 2, 3, 4, 5, 6, 7)))
    assert batch.lengths == [5, 4, 7]
    assert batch.width == (7 if compact else 11)
    assert keys_of(batch.state)[2][-7:] == [1, 2, 3, 4, 5, 6, 7]
    batch.check()
