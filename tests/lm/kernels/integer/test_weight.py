"""Weights that are multiplied as integers: packing, and products against float64, by every set of instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.kernels.integer.weight import BLOCK, OFFSETS, IntegerWeight, fits, integers_of, pack_integers
from holdfast.lm.kernels.packed import Form, PackedWeight, packed_nibbles, packed_sixes
from tests.compiled import integer_library

Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@pytest.fixture
def threads() -> Iterator[None]:
    """Three threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def draw(rows: int, inputs: int, bits: int, seed: int = 0) -> Drawn:
    """Numbers, scales of both signs, and lows of 4 bits."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1 << bits, (rows, inputs), generator=generator).to(torch.uint8)
    scale = torch.randn(rows, inputs // (16 if bits == 6 else 32), generator=generator) * 0.02
    low = torch.randn(rows, inputs // 32, generator=generator) * 0.1 if bits == 4 else None
    return numbers, scale, low


def exact(drawn: Drawn, bits: int) -> torch.Tensor:
    """The weight that these stand for, in float64."""
    numbers, scale, low = drawn
    plain = (numbers.double().unflatten(1, (scale.shape[1], -1)) - OFFSETS[bits]) * scale.double()[..., None]
    return (plain if low is None else plain + low.double()[..., None]).flatten(1)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Activations in float64 as the library rounds them: to 1/127 of the largest of 32."""
    blocks = x.float().unflatten(1, (-1, BLOCK))
    step = blocks.abs().amax(2, keepdim=True) / 127
    numbers = (blocks * torch.where(step > 0, 127 / blocks.abs().amax(2, keepdim=True), 0.0)).round()
    return (numbers.double() * step.double()).flatten(1)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.whole_product
@pytest.mark.parametrize("bits", OFFSETS)
@pytest.mark.parametrize(("rows", "inputs", "tokens"), [(16, 32, 1), (37, 96, 3), (130, 256, 8), (48, 512, 75)])
def test_a_product_is_that_of_rounded_activations(
    library: Library, bits: int, rows: int, inputs: int, tokens: int
) -> None:
    weight = pack_integers(library, *draw(rows, inputs, bits), bits)
    x, bias = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(1)), torch.randn(rows)
    for own in (None, bias):
        wanted = rounded(x) @ weight.dequantized(torch.float64).t() + (0.0 if own is None else own.double())
        assert apart(weight.linear(x, own), wanted) < 1e-6
    half = x.bfloat16()
    wanted = rounded(half) @ weight.dequantized(torch.float64).t()
    found = weight.linear(half, None)
    assert found.dtype == torch.bfloat16 and apart(found, wanted) < 2**-8
    assert torch.equal(found, weight.linear(half.float(), None).bfloat16()), "sums are rounded once, to the nearest"


@pytest.mark.whole_product
@pytest.mark.parametrize("bits", OFFSETS)
def test_rounding_activations_moves_a_product_by_less_than_one_percent(library: Library, bits: int) -> None:
    drawn = draw(256, 2048, bits)
    x = torch.randn(5, 2048, generator=torch.Generator().manual_seed(2))
    assert apart(pack_integers(library, *drawn, bits).linear(x, None), x.double() @ exact(drawn, bits).t()) < 0.01


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([*OFFSETS]), st.integers(1, 70), st.integers(1, 9), st.integers(1, 140), st.integers(0, 1 << 20))
def test_products_of_any_shape_equal_those_of_rounded_activations(
    bits: int, rows: int, blocks: int, tokens: int, seed: int
) -> None:
    weight = pack_integers(integer_library(), *draw(rows, blocks * BLOCK, bits, seed), bits)
    x = torch.randn(tokens, blocks * BLOCK, generator=torch.Generator().manual_seed(seed))
    wanted = rounded(x) @ weight.dequantized(torch.float64).t()
    assert torch.allclose(weight.linear(x, None).double(), wanted, rtol=1e-5, atol=float(wanted.abs().max()) * 1e-5)


@pytest.mark.whole_product
@pytest.mark.parametrize("bits", OFFSETS)
def test_sums_of_the_largest_numbers_do_not_overflow(library: Library, bits: int) -> None:
    """Sums of 16 bits, which AVX2 makes of pairs, come near their limit."""
    scale = torch.ones(16, 64 // (16 if bits == 6 else 32))
    low = torch.zeros(16, 2) if bits == 4 else None
    for number in (0, (1 << bits) - 1):
        numbers = torch.full((16, 64), number, dtype=torch.uint8)
        weight = pack_integers(library, numbers, scale, low, bits)
        for sign in (1.0, -1.0):
            found = weight.linear(torch.full((2, 64), sign), None)
            assert torch.allclose(found, torch.full((2, 16), sign * 64.0 * (number - OFFSETS[bits])), rtol=1e-6)


@pytest.mark.whole_product
@pytest.mark.parametrize("bits", OFFSETS)
def test_a_result_depends_neither_on_other_rows_nor_on_threads(library: Library, bits: int, threads: None) -> None:
    weight = pack_integers(library, *draw(2050, 256, bits), bits)
    x = torch.randn(200, 256, generator=torch.Generator().manual_seed(3))
    whole = weight.linear(x, None)
    for first, count in ((0, 1), (3, 7), (150, 50)):
        assert torch.equal(weight.linear(x[first : first + count], None), whole[first : first + count])
    torch.set_num_threads(1)
    assert torch.equal(weight.linear(x, None), whole)


def test_levels_give_equal_integers(threads: None) -> None:
    """Float sums may differ in their last bits only."""
    found = integer_library()
    x = torch.randn(9, 512, generator=torch.Generator().manual_seed(4))
    for bits in OFFSETS:
        weight = pack_integers(found, *draw(64, 512, bits), bits)
        results = [replace(weight, library=replace(found, level=level)).linear(x, None) for level in range(found.level)]
        assert all(torch.allclose(each, weight.linear(x, None), rtol=1e-4, atol=1e-4) for each in results)


@pytest.mark.whole_product
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_makes_its_row_nan_and_no_other(library: Library, bad: float) -> None:
    weight = pack_integers(library, *draw(32, 64, 4), 4)
    x = torch.randn(3, 64)
    x[1, 40] = bad
    for dtype in (torch.float32, torch.bfloat16):
        found = weight.linear(x.to(dtype), None)
        assert found[1].isnan().all() and found[::2].isfinite().all()


def test_zeros_and_tiny_numbers_give_zero(library: Library) -> None:
    weight = pack_integers(library, *draw(32, 64, 6), 6)
    assert not weight.linear(torch.zeros(2, 64), None).any()
    assert not weight.linear(torch.full((2, 64), 1e-38), None).any()
    assert weight.linear(torch.full((1, 64), 1e-20), None).any()


@pytest.mark.whole_product
@pytest.mark.parametrize("bits", OFFSETS)
@pytest.mark.parametrize("rows", [16, 37, 1100])
def test_a_weight_is_off_by_no_more_than_its_scale_and_low_in_float16(bits: int, rows: int) -> None:
    _, scale, low = drawn = draw(rows, 128, bits)
    weight, plain = pack_integers(integer_library(), *drawn, bits), exact(drawn, bits)
    assert weight.shape == (rows, 128)
    largest = plain.abs() + (0.0 if low is None else 2 * low.double().abs().repeat_interleave(32, 1))
    least = scale.abs().amax(1, keepdim=True).double() * 2**-24 * (1 << bits)
    assert ((weight.dequantized(torch.float64) - plain).abs() <= largest * 2**-11 + least).all()


def test_scales_of_any_size_keep_their_bits() -> None:
    for size in (1e-12, 1e12):
        numbers, scale, low = draw(20, 64, 4)
        assert low is not None
        drawn = numbers, scale * size, low * size
        found = pack_integers(integer_library(), *drawn, 4).dequantized(torch.float64)
        assert apart(found, exact(drawn, 4)) < 2**-11
    nothing = pack_integers(integer_library(), numbers, torch.zeros_like(scale), torch.zeros_like(low), 4)
    assert not nothing.dequantized(torch.float32).any() and not nothing.linear(torch.ones(1, 64), None).any()
    large = pack_integers(integer_library(), numbers, torch.full_like(scale, 1e-9), torch.full_like(low, 1.0), 4)
    assert apart(large.dequantized(torch.float64), torch.ones(20, 64, dtype=torch.float64)) < 2**-11


def test_scales_far_below_the_largest_of_their_row_are_read(library: Library) -> None:
    """They are below the smallest normal number of float16."""
    numbers, _, _ = draw(16, 64, 8)
    weight = pack_integers(library, numbers, torch.tensor([[1.0, -(2.0**-18)]]).repeat(16, 1), None, 8)
    x = torch.zeros(1, 64)
    x[0, 32:] = torch.randn(32)
    found = weight.linear(x, None)
    assert found.any() and apart(found, rounded(x) @ weight.dequantized(torch.float64).t()) < 1e-6


def stored(bits: int) -> PackedWeight:
    generator = torch.Generator().manual_seed(7)
    numbers = torch.randint(1 << bits, (24, 256), generator=generator).to(torch.uint8)
    if bits == 4:
        scale, low = torch.rand(24, 8, generator=generator), torch.randn(24, 8, generator=generator)
        return PackedWeight(Form.INT4, packed_nibbles(numbers), scale, 32, low=low)
    if bits == 6:
        scale = torch.randint(-128, 128, (24, 16), generator=generator).to(torch.int8)
        coarse = torch.rand(24, 1, generator=generator).half()
        return PackedWeight(Form.INT6, packed_sixes(numbers), scale, 16, coarse=coarse)
    scale = torch.rand(24, 8, generator=generator).half()
    return PackedWeight(Form.INT8, numbers.view(torch.int8), scale, 32)


@pytest.mark.parametrize("bits", OFFSETS)
def test_stored_weights_keep_their_numbers(bits: int) -> None:
    weight = stored(bits)
    found, plain = integers_of(integer_library(), weight), weight.dequantized(torch.float64)
    assert apart(found.dequantized(torch.float64), plain) < 2**-11
    size = {4: 5.0, 6: 7.0, 8: 8.5}[bits]
    assert found.nbytes == 32 * 256 * size / 8 + 32 * 4, "rows are those of whole tiles"


def test_a_sum_between_two_bfloat16_numbers_becomes_the_even_one(library: Library) -> None:
    numbers = torch.full((2, 32), 128, dtype=torch.uint8)
    numbers[:, 1:4] += torch.tensor([[127, 127, 3], [127, 127, 5]], dtype=torch.uint8)
    weight = pack_integers(library, numbers, torch.ones(2, 1), None, 8)
    x = torch.zeros(1, 32)
    x[0, :4] = torch.tensor([127.0, 1, 1, 1])
    assert weight.linear(x, None).tolist() == [[257, 259]]
    assert weight.linear(x.bfloat16(), None).tolist() == [[256, 260]]


def test_a_view_of_activations_is_multiplied_as_it_reads() -> None:
    weight = pack_integers(integer_library(), *draw(16, 64, 4), 4)
    x = torch.randn(3, 128)[:, ::2]
    assert torch.equal(weight.linear(x, None), weight.linear(x.clone(), None))


def test_no_rows_give_no_rows() -> None:
    assert pack_integers(integer_library(), *draw(16, 64, 8), 8).linear(torch.empty(0, 64), None).shape == (0, 16)


def test_shapes_that_do_not_fit_are_refused() -> None:
    numbers, scale, low = draw(16, 64, 4)
    found = integer_library()
    for arguments in (
        (numbers[:, :48], scale[:, :1], low, 4),
        (numbers, scale[:, :1], low, 4),
        (numbers, scale, None, 4),
        (numbers, scale, low, 8),
        (numbers, scale, None, 5),
    ):
        with pytest.raises(ValueError, match="cannot be packed"):
            pack_integers(found, *arguments)
    with pytest.raises(ValueError, match="not finite"):
        pack_integers(found, numbers, scale * float("inf"), low, 4)
    with pytest.raises(ValueError, match="FP4 has no integers"):
        integers_of(found, PackedWeight(Form.FP4, numbers, scale, 16))
    weight = pack_integers(found, numbers, scale, low, 4)
    with pytest.raises(ValueError, match="activations have 32 inputs, and the weight has 64"):
        weight.linear(torch.ones(1, 32), None)
    with pytest.raises(ValueError, match="float16 on cpu"):
        weight.linear(torch.ones(1, 64, dtype=torch.float16), None)
    with pytest.raises(ValueError, match=r"a weight \[16, 64\] of 5 bits cannot be multiplied"):
        IntegerWeight(found, weight.data, weight.factors, 5, 16).linear(torch.ones(1, 64), None)


def test_groups_of_whole_blocks_fit() -> None:
    assert fits(256, 32) and fits(256, 128) and not fits(48, 16) and not fits(256, 16) and not fits(80, 32)
