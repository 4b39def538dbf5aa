"""Quantized checkpoints give the logits of Transformers' module with the dequantized weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.core.layout import Layout
from holdfast.lm.kernels.fp8 import FP8, Fp8BlockWeight, Fp8Weight
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.kernels.int4_cpu import VECTORS, Int4CpuWeight, _capability
from holdfast.lm.kernels.integer.weight import IntegerWeight
from holdfast.lm.kernels.mxfp4 import Mxfp4Matrices, matrix_of
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.hf import _paged_logits
from holdfast.lm.models.loader import load, own_dtype
from holdfast.lm.models.quantized import Quantization, QuantizedReader, quantization_of
from holdfast.lm.models.shard import Piece
from tests.checkpoints import make

Tensors = dict[str, torch.Tensor]
CPU = torch.device("cpu")
needs_vectors = pytest.mark.skipif(_capability() not in VECTORS, reason="PyTorch's kernel has no fast code here")

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(numbers: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Numbers [R, 8 C] from 0 to 15 as words [R, C]; the i-th four bits of a word are its column order[i]."""
    eights = numbers.view(len(numbers), -1, 8).long()
    packed = sum(eights[:, :, column] << 4 * place for place, column in enumerate(order))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def four_bits(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [N, K], zeros and scales [N, K / group] of a weight [N, K], and the weight that they represent."""
    grouped = weight.view(len(weight), -1, weight.shape[1] if group == -1 else group)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    scale = ((high - low) / 15).half().clamp(min=1e-4)
    zero = (-low / scale.float()).round().clamp(0, 15)
    numbers = (grouped / scale.float()[..., None] + zero[..., None]).round().clamp(0, 15)
    plain = (numbers - zero[..., None]) * scale.float()[..., None]
    return numbers.view(weight.shape), zero, scale, plain.view(weight.shape)


def awq(stem: str, weight: torch.Tensor, group: int) -> tuple[Tensors, torch.Tensor]:
    numbers, zero, scale, plain = four_bits(weight, group)
    return {
        f"{stem}.qweight": words(numbers.t().contiguous(), AWQ_ORDER),
        f"{stem}.qzeros": words(zero.t().contiguous(), AWQ_ORDER),
        f"{stem}.scales": scale.t().contiguous(),
    }, plain


def gptq(stem: str, weight: torch.Tensor, group: int, offset: int = 1) -> tuple[Tensors, torch.Tensor]:
    numbers, zero, scale, plain = four_bits(weight, group)
    inputs = weight.shape[1]
    size = inputs if group == -1 else group
    return {
        f"{stem}.qweight": words(numbers).t().contiguous(),
        f"{stem}.qzeros": words(((zero - offset) % 16).t().contiguous()),
        f"{stem}.scales": scale.t().contiguous(),
        f"{stem}.g_idx": (torch.arange(inputs) // size).int(),
        f"{stem}.bias": torch.zeros(len(weight)),
    }, plain


def packed(stem: str, weight: torch.Tensor, group: int, *, symmetric: bool) -> tuple[Tensors, torch.Tensor]:
    """A weight of compressed-tensors: signed numbers, stored 8 higher."""
    numbers, zero, scale, plain = four_bits(weight, group)
    if symmetric:
        grouped = weight.view(*scale.shape, -1)
        scale = (grouped.abs().amax(-1) / 7).half().clamp(min=1e-4)
        signed = (grouped / scale.float()[..., None]).round().clamp(-8, 7)
        numbers, plain = signed.view(weight.shape) + 8, (signed * scale.float()[..., None]).view(weight.shape)
    stored = {
        f"{stem}.weight_packed": words(numbers),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_shape": torch.tensor(weight.shape),
    }
    return stored if symmetric else stored | {f"{stem}.weight_zero_point": words(zero.t()).t().contiguous()}, plain


def fp8(stem: str, weight: torch.Tensor, how: str) -> tuple[Tensors, torch.Tensor]:
    if how == "block":
        blocks = weight.view(weight.shape[0] // 32, 32, weight.shape[1] // 32, 32)
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)
    elif how == "channel":
        scale = spread = weight.abs().amax(1, keepdim=True) / 448
    else:
        scale = spread = weight.abs().max() / 448
    data = (weight / spread).to(FP8)
    name = "weight_scale_inv" if how == "block" else "weight_scale"
    return {f"{stem}.weight": data, f"{stem}.{name}": scale.clone()}, data.float() * spread


CODES = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0))


def nvfp4(stem: str, weight: torch.Tensor, *, modelopt: bool) -> tuple[Tensors, torch.Tensor]:
    """A weight in NVFP4, as compressed-tensors or as NVIDIA's Model Optimizer stores it."""
    unit = weight.abs().max() / (6 * 448)
    groups = weight.view(len(weight), -1, 16)
    scale = (groups.abs().amax(2) / (6 * unit)).clamp(min=2**-9).to(FP8)
    codes = (groups[..., None] / (scale.float() * unit)[..., None, None] - CODES).abs().argmin(-1)
    plain = (CODES[codes] * scale.float()[..., None] * unit).view(weight.shape)
    pairs = codes.view(len(weight), -1, 2).byte()
    data = pairs[..., 0] | pairs[..., 1] << 4
    if modelopt:
        return {f"{stem}.weight": data, f"{stem}.weight_scale": scale, f"{stem}.weight_scale_2": unit}, plain
    factor = (1 / unit).view(1)
    plain = (CODES[codes] * scale.float()[..., None] * (1 / factor)).view(weight.shape)
    inputs = torch.ones(1)
    stored = {"weight_packed": data, "weight_scale": scale, "weight_global_scale": factor, "input_global_scale": inputs}
    return {f"{stem}.{ending}": tensor for ending, tensor in stored.items()}, plain


def compressed(strategy: str) -> dict[str, Any]:
    weights = dict(num_bits=8, type="float", strategy=strategy)
    return dict(quant_method="compressed-tensors", config_groups=dict(group_0=dict(weights=weights)))


def pack_quantized(strategy: str, size: int | None, **more: Any) -> dict[str, Any]:
    weights = dict(num_bits=4, type="int", strategy=strategy, group_size=size) | more
    groups = dict(group_0=dict(weights=weights, input_activations=None))
    return dict(quant_method="compressed-tensors", format="pack-quantized", config_groups=groups)


def nvfp4_packed(**more: Any) -> dict[str, Any]:
    weights = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16) | more
    groups = dict(group_0=dict(weights=weights, input_activations=dict(num_bits=4)))
    return dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", config_groups=groups)


INT4: dict[str, Any] = dict(num_bits=4, type="int", strategy="group", group_size=32)
INT4_ROWS = INT4 | dict(strategy="channel")
Quantize = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
METHODS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "awq-32": (dict(quant_method="awq", bits=4, group_size=32), lambda s, w: awq(s, w, 32)),
    "awq-64": (dict(quant_method="awq", bits=4, group_size=64, version="GEMM"), lambda s, w: awq(s, w, 64)),
    "gptq-32": (dict(quant_method="gptq", bits=4, group_size=32), lambda s, w: gptq(s, w, 32)),
    "gptq-rows": (
        dict(quant_method="gptq", bits=4, group_size=-1, checkpoint_format="gptq_v2"),
        lambda s, w: gptq(s, w, -1, 0),
    ),
    "fp8-tensor": (dict(quant_method="fp8", activation_scheme="dynamic"), lambda s, w: fp8(s, w, "tensor")),
    "fp8-block": (dict(quant_method="fp8", weight_block_size=[32, 32]), lambda s, w: fp8(s, w, "block")),
    "compressed-channel": (compressed("channel"), lambda s, w: fp8(s, w, "channel")),
    "compressed-tensor": (compressed("tensor"), lambda s, w: fp8(s, w, "tensor")),
    "packed-32": (pack_quantized("group", 32), lambda s, w: packed(s, w, 32, symmetric=True)),
    "packed-zeros": (pack_quantized("group", 64), lambda s, w: packed(s, w, 64, symmetric=False)),
    "packed-rows": (pack_quantized("channel", None), lambda s, w: packed(s, w, -1, symmetric=True)),
    "nvfp4": (nvfp4_packed(), lambda s, w: nvfp4(s, w, modelopt=False)),
    "modelopt-fp8": (dict(quant_method="modelopt", quant_algo="FP8"), lambda s, w: fp8(s, w, "tensor")),
    "modelopt": (dict(quant_method="modelopt", quant_algo="NVFP4"), lambda s, w: nvfp4(s, w, modelopt=True)),
}


LEFT_PLAIN = ("gate.weight", ".in_proj_a.", ".in_proj_b.", ".in_proj_ba.")
"""Parts of the names of weights that published checkpoints leave in 16 bits."""


def quantized(directory: Path, family: str, method: str, **differences: Any) -> Any:
    """Write a checkpoint and quantize its layers. Returns Transformers' module of the dequantized checkpoint."""
    make(directory / "plain", family, **differences)
    given, quantize = METHODS[method]
    tensors = load_file(directory / "plain" / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in list(tensors.items()):
        if ".layers." in name and tensor.ndim == 2 and not any(part in name for part in LEFT_PLAIN):
            parts, tensors[name] = quantize(name.removesuffix(".weight"), tensor)
            stored |= parts
        else:
            stored[name] = tensor
    # The model's own bias must not be taken for a zero bias that a tool added.
    stored |= {name: tensor for name, tensor in tensors.items() if name.endswith(".bias")}
    save_file(tensors, directory / "plain" / "model.safetensors")
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "plain" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | dict(quantization_config=given)))
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory / "plain", dtype=torch.float32).eval()


@torch.inference_mode()
def difference(model: Any, module: Any) -> float:
    """The largest difference of two models' logits, in relation to the largest logit."""
    ids = torch.arange(24) * 7 % 384 + 3
    expected = module(ids[None]).logits[0]
    return float((_paged_logits(model, ids) - expected).abs().max() / expected.abs().max())


@pytest.mark.each_value("Llama-*")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3Moe"])
def test_logits_equal_those_of_the_dequantized_checkpoint(tmp_path: Path, family: str, method: str) -> None:
    differences = dict(moe_intermediate_size=64) if family == "Qwen3Moe" else {}
    module = quantized(tmp_path, family, method, **differences)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    assert difference(model, module) < 1e-5
    kind = type(model.layers[0].qkv)
    four = method.startswith(("awq", "gptq", "packed"))
    dense = method in ("fp8-block", "nvfp4", "modelopt")
    assert kind is (torch.Tensor if dense else Int4Weight if four else Fp8Weight)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("method", ["fp8-block", "compressed-channel", "awq-32"])
def test_latent_attention_is_read_from_quantized_checkpoints(tmp_path: Path, method: str, tp: int) -> None:
    """DeepSeek-V3 is published with FP8 blocks. Rows that are rotated in pairs are reordered as plain numbers."""
    sizes = dict(kv_lora_rank=32, q_lora_rank=32, qk_rope_head_dim=32, head_dim=32, qk_nope_head_dim=32, v_head_dim=16)
    module = quantized(tmp_path, "DeepseekV3", method, **sizes)
    whole = load(tmp_path, device="cpu")
    assert isinstance(whole, Decoder)
    assert difference(whole, module) < 1e-5
    for rank in range(tp):
        part = load(tmp_path, device="cpu", layout=Layout(tp=tp), rank=rank)
        assert isinstance(part, Decoder)
        rows = whole.layers[1].latent["latent_up"].chunk(tp)[rank]
        assert torch.equal(part.layers[1].latent["latent_up"], rows)


@needs_vectors
@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("method", ["awq-32", "gptq-32", "packed-zeros"])
def test_four_bits_in_bfloat16_are_multiplied_as_a_cpu_s_kernel_packs_them(tmp_path: Path, method: str) -> None:
    quantized(tmp_path, "Llama", method)
    exact, model = load(tmp_path, device="cpu"), load(tmp_path, device="cpu", dtype="bfloat16")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    for layer, other in zip(model.layers, exact.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            found, wanted = getattr(layer, field), plain(getattr(other, field))
            assert isinstance(found, Int4CpuWeight)
            assert (plain(found) - wanted).abs().max() < wanted.abs().max() * 2**-7
    rounded = load(tmp_path / "plain", device="cpu", dtype="bfloat16")
    module = load(tmp_path / "plain", device="cpu")
    assert apart(model, module) < 1.5 * apart(rounded, module)


@pytest.mark.usefixtures("with_library")
@pytest.mark.parametrize("method", ["awq-64", "gptq-rows", "packed-32", "packed-zeros"])
def test_four_bits_in_bfloat16_are_multiplied_as_integers(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    quantized(tmp_path, "Llama", method)
    exact, model = load(tmp_path, device="cpu"), load(tmp_path, device="cpu", dtype="bfloat16")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    for layer, other in zip(model.layers, exact.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            found, wanted = getattr(layer, field), plain(getattr(other, field))
            assert isinstance(found, IntegerWeight) and found.bits == 4
            assert (plain(found) - wanted).abs().max() < wanted.abs().max() * 2**-10
    rounded = load(tmp_path / "plain", device="cpu", dtype="bfloat16")
    module = load(tmp_path / "plain", device="cpu")
    # Activations rounded to 8 bits move the logits about twice as far as bfloat16 does by itself.
    assert apart(model, exact) < 3 * apart(rounded, module)
    assert "integer products" not in caplog.text


@pytest.mark.usefixtures("no_library")
def test_an_install_without_the_library_says_so_where_it_is_slower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized(tmp_path, "Llama", "awq-32")
    load(tmp_path, device="cpu")
    load(tmp_path / "plain", device="cpu", dtype="bfloat16")
    assert "integer products" not in caplog.text
    load(tmp_path, device="cpu", dtype="bfloat16")
    assert "multiplied by PyTorch" in caplog.text and "no library of integer products" in caplog.text


def test_the_quantization_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    module = quantized(tmp_path, "Llama", "modelopt")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = dict(producer=dict(name="modelopt"), quantization=dict(quant_algo="NVFP4", group_size=16))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    assert difference(load(tmp_path, device="cpu"), module) < 1e-5


def apart(one: Any, other: Any) -> float:
    """The distance of two models' logits, in relation to those of the other."""
    ids = torch.arange(24) * 7 % 384 + 3
    with torch.inference_mode():
        found, wanted = (_paged_logits(model, ids).double() for model in (one, other))
    return float((found - wanted).norm() / wanted.norm())


def test_quantized_weights_take_their_own_bytes(tmp_path: Path) -> None:
    module = quantized(tmp_path, "Llama", "awq-32")
    model = load(tmp_path, device="cpu")
    layers = sum(weight.numel() for name, weight in module.named_parameters() if "proj" in name)
    rest = sum(weight.nbytes for name, weight in module.named_parameters() if "proj" not in name)
    assert model.spec.weight_bytes == rest + layers // 2 + 3 * layers // 32  # numbers, and 3 bytes for each group


def test_a_quantized_checkpoint_that_names_no_dtype_is_bfloat16() -> None:
    assert own_dtype({"quantization_config": {"quant_method": "mxfp4"}}) == torch.bfloat16
    assert own_dtype({"quantization_config": {"quant_method": "awq"}, "torch_dtype": "float16"}) == torch.float16
    assert own_dtype({}) == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_shards_hold_the_pieces_of_the_whole(tmp_path: Path, method: str) -> None:
    quantized(tmp_path, "Llama", method)
    whole = load(tmp_path, device="cpu")
    assert isinstance(whole, Decoder)
    downs, ups = [], []
    for rank in range(2):
        part = load(tmp_path, device="cpu", layout=Layout(tp=2), rank=rank)
        assert isinstance(part, Decoder)
        downs.append(plain(part.layers[1].down))
        ups.append(plain(part.layers[1].gate_up).chunk(2)[1])
    assert torch.equal(torch.cat(downs, 1), plain(whole.layers[1].down))
    assert torch.equal(torch.cat(ups), plain(whole.layers[1].gate_up).chunk(2)[1])


def plain(weight: Any) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantized(torch.float32)


def test_tp_cuts_no_group(tmp_path: Path) -> None:
    quantized(tmp_path, "Llama", "awq-64")
    with pytest.raises(UnsupportedCheckpoint, match="groups of 64 inputs, which tp would cut: 32 of 128 inputs"):
        load(tmp_path, device="cpu", layout=Layout(tp=4), rank=0)


def test_weights_that_stay_plain_are_read_as_they_are(tmp_path: Path) -> None:
    module = quantized(tmp_path, "Llama", "fp8-tensor")
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    stored[name] = load_file(tmp_path / "plain" / "model.safetensors")[name]
    del stored[name + "_scale"]
    save_file(stored, tmp_path / "model.safetensors")
    assert difference(load(tmp_path, device="cpu"), module) < 1e-5


class Kept:
    """The tensors of a checkpoint in memory, with the interface of `quantized.Stored`."""

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors

    def has(self, name: str) -> bool:
        return name in self.tensors

    def dtype(self, name: str) -> str:
        names = {torch.int32: "I32", torch.float16: "F16", torch.uint8: "U8", FP8: "F8_E4M3"}
        return names[self.tensors[name].dtype]

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def slices(self, name: str, shape: tuple[int, ...], cut: tuple[slice, ...]) -> torch.Tensor:
        assert tuple(self.tensors[name].shape) == shape
        return self.tensors[name][cut]


@pytest.mark.parametrize("offset", [0, 1], ids=["gptq_v2", "gptq"])
@pytest.mark.parametrize("sign", [1, -1], ids=["zero 0", "zero 15"])
def test_gptq_zeros_at_the_ends_of_four_bits_wrap_around(sign: int, offset: int) -> None:
    weight = sign * torch.rand(16, 64, generator=torch.Generator().manual_seed(1)).add(0.1)
    stored, plain = gptq("x", weight, 32, offset)
    assert {*four_bits(weight, 32)[1].flatten().tolist()} == {0.0 if sign > 0 else 15.0}
    reader = QuantizedReader(Kept(stored), Quantization("gptq", 32, offset), native_fp8=True)
    into = torch.empty(16, 64)
    assert reader.fill("x.weight", Piece.all_of(16, 64), into)
    torch.testing.assert_close(into, plain)
    packed = reader.packed(("x.weight",), (Piece.all_of(16, 64),), torch.device("cpu"), torch.float32)
    assert packed is not None
    torch.testing.assert_close(packed.dequantized(torch.float32), plain)


@pytest.mark.parametrize("rank", range(4))
def test_each_rank_has_the_scales_of_its_own_rows(rank: int) -> None:
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(2)) * torch.arange(1.0, 17.0)[:, None]
    stored, plain = fp8("x", weight, "channel")
    reader = QuantizedReader(Kept(stored), Quantization("fp8"), native_fp8=True)
    rows = range(4 * rank, 4 * rank + 4)
    piece = Piece((16, 8), (rows, range(8)))
    packed = reader.packed(("x.weight",), (piece,), torch.device("cpu"), torch.float32)
    assert packed is not None
    torch.testing.assert_close(packed.dequantized(torch.float32), plain[rows.start : rows.stop])
    into = torch.empty(4, 8)
    assert reader.fill("x.weight", piece, into)
    torch.testing.assert_close(into, plain[rows.start : rows.stop])


def reader_of(method: str, weights: dict[str, torch.Tensor], block: tuple[int, int] | None = None) -> QuantizedReader:
    """A reader for a device with kernels of packed weights, of tensors in the format of a method."""
    given, quantize = METHODS[method]
    how = quantization_of({"quantization_config": given})
    assert how is not None
    stored: Tensors = {}
    for name, weight in weights.items():
        stored |= quantize(name.removesuffix(".weight"), weight)[0]
    return QuantizedReader(Kept(stored), replace(how, block=block or how.block), native_fp8=True, reads_packed=True)


def drawn(*shapes: tuple[int, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return {
        f"{number}.weight": torch.randn(shape, generator=generator) * torch.logspace(-1, 1, shape[0])[:, None]
        for number, shape in enumerate(shapes)
    }


def read(reader: QuantizedReader, name: str, piece: Piece) -> torch.Tensor:
    into = torch.empty(piece.shape)
    assert reader.fill(name, piece, into)
    return into


@pytest.mark.parametrize(
    ("method", "kind", "columns"),
    [
        ("fp8-block", Fp8BlockWeight, range(64, 128)),
        ("nvfp4", PackedWeight, range(48, 96)),
        ("modelopt", PackedWeight, range(0, 128)),
    ],
)
def test_a_gpu_keeps_the_rows_of_several_parts_packed(method: str, kind: type, columns: range) -> None:
    reader = reader_of(method, drawn((128, 128), (64, 128)))
    pieces = Piece((128, 128), (range(32, 96), columns)), Piece((64, 128), (range(8, 56), columns))
    names = ("0.weight", "1.weight")
    weight = reader.packed(names, pieces, CPU, torch.bfloat16)
    assert isinstance(weight, kind)
    wanted = torch.cat([read(reader, name, piece) for name, piece in zip(names, pieces, strict=True)])
    assert torch.equal(weight.dequantized(torch.float32), wanted)


@pytest.mark.parametrize(
    ("rows", "columns", "sizes"),
    [
        (range(0, 128), range(0, 128), (32, 32)),
        (range(16, 56), range(64, 128), (8, 32)),
        (range(1, 4), range(0, 128), (1, 32)),
        (range(0, 128), range(16, 48), None),
    ],
)
def test_parts_that_cut_blocks_have_smaller_ones(rows: range, columns: range, sizes: tuple[int, int] | None) -> None:
    reader = reader_of("fp8-block", drawn((128, 128)))
    piece = Piece((128, 128), (rows, columns))
    weight = reader.packed(("0.weight",), (piece,), CPU, torch.bfloat16)
    assert isinstance(weight, Fp8BlockWeight) == (sizes is not None)
    if isinstance(weight, Fp8BlockWeight):
        assert (weight.rows, weight.group) == sizes
        assert torch.equal(weight.dequantized(torch.float32), read(reader, "0.weight", piece))


def test_a_last_block_may_be_smaller_than_the_others() -> None:
    weight = drawn((144, 160))["0.weight"]
    scale = torch.rand(2, 2, generator=torch.Generator().manual_seed(3)) + 0.1
    stored = {"x.weight": weight.clamp(-400, 400).to(FP8), "x.weight_scale_inv": scale}
    reader = QuantizedReader(Kept(stored), Quantization("fp8", block=(128, 128)), native_fp8=True, reads_packed=True)
    found = reader.packed(("x.weight",), (Piece.all_of(144, 160),), CPU, torch.bfloat16)
    assert isinstance(found, Fp8BlockWeight) and (found.rows, found.group) == (16, 32)
    spread = scale.repeat_interleave(128, 0)[:144].repeat_interleave(128, 1)[:, :160]
    assert torch.equal(found.dequantized(torch.float32), stored["x.weight"].float() * spread)


@pytest.mark.parametrize("method", [name for name in METHODS if name != "gptq-rows"])
def test_a_gpu_keeps_the_weights_of_single_experts_packed(method: str) -> None:
    reader = reader_of(method, drawn(*[(64, 128)] * 6))
    names = [("0.weight", "1.weight"), ("2.weight", "3.weight"), ("4.weight", "5.weight")]
    piece = Piece((64, 128), (range(32, 64), range(64, 128)))
    experts = reader.packed_matrices(names, (piece, piece), CPU)
    assert experts is not None and experts.shape == (3, 64, 64)
    for expert, each in enumerate(names):
        wanted = torch.cat([read(reader, name, piece) for name in each])
        torch.testing.assert_close(experts.matrix(expert, torch.float32), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["fp8-block", "nvfp4", "modelopt"])
def test_experts_whose_groups_tp_cuts_are_dequantized(method: str) -> None:
    reader = reader_of(method, drawn((64, 128)))
    piece = Piece((64, 128), (range(64), range(8, 24)))
    assert reader.packed_matrices([("0.weight",)], (piece,), CPU) is None
    assert read(reader, "0.weight", piece).isfinite().all()


def test_experts_of_several_formats_are_dequantized() -> None:
    given, quantize = METHODS["nvfp4"]
    stored = quantize("0", torch.randn(32, 64))[0] | {"1.weight": torch.randn(32, 64).half()}
    how = quantization_of({"quantization_config": given})
    assert how is not None
    reader = QuantizedReader(Kept(stored), how, native_fp8=True, reads_packed=True)
    piece = Piece.all_of(32, 64)
    assert reader.packed_matrices([("0.weight", "1.weight")], (piece, piece), CPU) is None
    assert reader.packed_matrices([("0.weight",)], (piece,), CPU) is not None


def test_before_hopper_fp8_experts_and_blocks_are_dequantized() -> None:
    given, quantize = METHODS["fp8-block"]
    how = quantization_of({"quantization_config": given})
    assert how is not None
    reader = QuantizedReader(Kept(quantize("0", torch.randn(64, 64))[0]), how, native_fp8=False, reads_packed=True)
    piece = Piece.all_of(64, 64)
    assert reader.packed(("0.weight",), (piece,), CPU, torch.bfloat16) is None
    assert reader.packed_matrices([("0.weight",)], (piece,), CPU) is None


@pytest.mark.parametrize(
    ("ending", "value", "reason"),
    [
        ("weight_global_scale", torch.zeros(1), r"0.weight_global_scale is \[0.0\]; one positive number"),
        ("weight_global_scale", None, r"no 0.weight_global_scale, the factor of tensor 0.weight"),
        ("weight_scale", torch.full((32, 4), -1.0).to(FP8), r"0.weight_scale holds negative scales"),
        ("weight_scale", torch.full((32, 4), torch.nan).to(FP8), r"0.weight_scale holds NaN"),
        ("weight_scale", torch.ones(32, 4).half(), r"its scales are torch.float16"),
    ],
)
def test_damaged_nvfp4_tensors_are_refused_by_name(ending: str, value: torch.Tensor | None, reason: str) -> None:
    stored = METHODS["nvfp4"][1]("0", torch.randn(32, 64))[0]
    del stored[f"0.{ending}"]
    if value is not None:
        stored[f"0.{ending}"] = value
    reader = QuantizedReader(Kept(stored), Quantization("nvfp4", 16), native_fp8=True)
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        read(reader, "0.weight", Piece.all_of(32, 64))


@pytest.mark.parametrize("method", ["fp8-block", "nvfp4", "awq-32"])
def test_a_model_whose_weights_and_experts_stay_packed_has_the_same_logits(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch dequantizes the forms of a GPU's kernels at each use, so a CPU can hold them, too."""
    monkeypatch.setattr(
        "holdfast.lm.models.loader.QuantizedReader",
        lambda *given, **options: QuantizedReader(*given, **options | dict(reads_packed=True)),
    )
    module = quantized(tmp_path, "Qwen3Moe", method, moe_intermediate_size=64)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    for layer in model.layers:
        assert layer.experts is not None and not isinstance(layer.qkv, torch.Tensor)
        assert isinstance(layer.experts.gate_up, PackedWeight) and isinstance(layer.experts.down, PackedWeight)
    assert difference(model, module) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fp8-block", "nvfp4", "modelopt", "awq-32", "compressed-channel"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_on_a_gpu_packed_weights_have_the_logits_of_the_dequantized_checkpoint(
    tmp_path: Path, family: str, method: str
) -> None:
    differences = dict(moe_intermediate_size=64) if family == "Qwen3Moe" else {}
    quantized(tmp_path, family, method, **differences)
    model = load(tmp_path, device="cuda", dtype="bfloat16")
    assert isinstance(model, Decoder)
    layer = model.layers[0]
    if layer.experts is not None:
        assert isinstance(layer.experts.gate_up, PackedWeight) and isinstance(layer.experts.down, PackedWeight)
    assert not isinstance(layer.qkv, torch.Tensor)
    ids = torch.arange(24, device="cuda") * 7 % 384 + 3
    plain = load(tmp_path / "plain", device="cuda", dtype="bfloat16")
    with torch.inference_mode():
        found, wanted = (_paged_logits(each, ids).double() for each in (model, plain))
    assert (found - wanted).norm() / wanted.norm() < 0.05


@pytest.mark.parametrize(("method", "ending"), [("gptq-32", "g_idx"), ("packed-32", "weight_g_idx")])
def test_inputs_ordered_by_activation_are_refused(tmp_path: Path, method: str, ending: str) -> None:
    quantized(tmp_path, "Llama", method)
    stored = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{ending}"
    stored[name] = (torch.arange(64) // 32).flip(0).int().contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=f"{name} orders inputs by activation"):
        load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (dict(quant_method="bitsandbytes"), r"quantized \(bitsandbytes\); known: awq, gptq"),
        (dict(quant_method="gptq", bits=8), r"\(gptq\) with 8 bits; 4 are supported"),
        (dict(quant_method="awq", version="gemv"), r"\(awq\) in layout 'gemv'; gemm is supported"),
        (compressed("group"), r"with 8-bit float weights by group; known"),
        (dict(quant_method="compressed-tensors"), r"without config_groups"),
        (pack_quantized("group", 32, type="float"), r"pack-quantized\) with 4-bit float weights by group, and plain"),
        (nvfp4_packed(group_size=32), r"nvfp4-pack-quantized\) with 4-bit float weights in groups of 32; known"),
        (dict(quant_method="modelopt", quant_algo="W4A8_AWQ"), r"\(modelopt\) by W4A8_AWQ in groups of 16; known"),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), r"quantized \(bitsandbytes\); known: .*NVFP4$"),
        (pack_quantized("group", 32, num_bits=8), r"with 8-bit int weights by group, and plain activations; known"),
        (
            pack_quantized("group", 32)
            | dict(config_groups=dict(a=dict(weights=INT4, input_activations=dict(num_bits=8)))),
            r"with 4-bit int weights by group, and quantized activations",
        ),
        (
            pack_quantized("group", 32) | dict(config_groups=dict(a=dict(weights=INT4), b=dict(weights=INT4_ROWS))),
            r"in groups of -1 and 32; one size",
        ),
    ],
)
def test_other_methods_are_refused_by_name(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    make(tmp_path, "Llama")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(quantization_config=given)))
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path, device="cpu")


def test_a_model_without_a_native_decoder_is_told_first_that_nobody_reads_its_method(tmp_path: Path) -> None:
    make(tmp_path, "Starcoder2")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for given, reason in (
        (dict(quant_method="bitsandbytes"), r"quantized \(bitsandbytes\); known: awq, gptq"),
        (dict(quant_method="awq"), r"quantized \(awq\), which runs by native decoders"),
    ):
        path.write_text(json.dumps(config | dict(quantization_config=given)))
        with pytest.raises(UnsupportedCheckpoint, match=reason):
            load(tmp_path, device="cpu")


def make_mxfp4(tmp_path: Path, inner: int) -> None:
    """Write a GPT-OSS with MXFP4 experts of width `inner`, and to `plain` the one that Transformers makes of it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    make(tmp_path / "plain", "GptOss", hidden_size=64, intermediate_size=inner)
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    stored: Tensors = {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            count, inputs, outputs = tensor.shape
            size = (count, outputs, inputs // 32)
            blocks = torch.randint(256, (*size, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(120, 125, size, generator=generator).to(torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        else:
            stored[name] = tensor
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | dict(quantization_config=dict(quant_method="mxfp4"))))


@pytest.mark.parametrize(("inner", "tp", "down_packed"), [(96, 1, True), (128, 2, True), (96, 2, False)])
def test_mxfp4_experts_stay_packed_if_a_device_has_whole_blocks(
    tmp_path: Path, inner: int, tp: int, down_packed: bool
) -> None:
    make_mxfp4(tmp_path, inner)
    for rank in range(tp):
        options: dict[str, Any] = dict(device="cpu", layout=Layout(tp=tp), rank=rank)
        ours, theirs = (load(at, **options) for at in (tmp_path, tmp_path / "plain"))
        assert isinstance(ours, Decoder) and isinstance(theirs, Decoder)
        for layer, other in zip(ours.layers, theirs.layers, strict=True):
            assert layer.experts is not None and other.experts is not None
            for field, packed in (("gate_up", True), ("down", down_packed)):
                weights, plain = getattr(layer.experts, field), getattr(other.experts, field)
                assert isinstance(weights, Mxfp4Matrices) == packed and weights.shape == plain.shape
                for expert in range(len(plain)):
                    assert torch.equal(matrix_of(weights, expert, torch.float32), plain[expert])
        count, hidden, own = ours.layers[0].experts.down.shape
        numbers = len(ours.layers) * count * hidden * own * (3 if down_packed else 2)
        assert theirs.spec.weight_bytes - ours.spec.weight_bytes == numbers * 4 - numbers // 32 * 17


def test_random_mxfp4_experts_have_the_spread_of_other_weights_and_their_place_on_each_rank(tmp_path: Path) -> None:
    make_mxfp4(tmp_path, 128)
    (tmp_path / "model.safetensors").unlink()
    options: dict[str, Any] = dict(device="cpu", load_format="random")
    parts = [load(tmp_path, **options, layout=Layout(tp=2), rank=rank) for rank in range(2)]
    whole, *halves = [
        each.layers[1].experts for each in (load(tmp_path, **options), *parts) if isinstance(each, Decoder)
    ]
    assert whole is not None
    downs, ups = [], []
    for half in halves:
        assert half is not None and isinstance(half.down, Mxfp4Matrices) and isinstance(half.gate_up, Mxfp4Matrices)
        downs.append(half.down.matrix(3, torch.float32))
        ups.append(half.gate_up.matrix(3, torch.float32).chunk(2)[1])
    assert torch.equal(torch.cat(downs, 1), matrix_of(whole.down, 3, torch.float32))
    assert torch.equal(torch.cat(ups), matrix_of(whole.gate_up, 3, torch.float32).chunk(2)[1])
    assert not torch.equal(downs[0], matrix_of(whole.down, 2, torch.float32)[:, :64])
    assert whole.router.std() / 2**0.5 < torch.cat(downs).std() < whole.router.std() * 2**0.5


def test_a_model_of_packed_experts_has_the_logits_of_transformers_dequantized_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    make_mxfp4(tmp_path, 96)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    assert difference(load(tmp_path, device="cpu"), module) < 1e-5


@pytest.mark.parametrize(
    ("change", "dtype", "reason"),
    [
        (dict(scale=255), "float32", "down_proj_scales holds NaN"),
        (dict(scale=142), "float16", "down_proj holds NaN or infinite values, as float16"),
        (dict(dtype=torch.int8), "float32", "down_proj_blocks is torch.int8; torch.uint8"),
    ],
)
def test_damaged_mxfp4_tensors_are_refused_by_name(
    tmp_path: Path, change: dict[str, Any], dtype: str, reason: str
) -> None:
    make_mxfp4(tmp_path, 96)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    if "scale" in change:
        tensors[f"{name}_scales"][1, 2, 0] = change["scale"]
        tensors[f"{name}_blocks"][1, 2, 0] = 0x77
    else:
        tensors[f"{name}_blocks"] = tensors[f"{name}_blocks"].view(change["dtype"])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedCheckpoint, match=reason):
        load(tmp_path, device="cpu", dtype=dtype)
