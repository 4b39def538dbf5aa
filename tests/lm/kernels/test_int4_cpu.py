"""4-bit weights of PyTorch's CPU kernel: packing, and products against float64."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.int4_cpu import GROUPS, Int4CpuWeight, is_fit, pack_for_cpu

CPU = torch.device("cpu")


def draw(rows: int, inputs: int, group: int) -> tuple[Int4CpuWeight, torch.Tensor]:
    """A packed weight, and the numbers in float64 that its parts stand for before they are rounded."""
    generator = torch.Generator().manual_seed(rows + inputs + group)
    numbers = torch.randint(16, (rows, inputs), generator=generator).to(torch.uint8)
    scale = torch.rand(rows, inputs // group, generator=generator) * 0.02 + 0.01
    middle = scale * (torch.rand(scale.shape, generator=generator) * 12 - 6)
    plain = (numbers.view(rows, -1, group).double() - 8) * scale.double()[..., None] + middle.double()[..., None]
    return pack_for_cpu(numbers, scale, middle, group), plain.view(rows, inputs)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_a_product_is_that_of_the_numbers_within_bfloat16(tokens: int, group: int) -> None:
    weight, plain = draw(80, 512, group)
    x, bias = torch.randn(tokens, 512).bfloat16(), torch.randn(80).bfloat16()
    for own in (None, bias):
        found = weight.linear(x, own)
        wanted = x.double() @ plain.t() + (0.0 if own is None else own.double())
        assert found.dtype == torch.bfloat16
        assert (found.double() - wanted).norm() / wanted.norm() < 2**-8


def test_a_weight_is_off_by_no_more_than_the_rounding_of_its_two_factors_and_its_own() -> None:
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(16, (48, 256), generator=generator).to(torch.uint8)
    scale, middle = torch.rand(48, 8, generator=generator), torch.randn(48, 8, generator=generator)
    found = pack_for_cpu(numbers, scale, middle, 32).dequantized(torch.float64).view(48, 8, 32)
    plain = (numbers.view(48, 8, 32).double() - 8) * scale.double()[..., None] + middle.double()[..., None]
    factors = (8 * scale + middle.abs()).double()[..., None]
    assert ((found - plain).abs() <= (factors + plain.abs()) * 2**-8).all()
    assert (found - plain).abs().max() > 0


def test_numbers_that_need_no_rounding_are_kept() -> None:
    numbers = torch.randint(16, (32, 320), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    scale, middle = torch.full((32, 10), 0.5), torch.arange(320).view(32, 10) % 5 * 0.25
    weight = pack_for_cpu(numbers, scale, middle, 32)
    plain = (numbers.view(32, 10, 32) - 8.0) * 0.5 + middle[..., None]
    assert weight.shape == (32, 320) and weight.nbytes == 32 * 160 + 32 * 10 * 4
    assert torch.equal(weight.dequantized(torch.float32), plain.view(32, 320))


def test_a_view_of_activations_is_multiplied_as_it_reads() -> None:
    weight, _ = draw(16, 64, 32)
    x = torch.randn(3, 128).bfloat16()[:, ::2]
    assert torch.equal(weight.linear(x, None), weight.linear(x.clone(), None))


def test_what_the_kernel_has_no_fast_code_for_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.lm.kernels.int4_cpu._capability", lambda: "AVX512")
    assert is_fit((32, 256), 64, CPU, torch.bfloat16)
    assert not is_fit((40, 256), 64, CPU, torch.bfloat16)
    assert not is_fit((32, 96), 64, CPU, torch.bfloat16)
    assert not is_fit((32, 256), 16, CPU, torch.bfloat16)
    assert not is_fit((32, 256), 64, torch.device("cuda"), torch.bfloat16)
    assert not is_fit((32, 256), 64, CPU, torch.float32), "PyTorch's code for float32 is slow"
    monkeypatch.setattr("holdfast.lm.kernels.int4_cpu._capability", lambda: "DEFAULT")
    assert not is_fit((32, 256), 64, CPU, torch.bfloat16)
