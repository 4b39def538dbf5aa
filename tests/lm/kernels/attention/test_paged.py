"""The Triton attention against the float64 oracle: under the interpreter without a GPU, compiled with one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from holdfast.lm.kernels.attention.backends import attention_for
from holdfast.lm.kernels.attention.paged import PagedAttention
from holdfast.lm.kernels.attention.tiles import FIELDS, DeviceTiles
from holdfast.lm.kernels.fp8 import FP8, LARGEST
from tests.lm.kernels.attention_oracle import Batch, make_batch, oracle


def make_attention(batch: Batch, num_processors: int = 4) -> PagedAttention:
    return PagedAttention(
        device=batch.query.device,
        num_processors=num_processors,
        num_heads=batch.query.shape[1],
        num_kv_heads=batch.key.shape[1],
        head_dim=batch.query.shape[2],
        block_size=batch.key_cache.shape[1],
        fp8_cache=batch.key_cache.dtype == FP8,
    )


def attend(batch: Batch, num_processors: int = 4, **options: object) -> torch.Tensor:
    """Write the step's keys, then attend, as a layer does."""
    attention = make_attention(batch, num_processors)
    metadata = attention.make_metadata(batch.segments)
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    return attention.attend(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, **options)


def assert_exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-5, atol=1e-5)


MIXED = [(3, 0, 37), (0, 49, 50), (1, 20, 61), (4, 0, 1), (2, 0, 9), (2, 30, 42), (5, 199, 200)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (4, 2, 16, 16),
        (1, 1, 16, 1),
        (6, 2, 40, 5),
        (8, 1, 80, 16),
        (4, 4, 96, 16),
        (32, 1, 16, 16),
        (71, 1, 64, 16),
        (4, 1, 512, 16),
        (3, 3, 320, 5),
    ],
)
def test_a_mixed_batch_equals_the_oracle(
    heads: int, kv_heads: int, head_dim: int, block_size: int, device: str
) -> None:
    batch = make_batch(MIXED, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, device=device)
    assert_exact(attend(batch, scale=0.2), oracle(batch, scale=0.2))


@pytest.mark.each_value
@pytest.mark.parametrize("window", [1, 7, 150])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_windows_and_chunks_exclude_earlier_positions(
    window: int, chunked: bool, with_sinks: bool, device: str
) -> None:
    batch = make_batch(MIXED, device=device)
    sinks = torch.linspace(-1, 2, 4, device=device) if with_sinks else None
    options = {"scale": 0.25, "window": window, "chunked": chunked, "sinks": sinks}
    assert_exact(attend(batch, **options), oracle(batch, **options))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_softcap_and_sinks_equal_the_oracle(softcap: float | None, device: str) -> None:
    batch = make_batch(MIXED, device=device, block_size=5)
    options = {"scale": 0.25, "softcap": softcap, "sinks": torch.linspace(-2, 3, 4, device=device)}
    assert_exact(attend(batch, **options), oracle(batch, **options))


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 3.0}])
@pytest.mark.parametrize(("head_dim", "block_size"), [(16, 16), (40, 5)])
def test_an_fp8_cache_equals_the_oracle_over_rounded_keys_and_values(
    head_dim: int, block_size: int, options: dict[str, float], device: str
) -> None:
    batch = make_batch(MIXED, head_dim=head_dim, block_size=block_size, cache_dtype=FP8, device=device)
    options = {"scale": 0.25, "sinks": torch.linspace(-2, 3, 4, device=device), **options}
    assert_exact(attend(batch, **options), oracle(batch, **options))


def test_a_bfloat16_query_over_an_fp8_cache_stays_within_half_a_percent(device: str) -> None:
    batch = make_batch(MIXED, dtype=torch.bfloat16, cache_dtype=FP8, device=device)
    found, expected = attend(batch, scale=0.25), oracle(batch, scale=0.25)
    assert found.dtype == torch.bfloat16
    assert (found.double().cpu() - expected).norm() < 5e-3 * expected.norm()


def test_write_rounds_to_fp8_as_pytorch_does_on_a_cpu(device: str) -> None:
    batch = make_batch([(0, 0, 48)], cache_dtype=FP8, device=device)
    spread = torch.exp2(torch.linspace(-13, 10, 48, device=device))[:, None, None]
    ties = torch.arange(48 * 2 * 16, device=device).view(48, 2, 16) / 2**10 + 1 / 2**11
    for key in (batch.key * spread, ties, -ties * 2**9):
        make_attention(batch).write(key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
        expected = key.cpu().clamp(-LARGEST, LARGEST).to(FP8)
        assert torch.equal(batch.key_cache.float().flatten(0, 1)[batch.slot_mapping].cpu(), expected.float())


@pytest.mark.parametrize("options", [{}, {"window": 100}, {"window": 100, "chunked": True}, {"sinks": True}])
def test_merged_parts_of_a_context_equal_the_oracle(options: dict[str, object], device: str) -> None:
    batch = make_batch([(0, 599, 600), (1, 269, 270), (2, 1240, 1280), (3, 4, 5)], device=device)
    if "sinks" in options:
        options = {"sinks": torch.linspace(0, 4, 4, device=device)}
    metadata = make_attention(batch, num_processors=40).make_metadata(batch.segments)
    assert all(len(tiles.merges) for tiles in metadata)
    assert_exact(attend(batch, num_processors=40, scale=0.25, **options), oracle(batch, scale=0.25, **options))


def test_merged_parts_of_heads_of_512_equal_the_oracle(device: str) -> None:
    batch = make_batch([(0, 599, 600), (1, 1240, 1280)], heads=4, kv_heads=1, head_dim=512, device=device)
    metadata = make_attention(batch, num_processors=40).make_metadata(batch.segments)
    assert all(len(tiles.merges) for tiles in metadata)
    assert_exact(attend(batch, num_processors=40, scale=0.04), oracle(batch, scale=0.04))


def test_tiles_of_larger_heads_have_fewer_rows_and_keys(device: str) -> None:
    sizes = []
    for head_dim in (96, 256, 512):
        attention = make_attention(make_batch([(0, 0, 4)], head_dim=head_dim, device=device))
        launch = attention.launch(attention.tiles.wide_m, 2, 100)
        sizes.append((attention.tiles.wide_m, launch.block_n))
    assert sizes == [(256, 64), (128, 32), (64, 16)]


def test_strided_views_of_a_fused_projection_are_read_in_place(device: str) -> None:
    batch = make_batch([(0, 0, 12), (1, 30, 31)], device=device)
    fused = torch.cat([batch.query, batch.key, batch.value], dim=1)  # [T, Hq + 2 Hkv, D]
    query, key, value = fused.split([4, 2, 2], dim=1)
    attention = make_attention(batch)
    metadata = attention.make_metadata(batch.segments)
    attention.write(key, value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    found = attention.attend(query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, scale=0.25)
    assert found.is_contiguous()
    assert_exact(found, oracle(batch, scale=0.25))


def test_zero_records_do_nothing(device: str) -> None:
    batch = make_batch([(0, 399, 400), (1, 9, 10), (2, 0, 40)], device=device)
    attention = make_attention(batch, num_processors=40)
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    padding = torch.zeros(3, FIELDS, dtype=torch.int32, device=device)
    metadata = tuple(
        replace(
            tiles,
            work=torch.cat([tiles.work, padding]),
            merges=torch.cat([tiles.merges, padding]),
            partials=tiles.partials + 3,
        )
        for tiles in attention.make_metadata(batch.segments)
    )
    found = attention.attend(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, scale=0.25)
    assert_exact(found, oracle(batch, scale=0.25))


def test_write_skips_padding_and_touches_no_other_slot(device: str) -> None:
    batch = make_batch([(0, 5, 9), (1, 0, 3)], block_size=5, device=device)
    slots = batch.slot_mapping.clone()
    slots[2] = -1
    before = batch.key_cache.clone(), batch.value_cache.clone()
    make_attention(batch).write(batch.key, batch.value, batch.key_cache, batch.value_cache, slots)
    for cache, old, new in zip((batch.key_cache, batch.value_cache), before, (batch.key, batch.value), strict=True):
        expected = old.flatten(0, 1)
        expected[slots[slots >= 0]] = new[slots >= 0]
        assert torch.equal(cache.flatten(0, 1).nan_to_num(99.0), expected.nan_to_num(99.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (32, 8, 128, 16),
        (14, 2, 64, 32),
        (8, 8, 128, 128),
        (8, 8, 64, 1),
        (14, 2, 80, 16),
        (71, 1, 64, 5),
        (16, 4, 256, 16),
        (8, 1, 512, 16),
        (32, 4, 512, 32),
        (6, 2, 320, 16),
        (10, 2, 96, 64),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 30.0}, {"sinks": True}])
def test_compiled_kernels_stay_within_the_precision_of_the_type(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int, options: dict[str, object]
) -> None:
    segments = [(0, 0, 517), (1, 1999, 2000), (2, 300, 333), (3, 0, 1), (4, 0, 64), (4, 200, 264), (5, 900, 901)]
    batch = make_batch(
        segments, heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype, device="cuda"
    )
    if "sinks" in options:
        options = {"sinks": torch.linspace(-2, 4, heads, device="cuda")}
    found = attend(batch, num_processors=132, scale=head_dim**-0.5, **options)
    expected = oracle(batch, scale=head_dim**-0.5, **options)
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2)
    assert found.dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"),
    [
        (torch.bfloat16, 32, 8, 128),
        (torch.bfloat16, 14, 2, 64),
        (torch.bfloat16, 14, 2, 80),
        (torch.float16, 16, 4, 256),
        (torch.bfloat16, 16, 2, 512),
        (torch.float32, 14, 2, 64),
    ],
)
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 30.0}])
def test_compiled_kernels_read_fp8(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, options: dict[str, object]
) -> None:
    segments = [(0, 0, 517), (1, 1999, 2000), (2, 300, 333), (3, 0, 1), (4, 0, 64), (4, 200, 264), (5, 900, 901)]
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    batch = make_batch(segments, dtype=dtype, cache_dtype=FP8, device="cuda", **sizes)
    found = attend(batch, num_processors=132, scale=head_dim**-0.5, **options)
    expected = oracle(batch, scale=head_dim**-0.5, **options)
    assert (found.double().cpu() - expected).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()


@pytest.mark.gpu
def test_random_batches_compiled() -> None:
    random = np.random.default_rng(7)
    for trial in range(40):
        segments = []
        for row in range(int(random.integers(1, 40))):
            start = int(random.integers(0, 1500)) if random.random() < 0.7 else 0
            length = 1 if random.random() < 0.6 else int(random.integers(1, 200))
            segments.append((row, start, start + length))
        batch = make_batch(segments, heads=8, kv_heads=2, head_dim=64, device="cuda", seed=trial)
        assert_exact(attend(batch, num_processors=132, scale=0.125), oracle(batch, scale=0.125))


def options_on_a_gpu(window: int | None, softcap: float | None, sinks: bool, heads: int) -> dict[str, object]:
    made = torch.linspace(-2, 4, heads, device="cuda") if sinks else None
    return {"window": window, "softcap": softcap, "sinks": made}


@pytest.mark.gpu
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (128, 16)])
@pytest.mark.parametrize("window", [None, 1, 100, 700])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, False), (3.0, False), (None, True), (3.0, True)])
def test_long_segments_over_a_context_cut_in_parts_compiled(
    head_dim: int, block_size: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    batch = make_batch(
        [(0, 3000, 3100), (1, 0, 131), (2, 1000, 1017)],
        heads=8,
        kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.bfloat16,
        device="cuda",
    )
    assert any(len(tiles.merges) for tiles in make_attention(batch, num_processors=132).make_metadata(batch.segments))
    options = options_on_a_gpu(window, softcap, sinks, heads=8)
    found = attend(batch, num_processors=132, scale=head_dim**-0.5, **options)
    expected = oracle(batch, scale=head_dim**-0.5, **options)
    assert (found.double().cpu() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.gpu
def test_random_batches_of_long_segments_compiled() -> None:
    random = np.random.default_rng(11)
    for trial in range(40):
        segments = []
        for row in range(int(random.integers(1, 12))):
            start = int(random.integers(0, 1500)) if random.random() < 0.7 else 0
            segments.append((row, start, start + int(random.integers(1, 400))))
        batch = make_batch(segments, heads=6, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device="cuda", seed=trial)
        options = options_on_a_gpu(
            window=random.choice([None, 5, 90, 600]),
            softcap=random.choice([None, 4.0]),
            sinks=bool(random.random() < 0.5),
            heads=6,
        )
        found = attend(batch, num_processors=132, scale=0.125, **options)
        expected = oracle(batch, scale=0.125, **options)
        assert (found.double().cpu() - expected).norm() / expected.norm() < 1e-2, (trial, segments, options)


@pytest.mark.gpu
def test_cuda_gets_the_triton_backend() -> None:
    attention = attention_for("cuda", num_heads=8, num_kv_heads=4, head_dim=64, block_size=16)
    assert isinstance(attention, PagedAttention)


def attend_reserved(attention: PagedAttention, metadata: tuple[DeviceTiles, ...], batch: Batch, tokens: int) -> bool:
    """Attend with reserved metadata, padded to `tokens` as in a captured graph. False if the batch does not fit."""
    if not attention.refill(metadata, batch.segments):
        return False
    padding = torch.full((tokens - len(batch.query), *batch.query.shape[1:]), float("nan"), device=batch.query.device)
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    found = attention.attend(
        torch.cat([batch.query, padding]), batch.key_cache, batch.value_cache, batch.block_tables, metadata, scale=0.25
    )
    assert_exact(found[: len(batch.query)], oracle(batch, scale=0.25))
    return True


def test_reserved_metadata_serves_one_decode_batch_after_another(device: str) -> None:
    decodes = [(row, stop - 1, stop) for row, stop in enumerate((300, 1, 17, 190))]
    full, small = make_batch(decodes, device=device), make_batch(decodes[2:], device=device)
    attention = make_attention(full, num_processors=40)
    metadata = attention.reserve(len(decodes))
    assert attend_reserved(attention, metadata, full, 4)
    assert attend_reserved(attention, metadata, small, 4)


@pytest.mark.parametrize("heads", [4, 8, 32])  # of 2 KV heads: tiles of 8, 4 and 1 tokens
def test_metadata_reserved_for_decodes_serves_drafts_of_several_tokens(heads: int, device: str) -> None:
    drafts = [(0, 299, 315), (1, 0, 1), (2, 180, 184), (3, 15, 18)]
    batch = make_batch(drafts, heads=heads, kv_heads=2, device=device)
    attention = make_attention(batch, num_processors=40)
    assert attend_reserved(attention, attention.reserve(24), batch, 24)


def test_reserved_metadata_serves_mixed_batches(device: str) -> None:
    mixed = [
        [(0, 399, 400), (1, 9, 10), (2, 20, 160), (3, 0, 1)],  # a long chunk together with decodes
        [(2, 0, 190)],
        [(0, 250, 251), (1, 3, 4)],  # nothing wide
        [(row, 7, 15) for row in range(20)],  # many short ones
        [(4, 0, 30), (4, 300, 330), (5, 0, 130)],  # two of one row
    ]
    batches = [make_batch(segments, device=device) for segments in mixed]
    attention = make_attention(batches[0], num_processors=40)
    metadata = attention.reserve(24, tokens=192)
    for batch in batches:
        assert attend_reserved(attention, metadata, batch, 192)


def test_refill_returns_false_when_reserved_metadata_has_no_room(device: str) -> None:
    few, many = make_batch([(0, 0, 9)], device=device), make_batch([(row, 0, 9) for row in range(20)], device=device)
    attention = make_attention(few)
    metadata = attention.reserve(2, tokens=180)
    assert not attend_reserved(attention, metadata, many, 180)
    assert attend_reserved(attention, metadata, few, 180)
