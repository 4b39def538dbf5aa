"""Products of Triton kernels whose bits do not depend on other rows: interpreted without a GPU, compiled with one."""

from __future__ import annotations

from itertools import product as product_of
from types import SimpleNamespace

import pytest
import torch

from holdfast.lm.kernels.linear import invariant_product as module
from holdfast.lm.kernels.linear.fused_layers import silu_mul
from holdfast.lm.kernels.linear.invariant_product import (
    Gpu,
    SumOrder,
    Tile,
    cuts,
    gated_product,
    gpu_of,
    order_of,
    order_on_ranks,
    partial_products,
    product,
    skinny_launch,
    slice_products,
    tile_for,
)
from holdfast.lm.kernels.linear.rank_sums import tree_sum
from holdfast.lm.kernels.packed import Form
from tests.lm.kernels.packed_weights import draw_packed

FEW, MANY = Gpu(1, alike=True), Gpu(1000, alike=True)
"""A device that a product fills without cuts, and one that it does not."""
H200 = Gpu(132, alike=True)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that an interpreter computes quickly."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "BLOCK_M", 8)
        monkeypatch.setattr(module, "BLOCK_N", 16)
        monkeypatch.setattr(module, "LEAST_PLAIN_PART", 128)
        monkeypatch.setattr(module, "FEW_ROWS", 0)  # NumPy adds up tiles of other sizes in other orders


def drawn(
    rows: int, outputs: int, inputs: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows * outputs + inputs)
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) * inputs**-0.5
    return x.to(device, dtype), weight.to(device, dtype), torch.randn(outputs).to(device, dtype)


@pytest.mark.each_pair
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 700), (16, 64), (33, 301)])
@pytest.mark.parametrize("gpu", [FEW, MANY])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_that_of_float64(outputs: int, inputs: int, gpu: Gpu, biased: bool, device: str) -> None:
    x, weight, bias = drawn(11, outputs, inputs, device)
    found = product(x, weight, bias if biased else None, gpu=gpu)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    turned = product(x, weight.t().contiguous().t(), bias if biased else None, gpu=gpu)
    torch.testing.assert_close(turned.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("inputs", [704, 670])
def test_a_row_has_the_same_bits_alone_and_among_others_cut_or_not(
    dtype: torch.dtype, inputs: int, device: str
) -> None:
    """Cut products are added up by their readers, and the norm's kernel adds them as this test does."""
    x, weight, bias = drawn(19, 33, inputs, device, dtype)
    order = order_of(weight, dtype, FEW, added=True)
    assert order.parts > 1 and cuts(x, weight, MANY, order)
    assert not cuts(x, weight, FEW, order) or device == "cuda"
    wanted = product(x, weight, bias, gpu=FEW)
    sums = partial_products(x, weight, gpu=FEW)[0]
    for begin, end in ((0, 19), (3, 4), (0, 8), (5, 18), (18, 19)):
        for gpu in (FEW, MANY):
            assert torch.equal(product(x[begin:end], weight, bias, gpu=gpu), wanted[begin:end])
            added = torch.zeros_like(sums[begin:end])
            for part in partial_products(x[begin:end], weight, gpu=gpu):
                added += part
            assert torch.equal(added, sums[begin:end])


def check_packed(form: Form, outputs: int, inputs: int, rows: int, device: str, dtype: torch.dtype) -> None:
    """A product is near float64's, and a row has the same bits alone and among others, cut or not."""
    weight, plain = draw_packed(form, outputs, inputs, device=device, rows=2 if form is Form.FP8 else 1)
    x, _, bias = drawn(rows, outputs, inputs, device, dtype)
    wanted = product(x, weight, bias, gpu=FEW)
    exact = x.double() @ plain.t() + bias.double()
    assert (wanted.double() - exact).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * exact.norm()
    sums = partial_products(x, weight, gpu=FEW)[0]
    assert cuts(x[:1], weight, MANY, order_of(weight, dtype, MANY))
    for begin, end in ((0, rows), (0, 8), (rows - 1, rows)):
        for gpu in (MANY,) if end - begin == rows else (FEW, MANY):
            assert torch.equal(product(x[begin:end], weight, bias, gpu=gpu), wanted[begin:end])
            added = torch.zeros_like(sums[begin:end])
            for part in partial_products(x[begin:end], weight, gpu=gpu):
                added += part
            assert torch.equal(added, sums[begin:end])


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_packed_weights_row_has_the_same_bits_alone_and_among_others(
    form: Form, dtype: torch.dtype, device: str
) -> None:
    check_packed(form, 18, 512, 9, device, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_compiled_products_of_packed_weights_have_the_same_bits_for_any_number_of_rows(
    form: Form, dtype: torch.dtype
) -> None:
    check_packed(form, 4096, 4096, 300, "cuda", dtype)
    check_packed(form, 1026, 1280, 70, "cuda", dtype)


def check_slices(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Sums have the same bits however many devices have the slices, and whatever rows are with them."""
    inputs = weight.shape[1]
    wanted = tree_sum(slice_products(x, weight, 8, gpu=MANY))
    exact = x.double() @ weight.double().t()
    assert (wanted.double() - exact).norm() < 1e-5 * exact.norm() or x.dtype != torch.float32
    for devices in (2, 4, 8):
        size = inputs // devices
        own = [slice(at, at + size) for at in range(0, inputs, size)]
        parts = [tree_sum(slice_products(x[3:, each], weight[:, each], 8 // devices, gpu=FEW)) for each in own]
        assert torch.equal(tree_sum(torch.stack(parts)), wanted[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_slices_are_added_alike_on_any_number_of_devices(dtype: torch.dtype, device: str) -> None:
    x, weight, _ = drawn(11, 40, 8 * 48, device, dtype)
    check_slices(x, weight)
    # The outputs that a device has decide nothing.
    order = order_on_ranks(weight, dtype, FEW)
    whole = product(x, weight, None, gpu=MANY, order=order)
    part = product(x, weight[10:20], None, gpu=FEW, order=order_on_ranks(weight[10:20], dtype, FEW))
    assert torch.equal(whole[:, 10:20], part)


def test_inputs_without_equal_slices_are_refused(device: str) -> None:
    for inputs, slices in ((8 * 40, 8), (100, 8)):
        x, weight, _ = drawn(2, 8, inputs, device)
        with pytest.raises(ValueError, match=f"{inputs} inputs have no {slices} equal slices of a multiple of 16"):
            slice_products(x, weight, slices, gpu=FEW)


@pytest.mark.gpu
@pytest.mark.parametrize("inputs", [4096, 11008, 14336])
def test_compiled_slices_are_added_alike_on_any_number_of_devices(inputs: int) -> None:
    x, weight, _ = drawn(70, 4096, inputs, "cuda", torch.bfloat16)
    check_slices(x, weight)


def test_no_rows_give_no_rows(device: str) -> None:
    x, weight, bias = drawn(3, 20, 96, device)
    assert product(x[:0], weight, bias, gpu=MANY).shape == (0, 20)
    assert partial_products(x[:0], weight, gpu=MANY).shape[1:] == (0, 20)


def test_the_order_of_a_sum_depends_on_the_weight_and_its_type_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def order(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16, *, added: bool = True) -> SumOrder:
        return order_of(torch.empty(outputs, inputs, dtype=dtype, device="meta"), dtype, MANY, added=added)

    for outputs, inputs in ((4096, 4096), (4096, 14336), (128256, 4096), (6144, 4096), (576, 576), (64, 10)):
        for dtype, added in product_of((torch.bfloat16, torch.float32), (False, True)):
            found = order(outputs, inputs, dtype, added=added)
            assert found.size % found.step == 0
            assert (found.parts - 1) * found.size < inputs <= found.parts * found.size
            assert found.parts == 1 or found.size >= module.LEAST_STEPS * found.step
            assert found.parts == 1 or added or dtype == torch.float32
    assert order(128256, 4096, added=False).parts == 1
    parts = {
        shape: order(*shape).parts for shape in ((4096, 14336), (4096, 4096), (2048, 8192), (2048, 2048), (1024, 2048))
    }
    assert [*parts.values()] == [2, 1, 3, 1, 2], "parts are long, but where few programs would have work"


def test_few_rows_of_plain_weights_are_computed_by_the_skinny_kernel_in_the_same_parts(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.undo()
    for outputs, inputs in ((40, 2048), (70, 1000)):
        x, weight, bias = drawn(5, outputs, inputs, device, torch.float16)
        order = order_of(weight, x.dtype, FEW, added=True)
        launch = skinny_launch(x, weight, order, FEW)
        assert launch is not None and launch.parts == order.parts and launch.part_length(inputs) == order.size
        exact = x.double() @ weight.double().t()
        partials = partial_products(x, weight, gpu=FEW)
        assert len(partials) == order.parts
        for part in range(order.parts):
            own = slice(part * order.size, (part + 1) * order.size)
            wanted = x[:, own].double() @ weight[:, own].double().t()
            torch.testing.assert_close(partials[part].double(), wanted, rtol=1e-4, atol=1e-4)
        found = product(x, weight, bias, gpu=FEW)
        torch.testing.assert_close(found.double(), exact + bias.double(), rtol=2e-3, atol=2e-3)
        gated = gated_product(x, weight, bias, gpu=FEW)
        assert gated is not None
        assert torch.equal(gated, silu_mul(found))
    row, weight, _ = drawn(1, 40, 2048, device, torch.float16)
    three = product(torch.cat([row] * 3), weight, None, gpu=FEW)
    assert torch.equal(product(row, weight, None, gpu=FEW), three[:1])


def test_every_cut_of_a_sum_is_computed_by_the_skinny_kernel_for_up_to_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for outputs, inputs in ((4096, 14336), (2048, 8192), (3584, 18944), (8192, 28672), (1024, 3072)):
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="meta")
        order = order_of(weight, weight.dtype, H200, added=True)
        for rows in (1, 32, 33, 64):
            launch = skinny_launch(weight[:1].expand(rows, -1), weight, order, H200)
            assert launch is not None and launch.parts == order.parts > 1


def test_a_tile_has_programs_for_the_device_and_stages_for_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def tile(rows: int, outputs: int, parts: int = 1) -> tuple[int, int]:
        weight = torch.empty(outputs, 4096, dtype=torch.bfloat16, device="meta")
        found = tile_for(rows, weight, torch.bfloat16, gpu=H200, parts=parts)
        return found.rows, found.outputs

    assert [tile(1, 128_256), tile(128, 6144), tile(128, 4096, 2), tile(256, 4096, 2)] == [(64, 128)] * 4
    assert [tile(128, 28_672), tile(256, 4096, 4), tile(2048, 3072)] == [(128, 128)] * 3
    assert tile(2048, 28_672) == (128, 256)
    large = Tile(128, 256, 8, 4)
    assert [large.stages_within(shared, 128) for shared in (232_448, 166_912, 101_376, 9)] == [4, 3, 2, 1]


def test_gpus_that_do_not_add_up_alike_have_one_tile_and_one_kernel_for_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.undo()
    other = Gpu(132, alike=False)
    x, weight, _ = drawn(5, 40, 4096, device, torch.float16)
    order = order_of(weight, x.dtype, other)
    assert order == order_of(weight, x.dtype, other, added=True) and order.parts == 8
    assert skinny_launch(x, weight, order, other) is None and gated_product(x, weight, None, gpu=other) is None
    tiles = {tile_for(rows, weight, x.dtype, gpu=other, parts=parts) for rows in (1, 65, 4096) for parts in (1, 8)}
    assert tiles == {Tile(64, 128, 4, 4)}


def test_tiles_may_add_up_alike_on_the_kind_of_gpu_where_they_were_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index else (9, 0))
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = [gpu_of(torch.device(name)) for name in ("cuda:0", "cuda:1")]
    assert found == [H200, Gpu(132, alike=False)]
    assert not gpu_of(torch.device("cpu")).alike


def test_the_skinny_kernel_computes_no_other_products(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.undo()
    x, weight, _ = drawn(5, 40, 2048, device, torch.float16)
    order = order_of(weight, x.dtype, FEW, added=True)
    for rows, own in ((x[:0], weight), (x, weight.t().contiguous().t()), (x.float(), weight.float())):
        assert skinny_launch(rows, own, order, FEW) is None
    assert skinny_launch(x.new_zeros(65, 2048), weight, order, FEW) is None
    odd = SumOrder(16, 80, 26)
    assert skinny_launch(x, weight, odd, FEW) is None
    assert gated_product(x.float(), weight.float(), None, gpu=FEW) is None
    short = drawn(5, 40, 128, device, torch.float16)
    assert skinny_launch(*short[:2], order_of(short[1], torch.float16, FEW), FEW) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14336), (1000, 1030)])
def test_compiled_products_have_the_same_bits_for_any_number_of_rows(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    x, weight, bias = drawn(600, outputs, inputs, "cuda", dtype)
    wanted = product(x, weight, bias, gpu=H200)
    error = (wanted.double() - x.double() @ weight.double().t() - bias.double()).norm() / wanted.double().norm()
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)
    for begin, end in ((0, 1), (7, 8), (0, 16), (3, 67), (100, 228), (88, 600)):
        assert torch.equal(product(x[begin:end], weight, bias, gpu=H200), wanted[begin:end])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(28672, 4096), (2000, 1032)])
def test_a_compiled_gate_has_the_same_bits_for_few_rows_and_for_many(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    x, weight, bias = drawn(300, outputs, inputs, "cuda", dtype)
    for own in (None, bias):
        wanted = silu_mul(product(x, weight, own, gpu=H200))
        for begin, end in ((0, 1), (7, 23), (200, 232), (100, 164)):
            found = gated_product(x[begin:end], weight, own, gpu=H200)
            assert found is None or torch.equal(found, wanted[begin:end])
