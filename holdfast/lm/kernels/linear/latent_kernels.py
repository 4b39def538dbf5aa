"""The Triton kernel between the projections of latent attention: norm, rotation, and the write to the cache."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from holdfast.lm.kernels.launch import launch_dependents, wait_for_previous


@triton.jit
def rotate_write_latent_kernel(
    query, latent, cosine, sine, norm, cache, slot_mapping,
    query_stride_token, query_stride_head, latent_stride, cache_stride_block, cache_stride_slot, heads, eps,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Norm and write a token's latent, rotate and write its key, and rotate its queries in place.

    Program (token, group of heads). The first group's program also writes the cache. Queries and latents hold RANK
    numbers, and then two halves of HALF numbers that are rotated. A negative slot is padding and is not written.
    """
    launch_dependents(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    dim = tl.arange(0, BLOCK_HALF)
    inside = dim < HALF
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    held = (head < heads)[:, None] & inside[None, :]
    wait_for_previous(DEPENDENT)
    cos = tl.load(cosine + token * HALF + dim, mask=inside, other=0.0)
    sin = tl.load(sine + token * HALF + dim, mask=inside, other=0.0)
    query_at = query + token * query_stride_token + (head * query_stride_head)[:, None] + RANK + dim[None, :]
    first = tl.load(query_at, mask=held, other=0.0).to(tl.float32)
    second = tl.load(query_at + HALF, mask=held, other=0.0).to(tl.float32)
    tl.debug_barrier()  # several threads may hold the same element
    tl.store(query_at, (first * cos[None, :] - second * sin[None, :]).to(query.dtype.element_ty), mask=held)
    tl.store(query_at + HALF, (second * cos[None, :] + first * sin[None, :]).to(query.dtype.element_ty), mask=held)

    slot = tl.load(slot_mapping + token)
    if (slot >= 0) & (tl.program_id(1) == 0):
        place = cache + (slot // BLOCK_SIZE).to(tl.int64) * cache_stride_block + slot % BLOCK_SIZE * cache_stride_slot
        at = tl.arange(0, BLOCK_R)
        real = at < RANK
        row = latent + token * latent_stride
        numbers = tl.load(row + at, mask=real, other=0.0).to(tl.float32)
        gain = tl.load(norm + at, mask=real, other=0.0).to(tl.float32)
        numbers *= tl.rsqrt(tl.sum(numbers * numbers, 0) / RANK + eps) * gain
        tl.store(place + at, numbers.to(cache.dtype.element_ty), mask=real)
        a = tl.load(row + RANK + dim, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + RANK + HALF + dim, mask=inside, other=0.0).to(tl.float32)
        tl.store(place + RANK + dim, (a * cos - b * sin).to(cache.dtype.element_ty), mask=inside)
        tl.store(place + RANK + HALF + dim, (b * cos + a * sin).to(cache.dtype.element_ty), mask=inside)
