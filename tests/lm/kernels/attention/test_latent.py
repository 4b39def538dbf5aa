"""Latent attention by PyTorch and by Triton against the float64 oracle: interpreted without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from holdfast.lm.kernels.attention.backends import attention_of_layers, latent_attention_for
from holdfast.lm.kernels.attention.latent import MOST_HEADS, PagedLatentAttention, heads_at_a_time
from holdfast.lm.kernels.attention.protocol import Attention
from holdfast.lm.kernels.attention.torch_latent import TorchLatentAttention
from holdfast.lm.kernels.cache.kv_cache import KVShape
from holdfast.lm.kernels.fp8 import FP8
from tests.lm.kernels.attention_oracle import Batch, make_batch, oracle

RANK, ROTATED = 24, 8
MIXED = [(3, 0, 37), (0, 49, 50), (1, 20, 61), (4, 0, 1), (2, 0, 9), (2, 30, 42), (5, 199, 200)]


def latent_batch(segments: list[tuple[int, int, int]], *, rank: int = RANK, rotated: int = ROTATED, **options) -> Batch:
    """A batch with one KV head, whose values are its keys."""
    batch = make_batch(segments, kv_heads=1, head_dim=rank + rotated, **options)
    return replace(batch, contexts={row: (keys, keys) for row, (keys, _) in batch.contexts.items()})


def triton_attention(batch: Batch, num_processors: int = 4, rank: int = RANK) -> PagedLatentAttention:
    _, heads, width = batch.query.shape
    sizes = dict(num_heads=heads, head_dim=width, rank=rank, block_size=batch.key_cache.shape[1])
    return PagedLatentAttention(device=batch.query.device, num_processors=num_processors, **sizes)


def attend(attention: Attention, batch: Batch, scale: float = 0.25) -> torch.Tensor:
    """Write the step's keys, then attend, as a layer does. No value is ever written."""
    metadata = attention.make_metadata(batch.segments)
    values = batch.value_cache[..., :0]
    attention.write(batch.key, batch.value[..., :0], batch.key_cache, values, batch.slot_mapping)
    return attention.attend(batch.query, batch.key_cache, values, batch.block_tables, metadata, scale=scale)


def assert_exact(found: torch.Tensor, batch: Batch, scale: float = 0.25, rank: int = RANK) -> None:
    assert found.shape == (*batch.query.shape[:2], rank)
    torch.testing.assert_close(found.double().cpu(), oracle(batch, scale=scale)[..., :rank], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "block_size"), [(1, 1), (4, 16), (5, 5), (20, 16), (128, 16)])
def test_a_mixed_batch_equals_the_oracle(heads: int, block_size: int, device: str) -> None:
    segments = MIXED if heads < 100 else MIXED[1:4]
    batch = latent_batch(segments, heads=heads, block_size=block_size, device=device)
    assert_exact(attend(triton_attention(batch), batch), batch)


@pytest.mark.parametrize(("rank", "rotated"), [(16, 4), (40, 16), (32, 32)])
def test_ranks_and_rotated_widths_of_any_size_equal_the_oracle(rank: int, rotated: int, device: str) -> None:
    batch = latent_batch(MIXED, rank=rank, rotated=rotated, block_size=5, device=device)
    assert_exact(attend(triton_attention(batch, rank=rank), batch), batch, rank=rank)


def test_merged_parts_of_a_context_equal_the_oracle(device: str) -> None:
    batch = latent_batch([(0, 599, 600), (1, 269, 270), (2, 1240, 1280), (3, 4, 5)], device=device)
    attention = triton_attention(batch, num_processors=40)
    assert all(len(tiles.merges) for tiles in attention.make_metadata(batch.segments))
    assert_exact(attend(attention, batch), batch)


@pytest.mark.parametrize("tokens", [None, 64])
def test_reserved_metadata_serves_smaller_batches(tokens: int | None, device: str) -> None:
    batch = latent_batch([(0, 399, 400), (1, 7, 9), (2, 0, 3)], device=device)
    attention = triton_attention(batch, num_processors=16)
    values = batch.value_cache[..., :0]
    attention.write(batch.key, values, batch.key_cache, values, batch.slot_mapping)
    metadata = attention.reserve(16, tokens)
    assert attention.refill(metadata, batch.segments)
    found = attention.attend(batch.query, batch.key_cache, values, batch.block_tables, metadata, scale=0.25)
    assert_exact(found, batch)


def test_a_negative_slot_is_not_written(device: str) -> None:
    batch = latent_batch([(0, 0, 3)], device=device)
    slots = torch.tensor([-1, 5, -1], device=device)
    before, cache, after = memory = torch.zeros(3, *batch.key_cache.shape, device=device)
    triton_attention(batch).write(batch.key, batch.value, cache, batch.value_cache, slots)
    assert torch.equal(cache.flatten(0, 1)[5], batch.key[1])
    assert not before.any() and not after.any()
    assert int(memory.count_nonzero()) == RANK + ROTATED


@pytest.mark.parametrize("options", [{"window": 4}, {"softcap": 1.0}, {"sinks": torch.zeros(4)}])
def test_windows_caps_and_sinks_are_refused(options: dict[str, object], device: str) -> None:
    batch = latent_batch([(0, 0, 3)], device=device)
    attention = triton_attention(batch)
    metadata = attention.make_metadata(batch.segments)
    with pytest.raises(ValueError, match="latent attention has no windows, caps or sinks"):
        attention.attend(
            batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, scale=1.0, **options
        )


@pytest.mark.parametrize("heads", [1, 16, 20, 48, 64, 128, 71])
def test_tiles_take_as_many_heads_as_fit_and_divide_them(heads: int) -> None:
    size = heads_at_a_time(heads)
    assert heads % size == 0 and size <= MOST_HEADS
    assert not any(heads % larger == 0 for larger in range(size + 1, min(heads, MOST_HEADS) + 1))


@pytest.mark.parametrize(("heads", "block_size"), [(1, 1), (4, 16), (20, 5)])
def test_pytorch_alone_equals_the_oracle(heads: int, block_size: int) -> None:
    batch = latent_batch(MIXED, heads=heads, block_size=block_size)
    sizes = dict(num_heads=heads, head_dim=RANK + ROTATED, rank=RANK, block_size=block_size)
    assert_exact(attend(TorchLatentAttention(device=torch.device("cpu"), **sizes), batch), batch)


def test_layers_with_a_latent_get_latent_attention() -> None:
    options = dict(num_heads=4, latent_rank=RANK, block_size=16)
    attention = attention_of_layers("cpu", (KVShape(1, RANK + ROTATED, 0),) * 3, **options)
    assert isinstance(attention, TorchLatentAttention)
    assert (attention.rank, attention.head_dim) == (RANK, RANK + ROTATED)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"cache_dtype": FP8}, "kv_cache_dtype is fp8, which latent attention does not have"),
        ({"backend": "vllm-flash-attn"}, "attention_backend is vllm-flash-attn, which has no latent attention"),
        ({"backend": "holdfast"}, "attention_backend is holdfast, which takes a GPU"),
    ],
)
def test_options_that_latent_attention_lacks_are_refused_by_name(options: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        latent_attention_for("cpu", num_heads=4, head_dim=32, rank=24, block_size=16, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 128])
def test_bfloat16_at_deepseeks_sizes_stays_near_the_oracle(heads: int) -> None:
    segments = [(0, 2999, 3000), (1, 500, 700), (2, 15, 16)]
    batch = latent_batch(segments, rank=512, rotated=64, heads=heads, dtype=torch.bfloat16, device="cuda")
    attention = triton_attention(batch, num_processors=132, rank=512)
    found, expected = attend(attention, batch, 0.05), oracle(batch, scale=0.05)[..., :512]
    assert (found.double().cpu() - expected).norm() < 1e-2 * expected.norm()
