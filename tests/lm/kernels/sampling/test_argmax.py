"""The argmax kernels of greedy sampling: interpreted without a GPU, compiled with one."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.sampling.sample_kernels import PIECE, argmax


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
