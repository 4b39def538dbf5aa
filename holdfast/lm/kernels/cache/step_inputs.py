"""What is left to do to a step's inputs on CUDA, in one kernel: table entries and pending tokens to their places."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 256
"""Tokens, and table entries, that one program takes."""


def settle(
    ids: torch.Tensor,
    token_rows: torch.Tensor,
    last_token: torch.Tensor,
    tables: torch.Tensor,
    write_at: torch.Tensor,
    write_block: torch.Tensor,
    *,
    pending: int,
) -> None:
    """Put last_token[token_rows] where ids [T] are `pending`, and write_block [W] at the places write_at of tables.

    All int64 and contiguous, but for tables, int32 of any shape. A place may occur twice with one block. An ordinary
    launch, not one of a chain: what comes after it may read the tables before it follows another kernel.
    """
    count = max(len(ids), len(write_at))
    settle_kernel[(triton.cdiv(count, BLOCK),)](
        ids, token_rows, last_token, tables, write_at, write_block, len(ids), len(write_at), pending, BLOCK=BLOCK
    )


@triton.jit(do_not_specialize=["tokens", "entries", "pending"])
def settle_kernel(
    ids, token_rows, last_token, tables, write_at, write_block, tokens, entries, pending, BLOCK: tl.constexpr
):
    """Program (BLOCK tokens and as many table entries)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    asked = tl.load(ids + at, mask=at < tokens, other=0) == pending
    asked = asked & (at < tokens)
    row = tl.load(token_rows + at, mask=asked, other=0)
    tl.store(ids + at, tl.load(last_token + row, mask=asked, other=0), mask=asked)
    entry = at < entries
    place = tl.load(write_at + at, mask=entry, other=0)
    block = tl.load(write_block + at, mask=entry, other=0)
    tl.store(tables + place, block.to(tl.int32), mask=entry)
