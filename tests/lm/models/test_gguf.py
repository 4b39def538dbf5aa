"""Models in GGUF files have the config, the tokenizer and the weights of the checkpoint they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quant_shape_to_byte_shape
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from holdfast.core.layout import Layout
from holdfast.files.cache import gguf_cache
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.kernels.int4_cpu import Int4CpuWeight
from holdfast.lm.kernels.int8_cpu import MOST_LOST, Int8CpuWeight
from holdfast.lm.kernels.integer.weight import IntegerWeight
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.kernels.stacked import StackedWeight
from holdfast.lm.models.checkpoint_errors import DamagedCheckpoint, MisfitCheckpoint, UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.gguf_blocks import FORMATS, FOUR_BITS, dequantized, four_bits
from holdfast.lm.models.gguf_config import config_of
from holdfast.lm.models.gguf_metadata import write
from holdfast.lm.models.gguf_values import Metadata
from holdfast.lm.models.hf import _paged_logits
from holdfast.lm.models.loader import GgufWeights, load, native_spec, open_files
from holdfast.lm.models.shard import Piece
from tests.checkpoints import make
from tests.gguf_files import write_gguf
from tests.lm.execution.test_parity import run
from tests.lm.execution.test_variants import LLAMA3, LONGROPE, YARN, case_of
from tests.lm.models.test_quantized import apart, difference, needs_vectors, plain
from tests.tokenizers_made import byte_level

PLAIN = {"rope_type": "default", "rope_theta": 5e5}
MIXTRAL = {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 1e6}
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, list[float]]]] = {
    "llama": ("Llama", "llama", dict(rope_parameters=PLAIN), {"rope.freq_base": 5e5}, {}),
    "llama-biased": ("Llama", "llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True), {}, {}),
    "llama-yarn": (
        "Llama",
        "llama",
        dict(rope_parameters=YARN),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
        {},
    ),
    "llama-linear": (
        "Llama",
        "llama",
        dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "mixtral": ("Mixtral", "llama", dict(sliding_window=None), MIXTRAL, {}),
    "qwen2": ("Qwen2", "qwen2", dict(use_sliding_window=False), {}, {}),
    "qwen3": ("Qwen3", "qwen3", {}, {"rope.freq_base": 1e6}, {}),
    "qwen3-moe": (
        "Qwen3Moe",
        "qwen3moe",
        {},
        {"expert_count": 6, "expert_used_count": 3, "expert_feed_forward_length": 48},
        {},
    ),
    "gemma2": (
        "Gemma2",
        "gemma2",
        {},
        {"attention.sliding_window": 12, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
        {},
    ),
    "gemma3": (
        "Gemma3Text",
        "gemma3",
        dict(num_hidden_layers=7, layer_types=..., query_pre_attn_scalar=16),
        {"attention.sliding_window": 12, "rope.freq_base": 1e6},
        {},
    ),
    "phi3": ("Phi3", "phi3", {}, {"attention.sliding_window": 12}, {}),
    "phi3-longrope": (
        "Phi3",
        "phi3",
        dict(original_max_position_embeddings=128, rope_parameters=LONGROPE),
        {"attention.sliding_window": 12, "rope.scaling.original_context_length": 128},
        {"rope_factors_short.weight": LONGROPE["short_factor"], "rope_factors_long.weight": LONGROPE["long_factor"]},
    ),
    "olmo2": ("Olmo2", "olmo2", {}, {}, {}),
    "lfm2": (
        "Lfm2",
        "lfm2",
        dict(num_hidden_layers=4, layer_types=["conv", "conv", "full_attention", "conv"], conv_L_cache=4),
        {"shortconv.l_cache": 4, "rope.freq_base": 1e6},
        {},
    ),
    "lfm2-untied": (
        "Lfm2",
        "lfm2",
        dict(tie_word_embeddings=False, conv_bias=True),
        {"shortconv.l_cache": 3, "rope.freq_base": 1e6},
        {},
    ),
}
"""For each case: the family, GGUF's architecture, the model's differences, further keys, and further tensors."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and an empty cache."""
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def as_gguf(tmp_path: Path, name: str, **options: Any) -> tuple[Any, Path]:
    """Transformers' module of a case, and the directory that stands for its GGUF file."""
    family, architecture, differences, more, tensors = CASES[name]
    module = make(tmp_path / "plain", family, **differences)
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", architecture, more=more, tensors=tensors, **options)
    return module, described(tmp_path / "model.gguf")


def described(path: Path) -> Path:
    directory = gguf_cache() / path.name
    directory.mkdir(parents=True)
    write(path, directory)
    return directory


@pytest.mark.parametrize("name", CASES)
def test_a_model_from_gguf_has_the_tokens_of_the_checkpoint_it_was_made_from(tmp_path: Path, name: str) -> None:
    module, directory = as_gguf(tmp_path, name)
    case = case_of(module, directory, [60, 9, 40])
    assert isinstance(case.model, Decoder)
    assert run(case, case.model, 4, 2, budget=24)[0] == case.expected


def test_llama_3_s_scaling_is_read_from_the_factors_of_its_waves(tmp_path: Path) -> None:
    scaling = LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 32}
    module = make(tmp_path / "plain", "Llama", rope_parameters=scaling)
    plain = 1 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / module.model.rotary_emb.inv_freq).tolist()
    assert max(factors) == pytest.approx(8)
    keys = {"rope.freq_base": 5e5}
    write_gguf(tmp_path / "a.gguf", tmp_path / "plain", "llama", more=keys, tensors={"rope_freqs.weight": factors})
    case = case_of(module, described(tmp_path / "a.gguf"), [200, 40])
    assert run(case, case.model, 4, 1, budget=64)[0] == case.expected


def drawn_blocks(kind: str) -> Any:
    """An encoder of matrices as random blocks of a format, whose scales are small enough for a model."""
    format_of, generator = GGMLQuantizationType[kind], np.random.default_rng(5)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208, 210), "Q2_K": (80, 84), "Q3_K": (108, 110)}[kind]

    def encode(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        shape = quant_shape_to_byte_shape(data.shape, format_of)
        blocks = generator.integers(0, 256, shape, np.uint8)
        size = quant_shape_to_byte_shape((256,), format_of)[0]
        each = blocks.reshape(-1, size)
        scales = generator.uniform(1e-4, 3e-4, (len(each), 2)).astype(np.float16).view(np.uint8)
        each[:, halves[0] : halves[0] + 4 if kind != "Q6_K" and kind != "Q3_K" else halves[1]] = (
            scales if kind not in ("Q6_K", "Q3_K") else scales[:, :2]
        )
        return blocks

    return encode


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"])
def test_quantized_matrices_are_those_that_the_format_s_own_package_reads(tmp_path: Path, kind: str) -> None:
    sizes = dict(hidden_size=256, intermediate_size=512, head_dim=64)
    make(tmp_path / "plain", "Llama", **sizes)
    encode = drawn_blocks(kind) if kind.endswith("_K") else None
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind=kind, encode=encode)
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).eval()
    model = load(described(tmp_path / "model.gguf"), device="cpu", dtype="float32")
    assert difference(model, module) < 1e-5


@needs_vectors
@pytest.mark.usefixtures("no_library")
def test_in_bfloat16_a_cpu_keeps_six_bits_as_eight_by_row(tmp_path: Path) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64, tie_word_embeddings=True)
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind="Q6_K", encode=drawn_blocks("Q6_K"))
    directory = described(tmp_path / "model.gguf")
    exact, model = load(directory, device="cpu"), load(directory, device="cpu", dtype="bfloat16")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    pairs = [(model.lm_head, exact.lm_head)]
    for layer, other in zip(model.layers, exact.layers, strict=True):
        pairs += [(getattr(layer, field), getattr(other, field)) for field in ("qkv", "o", "gate_up", "down")]
    for weight, wanted in pairs:
        assert isinstance(weight, Int8CpuWeight)
        assert (plain(weight) - plain(wanted)).norm() / plain(wanted).norm() < MOST_LOST
    assert isinstance(model.embedding, torch.Tensor), "rows are looked up in plain numbers"
    assert apart(model, exact) < 0.08
    numbers = sum(weight.shape.numel() for weight, _ in pairs[1:])
    rows = sum(weight.shape[0] for weight, _ in pairs)
    assert exact.spec.weight_bytes / 2 - model.spec.weight_bytes == numbers - pairs[0][0].shape.numel() - 2 * rows


@needs_vectors
@pytest.mark.usefixtures("no_library")
def test_a_weight_with_a_few_large_numbers_is_not_rounded_by_row(tmp_path: Path) -> None:
    def encode(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        blocks: np.ndarray[Any, Any] = drawn_blocks("Q6_K")(data)
        if data.shape[1] == 512:  # the second block of each row of down has one number, which is large
            blocks[:, 210:338], blocks[:, 338:402], blocks[:, 402:418] = 0, 0xAA, 127
            blocks[:, 210] = 15
            blocks[:, 418:420] = (blocks[:, 208:210].copy().view(np.float16) * 30).view(np.uint8)
        return blocks

    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind="Q6_K", encode=encode)
    model = load(described(tmp_path / "model.gguf"), device="cpu", dtype="bfloat16")
    assert isinstance(model, Decoder)
    assert isinstance(model.layers[1].down, torch.Tensor) and isinstance(model.layers[1].o, Int8CpuWeight)


@needs_vectors
@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize(("kind", "packed"), [("Q4_K", True), ("Q4_0", True), ("Q8_0", False), ("Q5_K", False)])
def test_in_bfloat16_a_cpu_keeps_four_bits_packed(tmp_path: Path, kind: str, packed: bool) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    encode = drawn_blocks(kind) if kind.endswith("_K") else None
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind=kind, encode=encode)
    directory = described(tmp_path / "model.gguf")
    exact, model = load(directory, device="cpu"), load(directory, device="cpu", dtype="bfloat16")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    for layer, other in zip(model.layers, exact.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            weight, wanted = getattr(layer, field), getattr(other, field)
            assert isinstance(weight, Int4CpuWeight) == packed
            assert (plain(weight) - wanted).abs().max() <= wanted.abs().max() * 2**-7
    assert apart(model, exact) < 0.05
    numbers = sum(
        getattr(layer, field).shape.numel() for layer in model.layers for field in ("qkv", "o", "gate_up", "down")
    )
    numbers += model.lm_head.shape.numel()
    saved = exact.spec.weight_bytes / 2 - model.spec.weight_bytes
    assert saved == (numbers * 2 - numbers * 5 // 8 if packed else 0)


@pytest.mark.usefixtures("with_library")
def test_a_deterministic_engine_keeps_integers_and_takes_other_numbers_as_plain_ones(tmp_path: Path) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    kinds = {"BF16": torch.Tensor, "Q4_0": IntegerWeight, "Q5_0": torch.Tensor}
    for kind, form in kinds.items():
        write_gguf(tmp_path / f"{kind}.gguf", tmp_path / "plain", "llama", kind=kind)
        model = load(described(tmp_path / f"{kind}.gguf"), device="cpu", dtype="bfloat16", invariant=True)
        assert isinstance(model, Decoder) and model.spec.arithmetic.startswith("AVX")
        assert all(isinstance(getattr(model.layers[0], name), form) for name in ("qkv", "o", "gate_up", "down")), kind


@pytest.mark.usefixtures("with_library")
@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4), ("Q4_0", 4), ("Q6_K", 6), ("Q8_0", 8), ("Q5_K", None)])
def test_in_bfloat16_a_cpu_multiplies_integers(tmp_path: Path, kind: str, bits: int | None) -> None:
    sizes = dict(hidden_size=256, intermediate_size=512, head_dim=64)
    make(tmp_path / "plain", "Llama", **sizes, tie_word_embeddings=True, attention_bias=True)
    encode = drawn_blocks(kind) if kind.endswith("_K") else None
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind=kind, encode=encode)
    directory = described(tmp_path / "model.gguf")
    exact, model = load(directory, device="cpu"), load(directory, device="cpu", dtype="bfloat16")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    pairs = [(model.lm_head, exact.lm_head)]
    for layer, other in zip(model.layers, exact.layers, strict=True):
        pairs += [(getattr(layer, field), getattr(other, field)) for field in ("qkv", "o", "gate_up", "down")]
    for weight, wanted in pairs:
        assert (weight.bits if isinstance(weight, IntegerWeight) else None) == bits
        assert (plain(weight) - plain(wanted)).abs().max() <= plain(wanted).abs().max() * (2**-10 if bits else 2**-8)
    assert isinstance(model.embedding, torch.Tensor), "rows are looked up in plain numbers"
    assert apart(model, exact) < 0.1


@pytest.mark.usefixtures("with_library")
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_ranks_multiply_their_part_of_integers(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=512, intermediate_size=1024, head_dim=64)
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind=kind, encode=drawn_blocks(kind))
    directory, options = described(tmp_path / "model.gguf"), dict[str, Any](device="cpu", dtype="bfloat16")
    whole = load(directory, device="cpu")
    parts = [load(directory, **options, layout=Layout(tp=2), rank=rank) for rank in range(2)]
    first, *halves = [each.layers[1] for each in (whole, *parts) if isinstance(each, Decoder)]
    for half in halves:
        assert isinstance(half.down, IntegerWeight) and isinstance(half.gate_up, IntegerWeight)
    down, ups = (
        torch.cat([plain(half.down) for half in halves], 1),
        [plain(half.gate_up).chunk(2)[1] for half in halves],
    )
    assert (down - plain(first.down)).abs().max() <= plain(first.down).abs().max() * 2**-10
    up = plain(first.gate_up).chunk(2)[1]
    assert (torch.cat(ups) - up).abs().max() <= up.abs().max() * 2**-10


@pytest.mark.usefixtures("with_library")
def test_columns_that_cut_a_block_of_a_format_are_dequantized(tmp_path: Path) -> None:
    """Half of 256 inputs cuts a block of Q6_K, and no block of Q4_K."""
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    for kind, packed in (("Q6_K", False), ("Q4_K", True)):
        write_gguf(tmp_path / f"{kind}.gguf", tmp_path / "plain", "llama", kind=kind, encode=drawn_blocks(kind))
        options: dict[str, Any] = dict(device="cpu", dtype="bfloat16", layout=Layout(tp=2), rank=1)
        part = load(described(tmp_path / f"{kind}.gguf"), **options)
        assert isinstance(part, Decoder)
        assert isinstance(part.layers[1].o, IntegerWeight) == packed


@pytest.mark.usefixtures("with_library")
def test_parts_of_a_layer_in_two_formats_are_multiplied_as_integers_of_both(tmp_path: Path) -> None:
    directory = mixed_file(tmp_path, "Q6_K")
    exact, model = load(directory, device="cpu"), load(directory, device="cpu", dtype="bfloat16")
    assert isinstance(model, Decoder) and isinstance(exact, Decoder)
    qkv = model.layers[1].qkv
    assert isinstance(qkv, StackedWeight)
    assert [part.bits for part in qkv.parts if isinstance(part, IntegerWeight)] == [4, 6]
    assert [part.shape[0] for part in qkv.parts] == [384, 128]
    assert model.whole_steps is not None, "the library computes steps of integers as a whole"
    assert (plain(qkv) - plain(exact.layers[1].qkv)).norm() / plain(exact.layers[1].qkv).norm() < 2**-10
    assert apart(model, exact) < 0.05


@needs_vectors
@pytest.mark.usefixtures("no_library")
def test_ranks_have_their_part_of_packed_numbers(tmp_path: Path) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind="Q4_K", encode=drawn_blocks("Q4_K"))
    directory, options = described(tmp_path / "model.gguf"), dict[str, Any](device="cpu", dtype="bfloat16")
    whole = load(directory, **options)
    parts = [load(directory, **options, layout=Layout(tp=2), rank=rank) for rank in range(2)]
    first, *halves = [each.layers[1] for each in (whole, *parts) if isinstance(each, Decoder)]
    for half in halves:
        assert isinstance(half.down, Int4CpuWeight) and isinstance(half.gate_up, Int4CpuWeight)
    assert torch.equal(torch.cat([plain(half.down) for half in halves], 1), plain(first.down))
    ups = [plain(half.gate_up).chunk(2)[1] for half in halves]
    assert torch.equal(torch.cat(ups), plain(first.gate_up).chunk(2)[1])


@needs_vectors
@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["phi3", "qwen3", "gemma3"])
def test_families_with_other_names_keep_four_bits_packed(tmp_path: Path, name: str) -> None:
    """Phi-3 stores queries, keys and values in one tensor."""
    family, architecture, differences, more, _ = CASES[name]
    make(tmp_path / "plain", family, **differences, hidden_size=256, intermediate_size=512, head_dim=64)
    encode = drawn_blocks("Q4_K")
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", architecture, kind="Q4_K", more=more, encode=encode)
    directory = described(tmp_path / "model.gguf")
    for rank in range(2):
        options: dict[str, Any] = dict(device="cpu", layout=Layout(tp=2), rank=rank)
        exact, model = load(directory, **options), load(directory, dtype="bfloat16", **options)
        assert isinstance(exact, Decoder) and isinstance(model, Decoder)
        for field in ("qkv", "o", "gate_up", "down"):
            weight, wanted = getattr(model.layers[1], field), getattr(exact.layers[1], field)
            assert isinstance(weight, Int4CpuWeight)
            assert (plain(weight) - wanted).abs().max() <= wanted.abs().max() * 2**-7


def test_kv_heads_that_differ_between_layers_are_refused() -> None:
    fields = {"general.architecture": "lfm2", "lfm2.block_count": 3, "lfm2.attention.head_count_kv": [0, 2, 4]}
    with pytest.raises(UnsupportedCheckpoint, match=r"lfm2.attention.head_count_kv is \[0, 2, 4\]; one number"):
        Metadata(fields, {}, lambda name: []).nonzero("attention.head_count_kv", 1)


@needs_vectors
@pytest.mark.usefixtures("no_library")
def test_projections_of_short_convolutions_keep_four_bits_packed(tmp_path: Path) -> None:
    family, architecture, differences, more, _ = CASES["lfm2"]
    make(tmp_path / "plain", family, **differences, hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(
        tmp_path / "model.gguf", tmp_path / "plain", architecture, kind="Q4_K", more=more, encode=drawn_blocks("Q4_K")
    )
    directory = described(tmp_path / "model.gguf")
    exact, model = load(directory, device="cpu"), load(directory, device="cpu", dtype="bfloat16")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    for layer, other in zip(model.layers, exact.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            weight, wanted = getattr(layer, field), getattr(other, field)
            assert isinstance(weight, Int4CpuWeight)
            assert (plain(weight) - wanted).abs().max() <= wanted.abs().max() * 2**-7


def mixed_file(tmp_path: Path, values: str) -> Path:
    """A file in Q4_K whose values have another format, as in some layers of Q4_K_M."""
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64, attention_bias=True)
    others = {"attn_v": (values, drawn_blocks(values))}
    path = tmp_path / f"{values}.gguf"
    write_gguf(path, tmp_path / "plain", "llama", kind="Q4_K", encode=drawn_blocks("Q4_K"), others=others)
    return described(path)


@needs_vectors
@pytest.mark.usefixtures("no_library")
def test_parts_of_a_layer_in_two_formats_stay_packed_each_in_its_own(tmp_path: Path) -> None:
    directory = mixed_file(tmp_path, "Q6_K")
    exact, model = load(directory, device="cpu"), load(directory, device="cpu", dtype="bfloat16")
    assert isinstance(model, Decoder) and isinstance(exact, Decoder)
    qkv = model.layers[1].qkv
    assert isinstance(qkv, StackedWeight) and [*map(type, qkv.parts)] == [Int4CpuWeight, Int8CpuWeight]
    assert [part.shape[0] for part in qkv.parts] == [384, 128] and isinstance(model.layers[1].down, Int4CpuWeight)
    assert (plain(qkv) - plain(exact.layers[1].qkv)).norm() / plain(exact.layers[1].qkv).norm() < MOST_LOST
    assert apart(model, exact) < 0.05


@needs_vectors
@pytest.mark.usefixtures("no_library")
def test_a_layer_with_a_part_that_no_kernel_reads_is_dequantized(tmp_path: Path) -> None:
    model = load(mixed_file(tmp_path, "Q5_K"), device="cpu", dtype="bfloat16")
    assert isinstance(model, Decoder)
    assert isinstance(model.layers[1].qkv, torch.Tensor) and isinstance(model.layers[1].down, Int4CpuWeight)


def source_of(directory: Path) -> GgufWeights:
    config = json.loads((directory / "config.json").read_text())
    spec = native_spec(config)
    # The tensors stay on the CPU. The device that `packed` is asked for only chooses the kernel.
    return GgufWeights(open_files(directory, spec, config, torch.device("cpu")), spec)


def filled(source: GgufWeights, names: tuple[str, ...], pieces: tuple[Piece, ...]) -> torch.Tensor:
    """The plain rows of all pieces."""
    found = [torch.empty(piece.shape) for piece in pieces]
    for name, piece, into in zip(names, pieces, found, strict=True):
        source.fill(name, piece, into)
    return torch.cat(found)


@pytest.mark.parametrize(("kind", "columns"), [("Q8_0", range(64, 192)), ("Q6_K", range(256, 512))])
def test_six_and_eight_bits_for_a_gpu_stand_for_what_the_file_holds(tmp_path: Path, kind: str, columns: range) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=512, intermediate_size=512, head_dim=64)
    encode = drawn_blocks(kind) if kind.endswith("_K") else None
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind=kind, encode=encode)
    source = source_of(described(tmp_path / "model.gguf"))
    names = tuple(f"model.layers.1.self_attn.{name}_proj.weight" for name in "qk")
    pieces = Piece((256, 512), (range(64, 128), columns)), Piece((128, 512), (range(64, 128), columns))
    weight = source.packed(names, pieces, torch.device("cuda"), torch.bfloat16)
    assert isinstance(weight, PackedWeight)
    assert torch.equal(weight.dequantized(torch.float32), filled(source, names, pieces))
    part = range(16, 48) if kind == "Q8_0" else range(64, 128)
    cut = tuple(Piece(piece.whole, (piece.own[0], part)) for piece in pieces)
    assert source.packed(names, cut, torch.device("cuda"), torch.bfloat16) is None


def test_mixed_formats_for_a_gpu_are_stacked(tmp_path: Path) -> None:
    source = source_of(mixed_file(tmp_path, "Q6_K"))
    names = tuple(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
    pieces = tuple(Piece.all_of(rows, 256) for rows in (256, 128, 128))
    weight = source.packed(names, pieces, torch.device("cuda"), torch.bfloat16)
    assert isinstance(weight, StackedWeight) and [*map(type, weight.parts)] == [Int4Weight, PackedWeight]
    assert torch.equal(weight.dequantized(torch.float32), filled(source, names, pieces))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_experts_for_a_gpu_stay_as_the_file_holds_them(tmp_path: Path, kind: str) -> None:
    family, architecture, differences, more, _ = CASES["qwen3-moe"]
    make(tmp_path / "plain", family, **differences | dict(moe_intermediate_size=64))
    more = more | {"expert_feed_forward_length": 64}
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", architecture, kind=kind, more=more)
    source = source_of(described(tmp_path / "model.gguf"))
    every = [
        tuple(f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight" for name in ("gate", "up"))
        for expert in range(6)
    ]
    pieces = (Piece((64, 64), (range(32, 64), range(64))),) * 2
    experts = source.packed_matrices(every, pieces, torch.device("cuda"))
    assert experts is not None and experts.shape == (6, 64, 64)
    for expert, names in enumerate(every):
        assert torch.equal(experts.matrix(expert, torch.float32), filled(source, names, pieces))
    assert source.packed_matrices(every, pieces, torch.device("cpu")) is None


def test_experts_whose_two_tensors_have_two_formats_are_dequantized(tmp_path: Path) -> None:
    family, architecture, differences, more, _ = CASES["qwen3-moe"]
    make(tmp_path / "plain", family, **differences | dict(moe_intermediate_size=64))
    more, others = more | {"expert_feed_forward_length": 64}, {"ffn_up_exps": ("Q8_0", None)}
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path / "plain", architecture, kind="Q4_0", more=more, others=others)
    source, pieces = source_of(described(path)), (Piece.all_of(64, 64),) * 2
    names = tuple(f"model.layers.1.mlp.experts.0.{name}_proj.weight" for name in ("gate", "up"))
    assert source.packed_matrices([names], pieces, torch.device("cuda")) is None
    assert source.packed_matrices([names[1:]], pieces[1:], torch.device("cuda")) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K"])
def test_on_a_gpu_six_and_eight_bits_have_the_logits_of_the_exact_model(tmp_path: Path, kind: str) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    encode = drawn_blocks(kind) if kind.endswith("_K") else None
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind=kind, encode=encode)
    directory = described(tmp_path / "model.gguf")
    exact, model = load(directory, device="cpu"), load(directory, device="cuda")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    for layer, other in zip(model.layers, exact.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            weight = getattr(layer, field)
            assert isinstance(weight, PackedWeight)
            torch.testing.assert_close(plain(weight).cpu(), getattr(other, field), rtol=1e-5, atol=1e-7)
    ids = torch.arange(24) * 7 % 384 + 3
    with torch.inference_mode():
        found, wanted = _paged_logits(model, ids.cuda()).cpu().double(), _paged_logits(exact, ids).double()
    assert (found - wanted).norm() / wanted.norm() < 0.05


@pytest.mark.parametrize("kind", FOUR_BITS)
def test_four_bits_stand_for_the_numbers_of_the_format_s_own_package(kind: str) -> None:
    format_of, shape = GGMLQuantizationType[kind], (5, 512)
    blocks = np.random.default_rng(1).integers(0, 256, quant_shape_to_byte_shape(shape, format_of), np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(blocks, format_of))
    found = four_bits(blocks, format_of, torch.device("cpu"))
    assert found is not None and found.numbers.shape == shape and found.scale.shape == (5, 16)
    plain = (found.numbers.view(5, -1, 32) * found.scale[..., None] + found.low[..., None]).view(shape)
    finite = expected.isfinite()
    torch.testing.assert_close(plain[finite], expected[finite], rtol=1e-6, atol=0)
    assert four_bits(blocks[:, :34], GGMLQuantizationType.Q8_0, torch.device("cpu")) is None


def test_four_bits_for_a_gpu_stand_for_what_the_file_holds(tmp_path: Path) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind="Q4_K", encode=drawn_blocks("Q4_K"))
    directory = described(tmp_path / "model.gguf")
    config = json.loads((directory / "config.json").read_text())
    spec = native_spec(config)
    source = GgufWeights(open_files(directory, spec, config, torch.device("cpu")), spec)
    rows = (range(64, 128), range(64, 128), range(0, 256))
    for names, own in ((("q_proj", "k_proj"), rows[:2]), (("o_proj",), rows[2:])):
        whole = [(256, 256) if name != "k_proj" else (128, 256) for name in names]
        stored = tuple(f"model.layers.1.self_attn.{name}.weight" for name in names)
        pieces = tuple(Piece(shape, (part, range(64, 192))) for shape, part in zip(whole, own, strict=True))
        wanted = [torch.empty(piece.shape) for piece in pieces]
        for name, piece, into in zip(stored, pieces, wanted, strict=True):
            source.fill(name, piece, into)
        # The tensors stay on the CPU: the device only chooses the kernel.
        weight = source.packed(stored, pieces, torch.device("cuda"), torch.bfloat16)
        assert isinstance(weight, Int4Weight)
        assert torch.equal(weight.dequantized(torch.float32), torch.cat(wanted))


@pytest.mark.gpu
def test_on_a_gpu_four_bits_stay_packed_without_loss(tmp_path: Path) -> None:
    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind="Q4_K", encode=drawn_blocks("Q4_K"))
    directory = described(tmp_path / "model.gguf")
    exact, model = load(directory, device="cpu"), load(directory, device="cuda")
    assert isinstance(exact, Decoder) and isinstance(model, Decoder)
    for layer, other in zip(model.layers, exact.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            weight = getattr(layer, field)
            assert isinstance(weight, Int4Weight)
            torch.testing.assert_close(plain(weight).cpu(), getattr(other, field), rtol=1e-5, atol=1e-7)


@needs_vectors
@pytest.mark.usefixtures("no_library")
def test_a_scale_that_is_no_number_is_refused_by_the_tensor_s_name(tmp_path: Path) -> None:
    def encode(data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        blocks: np.ndarray[Any, Any] = drawn_blocks("Q4_K")(data)
        blocks[3, :2] = np.array([np.nan], np.float16).view(np.uint8)
        return blocks

    make(tmp_path / "plain", "Llama", hidden_size=256, intermediate_size=512, head_dim=64)
    plainly = ("F32", lambda data: data)
    others = {"token_embd": plainly, "output.weight": plainly}
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind="Q4_K", encode=encode, others=others)
    with pytest.raises(DamagedCheckpoint, match=r"tensor blk\.0\.attn_q\.weight holds NaN"):
        load(described(tmp_path / "model.gguf"), device="cpu", dtype="bfloat16")


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "phi3"])
def test_ranks_read_their_part_of_quantized_blocks(tmp_path: Path, name: str) -> None:
    family, architecture, differences, more, _ = CASES[name]
    sizes = dict(hidden_size=128, intermediate_size=128, head_dim=32)
    sizes |= dict(moe_intermediate_size=64) if name == "qwen3-moe" else {}
    make(tmp_path / "plain", family, **{**differences, **sizes})
    more = more | ({"expert_feed_forward_length": 64} if name == "qwen3-moe" else {})
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", architecture, kind="Q8_0", more=more)
    directory = described(tmp_path / "model.gguf")
    whole = load(directory, device="cpu")
    parts = [load(directory, device="cpu", layout=Layout(tp=2), rank=rank) for rank in range(2)]
    decoders = [each for each in (whole, *parts) if isinstance(each, Decoder)]
    first, *halves = [each.layers[1] for each in decoders]
    assert torch.equal(torch.cat([half.o for half in halves], 1), first.o)
    if name == "qwen3-moe":
        downs = [each.experts.down for each in (first, *halves) if each.experts is not None]
        assert torch.equal(torch.cat(downs[1:], 2), downs[0])
    else:
        assert torch.equal(torch.cat([half.down for half in halves], 1), first.down)


def test_the_tokenizer_and_the_template_are_those_of_the_file(tmp_path: Path) -> None:
    tokenizer = byte_level()
    _, directory = as_gguf(tmp_path, "llama", tokenizer=tokenizer)
    found = Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in ("Hello, world", "Grüße 👋", "  two  spaces\n"):
        assert found.encode(text, add_special_tokens=False).ids == tokenizer.encode(text).ids
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "</s>" and "message.content" in settings["chat_template"]
    assert load(directory, device="cpu").spec.eos_token_ids == (tokenizer.token_to_id("</s>"),)


def test_what_the_model_does_not_use_and_what_it_lacks_is_named(tmp_path: Path) -> None:
    make(tmp_path / "plain", "Llama")
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    write_gguf(tmp_path / "more.gguf", tmp_path / "plain", "llama", tensors={"blk.0.extra.weight": [1.0]})
    with pytest.raises(MisfitCheckpoint, match=r"does not explain, first blk.0.extra.weight"):
        load(described(tmp_path / "more.gguf"), device="cpu")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path)
    write_gguf(tmp_path / "less.gguf", tmp_path / "plain", "llama")
    with pytest.raises(MisfitCheckpoint, match=r"no tensor model.layers.1.mlp.up_proj.weight"):
        load(described(tmp_path / "less.gguf"), device="cpu")


@pytest.mark.parametrize("at", [0, 3, 40, 400, 5000])
def test_a_cut_file_is_refused_by_name(tmp_path: Path, at: int) -> None:
    make(tmp_path / "plain", "Llama")
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path / "plain", "llama")
    path.write_bytes(path.read_bytes()[:at])
    with pytest.raises(DamagedCheckpoint, match=r"model\.gguf cannot be read as GGUF"):
        described(path)


def test_unknown_architectures_and_keys_are_refused_by_name() -> None:
    def metadata(**fields: Any) -> Metadata:
        return Metadata({"general.architecture": "llama", **fields}, {"token_embd.weight": (8, 4)}, lambda name: [])

    with pytest.raises(UnsupportedCheckpoint, match="architecture 'rwkv6' is not supported; known: llama, qwen2"):
        config_of(metadata(**{"general.architecture": "rwkv6"}))
    with pytest.raises(UnsupportedCheckpoint, match=r"llama.embedding_length is None; a number"):
        config_of(metadata())
    several = {"llama.embedding_length": 8, "llama.attention.head_count": [2, 4]}
    with pytest.raises(UnsupportedCheckpoint, match=r"head_count is \[2, 4\]"):
        config_of(metadata(**several))


def test_dequantizing_a_slice_is_slicing_what_is_dequantized(tmp_path: Path) -> None:
    from holdfast.lm.models.gguf_reader import read_gguf
    from holdfast.lm.models.gguf_weights import GgufSlice, Place

    make(tmp_path / "plain", "Llama")
    write_gguf(tmp_path / "model.gguf", tmp_path / "plain", "llama", kind="Q8_0")
    tensor = next(each for each in read_gguf(tmp_path / "model.gguf").tensors if each.name == "blk.0.ffn_up.weight")
    whole = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    stored = GgufSlice(Place(tensor), torch.device("cpu"))
    for cut in ((slice(3, 9),), (slice(3, 9), slice(7, 41)), (slice(None), slice(1, 2)), ...):
        assert torch.equal(stored[cut], whole[cut])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_of_any_bytes_have_the_numbers_of_the_format_s_own_package(kind: str, device: str) -> None:
    format_of, shape = GGMLQuantizationType[kind], (3, 5, 512)
    blocks = np.random.default_rng(1).integers(0, 256, quant_shape_to_byte_shape(shape, format_of), np.uint8)
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(blocks, format_of))
    found = dequantized(blocks, format_of, torch.device(device)).cpu()
    finite = expected.isfinite()
    assert found.shape == shape and finite.float().mean() > 0.5
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-6, atol=0)
    with pytest.raises(DamagedCheckpoint, match=f"a row of {kind} has"):
        dequantized(blocks[..., :-1], format_of, torch.device(device))


def test_a_checkpoint_from_elsewhere_may_not_name_a_gguf_file(tmp_path: Path) -> None:
    _, directory = as_gguf(tmp_path, "llama")
    moved = tmp_path / "downloaded"
    directory.rename(moved)
    with pytest.raises(UnsupportedCheckpoint, match=r"holds gguf\.json, which only Holdfast's own cache may"):
        load(moved, device="cpu")
