"""The Triton kernels around a gated delta rule: its decays and rates before, the gated norm after."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gates_kernel(
    time, rate, time_bias, decay, log_decay, beta, tokens, time_stride, rate_stride,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`Recurrence.gates`: log_decay and beta [T, HEADS]. Program (BLOCK numbers of each)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = (at // HEADS).to(tl.int64), at % HEADS
    held = token < tokens
    step = tl.load(time + token * time_stride + head, mask=held, other=0.0).to(tl.float32)
    step += tl.load(time_bias + head).to(tl.float32)
    # log(1 + exp(x)), without an exp that overflows
    soft = tl.maximum(step, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(step)))
    tl.store(log_decay + at, soft * tl.load(decay + head), mask=held)
    share = tl.load(rate + token * rate_stride + head, mask=held, other=0.0).to(tl.float32)
    tl.store(beta + at, (1.0 / (1.0 + tl.exp(-share))).to(beta.dtype.element_ty), mask=held)


@triton.jit
def gated_norm_kernel(
    x, gate, gain, out, heads, x_stride, x_stride_head, gate_stride, eps,
    DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`Recurrence.gated_norm`, as [T, heads * DIM]. Program (BLOCK_H heads, token)."""
    token = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    held = (head < heads)[:, None] & (dim < DIM)[None, :]
    place = head[:, None] * DIM + dim[None, :]
    x_at = x + token * x_stride + head[:, None] * x_stride_head + dim[None, :]
    number = tl.load(x_at, mask=held, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + place, mask=held, other=0.0).to(tl.float32)
    factor = tl.load(gain + dim, mask=dim < DIM, other=0.0).to(tl.float32)
    number *= tl.rsqrt(tl.sum(number * number, 1) / DIM + eps)[:, None]
    number *= factor[None, :] * opened / (1.0 + tl.exp(-opened))
    tl.store(out + token * heads * DIM + place, number.to(out.dtype.element_ty), mask=held)
