"""Attention by PyTorch alone against the float64 oracle, over random batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lm.kernels.attention import torch_attention
from holdfast.lm.kernels.attention.backends import attention_for
from holdfast.lm.kernels.attention.protocol import Segments
from holdfast.lm.kernels.cache.kv_cache import write_slots
from holdfast.lm.kernels.fp8 import FP8, LARGEST
from tests.lm.kernels.attention_oracle import Batch, make_batch, oracle


def attend(batch: Batch, **options: object) -> torch.Tensor:
    """Write the step's keys, then attend, as a layer does."""
    attention = attention_for(
        "cpu",
        num_heads=batch.query.shape[1],
        num_kv_heads=batch.key.shape[1],
        head_dim=batch.query.shape[2],
        block_size=batch.key_cache.shape[1],
    )
    metadata = attention.make_metadata(batch.segments)
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    return attention.attend(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, **options)


@st.composite
def segment_lists(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Decodes, prefills, chunks, and rows with two segments (a recomputed front and a later part)."""
    segments = []
    for row in range(draw(st.integers(1, 6))):
        match draw(st.sampled_from(["decode", "prefill", "chunk", "two"])):
            case "decode":
                start = draw(st.integers(0, 90))
                segments.append((row, start, start + 1))
            case "prefill":
                segments.append((row, 0, draw(st.integers(1, 70))))
            case "chunk":
                start = draw(st.integers(1, 60))
                segments.append((row, start, start + draw(st.integers(2, 40))))
            case _:
                front = draw(st.integers(1, 30))
                start = front + draw(st.integers(0, 30))
                segments += [(row, 0, front), (row, start, start + draw(st.integers(1, 20)))]
    return draw(st.permutations(segments))


@given(
    segments=segment_lists(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (8, 1)]),
    head_dim=st.sampled_from([16, 24, 40, 64, 80]),
    block_size=st.sampled_from([1, 5, 16]),
    window=st.sampled_from([None, None, 1, 7, 33]),
    chunked=st.booleans(),
    softcap=st.sampled_from([None, None, 5.0]),
    cache_dtype=st.sampled_from([None, FP8]),
    with_sinks=st.booleans(),
    tile_rows=st.sampled_from([8, torch_attention.TILE_ROWS]),
    kept_mask=st.sampled_from([500, torch_attention.KEPT_MASK]),
    seed=st.integers(0, 10**6),
)
def test_random_batches_equal_the_oracle(
    segments: list[tuple[int, int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    window: int | None,
    chunked: bool,
    softcap: float | None,
    cache_dtype: torch.dtype | None,
    with_sinks: bool,
    tile_rows: int,
    kept_mask: int,
    seed: int,
) -> None:
    batch = make_batch(
        segments,
        heads=heads[0],
        kv_heads=heads[1],
        head_dim=head_dim,
        block_size=block_size,
        cache_dtype=cache_dtype,
        seed=seed,
    )
    sinks = torch.randn(heads[0], generator=torch.Generator().manual_seed(seed)) if with_sinks else None
    options = {"scale": head_dim**-0.5, "window": window, "chunked": chunked, "softcap": softcap, "sinks": sinks}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_attention, "TILE_ROWS", tile_rows)
        patch.setattr(torch_attention, "KEPT_MASK", kept_mask)
        found = attend(batch, **options)
    torch.testing.assert_close(found.double(), oracle(batch, **options), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_half_precision_stays_within_one_percent(dtype: torch.dtype, softcap: float | None) -> None:
    segments = [(0, 299, 300), (1, 40, 90), (2, 0, 33), (3, 149, 150)]
    batch = make_batch(segments, heads=8, kv_heads=4, head_dim=64, dtype=dtype)
    found = attend(batch, scale=0.125, softcap=softcap)
    expected = oracle(batch, scale=0.125, softcap=softcap)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_finite_fp8_number_is_converted_exactly(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    finite = ~numbers.float().isnan()
    assert torch.equal(torch_attention.from_cache_dtype(numbers, dtype)[finite], numbers.to(dtype)[finite])


def test_write_clamps_to_the_largest_fp8_number() -> None:
    key = torch.tensor([[[449.0, -1e30, 0.3, 2.0**-10]]])
    caches = [torch.zeros(2, 1, 1, 4).to(FP8) for _ in range(2)]
    write_slots(key, -key, *caches, torch.tensor([1]))
    expected = torch.tensor([LARGEST, -LARGEST, 0.3125, 0.0])
    assert torch.equal(caches[0][1, 0, 0].float(), expected)
    assert torch.equal(caches[1][1, 0, 0].float(), -expected)


def test_many_decodes_of_mixed_context_equal_the_oracle() -> None:
    segments = [(row, length - 1, length) for row, length in enumerate([700, 3, 41, 650, 1, 44, 300, 39, 310, 2])]
    batch = make_batch(segments, block_size=16)
    found = attend(batch, scale=0.25)
    torch.testing.assert_close(found.double(), oracle(batch, scale=0.25), rtol=1e-5, atol=1e-5)


def test_one_metadata_serves_layers_with_and_without_a_window() -> None:
    batch = make_batch([(0, 30, 50), (1, 79, 80)])
    attention = attention_for("cpu", num_heads=4, num_kv_heads=2, head_dim=16, block_size=16)
    metadata = attention.make_metadata(batch.segments)
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    arguments = batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata
    for window, chunked in ((None, False), (9, False), (9, True), (None, True), (20, True)):
        found = attention.attend(*arguments, scale=0.25, window=window, chunked=chunked)
        expected = oracle(batch, scale=0.25, window=window, chunked=chunked)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_write_touches_no_other_slot() -> None:
    batch = make_batch([(0, 5, 9), (1, 0, 1)], block_size=5)
    before = batch.key_cache.clone()
    attend(batch, scale=0.25)
    untouched = torch.ones(batch.key_cache.shape[:2].numel(), dtype=torch.bool)
    untouched[batch.slot_mapping] = False
    torch.testing.assert_close(
        batch.key_cache.flatten(0, 1)[untouched], before.flatten(0, 1)[untouched], equal_nan=True
    )
    torch.testing.assert_close(batch.key_cache.flatten(0, 1)[batch.slot_mapping], batch.key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "8 query heads do not divide among 3 KV heads"),
        ({"head_dim": 0}, "head_dim is 0; it must lie between 1 and 512"),
        ({"block_size": 0}, "block_size is 0"),
        ({"device": "meta"}, "no attention for device meta"),
    ],
)
def test_attention_for_refuses_unsupported_sizes_and_devices(change: dict[str, object], message: str) -> None:
    shape = {"device": "cpu", "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "block_size": 16} | change
    with pytest.raises(ValueError, match=message):
        attention_for(**shape)


def test_a_window_that_hides_nothing_costs_nothing() -> None:
    batch = make_batch([(0, 0, 9), (1, 30, 31)], heads=2, kv_heads=1, head_dim=16, block_size=4)
    attention = torch_attention.TorchAttention(
        device=torch.device("cpu"), num_heads=2, num_kv_heads=1, head_dim=16, block_size=4
    )
    metadata = attention.make_metadata(batch.segments)
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    arguments = (batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata)
    whole, within = (attention.attend(*arguments, scale=0.25, window=window) for window in (None, 31))
    assert torch.equal(whole, within) and list(metadata.groups) == [torch_attention.Seen()]
    assert not torch.equal(whole, attention.attend(*arguments, scale=0.25, window=30))


def test_a_long_segment_is_cut_into_tiles_and_a_short_one_is_one() -> None:
    attention = torch_attention.TorchAttention(
        device=torch.device("cpu"), num_heads=4, num_kv_heads=2, head_dim=16, block_size=4
    )
    tile = torch_attention.TILE_ROWS // 2
    for lengths, tiles in (((1, tile), (1, tile)), ((1, tile + 3), (1, tile, 3)), ((0, 2), (2,))):
        starts, rows = np.cumsum((0, *lengths)).astype(np.int32), np.array([5, 2], np.int32)
        found = attention.make_metadata(Segments(starts, np.array(lengths, np.int32) + 10, rows))
        assert tuple(found.queries) == tiles
        assert found.first_token.tolist() == [*np.cumsum((0, *tiles[:-1]))]
        assert found.stop[-1] == lengths[-1] + 10 and found.row[-1] == 2
