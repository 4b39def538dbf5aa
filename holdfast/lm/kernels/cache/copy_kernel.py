"""The Triton kernel that copies blocks between the device's cache and pinned host memory, many in one launch.

A block of one layer is some 32 KB that lie apart from the next block's. A few programs of a kernel read and write the
host's memory over the bus themselves, as it is mapped. The copy engine takes them in one call too, at a higher rate
beside a prefill, but the few bytes that every step brings in and takes out must then wait behind all of them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS_IN, PROGRAMS_OUT = 6, 2
"""As few as fill the bus, each with a whole run on its way, to leave the processors to the model. Reads of the host are
waited for and writes are not: more programs outwards hold up what the model itself writes."""
TILE = 32768
"""Bytes that a program has on their way."""
WARPS = 8


# Counts differ from step to step, and with them how the targets' numbers align, which lie behind the sources': neither
# must compile anew. Strides are the caches' own, and tell how reads align.
@triton.jit(do_not_specialize=["source_blocks", "target_blocks", "count", "pieces"])
def _copy_blocks(
    source,
    target,
    source_blocks,
    target_blocks,
    count,
    pieces,
    SOURCE_STRIDE: tl.constexpr,
    TARGET_STRIDE: tl.constexpr,
    RUN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copies runs of RUN contiguous elements: of each of `count` blocks, one for each layer's keys and values."""
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        block, part = piece % count, (piece // count).to(tl.int64)
        from_block = tl.load(source_blocks + block)
        to_block = tl.load(target_blocks + block)
        read = source + part * SOURCE_STRIDE + from_block * RUN
        write = target + part * TARGET_STRIDE + to_block * RUN
        for first in range(0, RUN, TILE):
            at = first + tl.arange(0, TILE)
            tl.store(write + at, tl.load(read + at, mask=at < RUN), mask=at < RUN)


def copy_runs(
    source: torch.Tensor, source_blocks: torch.Tensor, target: torch.Tensor, target_blocks: torch.Tensor
) -> None:
    """Copy blocks of one cache's data [layers, 2, num_blocks, ...] to another's; both contiguous, of equal layers.

    The data may lie on the device or in pinned host memory; the block numbers, int64 [n], on the device.
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
        SOURCE_STRIDE=source.stride(1),
        TARGET_STRIDE=target.stride(1),
        RUN=run,
        TILE=min(TILE // source.element_size(), triton.next_power_of_2(run)),
        num_warps=WARPS,
    )
