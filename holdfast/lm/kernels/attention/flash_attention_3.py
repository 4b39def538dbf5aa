"""FlashAttention-3 over the paged cache, with the kernels of an installed vLLM."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.lm.kernels.attention.protocol import Attention, CapturableAttention, Segments

MODULE = "vllm.vllm_flash_attn.flash_attn_interface"
CAPABILITY = (9, 0)
BLOCK_SIZE_UNIT = 16
HEAD_DIM_UNIT = 8
MAX_HEAD_DIM = 256


def vllm_kernels(device: torch.device) -> Any:
    """vLLM's attention kernels. Raises ValueError if vLLM is not installed or does not support the device."""
    refused = "attention_backend is vllm-flash-attn, and {}; choose another, or auto"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != CAPABILITY:
        raise ValueError(refused.format(f"it takes a GPU of compute capability 9.0, which {device} is not"))
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise ValueError(refused.format(f"the package vllm is not installed here ({error})")) from None
    if not module.FA3_AVAILABLE:
        raise ValueError(refused.format(f"this vllm has no FlashAttention-3 ({module.FA3_UNAVAILABLE_REASON})"))
    return module


@dataclass(frozen=True)
class FlashMetadata:
    """The metadata of a batch of at most S segments. Unused entries have no queries and no keys."""

    query_start: torch.Tensor  # [S + 1] int32
    context_stop: torch.Tensor  # [S] int32
    row: torch.Tensor  # [S] int32
    longest: int  # largest number of query tokens in a segment
    furthest: int | None  # the largest context_stop; None: anywhere in the block table


class FlashAttention3(CapturableAttention[FlashMetadata]):
    """`Attention` with vLLM's build of FlashAttention-3 (Shah et al., 2024), for bfloat16 and float16 on Hopper.

    It reads the cache in place, in blocks of a multiple of 16 tokens. Another backend writes the cache.
    """

    def __init__(
        self, kernels: Any, writer: Attention[Any], *, device: torch.device, head_dim: int, block_size: int
    ) -> None:
        """Use the module `kernels`; `writer` writes the cache. Raises ValueError for sizes that are not supported."""
        if block_size % BLOCK_SIZE_UNIT or head_dim % HEAD_DIM_UNIT:
            raise ValueError(
                f"attention_backend is vllm-flash-attn, which takes blocks of a multiple of {BLOCK_SIZE_UNIT} and "
                f"heads of a multiple of {HEAD_DIM_UNIT}; block_size is {block_size}, head_dim {head_dim}"
            )
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(
                f"attention_backend is vllm-flash-attn, which takes heads of at most {MAX_HEAD_DIM}, and a layer has "
                f"heads of {head_dim}; choose auto"
            )
        self.device = device
        self.block_size = block_size
        self._attend = kernels.flash_attn_varlen_func
        self._writer = writer

    def make_metadata(self, segments: Segments) -> FlashMetadata:
        count = len(segments.row)
        metadata = self._empty(count, int(segments.query_length.max()), int(segments.context_stop.max()))
        self._fill(metadata, segments)
        return metadata

    def reserve(self, segments: int, tokens: int | None = None) -> FlashMetadata:
        return self._empty(segments, tokens or 1, None)

    def refill(self, metadata: FlashMetadata, segments: Segments) -> bool:
        if len(segments.row) > len(metadata.row) or segments.query_length.max() > metadata.longest:
            return False
        self._fill(metadata, segments)
        return True

    def _empty(self, segments: int, longest: int, furthest: int | None) -> FlashMetadata:
        """Metadata of an empty batch, all in one tensor, so that one copy fills it."""
        numbers = torch.zeros(3 * segments + 1, dtype=torch.int32, device=self.device)
        starts, stops, rows = torch.split(numbers, [segments + 1, segments, segments])
        return FlashMetadata(starts, stops, rows, longest, furthest)

    def _fill(self, metadata: FlashMetadata, segments: Segments) -> None:
        room, count = len(metadata.row), len(segments.row)
        host = torch.zeros(3 * room + 1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        starts, stops, rows = np.split(host.numpy(), [room + 1, 2 * room + 1])
        starts[: count + 1], starts[count + 1 :] = segments.query_start, segments.num_tokens
        stops[:count], rows[:count] = segments.context_stop, segments.row
        metadata.query_start.as_strided(host.shape, host.stride()).copy_(host, non_blocking=True)

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        self._writer.write(key, value, key_cache, value_cache, slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        metadata: FlashMetadata,
        *,
        scale: float,
        window: int | None = None,
        chunked: bool = False,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if query.dtype not in (torch.bfloat16, torch.float16) or key_cache.dtype != query.dtype:
            raise ValueError(
                "attention_backend is vllm-flash-attn, which takes bfloat16 or float16 and a cache of the same; the "
                f"model has {query.dtype}, the cache {key_cache.dtype}: choose another dtype, or auto"
            )
        if chunked and window is not None:
            raise ValueError(
                f"attention_backend is vllm-flash-attn, which knows no chunks, and the model has chunks of {window} "
                "positions: choose auto, or a max_model_len within one chunk"
            )
        attended: torch.Tensor = self._attend(
            query,
            key_cache,
            value_cache,
            max_seqlen_q=metadata.longest,
            cu_seqlens_q=metadata.query_start,
            max_seqlen_k=metadata.furthest or block_tables.shape[1] * self.block_size,
            seqused_k=metadata.context_stop,
            softmax_scale=scale,
            causal=True,
            window_size=None if window is None else [window - 1, 0],
            softcap=softcap or 0.0,
            block_table=block_tables.index_select(0, metadata.row),
            fa_version=3,
            s_aux=None if sinks is None else sinks.to(torch.bfloat16),  # the only dtype that it takes
        )
        return attended
