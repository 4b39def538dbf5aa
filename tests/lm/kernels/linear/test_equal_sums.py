"""Kernels of a product are compared before they are trusted: interpreted without a GPU, compiled with one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product as product_of
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.linear import equal_sums, invariant_product
from holdfast.lm.kernels.linear import invariant_layers as layers
from holdfast.lm.kernels.linear.equal_sums import Shape, Way, adds_alike
from holdfast.lm.kernels.linear.invariant_layers import InvariantLayerOps
from holdfast.lm.kernels.linear.invariant_product import Gpu, Tile, order_of
from holdfast.lm.kernels.linear.skinny_gemm import (
    FEW_TOKENS,
    FEW_TOKENS_DEEP,
    MORE_TOKENS,
    MORE_TOKENS_CUT,
    SkinnyLaunch,
)
from holdfast.lm.kernels.stacked import StackedWeight
from tests.lm.kernels.linear.test_layers import shape_of

H200 = Gpu(132, alike=True)
SMALL = Gpu(4, alike=True)
Launch = SkinnyLaunch | Tile


@pytest.fixture(autouse=True)
def fresh() -> None:
    """No outcome of another test is known."""
    equal_sums._differing.cache_clear()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles and numbers of rows that an interpreter computes quickly. NumPy adds up few rows in another order."""
    if not torch.cuda.is_available():
        for name, value in {"BLOCK_M": 8, "BLOCK_N": 16, "LEAST_PLAIN_PART": 128, "FEW_ROWS": 0}.items():
            monkeypatch.setattr(invariant_product, name, value)
        monkeypatch.setattr(equal_sums, "LOOKED_UP", (1, 8, 9, 17, 40))
        monkeypatch.setattr(equal_sums, "COMPARED_ROWS", 19)


def ways_of(outputs: int, inputs: int, *, slices: int = 0) -> list[dict[Way, list[int]]]:
    """The ways of a weight on an H200, for each order of its sums."""
    return [*equal_sums._ways(Shape(outputs, inputs, True), torch.bfloat16, H200, slices).values()]


def test_every_kernel_that_may_read_a_weight_is_compared_at_the_ends_of_its_range() -> None:
    plain, added = ways_of(4096, 40_960)
    large, middle, deep = Tile(128, 256, 8, 4), Tile(128, 128, 8, 4), Tile(64, 128, 4, 6)
    assert {way.launch for way in plain} == {FEW_TOKENS_DEEP, deep, middle, large}
    assert {way.height for way in plain if way.launch == FEW_TOKENS_DEEP} == {16, 32, 64}
    assert plain[Way(FEW_TOKENS_DEEP, False, 32)] == [17, 32]
    heights = {way.height for way in added if way.launch == middle and way.apart}
    assert heights == {128, 0}, "a tile that holds all rows is compiled in another way"
    cut = {way.launch for way in added if way.apart}
    kinds = {FEW_TOKENS_DEEP.block_k, MORE_TOKENS_CUT.block_k}
    assert {each.block_k for each in cut if isinstance(each, SkinnyLaunch)} == kinds
    assert middle in cut and {way.launch for way in added if not way.apart} == {middle, large}
    (head,) = ways_of(128_256, 4096)[:1]
    few = {way.launch for way in head if isinstance(way.launch, SkinnyLaunch)}
    assert few == {FEW_TOKENS, MORE_TOKENS}, "many outputs have kernels of their own"


def test_the_kernels_of_every_product_are_among_those_compared() -> None:
    """For each number of rows, what `product` and `partial_products` launch."""
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1000, 1030), (64, 640), (1, 4096))
    for outputs, inputs in shapes:
        ways = equal_sums._ways(Shape(outputs, inputs, True), torch.bfloat16, H200, 0)
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        for rows, added in product_of((1, 16, 31, 64, 65, 100, 128, 500, 2048, 8192, 30_000, 500_000), (False, True)):
            order = order_of(weight, torch.bfloat16, H200, added=added)
            x = torch.empty(rows, inputs, dtype=torch.bfloat16, device="meta")
            apart = invariant_product.cuts(x, weight, H200, order)
            launch = invariant_product.launch_of(x, weight, order, H200, apart=apart)
            assert Way(launch, apart, equal_sums._height(launch, rows)) in ways[order]


def test_sums_cut_for_ranks_are_compared_in_their_slices() -> None:
    plain, cut = ways_of(4096, 4096, slices=8)
    assert not any(way.apart for way in plain) and all(way.apart for way in cut)
    assert len(ways_of(4096, 100, slices=8)) == 1, "such a weight adds nothing to the stream"


def weights(dtype: torch.dtype, device: str) -> list[Any]:
    parts = torch.randn(20, 704, device=device, dtype=dtype), torch.randn(12, 704, device=device, dtype=dtype)
    return [torch.randn(33, 704, device=device, dtype=dtype), StackedWeight(parts), torch.randn(9, device=device)]


def one_bit_off(launch: Launch, rows: int) -> Callable[..., None]:
    """`run`, which gets a number of the last row wrong with this launch, if it has as many rows or more."""
    whole = invariant_product.run

    def wrong(x: torch.Tensor, *given: Any, apart: bool) -> None:
        whole(x, *given, apart=apart)
        out, launched = given[2], given[4]
        if launched == launch and len(x) >= rows:
            last = out.view(-1)[-1:]
            last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))

    return wrong


@pytest.mark.usefixtures("tiny")
def test_a_tile_with_one_wrong_bit_leaves_the_one_tile_and_a_warning(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu = SMALL if device == "cpu" else H200
    monkeypatch.setattr(layers, "gpu_of", lambda where: gpu)
    given = weights(torch.float16, device)
    ops = InvariantLayerOps(shape_of(device, torch.float16))
    assert ops.settle(given) == "" and ops._gpu == gpu and not caplog.records
    middle = invariant_product.tile_for(10_000, given[0], torch.float16, gpu=gpu)
    assert middle != invariant_product.the_tile(given[0], torch.float16)
    equal_sums._differing.cache_clear()
    monkeypatch.setattr(equal_sums, "run", one_bit_off(middle, 2))
    assert ops.settle(given) == ", one tile" and ops._gpu == Gpu(gpu.processors, alike=False)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "sums of 704 inputs in float16 have other bits by" in told[0] and str(middle) in told[0]
    x = torch.randn(19, 704, device=device, dtype=torch.float16)
    whole = ops.linear(x, given[0])
    assert torch.equal(ops.linear(x[3:4], given[0]), whole[3:4])


def test_a_gate_with_one_wrong_bit_is_found(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates of few rows are computed with their product, and should have the bits of a gate after it.

    Sums are exact here, so that NumPy's order does not count.
    """

    def whole_numbers(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return (torch.arange(size[0] * size[1]).view(size) * 7 % 5 - 2).to(device, dtype)

    monkeypatch.setattr(equal_sums, "_random", whole_numbers)
    monkeypatch.setattr(equal_sums, "LOOKED_UP", (1, 9))
    monkeypatch.setattr(equal_sums, "COMPARED_ROWS", 64)
    whole = equal_sums.skinny_gemm

    def wrong(x: torch.Tensor, weight: Any, bias: None, out: torch.Tensor, *given: Any, **how: Any) -> None:
        whole(x, weight, bias, out, *given, **how)
        out[0, -1, -1] += 1

    def gates() -> list[bool]:
        results = equal_sums._results(Shape(32, 256, True), torch.float16, torch.device(device), SMALL, 0)
        return [torch.equal(found, wanted) for name, found, wanted in results if name.startswith("gated")]

    assert gates() == [True] * 4
    monkeypatch.setattr(equal_sums, "skinny_gemm", wrong)
    assert gates() == [False] * 4


@pytest.mark.usefixtures("tiny")
def test_the_outcome_is_found_once_in_a_process_and_only_for_plain_weights_of_16_bits(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, compared = weights(torch.float16, device), list[Shape]()
    monkeypatch.setattr(equal_sums, "_results", lambda shape, *_: compared.append(shape) or ())
    for _ in range(2):
        assert adds_alike([*given, given[0].clone()], torch.float16, SMALL)
    assert [shape for shape in compared if device == "cpu"] in ([], [Shape(n, 704, True) for n in (33, 20, 12)])
    assert adds_alike(weights(torch.float32, device), torch.float32, SMALL)
    assert adds_alike(given, torch.bfloat16, SMALL), "weights of another type have other products"
    assert len(compared) == 3 or device == "cuda"


def test_all_devices_that_share_layers_take_the_one_tile_if_one_of_them_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device says so to the others also if it is of a kind that compares nothing."""
    monkeypatch.setattr(
        layers, "adds_alike", lambda weights, dtype, gpu, slices: gpu == SMALL or pytest.fail("compared")
    )
    for gpu, others, said in ((SMALL, 1, ""), (SMALL, 0, ", one tile"), (Gpu(108, alike=False), 1, ", one tile")):
        asked: list[torch.Tensor] = []

        def gather(own: torch.Tensor, others: int = others, asked: list[torch.Tensor] = asked) -> torch.Tensor:
            asked.append(own)
            return torch.stack((own, torch.full_like(own, others)))

        monkeypatch.setattr(layers, "gpu_of", lambda where, gpu=gpu: gpu)
        ops = InvariantLayerOps(shape_of("cpu"), SimpleNamespace(size=2, gather=gather), ranks=2)  # type: ignore[arg-type]
        assert ops.settle([]) == said and ops._gpu.alike == (said == "") and len(asked) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slices", [0, 8])
def test_the_kernels_for_a_llama_add_up_alike_on_this_gpu(dtype: torch.dtype, slices: int) -> None:
    sizes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1000, 1040))
    given = [torch.zeros(size, device="cuda", dtype=dtype) for size in sizes]
    assert adds_alike(given, dtype, invariant_product.gpu_of(torch.device("cuda")), slices)
