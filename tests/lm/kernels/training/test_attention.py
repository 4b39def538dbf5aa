"""Attention over packed sequences against scaled_dot_product_attention and its autograd, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from holdfast.lm.kernels.training.attention import (
    FlashPackedAttention,
    PackedAttention,
    Packing,
    TorchPackedAttention,
    packed_attention_for,
)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], scale: float, window: int | None
) -> torch.Tensor:
    outs = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        age = torch.arange(len(a), device=q.device)[:, None] - torch.arange(len(a), device=q.device)
        mask = (age >= 0) & (age < (window or len(a)))
        parts = (t.transpose(0, 1)[None] for t in (a, b, c))
        out = functional.scaled_dot_product_attention(*parts, attn_mask=mask, scale=scale, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def errors(attention: PackedAttention, dtype: torch.dtype, device: str, window: int | None, dim: int) -> list[float]:
    """The largest errors of output and gradients, relative to the largest value unless that is tiny."""
    torch.manual_seed(0)
    lengths, scale = (5, 1, 17, 2), 0.3
    whole = torch.randn(sum(lengths), 6 + 2 + 2, dim, device=device).to(dtype)
    qkv = whole[:, :6].contiguous(), whole[:, 6:8].contiguous(), whole[:, 8:]  # values are a view
    back = torch.randn(sum(lengths), 6, dim, device=device).to(dtype)
    packing = Packing.of(lengths, torch.device(device))
    out, log_sums = attention.forward(qkv, packing, scale, window)
    assert log_sums.shape == (6, sum(lengths))
    found = [out, *attention.backward(back, qkv, out, log_sums, packing, scale, window)]
    doubles = [part.double().requires_grad_() for part in qkv]
    wanted = reference(*doubles, lengths, scale, window)
    expected = [wanted.detach(), *torch.autograd.grad(wanted, doubles, back.double())]
    return [
        float((a.double() - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in zip(found, expected, strict=True)
    ]


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_output_and_gradients_are_autograd_s(dtype: torch.dtype, limit: float, window: int | None, device: str) -> None:
    assert max(errors(TorchPackedAttention(), dtype, device, window, 6)) < limit


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_scores_of_a_few_queries_at_a_time_give_the_same(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.lm.kernels.training.attention.QUERIES_AT_A_TIME", 3)
    assert max(errors(TorchPackedAttention(), torch.float64, "cpu", window, 6)) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("deterministic", [False, True])
def test_flash_attention_s_output_and_gradients_are_autograd_s(window: int | None, deterministic: bool) -> None:
    found = errors(FlashPackedAttention(deterministic=deterministic), torch.bfloat16, "cuda", window, 64)
    assert max(found) < 2e-2


def test_flash_attention_is_for_16_bits_on_cuda() -> None:
    kinds = {
        (device, dtype): type(packed_attention_for(torch.device(device), dtype, 128))
        for device in ("cpu", "cuda")
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert kinds.pop(("cuda", torch.bfloat16)) is FlashPackedAttention
    assert {*kinds.values()} == {TorchPackedAttention}
