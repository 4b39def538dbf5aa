"""The Triton kernel that keeps the inputs of drafted tokens, from which a later step computes the state."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy_numbers(source, target, stride, width, token, place, column):
    """Copy the numbers at `column` of a token in source [T, width] to its place in target [places, width]."""
    inside = column < width
    numbers = tl.load(source + token * stride + column, mask=inside)
    tl.store(target + place * width + column, numbers, mask=inside)


@triton.jit
def keep_kernel(
    work,
    source_1, target_1, stride_1, width_1, source_2, target_2, stride_2, width_2,
    source_3, target_3, stride_3, width_3, source_4, target_4, stride_4, width_4,
    source_5, target_5, stride_5, width_5,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token of `WorkLists.kept`, BLOCK numbers of each tensor. Program (part of the numbers, record).

    Each tensor has a source, a target, the source's stride by token, and the number of numbers of a token. Without a
    source there is nothing to copy.
    """
    record = work + tl.program_id(1) * 4
    if tl.load(record + 1) == 0:
        return
    token, place = tl.load(record).to(tl.int64), tl.load(record + 2).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    copy_numbers(source_1, target_1, stride_1, width_1, token, place, column)
    if source_2 is not None:
        copy_numbers(source_2, target_2, stride_2, width_2, token, place, column)
    if source_3 is not None:
        copy_numbers(source_3, target_3, stride_3, width_3, token, place, column)
    if source_4 is not None:
        copy_numbers(source_4, target_4, stride_4, width_4, token, place, column)
    if source_5 is not None:
        copy_numbers(source_5, target_5, stride_5, width_5, token, place, column)
