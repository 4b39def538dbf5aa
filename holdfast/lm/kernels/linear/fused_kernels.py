"""Triton kernels between the GEMMs of a layer: norm, rotation with the cache write, gate."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.fp8_conversion import to_cache_dtype
from holdfast.lm.kernels.launch import launch_dependents, wait_for_previous


@triton.jit(do_not_specialize=["first", "held_tokens"])
def embed_kernel(ids, embedding, out, first, held_tokens, width, stride, BLOCK: tl.constexpr):
    """The rows [T, width] of tokens `ids` of an embedding that holds the tokens from `first` on; else zeros.

    Program (token, part of the row).
    """
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(ids + token + tl.zeros([BLOCK], tl.int64)) - first
    held = (at < width) & (place >= 0) & (place < held_tokens)
    row = tl.load(embedding + place * stride + at, mask=held, other=0.0)
    tl.store(out + token * width + at, row, mask=at < width)


@triton.jit
def norm_kernel(
    stream, partials, bias, weight, out, width, stream_stride, out_stride, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Add PARTS partial sums [PARTS, T, width] and a bias to one token of the stream in place, then take its RMS norm.

    Program (token). The sum is taken in a fixed order and rounded once to the stream's dtype, before it is normed.
    """
    launch_dependents(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    held = at < width
    gain = tl.load(weight + at, mask=held, other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
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
        # Several threads may hold the same element, and all must read it before one writes it.
        tl.debug_barrier()
        tl.store(stream_at, rounded, mask=held)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scaled = value * scale * gain
    tl.store(out + token * out_stride + at, scaled.to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["tokens"])
def head_squares_kernel(
    qkv, out, tokens, q_width, k_width, stride, copies, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The sums of squares of a token's queries, and of its keys divided by `copies`: [T, 2] float32.

    Program (token). Programs from `tokens` on write zeros.
    """
    launch_dependents(DEPENDENT)
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    q_at = tl.arange(0, BLOCK_Q)
    k_at = tl.arange(0, BLOCK_K)
    row = qkv + token * stride
    held = tl.where(token < tokens, 1, 0)
    query = tl.load(row + q_at, mask=q_at < q_width * held, other=0.0).to(tl.float32)
    key = tl.load(row + q_width + k_at, mask=k_at < k_width * held, other=0.0).to(tl.float32)
    tl.store(out + 2 * token, tl.sum(query * query, 0))
    tl.store(out + 2 * token + 1, tl.sum(key * key, 0) / copies)


@triton.jit
def scale_heads_kernel(
    qkv, sums, q_norm, k_norm, q_width, k_width, whole_q, whole_k, stride, eps, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The RMS norms of a token's queries and of its keys, in place, by their `sums` of squares [T, 2].

    The sums cover `whole_q` and `whole_k` numbers. Program (token, part of the queries and keys).
    """
    launch_dependents(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_query = at < q_width
    held = at < q_width + k_width
    gain = tl.load(q_norm + at, mask=is_query, other=0.0).to(tl.float32)
    gain += tl.load(k_norm + at - q_width, mask=held & (at >= q_width), other=0.0).to(tl.float32)
    wait_for_previous(DEPENDENT)
    q_scale = tl.rsqrt(tl.load(sums + 2 * token) / whole_q + eps)
    k_scale = tl.rsqrt(tl.load(sums + 2 * token + 1) / whole_k + eps)
    place = qkv + token * stride + at
    value = tl.load(place, mask=held, other=0.0).to(tl.float32)
    scaled = value * tl.where(is_query, q_scale, k_scale) * gain
    tl.debug_barrier()  # several threads may hold the same element
    tl.store(place, scaled.to(qkv.dtype.element_ty), mask=held)


@triton.jit
def angles_kernel(
    positions, inverse_frequencies, cosine, sine, amplitude, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr
):
    """Cosine and sine [T, HALF] of a position times each frequency. Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)
    inside = dim < HALF
    frequency = tl.load(inverse_frequencies + dim, mask=inside, other=0.0)
    angle = tl.load(positions + token).to(tl.float32) * frequency
    factor = tl.where(frequency == 0.0, 1.0, amplitude)  # a pair that is not rotated keeps its size
    tl.store(cosine + token * HALF + dim, tl.cos(angle) * factor, mask=inside)
    tl.store(sine + token * HALF + dim, tl.sin(angle) * factor, mask=inside)


@triton.jit
def rotate_write_kernel(
    qkv, cosine, sine, q_norm, k_norm, query, key_cache, value_cache, slot_mapping,
    qkv_stride, key_stride_block, key_stride_slot, key_stride_head,
    value_stride_block, value_stride_slot, value_stride_head, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, UNIT_VALUES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm and rotate queries and keys, and write keys and values to the cache. Program (token, group of heads).

    Heads are held as two halves of [BLOCK_HEADS, BLOCK_HALF]. With UNIT_VALUES, values are normed without weights;
    q_norm is given then. A negative slot is padding and is not written.
    """
    launch_dependents(DEPENDENT)
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_HALF)
    inside = dim < HALF
    held = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & inside[None, :]
    is_query = head < NUM_HEADS

    wait_for_previous(DEPENDENT)
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
    rotated_first = a * cos - b * sin
    rotated_second = b * cos + a * sin

    query_at = query + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dim[None, :]
    query_held = held & is_query[:, None]
    tl.store(query_at, rotated_first.to(query.dtype.element_ty), mask=query_held)
    tl.store(query_at + HALF, rotated_second.to(query.dtype.element_ty), mask=query_held)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block = (slot // BLOCK_SIZE).to(tl.int64)
        offset = slot % BLOCK_SIZE
        key_head = head - NUM_HEADS
        key_at = key_cache + block * key_stride_block + offset * key_stride_slot
        key_at = key_at + (key_head * key_stride_head)[:, None] + dim[None, :]
        key_held = held & ((key_head >= 0) & (key_head < NUM_KV_HEADS))[:, None]
        tl.store(key_at, to_cache_dtype(rotated_first, key_cache.dtype.element_ty), mask=key_held)
        tl.store(key_at + HALF, to_cache_dtype(rotated_second, key_cache.dtype.element_ty), mask=key_held)

        value_head = key_head - NUM_KV_HEADS
        value_at = value_cache + block * value_stride_block + offset * value_stride_slot
        value_at = value_at + (value_head * value_stride_head)[:, None] + dim[None, :]
        value_held = held & (value_head >= 0)[:, None]
        if UNIT_VALUES:
            first *= scale
            second *= scale
        tl.store(value_at, to_cache_dtype(first, value_cache.dtype.element_ty), mask=value_held)
        tl.store(value_at + HALF, to_cache_dtype(second, value_cache.dtype.element_ty), mask=value_held)


@triton.jit
def silu_mul_kernel(gate_up, out, width, gate_up_stride, out_stride, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """silu(gate) * up of a row [gate, up] of 2 * width numbers. Program (token, part of the row)."""
    launch_dependents(DEPENDENT)
    wait_for_previous(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < width
    gate_at = gate_up + token * gate_up_stride + at
    gate = tl.load(gate_at, mask=held, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=held, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * out_stride + at, result.to(out.dtype.element_ty), mask=held)
