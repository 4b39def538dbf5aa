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

    def pin(self) -> None:
        """Lock host memory in place and map it for the GPU. Raises MemoryError if the system does not allow it.

        PyTorch's own pinned tensors would take the next power of two.
        """
        data = self.data
        status = torch.cuda.cudart().cudaHostRegister(data.data_ptr(), data.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(status) != 0:
            raise MemoryError(
                f"{data.nbytes / 1e9:.1f} GB of host memory cannot be pinned (CUDA error {int(status)}); "
                "lower host_cache_gb, or raise the limit on locked memory (ulimit -l)"
            )

    def unpin(self) -> None:
        """Undo `pin`, before the memory is given back."""
        torch.cuda.cudart().cudaHostUnregister(self.data.data_ptr())  # type: ignore[no-untyped-call]

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


def copy_blocks(
    source: KVCache,
    source_blocks: torch.Tensor,
    target: KVCache,
    target_blocks: torch.Tensor,
    layers: slice = slice(None),
) -> None:
    """Copy the blocks `source_blocks` [n] of one cache to `target_blocks` [n] of the same or another cache.

    Both index tensors are int64. Between a GPU and the host, whose cache must be pinned, they lie on the GPU and the
    copy runs on its current stream. Elsewhere all sources are read before any target is written, so the two may
    overlap within one cache.
    """
    read, written = source.data[layers], target.data[layers]
    if read.device != written.device:
        # Triton comes with CUDA builds only, so that a CPU installation works without it.
        from holdfast.kernels.copies import copy_runs

        copy_runs(read, source_blocks, written, target_blocks)
    else:
        written.index_copy_(2, target_blocks, read.index_select(2, source_blocks))
