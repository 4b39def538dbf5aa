"""Which checkpoints a deterministic engine serves, and the reasons that it gives for others."""

from __future__ import annotations

import json
from ctypes import c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.models.base import UnsupportedCheckpoint
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.loader import load
from holdfast.lm.models.same_bits import arithmetic_of, check_same_bits

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def check(architecture: str = "LlamaForCausalLM", *, device: torch.device = CUDA, **given: Any) -> None:
    names = ("dtype", "quantized")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantized": False}
    options |= {name: given.pop(name) for name in names if name in given}
    check_same_bits(NATIVE[architecture](CONFIG | {"architectures": [architecture]} | given), device=device, **options)


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("architecture", "given", "reason"),
    [
        ("Qwen3MoeForCausalLM", MIXTURE, "Qwen3MoeForCausalLM is a mixture of experts"),
        ("LlamaForCausalLM", {"quantized": True}, "LlamaForCausalLM has quantized weights"),
        ("LlamaForCausalLM", {"head_dim": 24}, "LlamaForCausalLM is not among the models that can be: Llama"),
        ("Olmo2ForCausalLM", {}, "Olmo2ForCausalLM is not among the models"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_whose_bits_depend_on_the_batch_is_refused_by_name(
    architecture: str, given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=f"deterministic is on, and {reason}.*; leave it out"):
        check(architecture, **given)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"])
def test_plain_decoders_are_served_in_any_type_on_a_gpu(architecture: str) -> None:
    check(architecture)
    check(architecture, dtype=torch.float16)


def test_a_cpu_takes_the_library_and_a_type_that_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(None, c_void_p(), level=2)
    found: list[Library | None] = [library]
    monkeypatch.setattr("holdfast.lm.kernels.integer.library.library", lambda: found[0])
    check(device=CPU)
    assert arithmetic_of(CPU) == "AVX-512 VNNI"
    with pytest.raises(UnsupportedCheckpoint, match="dtype is float16: on a CPU it is for float32 and bfloat16"):
        check(device=CPU, dtype=torch.float16)
    for found[0] in (None, replace(library, level=0)):
        with pytest.raises(UnsupportedCheckpoint, match="it takes the library in C on a CPU with AVX2"):
            check(device=CPU)


def test_a_model_of_transformers_code_is_refused_before_it_is_read(tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["XGLMForCausalLM"], "model_type": "xglm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match="deterministic is on, which is for native decoders: XGLM"):
        load(tmp_path, device="cpu", invariant=True)
