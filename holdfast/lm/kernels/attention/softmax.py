"""The online softmax of a tile's rows over its keys, shared by the Triton kernels of attention."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin_rows(sinks, head, row, rows, first_key, BLOCK_M: tl.constexpr):
    """The maximum score (top) and the sum of weights (total), both [M], before the first key; from the sinks, if any.

    A sink counts once, in the first part of the context.
    """
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    if sinks is not None:
        counted = row < tl.where(first_key == 0, rows, 0)
        top = tl.load(sinks + head, mask=counted, other=float("-inf")).to(tl.float32) * LOG2_E
    total = tl.where(top == float("-inf"), 0.0, 1.0)
    return top, total


@triton.jit
def capped(scores, scale, softcap, HAS_SOFTCAP: tl.constexpr):
    """Scores [M, N] from query-key products, and the factor that turns them into exponents of 2.

    With a softcap, `scale` already includes 1 / softcap.
    """
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1) is correct at both infinities
        scores = 1.0 - 2.0 / (tl.exp2(scores * (scale * 2.0 * LOG2_E)) + 1.0)
        unit = softcap * LOG2_E
    else:
        unit = scale * LOG2_E
    return scores, unit


@triton.jit
def weigh(scores, unit, top, total):
    """One step: weights [M, N] of scores [M, N], the new top and total [M], and the factor on earlier sums [M]."""
    new_top = tl.maximum(top, tl.max(scores, 1) * unit)  # scaled here, to fuse with the subtraction
    # A row that has seen no key has no top. Any number will do, since all its weights are zero.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * unit - base[:, None])
    fade = tl.exp2(top - base)
    total = total * fade + tl.sum(weights, 1)
    return weights, new_top, total, fade


@triton.jit
def put_rows(
    acc,
    top,
    total,
    partial,
    kv_head,
    batch_token,
    head,
    real,
    out,
    partial_out,
    partial_log,
    out_stride_token,
    out_stride_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEADS_AXIS: tl.constexpr,
):
    """Store the tile's result in `out`, or as partial result `partial` - 1 with the logarithm of its sum.

    The grid has the KV heads on its axis HEADS_AXIS.
    """
    dim = tl.arange(0, BLOCK_D)
    held = real[:, None] & (dim < HEAD_DIM)[None, :]
    # If a part of the context is wholly outside a row's window, its total is 0 and its top stays -inf.
    total = tl.where(total == 0.0, 1.0, total)
    result = acc / total[:, None]
    if partial == 0:
        out_at = out + (batch_token * out_stride_token + head * out_stride_head)[:, None] + dim[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=held)
    else:
        place = ((partial - 1).to(tl.int64) * tl.num_programs(HEADS_AXIS) + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], result, mask=held)
        tl.store(partial_log + place, top + tl.log2(total), mask=real)
