"""The Triton kernel that completes a step's inputs on the device: block table entries and pending tokens."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256
"""Number of tokens, and of table entries, that one program handles."""


def write_step_inputs(
    ids: torch.Tensor,
    token_rows: torch.Tensor,
    drawn: torch.Tensor,
    tables: torch.Tensor,
    write_at: torch.Tensor,
    write_block: torch.Tensor,
) -> None:
    """Replace ids [T] below 0 by drawn[token_rows, -1 - id], and write write_block [W] at tables[write_at].

    `write_at` indexes the flattened tables. A place may occur twice if the block is the same. Tables are int32 of any
    shape; all others are int64; all are contiguous. This is not a programmatic dependent launch, because the next
    kernels may read the tables before they wait for the previous kernel.
    """
    count = max(len(ids), len(write_at))
    write_step_inputs_kernel[(triton.cdiv(count, BLOCK),)](
        ids, token_rows, drawn, tables, write_at, write_block, len(ids), len(write_at), drawn.shape[1], BLOCK=BLOCK
    )


@triton.jit(do_not_specialize=["tokens", "entries", "width"])
def write_step_inputs_kernel(
    ids, token_rows, drawn, tables, write_at, write_block, tokens, entries, width, BLOCK: tl.constexpr
):
    """Complete BLOCK tokens and BLOCK table entries. Program (BLOCK tokens and table entries)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + at, mask=at < tokens, other=0)
    asked = token < 0
    row = tl.load(token_rows + at, mask=asked, other=0)
    tl.store(ids + at, tl.load(drawn + row * width - 1 - token, mask=asked, other=0), mask=asked)
    entry = at < entries
    place = tl.load(write_at + at, mask=entry, other=0)
    block = tl.load(write_block + at, mask=entry, other=0)
    tl.store(tables + place, block.to(tl.int32), mask=entry)
