"""The Triton kernels of a layer beside attention: norm, rotation with the cache write, gate, and thin products."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.cache.fp8_cache import stored
from holdfast.lm.kernels.dependent_launch import follow, release


@triton.jit
def norm_kernel(
    stream,
    partials,
    bias,
    weight,
    out,
    width,
    stream_stride,
    out_stride,
    eps,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """RMS norm of one token; before it, add PARTS partial sums [PARTS, T, width] and a bias to the stream in place.

    Program (token). The sum is taken in a fixed order and rounded once to the stream's type; that is what is normed.
    """
    release(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < width
    gain = tl.load(weight + at, mask=held, other=0.0).to(tl.float32)
    follow(CHAINED)
    stream_at = stream + token * stream_stride + at
    value = tl.load(stream_at, mask=held, other=0.0).to(tl.float32)
    if PARTS > 0 or bias is not None:
        added = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(PARTS):
            place = (part * tl.num_programs(0) + token) * width
            added += tl.load(partials + place + at, mask=held, other=0.0).to(tl.float32)
        if bias is not None:
            added += tl.load(bias + at, mask=held, other=0.0).to(tl.float32)
        rounded = (value + added).to(stream.dtype.element_ty)
        # Threads may hold copies of one element: all must have read it before one writes it.
        tl.debug_barrier()
        tl.store(stream_at, rounded, mask=held)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scaled = value * scale * gain
    tl.store(out + token * out_stride + at, scaled.to(out.dtype.element_ty), mask=held)


@triton.jit
def angles_kernel(
    positions, inverse_frequencies, cosine, sine, amplitude, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """Cosine and sine [T, HALF] of a position times each frequency: program (token)."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)
    inside = dim < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(inverse_frequencies + dim, mask=inside, other=0.0)
    tl.store(cosine + token * HALF + dim, tl.cos(angle) * amplitude, mask=inside)
    tl.store(sine + token * HALF + dim, tl.sin(angle) * amplitude, mask=inside)


@triton.jit
def rotate_write_kernel(
    qkv,
    cosine,
    sine,
    q_norm,
    k_norm,
    query,
    key_cache,
    value_cache,
    slot_mapping,
    qkv_stride,
    key_stride_block,
    key_stride_slot,
    key_stride_head,
    value_stride_block,
    value_stride_slot,
    value_stride_head,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Norm and turn queries and keys, and put keys and values into the cache: program (token, group of heads).

    A head is two halves of [BLOCK_HEADS, BLOCK_HALF] here. A negative slot is padding: nothing of it is written.
    """
    release(CHAINED)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    inside = dim < HALF
    held = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside[None, :]
    is_query = head < NUM_HEADS

    follow(CHAINED)
    first_at = qkv + token * qkv_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
    first = tl.load(first_at, mask=held, other=0.0).to(tl.float32)
    second = tl.load(first_at + HALF, mask=held, other=0.0).to(tl.float32)
    cos = tl.load(cosine + token * HALF + dim, mask=inside, other=0.0)[None, :]
    sin = tl.load(sine + token * HALF + dim, mask=inside, other=0.0)[None, :]
    a = first
    b = second
    if q_norm is not None:
        scale = tl.rsqrt(tl.sum(a * a + b * b, 1) / HEAD_DIM + eps)[:, None]
        q_first = tl.load(q_norm + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        q_second = tl.load(q_norm + HALF + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_first = tl.load(k_norm + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        k_second = tl.load(k_norm + HALF + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        a = a * scale * tl.where(is_query[:, None], q_first, k_first)
        b = b * scale * tl.where(is_query[:, None], q_second, k_second)
    turned_first = a * cos - b * sin
    turned_second = b * cos + a * sin

    query_at = query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    query_held = held & is_query[:, None]
    tl.store(query_at, turned_first.to(query.dtype.element_ty), mask=query_held)
    tl.store(query_at + HALF, turned_second.to(query.dtype.element_ty), mask=query_held)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block = (slot // BLOCK_SIZE).to(tl.int64)
        offset = slot % BLOCK_SIZE
        key_head = head - NUM_HEADS
        key_at = key_cache + block * key_stride_block + offset * key_stride_slot
        key_at = key_at + (key_head * key_stride_head)[:, None] + dim[None, :]
        key_held = held & ((key_head >= 0) & (key_head < NUM_KV_HEADS))[:, None]
        tl.store(key_at, stored(turned_first, key_cache.dtype.element_ty), mask=key_held)
        tl.store(key_at + HALF, stored(turned_second, key_cache.dtype.element_ty), mask=key_held)

        value_head = key_head - NUM_KV_HEADS
        value_at = value_cache + block * value_stride_block + offset * value_stride_slot
        value_at = value_at + (value_head * value_stride_head)[:, None] + dim[None, :]
        value_held = held & (value_head >= 0)[:, None]
        tl.store(value_at, stored(first, value_cache.dtype.element_ty), mask=value_held)
        tl.store(value_at + HALF, stored(second, value_cache.dtype.element_ty), mask=value_held)


@triton.jit
def silu_mul_kernel(gate_up, out, width, gate_up_stride, out_stride, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """silu(gate) * up of a row [gate, up] of 2 * width: program (token, part of the row)."""
    release(CHAINED)
    follow(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < width
    gate_at = gate_up + token * gate_up_stride + at
    gate = tl.load(gate_at, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=held, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * out_stride + at, result.to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["rows"])  # it only masks: one kernel for all counts of a BLOCK_M
def thin_linear_kernel(
    x,
    norm,
    weight,
    scale,
    bias,
    out,
    rows,
    outputs,
    inputs,
    part_length,
    x_stride,
    weight_stride,
    out_stride_part,
    out_stride,
    eps,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """x [rows, inputs] times weight transposed, for a few rows: program (BLOCK_N rows of weight, part).

    A part is `part_length` of the inputs, and has its own result in `out` [parts, rows, outputs]. GATED: weight has
    2 * outputs rows, gate over up, which a program takes in turns, and the result is silu(gate) * up. ADDED: the result
    is added to `out`. With a `norm`, for one token in one part, what is multiplied is the RMS norm of x times norm: its
    scale is a factor of the result, known when all of x has been read. With a `scale` [rows of weight], for one token,
    the weight is FP8, and the result's rows are multiplied with their scales.
    """
    if BLOCK_M > 1:
        release(CHAINED)
    token = tl.arange(0, BLOCK_M)
    TAKEN: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # outputs of this program
    item = tl.arange(0, BLOCK_N)
    # Outputs past the last read its rows again, which costs nothing and needs no mask.
    if GATED:
        row = tl.minimum(tl.program_id(0) * TAKEN + item // 2, outputs - 1) + item % 2 * outputs
    else:
        row = tl.minimum(tl.program_id(0) * TAKEN + item, outputs - 1)
    weight_at = weight + row.to(tl.int64)[:, None] * weight_stride
    begin = tl.program_id(1) * part_length
    follow(CHAINED)
    if BLOCK_M == 1:
        # One token: sums stay apart by column until the end, so that the loop only multiplies and adds.
        acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        squares = tl.zeros([BLOCK_K], tl.float32)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first in tl.range(begin, tl.minimum(inputs, begin + part_length), BLOCK_K, num_stages=STAGES):
        k = first + tl.arange(0, BLOCK_K)
        inside = k < inputs
        if EVEN:
            tile = tl.load(weight_at + k[None, :])
        else:
            tile = tl.load(weight_at + k[None, :], mask=inside[None, :], other=0.0)
        if BLOCK_M == 1:
            values = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
            if norm is not None:
                squares += values * values
                values *= tl.load(norm + k, mask=inside, other=0.0).to(tl.float32)
            acc += tile.to(tl.float32) * values[None, :]
        else:
            held = (token < rows)[None, :] & inside[:, None]
            values = tl.load(x + token[None, :] * x_stride + k[:, None], mask=held, other=0.0)
            acc = tl.dot(tile, values, acc, input_precision="ieee")
    if BLOCK_M == 1:
        # So many small programs share a processor that those of the next kernel, let in at the start, would crowd on
        # the processors that are free first.
        release(CHAINED)
        result = tl.sum(acc, 1)[:, None]
        if norm is not None:
            result *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
    else:
        result = acc
    if scale is not None:
        result *= tl.load(scale + row)[:, None]
    if bias is not None:
        result += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(result, (TAKEN, 2, BLOCK_M)), (0, 2, 1)))
        result = gate / (1.0 + tl.exp(-gate)) * up
    n = tl.program_id(0) * TAKEN + tl.arange(0, TAKEN)
    place = out + tl.program_id(1).to(tl.int64) * out_stride_part + token[None, :] * out_stride + n[:, None]
    written = (n < outputs)[:, None] & (token < rows)[None, :]
    if ADDED:
        result += tl.load(place, mask=written, other=0.0).to(tl.float32)
        # Threads may hold copies of one element: all must have read it before one writes it.
        tl.debug_barrier()
    tl.store(place, result.to(out.dtype.element_ty), mask=written)
