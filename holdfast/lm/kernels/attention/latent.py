"""Paged latent attention on CUDA: tiles of query heads over one cache of latents, and their launches."""

from __future__ import annotations

import torch
import triton

from holdfast.lm.kernels.attention.latent_kernel import latent_kernel, write_latent_kernel
from holdfast.lm.kernels.attention.paged import Launch, PagedAttention
from holdfast.lm.kernels.attention.tiles import DeviceTiles

MOST_HEADS = 64
"""Largest number of heads in a tile. Its sums of latents stay in registers: 64 rows of 512 take half of them."""


class PagedLatentAttention(PagedAttention):
    """`Attention` over latents in Triton, for decode and prefill alike (DeepSeek-V2, §2.1.2).

    All query heads read one key per token, [rank + R] numbers, of which the first `rank` are also the value. A tile has
    some tokens times a group of heads, as if each group had a KV head of its own, so tiles are cut and merged as in
    `PagedAttention`. Groups that run together find each other's keys in the L2 cache. The value cache is not read.

    float16, bfloat16 and float32 are supported. A negative slot in `write` is padding.
    """

    def __init__(
        self, *, device: torch.device, num_processors: int, num_heads: int, head_dim: int, rank: int, block_size: int
    ) -> None:
        """`head_dim` is the width of keys, and `rank` that of their first part, the latent."""
        super().__init__(
            device=device,
            num_processors=num_processors,
            num_heads=num_heads,
            num_kv_heads=num_heads // heads_at_a_time(num_heads),
            head_dim=rank,
            block_size=block_size,
        )
        self._width = head_dim

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys [T, 1, rank + R], whose latents are normed, to their slots. Values are not kept."""
        write_latent_kernel[(len(slot_mapping),)](
            key,
            key_cache,
            slot_mapping,
            key.stride(0),
            *key_cache.stride()[:2],
            WIDTH=self._width,
            BLOCK_SIZE=self.block_size,
            BLOCK=triton.next_power_of_2(self._width),
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
        """Attention of query [T, H, rank + R] as [T, H, rank]. Raises ValueError for a window, a cap or sinks."""
        if window is not None or softcap is not None or sinks is not None:
            raise ValueError("latent attention has no windows, caps or sinks; leave them out")
        out = query.new_empty(*query.shape[:2], self.head_dim)
        for tiles in metadata:
            partials = self._partials(query, tiles)
            launch = self.launch(tiles.block_m, query.element_size(), len(query))
            latent_kernel[(self.num_kv_heads, len(tiles.work))](
                query,
                key_cache,
                block_tables,
                tiles.work,
                out,
                *partials,
                *query.stride()[:2],
                *key_cache.stride()[:2],
                *out.stride()[:2],
                block_tables.stride(0),
                scale,
                GROUP_SIZE=self.group_size,
                RANK=self.head_dim,
                ROTATED=self._width - self.head_dim,
                BLOCK_SIZE=self.block_size,
                BLOCK_M=tiles.block_m,
                BLOCK_N=launch.block_n,
                BLOCK_R=self.block_d,
                BLOCK_P=max(16, triton.next_power_of_2(self._width - self.head_dim)),
                STAGES=launch.num_stages,
                num_warps=launch.num_warps,
            )
            if len(tiles.merges):
                self._merge(tiles, partials, out)
        return out

    def launch(self, block_m: int, item_bytes: int, tokens: int) -> Launch:
        """Launch settings that fit the registers and the shared memory of a Hopper GPU, with a rank of 512."""
        if item_bytes > 2:  # float32 runs without tensor cores: exact, not fast
            return Launch(block_n=16, num_warps=16 if block_m > 32 else 8, num_stages=1)
        return Launch(block_n=32, num_warps=8 if block_m > 16 else 4, num_stages=2)


def heads_at_a_time(heads: int) -> int:
    """Number of query heads in a tile: the largest that divides `heads` and is at most MOST_HEADS."""
    return next(size for size in range(min(heads, MOST_HEADS), 0, -1) if heads % size == 0)
