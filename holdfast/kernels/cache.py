"""The tensor that holds keys and values of all layers in blocks, and copies of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVCache:
    """Keys and values in one tensor [layers, 2, num_blocks, block_size, Hkv, D].

    A new cache is not cleared: the kernels never read a slot that was not written.
    """

    data: torch.Tensor

    @classmethod
    def allocate(
        cls,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """Take the memory of `num_blocks` blocks; `block_bytes` says how much one block is."""
        shape = (layers, 2, num_blocks, block_size, num_kv_heads, head_dim)
        return cls(torch.empty(shape, dtype=dtype, device=device))

    @property
    def num_blocks(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[3]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The key cache and the value cache of a layer, [num_blocks, block_size, Hkv, D], as views."""
        key, value = self.data[index]
        return key, value


def block_bytes(*, layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return 2 * layers * block_size * num_kv_heads * head_dim * dtype.itemsize


def write_slots(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """`Attention.write` by PyTorch, for slots that are all real."""
    key_cache.view(-1, *key.shape[1:]).index_copy_(0, slot_mapping, key)
    value_cache.view(-1, *value.shape[1:]).index_copy_(0, slot_mapping, value)


def copy_blocks(source: KVCache, source_blocks: torch.Tensor, target: KVCache, target_blocks: torch.Tensor) -> None:
    """Copy the blocks `source_blocks` [n] of one cache to `target_blocks` [n] of the same or another cache.

    All sources are read before any target is written, so the two may overlap within one cache. Both index tensors
    are int64, `source_blocks` on the source's device and `target_blocks` on the target's.
    """
    blocks = source.data.index_select(2, source_blocks)
    target.data.index_copy_(2, target_blocks, blocks.to(target.data.device, non_blocking=True))
