"""The attention backend for a device."""

from __future__ import annotations

from typing import Any

import torch

from holdfast.kernels.cache import FP8
from holdfast.kernels.cpu import CpuAttention
from holdfast.kernels.protocol import Attention, Segments

__all__ = ["MAX_HEAD_DIM", "Attention", "Segments", "attention_for"]

MAX_HEAD_DIM = 256
"""What the tiles of the GPU kernels have room for."""


def attention_for(
    device: torch.device | str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
) -> Attention[Any]:
    """The backend that runs a model of these heads on `device`: Triton kernels on CUDA, PyTorch on a CPU.

    `cache_dtype` is that of the cache where it is not the model's own: FP8.
    Raises ValueError for heads that do not group, sizes out of range, or a device without a backend.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads; give a multiple")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; it must lie between 1 and {MAX_HEAD_DIM}")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    kind = torch.device(device).type
    if kind == "cpu":
        return CpuAttention(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    if kind == "cuda":
        # Triton comes with CUDA builds only, so that a CPU installation works without it.
        from holdfast.kernels.paged import PagedAttention

        return PagedAttention(
            device=torch.device(device),
            num_processors=torch.cuda.get_device_properties(device).multi_processor_count,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            fp8_cache=cache_dtype == FP8,
        )
    raise ValueError(f"there is no attention for device {device!s}; use cpu or cuda")
