"""The library computes deterministic products where its bits were seen to be equal, and no others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from holdfast.lm.execution.graphs import GraphSizes
from holdfast.lm.kernels.linear import equal_sums, invariant_product
from holdfast.lm.kernels.linear import invariant_layers as layers
from holdfast.lm.kernels.linear.equal_sums import adds_alike, rows_of_library
from holdfast.lm.kernels.linear.invariant_layers import InvariantLayerOps
from holdfast.lm.kernels.linear.invariant_product import (
    Gpu,
    SumOrder,
    add_product,
    gpu_of,
    order_of,
    order_on_ranks,
    partial_products,
    product,
    slice_products,
)
from holdfast.lm.kernels.linear.library_product import (
    LEAST_CUT_ROWS,
    MOST_REPEATED,
    ROWS,
    LibraryKind,
    library_pieces,
    multiply,
    pieces_of,
)
from tests.lm.kernels.linear.test_layers import shape_of

FP16 = torch.float16
OUTPUTS, INPUTS, PART = 64, 256, 128


class Library:
    """PyTorch's products as on a GPU, where sums of 16-bit numbers may be written in float32. It notes their rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.wrong = 0
        """Number of rows at which the last sum is one off."""

    def mm(self, x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, out_dtype: Any = None) -> None:
        self.addmm(torch.zeros_like(out), x, weight, out=out, out_dtype=out_dtype)

    def addmm(
        self, to: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *, out: torch.Tensor, out_dtype: Any = None
    ) -> None:
        assert out_dtype in (None, out.dtype)
        self.rows.append(len(x))
        out.copy_(to.float() + x.float() @ weight.float())
        if len(x) == self.wrong:
            out[-1, -1] += 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    """Small tiles and numbers of rows. Sums are of whole numbers, which are exact in any order."""
    made = Library()
    monkeypatch.setattr(torch, "mm", made.mm)
    monkeypatch.setattr(torch, "addmm", made.addmm)
    for name, value in {"BLOCK_M": 8, "BLOCK_N": 16, "FEW_ROWS": 0, "LEAST_PLAIN_PART": PART}.items():
        monkeypatch.setattr(invariant_product, name, value)
    monkeypatch.setattr(equal_sums, "_random", whole_numbers)
    monkeypatch.setattr(equal_sums, "ROWS", (8, 16, 24))
    monkeypatch.setattr("holdfast.lm.kernels.linear.library_product.LEAST_PART", PART)
    equal_sums._differing_in_library.cache_clear()
    return made


def whole_numbers(*size: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    return (torch.arange(size[0] * size[1]).view(size) * 7 % 5 - 2).to(device, dtype)


def x_and_weight(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return whole_numbers(rows, INPUTS, dtype=FP16), whole_numbers(OUTPUTS, INPUTS, dtype=FP16)


@pytest.mark.parametrize("sizes", [ROWS, (512, 2048), (72, 2048), (1000, 1024)])
def test_pieces_cover_the_rows_with_compared_sizes_and_repeat_few(sizes: tuple[int, ...]) -> None:
    cut = 0
    for count in (1, 64, 72, 100, 511, 512, 513, 700, 1023, 1025, 2000, 2049, 2300, 5000, 8192, 8200, 30_000):
        pieces = pieces_of(count, sizes)
        if count in sizes:
            assert pieces == [slice(0, count)]
        if not pieces:
            continue
        lengths = [each.stop - each.start for each in pieces]
        assert {row for each in pieces for row in range(each.start, each.stop)} == {*range(count)}
        assert {*lengths} <= {*sizes} and sum(lengths) <= (1 + MOST_REPEATED) * count
        assert len(pieces) <= 2 + count // sizes[-1]
        cut += len(pieces) > 1
    assert cut >= 2


def test_numbers_of_rows_without_sizes_that_pay_have_no_pieces() -> None:
    assert pieces_of(100, ROWS) == [], "two pieces would read the weight twice"
    assert pieces_of(600, (512,)) == [], "nearly all rows would be computed twice"
    assert pieces_of(1000, (2048,)) == pieces_of(1000, ()) == []
    assert pieces_of(2000, (72, 2048)) == [], "many small pieces take long"
    assert len(pieces_of(LEAST_CUT_ROWS + 1, ROWS)) == 2


def test_the_sizes_of_captured_steps_are_compared() -> None:
    for most in (64, 256, 512):
        sizes = GraphSizes.of(most, 8192)
        assert {size for size in (*sizes.decodes, *sizes.tokens) if size > invariant_product.FEW_ROWS} <= {*ROWS}
    assert [*ROWS] == sorted({*ROWS})


def test_the_library_writes_sums_in_one_type_or_part_by_part(library: Library) -> None:
    x, weight = x_and_weight(8)
    halves = [x[:, part].float() @ weight[:, part].float().t() for part in (slice(0, PART), slice(PART, INPUTS))]
    whole, wide, apart = x.new_empty(8, OUTPUTS), torch.empty(8, OUTPUTS), torch.empty(2, 8, OUTPUTS)
    multiply(x, weight, whole, INPUTS)
    assert torch.equal(whole, sum(halves).half()) and library.rows == [8]
    multiply(x, weight, wide, PART)
    multiply(x, weight, apart, PART)
    assert torch.equal(wide, sum(halves)) and torch.equal(apart, torch.stack(halves)) and library.rows == [8] * 5


def test_rows_at_which_one_bit_differs_are_left_to_other_kernels_and_named(
    library: Library, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.wrong = 16
    gpu = Gpu(4, alike=True)
    monkeypatch.setattr(layers, "gpu_of", lambda device: gpu)
    monkeypatch.setattr(layers, "adds_alike", lambda *given: True)
    x, weight = x_and_weight(24)
    ops = InvariantLayerOps(shape_of("cpu", FP16))
    with caplog.at_level(logging.INFO, "holdfast.engine"):
        assert ops.settle([weight, weight.clone(), weight[:33], weight.t().contiguous().t()]) == ""
    one, two = LibraryKind(OUTPUTS, INPUTS, INPUTS, FP16, False, False), LibraryKind(64, 256, PART, FP16, True, False)
    assert ops._gpu.equal_rows == {one: (8, 24), two: (8, 24)}
    named = [record.getMessage() for record in caplog.records]
    assert len(named) == 2 and "sums of 256 inputs in float16, 64 outputs and 16 rows" in named[0]
    assert "in parts of 128" in named[1]
    library.rows.clear()
    own = product(x, weight, None, gpu=gpu)
    assert library.rows == []
    for rows, taken in ((24, [24]), (16, []), (8, [8]), (23, [])):
        assert torch.equal(ops.linear(x[:rows], weight), own[:rows])
        assert library.rows == taken
        library.rows.clear()


def test_another_order_shows_in_each_row_of_a_comparison_though_sums_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled sums are nothing but rounding errors, so that they differ in most places."""

    def in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), len(weight))
        for own, numbers in zip(x.float().unbind(1), weight.float().unbind(1), strict=True):
            total += own[:, None] * numbers[None, :]
        return total

    differing: list[float] = []

    def own(kind: LibraryKind, order: SumOrder, x: torch.Tensor, weight: torch.Tensor, *given: Any) -> torch.Tensor:
        return in_order(x, weight).to(kind.dtype)

    def halves(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, part: int, added: bool) -> None:
        out.copy_(in_order(x[:, :40], weight[:, :40]) + in_order(x[:, 40:], weight[:, 40:]))
        whole = in_order(x, weight).to(out.dtype)
        differing.extend((out != whole)[rows].float().mean().item() for rows in (slice(0, None, 2), slice(1, None, 2)))

    kind, gpu = LibraryKind(16, 128, 128, torch.bfloat16, False, False), Gpu(4, alike=True)
    monkeypatch.setattr(equal_sums, "_own_sums", own)
    monkeypatch.setattr(equal_sums, "multiply", halves)
    equal_sums._differing_in_library.cache_clear()
    given = kind, SumOrder(64, 128, 1), (8, 12), torch.device("cpu"), gpu
    assert equal_sums._differing_in_library(*given) == (8, 12)
    assert min(differing[1::2]) > 0.5 > max(differing[0::2])


def test_no_memory_for_a_comparison_leaves_the_product_to_other_kernels(
    library: Library, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> tuple[int, ...]:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(equal_sums, "_differing_in_library", full)
    with caplog.at_level(logging.INFO, "holdfast.engine"):
        assert rows_of_library([x_and_weight(1)[1]], FP16, Gpu(4, alike=True)) == {}
    assert "no memory is left to compare sums of 256 inputs in float16, 64 outputs" in caplog.text


def test_weights_that_the_library_may_read_otherwise_are_not_compared() -> None:
    gpu = Gpu(132, alike=True)

    def kinds(outputs: int, inputs: int, *, by_rows: bool = True, slices: int = 0) -> dict[LibraryKind, Any]:
        return equal_sums._kinds_of_library(equal_sums.Shape(outputs, inputs, by_rows), torch.bfloat16, gpu, slices)

    assert [(kind.parts, kind.wide, kind.added) for kind in kinds(4096, 14_336)] == [
        (1, False, False),
        (2, True, False),
    ]
    in_place = [(1, False, False), (1, True, False), (1, False, True)]
    assert [(kind.parts, kind.wide, kind.added) for kind in kinds(4096, 4096)] == in_place
    assert kinds(6144, 4096, by_rows=False) == kinds(100, 4096) == kinds(6144, 4100) == kinds(1 << 18, 4096) == {}
    assert [kind.parts for kind in kinds(1024, 2048)] == [1], "parts of 1,024 inputs are too short"
    plain, cut = kinds(4096, 16_384, slices=8).items()
    assert not plain[0].apart and cut[0].apart and cut[0].parts == 8 and cut[0].wide
    assert plain[1][1] == ROWS and max(cut[1][1]) * 4096 * 8 * 4 <= equal_sums.LARGEST_OUTPUT
    assert min(cut[1][1]) > 256, "parts of few rows have programs of their own"


@pytest.mark.parametrize("left_out", ["bias", "columns", "address", "type", "few rows"])
def test_products_that_were_not_compared_are_not_taken(
    library: Library, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = x_and_weight(8)
    kind = LibraryKind(OUTPUTS, INPUTS, INPUTS, FP16, False, False)
    bias = None
    if left_out == "bias":
        bias = whole_numbers(1, OUTPUTS, dtype=FP16)[0]
    elif left_out == "columns":
        weight = weight.t().contiguous().t()
    elif left_out == "address":
        x = torch.cat([x.new_zeros(1), x.view(-1)])[1:].view_as(x)
    elif left_out == "type":
        kind = kind._replace(dtype=torch.bfloat16)
    else:
        monkeypatch.setattr(invariant_product, "FEW_ROWS", 8)
        monkeypatch.setattr(invariant_product, "skinny_launch", lambda *given: None)
    found = product(x, weight, bias, gpu=Gpu(4, alike=True, equal_rows={kind: (8,)}))
    exact = x.float() @ weight.float().t() + (0 if bias is None else bias.float())
    assert torch.equal(found, exact.to(x.dtype)) and library.rows == []


def test_sums_in_parts_are_added_up_by_the_library_and_by_one_tile_alike(library: Library) -> None:
    """The tile adds to the stream itself; a norm adds the library's sums."""
    x, weight = x_and_weight(24)
    bias, stream = whole_numbers(1, OUTPUTS, dtype=FP16)[0], whole_numbers(24, OUTPUTS, dtype=FP16)
    kind = LibraryKind(OUTPUTS, INPUTS, PART, FP16, True, False)
    by_tile, by_library = Gpu(4, alike=True), Gpu(4, alike=True, equal_rows={kind: (24,)})
    assert order_of(weight, FP16, by_tile, added=True).parts == 2
    sums = partial_products(x, weight, gpu=by_library)
    assert len(sums) == 1 and library.rows == [24, 24]
    assert torch.equal(sums, partial_products(x, weight, gpu=by_tile)) and library.rows == [24, 24]
    added = stream.clone()
    assert add_product(added, x, weight, bias, gpu=by_tile)
    assert torch.equal(added, (stream.float() + (sums[0] + bias.float())).half())
    few = Gpu(1000, alike=True)
    for gpu, to in ((by_library, added.clone()), (few, added.clone()), (by_tile, added.t().contiguous().t())):
        assert not add_product(to, x, weight, bias, gpu=gpu) and torch.equal(to, added)


def test_the_library_adds_sums_of_one_part_to_the_stream_where_a_tile_does_so_alike(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    x, weight = (each[:, :PART].contiguous() for each in x_and_weight(24))
    stream, by_tile = whole_numbers(24, OUTPUTS, dtype=FP16), Gpu(4, alike=True)
    library.wrong = 16
    with caplog.at_level(logging.INFO, "holdfast.engine"):
        equal = rows_of_library([weight], FP16, by_tile)
    kind = LibraryKind(OUTPUTS, PART, PART, FP16, False, False, True)
    assert equal[kind] == (8, 24) and "other bits for added sums of 128 inputs in float16" in caplog.text
    for rows, taken in ((24, [24]), (16, []), (8, [8])):
        library.rows.clear()
        found, wanted = stream[:rows].clone(), stream[:rows].clone()
        assert add_product(found, x[:rows], weight, None, gpu=Gpu(4, alike=True, equal_rows={kind: equal[kind]}))
        assert library.rows == taken
        assert add_product(wanted, x[:rows], weight, None, gpu=by_tile) and torch.equal(found, wanted)
        assert torch.equal(wanted, (stream[:rows].float() + x[:rows].float() @ weight.float().t()).half())


def test_no_row_is_added_to_the_stream_twice() -> None:
    x, weight = torch.zeros(1000, 64, dtype=FP16), torch.zeros(64, 64, dtype=FP16)
    for added in (False, True):
        kind = LibraryKind(64, 64, 64, FP16, False, False, added)
        pieces = library_pieces(x, weight, torch.zeros_like(x), 64, False, {kind: (512, 600)}, added)
        assert pieces == ([] if added else [slice(0, 600), slice(488, 1000)])
        pieces = library_pieces(x, weight, torch.zeros_like(x), 64, False, {kind: (400, 600)}, added)
        assert pieces == [slice(0, 600), slice(600, 1000)]


def test_slices_for_ranks_are_written_apart_by_the_library(library: Library) -> None:
    x, weight = x_and_weight(24)
    gpu = Gpu(4, alike=True)
    equal = rows_of_library([weight], FP16, gpu, 2)
    own = slice_products(x, weight, 2, gpu=gpu)
    library.rows.clear()
    found = slice_products(x, weight, 2, gpu=Gpu(4, alike=True, equal_rows=equal))
    assert torch.equal(found, own) and library.rows == [24, 24]
    assert order_on_ranks(weight, FP16, gpu, 2).parts == 2


def captured(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a call in a CUDA graph, after a rehearsal."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.cuda.synchronize()
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 14_336), (2048, 8192), (4096, 4096)])
def test_compiled_products_have_the_bits_of_the_tile_by_the_library_in_graphs_too(
    dtype: torch.dtype, outputs: int, inputs: int
) -> None:
    weight = torch.randn(outputs, inputs, device="cuda").mul_(inputs**-0.5).to(dtype)
    own = gpu_of(weight.device)
    if not own.alike or not adds_alike([weight], dtype, own):
        pytest.skip("kernels of this GPU do not add up alike, so the library computes nothing")
    gpu = Gpu(own.processors, alike=True, equal_rows=rows_of_library([weight], dtype, own))
    assert any(gpu.equal_rows.values()), "the library has other bits for any number of rows"
    for rows in (72, 128, 512, 700, 2048, 2304, 4096, 5000):
        x = torch.randn(rows, inputs, device="cuda", dtype=dtype)
        for compute in (partial(product, x, weight, None), partial(partial_products, x, weight)):
            wanted, found = compute(gpu=own), partial(compute, gpu=gpu)
            assert torch.equal(found(), wanted)
            assert torch.equal(captured(found), wanted)
        stream = torch.randn(rows, outputs, device="cuda", dtype=dtype)
        wanted = stream.clone()
        if add_product(wanted, x, weight, None, gpu=own):
            found = stream.clone()
            if not add_product(found, x, weight, None, gpu=gpu):
                (sums,) = partial_products(x, weight, gpu=gpu)
                found = (stream.float() + sums).to(dtype)
            assert torch.equal(found, wanted)
