"""The choice of an attention backend, by device and by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.core.config import AttentionBackendName
from holdfast.lm.kernels.attention.flash_attention_3 import FlashAttention3, vllm_kernels
from holdfast.lm.kernels.attention.mixed_attention import mixed
from holdfast.lm.kernels.attention.protocol import Attention
from holdfast.lm.kernels.attention.torch_attention import TorchAttention
from holdfast.lm.kernels.attention.torch_latent import TorchLatentAttention
from holdfast.lm.kernels.cache.kv_cache import KVShape
from holdfast.lm.kernels.fp8 import FP8

FP8_CAPABILITY = (8, 9)
"""Lowest compute capability of GPUs that convert to and from e4m3. Triton compiles no such kernel for older ones."""
MAX_HEAD_DIM = 512
"""Largest head dimension that fits the tiles of the GPU kernels."""


def require(backend: AttentionBackendName, device: torch.device, *, fp8_cache: bool = False) -> None:
    """Raise ValueError if the backend does not support the device or its cache, or its package is not installed."""
    if device.type != "cuda" and backend in ("holdfast", "vllm-flash-attn"):
        raise ValueError(f"attention_backend is {backend}, which takes a GPU, and the device is {device}; choose auto")
    if backend == "vllm-flash-attn":
        vllm_kernels(device)
    ours = device.type == "cuda" and backend in ("auto", "holdfast")
    if ours and fp8_cache and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        least = ".".join(str(number) for number in FP8_CAPABILITY)
        raise ValueError(
            f"kv_cache_dtype is fp8, which takes a GPU of compute capability {least} (Ada, Hopper) or later; "
            f"{torch.cuda.get_device_name(device)} is older: leave it out, or choose the attention backend torch"
        )


def latent_attention_for(
    device: torch.device | str,
    *,
    num_heads: int,
    head_dim: int,
    rank: int,
    block_size: int,
    backend: AttentionBackendName = "auto",
    cache_dtype: torch.dtype | None = None,
) -> Attention[Any]:
    """The backend of latent attention, for keys of `head_dim` numbers of which the first `rank` are the value.

    Raises ValueError for an FP8 cache, and for a backend that has no latent attention. See `attention_for`.
    """
    device = torch.device(device)
    if cache_dtype == FP8:
        raise ValueError(
            "kv_cache_dtype is fp8, which latent attention does not have: its cache is already small; leave it out"
        )
    if backend == "vllm-flash-attn":
        raise ValueError("attention_backend is vllm-flash-attn, which has no latent attention; choose auto")
    require(backend, device)
    sizes = dict(num_heads=num_heads, head_dim=head_dim, rank=rank, block_size=block_size)
    if device.type == "cpu" or backend == "torch":
        return TorchLatentAttention(device=device, **sizes)
    # Imported here because a CPU installation has no Triton.
    from holdfast.lm.kernels.attention.latent import PagedLatentAttention

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return PagedLatentAttention(device=device, num_processors=processors, **sizes)


def attention_of_layers(
    device: torch.device | str,
    shapes: Sequence[KVShape],
    *,
    num_heads: int,
    latent_rank: int = 0,
    invariant: bool = False,
    **options: Any,
) -> Attention[Any]:
    """The attention backend for layers whose keys and values have these `shapes`.

    Layers of one shape share a backend. With a `latent_rank`, all layers have one shape, and the first `latent_rank`
    numbers of a key are its value. `invariant`, `options` and errors are those of `attention_for` and
    `latent_attention_for`.
    """
    if latent_rank:
        width = shapes[0].key_size
        return latent_attention_for(device, num_heads=num_heads, head_dim=width, rank=latent_rank, **options)
    options["invariant"] = invariant
    backends = {
        shape: attention_for(device, num_heads=num_heads, num_kv_heads=shape.heads, head_dim=shape.key_size, **options)
        for shape in dict.fromkeys(shapes)
    }
    return next(iter(backends.values())) if len(backends) == 1 else mixed(backends)


def attention_for(
    device: torch.device | str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    backend: AttentionBackendName = "auto",
    cache_dtype: torch.dtype | None = None,
    invariant: bool = False,
) -> Attention[Any]:
    """The attention backend for these heads on `device`. `auto` selects our kernels on CUDA, and PyTorch on a CPU.

    `cache_dtype` is FP8 or the model's dtype; None stands for the latter, whatever it is. `invariant`: the bits of a
    token's result must not depend on the other tokens of its step; on a CPU, the library's whole steps keep that.

    Raises ValueError for heads that cannot share KV heads evenly, sizes out of range, a device without a backend, or a
    backend that is not installed or does not support the device.
    """
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide among {num_kv_heads} KV heads; give a multiple")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim is {head_dim}; it must lie between 1 and {MAX_HEAD_DIM}")
    if block_size < 1:
        raise ValueError(f"block_size is {block_size}; it must be at least 1")
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"there is no attention for device {device!s}; use cpu or cuda")
    require(backend, device)
    sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size)
    if device.type == "cpu" or backend == "torch":
        return TorchAttention(device=device, **sizes, in_whole_steps=device.type == "cpu" and backend != "torch")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    # Imported here because a CPU installation has no Triton.
    if invariant:
        from holdfast.lm.kernels.attention.invariant import InvariantAttention

        dtype = cache_dtype or torch.float32
        return InvariantAttention(device=device, num_processors=processors, dtype=dtype, **sizes)
    from holdfast.lm.kernels.attention.paged import PagedAttention

    paged = PagedAttention(device=device, num_processors=processors, fp8_cache=cache_dtype == FP8, **sizes)
    if backend == "vllm-flash-attn":
        kernels = vllm_kernels(device)
        return FlashAttention3(kernels, paged, device=device, head_dim=head_dim, block_size=block_size)
    return paged
