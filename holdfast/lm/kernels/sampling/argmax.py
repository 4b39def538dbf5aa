"""The likeliest token of each row on CUDA, in two kernels: the best of each piece of a row, then of these."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE = 4096
"""Logits that one program compares; a row has enough pieces to read it at the memory's rate."""


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The lowest of the likeliest tokens of each row of logits [B, V], as [B] int64. A row of NaN gives some token."""
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    best = torch.empty(rows, pieces, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, pieces, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        best_of_piece_kernel[(rows, pieces)](logits, best, token, vocab, logits.stride(0), BLOCK=PIECE, num_warps=4)
        best_of_row_kernel[(rows,)](best, token, out, pieces, BLOCK=triton.next_power_of_2(pieces), num_warps=1)
    return out


@triton.jit
def best_of_piece_kernel(logits, best, token, vocab, stride, BLOCK: tl.constexpr):
    """The largest logit of a piece and the lowest token that has it: program (row, piece)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    top, first = tl.max(value, 0, return_indices=True, return_indices_tie_break_left=True)
    place = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + place, top)
    tl.store(token + place, tl.minimum(tl.program_id(1) * BLOCK + first, vocab - 1))


@triton.jit
def best_of_row_kernel(best, token, out, pieces, BLOCK: tl.constexpr):
    """The token of the first of a row's best pieces: program (row)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(best + row * pieces + at, mask=at < pieces, other=float("-inf"))
    piece = tl.minimum(tl.argmax(value, 0), pieces - 1)
    tl.store(out + row, tl.load(token + row * pieces + piece).to(tl.int64))
