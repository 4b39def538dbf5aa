"""A weight whose parts have several formats gives the products of all of its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps
from holdfast.lm.kernels.packed import Form
from holdfast.lm.kernels.stacked import StackedWeight
from tests.lm.kernels.linear.test_layers import shape_of
from tests.lm.kernels.packed_weights import draw_packed


def drawn() -> tuple[StackedWeight, torch.Tensor]:
    parts = [draw_packed(Form.INT4, 40, 256), draw_packed(Form.INT6, 24, 256)]
    return StackedWeight(tuple(part for part, _ in parts)), torch.cat([plain for _, plain in parts])


def test_its_rows_are_those_of_its_parts() -> None:
    weight, plain = drawn()
    assert weight.shape == (64, 256) and weight.nbytes == sum(part.nbytes for part in weight.parts)
    torch.testing.assert_close(weight.dequantized(torch.float64), plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("kind", [LayerOps, FusedLayerOps])
def test_every_part_takes_its_own_share_of_the_bias(kind: Any, tokens: int) -> None:
    weight, plain = drawn()
    ops = kind(shape_of("cpu"))
    x, bias = torch.randn(tokens, 256), torch.randn(64)
    product = x.double() @ plain.t()
    torch.testing.assert_close(ops.linear(x, weight, bias).double(), product + bias.double(), rtol=1e-4, atol=1e-4)
    gate, up = (product + bias.double()).chunk(2, 1)
    found = ops.gated_linear(x, weight, bias)
    torch.testing.assert_close(found.double(), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
