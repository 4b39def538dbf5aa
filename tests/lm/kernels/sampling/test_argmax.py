"""The kernels that find the best token of a row, or of a part of it: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.sampling.sample import best_tokens, sample
from holdfast.lm.kernels.sampling.sample_kernels import PIECE, argmax, best_drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 3), (3, PIECE), (2, PIECE + 1), (5, 3 * PIECE + 100)])
def test_argmax_equals_numpy(rows: int, vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)).to(device, dtype)
    expected = logits.cpu().numpy().argmax(-1)
    assert argmax(logits).tolist() == expected.tolist()


def test_the_lowest_among_equals_wins_within_a_piece_and_between_pieces(device: str) -> None:
    logits = torch.zeros(3, 3 * PIECE, device=device)
    logits[1, [7, 9, PIECE + 2]] = 1
    logits[2, [PIECE + 5, 2 * PIECE + 1]] = 2
    assert argmax(logits).tolist() == [0, 7, PIECE + 5]


def test_a_row_of_minus_infinity_gives_its_first_token(device: str) -> None:
    assert argmax(torch.full((1, 2 * PIECE - 3), -torch.inf, device=device)).tolist() == [0]


@pytest.mark.gpu
def test_a_row_of_nan_stays_within_the_vocabulary() -> None:
    logits = torch.full((1, 2 * PIECE - 3), torch.nan, device="cuda")
    assert 0 <= int(argmax(logits)) < logits.shape[1]


def test_argmax_of_strided_rows_and_of_no_rows(device: str) -> None:
    wide = torch.zeros(2, 20, device=device)
    wide[:, 15] = 5
    wide[1, 3] = 1
    assert argmax(wide[:, :10]).tolist() == [0, 3]
    assert argmax(wide[:0]).shape == (0,)


@pytest.mark.parametrize("any_random", [False, True])
@pytest.mark.parametrize("vocab", [40, PIECE + 17])
def test_the_best_of_two_parts_is_the_token_of_the_whole_row(vocab: int, any_random: bool, device: str) -> None:
    rows, share = 6, vocab // 2 + 1
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    temperature = torch.tensor([0.0, 1.0, 0.5] * 2) if any_random else torch.zeros(rows)
    records = temperature, torch.arange(rows) * 7919, torch.arange(rows) + 3
    on_device = [record.to(device) for record in records]
    parts = []
    for first in (0, share):
        part = logits[:, first : first + share]
        found = best_drawn(part.to(device), *on_device, any_random=any_random, first=first)
        parts.append([each.cpu() for each in found])
        scores, tokens = best_tokens(part, *records, any_random=any_random, first=first)
        torch.testing.assert_close(parts[-1][0], scores, rtol=1e-5, atol=1e-5)
        assert torch.equal(parts[-1][1], tokens)
    (low, low_token), (high, high_token) = parts
    no_filters = torch.zeros(rows, dtype=torch.int32), torch.ones(rows)
    whole = sample(logits, temperature, *no_filters, *records[1:], any_random=any_random, any_filtered=False)
    assert torch.equal(torch.where(high > low, high_token, low_token), whole)
    assert not any_random or (whole != logits.argmax(-1)).any()
