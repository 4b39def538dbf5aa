"""Vector embedding gives the tensors of Baton's Figure 5: a prefilled state joins a batch that is longer or shorter."""

import pytest
import torch

from holdfast.lm.padded import running_rows
from tests.lm.padded.echo import decode, echo_rows, keys_of, shape


def batch_of_two(*, compact):
    echo, batch = echo_rows(compact=compact)
    shape(echo, batch, (0, (10, 11, 12, 13)), (1, (20, 21, 22)))
    return echo, batch


def state_of(*tokens):
    return {"keys": torch.tensor(tokens, dtype=torch.float32)[None, :, None]}


@pytest.mark.parametrize("compact", [True, False])
def test_a_shorter_state_is_aligned_at_the_end_of_its_row(compact):
    echo, batch = batch_of_two(compact=compact)
    batch.embed(7, state_of(40, 41), 2)
    assert keys_of(batch.state) == [[10, 11, 12, 13], [0, 20, 21, 22], [0, 0, 40, 41]]
    assert (batch.rows, batch.lengths, batch.width) == ([0, 1, 7], [4, 3, 2], 4)
    batch.set_last([0, 1, 7], [14, 23, 42])
    inputs = decode(echo, batch)
    assert inputs.ids.tolist() == [[14], [23], [42]]
    assert inputs.mask.tolist() == [[1, 1, 1, 1, 1], [0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    assert inputs.positions.tolist() == [[4], [3], [2]]
    batch.check()


@pytest.mark.parametrize("compact", [True, False])
def test_for_a_longer_state_all_rows_are_extended_in_front(compact):
    echo, batch = batch_of_two(compact=compact)
    batch.embed(7, state_of(40, 41, 42, 43, 44, 45), 6)
    assert keys_of(batch.state) == [[0, 0, 10, 11, 12, 13], [0, 0, 0, 20, 21, 22], [40, 41, 42, 43, 44, 45]]
    assert (batch.rows, batch.lengths, batch.width) == ([0, 1, 7], [4, 3, 6], 6)
    inputs = decode(echo, batch)
    assert inputs.mask.tolist() == [[0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]
    batch.check()


def test_the_mask_says_where_an_embedded_state_lies():
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    assert running_rows.embedded_mask(mask, 2, 2).tolist() == [[1, 1, 1], [0, 1, 1], [0, 1, 1]]
    assert running_rows.embedded_mask(mask, 0, 1).tolist() == [[0, 0, 1], [0, 1, 1]]
    assert running_rows.embedded_mask(mask, 1, 4).tolist() == [[0, 1, 1, 1], [1, 1, 1, 1]]
    assert mask.tolist() == [[1, 1, 1], [0, 1, 1]]


def test_the_mask_of_a_compact_batch_follows_from_the_lengths():
    assert running_rows.right_aligned(torch.tensor([3, 1, 2]), 3).tolist() == [[1, 1, 1], [0, 0, 1], [0, 1, 1]]
