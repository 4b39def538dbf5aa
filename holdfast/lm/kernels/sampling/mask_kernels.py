"""The Triton kernel of masks, in which one bit for each token says whether a row may draw it."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Number of tokens that one program handles."""


def forbid_rows(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor, first: int) -> torch.Tensor:
    """`forbid` on CUDA: changes logits [R, V] in place, by masks [M, W] int32 of the rows `rows` [M] int64."""
    grid = (len(rows), triton.cdiv(logits.shape[1], BLOCK))
    forbid_kernel[grid](
        logits, masks, rows, logits.shape[1], first, logits.stride(0), masks.stride(0), BLOCK=BLOCK, num_warps=4
    )
    return logits


@triton.jit(do_not_specialize=["first"])
def forbid_kernel(logits, masks, rows, vocab, first, logits_stride, masks_stride, BLOCK: tl.constexpr):
    """Write -inf to the logits of tokens whose bit is not set, without reading a logit.

    Program (mask, piece of the row).
    """
    mask = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + mask)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = first + at
    word = tl.load(masks + mask * masks_stride + (token >> 5), mask=at < vocab, other=-1)
    forbidden = ((word >> (token & 31)) & 1) == 0
    nothing = tl.full([BLOCK], float("-inf"), logits.dtype.element_ty)
    tl.store(logits + row * logits_stride + at, nothing, mask=forbidden & (at < vocab))
