"""The choice of an attention backend by name, and the backends that are not our kernels."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.core.config import AttentionBackendName
from holdfast.lm.kernels.attention.backends import attention_for, require
from holdfast.lm.kernels.attention.flash_attention_3 import FlashAttention3
from holdfast.lm.kernels.attention.protocol import Attention, CapturableAttention, Segments
from holdfast.lm.kernels.attention.torch_attention import TorchAttention
from tests.lm.kernels.attention_oracle import Batch, make_batch, oracle

MIXED = [(3, 0, 37), (0, 149, 150), (1, 20, 161), (4, 0, 1), (2, 0, 9), (2, 30, 42), (5, 199, 200)]
OPTIONS = [{}, {"window": 7}, {"softcap": 5.0}, {"sinks": True}, {"window": 40, "softcap": 5.0, "sinks": True}]


def test_auto_and_torch_choose_pytorch_on_a_cpu() -> None:
    for backend in ("auto", "torch"):
        assert isinstance(backend_on("cpu", backend), TorchAttention)


def test_the_pytorch_backend_is_not_capturable() -> None:
    assert not isinstance(backend_on("cpu", "torch"), CapturableAttention)


def test_require_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match="vllm-flash-attn, and the package vllm is not installed here"):
        require("vllm-flash-attn", torch.device("cuda"))


def test_require_names_an_unsupported_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"compute capability 9\.0, which cuda is not"):
        require("vllm-flash-attn", torch.device("cuda"))


def test_require_refuses_an_fp8_cache_on_an_older_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match=r"kv_cache_dtype is fp8.*8\.9.*NVIDIA A100 is older"):
        require("auto", gpu, fp8_cache=True)
    require("auto", gpu)
    require("torch", gpu, fp8_cache=True)
    require("auto", torch.device("cpu"), fp8_cache=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    require("auto", gpu, fp8_cache=True)


def test_flash_attention_refuses_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FlashAttention3, "__init__", lambda self: None)
    batch = make_batch([(0, 0, 4)], dtype=torch.bfloat16)
    arguments: Any = batch.query, batch.key_cache, batch.value_cache, batch.block_tables, None
    with pytest.raises(ValueError, match="knows no chunks, and the model has chunks of 8 positions: choose auto"):
        FlashAttention3().attend(*arguments, scale=1.0, window=8, chunked=True)  # type: ignore[call-arg]


@pytest.mark.parametrize(("head_dim", "block_size"), [(60, 16), (64, 8)])
def test_flash_attention_refuses_other_sizes(head_dim: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}, head_dim {head_dim}"):
        flash_attention(head_dim=head_dim, block_size=block_size)


def test_flash_attention_refuses_larger_heads_than_it_has_kernels_for() -> None:
    with pytest.raises(ValueError, match="takes heads of at most 256, and a layer has heads of 512; choose auto"):
        flash_attention(head_dim=512)


def test_flash_attention_refuses_a_cache_of_another_type() -> None:
    batch = make_batch(MIXED, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"takes bfloat16 or float16.*torch\.float32"):
        attended(flash_attention(), batch)


@pytest.mark.parametrize("options", OPTIONS)
def test_flash_attention_equals_the_oracle(options: dict[str, object]) -> None:
    batch = make_batch(MIXED, dtype=torch.float16)
    assert_near(attended(flash_attention(), batch, **options), batch, **options)


def test_reserved_metadata_serves_any_batch_that_fits() -> None:
    attention = flash_attention()
    decodes = make_batch([(row, stop - 1, stop) for row, stop in enumerate((300, 1, 17))], dtype=torch.float16)
    metadata = attention.reserve(4)
    assert attention.refill(metadata, decodes.segments)
    assert_near(attended(attention, decodes, metadata), decodes)
    assert not attention.refill(metadata, make_batch([(0, 0, 2)]).segments)
    assert not attention.refill(metadata, make_batch([(row, 0, 1) for row in range(5)]).segments)
    mixed = make_batch(MIXED, dtype=torch.float16)
    metadata = attention.reserve(9, tokens=300)
    for batch in (mixed, decodes, mixed):
        assert attention.refill(metadata, batch.segments)
        assert_near(attended(attention, batch, metadata), batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_pytorch_backend_on_a_gpu_equals_the_oracle(dtype: torch.dtype, options: dict[str, object]) -> None:
    batch = make_batch(LONG, heads=14, kv_heads=2, head_dim=80, block_size=5, dtype=dtype, device="cuda")
    attention = backend_on("cuda", "torch", num_heads=14, head_dim=80, block_size=5)
    assert_near(attended(attention, batch, **options), batch, **options)


LONG = [(0, 0, 517), (1, 1999, 2000), (2, 300, 333), (3, 0, 1), (4, 0, 64), (4, 200, 264), (5, 900, 901)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (128, 32)])
@pytest.mark.parametrize("options", OPTIONS)
def test_vllm_flash_attention_equals_the_oracle(
    dtype: torch.dtype, head_dim: int, block_size: int, options: dict[str, object]
) -> None:
    pytest.importorskip("vllm.vllm_flash_attn")
    shape = {"head_dim": head_dim, "block_size": block_size}
    batch = make_batch(LONG, heads=8, kv_heads=2, **shape, dtype=dtype, device="cuda")
    attention = backend_on("cuda", "vllm-flash-attn", num_heads=8, **shape)
    assert_near(attended(attention, batch, **options), batch, **options)


@pytest.mark.gpu
def test_captured_vllm_flash_attention_equals_the_oracle() -> None:
    pytest.importorskip("vllm.vllm_flash_attn")
    attention = backend_on("cuda", "vllm-flash-attn", num_heads=8, head_dim=64, block_size=16)
    assert isinstance(attention, CapturableAttention)
    shape = {"heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16, "device": "cuda"}
    batches = [make_batch(segments, **shape, seed=seed) for seed, segments in enumerate((LONG[1:], MIXED, LONG[:2]))]
    tokens = 600
    metadata = attention.reserve(8, tokens)
    query = torch.zeros(tokens, 8, 64, dtype=torch.bfloat16, device="cuda")
    blocks = max(len(batch.key_cache) for batch in batches)
    cache = torch.full((2, blocks, 16, 2, 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    tables = torch.zeros(8, max(batch.block_tables.shape[1] for batch in batches), dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.attend(query, *cache, tables, metadata, scale=0.25)
    for batch in batches:
        attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
        cache[0, : len(batch.key_cache)], cache[1, : len(batch.key_cache)] = batch.key_cache, batch.value_cache
        tables[: len(batch.block_tables), : batch.block_tables.shape[1]] = batch.block_tables
        query[: len(batch.query)] = batch.query
        assert attention.refill(metadata, batch.segments)
        graph.replay()
        assert_near(out[: len(batch.query)], batch)


def backend_on(device: str, backend: AttentionBackendName, **shape: int) -> Attention[Any]:
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 16} | shape
    return attention_for(device, **shape, backend=backend)


def flash_attention(head_dim: int = 16, block_size: int = 16) -> FlashAttention3:
    """The backend over a PyTorch stand-in for vLLM's kernel."""
    kernels = SimpleNamespace(flash_attn_varlen_func=plain_flash_attention)
    return FlashAttention3(
        kernels, backend_on("cpu", "auto"), device=torch.device("cpu"), head_dim=head_dim, block_size=block_size
    )


def plain_flash_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: list[int] | None,
    softcap: float,
    block_table: torch.Tensor,
    fa_version: int,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """The signature of vLLM's function, and its meaning by our own PyTorch backend, segment after segment."""
    assert causal and fa_version == 3
    lengths = cu_seqlens_q.diff()
    assert lengths.max() <= max_seqlen_q and seqused_k.max() <= max_seqlen_k
    assert len(block_table) == len(seqused_k) == len(lengths)
    real = np.flatnonzero(lengths.numpy())
    attention = backend_on("cpu", "auto", num_heads=query.shape[1])
    segments = Segments(
        query_start=np.concatenate([[0], np.cumsum(lengths.numpy()[real])]).astype(np.int32),
        context_stop=seqused_k.numpy()[real],
        row=real.astype(np.int32),
    )
    window = None
    if window_size is not None:
        window = window_size[0] + 1
        assert window_size[1] == 0
    return attention.attend(
        query,
        key_cache,
        value_cache,
        block_table,
        attention.make_metadata(segments),
        scale=softmax_scale,
        window=window,
        softcap=softcap or None,
        sinks=s_aux,
    )


def attended(attention: Attention[Any], batch: Batch, metadata: object = None, **options: object) -> torch.Tensor:
    """Write the step's keys, then attend, as a layer does."""
    attention.write(batch.key, batch.value, batch.key_cache, batch.value_cache, batch.slot_mapping)
    return attention.attend(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.block_tables,
        metadata or attention.make_metadata(batch.segments),
        scale=0.25,
        **with_sinks(batch, options),
    )


def assert_near(found: torch.Tensor, batch: Batch, **options: object) -> None:
    """Assert that results equal float64 within the precision of the dtype."""
    expected = oracle(batch, scale=0.25, **with_sinks(batch, options))
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert found.dtype == batch.query.dtype
    assert error < (1e-5 if batch.query.dtype == torch.float32 else 1e-2)


def with_sinks(batch: Batch, options: dict[str, object]) -> dict[str, object]:
    """The options with `sinks` True replaced by sinks, in numbers that each dtype holds exactly."""
    heads = batch.query.shape[1]
    sinks = torch.arange(heads, device=batch.query.device) / 4 - 1
    return options | ({"sinks": sinks} if options.get("sinks") else {})
