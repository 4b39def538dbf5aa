"""Models with recurrent layers and quantized weights give the logits of the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.lm.kernels.fp8 import Fp8Weight
from holdfast.lm.kernels.int4 import Int4Weight
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from tests.checkpoints import make
from tests.lm.execution.test_recurrent import Steps, expected, prompt, start
from tests.lm.models.test_quantized import METHODS, quantized

MAMBA = dict(mamba_n_heads=32, mamba_d_head=4, mamba_d_state=16)
"""Sizes of Mamba-2 in multiples of 32, which the tests' formats take."""
WIDE = dict(linear_value_head_dim=16)
MIXTURE = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": ("Qwen3_5Text", WIDE),
    "qwen3-next": ("Qwen3Next", WIDE | MIXTURE),
    "lfm2": ("Lfm2", {}),
    "lfm2-biased": ("Lfm2", {"conv_bias": True}),
    "bamba": ("Bamba", MAMBA | {"attention_bias": True, "mlp_bias": True}),
    "granite-4": ("GraniteMoeHybrid", MAMBA | {"shared_intermediate_size": 64}),
    "falcon-h1": ("FalconH1", MAMBA),
    "nemotron-h": ("NemotronH", {"mamba_num_heads": 32, "mamba_head_dim": 4, "ssm_state_size": 16}),
}
PAIRS = [
    (name, method)
    for at, name in enumerate(FAMILIES)
    for number, method in enumerate(METHODS)
    if (at + number) % 3 == 0
]
"""Families and formats: each family has several formats, and each format several families."""
DENSE = [name for name in FAMILIES if name != "qwen3-next"]


def check(model: Decoder, module: Any, tolerance: float) -> None:
    """Compare the logits of a prompt in two chunks with Transformers'."""
    tokens, steps = prompt(31), Steps(model)
    found = torch.cat([*steps.run((2, 0, tokens[:20]), states=start(2)), *steps.run((2, 20, tokens[20:]))])
    wanted = expected(module, tokens)
    assert float((found - wanted).abs().max() / wanted.abs().max()) < tolerance


@pytest.mark.parametrize(("name", "method"), PAIRS)
def test_logits_equal_those_of_the_dequantized_checkpoint(tmp_path: Path, name: str, method: str) -> None:
    family, differences = FAMILIES[name]
    module = quantized(tmp_path, family, method, **differences)
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder)
    check(model, module, 3e-4)
    four = method.startswith(("awq", "gptq", "packed"))
    dense = method in ("fp8-block", "nvfp4", "modelopt")  # what a CPU has no kernels for
    wanted = torch.Tensor if dense else Int4Weight if four else Fp8Weight
    assert {type(layer.qkv) for layer in model.layers} == {wanted}
    if name == "falcon-h1" and not method.endswith("-32"):
        wanted = torch.Tensor  # attention's inputs and Mamba-2's have other scales or another order
    assert {type(layer.o) for layer in model.layers} == {wanted}


@pytest.mark.parametrize("left", ["self_attn.o_proj", "mamba.out_proj"])
def test_outputs_of_a_falcon_h1_of_which_a_part_is_plain_are_dequantized(tmp_path: Path, left: str) -> None:
    module = quantized(tmp_path, "FalconH1", "awq-32", **MAMBA)
    stored = load_file(tmp_path / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for layer in range(2):
        stem = f"model.layers.{layer}.{left}"
        for part in ("qweight", "qzeros", "scales"):
            del stored[f"{stem}.{part}"]
        stored[f"{stem}.weight"] = plain[f"{stem}.weight"]
    save_file(stored, tmp_path / "model.safetensors")
    model = load(tmp_path, device="cpu")
    assert isinstance(model, Decoder) and isinstance(model.layers[0].o, torch.Tensor)
    check(model, module, 3e-4)


@pytest.mark.parametrize("name", DENSE)
def test_fp8_rounds_every_linear_layer_once(tmp_path: Path, name: str) -> None:
    family, differences = FAMILIES[name]
    make(tmp_path, family, **differences)
    plain, rounded = (load(tmp_path, device="cpu", quantization=kind) for kind in ("none", "fp8"))
    assert isinstance(plain, Decoder) and isinstance(rounded, Decoder)
    saved = 0
    for before, after in zip(plain.layers, rounded.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            weight, exact = getattr(after, field), getattr(before, field)
            if exact.numel():
                assert isinstance(weight, Fp8Weight)
                rows = weight.dequantized(torch.float32)
                assert 0.0 < (rows - exact[: len(rows)]).norm() / exact.norm() < 0.03
                exact[: len(rows)] = rows  # the plain model now has the rounded weights
                saved += 3 * rows.numel() - 4 * len(rows)
    assert rounded.spec.weight_bytes == plain.spec.weight_bytes - saved
    tokens = prompt(31)
    (found,), (wanted,) = (Steps(model).run((2, 0, tokens), states=start(2)) for model in (rounded, plain))
    assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-5


def test_rates_and_time_steps_of_a_delta_net_stay_as_they_are(tmp_path: Path) -> None:
    make(tmp_path, "Qwen3_5Text")
    plain, rounded = (load(tmp_path, device="cpu", quantization=kind) for kind in ("none", "fp8"))
    assert isinstance(plain, Decoder) and isinstance(rounded, Decoder)
    tail = rounded.layers[0].mixer_tail
    assert tail is not None and torch.equal(tail, plain.layers[0].qkv[-8:])  # type: ignore[index]
