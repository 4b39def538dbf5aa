"""Attention whose bits for a query do not depend on other queries: interpreted without a GPU, compiled with one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.lm.kernels.attention import invariant as module
from holdfast.lm.kernels.attention.invariant import InvariantAttention
from holdfast.lm.kernels.attention.protocol import Segments
from tests.lm.kernels.attention_oracle import Batch, make_batch, oracle

MIXED = [(3, 0, 20), (0, 149, 150), (1, 100, 131), (4, 0, 1), (5, 199, 200)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that an interpreter computes quickly."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "TILE_ROWS", 16)
        monkeypatch.setattr(module, "TALL_ROWS", 32)


def make_attention(batch: Batch, processors: int, part_keys: int = 64) -> InvariantAttention:
    return InvariantAttention(
        device=batch.query.device,
        num_processors=processors,
        num_heads=batch.query.shape[1],
        num_kv_heads=batch.key.shape[1],
        head_dim=batch.query.shape[2],
        block_size=batch.key_cache.shape[1],
        dtype=batch.query.dtype,
        part_keys=part_keys,
    )


def attend(batch: Batch, processors: int = 4, **options: Any) -> torch.Tensor:
    """Write the step's keys, then attend, as a layer does."""
    attention = make_attention(batch, processors)
    metadata = attention.make_metadata(batch.segments)
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    return attention.attend(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, **options)


def some_of(batch: Batch, spans: list[tuple[int, int, int]]) -> tuple[Batch, torch.Tensor]:
    """A step of these (segment, first, stop) tokens of a batch's segments, and their places in that batch.

    The whole batch has been written to the cache.
    """
    segments = batch.segments
    starts, stops = segments.query_start[:-1], segments.context_stop
    lengths = [stop - first for _, first, stop in spans]
    begins = [int(starts[of]) + first for of, first, _ in spans]
    at = torch.cat([torch.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)])
    own = Segments(
        np.cumsum([0, *lengths]).astype(np.int32),
        np.array([stops[of] - segments.query_length[of] + stop for of, _, stop in spans], np.int32),
        np.array([segments.row[of] for of, *_ in spans], np.int32),
    )
    at = at.to(batch.query.device)
    names = ("query", "key", "value", "slot_mapping")
    return replace(batch, segments=own, **{name: getattr(batch, name)[at] for name in names}), at


OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 40, "softcap": 3.0},
    {"window": 40, "chunked": True},
    {"sinks": True, "window": 70},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "plain")
def test_a_token_has_the_same_bits_in_any_step_and_they_are_near_the_oracle(
    options: dict[str, Any], device: str
) -> None:
    batch = make_batch(MIXED, heads=4, kv_heads=2, block_size=16, device=device)
    options = {"scale": 0.25, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, 4, device=device)
    whole = attend(batch, 1, **options)
    torch.testing.assert_close(whole.double().cpu(), oracle(batch, **options), rtol=1e-5, atol=1e-5)
    assert torch.equal(attend(batch, 1000, **options), whole)  # more programs than tiles, so tiles are cut
    for spans in (
        [(2, 30, 31), (4, 0, 1), (0, 19, 20)],
        [(2, 0, 15), (0, 3, 20)],
        [(2, 15, 31), (1, 0, 1)],
    ):
        some, at = some_of(batch, spans)
        assert torch.equal(attend(some, 1000, **options), whole[at]), spans


def test_blocks_before_the_window_may_hold_anything(device: str) -> None:
    batch = make_batch([(0, 159, 160), (1, 120, 131)], heads=4, kv_heads=2, block_size=16, device=device)
    whole = attend(batch, 1000, scale=0.25, window=40)
    for row, window_begins in enumerate((120, 81)):
        gone = batch.block_tables[row, : window_begins // 16].long()
        batch.key_cache[gone] = batch.value_cache[gone] = torch.nan
    for processors in (1, 1000):
        assert torch.equal(attend(batch, processors, scale=0.25, window=40), whole)


def test_tiles_of_twice_as_many_rows_give_halves_the_same_bits(device: str) -> None:
    """With numbers of 16 bits, longer segments have taller tiles than decodes and short chunks."""
    segments = [(3, 0, 20), (0, 149, 150), (1, 60, 131), (4, 0, 1), (5, 199, 200)]
    batch = make_batch(segments, heads=4, kv_heads=2, block_size=16, dtype=torch.float16, device=device)
    attention = make_attention(batch, 1)
    assert (attention.tiles.wide_m, attention.tiles.narrow_m) == (module.TALL_ROWS, module.LOW_ROWS)
    wide, narrow = attention.make_metadata(batch.segments)
    assert (wide.block_m, narrow.block_m) == (module.TALL_ROWS, module.LOW_ROWS)
    whole = attend(batch, 1, scale=0.25)
    torch.testing.assert_close(whole.double().cpu(), oracle(batch, scale=0.25), rtol=5e-3, atol=5e-3)
    for spans in ([(2, 70, 71), (4, 0, 1), (0, 19, 20)], [(2, 0, 15), (0, 3, 20)], [(2, 15, 71), (1, 0, 1)]):
        some, at = some_of(batch, spans)
        assert torch.equal(attend(some, 1000, scale=0.25), whole[at]), spans


def test_heights_of_tiles_are_compared_before_several_are_taken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: str
) -> None:
    batch = make_batch([(0, 5, 6)], heads=4, kv_heads=2, block_size=16, dtype=torch.float16, device=device)
    low, rows, tall = module.LOW_ROWS, 32, 64
    monkeypatch.setattr(module, "TILE_ROWS", rows)
    monkeypatch.setattr(module, "TALL_ROWS", tall)
    monkeypatch.setattr(module, "_is_hopper", lambda device: True)
    assert heights(make_attention(batch, 4)) == (low, tall) and not caplog.messages
    launch, unlike = InvariantAttention._attend, low

    def of_another_order(self: InvariantAttention, *tensors: Any, **options: Any) -> None:
        launch(self, *tensors, **options)
        tensors[4][0, 0, 0] += 0.125 * (tensors[5].block_m == unlike)  # the output, by the height of its tiles

    monkeypatch.setattr(InvariantAttention, "_attend", of_another_order)
    assert heights(make_attention(batch, 4)) == (rows, tall)
    unlike = tall
    assert heights(make_attention(batch, 4)) == (rows, rows)
    assert caplog.messages == [
        f"holdfast: attention has other bits by tiles of {tall} rows than by tiles of {other} rows. So deterministic "
        "steps take longer"
        for other in (low, low, rows)
    ]


@pytest.mark.parametrize("alike", [True, False])
def test_long_segments_take_the_kernel_for_prompts_if_its_bits_are_those_of_low_tiles(
    alike: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    segments = [(0, 150, 350), (1, 199, 200)]
    batch = make_batch(segments, heads=4, kv_heads=2, block_size=16, dtype=torch.float16, device="cpu")
    given: list[dict[str, Any]] = []
    work = Launches("BLOCK_M")
    monkeypatch.setattr(module, "attend_parts_kernel", work)
    monkeypatch.setattr(module, "join_parts_kernel", Launches())
    monkeypatch.setattr(module, "_is_hopper", lambda device: True)
    monkeypatch.setattr(module, "shared_bytes", lambda device: 227 << 10)
    monkeypatch.setattr(module.prefill_kernel, "supports", lambda device, **sizes: True)
    monkeypatch.setattr(module.prefill_kernel, "attend", lambda *tensors, **options: given.append(options))
    monkeypatch.setattr(InvariantAttention, "_heights_alike", lambda self, dtype: alike or not self.specialised)
    attention = make_attention(batch, 4)
    assert heights(attention) == (module.LOW_ROWS, module.TALL_ROWS) and attention.specialised == alike
    assert [message for message in caplog.messages if "the kernel for prompts than" in message] == caplog.messages
    assert len(caplog.messages) == (not alike)
    metadata = attention.make_metadata(batch.segments)
    tensors = batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata
    both = [(module.TALL_ROWS,), (module.LOW_ROWS,)]
    attention.attend(*tensors, scale=0.25)
    assert work.options == (both[1:] if alike else both)
    assert [each["part_keys"] for each in given] == [64] * alike
    for options in ({"window": 40}, {"softcap": 3.0}):  # that kernel has neither in this order
        work.options.clear()
        attention.attend(*tensors, scale=0.25, **options)
        assert work.options == both and len(given) == alike


def heights(attention: InvariantAttention) -> tuple[int, int]:
    return attention.tiles.narrow_m, attention.tiles.wide_m


class Launches:
    """Stands for a kernel, and notes the options of its launches."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.options: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **given: self.options.append(tuple(given[name] for name in self.names))


@pytest.mark.parametrize(
    ("hopper", "kilobytes", "head_dim", "stages"),
    [(True, 227, 128, 3), (True, 227, 512, 2), (False, 99, 128, 3), (False, 99, 256, 3), (False, 99, 512, 1)],
)
def test_as_many_steps_are_in_flight_as_fit_the_shared_memory(
    hopper: bool, kilobytes: int, head_dim: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch([(0, 5, 6)], heads=4, kv_heads=1, head_dim=head_dim, dtype=torch.float16, device="cpu")
    launches = Launches("STAGES")
    monkeypatch.setattr(module, "TILE_ROWS", 64)
    monkeypatch.setattr(module, "attend_parts_kernel", launches)
    monkeypatch.setattr(module, "_is_hopper", lambda device: hopper)
    monkeypatch.setattr(module, "shared_bytes", lambda device: kilobytes << 10)
    attention = make_attention(batch, 4)
    metadata = attention.make_metadata(batch.segments)
    attention.attend(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, scale=1.0)
    assert launches.options[-1] == (stages,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_decodes_start_before_the_previous_kernel_ends_and_long_segments_do_not(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long segments have a stream of their own, also where their tiles are as high as those of decodes."""
    batch = make_batch([(0, 199, 200), (1, 0, 150)], heads=4, kv_heads=2, block_size=16, dtype=dtype, device="cpu")
    work, merges = (Launches("BLOCK_M", "DEPENDENT", "launch_pdl") for _ in range(2))
    monkeypatch.setattr(module, "attend_parts_kernel", work)
    monkeypatch.setattr(module, "join_parts_kernel", merges)
    monkeypatch.setattr(module, "dependent_launch_options", lambda device: {"DEPENDENT": True, "launch_pdl": True})
    attention = make_attention(batch, 1000)
    for metadata in (attention.make_metadata(batch.segments), attention.reserve(4, 200)):
        work.options.clear()
        attention.attend(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, metadata, scale=1.0)
        wide, narrow = attention.tiles.wide_m, attention.tiles.narrow_m
        assert work.options == [(wide, False, False), (narrow, True, True)]
    assert merges.options and all(dependent and launched for _, dependent, launched in merges.options)


def test_long_contexts_are_cut_where_programs_are_few_and_no_more_than_memory_allows(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    batch = make_batch([(0, 299, 300), (1, 299, 300), (2, 299, 300)], device=device)
    (tiles,) = make_attention(batch, 1000).make_metadata(batch.segments)
    assert len(tiles.merges) == 3 and tiles.partials == 15
    whole = attend(batch, 1000, scale=0.3)
    monkeypatch.setattr(module, "MOST_PARTIAL_ROWS", 11 * 16)
    attention = make_attention(batch, 1000)
    (tiles,) = attention.make_metadata(batch.segments)
    assert len(tiles.merges) == 2 and tiles.partials == 10  # the third tile stays whole
    assert torch.equal(attend(batch, 1000, scale=0.3), whole)
    reserved = attention.reserve(8, 64)
    assert all(each.partials == 11 for each in reserved) and attention.refill(reserved, batch.segments)
    found = attention.attend(batch.query, batch.key_cache, batch.value_cache, batch.block_tables, reserved, scale=0.3)
    assert torch.equal(found, whole)


def test_partial_results_of_tall_tiles_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE_ROWS", 16)
    monkeypatch.setattr(module, "MOST_PARTIAL_ROWS", 11 * 16)
    segments = [(0, 299, 300), (1, 299, 300), (2, 290, 320), (3, 290, 320)]
    batch = make_batch(segments, heads=4, kv_heads=2, block_size=16, dtype=torch.float16, device="cpu")
    attention = make_attention(batch, 1000)
    wide, narrow = attention.make_metadata(batch.segments)
    assert wide.partials == 5 and narrow.partials == 10  # of 11 in all and 22 wanted; wide ones have twice the rows
    for reserved, own in zip(attention.reserve(8, 64), (wide, narrow), strict=True):
        assert own.partials * own.block_m <= reserved.partials * reserved.block_m <= 11 * module.TILE_ROWS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": 700}, {"softcap": 30.0}, {"sinks": True}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_compiled_attention_gives_decodes_the_bits_of_prompts(
    dtype: torch.dtype, options: dict[str, Any], head_dim: int
) -> None:
    spans = [(0, 0, 2500), (1, 3000, 3300), (2, 0, 1)]
    batch = make_batch(spans, heads=16, kv_heads=4, head_dim=head_dim, dtype=dtype, device="cuda")
    options = {"scale": head_dim**-0.5, **options}
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, 16, device="cuda")
    attention = make_attention(batch, 132)
    if torch.cuda.get_device_capability() == (9, 0):
        several = dtype != torch.float32 and head_dim <= 128
        assert heights(attention) == ((module.LOW_ROWS, module.TALL_ROWS) if several else (module.TILE_ROWS,) * 2)
        assert attention.specialised == several
    whole = attend(batch, 132, **options)
    expected = oracle(batch, **options)
    assert (whole.double().cpu() - expected).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()
    for part in ([(0, 2499, 2500)], [(1, 0, 1), (0, 1300, 1301)], [(0, 0, 512), (1, 100, 101)], [(0, 17, 1800)]):
        some, at = some_of(batch, part)
        assert torch.equal(attend(some, 132, **options), whole[at])
