"""The operations of a layer that two devices share: their sum equals the result of one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.collectives.protocol import Group, SumInParts
from holdfast.lm.kernels.fp8 import Weight, quantize, row_maxima
from holdfast.lm.kernels.linear import fused_layers
from holdfast.lm.kernels.linear.fp8_linear import Fp8Rows
from holdfast.lm.kernels.linear.fused_layers import FusedLayerOps
from holdfast.lm.kernels.linear.layers import LayerOps, NormInParts
from holdfast.lm.kernels.lora.protocol import Finish
from tests.lm.kernels.linear.test_layers import assert_near, drawn, oracle, shape_of

KINDS = pytest.mark.parametrize("kind", [LayerOps, FusedLayerOps])


class Half(Group):
    """One of two devices, which run one after the other: the second adds the tensors that the first one `gave`."""

    size = 2

    def __init__(self, gave: torch.Tensor | float, device: str, *, in_parts: bool = False) -> None:
        self.gives, self._device, self._in_parts = gave, device, in_parts

    def begin_sum(self, rows: int, width: int, dtype: torch.dtype) -> SumInParts | None:
        return HalfSum(self, rows, width, dtype) if self._in_parts else None

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=dtype, device=self._device)

    def add_norm(
        self,
        stream: torch.Tensor,
        partials: torch.Tensor,
        bias: torch.Tensor | None,
        norm: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        assert partials.dtype in (torch.float32, stream.dtype)
        self.gives = partials.float().sum(0) + self.gives
        stream += self.gives if bias is None else self.gives + bias
        return functional.rms_norm(stream, norm.shape, norm, eps)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.gives = x + self.gives
        return self.gives

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


class HalfSum(SumInParts):
    """One device's part of a sum in three parts."""

    parts: tuple[slice, ...] = ()

    def __init__(self, half: Half, rows: int, width: int, dtype: torch.dtype) -> None:
        self._gave = half.gives
        self.gives = half.gives = half.room((rows, width), dtype)
        self.parts = (slice(0, 3), slice(3, rows - 1), slice(rows - 1, rows))
        self.sent: list[int] = []

    def room(self, part: int) -> torch.Tensor:
        return self.gives[self.parts[part]]

    def send(self, part: int) -> None:
        self.sent.append(part)

    def receive(self, part: int) -> torch.Tensor:
        assert self.sent == [0, 1, 2]
        own = self.room(part)
        return torch.stack((self._gave[self.parts[part]], own)) if isinstance(self._gave, torch.Tensor) else own[None]


def halves(weight: torch.Tensor, fp8: bool) -> list[Weight]:
    """The columns of a weight that each device holds."""
    parts = [part.contiguous() for part in weight.chunk(2, dim=1)]
    return [quantize(part, row_maxima(weight)) for part in parts] if fp8 else [*parts]


@pytest.mark.each_pair("[15]-dtype1-False-True-FusedLayerOps", "5-dtype1-True-True-FusedLayerOps")
@KINDS
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 5, 70])
def test_partial_sums_of_two_devices_are_added_and_normed(
    tokens: int, dtype: torch.dtype, with_bias: bool, fp8: bool, kind: type[LayerOps], device: str
) -> None:
    width, inputs = 64, 1040  # 520 for each device: no multiple of a program's inputs per iteration
    stream, x = (drawn(tokens, size, device=device, dtype=dtype) for size in (width, inputs))
    weight = drawn(width, inputs, device=device, dtype=dtype, spread=inputs**-0.5)
    bias = drawn(width, device=device, dtype=dtype) if with_bias else None
    norm = drawn(width, device=device, dtype=dtype)
    shape = shape_of(device, dtype)
    exact = quantize(weight).dequantized(torch.float64) if fp8 else weight.double()
    expected_stream = stream.double()
    exact_bias = None if bias is None else bias.double()
    expected = oracle(shape).add_linear_norm(expected_stream, x.double(), exact, exact_bias, norm.double())
    gave: torch.Tensor | float = 0.0
    for own_x, own in zip(x.chunk(2, dim=1), halves(weight, fp8), strict=True):
        group, own_stream = Half(gave, device), stream.clone()
        normed = kind(shape, group).add_linear_norm(own_stream, own_x.contiguous(), own, bias, norm)
        gave = group.gives
    if tokens == 0:
        assert normed.shape == (0, width)
    elif fp8 and tokens > 64 and dtype != torch.float32:  # activations are rounded to FP8, too
        assert (normed.double() - expected).norm() / expected.norm() < 0.06
    else:
        assert_near(own_stream, expected_stream)
        assert_near(normed, expected)


@pytest.mark.each_pair("gated_linear-dtype1-True-FusedLayerOps")
@KINDS
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("reader", ["linear", "gated_linear", "computed"])
def test_a_sum_in_parts_is_added_and_normed_where_it_is_read(
    reader: str, dtype: torch.dtype, fp8: bool, kind: type[LayerOps], device: str
) -> None:
    tokens, width, inputs = 70, 64, 128
    stream, x = (drawn(tokens, size, device=device, dtype=dtype) for size in (width, inputs))
    weight, after = (drawn(*size, device=device, dtype=dtype, spread=0.1) for size in ((width, inputs), (96, width)))
    bias, norm, last = (drawn(size, device=device, dtype=dtype) for size in (width, width, 96))
    shape = shape_of(device, dtype)
    read = quantize(after) if fp8 else after
    results = []
    for in_parts in (False, True):
        gave: torch.Tensor | float = 0.0
        for own_x, own in zip(x.chunk(2, dim=1), halves(weight, fp8), strict=True):
            group, own_stream = Half(gave, device, in_parts=in_parts), stream.clone()
            ops = kind(shape, group)
            normed = ops.add_linear_norm(own_stream, own_x.contiguous(), own, bias, norm)
            assert isinstance(normed, NormInParts) == in_parts
            if reader == "computed":
                result = ops.computed(normed)
            else:
                result = getattr(ops, reader)(normed, read, last)
            gave = group.gives
        if isinstance(result, Fp8Rows):
            result = result.data[0].float() * result.scale[:, None]
        results.append((own_stream, result))
    for whole, parts in zip(*results, strict=True):
        # The library's GEMM rounds activations to FP8, if there are more than 64 of them.
        assert (parts - whole).norm() / whole.norm() < (0.06 if fp8 else 2e-3)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_device_embeds_its_own_tokens(dtype: torch.dtype, kind: type[LayerOps], device: str) -> None:
    embedding = drawn(11, 1500, device=device, dtype=dtype)
    ids = torch.tensor([0, 10, 5, 6, 5, 3], device=device)
    gave: torch.Tensor | float = 0.0
    for rank, own in enumerate((embedding[:6], embedding[6:])):
        group = Half(gave, device)
        stream = kind(shape_of(device, dtype), group).embed(ids, own, 6 * rank)
        gave = group.gives
    assert torch.equal(stream, embedding[ids])
    assert torch.equal(kind(shape_of(device, dtype)).embed(ids, embedding), embedding[ids])


@pytest.mark.each_pair
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5])
def test_norms_over_all_heads_count_each_head_of_two_devices_once(
    tokens: int,
    kv_heads: int,
    dtype: torch.dtype,
    kind: type[LayerOps],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fused_layers, "SQUARES_AT_A_TIME", 4)
    heads, dim, copies = 4, 16, 2 // kv_heads
    query = drawn(tokens, heads * dim, device=device, dtype=dtype)
    key, value = (drawn(tokens, kv_heads * dim, device=device, dtype=dtype, spread=3) for _ in range(2))
    norms = drawn(heads * dim, device=device, dtype=dtype), drawn(kv_heads * dim, device=device, dtype=dtype)

    def parts(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
        """Each device's part of the keys, or of a tensor of the same length."""
        return x.chunk(2, dim) if copies == 1 else (x, x)

    shape = replace(
        shape_of(device, dtype, qk_norm_whole=True), num_heads=2, num_kv_heads=1, head_dim=dim, kv_copies=copies
    )
    own = list(
        zip(query.chunk(2, 1), parts(key, 1), parts(value, 1), norms[0].chunk(2), parts(norms[1], 0), strict=True)
    )
    slots, gave, found = torch.arange(tokens, device=device), [0.0, 0.0], list[tuple[torch.Tensor, torch.Tensor]]()
    for turn in range(4):  # the first two record what each device adds to the sum
        q, k, v, q_norm, k_norm = own[turn % 2]
        group = Half(gave[1 - turn % 2] if turn > 1 else 0.0, device)
        ops, caches = kind(shape, group), torch.zeros(2, 1, tokens, 1, dim, device=device, dtype=dtype)
        turned = ops.rotate_and_write(
            torch.cat((q, k, v), dim=1), ops.rotation(torch.zeros_like(slots)), q_norm.contiguous(),
            k_norm.contiguous(), (caches[0], caches[1]), slots,
        )  # fmt: skip
        if turn < 2:
            gave[turn] = group.gives
        else:
            found.append((turned.flatten(1), caches[0, 0].flatten(1)))
    exact = [
        functional.rms_norm(each.double(), norm.shape, norm.double(), shape.eps)
        for each, norm in zip((query, key), norms, strict=True)
    ]
    assert_near(torch.cat([turned for turned, _ in found], dim=1), exact[0])
    for (_, keys), expected in zip(found, parts(exact[1], 1), strict=True):
        assert_near(keys, expected)


@pytest.mark.each_pair
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 5, 70])
def test_what_adapters_add_on_each_device_is_part_of_the_sum(
    tokens: int, dtype: torch.dtype, kind: type[LayerOps], device: str
) -> None:
    width, inputs = 64, 128
    stream, x = (drawn(tokens, size, device=device, dtype=dtype) for size in (width, inputs))
    weight = drawn(width, inputs, device=device, dtype=dtype, spread=inputs**-0.5)
    change = drawn(width, inputs, device=device, dtype=dtype, spread=inputs**-0.5)
    bias, norm = (drawn(width, device=device, dtype=dtype) for _ in range(2))
    shape = shape_of(device, dtype)
    expected_stream = stream.double()
    both = weight.double() + change.double()
    expected = oracle(shape).add_linear_norm(expected_stream, x.double(), both, bias.double(), norm.double())
    gave: torch.Tensor | float = 0.0
    for own_x, own, added in zip(x.chunk(2, dim=1), weight.chunk(2, dim=1), change.chunk(2, dim=1), strict=True):
        group, own_stream = Half(gave, device, in_parts=True), stream.clone()
        finish = Finish(lambda out, own_x=own_x, added=added: out.add_(own_x @ added.t()))  # type: ignore[misc]
        normed = kind(shape, group).add_adapted_norm(
            own_stream, own_x.contiguous(), own.contiguous(), bias, norm, finish
        )
        gave = group.gives
    assert_near(own_stream, expected_stream)
    assert_near(normed, expected)
