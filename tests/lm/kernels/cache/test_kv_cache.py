"""The cache tensor: views of its layers and copies of its blocks."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.cache.copy_kernel import PROGRAMS_IN, copy_runs
from holdfast.lm.kernels.cache.kv_cache import KVCache, copy_blocks
from holdfast.lm.kernels.fp8 import FP8


def make_cache(num_blocks: int = 6, dtype: torch.dtype = torch.float32, by_block: bool = False) -> KVCache:
    cache = KVCache.allocate(
        layers=3, num_blocks=num_blocks, block_size=4, num_kv_heads=2, head_dim=8, dtype=dtype, device="cpu",
        by_block=by_block,
    )  # fmt: skip
    cache.data.copy_(torch.randn(cache.data.shape, generator=torch.Generator().manual_seed(num_blocks)))
    return cache


def test_a_layer_is_a_view_of_keys_and_values() -> None:
    cache = make_cache()
    key, value = cache.layer(1)
    assert key.shape == value.shape == (6, 4, 2, 8)
    assert cache.num_blocks == 6
    key[5, 3].fill_(7.0)
    value[0, 0].fill_(8.0)
    assert (cache.data[1, 0, 5, 3] == 7.0).all()
    assert (cache.data[1, 1, 0, 0] == 8.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_blocks_move_between_caches_in_every_layer(dtype: torch.dtype) -> None:
    device, host = make_cache(6, dtype), make_cache(9, dtype)
    before = host.data.clone()
    copy_blocks(device, torch.tensor([4, 0]), host, torch.tensor([8, 2]))
    before, device, host = before.float(), KVCache(device.data.float()), KVCache(host.data.float())
    assert torch.equal(host.data[:, :, 8], device.data[:, :, 4])
    assert torch.equal(host.data[:, :, 2], device.data[:, :, 0])
    others = [block for block in range(9) if block not in (8, 2)]
    assert torch.equal(host.data[:, :, others], before[:, :, others])


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_long_runs_are_copied_as_single_blocks_are(dtype: torch.dtype) -> None:
    source, run, single = make_cache(40, dtype, by_block=True), make_cache(50, dtype), make_cache(50, dtype)
    blocks, places = [*range(3, 20), *range(25, 40)], [*range(30, 47), *range(15)]
    copy_blocks(source, torch.tensor(blocks), run, torch.tensor(places), slice(1, 3))
    for block, place in zip(blocks, places, strict=True):
        copy_blocks(source, torch.tensor([block]), single, torch.tensor([place]), slice(1, 3))
    assert torch.equal(run.data.float(), single.data.float())


def test_a_copy_of_one_layer_leaves_the_others() -> None:
    source, target = make_cache(6), make_cache(9)
    before = target.data.clone()
    copy_blocks(source, torch.tensor([3]), target, torch.tensor([7]), slice(1, 2))
    assert torch.equal(target.data[1, :, 7], source.data[1, :, 3])
    assert torch.equal(target.data[[0, 2]], before[[0, 2]])


@pytest.mark.parametrize("blocks", [[4], [5, 0, 2, 1]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_the_kernel_copies_as_the_plain_copy_does(blocks: list[int], dtype: torch.dtype, device: str) -> None:
    source, target, expected = make_cache(6, dtype), make_cache(9, dtype), make_cache(9, dtype)
    places = torch.tensor([8, 3, 0, 6][: len(blocks)])
    copy_blocks(source, torch.tensor(blocks), expected, places)
    data = target.data.to(device)
    copy_runs(source.data.to(device), torch.tensor(blocks, device=device), data, places.to(device))
    assert torch.equal(data.cpu().view(torch.uint8), expected.data.view(torch.uint8))


@pytest.mark.parametrize("layers", [slice(None), slice(1, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_the_kernel_copies_to_and_from_a_cache_of_whole_blocks(layers: slice, dtype: torch.dtype, device: str) -> None:
    plain, whole = make_cache(6, dtype), make_cache(9, dtype, by_block=True)
    expected, blocks, places = make_cache(9, dtype, by_block=True), torch.tensor([4, 0]), torch.tensor([8, 2])
    assert whole.data[:, :, 5].is_contiguous() and whole.data.shape == (3, 2, 9, 4, 2, 8)
    copy_blocks(plain, blocks, expected, places, layers)
    there = whole.data.to(device)
    copy_runs(plain.data[layers].to(device), blocks.to(device), there[layers], places.to(device))
    assert torch.equal(there.cpu().float(), expected.data.float())
    back = torch.zeros_like(plain.data[layers].float()).to(dtype).to(device)
    copy_runs(there[layers], places.to(device), back, blocks.to(device))
    assert torch.equal(back.cpu().float()[:, :, [4, 0]], plain.data[layers].float()[:, :, [4, 0]])


def test_the_kernel_copies_more_runs_than_it_has_programs(device: str) -> None:
    source, target = make_cache(12), make_cache(12)
    assert PROGRAMS_IN < 3 * 2 * 12
    source.data.mul_(2.0)
    data, order = target.data.to(device), torch.arange(12)
    copy_runs(source.data.to(device), order.to(device), data, order.flip(0).to(device))
    assert torch.equal(data.cpu(), source.data[:, :, order.flip(0)])


def test_blocks_may_trade_places_within_a_cache() -> None:
    cache = make_cache()
    before = cache.data.clone()
    copy_blocks(cache, torch.tensor([1, 5]), cache, torch.tensor([5, 1]))
    assert torch.equal(cache.data[:, :, [1, 5]], before[:, :, [5, 1]])
