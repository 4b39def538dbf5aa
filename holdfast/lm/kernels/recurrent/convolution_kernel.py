"""The Triton kernel of causal depthwise convolutions, for decodes and long segments."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def convolution_kernel(
    x, weight, bias, state, work, out, channels,
    x_stride, weight_stride, state_stride, state_stride_channel, out_stride,
    WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, TILE: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """Tokens of one segment, for some channels. Program (channels, record of `WorkLists`); arguments as `convolve`'s.

    A program computes at most TILE tokens, or all of the segment if TILE is 0. The one of a segment's first tokens is
    the only one that reads the state, so it also writes the new one, unless the segment verifies a draft.
    """
    record = work + tl.program_id(1) * 4
    first = tl.load(record).to(tl.int64)
    length = tl.load(record + 1)
    if length == 0:
        return
    slot = tl.load(record + 2).to(tl.int64)
    moves = slot >= 0
    slot = tl.where(moves, slot, -1 - slot)
    state += slot * state_stride
    start = tl.load(record + 3)
    stop = length
    if TILE > 0:
        stop = tl.minimum(start + TILE, length)

    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < channels
    x += channel
    out += channel
    state_at = state + channel * state_stride_channel
    row = tl.arange(0, BLOCK_T)
    for at in range(start, stop, BLOCK_T):
        tile_x = x + (first + at) * x_stride
        real = at + row < stop
        sums = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
        if bias is not None:
            sums += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
        for offset in tl.static_range(WIDTH):
            source = row + (offset - WIDTH + 1)
            held = (real & (at + source >= 0))[:, None] & inside[None, :]
            number = tl.load(tile_x[None, :] + source[:, None] * x_stride, mask=held, other=0.0).to(tl.float32)
            if at < WIDTH - 1:  # only a segment's first tokens read the state
                # The inputs are added in their order, so that a sum has the same bits wherever a sequence is cut.
                before = at + row + offset
                held = (real & (before < WIDTH - 1))[:, None] & inside[None, :]
                number += tl.load(state_at[None, :] + before[:, None], mask=held, other=0.0).to(tl.float32)
            factor = tl.load(weight + channel * weight_stride + offset, mask=inside, other=0.0).to(tl.float32)
            sums += number * factor[None, :]
        if SILU:
            sums = sums / (1.0 + tl.exp(-sums))
        out_at = (out + (first + at) * out_stride)[None, :] + row[:, None] * out_stride
        tl.store(out_at, sums.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])

    if (start == 0) & moves:
        place = tl.arange(0, BLOCK_W)
        source = length - (WIDTH - 1) + place
        held = inside[:, None] & (place < WIDTH - 1)[None, :]
        of_step, of_state = held & (source >= 0)[None, :], held & (source < 0)[None, :]
        new = tl.load(x[:, None] + (first + source)[None, :] * x_stride, mask=of_step, other=0.0)
        new += tl.load(state_at[:, None] + (source + WIDTH - 1)[None, :], mask=of_state, other=0.0)
        # Threads read elements that others write, and all must read them before one writes.
        tl.debug_barrier()
        tl.store(state_at[:, None] + place[None, :], new, mask=held)
