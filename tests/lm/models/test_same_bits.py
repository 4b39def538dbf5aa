"""Which checkpoints a deterministic engine serves, the forms of their weights, and the reasons for refusals."""

from __future__ import annotations

import json
from ctypes import c_void_p
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from holdfast.lm.kernels.fp8 import Fp8BlockWeight, Weight, quantize
from holdfast.lm.kernels.int4 import pack
from holdfast.lm.kernels.integer.library import Library
from holdfast.lm.kernels.integer.weight import IntegerWeight, pack_integers
from holdfast.lm.kernels.packed import PackedWeight
from holdfast.lm.kernels.stacked import StackedWeight
from holdfast.lm.models import same_bits as module
from holdfast.lm.models.checkpoint_errors import UnsupportedCheckpoint
from holdfast.lm.models.decoder_spec import DecoderSpec
from holdfast.lm.models.families import NATIVE
from holdfast.lm.models.loader import load
from holdfast.lm.models.same_bits import arithmetic_of, check_same_bits, fixed_form
from tests.compiled import integer_library

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


def spec_of(architecture: str = "LlamaForCausalLM", **given: Any) -> DecoderSpec:
    return NATIVE[architecture](CONFIG | {"architectures": [architecture]} | given)


def refused(spec: DecoderSpec, message: str, device: torch.device = CUDA, **layout: int) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=message):
        check_same_bits(spec, device=device, **layout)


def test_a_model_whose_bits_depend_on_the_batch_on_a_gpu_is_refused_by_name() -> None:
    latent = cast(DecoderSpec, SimpleNamespace(architecture="DeepseekV2ForCausalLM", latent=object()))
    refused(latent, "deterministic is on, and DeepseekV2ForCausalLM has latent attention.*leave it out")
    others = spec_of("Olmo2ForCausalLM"), spec_of("LlamaForCausalLM", head_dim=24)
    for spec in others:
        refused(
            spec, f"{spec.architecture} is not among the models that have been checked on a GPU: Llama.*leave it out"
        )
    for spec in (latent, *others):
        check_same_bits(spec, device=CPU)


def test_ranks_on_gpus_take_a_plain_decoder_whose_sums_they_can_share() -> None:
    check_same_bits(spec_of(), device=CUDA, ranks=2)
    refused(spec_of(), "deterministic_ranks is 8, and LlamaForCausalLM has 4 query heads, which have no 8", ranks=8)
    mixture = spec_of("Qwen3MoeForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    refused(mixture, "deterministic_ranks is 2, and Qwen3MoeForCausalLM is not among the models whose sums", ranks=2)


@pytest.mark.parametrize(
    ("architecture", "given", "ranks", "reason"),
    [
        ("Olmo2ForCausalLM", {}, 2, "Olmo2ForCausalLM is not among the models whose sums are cut for ranks: Llama"),
        ("LlamaForCausalLM", {}, 8, "LlamaForCausalLM has 4 query heads, which have no 8 equal parts; give a smaller"),
        ("LlamaForCausalLM", {}, 4, "LlamaForCausalLM has 2 key heads, which have no 4 equal parts"),
        (
            "LlamaForCausalLM",
            {"intermediate_size": 80},
            2,
            "LlamaForCausalLM has 80 inputs of the MLP's .*multiple of 16",
        ),
    ],
    ids=["another model", "heads", "key heads", "inputs"],
)
def test_ranks_that_cannot_share_sums_alike_are_refused_by_name(
    with_library: None, architecture: str, given: dict[str, Any], ranks: int, reason: str
) -> None:
    spec = spec_of(architecture, **given)
    refused(spec, f"deterministic_ranks is {ranks}, and {reason}", CPU, ranks=ranks)
    check_same_bits(spec, device=CPU)


def test_the_arithmetic_of_a_gpu_names_it_and_the_kernels_and_the_order_of_their_sums(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(module, "version", {"triton": "3.6.0"}.__getitem__)
    monkeypatch.setattr(module, "GPU_ORDER", 7)
    assert arithmetic_of(CUDA, ranks=1, one_by_one=False) == "NVIDIA H200 by Triton 3.6.0, order 7"
    named = arithmetic_of(CUDA, ", one tile", ranks=1, one_by_one=False)
    assert named == "NVIDIA H200 by Triton 3.6.0, order 7, one tile"
    assert arithmetic_of(CUDA, ranks=4, one_by_one=False) == "NVIDIA H200 by Triton 3.6.0, order 7, for 4 ranks"


def test_plain_decoders_and_mixtures_are_served_on_a_gpu() -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    for spec in (spec_of(), spec_of("Qwen3ForCausalLM"), spec_of("Qwen3MoeForCausalLM", **mixture)):
        check_same_bits(spec, device=CUDA)


def test_a_cpu_takes_the_library_for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(None, c_void_p(), level=2)
    found: list[Library | None] = [library]
    monkeypatch.setattr("holdfast.lm.kernels.integer.library.library", lambda: found[0])
    check_same_bits(spec_of(), device=CPU, ranks=2)
    assert arithmetic_of(CPU, ranks=1, one_by_one=False) == "AVX-512 VNNI"
    alone = arithmetic_of(CPU, ranks=2, one_by_one=True)
    assert alone.startswith("token by token, PyTorch ") and alone.endswith(", for 2 ranks")
    for found[0] in (None, replace(library, level=0)):
        refused(spec_of(), "deterministic_ranks is 2, and it takes the library in C on a CPU with AVX2", CPU, ranks=2)
        check_same_bits(spec_of(), device=CPU)


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize(("inputs", "group", "half"), [(256, 64, 64), (192, 96, 32), (128, 128, 32)])
def test_weights_of_four_bits_have_the_same_numbers_in_the_form_of_a_gpu(
    inputs: int, group: int, half: int, added: bool
) -> None:
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 16, (24, inputs), generator=draw, dtype=torch.uint8)
    scale, low = (torch.rand(24, inputs // group, generator=draw) + 0.5 for _ in range(2))
    zero = torch.randint(0, 16, scale.shape, generator=draw, dtype=torch.uint8)
    weight = pack(numbers, scale, zero, group, half, low if added else None)
    found = fixed_form(weight, device=CUDA, dtype=torch.bfloat16)
    assert isinstance(found, PackedWeight) and (found.group & (found.group - 1) == 0 or found.group == inputs)
    torch.testing.assert_close(found.dequantized(torch.float32), weight.dequantized(torch.float32), rtol=0, atol=1e-5)


def test_weights_in_fp8_have_the_same_numbers_in_the_form_of_a_gpu() -> None:
    rows = quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    blocks = Fp8BlockWeight(rows.data, torch.rand(2, 2) + 0.5, 16, 32)
    for weight in (rows, blocks):
        found = fixed_form(weight, device=CUDA, dtype=torch.bfloat16)
        assert isinstance(found, PackedWeight)
        torch.testing.assert_close(found.dequantized(torch.float32), weight.dequantized(torch.float32))
        stacked = fixed_form(StackedWeight((weight, found)), device=CUDA, dtype=torch.bfloat16)
        assert isinstance(stacked, StackedWeight) and all(isinstance(each, PackedWeight) for each in stacked.parts)


def test_a_cpu_keeps_integers_of_whole_tiles_and_dequantizes_other_weights() -> None:
    def integers(rows: int) -> IntegerWeight:
        numbers = torch.randint(0, 16, (rows, 64), dtype=torch.uint8)
        return pack_integers(integer_library(), numbers, torch.rand(rows, 2), torch.rand(rows, 2), 4)

    def fixed(weight: Weight, ranks: int = 1) -> Weight:
        return fixed_form(weight, device=CPU, dtype=torch.float32, ranks=ranks)

    whole, part, fp8 = integers(64), integers(48), quantize(torch.randn(32, 64))
    assert fixed(whole) is whole
    assert isinstance(fixed(StackedWeight((whole, whole))), StackedWeight)
    for weight in (part, fp8, StackedWeight((whole, part)), StackedWeight((whole, fp8))):
        assert torch.equal(cast(torch.Tensor, fixed(weight)), weight.dequantized(torch.float32))
    cut = fixed(whole, ranks=2)
    assert isinstance(cut, torch.Tensor) and cut.t().is_contiguous()
    assert torch.equal(cut, whole.dequantized(torch.float32))


def test_a_model_of_transformers_code_is_refused_before_it_is_read(tmp_path: Path) -> None:
    config = CONFIG | {"architectures": ["XGLMForCausalLM"], "model_type": "xglm"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedCheckpoint, match="deterministic is on, which is for native decoders: XGLM"):
        load(tmp_path, device="cpu", invariant=True)
