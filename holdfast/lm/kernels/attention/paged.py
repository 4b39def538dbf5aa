"""Paged multi-token attention on CUDA: which Triton kernels compute a step, and their launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from holdfast.lm.kernels.attention import prefill_kernel
from holdfast.lm.kernels.attention.decode_kernel import decode_kernel
from holdfast.lm.kernels.attention.protocol import CapturableAttention, Segments
from holdfast.lm.kernels.attention.segment_kernels import attend_kernel, merge_kernel, write_kernel
from holdfast.lm.kernels.attention.tiles import CROWD, DeviceTiles, DeviceTilesBuilder
from holdfast.lm.kernels.launch import SideStream, dependent_launch_options

FEW_TOKENS = 4
"""Largest number of tokens in a step for which each merge program has a processor to itself."""


@dataclass(frozen=True)
class Launch:
    """Launch settings for tiles of one height."""

    block_n: int
    num_warps: int
    num_stages: int


class PagedAttention(CapturableAttention[tuple[DeviceTiles, ...]]):
    """`Attention` in Triton: tiles packed over grouped heads, split over the context when queries are few.

    A batch has two kinds of tiles, each with its own launch. Narrow tiles are for decodes, which are bound by reading
    keys; wide tiles are for longer segments, which are bound by arithmetic. On Hopper, `prefill_kernel` computes the
    wide tiles of tensors that it supports. Records of zeros do nothing, so a captured launch of fixed size serves
    smaller batches.

    float16, bfloat16 and float32 are supported; float32 is computed exactly (no TF32). A negative slot in `write` is
    padding.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        num_processors: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        fp8_cache: bool = False,
    ) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_heads // num_kv_heads
        self.head_dim = head_dim
        self.block_d = max(16, triton.next_power_of_2(head_dim))
        self.block_size = block_size
        self.fp8_cache = fp8_cache
        self.num_processors = num_processors
        # The tensor cores of `prefill_kernel` read keys and values where the copy engine puts them, but FP8 would have
        # to
        # become float16 before that.
        self.on_hopper = not fp8_cache and prefill_kernel.supports(device, head_dim=head_dim, block_size=block_size)
        self.narrow_m = max(16, triton.next_power_of_2(self.group_size))
        # A tile's results are in registers, so larger heads take fewer rows.
        wide_m = prefill_kernel.BLOCK_M if self.on_hopper else 256 * 128 // max(128, self.block_d)
        self.tiles = DeviceTilesBuilder(
            device=device,
            num_processors=num_processors,
            num_kv_heads=num_kv_heads,
            group_size=self.group_size,
            narrow_m=self.narrow_m,
            wide_m=max(wide_m, self.narrow_m),
        )
        self._side_stream = SideStream(device)

    def make_metadata(self, segments: Segments) -> tuple[DeviceTiles, ...]:
        return self.tiles.build(segments)

    def reserve(self, segments: int, tokens: int | None = None) -> tuple[DeviceTiles, ...]:
        return self.tiles.reserve(segments, tokens)

    def refill(self, metadata: tuple[DeviceTiles, ...], segments: Segments) -> bool:
        return self.tiles.refill(metadata, segments)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_kernel[(len(slot_mapping),)](
            key,
            value,
            key_cache,
            value_cache,
            slot_mapping,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            NUM_KV_HEADS=self.num_kv_heads,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self.block_size,
            BLOCK=triton.next_power_of_2(self.num_kv_heads * self.head_dim),
        )

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        metadata: tuple[DeviceTiles, ...],
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = query.new_empty(query.shape)

        def attend(tiles: DeviceTiles, partials: tuple[torch.Tensor, torch.Tensor]) -> None:
            self._attend(
                query,
                key_cache,
                value_cache,
                block_tables,
                out,
                tiles,
                partials,
                scale=scale,
                window=window,
                chunked=chunked and window is not None,
                softcap=softcap,
                sinks=sinks,
            )

        # Allocate for both kinds before either runs. Memory freed in between could be reused while the side stream
        # still writes it.
        kinds = [(tiles, self._partials(query, tiles)) for tiles in metadata]
        if len(kinds) == 2:
            wide, narrow = kinds
            with self._side_stream.fork():
                attend(*wide)
            attend(*narrow)
            self._side_stream.join()
        else:
            for kind in kinds:
                attend(*kind)
        return out

    def _partials(self, query: torch.Tensor, tiles: DeviceTiles) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for partial results [P, Hkv, M, D] and the logarithms of their sums [P, Hkv, M]."""
        places = (tiles.partials, self.num_kv_heads, tiles.block_m)
        log = query.new_empty(places, dtype=torch.float32)
        return query.new_empty((*places, self.head_dim), dtype=torch.float32), log

    def _attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        out: torch.Tensor,
        tiles: DeviceTiles,
        partials: tuple[torch.Tensor, torch.Tensor],
        *,
        scale: float,
        window: int | None,
        chunked: bool,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Launch the tiles of one height, then merge those that were cut over the context."""
        tensors = (query, key_cache, value_cache, block_tables, tiles.work, sinks, out, *partials)
        launch = self.launch(tiles.block_m, query.element_size(), len(query))
        work_and_heads = (len(tiles.work), self.num_kv_heads)
        arguments = launched(*tensors, scale=scale, window=window, softcap=softcap)
        constants = dict(
            GROUP_SIZE=self.group_size,
            HEAD_DIM=self.head_dim,
            BLOCK_SIZE=self.block_size,
            BLOCK_M=tiles.block_m,
            BLOCK_N=launch.block_n,
            BLOCK_D=self.block_d,
            HAS_SOFTCAP=softcap is not None,
            HAS_WINDOW=window is not None,
            CHUNKED=chunked,
            num_warps=launch.num_warps,
        )
        # With a window no wider than one of its steps, that kernel is slower (benchmarks/kernels/attention_gpu.py). It
        # knows no chunks.
        on_hopper = self.on_hopper and not chunked and (window is None or window > prefill_kernel.BLOCK_N)
        if on_hopper and tiles.block_m == prefill_kernel.BLOCK_M and prefill_kernel.takes(query, key_cache):
            prefill_kernel.attend(
                *tensors, num_processors=self.num_processors, scale=scale, window=window, softcap=softcap
            )
        elif tiles.block_m == self.narrow_m:
            decode_kernel[work_and_heads[::-1]](
                *arguments, **constants, STAGES=launch.num_stages, **dependent_launch_options(query.device)
            )
        else:
            attend_kernel[work_and_heads](*arguments, **constants, num_stages=launch.num_stages)
        if len(tiles.merges):
            self._merge(tiles, partials, out)

    def _merge(self, tiles: DeviceTiles, partials: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        """Launch the merge of partial results."""
        alone = len(out) <= FEW_TOKENS
        block_s = 64 if alone else 16
        merge_kernel[(len(tiles.merges), tiles.merge_programs, self.num_kv_heads)](
            tiles.merges,
            *partials,
            out,
            *out.stride()[:2],
            GROUP_SIZE=self.group_size,
            HEAD_DIM=self.head_dim,
            BLOCK_M=tiles.block_m,
            BLOCK_D=self.block_d,
            BLOCK_S=block_s if self.block_d <= 256 else block_s // 2,  # so that a step stays in registers
            num_warps=4 if alone else 1,
            **dependent_launch_options(out.device),
        )

    def launch(self, block_m: int, item_bytes: int, tokens: int) -> Launch:
        """Launch settings that fit shared memory, tuned on an H200 (benchmarks/kernels/attention_gpu.py)."""
        wide = block_m > self.narrow_m
        # The fewer decode programs a processor has, the more each must have in flight.
        share = tokens * self.num_kv_heads / self.num_processors
        block_n = 64 if wide or self.fp8_cache or share <= CROWD else 32
        block_n = max(16, block_n * 128 // max(128, self.block_d))
        if item_bytes > 2:  # float32 runs without tensor cores: exact, not fast
            return Launch(block_n=max(16, block_n // 2), num_warps=8, num_stages=1)
        large = self.block_d > 256  # a fourth stage would not fit the shared memory of Ada, nor twice that of Hopper
        num_stages = 3 if wide or large or self.fp8_cache or 2 < share <= CROWD else 4
        return Launch(block_n=block_n, num_warps=8 if wide else 4, num_stages=num_stages)


def launched(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    work: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    *partials: torch.Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> tuple[Any, ...]:
    """The arguments of a kernel that attends: these tensors, their strides, and how scores are scaled and masked."""
    return (
        *(query, key_cache, value_cache, tables, work, sinks, out, *partials),
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride()[:2],
        tables.stride(0),
        scale if softcap is None else scale / softcap,
        softcap or 0.0,
        window or 0,
    )
