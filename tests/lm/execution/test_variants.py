"""Greedy tokens of each family's variants are those of Hugging Face: chunked, with prefixes shared, in small steps."""

from __future__ import annotations

import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.core.types import Request, SamplingParams
from holdfast.lm.models.decoder import Decoder
from holdfast.lm.models.loader import load
from tests.checkpoints import GEMMA_4_DENSE, GEMMA_4_MIXTURE, VOCAB, make
from tests.lm.execution.test_parity import Case, run

SHORT, LONG = [1.0 + 0.1 * index for index in range(8)], [4.0 + index for index in range(8)]
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": SHORT, "long_factor": LONG}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
PARTIAL = LONGROPE | {"partial_rotary_factor": 0.75, "short_factor": SHORT[:6], "long_factor": LONG[:6]}
BOTH = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
OLD_FALCON = {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 4}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "opt-350m": ("OPT", dict(do_layer_norm_before=False, word_embed_proj_dim=32)),
    "opt-plain": ("OPT", dict(enable_bias=False, _remove_final_layer_norm=True, activation_function="gelu")),
    "opt-untied": ("OPT", dict(tie_word_embeddings=False, word_embed_proj_dim=32)),
    "gpt2-untied": ("GPT2", dict(tie_word_embeddings=False, n_inner=96, activation_function="relu")),
    "falcon-7b": ("Falcon", dict(new_decoder_architecture=False, multi_query=True)),
    "falcon-bias": ("Falcon", dict(**OLD_FALCON, bias=True)),
    "falcon-sequential": ("Falcon", dict(**OLD_FALCON, parallel_attn=False, tie_word_embeddings=False)),
    "falcon-one-norm": ("Falcon", dict(num_ln_in_parallel_attn=1, bias=True)),
    "gemma2-uncapped": ("Gemma2", dict(attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True)),
    "gemma2-untied": ("Gemma2", dict(tie_word_embeddings=False, query_pre_attn_scalar=5, final_logit_softcapping=2.0)),
    "gemma3-scaled": (
        "Gemma3Text",
        dict(
            attention_bias=True,
            final_logit_softcapping=3.0,
            rope_parameters=BOTH | {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}},
        ),
    ),
    "gemma4-dense": ("Gemma4Text", GEMMA_4_DENSE),
    "gemma4-mixture": ("Gemma4Text", GEMMA_4_MIXTURE),
    "gemma4-odd": (
        "Gemma4Text",
        GEMMA_4_MIXTURE
        | dict(
            hidden_size=48,
            num_attention_heads=6,
            num_key_value_heads=3,
            num_global_key_value_heads=2,
            head_dim=24,
            global_head_dim=40,
            attention_bias=True,
            sliding_window=7,
            final_logit_softcapping=None,
            num_experts=5,
            top_k_experts=5,
            moe_intermediate_size=24,
            tie_word_embeddings=False,
        ),
    ),
    "gemma4-shared": (
        "Gemma4Text",
        dict(
            num_hidden_layers=7,
            layer_types=["full_attention", *["sliding_attention", "sliding_attention", "full_attention"] * 2],
            num_kv_shared_layers=5,
            use_double_wide_mlp=False,
            num_key_value_heads=1,
            head_dim=24,
            global_head_dim=56,
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=400,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 1e5,
                    "partial_rotary_factor": 0.3,
                    "factor": 2.0,
                },
            },
        ),
    ),
    "gemma4-full": ("Gemma4Text", GEMMA_4_DENSE | dict(layer_types=["full_attention"] * 3, attention_k_eq_v=False)),
    "phi3-whole": ("Phi3", dict(sliding_window=None, num_key_value_heads=4, tie_word_embeddings=True)),
    "phi3-longrope": ("Phi3", dict(original_max_position_embeddings=128, rope_parameters=LONGROPE)),
    "phi3-partial": (
        "Phi3",
        dict(original_max_position_embeddings=128, rope_parameters=PARTIAL, partial_rotary_factor=0.75),
    ),
    "olmo2-bias": ("Olmo2", dict(attention_bias=True, num_key_value_heads=4, rope_parameters=YARN)),
    "olmo2-tied": ("Olmo2", dict(tie_word_embeddings=True)),
    "stablelm-odd": (
        "StableLm",
        dict(
            hidden_size=48,
            num_attention_heads=3,
            num_key_value_heads=3,
            use_qkv_bias=True,
            tie_word_embeddings=True,
            rope_parameters=YARN | {"partial_rotary_factor": 0.5},
        ),
    ),
    "stablelm-12b": ("StableLm", dict(qk_layernorm=True, use_parallel_residual=True, num_key_value_heads=1)),
    "stablelm-normed": (
        "StableLm",
        dict(qk_layernorm=True, use_qkv_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 1e3}),
    ),
    "nemotron-odd": (
        "Nemotron",
        dict(
            num_attention_heads=5,
            num_key_value_heads=1,
            head_dim=24,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            partial_rotary_factor=0.75,
        ),
    ),
    "nemotron-linear": (
        "Nemotron",
        dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0}),
    ),
    "nemotron-dynamic": ("Nemotron", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})),
    "phimoe-plain": ("Phimoe", dict(attention_bias=False, lm_head_bias=False, tie_word_embeddings=True)),
    "phimoe-longrope": (
        "Phimoe",
        dict(
            sliding_window=12,
            num_local_experts=7,
            rope_parameters=LONGROPE
            | {"original_max_position_embeddings": 128, "short_mscale": 1.25, "long_mscale": 1.25},
        ),
    ),
    "phimoe-odd": ("Phimoe", dict(num_attention_heads=5, num_key_value_heads=5, head_dim=24, router_jitter_noise=0.0)),
    "llama4-all-experts": (
        "Llama4Text",
        dict(interleave_moe_layer_step=1, num_experts_per_tok=3, num_local_experts=5, attn_temperature_tuning=False),
    ),
    "llama4-odd": (
        "Llama4Text",
        dict(
            num_attention_heads=3,
            num_key_value_heads=3,
            head_dim=10,
            attention_bias=True,
            tie_word_embeddings=True,
            use_qk_norm=False,
            moe_layers=[2],
            no_rope_layers=[0, 1, 0, 1],
            rope_parameters=LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 32},
        ),
    ),
    "llama4-whole": (
        "Llama4Text",
        dict(attention_chunk_size=None, floor_scale=3, attn_scale=0.5, rope_parameters=YARN),
    ),
    "llama-linear": ("Llama", dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0})),
    "llama-dynamic": ("Llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})),
    "llama-llama3": (
        "Llama",
        dict(rope_parameters=LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 32}),
    ),
    "llama-yarn": ("Llama", dict(rope_parameters=YARN)),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def case_of(module: Any, directory: Path, lengths: list[int], device: str = "cpu", **options: Any) -> Case:
    """Requests of these prompt lengths, some with equal beginnings, and the tokens that Transformers generates."""
    draw = random.Random(2)
    start = tuple(draw.randrange(1, VOCAB) for _ in range(lengths[0] // 2))
    requests, expected = [], {}
    for number, length in enumerate(lengths):
        shared, wanted = start[: length // 2], 6
        prompt = (*shared, *(draw.randrange(1, VOCAB) for _ in range(length - len(shared))))
        requests.append(Request(str(number), prompt, SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True)))
        tokens = module.generate(torch.tensor([prompt], device=device), max_new_tokens=wanted, do_sample=False)
        expected[str(number)] = tuple(tokens[0, len(prompt) :].tolist())
    return Case(load(directory, device=device, dtype="float32", **options), "auto", module, requests, expected=expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_give_the_tokens_of_transformers(tmp_path: Path, variant: str, device: str) -> None:
    family, differences = VARIANTS[variant]
    if differences.get("attention_chunk_size", 1) is None and tuple(
        map(int, version("transformers").split(".")[:2])
    ) < (5, 20):
        pytest.skip("this version of Transformers makes no cache for a Llama 4 without chunks")
    module = make(tmp_path, family, **differences).to(device)
    case = case_of(module, tmp_path, [60, 9, 40, 1, 57], device=device)
    assert isinstance(case.model, Decoder)
    tokens, plans = run(case, case.model, 4, 2, budget=24, times=2)
    assert tokens == case.expected | {f"again {name}": expected for name, expected in case.expected.items()}
    assert any(segment.start > 0 and segment.stop - segment.start > 1 for plan in plans for segment in plan.segments)


@pytest.mark.parametrize("base", ["language_model.model.", "model.language_model."])
def test_the_text_of_a_gemma_3_that_sees_has_the_tokens_of_transformers(tmp_path: Path, base: str) -> None:
    module = make(tmp_path, "Gemma3Text")
    case = case_of(module, tmp_path, [60, 9])
    weights = load_file(tmp_path / "model.safetensors")
    moved = {base + name.removeprefix("model."): weight for name, weight in weights.items() if name != "lm_head.weight"}
    save_file(moved | {"vision_tower.embeddings.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tokens, _ = run(case, load(tmp_path, device="cpu"), 4, 2, budget=24)
    assert tokens == case.expected


def test_longrope_beyond_its_first_length_gives_the_tokens_of_transformers_for_longer_prompts(tmp_path: Path) -> None:
    module = make(tmp_path, "Phi3", original_max_position_embeddings=32, rope_parameters=LONGROPE)
    case = case_of(module, tmp_path, [60, 33, 90], max_model_len=200)
    tokens, _ = run(case, case.model, 4, 2, budget=24)
    assert tokens == case.expected
    assert load(tmp_path, device="cpu").spec.max_model_len == 32


def test_dynamic_scaling_beyond_the_models_length_has_the_frequencies_of_the_longest_sequence(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    module = make(tmp_path, "Llama", max_position_embeddings=32, rope_parameters=scaling)
    assert load(tmp_path, device="cpu").spec.max_model_len == 32
    with pytest.raises(ValueError, match="max_model_len is 129; the model was made for 128 tokens at most"):
        load(tmp_path, device="cpu", max_model_len=129)
    # Transformers has the same frequencies for a whole prompt of that length.
    case = case_of(module, tmp_path, [99], max_model_len=100)
    first = {name: tokens[:1] for name, tokens in run(case, case.model, 4, 1, budget=24)[0].items()}
    whole = torch.tensor([[*case.requests[0].prompt, 0]])
    with torch.inference_mode():
        assert first == {"0": (int(module(whole).logits[0, 98].argmax()),)}
