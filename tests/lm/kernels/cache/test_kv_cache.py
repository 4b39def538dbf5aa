"""The cache tensor: views of its layers and copies of its blocks."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.cache.copy_kernel import PROGRAMS_IN, copy_runs
from holdfast.lm.kernels.cache.kv_cache import KVCache, KVShape, copy_blocks
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


NARROW, WIDE, LATENT = KVShape(2, 6, 6), KVShape(1, 9, 9), KVShape(1, 5, 0)
SHAPES = (NARROW, WIDE, NARROW, LATENT, WIDE, NARROW)


def mixed_cache(num_blocks: int, dtype: torch.dtype = torch.float32, by_block: bool = False) -> KVCache:
    """A cache of layers of three shapes, with random numbers."""
    cache = KVCache.allocate_layers(
        SHAPES, num_blocks=num_blocks, block_size=3, dtype=dtype, device="cpu", by_block=by_block
    )
    for number, group in enumerate(cache.groups):
        group.copy_(torch.randn(group.shape, generator=torch.Generator().manual_seed(10 * num_blocks + number)))
    return cache


def layers_of(cache: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Copies of the keys and values of each layer, as float32."""
    return [(key.float().clone(), value.float().clone()) for key, value in map(cache.layer, range(len(SHAPES)))]


@pytest.mark.parametrize("by_block", [False, True])
def test_each_layer_has_its_own_heads_and_memory(by_block: bool) -> None:
    cache = mixed_cache(4, by_block=by_block)
    for number in range(len(SHAPES)):
        for plane in cache.layer(number):
            plane.fill_(number)
    for number, shape in enumerate(SHAPES):
        key, value = cache.layer(number)
        assert key.shape == value.shape == (4, 3, shape.heads, shape.key_size)
        assert (key == number).all() and (value == number).all()
    assert cache.block_bytes == 4 * 3 * (3 * 2 * 12 + 2 * 2 * 9 + 5)


def test_a_layer_that_reads_values_from_its_keys_has_one_tensor() -> None:
    key, value = mixed_cache(4).layer(3)
    assert key.data_ptr() == value.data_ptr()


def test_values_of_another_size_than_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="values have 4 numbers a head and keys 8"):
        KVCache.allocate_layers([KVShape(1, 8, 4)], num_blocks=1, block_size=1, dtype=torch.float32, device="cpu")


def test_the_tensor_of_all_layers_is_refused_if_layers_differ() -> None:
    with pytest.raises(ValueError, match="3 shapes"):
        _ = mixed_cache(4).data


@pytest.mark.parametrize("layers", [slice(None), slice(1, 3), slice(2, 4), slice(4, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8])
def test_copies_of_layers_of_several_shapes_leave_the_other_layers(layers: slice, dtype: torch.dtype) -> None:
    source, target = mixed_cache(6, dtype), mixed_cache(9, dtype, by_block=True)
    before, given = layers_of(target), layers_of(source)
    copy_blocks(source, torch.tensor([4, 0]), target, torch.tensor([8, 2]), layers)
    for number, planes in enumerate(layers_of(target)):
        copied = number in range(*layers.indices(len(SHAPES)))
        for plane, old, new in zip(planes, before[number], given[number], strict=True):
            assert torch.equal(plane[[8, 2]], new[[4, 0]] if copied else old[[8, 2]])
            assert torch.equal(plane[[0, 1, 3, 4, 5, 6, 7]], old[[0, 1, 3, 4, 5, 6, 7]])


def test_a_block_of_several_shapes_is_one_piece_of_memory() -> None:
    cache, other = mixed_cache(4, by_block=True), mixed_cache(4, by_block=True)
    given = layers_of(cache)
    size = cache.block_bytes
    other.memory.view(4, size)[3] = cache.memory.view(4, size)[1]
    for (key, value), (old_key, old_value) in zip(layers_of(other), given, strict=True):
        assert torch.equal(key[3], old_key[1]) and torch.equal(value[3], old_value[1])


def test_memory_of_blocks_in_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="in pieces"):
        _ = mixed_cache(4).memory


@pytest.mark.parametrize("layers", [slice(None), slice(1, 4)])
def test_the_kernel_copies_each_group_of_layers(layers: slice, device: str) -> None:
    source, target, expected = mixed_cache(6), mixed_cache(9, by_block=True), mixed_cache(9, by_block=True)
    blocks, places = torch.tensor([4, 0]), torch.tensor([8, 2])
    copy_blocks(source, blocks, expected, places, layers)
    for of, into, wanted in zip(source.part(layers), target.part(layers), expected.part(layers), strict=True):
        there = into.to(device)
        copy_runs(of.to(device), blocks.to(device), there, places.to(device))
        assert torch.equal(there.cpu(), wanted)
