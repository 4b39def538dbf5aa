"""The Triton kernel that copies many blocks between the device's cache and pinned host memory in one launch.

One layer's part of a block is about 32 KB, and the parts are not contiguous. Host memory is mapped, so a few programs
of the kernel read and write it over the bus. The copy engine could also copy all parts in one call, and faster during a
prefill. But then the few bytes that every step uploads and downloads would wait for the whole copy.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS_IN, PROGRAMS_OUT = 6, 2
"""Number of programs that read host memory, and number that write it: just enough to fill the bus.

The model keeps the other processors. A program waits for its reads but not for its writes, so more writers would delay
the model's own writes.
"""
TILE = 32768
"""Bytes that a program has in flight."""
WARPS = 8


# These arguments must not cause a new compilation. Counts change from step to step. The target numbers follow the
# source numbers, so their alignment changes with the count. Strides change with the number of blocks, and so from start
# to start. Triton only looks at whether 16 divides them, which shows how reads are aligned.
@triton.jit(do_not_specialize=["source_blocks", "target_blocks", "count", "pieces"])
def _copy_blocks(
    source, target, source_blocks, target_blocks, count, pieces,
    source_part, source_block, target_part, target_block, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Copy runs of RUN contiguous elements: for each of `count` blocks, one run for each layer's keys and values."""
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        block, part = piece % count, (piece // count).to(tl.int64)
        from_block = tl.load(source_blocks + block)
        to_block = tl.load(target_blocks + block)
        read = source + part * source_part + from_block * source_block
        write = target + part * target_part + to_block * target_block
        for first in range(0, RUN, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(write + at, tl.load(read + at, mask=at < RUN), mask=at < RUN)


def copy_runs(
    source: torch.Tensor, source_blocks: torch.Tensor, target: torch.Tensor, target_blocks: torch.Tensor
) -> None:
    """Copy blocks from a group of layers of one KV cache to that of another.

    Each group is [layers, planes, num_blocks, ...], laid out by `KVCache.allocate_layers`, on the device or in pinned
    host memory. Both have the same layers. The block numbers, int64 [n], are on the device.
    """
    run = source[0, 0, 0].numel()
    count = len(source_blocks)
    pieces = source.shape[0] * source.shape[1] * count
    programs = PROGRAMS_OUT if target.device.type == "cpu" else PROGRAMS_IN
    _copy_blocks[(min(programs, pieces),)](
        source,
        target,
        source_blocks,
        target_blocks,
        count,
        pieces,
        source.stride(1),
        source.stride(2),
        target.stride(1),
        target.stride(2),
        RUN=run,
        TILE=min(TILE // source.element_size(), triton.next_power_of_2(run)),
        num_warps=WARPS,
    )
