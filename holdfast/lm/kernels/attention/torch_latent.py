"""Paged latent attention in plain PyTorch: one KV head, whose values are the first part of its keys."""

from __future__ import annotations

import torch

from holdfast.lm.kernels.attention.torch_attention import (
    Seen,
    TileMetadata,
    TorchAttention,
    from_cache_dtype,
    grouped_attention,
)


class TorchLatentAttention(TorchAttention):
    """`Attention` over latents (DeepSeek-V2, §2.1.2), with the tiles and groups of `TorchAttention`.

    Keys are [num_blocks, block_size, 1, rank + R]: a latent and a rotated key. A query's result is the weighted sum of
    latents, [T, H, rank]. The value cache is not read.
    """

    def __init__(self, *, device: torch.device, num_heads: int, head_dim: int, rank: int, block_size: int) -> None:
        """`head_dim` is the width of keys, and `rank` that of their first part, the latent."""
        super().__init__(device=device, num_heads=num_heads, num_kv_heads=1, head_dim=head_dim, block_size=block_size)
        self.rank = rank

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write keys [T, 1, rank + R], whose latents are normed, to their slots. Values are not kept."""
        key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        metadata: TileMetadata,
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [T, H, rank + R] as [T, H, rank]. See `Attention.attend`."""
        seen = Seen(window, chunked and window is not None)
        if seen not in metadata.groups:
            metadata.groups[seen] = list(self._groups(metadata, block_tables, seen, query.dtype))
        keys, size, dim = key_cache.view(-1, self.head_dim), self.group_size, self.head_dim
        out = query.new_empty(*query.shape[:2], self.rank)
        for group in metadata.groups[seen]:
            b, n = group.query_positions.shape
            key = from_cache_dtype(keys.index_select(0, group.key_slots), query.dtype).view(b, 1, -1, dim)
            mask = group.kept_mask
            if group.masked and mask is None:
                mask = self._mask(group, seen, query.dtype)
            attended = grouped_attention(
                query.index_select(0, group.query_tokens).view(b, 1, n * size, dim),
                key,
                key[..., : self.rank],
                mask,
                scale=scale,
                softcap=softcap,
                sinks=None if sinks is None else sinks.expand(n, size).reshape(1, -1),
            ).view(b * n, size, self.rank)
            real = slice(None) if group.real_queries is None else group.real_queries
            out.index_copy_(0, group.query_tokens[real], attended[real])
        return out
