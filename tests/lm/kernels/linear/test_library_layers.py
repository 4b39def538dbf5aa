"""Norms, gates and rotations by the library in C, against float64 and PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.kernels.integer.weight import pack_integers
from holdfast.lm.kernels.linear import layer_ops_for
from holdfast.lm.kernels.linear.layers import LayerOps, LayerShape
from holdfast.lm.kernels.linear.library_layers import LibraryLayerOps
from tests.compiled import integer_library

HALF = 2**-8
"""The most that rounding to bfloat16 changes a number, in relation to it."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Two threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def shape(**changes: Any) -> LayerShape:
    usual: dict[str, Any] = dict(num_heads=4, num_kv_heads=2, head_dim=16, eps=1e-5, activation="silu")
    frequencies = 10_000.0 ** -(torch.arange(8) / 8)
    return LayerShape(**usual | dict(dtype=torch.bfloat16, inverse_frequencies=frequencies) | changes)


def near(found: torch.Tensor, wanted: torch.Tensor, times: float = 1.0) -> bool:
    """Whether numbers are the wanted ones rounded to bfloat16, or `times` as far away."""
    return bool(((found.double() - wanted.double()).abs() <= wanted.double().abs() * HALF * times + 1e-6).all())


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (5, 2048), (3, 37), (40, 1000)])
def test_a_norm_is_that_of_the_sum_rounded_once(library: Library, rows: int, width: int) -> None:
    stream, added, weight = torch.randn(rows, width), torch.randn(rows, width), torch.rand(width) + 0.5
    halves = stream.bfloat16(), added.bfloat16(), weight.bfloat16()
    total = halves[0] + halves[1]
    for own in (None, halves[1]):
        changed = halves[0].clone()
        found = library.norm(changed, own, halves[2], 1e-5)
        whole = halves[0] if own is None else total
        assert torch.equal(changed, whole)
        inverse = (whole.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
        assert near(found, whole.double() * inverse * halves[2].double(), 1.01)
    small = (stream * 1e-3).bfloat16()
    inverse = (small.double().square().mean(1, keepdim=True) + 1e-5).rsqrt()
    assert near(library.norm(small, None, halves[2], 1e-5), small.double() * inverse * halves[2].double(), 1.01)


def test_a_gate_is_that_of_float64_for_numbers_of_every_size(library: Library) -> None:
    gate = torch.cat((torch.linspace(-100, 100, 4001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e38])))
    both = torch.stack((gate, torch.full_like(gate, 1.5))).bfloat16().view(1, -1)
    found, x = library.gate(both)[0], both[0, : len(gate)].double()
    assert near(found, functional.silu(x) * 1.5, 1.02)
    assert library.gate(torch.tensor([[float("nan"), 1.0]]).bfloat16()).isnan().all()
    many = torch.randn(70, 2 * 1024).bfloat16()
    assert near(library.gate(many), functional.silu(many[:, :1024].double()) * many[:, 1024:].double(), 1.02)


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_a_rotation_equals_pytorch_s_and_writes_the_same_slots(library: Library, rows: int) -> None:
    plain, ops = LayerOps(shape()), LibraryLayerOps(shape(), library)
    qkv, positions = torch.randn(rows, 8 * 16).bfloat16(), torch.arange(rows) * 3
    slots = torch.randperm(40 * 8)[:rows]
    filled = [tuple(torch.zeros(40, 8, 2, 16, dtype=torch.bfloat16) for _ in range(2)) for _ in range(2)]
    wanted = plain.rotate_and_write(qkv.clone(), plain.rotation(positions), None, None, filled[0], slots)
    found = ops.rotate_and_write(qkv, ops.rotation(positions), None, None, filled[1], slots)
    # PyTorch rounds after each product.
    assert (found.double() - wanted.double()).abs().max() <= qkv.abs().max() * 2 * HALF
    assert (filled[0][0] - filled[1][0]).abs().max() <= qkv.abs().max() * 2 * HALF
    assert torch.equal(filled[0][1], filled[1][1])
    written = torch.zeros(40 * 8, dtype=torch.bool)
    written[slots] = True
    assert torch.equal(filled[1][0].view(40 * 8, -1).any(1), written)


def test_a_rotation_of_no_slot_writes_nothing(library: Library) -> None:
    ops = LibraryLayerOps(shape(), library)
    caches = torch.zeros(2, 8, 2, 16).bfloat16(), torch.zeros(2, 8, 2, 16).bfloat16()
    for bad in (-1, 16):
        with pytest.raises(ValueError, match="a slot is not below 16"):
            qkv, slots = torch.ones(2, 128).bfloat16(), torch.tensor([3, bad])
            ops.rotate_and_write(qkv, ops.rotation(torch.arange(2)), None, None, caches, slots)
    assert not any(each.any() for each in caches)


def test_layers_add_packed_products_as_pytorch_does(library: Library) -> None:
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(256, (64, 96), generator=generator).to(torch.uint8)
    weight = pack_integers(library, numbers, torch.rand(64, 3, generator=generator) * 0.01, None, 8)
    stream, x = torch.randn(3, 64).bfloat16(), torch.randn(3, 96).bfloat16()
    norm, bias = (torch.rand(64) + 0.5).bfloat16(), torch.randn(64).bfloat16()
    called: list[int] = []
    for own in (None, bias):
        streams = stream.clone(), stream.clone()
        wanted = LayerOps(shape()).add_linear_norm(streams[0], x, weight, own, norm)
        ops = LibraryLayerOps(shape(), library)
        found = ops.add_linear_norm(streams[1], x, weight, own, norm, lambda: called.append(1))
        assert torch.equal(*streams) and near(found, wanted, 1.01)
    assert called == [1, 1]


@pytest.mark.parametrize(
    "changes", [dict(layer_norm=True), dict(activation="gelu"), dict(gated=False), dict(unit_v_norm=True)]
)
def test_pytorch_computes_operations_that_the_library_lacks(library: Library, changes: dict[str, Any]) -> None:
    own = shape(**changes)
    plain, ops = LayerOps(own), LibraryLayerOps(own, library)
    stream, both = torch.randn(3, 64).bfloat16(), torch.randn(3, 128).bfloat16()
    weight = torch.rand(128 if own.layer_norm else 64).bfloat16()
    assert near(ops.norm(stream, weight), plain.norm(stream, weight), 1.01)
    assert near(ops.gate(both.clone()), plain.gate(both.clone()), 2)
    norm = torch.ones(16).bfloat16()
    for norms in ((None, None), (norm, norm)):
        if (own.unit_v_norm and norms[0] is None) or (own.layer_norm and norms[0] is not None):
            continue
        caches = [tuple(torch.zeros(2, 8, 2, 16).bfloat16() for _ in range(2)) for _ in range(2)]
        results = [
            each.rotate_and_write(both.clone(), each.rotation(torch.arange(3)), *norms, into, torch.arange(3))
            for each, into in zip((plain, ops), caches, strict=True)
        ]
        assert torch.allclose(*results, atol=0.05) and torch.allclose(caches[0][1], caches[1][1])


def test_tensors_that_the_library_cannot_read_are_refused(library: Library) -> None:
    half = torch.ones(2, 64).bfloat16()
    with pytest.raises(ValueError, match=r"a norm takes contiguous bfloat16 on a CPU, and a tensor is torch\.float32"):
        library.norm(half, None, torch.ones(64), 1e-5)
    with pytest.raises(ValueError, match="a gate takes contiguous bfloat16"):
        library.gate(half.t())
    caches = torch.zeros(2, 8, 2, 16).bfloat16(), torch.zeros(2, 8, 2, 16).bfloat16()
    ops = LibraryLayerOps(shape(), library)
    with pytest.raises(ValueError, match=r"a norm of \[2, 64\] has a weight \[32\]"):
        library.norm(half, None, torch.ones(32).bfloat16(), 1e-5)
    with pytest.raises(ValueError, match="adds another shape"):
        library.norm(half, half[:1], half[0], 1e-5)
    with pytest.raises(ValueError, match="a gate of 63 numbers has no halves"):
        library.gate(torch.ones(2, 63).bfloat16())
    qkv, slots, turn = torch.ones(2, 128).bfloat16(), torch.arange(2), ops.rotation(torch.arange(2))
    with pytest.raises(ValueError, match=r"\[2, 128\] is not 5 heads and twice 2 of 16 numbers"):
        library.rotate(qkv, turn, caches, slots, 5)
    with pytest.raises(ValueError, match="cosine and sine of 2 rows of 16 numbers are"):
        library.rotate(qkv, ops.rotation(torch.arange(1)), caches, slots, 4)
    with pytest.raises(ValueError, match=r"slots are torch\.int32"):
        library.rotate(torch.ones(2, 128).bfloat16(), ops.rotation(torch.arange(2)), caches, torch.ones(2).int(), 4)


def test_models_in_bfloat16_on_a_cpu_have_the_library_s_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    found = integer_library()
    monkeypatch.setattr("holdfast.lm.kernels.integer.library.library", lambda: found)
    assert type(layer_ops_for(shape())) is LibraryLayerOps
    assert type(layer_ops_for(shape(dtype=torch.float32))) is LayerOps
    monkeypatch.setattr("holdfast.lm.kernels.integer.library.library", lambda: None)
    assert type(layer_ops_for(shape())) is LayerOps
