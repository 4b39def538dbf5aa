"""A layer's operations with the same bits for a token in any step: on a GPU, or interpreted without one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.linear import invariant_layers as layers
from holdfast.lm.kernels.linear import invariant_product as module
from holdfast.lm.kernels.linear.invariant_layers import InvariantLayerOps
from holdfast.lm.kernels.linear.invariant_product import Gpu
from holdfast.lm.kernels.linear.layers import LayerOps
from tests.lm.kernels.linear.test_layers import doubled, drawn, oracle, shape_of

TOKENS, HIDDEN, INNER = 9, 48, 272


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles that an interpreter computes quickly."""
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "BLOCK_M", 8)
        monkeypatch.setattr(module, "BLOCK_N", 16)
        monkeypatch.setattr(module, "LEAST_PLAIN_PART", 128)
        monkeypatch.setattr(layers, "gpu_of", lambda device: Gpu(4, alike=True))
        monkeypatch.setattr(module, "FEW_ROWS", 0)  # NumPy adds up tiles of other sizes in other orders


class Half:
    """The half of a layer after attention: projection, norm, and the MLP's two products."""

    def __init__(
        self,
        device: str,
        dtype: torch.dtype,
        *,
        biased: bool,
        activation: str,
        out_norm: bool,
        inner: int = INNER,
    ) -> None:
        self.shape = shape_of(device, dtype, activation=activation)
        sizes = {"o": (HIDDEN, 64), "gate_up": (2 * inner, HIDDEN), "down": (HIDDEN, inner)}
        self.weights = [drawn(*size, device=device, dtype=dtype, spread=size[1] ** -0.5) for size in sizes.values()]
        self.biases = [drawn(size[0], device=device, dtype=dtype) if biased else None for size in sizes.values()]
        self.norms = [drawn(HIDDEN, device=device, dtype=dtype) for _ in range(2)]
        self.out_norm = drawn(HIDDEN, device=device, dtype=dtype) if out_norm else None
        self.stream = drawn(TOKENS, HIDDEN, device=device, dtype=dtype)
        self.attended = drawn(TOKENS, 64, device=device, dtype=dtype)

    def compute(self, ops: LayerOps, rows: slice, *, exact: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream and its norm after the layer, for these tokens."""
        tensors = [*self.weights, *self.biases, *self.norms, self.out_norm, self.stream[rows], self.attended[rows]]
        o, gate_up, down, *others = doubled(*tensors) if exact else tensors
        (of_o, of_gate_up, of_down), (first, second, out_norm), (stream, x) = others[:3], others[3:6], others[6:]
        stream = stream.clone()
        normed = ops.add_linear_norm(stream, x, o, of_o, first, out_norm=out_norm)
        inner = ops.gated_linear(normed, gate_up, of_gate_up)
        return stream, ops.computed(ops.add_linear_norm(stream, inner, down, of_down, second, out_norm=out_norm))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("biased", "activation", "out_norm"), [(True, "silu", False), (False, "gelu_pytorch_tanh", True)]
)
def test_a_layer_gives_a_token_the_same_bits_in_any_step_and_is_near_float64(
    dtype: torch.dtype, biased: bool, activation: str, out_norm: bool, device: str
) -> None:
    half = Half(device, dtype, biased=biased, activation=activation, out_norm=out_norm)
    ops = InvariantLayerOps(half.shape)
    whole = half.compute(ops, slice(TOKENS))
    for found, expected in zip(whole, half.compute(oracle(half.shape), slice(TOKENS), exact=True), strict=True):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < (1e-5 if dtype == torch.float32 else 5e-3)
    ops._gpu = Gpu(1, alike=ops._gpu.alike)  # no product is cut
    for rows in (slice(0, 1), slice(8, 9), slice(2, 7), slice(TOKENS)):
        for found, expected in zip(half.compute(ops, rows), whole, strict=True):
            assert torch.equal(found, expected[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_first_norm_of_a_stage_is_that_at_the_end_of_the_layer_before(
    dtype: torch.dtype, ranks: int, device: str
) -> None:
    """A stage receives the stream alone. On one device, the norm is computed as the layer before adds to the stream."""
    half = Half(device, dtype, biased=False, activation="silu", out_norm=False, inner=256)
    ops = InvariantLayerOps(half.shape, ranks=ranks)
    for rows in (slice(0, 1), slice(TOKENS)):
        stream, normed = half.compute(ops, rows)
        assert torch.equal(ops.norm(stream, half.norms[1]), normed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("activation", "out_norm"), [("silu", False), ("gelu_pytorch_tanh", True)])
def test_a_layer_cut_for_ranks_gives_a_token_the_same_bits_in_any_step_and_is_near_float64(
    dtype: torch.dtype, activation: str, out_norm: bool, device: str
) -> None:
    half = Half(device, dtype, biased=True, activation=activation, out_norm=out_norm, inner=256)
    ops = InvariantLayerOps(half.shape, ranks=4)
    whole = half.compute(ops, slice(TOKENS))
    for found, expected in zip(whole, half.compute(oracle(half.shape), slice(TOKENS), exact=True), strict=True):
        assert (found.double() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 5e-3)
    for rows in (slice(0, 1), slice(2, 7)):
        for found, expected in zip(half.compute(ops, rows), whole, strict=True):
            assert torch.equal(found, expected[rows])
    with pytest.raises(TypeError, match="adapters and layer norms have no sums"):
        ops.add_linear_norm(half.stream, half.attended, half.weights[0], None, half.norms[0], change=lambda _: None)


def test_weights_of_other_kinds_and_groups_of_other_sizes_are_refused(device: str) -> None:
    ops = InvariantLayerOps(shape_of(device))
    with pytest.raises(TypeError, match="a tuple has no product whose bits are the same in any step"):
        ops.linear(drawn(2, 8, device=device), ())
    with pytest.raises(ValueError, match="2 devices share the layers, and sums are cut for 1 ranks"):
        InvariantLayerOps(shape_of(device), SimpleNamespace(size=2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [64, 1024, 5120, 1000])
def test_norms_of_pytorch_on_a_gpu_have_the_same_bits_for_any_number_of_rows(width: int, dtype: torch.dtype) -> None:
    """Layer norms, and the norms without weights of Mamba and Gemma 4, are PyTorch's."""
    x, factor, bias = (drawn(*size, width, device="cuda", dtype=dtype) for size in ((700,), (), ()))

    def normed(rows: torch.Tensor) -> list[torch.Tensor]:
        return [
            functional.rms_norm(rows, (width,), None, 1e-5),
            functional.rms_norm(rows, (width,), factor, 1e-5),
            functional.layer_norm(rows, (width,), factor, bias, 1e-5),
        ]

    whole = normed(x)
    for begin, end in ((0, 1), (7, 8), (3, 67), (88, 700)):
        for found, wanted in zip(normed(x[begin:end]), whole, strict=True):
            assert torch.equal(found, wanted[begin:end])
