"""The interpreter that tests run Triton's kernels in: what it leaves out must not hide a wrong operand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton import language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@triton.jit
def combine(out, CASE: tl.constexpr):
    rows, columns = tl.arange(0, 4), tl.arange(0, 8)
    if CASE == "negative":
        tl.store(out + rows, rows.to(tl.uint32) + -1)
    elif CASE == "large":
        tl.store(out + rows, rows.to(tl.int8) + 1000)
    elif CASE == "fraction":
        tl.store(out + 1.5, 1)
    elif CASE == "fractions":
        tl.store(out + rows.to(tl.float32), 1)
    elif CASE == "pointers":
        tl.store(out + (out + rows), 1)
    elif CASE == "lengths":
        tl.store(out + rows, rows + columns)
    elif CASE == "sum":
        table = rows[:, None] * 10 + columns[None, :]
        tl.store(out + rows[:, None] * 8 + columns[None, :], 1 - (table - 0.5))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("negative", "unsigned tensor and a negative scalar"),
        ("large", "Scalar 1000 is out of range for type int8"),
        ("fraction", "invalid operands of type pointer"),
        ("fractions", "invalid operands of type pointer"),
        ("pointers", "cannot add pointers together"),
        ("lengths", "incompatible dimensions at index 0: 4 and 8"),
    ],
)
def test_operands_that_do_not_fit_are_refused_as_by_the_compiler(case: str, reason: str) -> None:
    with pytest.raises(Exception, match=reason):
        run(case)


def test_numbers_and_blocks_of_several_shapes_are_broadcast() -> None:
    rows, columns = torch.arange(4.0), torch.arange(8.0)
    assert torch.equal(run("sum")[:32].view(4, 8), 1.5 - (10 * rows[:, None] + columns))


def run(case: str) -> torch.Tensor:
    out = torch.zeros(64)
    kernel: Any = combine
    kernel[(1,)](out, case)
    return out
