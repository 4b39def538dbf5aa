"""Hybrid models in GGUF files have the logits of the checkpoint that they were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize, quantize
from safetensors.torch import load_file, save_file

from holdfast.core.layout import Layout
from holdfast.files.cache import gguf_cache
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.gguf_config import config_of
from holdfast.lm.models.gguf_layouts import Change, HeadColumns
from holdfast.lm.models.gguf_metadata import write
from holdfast.lm.models.gguf_values import Metadata
from holdfast.lm.models.gguf_weights import GgufSlice, Place
from holdfast.lm.models.loader import load
from tests.checkpoints import NEMOTRON_3, make
from tests.gguf_hybrids import write_hybrid
from tests.lm.execution.test_recurrent import Steps, expected, prompt, same, start
from tests.lm.models.test_gguf import drawn_blocks
from tests.tokenizers_made import byte_level

THIRD = ["linear_attention", "full_attention", "linear_attention"]
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16, linear_value_head_dim=16)
TURNED = dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
GRANITE = dict(num_hidden_layers=3, layer_types=THIRD)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", "qwen35", DELTA),
    "qwen3.5-tied": ("Qwen3_5Text", "qwen35", dict(tie_word_embeddings=True, num_hidden_layers=3, layer_types=THIRD)),
    "qwen3.5-equal-heads": (
        "Qwen3_5Text",
        "qwen35",
        dict(linear_num_value_heads=2, linear_value_head_dim=24, **TURNED),
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", "qwen35moe", DELTA),
    "qwen3-next": ("Qwen3Next", "qwen3next", DELTA | TURNED),
    "granite-4": ("GraniteMoeHybrid", "granitehybrid", dict(**GRANITE, tie_word_embeddings=True)),
    "granite-4-turned": (
        "GraniteMoeHybrid",
        "granitehybrid",
        dict(**GRANITE, position_embedding_type="rope", attention_bias=True, mamba_conv_bias=False),
    ),
    "granite-4-experts": (
        "GraniteMoeHybrid",
        "granitehybrid",
        dict(**GRANITE, num_local_experts=6, num_experts_per_tok=3),
    ),
    "falcon-h1": ("FalconH1", "falcon-h1", {}),
    "falcon-h1-normed": ("FalconH1", "falcon-h1", dict(mamba_rms_norm=True, mamba_norm_before_gate=False)),
    "nemotron-h": ("NemotronH", "nemotron_h", {}),
    "nemotron-3": ("NemotronH", "nemotron_h_moe", NEMOTRON_3),
    "nemotron-3-one-group": (
        "NemotronH",
        "nemotron_h_moe",
        dict(NEMOTRON_3, n_group=1, topk_group=1, norm_topk_prob=False),
    ),
    "nemotron-h-biased": ("NemotronH", "nemotron_h", dict(use_bias=True, mlp_bias=True, use_conv_bias=False)),
}
"""For each case: the family, GGUF's architecture, and the model's differences."""
DRAWN = ("A_log", "dt_bias", ".D", "e_score_correction_bias")
"""Endings of small tensors that are equal for all heads, or for all experts, in a new model."""
NEVER = ("conv1d", "mlp.gate.", "router.layer", "shared_expert_gate", "mixer.gate.", "mup_vector")
"""Words in the names of matrices that the converter never quantizes."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and an empty cache."""
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(directory: Path, family: str, rounded: Rounded | None = None, **differences: Any) -> Any:
    """Transformers' module of a checkpoint whose heads have decays of their own. `rounded` rounds its matrices."""
    module = make(directory, family, **differences)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith(DRAWN):
                tensor.uniform_(-0.4, 0.6)
            elif rounded is not None and tensor.ndim > 1 and not any(word in name for word in NEVER):
                tensor.copy_(rounded(tensor))
    module.save_pretrained(directory)
    return module


class Rounded:
    """Rounds matrices to a format, and knows the bytes of each block that it has rounded."""

    def __init__(self, kind: str) -> None:
        self._kind, self._blocks = GGMLQuantizationType[kind], dict[bytes, bytes]()
        self._size, self._bytes = GGML_QUANT_SIZES[self._kind]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The numbers of a matrix in the format. Formats without an encoder have drawn ones."""
        rows = np.ascontiguousarray(tensor.numpy().reshape(-1, tensor.shape[-1]))
        name = self._kind.name
        stored = drawn_blocks(name)(rows) if name.endswith("_K") else quantize(rows, self._kind)
        numbers = dequantize(stored, self._kind)
        pairs = zip(numbers.reshape(-1, self._size), stored.view(np.uint8).reshape(-1, self._bytes), strict=True)
        self._blocks |= {each.tobytes(): block.tobytes() for each, block in pairs}
        return torch.from_numpy(numbers.reshape(tensor.shape))

    def encode(self, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The bytes of a matrix whose blocks are known ones, in any order."""
        found = b"".join(self._blocks[each.tobytes()] for each in data.reshape(-1, self._size))
        return np.frombuffer(found, np.uint8).reshape(*data.shape[:-1], -1).copy()


def described(path: Path) -> Path:
    directory = gguf_cache() / path.name
    directory.mkdir(parents=True)
    write(path, directory)
    return directory


def check(module: Any, model: Any) -> None:
    """Compare the logits of a prompt in two chunks with Transformers'."""
    assert isinstance(model, Decoder)
    tokens, steps = prompt(29), Steps(model)
    found = torch.cat([*steps.run((2, 0, tokens[:17]), states=start(2)), *steps.run((2, 17, tokens[17:]))])
    same(found, expected(module, tokens))


@pytest.mark.parametrize("name", CASES)
def test_a_hybrid_from_gguf_has_the_logits_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    family, architecture, differences = CASES[name]
    module = made(tmp_path / "plain", family, **differences)
    write_hybrid(tmp_path / "model.gguf", tmp_path / "plain", architecture)
    check(module, load(described(tmp_path / "model.gguf"), device="cpu", dtype="float32"))


WIDE: dict[str, dict[str, Any]] = {
    "qwen3.5": dict(linear_num_value_heads=2, linear_value_head_dim=128, linear_num_key_heads=1),
    "granite-4": dict(mamba_n_heads=8, mamba_d_head=64, shared_intermediate_size=256),
    "nemotron-h": dict(mamba_num_heads=8, mamba_head_dim=64),
    "falcon-h1": dict(
        mamba_n_heads=4,
        mamba_d_head=64,
        mamba_d_ssm=256,
        **dict.fromkeys(
            ("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"), 1.0
        ),
        **dict.fromkeys(("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
        ssm_multipliers=[1.0] * 5,
        mlp_multipliers=[1.0] * 2,
    ),
}
"""Sizes in multiples of a block of 256. A drawn block is stored as it is, so weights have no factors."""


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("name", WIDE)
def test_a_quantized_hybrid_has_the_logits_of_its_dequantized_checkpoint(tmp_path: Path, name: str, kind: str) -> None:
    family, architecture, differences = CASES[name]
    sizes = dict(hidden_size=256, intermediate_size=256, head_dim=64, initializer_range=0.06)
    if name == "qwen3.5" and kind == "Q4_K":  # a block of 256 has heads in an order of its own
        sizes |= dict(linear_value_head_dim=256)
    rounded = Rounded(kind)
    module = made(tmp_path / "plain", family, rounded, **{**differences, **WIDE[name], **sizes})
    write_hybrid(tmp_path / "model.gguf", tmp_path / "plain", architecture, kind=kind, encode=rounded.encode)
    check(module, load(described(tmp_path / "model.gguf"), device="cpu", dtype="float32"))


@pytest.mark.parametrize(("name", "tp"), [("qwen3.5-moe", 2), ("granite-4-experts", 2), ("nemotron-3", 4)])
def test_ranks_read_their_heads_of_a_hybrid(tmp_path: Path, name: str, tp: int) -> None:
    family, architecture, differences = CASES[name]
    made(tmp_path / "plain", family, **differences)
    write_hybrid(tmp_path / "model.gguf", tmp_path / "plain", architecture)
    directory = described(tmp_path / "model.gguf")
    for rank in range(tp):
        options: dict[str, Any] = dict(device="cpu", dtype="float32", layout=Layout(tp=tp), rank=rank)
        found, wanted = load(directory, **options), load(tmp_path / "plain", **options)
        assert isinstance(found, Decoder) and isinstance(wanted, Decoder)
        for one, other in zip(found.layers, wanted.layers, strict=True):
            torch.testing.assert_close(one.qkv, other.qkv)
            torch.testing.assert_close(one.o, other.o)
            for field, tensor in one.recurrent.items():
                torch.testing.assert_close(tensor, other.recurrent[field], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "width", "is_packed"), [("Q8_0", 32, True), ("Q4_K", 64, False), ("Q6_K", 16, False)])
def test_columns_of_heads_come_in_the_checkpoint_s_order(kind: str, width: int, is_packed: bool) -> None:
    format_of, shape = GGMLQuantizationType[kind], (6, 512)
    data = np.random.default_rng(4).normal(size=shape).astype(np.float32)
    stored = drawn_blocks(kind)(data) if kind.endswith("_K") else quantize(data, format_of)
    heads = np.random.default_rng(5).permutation(512 // width)
    columns = (heads[:, None] * width + np.arange(width)).reshape(-1)
    plain = torch.from_numpy(dequantize(stored, format_of))[:, columns]

    class Tensor:
        name, tensor_type, data = "blk.0.ssm_out.weight", format_of, stored

    Tensor.shape = shape[::-1]  # type: ignore[attr-defined]
    found = GgufSlice(Place(Tensor, None, Change(columns=HeadColumns(heads, width))), torch.device("cpu"))
    assert torch.equal(found[1:5, 64:320], plain[1:5, 64:320])
    weight = found.packed(range(1, 5), range(256, 512))
    assert (weight is not None) == is_packed
    if weight is not None:
        assert torch.equal(weight.dequantized(torch.float32), plain[1:5, 256:])
    four = found.four_bits(range(1, 5), range(64, 320))
    assert (four is not None) == (kind == "Q4_K")
    if four is not None:
        numbers = four.numbers.view(4, -1, 32) * four.scale[..., None] + four.low[..., None]
        torch.testing.assert_close(numbers.view(4, -1), plain[1:5, 64:320])


def test_layers_that_only_predict_drafts_are_left_out(tmp_path: Path) -> None:
    module = made(tmp_path / "plain", "Qwen3_5Text")
    write_hybrid(tmp_path / "model.gguf", tmp_path / "plain", "qwen35", drafts=1)
    check(module, load(described(tmp_path / "model.gguf"), device="cpu", dtype="float32"))


@pytest.mark.parametrize("name", ["qwen3.5", "granite-4", "falcon-h1", "nemotron-h"])
def test_the_tokenizer_of_a_hybrid_is_that_of_the_file(tmp_path: Path, name: str) -> None:
    family, architecture, differences = CASES[name]
    make(tmp_path / "plain", family, **differences)
    tokenizer = byte_level()
    write_hybrid(tmp_path / "model.gguf", tmp_path / "plain", architecture, tokenizer=tokenizer)
    found = json.loads((described(tmp_path / "model.gguf") / "tokenizer.json").read_text())
    assert found["model"]["vocab"] == json.loads(tokenizer.to_str())["model"]["vocab"]


def test_bamba_is_told_from_granite_by_its_rotation() -> None:
    fields = {
        "general.architecture": "granitehybrid",
        "granitehybrid.embedding_length": 64,
        "granitehybrid.attention.head_count": 4,
        "granitehybrid.attention.head_count_kv": [0, 2],
        "granitehybrid.block_count": 2,
        "granitehybrid.feed_forward_length": 128,
        "granitehybrid.context_length": 256,
        "granitehybrid.attention.layer_norm_rms_epsilon": 1e-5,
        "granitehybrid.rope.dimension_count": 8,
        "granitehybrid.rope.scaling.finetuned": True,
        "granitehybrid.ssm.time_step_rank": 8,
        "granitehybrid.ssm.inner_size": 128,
        "granitehybrid.ssm.group_count": 1,
        "granitehybrid.ssm.state_size": 16,
        "granitehybrid.ssm.conv_kernel": 4,
    }
    shapes = {"token_embd.weight": (384, 64), "blk.0.ssm_a": (8, 1)}
    found = config_of(Metadata(fields, shapes, lambda name: []))
    assert found["architectures"] == ["BambaForCausalLM"] and found["attn_layer_indices"] == [1]
    odd = Metadata({**fields, "granitehybrid.ssm.inner_size": 96}, shapes, lambda name: [])
    with pytest.raises(
        UnsupportedCheckpoint, match=r"ssm\.inner_size is 96; it must be a multiple of embedding_length"
    ):
        config_of(odd)


def test_a_tensor_that_a_hybrid_lacks_is_named(tmp_path: Path) -> None:
    made(tmp_path / "plain", "Qwen3_5Text")
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.0.linear_attn.dt_bias")
    save_file(tensors, path)
    write_hybrid(tmp_path / "model.gguf", tmp_path / "plain", "qwen35")
    with pytest.raises(UnsupportedCheckpoint, match=r"no tensor model\.layers\.0\.linear_attn\.dt_bias"):
        load(described(tmp_path / "model.gguf"), device="cpu")
