"""The library's products are taken only for sizes at which they were seen to have the bits of another product."""

from __future__ import annotations

import pytest
import torch

from holdfast.lm.kernels.linear import compared_products as module
from holdfast.lm.kernels.linear.compared_products import ComparedProducts
from holdfast.lm.kernels.linear.invariant_product import product


class Library:
    """A library that adds up the two halves of a sum apart where there are more than 64 rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        half = x.shape[1] // 2
        if len(x) > 64:
            return in_order(x[:, :half], weight[:, :half]) + in_order(x[:, half:], weight[:, half:])
        return in_order(x, weight)


def in_order(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A product whose sums are taken one input after another."""
    total = x.new_zeros(len(x), len(weight))
    for own, of_weight in zip(x.unbind(1), weight.unbind(1), strict=True):
        total += own[:, None] * of_weight[None, :]
    return total


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(module, "multiplied", made)
    return made


def test_sizes_are_compared_once_and_taken_if_their_bits_are_equal(library: Library) -> None:
    torch.manual_seed(0)
    products, weight = ComparedProducts(in_order), torch.randn(8, 40)
    x = torch.zeros(64, 40)  # of zeros, every order has the same sum
    for _ in range(2):
        found = products.of(x, weight)
        assert found is not None and torch.equal(found, in_order(x, weight))
    assert library.rows == [64] * 3
    assert products.of(torch.zeros(128, 40), weight) is None
    assert products.of(torch.zeros(128, 40), torch.randn(8, 40)) is None
    assert library.rows == [64] * 3 + [128]


def test_products_that_the_library_may_compute_otherwise_are_not_taken(library: Library) -> None:
    products, weight = ComparedProducts(in_order), torch.randn(8, 40)
    for x in (torch.zeros(63, 40), torch.zeros(0, 40), torch.zeros(64, 80)[:, ::2], torch.zeros(64, 40).double()):
        assert products.of(x, weight) is None
    assert products.of(torch.zeros(64, 40), weight.t().contiguous().t()) is None
    assert products.of(torch.zeros(64 * 40 + 1)[1:].view(64, 40), weight) is None
    assert library.rows == []


def test_a_weight_of_zeros_tells_nothing(library: Library) -> None:
    products, x = ComparedProducts(lambda x, weight: library(x, weight).neg()), torch.randn(64, 40)
    assert products.of(x, torch.zeros(8, 40)) is None
    assert products.of(x, torch.randn(8, 40)) is None and library.rows == [64, 64, 64]


@pytest.mark.gpu
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (28672, 4096), (1024, 2048)])
def test_a_compiled_product_has_the_same_bits_by_either_of_them(outputs: int, inputs: int) -> None:
    def own(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return product(x, weight, None, processors=132)

    products = ComparedProducts(own)
    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16, device="cuda")
    for rows in (128, 512, 2048):
        for _ in range(3):
            x = torch.randn(rows, inputs, dtype=torch.bfloat16, device="cuda")
            found = products.of(x, weight)
            assert found is None or torch.equal(found, own(x, weight))
