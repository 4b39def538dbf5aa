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


@triton.jit
def calculate(left, right, out, truths):
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    one, other = tl.load(left + rows), tl.load(right + columns.to(tl.int64))
    at = rows * 8 + columns
    tl.store(out + at, one + other)
    tl.store(out + at + 32, one * other)
    tl.store(out + at + 64, one - other)
    tl.store(out + at + 96, 3 - one * 2 + 0 * other)
    tl.store(truths + at, one < other)
    tl.store(truths + at + 32, 1 >= other + 0 * one)  # noqa: SIM300  # the number comes first


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.int32, torch.int32),
        (torch.int8, torch.int64),
        (torch.int32, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float32),
        (torch.float16, torch.float16),
        (torch.uint8, torch.uint8),
    ],
    ids=str,
)
def test_numbers_of_two_types_give_what_pytorch_gives(left: torch.dtype, right: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    one, other = (torch.randint(0, 11, (count,), generator=draw).to(kind) for count, kind in ((4, left), (8, right)))
    if left.is_floating_point:
        one -= 5.37
    a, b = one[:, None], other[None, :]
    wanted = torch.stack([a + b, a * b, a - b, 3 - a * 2 + 0 * b])
    out = torch.zeros(wanted.shape, dtype=torch.promote_types(left, right))
    truths = torch.zeros(2, 4, 8, dtype=torch.int32)
    kernel: Any = calculate
    kernel[(1,)](one, other, out, truths)
    assert torch.equal(out, wanted)
    assert torch.equal(truths.bool(), torch.stack([a < b, other[None, :] + 0 * a <= 1]))
