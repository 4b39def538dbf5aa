"""The checkpoints that are loaded, and the reason in each refusal."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.core.layout import Layout
from holdfast.lm.kernels.fp8 import Fp8Weight
from holdfast.lm.models import loader
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.hf import _paged_logits
from holdfast.lm.models.loader import decoder_spec, eos_token_ids, load
from holdfast.lm.models.shard import Piece, layer_pieces, shard_of, vocabulary_piece
from tests.checkpoints import make

LATER_FAMILIES = ("OPT", "GPT2", "Falcon", "Gemma2", "Gemma3Text", "Phi3", "Olmo2")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    make(tmp_path, "Llama")
    return tmp_path


def rewrite(directory: Path, **changes: Any) -> None:
    """Change keys of config.json. None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def retensor(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refusal(directory: Path, **options: Any) -> str:
    with pytest.raises(UnsupportedCheckpoint) as refused:
        load(directory, device="cpu", **options)
    return str(refused.value)


def weights(model: Any) -> list[torch.Tensor]:
    assert isinstance(model, Decoder)
    layers = [
        getattr(layer, field) for layer in model.layers for field in ("qkv", "o", "gate_up", "down", "input_norm")
    ]
    return [model.embedding, *layers, model.norm, model.lm_head]


def test_sizes_and_limits_come_from_the_checkpoint(llama: Path) -> None:
    spec = load(llama, device="cpu").spec
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.num_kv_heads) == ("LlamaForCausalLM", 2, 4, 2)
    assert (spec.head_dim, spec.vocab_size, spec.max_model_len) == (16, 384, 256)
    assert spec.weight_bytes == sum(tensor.nbytes for tensor in load_file(llama / "model.safetensors").values())


def test_parts_are_fused_in_order(llama: Path) -> None:
    model = load(llama, device="cpu")
    assert isinstance(model, Decoder)
    tensors = load_file(llama / "model.safetensors")
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(model.layers[1].qkv, torch.cat(parts))
    parts = [tensors[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(model.layers[1].gate_up, torch.cat(parts))


def test_a_sharded_checkpoint_is_the_single_one(llama: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    make(sharded, "Llama", shard="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert not (sharded / "model.safetensors").exists()
    for one, other in zip(weights(load(llama, device="cpu")), weights(load(sharded, device="cpu")), strict=True):
        assert torch.equal(one, other)


def test_weights_take_the_dtype_asked_for(llama: Path) -> None:
    assert {tensor.dtype for tensor in weights(load(llama, device="cpu", dtype="bfloat16"))} == {torch.bfloat16}
    assert load(llama, device="cpu").spec.dtype == torch.float32


def test_tied_checkpoints_share_the_embedding(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3", tie_word_embeddings=True)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    assert model.lm_head is model.embedding


@torch.inference_mode()
def distance(directory: Path, **options: Any) -> float:
    """The largest difference of a native model's logits from Transformers' own."""
    from transformers import AutoModelForCausalLM

    model = load(directory, device="cpu", **options)
    assert isinstance(model, Decoder)
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.arange(24) * 7 % 384 + 3
    expected = module(ids[None]).logits[0]
    return float((_paged_logits(model, ids) - expected).abs().max() / expected.abs().max())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "OPT", "Falcon"])
@pytest.mark.parametrize("stored", ["another", "a copy", "another in the last row"])
def test_a_tied_head_that_is_also_stored_is_used_if_it_differs(
    tmp_path: Path, family: str, stored: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "ROWS_AT_A_TIME", 100)
    make(tmp_path, family, tie_word_embeddings=True)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        (name,) = [
            name for name in tensors if name.endswith(("embed_tokens.weight", "wte.weight", "word_embeddings.weight"))
        ]
        tensors["lm_head.weight"] = tensors[name].clone()
        if stored != "a copy":
            rows = slice(None) if stored == "another" else slice(-1, None)
            tensors["lm_head.weight"][rows] = tensors[name].flip(0)[rows] + 0.5

    retensor(tmp_path, add_head)
    assert distance(tmp_path) < 1e-4
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder) and (model.lm_head is model.embedding) == (stored == "a copy")
    said = [record for record in caplog.records if record.name == "holdfast.engine"]
    assert bool(said) == (stored != "a copy") and all("lm_head.weight" in record.message for record in said)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen3", "Phi3", "Olmo2", "Gemma3Text"])
@pytest.mark.parametrize("nested", [False, True])
def test_partial_rotary_factor_counts_where_transformers_heeds_it(tmp_path: Path, family: str, nested: bool) -> None:
    make(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    if not nested:
        rope = {key: value for key, value in config["rope_parameters"].items() if key != "partial_rotary_factor"}
        rewrite(tmp_path, rope_parameters=rope, partial_rotary_factor=0.5)
    elif family == "Gemma3Text":
        parts = {kind: {**rope, "partial_rotary_factor": 0.5} for kind, rope in config["rope_parameters"].items()}
        rewrite(tmp_path, rope_parameters=parts)
    else:
        rewrite(tmp_path, rope_parameters={**config["rope_parameters"], "partial_rotary_factor": 0.5})
    assert distance(tmp_path) < 1e-4
    shares = decoder_spec(tmp_path).rope.share
    assert shares == (0.5 if family == "Phi3" else 1.0)


def test_a_share_with_a_scaling_is_refused_if_transformers_fails(llama: Path) -> None:
    rewrite(llama, partial_rotary_factor=0.5, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    assert "partial_rotary_factor is 0.5 with rope scaling 'linear'" in refusal(llama)


def test_a_native_model_without_a_length_has_that_of_its_class(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    del config["max_position_embeddings"]
    (llama / "config.json").write_text(json.dumps(config))
    model = load(llama, device="cpu")
    assert isinstance(model, Decoder) and model.spec.max_model_len == 2048


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2", "Qwen3", *LATER_FAMILIES])
def test_fp8_quantizes_only_the_linear_layers(tmp_path: Path, family: str) -> None:
    make(tmp_path, family)
    plain, quantized = (load(tmp_path, device="cpu", quantization=kind) for kind in ("none", "fp8"))
    assert isinstance(plain, Decoder) and isinstance(quantized, Decoder)
    for before, after in zip(plain.layers, quantized.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            weight, exact = getattr(after, field), getattr(before, field)
            assert isinstance(weight, Fp8Weight)
            assert (weight.dequantized(torch.float32) - exact).norm() / exact.norm() < 0.03
        for field in ("input_norm", "post_norm", "q_norm", "qkv_bias"):
            assert getattr(after, field) is getattr(before, field) is None or torch.equal(
                getattr(after, field), getattr(before, field)
            )
    assert torch.equal(quantized.embedding, plain.embedding)
    assert torch.equal(quantized.lm_head, plain.lm_head)
    weights = [getattr(layer, field) for layer in quantized.layers for field in ("qkv", "o", "gate_up", "down")]
    saved = sum(3 * weight.shape.numel() - 4 * weight.shape[0] for weight in weights)
    assert quantized.spec.weight_bytes == plain.spec.weight_bytes - saved


def test_fp8_quantizes_bfloat16_and_float16_models(llama: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        model = load(llama, device="cpu", dtype=dtype, quantization="fp8")
        assert isinstance(model, Decoder) and model.spec.dtype == getattr(torch, dtype)
        assert isinstance(model.layers[0].o, Fp8Weight) and model.lm_head.dtype == model.spec.dtype


def test_fp8_is_refused_for_transformers_models(tmp_path: Path) -> None:
    make(tmp_path, "Starcoder2")
    assert "fp8, which only native decoders have: Starcoder2ForCausalLM runs by Transformers' code" in refusal(
        tmp_path, quantization="fp8"
    )


@pytest.mark.gpu
def test_loading_fp8_needs_little_memory_beyond_the_weights(llama: Path) -> None:
    rewrite(llama, hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, vocab_size=1024)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()  # of earlier tests
    model = load(llama, device="cuda", dtype="bfloat16", load_format="random", quantization="fp8")
    largest = 2 * 2 * 8192 * 2048  # bytes of gate and up in bfloat16
    assert torch.cuda.max_memory_allocated() - before < model.spec.weight_bytes + 2 * largest
    assert torch.cuda.memory_reserved() - reserved_before < model.spec.weight_bytes + 3 * largest


def test_random_weights_need_no_tensors(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    model, again = (load(llama, device="cpu", load_format="random") for _ in range(2))
    for one, other in zip(weights(model), weights(again), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all() and one.any()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(2, 2)], ids=["tp2", "pp2", "2x2"])
def test_a_rank_reads_nothing_but_its_own_part(llama: Path, layout: Layout) -> None:
    spec = decoder_spec(llama)
    tensors = load_file(llama / "model.safetensors")
    for rank in range(layout.ranks):
        shard = shard_of(spec, layout, rank)
        own = {
            spec.names.layer.format(layer) + name: piece
            for layer in shard.layers
            for field, pieces in layer_pieces(spec, shard).items()
            for name, piece in zip(spec.names.fields[field], pieces, strict=True)
        }
        own[spec.names.norm] = Piece.all_of(spec.hidden_size)
        own |= {spec.names.embedding: vocabulary_piece(spec, shard)} if shard.first else {}
        own |= {spec.names.lm_head: vocabulary_piece(spec, shard)} if shard.last else {}
        spoilt = {name: torch.full_like(tensor, math.nan) for name, tensor in tensors.items()}
        for name, piece in own.items():
            spoilt[name][piece.slices] = tensors[name][piece.slices]
        save_file(spoilt, llama / "model.safetensors")
        part = load(llama, device="cpu", layout=layout, rank=rank)  # would refuse a NaN
        assert part.spec.weight_bytes == 4 * sum(math.prod(piece.shape) for piece in own.values())
        name, piece = next(iter(own.items()))
        spoilt[name][piece.slices] = math.nan
        save_file(spoilt, llama / "model.safetensors")
        assert f"{name} holds NaN" in refusal(llama, layout=layout, rank=rank)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2)])
def test_transformers_models_are_not_split(tmp_path: Path, layout: Layout) -> None:
    make(tmp_path, "Starcoder2")
    reason = f"tp is {layout.tp} and pp is {layout.pp}, which only native decoders take"
    assert reason in refusal(tmp_path, layout=layout)
    with pytest.raises(UnsupportedCheckpoint, match="Starcoder2ForCausalLM runs by Transformers' code"):
        decoder_spec(tmp_path)


def test_a_layout_that_does_not_fit_the_model_is_refused(llama: Path) -> None:
    with pytest.raises(ValueError, match="tp is 3; it must divide the model's 4 attention heads"):
        load(llama, device="cpu", layout=Layout(tp=3))
    with pytest.raises(ValueError, match="pp is 3; the model has 2 layers"):
        load(llama, device="cpu", layout=Layout(pp=3))


def test_max_model_len_shortens_and_never_lengthens(llama: Path) -> None:
    assert load(llama, device="cpu", max_model_len=100).spec.max_model_len == 100
    with pytest.raises(ValueError, match="max_model_len is 300; the model was made for 256"):
        load(llama, device="cpu", max_model_len=300)


def test_end_tokens_are_those_of_generation_config_before_config(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, {}) == ()
    assert eos_token_ids(tmp_path, {"eos_token_id": 7}) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert eos_token_ids(tmp_path, {"eos_token_id": 7}) == (3, 5)


def test_a_missing_tensor_is_named(llama: Path) -> None:
    retensor(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "no tensor model.layers.1.mlp.up_proj.weight" in refusal(llama)


def test_a_tensor_of_another_shape_is_named(llama: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    retensor(llama, lambda tensors: tensors.update({name: torch.zeros(31, 64)}))
    assert f"{name} has shape (31, 64); config.json makes it (32, 64)" in refusal(llama)


def test_a_tensor_that_nothing_uses_is_named(llama: Path) -> None:
    retensor(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "does not explain, first model.layers.0.self_attn.q_proj.bias" in refusal(llama)


def test_saved_rope_frequencies_are_ignored(llama: Path) -> None:
    retensor(llama, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}))
    assert load(llama, device="cpu").spec.architecture == "LlamaForCausalLM"


def test_integer_tensors_are_refused(llama: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    retensor(llama, lambda tensors: tensors.update({name: torch.zeros(64, 128, dtype=torch.int8)}))
    assert f"{name} is torch.int8; quantized" in refusal(llama)


def test_a_truncated_file_is_refused(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert "model.safetensors cannot be read as safetensors" in refusal(llama)


def test_a_header_with_a_wrong_size_is_refused(llama: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])
    assert "cannot be read as safetensors" in refusal(llama)


def test_other_formats_are_refused_by_name(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    assert "pytorch_model.bin, convert it to safetensors" in refusal(llama)


def test_an_index_cannot_point_out_of_its_directory(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama.parent / "secret.safetensors")
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    assert "is not a file of its directory" in refusal(llama)
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    assert "names gone.safetensors, which is missing" in refusal(llama)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": None}, "must name one architecture"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "hqq"}}, r"quantized (hqq)"),
        ({"hidden_act": "relu6"}, "hidden_act 'relu6' is not supported"),
        ({"hidden_size": None}, "config.json has no 'hidden_size'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"rope_parameters": {"rope_type": "axial"}}, "rope scaling 'axial'"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope needs long_factor"),
        (
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "longrope has 1 factors, and 16 numbers of a head are rotated in 8 pairs",
        ),
        ({"architectures": ["MyForCausalLM"], "model_type": "my"}, "no causal decoder that Transformers"),
        ({"architectures": ["MyForCausalLM"], "model_type": "my", "auto_map": {}}, "remote code"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "rerankers must be causal decoders"),
    ],
)
def test_unsupported_configs_are_refused(llama: Path, changes: dict[str, Any], reason: str) -> None:
    rewrite(llama, **changes)
    assert reason in refusal(llama)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "holds no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "no JSON object" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refusal(tmp_path)


def test_missing_transformers_is_refused_with_the_install_command(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(llama, architectures=["Starcoder2ForCausalLM"], model_type="starcoder2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install holdfast[hf]" in refusal(llama)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Starcoder2"])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, family: str, value: float) -> None:
    make(tmp_path, family)
    places = {"GPT2": "transformer.h.1.mlp.c_fc.weight", "Starcoder2": "model.layers.1.mlp.c_fc.weight"}
    name = places.get(family, "model.layers.1.mlp.up_proj.weight")
    retensor(tmp_path, lambda tensors: tensors[name][3].fill_(value))
    assert f"{name} holds NaN or infinite values" in refusal(tmp_path)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Starcoder2"])
def test_weights_beyond_the_range_of_the_dtype_are_refused(tmp_path: Path, family: str) -> None:
    make(tmp_path, family)
    name = "transformer.ln_f.weight" if family == "GPT2" else "model.norm.weight"
    retensor(tmp_path, lambda tensors: tensors[name].fill_(1e6))
    assert load(tmp_path, device="cpu").spec.num_layers == 2
    assert f"{name} holds NaN or infinite values, as float16" in refusal(tmp_path, dtype="float16")


@pytest.mark.parametrize("family", ["Llama", "Starcoder2"])
def test_a_model_of_too_many_positions_needs_a_shorter_length(tmp_path: Path, family: str) -> None:
    make(tmp_path, family)
    rewrite(tmp_path, max_position_embeddings=100_000_000)
    reason = "made for 100000000 tokens; at most 4194304 are served: give max_model_len"
    assert reason in refusal(tmp_path)
    assert load(tmp_path, device="cpu", max_model_len=64).spec.max_model_len == 64


def test_transformers_models_read_no_file_outside_their_directory(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make(directory, "Starcoder2")
    weights = directory / "model.safetensors"
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), "../secret.safetensors")}
    weights.rename(tmp_path / "secret.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'../secret.safetensors', which is not a file of its directory" in refusal(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_beyond_the_limit_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(loader, "JSON_LIMIT", 10_000)
    path = llama / name
    path.write_text((path.read_text() if path.exists() else "{}") + " " * 10_000)
    assert f"{name} is larger than 10000 bytes" in refusal(llama)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": ' * 100_000])
def test_a_configuration_nested_too_deeply_is_refused(llama: Path, content: str) -> None:
    (llama / "config.json").write_text(content)
    assert "config.json is not JSON" in refusal(llama)
