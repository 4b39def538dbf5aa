"""Rows that PyTorch computes one at a time on a CPU."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.rows import each_row


def test_each_row_is_computed_in_memory_of_its_own() -> None:
    seen: list[tuple[int, ...]] = []
    numbers, factors = torch.arange(12.0).view(3, 4)[:, :3], torch.tensor([1.0, 2.0, 3.0])

    def scaled(row: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        assert row.is_contiguous() and row.data_ptr() % 64 == 0
        seen.append(tuple(row.shape))
        return row.mul_(factor)

    before = numbers.clone()
    assert torch.equal(each_row(scaled, numbers, factors), before * factors[:, None])
    assert seen == [(1, 3)] * 3
    assert torch.equal(numbers, before)


def test_no_rows_give_no_rows() -> None:
    assert each_row(torch.neg, torch.empty(0, 5)).shape == (0, 5)
